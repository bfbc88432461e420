/* Causes in the order in which one explains the next: a quota's stops and memory on swap also look like a rank without
 * a CPU. */
#include "monitor/straggler.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const double THROTTLING_MATTERS = 0.20;
static const double WAITING_MATTERS = 0.25; /* of the time that it could run */
static const double FAULTS_MATTER = 50;     /* a second: each some 0.1 ms from an SSD, 10 ms from a disk */
static const double SWAP_MATTERS = 16e6;    /* bytes */
static const double CLOCK_IS_LOW = 0.7;
static const double CLOCKS_DIFFER = 0.8; /* the slow rank's, as a part of the other's */
static const double GPU_TAKEN = 0.20;
static const double GPU_CLOCKS_DIFFER = 0.8;
static const double GPU_WORKS = 0.5; /* below, a GPU lowers its clock by itself */
static const double GPU_IDLES =
    0.4;                           /* a GPU that works for less of the time than this, and half as much as the other */
static const double STARVED = 0.6; /* CPU seconds a busy second */

const char *even_straggler_name(even_straggler_cause cause) {
  static const char *const names[] = {
#define EVEN_STRAGGLER_NAME(name, text, label) text,
      EVEN_STRAGGLER_LIST(EVEN_STRAGGLER_NAME)
#undef EVEN_STRAGGLER_NAME
  };
  return names[cause];
}

const char *even_straggler_label(const char *name) {
  static const struct {
    const char *name;
    const char *label;
  } labels[] = {
#define EVEN_STRAGGLER_LABEL(name, text, label) {text, label},
      EVEN_STRAGGLER_LIST(EVEN_STRAGGLER_LABEL)
#undef EVEN_STRAGGLER_LABEL
  };
  for (size_t i = 0; i < sizeof labels / sizeof labels[0]; i++) {
    if (strcmp(labels[i].name, name) == 0) {
      return labels[i].label;
    }
  }
  return labels[EVEN_STRAGGLER_UNKNOWN].label;
}

/* Its clock is held down by heat or power, or lower than that of the same model beside it. */
static bool gpu_clock(const even_measure_rank *at, const even_measure_rank *other, even_straggler *out) {
  bool alike = at != other && at->model != NULL && other->model != NULL && strcmp(at->model, other->model) == 0;
  bool lower = alike && at->gpu_busy >= GPU_WORKS && at->gpu_clock_mhz < GPU_CLOCKS_DIFFER * other->gpu_clock_mhz;
  if (!at->gpu_slowed && !lower) {
    return false;
  }
  out->cause = EVEN_STRAGGLER_GPU_CLOCK;
  if (at->gpu_slowed) {
    (void)snprintf(out->words, sizeof out->words, ", whose GPU's clock is held down to %.0f MHz (%.0f degrees)",
                   at->gpu_clock_mhz, at->gpu_celsius);
  } else {
    (void)snprintf(out->words, sizeof out->words, ", whose GPU runs at %.0f MHz, and the other one at %.0f",
                   at->gpu_clock_mhz, other->gpu_clock_mhz);
  }
  (void)snprintf(out->advice, sizeof out->advice,
                 "look for heat, fans, its power supply or a limit (`nvidia-smi -q -d PERFORMANCE,CLOCK,POWER`)");
  return true;
}

static bool gpu_taken(const even_measure_rank *at, even_straggler *out) {
  if (!(at->gpu_others >= GPU_TAKEN)) {
    return false;
  }
  out->cause = EVEN_STRAGGLER_GPU_TAKEN;
  (void)snprintf(out->words, sizeof out->words, ", whose GPU other processes use %.0f%% of the time",
                 100 * fmin(1, at->gpu_others));
  (void)snprintf(out->advice, sizeof out->advice,
                 "end them (`nvidia-smi pmon` names them), or give the run other GPUs");
  return true;
}

/* Its GPU waits for it, and the other's does not: what is slow is its own code on the CPU. */
static bool gpu_idle(const even_measure_rank *at, const even_measure_rank *other, even_straggler *out) {
  if (at == other || !(at->gpu_busy < GPU_IDLES) || !(at->gpu_busy < 0.5 * other->gpu_busy)) {
    return false;
  }
  out->cause = EVEN_STRAGGLER_GPU_IDLE;
  (void)snprintf(out->words, sizeof out->words, ", whose GPU works %.0f%% of the time (the other one %.0f%%)",
                 100 * at->gpu_busy, 100 * other->gpu_busy);
  (void)snprintf(
      out->advice, sizeof out->advice,
      "its CPU does not keep it busy: look at its loader and its cores, or use torch.compile or CUDA graphs");
  return true;
}

static bool quota(const even_measure_rank *at, even_straggler *out) {
  if (!(at->throttled_fraction >= THROTTLING_MATTERS)) {
    return false;
  }
  out->cause = EVEN_STRAGGLER_QUOTA;
  (void)snprintf(out->words, sizeof out->words, ", stopped by its CPU quota %.0f%% of the time",
                 100 * fmin(1, at->throttled_fraction));
  (void)snprintf(out->advice, sizeof out->advice, "raise its CPU quota, where it is yours to set");
  return true;
}

static bool memory(const even_measure_rank *at, even_straggler *out) {
  if (!(at->major_faults_per_second >= FAULTS_MATTER)) {
    return false;
  }
  bool swapped = at->swap_bytes >= SWAP_MATTERS;
  out->cause = swapped ? EVEN_STRAGGLER_SWAP : EVEN_STRAGGLER_PAGE_FAULTS;
  if (swapped) {
    (void)snprintf(out->words, sizeof out->words, ", whose memory is swapped (%.0f MB out, %.0f pages a second back)",
                   at->swap_bytes / 1e6, at->major_faults_per_second);
    (void)snprintf(out->advice, sizeof out->advice,
                   "its host has too little memory: a smaller batch or model, fewer "
                   "DataLoader workers, or fewer ranks there");
  } else {
    (void)snprintf(out->words, sizeof out->words, ", which waits for %.0f pages a second from disk",
                   at->major_faults_per_second);
    (void)snprintf(out->advice, sizeof out->advice,
                   "mapped files do not stay in memory: give the host more of it, or read the data into memory once");
  }
  return true;
}

/* A CPU rank that was busy far longer than it had CPU time; where the kernel does not count waiting. */
static bool starved(const even_measure_rank *at) {
  double busy = 1 - at->wait_fraction;
  return busy > 0.2 && at->cpu_cores < STARVED * busy;
}

static bool cpu_taken(const even_measure_rank *at, even_straggler *out) {
  bool on_cpu = at->device != NULL && strncmp(at->device, "cpu", 3) == 0;
  bool waits = at->run_wait_fraction >= WAITING_MATTERS;
  if (!waits && !(on_cpu && starved(at))) {
    return false;
  }
  out->cause = EVEN_STRAGGLER_CPU_TAKEN;
  if (waits) {
    (void)snprintf(out->words, sizeof out->words, ", which had no CPU %.0f%% of the time that it could have run",
                   100 * fmin(1, at->run_wait_fraction));
    (void)snprintf(out->advice, sizeof out->advice,
                   "other programs take its CPU, or it has more threads than CPUs: end them, give the run other cores, "
                   "or lower OMP_NUM_THREADS");
  } else {
    (void)snprintf(out->advice, sizeof out->advice,
                   "other programs take its CPU (it had %.0f%% of one while it was busy %.0f%% of the time): end them "
                   "or give the run other cores",
                   100 * at->cpu_cores, 100 * (1 - at->wait_fraction));
  }
  return true;
}

static bool slow_clock(const even_measure_rank *at, const even_measure_rank *other, even_straggler *out) {
  bool differs =
      at == other || !(other->clock_fraction > 0) || at->clock_fraction < CLOCKS_DIFFER * other->clock_fraction;
  if (!(at->clock_fraction > 0 && at->clock_fraction < CLOCK_IS_LOW && differs)) {
    return false;
  }
  out->cause = EVEN_STRAGGLER_CLOCK;
  (void)snprintf(out->words, sizeof out->words, ", whose CPU runs at %.0f%% of its highest clock",
                 100 * at->clock_fraction);
  (void)snprintf(out->advice, sizeof out->advice,
                 "look for heat, a power limit or a saving governor (`cpupower frequency-info`)");
  return true;
}

static bool slow_data(const even_measure_rank *at, const even_measure_rank *other, even_straggler *out) {
  double gap = at->busy_seconds - other->busy_seconds;
  double others = isfinite(other->spans[EVEN_SPAN_DATA]) ? other->spans[EVEN_SPAN_DATA] : 0;
  double behind = at->spans[EVEN_SPAN_DATA] - others;
  if (at == other || !(behind >= 0.5 * gap) || !(behind > 0)) {
    return false;
  }
  out->cause = EVEN_STRAGGLER_DATA;
  (void)snprintf(out->words, sizeof out->words, ", whose data loading takes %.3g ms of each step",
                 1e3 * at->spans[EVEN_SPAN_DATA]);
  (void)snprintf(out->advice, sizeof out->advice,
                 "its loader is slow, not its device: raise num_workers, or make each sample cheaper to load");
  return true;
}

void even_straggler_find(const even_measure *measure, int rank, int beside, even_straggler *out) {
  const even_measure_rank *at = &measure->rank[rank];
  const even_measure_rank *other = &measure->rank[beside];
  memset(out, 0, sizeof *out);
  (void)(gpu_clock(at, other, out) || gpu_taken(at, out) || quota(at, out) || memory(at, out) || cpu_taken(at, out) ||
         slow_clock(at, other, out) || slow_data(at, other, out) || gpu_idle(at, other, out));
}
