/* Each cause has a limit below which it is no sign, and the seconds of a step that the rank loses by it beyond what the
 * other one does: those say which explains that it is behind. */
#include "monitor/straggler.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const double THROTTLING_MATTERS = 0.20;
static const double WAITING_MATTERS = 0.25; /* of the time that it could run */
static const double FAULTS_MATTER = 50;     /* a second */
static const double FAULT_SECONDS = 5e-3;   /* at most; some 0.1 ms from an SSD, 10 ms from a disk */
static const double SWAP_MATTERS = 16e6;    /* bytes */
static const double CLOCK_IS_LOW = 0.7;
static const double CLOCKS_DIFFER = 0.8; /* the slow rank's, as a part of the other's */
static const double GPU_TAKEN = 0.20;
static const double GPU_CLOCKS_DIFFER = 0.8;
static const double GPU_WORKS = 0.5; /* below, a GPU lowers its clock by itself */
static const double GPU_IDLES =
    0.4;                            /* a GPU that works for less of the time than this, and half as much as the other */
static const double STARVED = 0.6;  /* CPU seconds a busy second */
static const double EXPLAINS = 0.3; /* of what it is behind */
static const double ALIKE = 0.1;    /* the same: causes that differ by less explain as much as one another */

/* A slow rank, and the one it is compared with; NULL: none. */
typedef struct pair {
  const even_measure_rank *at;
  const even_measure_rank *other;
  double step_seconds;
  double shares; /* the slow rank's samples for each of the other's */
} pair;

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

/* ---- seconds ---- */

static double known(double value) {
  return isfinite(value) ? fmax(0, value) : 0;
}

/* Of so many seconds of which a part is lost: what they would be shorter by if no larger part were lost than the other
 * rank loses of its own. */
static double beyond(double seconds, double lost, double others) {
  double part = fmin(1, known(lost));
  double usual = fmin(0.99, known(others));
  return part > usual ? known(seconds) * (part - usual) / (1 - usual) : 0;
}

/* The part of its busy time that these seconds of each step are. */
static double part_of_busy(const even_measure_rank *rank, double seconds) {
  return rank->busy_seconds > 0 ? fmin(rank->busy_seconds, known(seconds)) / rank->busy_seconds : 0;
}

/* In which its threads ran, or could have: what it sleeps and waits for is not. All of its busy time where the kernel
 * does not say. */
static double runnable(const even_measure_rank *rank, double step_seconds) {
  double of_time = rank->cpu_cores / (1 - rank->run_wait_fraction);
  return isfinite(of_time) ? fmin(rank->busy_seconds, of_time * step_seconds) : rank->busy_seconds;
}

/* The part of the time in which its threads wanted to run that it worked in, and did not wait for others: what a thread
 * loses that wakes up meanwhile costs it nothing. */
static double at_work(const even_measure_rank *rank, double step_seconds) {
  double waited = rank->cpu_cores / (1 - rank->run_wait_fraction);
  double stopped = rank->cpu_cores + rank->throttled_fraction;
  double wanted = fmax(known(waited), known(stopped)) * step_seconds;
  return wanted > rank->busy_seconds ? rank->busy_seconds / wanted : 1;
}

/* ---- GPUs ---- */

static bool alike(const pair *of) {
  const even_measure_rank *other = of->other;
  return other != NULL && of->at->model != NULL && other->model != NULL && strcmp(of->at->model, other->model) == 0;
}

/* Its clock is held down by heat or power, or lower than that of the same model beside it. */
static bool gpu_clock(const pair *of) {
  const even_measure_rank *at = of->at;
  return at->gpu_slowed ||
         (alike(of) && at->gpu_busy >= GPU_WORKS && at->gpu_clock_mhz < GPU_CLOCKS_DIFFER * of->other->gpu_clock_mhz);
}

static double gpu_clock_seconds(const pair *of) {
  const even_measure_rank *at = of->at;
  double works = isfinite(at->gpu_busy) ? fmin(at->busy_seconds, at->gpu_busy * of->step_seconds) : at->busy_seconds;
  if (alike(of) && at->gpu_clock_mhz > 0 && of->other->gpu_clock_mhz > 0) {
    return works * fmax(0, 1 - at->gpu_clock_mhz / of->other->gpu_clock_mhz);
  }
  return of->other->gpu_slowed ? 0 : works; /* by how much, nobody knows */
}

static void say_gpu_clock(const pair *of, even_straggler *out) {
  const even_measure_rank *at = of->at;
  out->cause = EVEN_STRAGGLER_GPU_CLOCK;
  if (at->gpu_slowed) {
    (void)snprintf(out->words, sizeof out->words, ", whose GPU's clock is held down to %.0f MHz (%.0f degrees)",
                   at->gpu_clock_mhz, at->gpu_celsius);
  } else {
    (void)snprintf(out->words, sizeof out->words, ", whose GPU runs at %.0f MHz, and the other one at %.0f",
                   at->gpu_clock_mhz, of->other->gpu_clock_mhz);
  }
  (void)snprintf(out->advice, sizeof out->advice,
                 "look for heat, fans, its power supply or a limit (`nvidia-smi -q -d PERFORMANCE,CLOCK,POWER`)");
}

static bool gpu_taken(const pair *of) {
  return of->at->gpu_others >= GPU_TAKEN;
}

/* While it loads it does not ask for its GPU. */
static double gpu_taken_seconds(const pair *of) {
  double asks = of->at->busy_seconds - known(of->at->spans[EVEN_SPAN_DATA]);
  return beyond(asks, of->at->gpu_others, of->other->gpu_others);
}

static void say_gpu_taken(const pair *of, even_straggler *out) {
  out->cause = EVEN_STRAGGLER_GPU_TAKEN;
  (void)snprintf(out->words, sizeof out->words, ", whose GPU other processes use %.0f%% of the time",
                 100 * fmin(1, of->at->gpu_others));
  (void)snprintf(out->advice, sizeof out->advice,
                 "end them (`nvidia-smi pmon` names them), or give the run other GPUs");
}

/* Its GPU waits for it, and the other's does not: what is slow is its own code on the CPU. */
static bool gpu_idle(const pair *of) {
  return of->other != NULL && of->at->gpu_busy < GPU_IDLES && of->at->gpu_busy < 0.5 * of->other->gpu_busy;
}

static void say_gpu_idle(const pair *of, even_straggler *out) {
  out->cause = EVEN_STRAGGLER_GPU_IDLE;
  (void)snprintf(out->words, sizeof out->words, ", whose GPU works %.0f%% of the time (the other one %.0f%%)",
                 100 * of->at->gpu_busy, 100 * of->other->gpu_busy);
  (void)snprintf(
      out->advice, sizeof out->advice,
      "its CPU does not keep it busy: look at its loader and its cores, or use torch.compile or CUDA graphs");
}

/* ---- CPUs ---- */

static bool quota(const pair *of) {
  return of->at->throttled_fraction >= THROTTLING_MATTERS;
}

static double quota_seconds(const pair *of) {
  double stops = of->at->throttled_fraction * of->step_seconds;
  double others = of->other->throttled_fraction * of->step_seconds * at_work(of->other, of->step_seconds);
  return beyond(of->at->busy_seconds, part_of_busy(of->at, stops), part_of_busy(of->other, others));
}

static void say_quota(const pair *of, even_straggler *out) {
  out->cause = EVEN_STRAGGLER_QUOTA;
  (void)snprintf(out->words, sizeof out->words, ", stopped by its CPU quota %.0f%% of the time",
                 100 * fmin(1, of->at->throttled_fraction));
  (void)snprintf(out->advice, sizeof out->advice, "raise its CPU quota, where it is yours to set");
}

static bool memory(const pair *of) {
  return of->at->major_faults_per_second >= FAULTS_MATTER;
}

/* Of its busy time, waiting for pages: no longer than it neither ran nor could have. */
static double faults_part(const even_measure_rank *rank, double step_seconds) {
  double waits = known(rank->major_faults_per_second) * FAULT_SECONDS * step_seconds;
  double run = runnable(rank, step_seconds);
  bool counted = run < rank->busy_seconds || isfinite(rank->cpu_cores);
  return part_of_busy(rank, counted ? fmin(waits, rank->busy_seconds - run) : waits);
}

static double memory_seconds(const pair *of) {
  return beyond(of->at->busy_seconds, faults_part(of->at, of->step_seconds), faults_part(of->other, of->step_seconds));
}

static void say_memory(const pair *of, even_straggler *out) {
  const even_measure_rank *at = of->at;
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
}

/* A CPU rank that was busy far longer than it had CPU time; where the kernel does not count waiting. */
static bool starved(const even_measure_rank *at) {
  bool on_cpu = at->device != NULL && (strncmp(at->device, "cpu", 3) == 0 || strncmp(at->device, "numa:", 5) == 0);
  double busy = 1 - at->wait_fraction;
  return on_cpu && busy > 0.2 && at->cpu_cores < STARVED * busy;
}

static bool waits_for_cpu(const even_measure_rank *at) {
  return at->run_wait_fraction >= WAITING_MATTERS;
}

static bool cpu_taken(const pair *of) {
  return waits_for_cpu(of->at) || starved(of->at);
}

/* Of its busy time without CPU time, what it may have slept over its loading taken off. */
static double starved_part(const even_measure_rank *rank, double step_seconds) {
  double asleep = known(rank->spans[EVEN_SPAN_DATA]);
  return part_of_busy(rank, rank->busy_seconds - asleep - rank->cpu_cores * step_seconds);
}

static double cpu_taken_seconds(const pair *of) {
  if (waits_for_cpu(of->at)) {
    return beyond(runnable(of->at, of->step_seconds), of->at->run_wait_fraction,
                  of->other->run_wait_fraction * at_work(of->other, of->step_seconds));
  }
  return beyond(of->at->busy_seconds, starved_part(of->at, of->step_seconds),
                starved_part(of->other, of->step_seconds));
}

static void say_cpu_taken(const pair *of, even_straggler *out) {
  const even_measure_rank *at = of->at;
  out->cause = EVEN_STRAGGLER_CPU_TAKEN;
  if (waits_for_cpu(at)) {
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
}

static bool slow_clock(const pair *of) {
  double clock = of->at->clock_fraction;
  bool differs =
      of->other == NULL || !(of->other->clock_fraction > 0) || clock < CLOCKS_DIFFER * of->other->clock_fraction;
  return clock > 0 && clock < CLOCK_IS_LOW && differs;
}

/* A CPU that has little to do lowers its clock by itself: only what runs is slower by it. */
static double slow_clock_seconds(const pair *of) {
  const even_measure_rank *at = of->at;
  double runs = isfinite(at->cpu_cores) ? fmin(at->busy_seconds, at->cpu_cores * of->step_seconds) : at->busy_seconds;
  double usual = of->other->clock_fraction > 0 ? of->other->clock_fraction : 1;
  return runs * fmax(0, 1 - at->clock_fraction / usual);
}

static void say_slow_clock(const pair *of, even_straggler *out) {
  out->cause = EVEN_STRAGGLER_CLOCK;
  (void)snprintf(out->words, sizeof out->words, ", whose CPU runs at %.0f%% of its highest clock",
                 100 * of->at->clock_fraction);
  (void)snprintf(out->advice, sizeof out->advice,
                 "look for heat, a power limit or a saving governor (`cpupower frequency-info`)");
}

/* ---- data ---- */

static bool slow_data(const pair *of) {
  return of->other != NULL && of->at->spans[EVEN_SPAN_DATA] > 0;
}

static double slow_data_seconds(const pair *of) {
  return known(of->at->spans[EVEN_SPAN_DATA]) - of->shares * known(of->other->spans[EVEN_SPAN_DATA]);
}

static void say_slow_data(const pair *of, even_straggler *out) {
  out->cause = EVEN_STRAGGLER_DATA;
  (void)snprintf(out->words, sizeof out->words, ", whose data loading takes %.3g ms of each step",
                 1e3 * of->at->spans[EVEN_SPAN_DATA]);
  (void)snprintf(out->advice, sizeof out->advice,
                 "its loader is slow, not its device: raise num_workers, or make each sample cheaper to load");
}

/* ---- which ---- */

typedef struct cause {
  bool (*shown)(const pair *of);
  double (*seconds)(const pair *of); /* NULL: nobody can say; where nothing else explains it */
  void (*say)(const pair *of, even_straggler *out);
} cause;

/* The surest first. A quota's stops and memory on swap also look like a rank without a CPU. */
static const cause causes[] = {{gpu_clock, gpu_clock_seconds, say_gpu_clock},
                               {gpu_taken, gpu_taken_seconds, say_gpu_taken},
                               {quota, quota_seconds, say_quota},
                               {slow_data, slow_data_seconds, say_slow_data},
                               {memory, memory_seconds, say_memory},
                               {cpu_taken, cpu_taken_seconds, say_cpu_taken},
                               {slow_clock, slow_clock_seconds, say_slow_clock},
                               {gpu_idle, NULL, say_gpu_idle}};
enum { CAUSES = sizeof causes / sizeof causes[0] };

/* What its share takes it longer than it would take the other; all of it where that one is no faster, for then it is
 * slower than it was. */
static double behind_by(const pair *of) {
  double behind = of->at->busy_seconds - of->shares * of->other->busy_seconds;
  return behind > 0 ? behind : known(of->at->busy_seconds);
}

/* Of the causes that explain most of what it is behind the surest; CAUSES: none explains enough. */
static int most(const pair *of) {
  double explained[CAUSES] = {0};
  double behind = behind_by(of);
  double longest = 0;
  for (int i = 0; i < CAUSES; i++) {
    if (causes[i].seconds != NULL && causes[i].shown(of)) {
      explained[i] = fmin(behind, known(causes[i].seconds(of)));
      longest = fmax(longest, explained[i]);
    }
  }
  for (int i = 0; i < CAUSES && longest > 0 && longest >= EXPLAINS * behind; i++) {
    if (explained[i] > 0 && explained[i] >= longest - ALIKE * behind) {
      return i;
    }
  }
  return CAUSES;
}

void even_straggler_find(const even_measure *measure, int rank, int beside, even_straggler *out) {
  const even_measure_rank *at = &measure->rank[rank];
  const even_measure_rank *other = beside == rank ? NULL : &measure->rank[beside];
  double shares = other != NULL ? at->share_samples / other->share_samples : 1;
  const pair of = {at, other, measure->step_seconds, isfinite(shares) && shares > 0 ? shares : 1};
  int found = other != NULL ? most(&of) : CAUSES;
  memset(out, 0, sizeof *out);
  for (int i = 0; i < CAUSES && found == CAUSES; i++) {
    if ((other == NULL || causes[i].seconds == NULL) && causes[i].shown(&of)) {
      found = i;
    }
  }
  if (found < CAUSES) {
    causes[found].say(&of, out);
  }
}
