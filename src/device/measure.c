/* The order of a profile's measurements. */
#include "device/measure.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "device/cpu/speed.h"
#include "device/torch/worker.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MOST_CORES_MEASURED = 16 };

/* Of the seconds for a device, the part for its memory. */
static const double MEMORY_PART = 0.3;

typedef struct course {
  const even_measure_params *params;
  even_measure_result *result;
  even_torch_worker worker;
  size_t done, steps;
} course;

static void tell(course *on, const char *words) {
  if (on->params->progress != NULL) {
    on->params->progress(on->params->context, on->done, on->steps, words);
  }
}

static bool single_core(const even_device *device) {
  return device->kind == EVEN_DEVICE_CPU && strncmp(device->name, "cpu:", 4) == 0 && strchr(device->name, '-') == NULL;
}

static bool alike(const even_device *a, const even_device *b) {
  return single_core(a) && single_core(b) && a->numa_node == b->numa_node && a->cpu_count == b->cpu_count &&
         a->efficiency == b->efficiency && fabs(a->cores - b->cores) < 1e-9;
}

/* Which device is measured for which. */
static size_t stand_ins_choose(const even_device_list *devices, even_measurement *items) {
  size_t cores = 0;
  size_t measured = 0;
  for (size_t i = 0; i < devices->count; i++) {
    cores += single_core(&devices->items[i]);
  }
  for (size_t i = 0; i < devices->count; i++) {
    items[i].like = i;
    for (size_t j = 0; j < i && cores > MOST_CORES_MEASURED && items[i].like == i; j++) {
      if (alike(&devices->items[j], &devices->items[i])) {
        items[i].like = j;
      }
    }
    measured += items[i].like == i;
  }
  return measured;
}

/* As many as a rank there would compute with. */
static size_t threads_of(const even_device *device) {
  return device->cores <= 1 ? 1 : (size_t)ceil(device->cores - 1e-9);
}

static void note_last_error(char *note, size_t size) {
  (void)snprintf(note, size, "%.250s", even_error_last()->what);
}

static void keep_best(double *best, double value) {
  *best = fmax(*best, value); /* a NaN on one side leaves the other */
}

static even_status memory_measure(course *on, const even_device *device, even_measurement *to) {
  even_cpu_bandwidth bandwidth;
  EVEN_TRY(even_cpu_bandwidth_measure(device, threads_of(device), on->params->cache_bytes,
                                      on->params->seconds * MEMORY_PART, &bandwidth));
  keep_best(&to->memory_bandwidth_gb_per_second, bandwidth.copy_gb_per_second);
  keep_best(&to->memory_read_gb_per_second, bandwidth.read_gb_per_second);
  keep_best(&to->cpu_fraction, bandwidth.cpu_fraction);
  return EVEN_OK;
}

/* Products by torch; false when torch could not. */
static bool torch_measure(course *on, const even_device *device, even_measurement *to) {
  even_torch_speed speed;
  double seconds = on->params->seconds * (device->kind == EVEN_DEVICE_CUDA ? 1 : 1 - MEMORY_PART);
  if (!on->worker.running ||
      even_torch_worker_measure(&on->worker, device, threads_of(device), seconds, &speed) != EVEN_OK) {
    return false;
  }
  keep_best(&to->matmul_fp32_gflops, speed.matmul_fp32_gflops);
  keep_best(&to->matmul_bf16_gflops, speed.matmul_bf16_gflops);
  keep_best(&to->memory_bandwidth_gb_per_second, speed.memory_bandwidth_gb_per_second);
  keep_best(&to->memory_read_gb_per_second, speed.memory_read_gb_per_second);
  return true;
}

static void cuda_measure(course *on, const even_device *device, even_measurement *to) {
  if (!on->worker.running) {
    (void)snprintf(to->note, sizeof to->note, "%s can only be measured with torch", device->name);
    return;
  }
  to->measured = torch_measure(on, device, to);
  if (!to->measured) {
    note_last_error(to->note, sizeof to->note);
  }
}

/* `in_c`: without torch. *torch_failed: it should have worked. */
static void cpu_measure(course *on, const even_device *device, bool in_c, even_measurement *to, bool *torch_failed) {
  if (memory_measure(on, device, to) != EVEN_OK) {
    note_last_error(to->note, sizeof to->note);
    return;
  }
  if (!in_c) {
    to->measured = torch_measure(on, device, to);
    *torch_failed = !to->measured;
    return;
  }
  double gflops = 0;
  to->measured =
      even_cpu_matmul_measure(device, threads_of(device), on->params->seconds * (1 - MEMORY_PART), &gflops) == EVEN_OK;
  if (to->measured) {
    keep_best(&to->matmul_fp32_gflops, gflops);
  } else {
    note_last_error(to->note, sizeof to->note);
  }
}

static void measured_tell(course *on, const even_device *device, const even_measurement *to) {
  char words[160];
  on->done++;
  if (to->measured) {
    (void)snprintf(words, sizeof words, "%s: fp32 %.3g GFLOP/s, memory %.3g GB/s", device->name, to->matmul_fp32_gflops,
                   to->memory_bandwidth_gb_per_second);
  } else {
    (void)snprintf(words, sizeof words, "%s: not measured", device->name);
  }
  tell(on, words);
}

/* One round over all devices; false when torch failed on a CPU. */
static bool round_measure(course *on, bool in_c) {
  const even_device_list *devices = on->params->devices;
  for (size_t i = 0; i < devices->count; i++) {
    even_measurement *to = &on->result->items[i];
    bool torch_failed = false;
    if (to->like != i) {
      continue;
    }
    if (devices->items[i].kind == EVEN_DEVICE_CUDA) {
      cuda_measure(on, &devices->items[i], to);
    } else {
      cpu_measure(on, &devices->items[i], in_c, to, &torch_failed);
    }
    if (torch_failed) {
      return false;
    }
    measured_tell(on, &devices->items[i], to);
  }
  return true;
}

static bool devices_measure(course *on, bool in_c) {
  for (int i = 0; i < on->params->rounds; i++) {
    if (!round_measure(on, in_c)) {
      return false;
    }
  }
  return true;
}

/* Forgets what torch said: scores must be of one measure. */
static void products_forget(course *on) {
  for (size_t i = 0; i < on->result->count; i++) {
    on->result->items[i].matmul_fp32_gflops = NAN;
    on->result->items[i].matmul_bf16_gflops = NAN;
    on->result->items[i].measured = false;
  }
}

static void torch_missing(course *on) {
  (void)snprintf(on->result->note, sizeof on->result->note,
                 "measured in C, without torch, in fp32 only (%.250s); `evenstep doctor` says more",
                 even_error_last()->what);
}

static void disk_measure(course *on) {
  even_measure_result *result = on->result;
  tell(on, "disk");
  if (even_disk_speed_measure(on->params->folder, on->params->disk_seconds, &result->disk) != EVEN_OK) {
    note_last_error(result->disk_note, sizeof result->disk_note);
  } else if (!result->disk.direct) {
    (void)snprintf(result->disk_note, sizeof result->disk_note,
                   "this filesystem cannot go past the page cache: reading is not measured");
  }
  on->done++;
}

/* The square root keeps a device that is strong in one only from looking as strong in both. */
static double strength(const even_measurement *of) {
  double memory = isnan(of->memory_bandwidth_gb_per_second) ? 1 : of->memory_bandwidth_gb_per_second;
  return sqrt(of->matmul_fp32_gflops * memory);
}

static even_status score(even_measure_result *result) {
  double best = 0;
  for (size_t i = 0; i < result->count; i++) {
    size_t like = result->items[i].like;
    if (like != i) {
      result->items[i] = result->items[like];
      result->items[i].like = like;
    }
    if (result->items[i].measured && strength(&result->items[i]) > best) {
      best = strength(&result->items[i]);
    }
  }
  if (!(best > 0)) {
    return even_fail(EVEN_ERR_DEVICE, "no device could be measured: %s",
                     result->count > 0 ? result->items[0].note : "there is none");
  }
  for (size_t i = 0; i < result->count; i++) {
    result->items[i].relative_score = result->items[i].measured ? strength(&result->items[i]) / best : NAN;
  }
  return EVEN_OK;
}

static void run(course *on) {
  even_status started = EVEN_ERR_NOT_FOUND;
  if (on->params->python != NULL) {
    started = even_torch_worker_start(on->params->python, &on->worker);
    if (started != EVEN_OK) {
      torch_missing(on);
    }
  }
  disk_measure(on); /* while torch is imported: that takes a core, not the disk */
  if (started == EVEN_OK) {
    tell(on, "waiting for torch");
    if (even_torch_worker_ready(&on->worker) != EVEN_OK) {
      torch_missing(on);
    }
  }
  bool in_c = !on->worker.running;
  if (!devices_measure(on, in_c)) {
    torch_missing(on);
    even_torch_worker_end(&on->worker);
    products_forget(on);
    in_c = true;
    on->done = 1;
    (void)devices_measure(on, in_c);
  }
  if (in_c) {
    (void)snprintf(on->result->kernels, sizeof on->result->kernels, "C");
  } else {
    (void)snprintf(on->result->kernels, sizeof on->result->kernels, "torch %s", on->worker.version);
  }
  even_torch_worker_end(&on->worker);
}

even_status even_measure(const even_measure_params *params, even_measure_result *out) {
  course on = {.params = params, .result = out};
  *out = (even_measure_result){.disk = {.write_mb_per_second = NAN, .read_mb_per_second = NAN}};
  EVEN_TRY(EVEN_NEW_ARRAY(&out->items, params->devices->count));
  out->count = params->devices->count;
  for (size_t i = 0; i < out->count; i++) {
    out->items[i] = (even_measurement){.matmul_fp32_gflops = NAN,
                                       .matmul_bf16_gflops = NAN,
                                       .memory_bandwidth_gb_per_second = NAN,
                                       .memory_read_gb_per_second = NAN,
                                       .cpu_fraction = NAN,
                                       .relative_score = NAN};
  }
  on.steps = 1 + stand_ins_choose(params->devices, out->items) * (size_t)params->rounds;
  run(&on);
  return score(out);
}

bool even_measurement_disturbed(const even_device *device, const even_measurement *of) {
  double fair = device->cores / (double)threads_of(device); /* a quota is no disturbance */
  return of->measured && of->cpu_fraction < 0.85 * fair;    /* false for a NaN */
}

void even_measure_result_free(even_measure_result *result) {
  even_free(result->items);
  result->items = NULL;
  result->count = 0;
}
