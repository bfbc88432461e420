/* NVML's counters and events of a job's GPUs ("NVML API Reference Guide", NVIDIA; Xid: "XID Errors"). */
#include "device/cuda/watch.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "device/cuda/nvml_calls.h"
#include "os/clock.h"
#include "os/futex.h"
#include "os/thread.h"

#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum { MOST_NEWS = 64, PROCESS_SAMPLES = 512, UUID_BYTES = 96 };
static const unsigned long long XID_EVENT = 0x8;
/* nvmlClocksEventReasons: of these alone it is slower than it was built for. A cap on power by software (0x4) is usual
 * under full load. */
static const unsigned long long HARDWARE_SLOWDOWN = 0x8;
static const unsigned long long HEAT_BY_SOFTWARE = 0x20;
static const unsigned long long HEAT_BY_HARDWARE = 0x40;
static const unsigned long long POWER_BRAKE = 0x80;

static const double usual_seconds = 1;
/* Between two looks whether it shall end. */
static const uint64_t slice_ns = 100000000u;
static const uint64_t patience_ns = 2000000000u;
/* Processes are looked at from so long before the first sample on. */
static const unsigned long long first_us = 2000000u;

typedef struct watched {
  char uuid[UUID_BYTES];
  even_nvml_device device; /* NULL: none */
  bool lost;
  unsigned long long seen_us; /* the newest of the samples of processes */
  even_gpu_sample sample;
} watched;

struct even_gpu_watch {
  char *library;
  even_nvml nvml; /* the thread's alone */
  even_nvml_process processes[PROCESS_SAMPLES];
  watched *gpus;
  size_t count;
  uint64_t every_ns;
  even_nvml_events events; /* NULL: this driver, or these GPUs, have none */
  pthread_t thread;
  _Atomic uint32_t stop;
  _Atomic uint32_t ended;
  pthread_mutex_t lock; /* of the samples and the news, which others read */
  even_gpu_news news[MOST_NEWS];
  size_t first_news;
  size_t news_count;
};

bool even_gpu_watch_every(double seconds, uint64_t *every_ns) {
  *every_ns = isfinite(seconds) ? (uint64_t)((seconds > 0 ? seconds : usual_seconds) * 1e9) : 0;
  return *every_ns > 0;
}

static const char *xid_words(uint64_t xid) {
  static const struct {
    uint64_t xid;
    const char *words;
  } known[] = {
      {13, "an error in the graphics engine (mostly the program's: an index out of range)"},
      {31, "a fault of the GPU's memory management (mostly the program's)"},
      {32, "a corrupted push buffer"},
      {43, "the GPU stopped processing (mostly the program's)"},
      {45, "work was ended after an earlier error"},
      {48, "a memory error of two bits"},
      {61, "a breakpoint of the internal controller"},
      {62, "the internal controller halted"},
      {63, "a row of memory is to be remapped"},
      {64, "a row of memory could not be remapped"},
      {74, "an error of NVLink"},
      {79, "the GPU has fallen off the bus"},
      {92, "many memory errors of one bit"},
      {94, "a contained memory error"},
      {95, "an uncontained memory error"},
      {119, "the GPU's system processor does not answer"},
      {120, "an error of the GPU's system processor"},
  };
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    if (known[i].xid == xid) {
      return known[i].words;
    }
  }
  return "see NVIDIA's list of Xid errors";
}

static void tell(even_gpu_watch *watch, size_t gpu, even_gpu_fault fault, uint64_t value, const char *words) {
  (void)pthread_mutex_lock(&watch->lock);
  if (watch->news_count < MOST_NEWS) {
    even_gpu_news *news = &watch->news[(watch->first_news + watch->news_count++) % MOST_NEWS];
    *news = (even_gpu_news){.gpu = gpu, .fault = fault, .value = value, .at_ns = even_clock_ns()};
    (void)snprintf(news->words, sizeof news->words, "%s", words);
  }
  (void)pthread_mutex_unlock(&watch->lock);
}

static void tell_xid(even_gpu_watch *watch, size_t gpu, uint64_t xid) {
  char words[120];
  (void)snprintf(words, sizeof words, "Xid %" PRIu64 ": %s", xid, xid_words(xid));
  tell(watch, gpu, EVEN_GPU_XID, xid, words);
}

/* What one call gave; `*lost` where it says that the GPU is gone. */
static bool gave(int code, bool *lost) {
  *lost = *lost || code == EVEN_NVML_GPU_IS_LOST || code == EVEN_NVML_RESET_REQUIRED;
  return code == 0;
}

static const char *slow_words(unsigned long long reasons) {
  if ((reasons & (HEAT_BY_SOFTWARE | HEAT_BY_HARDWARE)) != 0) {
    return "its clock is held down by heat";
  }
  if ((reasons & POWER_BRAKE) != 0) {
    return "its clock is held down by the power supply's brake";
  }
  return "its clock is held down by its hardware (heat, power or its slot)";
}

static void read_one(const even_nvml *from, even_nvml_device device, even_gpu_sample *out, unsigned long long *reasons,
                     bool *lost) {
  unsigned value = 0;
  unsigned long long count = 0;
  even_nvml_memory memory;
  even_nvml_utilization utilization;
  int (*why)(even_nvml_device, unsigned long long *) = from->reasons != NULL ? from->reasons : from->older_reasons;
  *out = (even_gpu_sample){.at_ns = even_clock_ns(),
                           .clock_mhz = NAN,
                           .temperature_celsius = NAN,
                           .power_watts = NAN,
                           .memory_used_bytes = NAN,
                           .utilization_percent = NAN,
                           .corrected = NAN,
                           .uncorrected = NAN};
  if (from->clock != NULL && gave(from->clock(device, EVEN_NVML_CLOCK_SM, &value), lost)) {
    out->clock_mhz = value;
  }
  if (from->temperature != NULL && gave(from->temperature(device, EVEN_NVML_SENSOR_GPU, &value), lost)) {
    out->temperature_celsius = value;
  }
  if (from->power != NULL && gave(from->power(device, &value), lost)) {
    out->power_watts = value / 1000.0;
  }
  if (from->memory != NULL && gave(from->memory(device, &memory), lost)) {
    out->memory_used_bytes = (double)memory.used;
  }
  if (from->utilization != NULL && gave(from->utilization(device, &utilization), lost)) {
    out->utilization_percent = utilization.gpu;
  }
  if (from->errors != NULL && gave(from->errors(device, EVEN_NVML_CORRECTED, EVEN_NVML_SINCE_DRIVER, &count), lost)) {
    out->corrected = (double)count;
  }
  if (from->errors != NULL && gave(from->errors(device, EVEN_NVML_UNCORRECTED, EVEN_NVML_SINCE_DRIVER, &count), lost)) {
    out->uncorrected = (double)count;
  }
  if (why != NULL && gave(why(device, reasons), lost)) {
    out->slowed = (*reasons & (HARDWARE_SLOWDOWN | HEAT_BY_SOFTWARE | HEAT_BY_HARDWARE | POWER_BRAKE)) != 0;
  }
}

/* The mean of each process's samples since those that were seen. */
static void read_users(const even_nvml *from, watched *gpu, even_nvml_process *room, even_gpu_sample *out) {
  unsigned count = PROCESS_SAMPLES;
  int taken[EVEN_GPU_USERS] = {0};
  out->user_count = -1;
  if (from->processes == NULL) {
    return;
  }
  unsigned long long now_us = even_clock_wall_ns() / 1000;
  gpu->seen_us = gpu->seen_us == 0 ? now_us - first_us : gpu->seen_us; /* the driver keeps those of minutes */
  int code = from->processes(gpu->device, room, &count, gpu->seen_us);
  if (code != EVEN_NVML_OK && code != EVEN_NVML_NOT_FOUND) { /* of the latter nobody computed */
    gpu->seen_us = now_us;                                   /* there may have been too many */
    return;
  }
  out->user_count = 0;
  for (unsigned i = 0; code == EVEN_NVML_OK && i < count && i < PROCESS_SAMPLES; i++) {
    int at = 0;
    if (room[i].microseconds <= gpu->seen_us || room[i].gpu > 100) {
      continue; /* old, or no number */
    }
    while (at < out->user_count && out->users[at].pid != (long)room[i].pid) {
      at++;
    }
    if (at == EVEN_GPU_USERS) {
      continue;
    }
    if (at == out->user_count) {
      out->users[out->user_count++] = (even_gpu_user){.pid = (long)room[i].pid};
    }
    out->users[at].percent += (room[i].gpu - out->users[at].percent) / ++taken[at];
  }
  for (unsigned i = 0; code == EVEN_NVML_OK && i < count && i < PROCESS_SAMPLES; i++) {
    gpu->seen_us = room[i].microseconds > gpu->seen_us ? room[i].microseconds : gpu->seen_us;
  }
}

static void compare(even_gpu_watch *watch, size_t gpu, const even_gpu_sample *now, unsigned long long reasons) {
  const even_gpu_sample *before = &watch->gpus[gpu].sample; /* this thread alone writes it */
  char words[120];
  if (before->at_ns != 0 && now->uncorrected > before->uncorrected) {
    double more = now->uncorrected - before->uncorrected;
    (void)snprintf(words, sizeof words, "%.0f memory error%s that ECC could not correct", more, more > 1 ? "s" : "");
    tell(watch, gpu, EVEN_GPU_ECC, (uint64_t)more, words);
  }
  if (now->slowed != before->slowed) {
    (void)snprintf(words, sizeof words, "%s (%.0f MHz, %.0f degrees, %.0f W)",
                   now->slowed ? slow_words(reasons) : "its clock is held down no more", now->clock_mhz,
                   now->temperature_celsius, now->power_watts);
    tell(watch, gpu, EVEN_GPU_SLOW, now->slowed ? 1 : 0, words);
  }
}

static void sample_all(even_gpu_watch *watch) {
  for (size_t i = 0; i < watch->count; i++) {
    watched *gpu = &watch->gpus[i];
    even_gpu_sample now;
    unsigned long long reasons = 0;
    bool lost = false;
    if (gpu->device == NULL || gpu->lost) {
      continue;
    }
    read_one(&watch->nvml, gpu->device, &now, &reasons, &lost);
    read_users(&watch->nvml, gpu, watch->processes, &now);
    if (lost) {
      gpu->lost = true; /* each further call might take minutes */
      tell(watch, i, EVEN_GPU_LOST, 0, "the GPU does not answer any more: it has fallen off the bus, or needs a reset");
      continue;
    }
    compare(watch, i, &now, reasons);
    (void)pthread_mutex_lock(&watch->lock);
    gpu->sample = now;
    (void)pthread_mutex_unlock(&watch->lock);
  }
}

static bool stops(even_gpu_watch *watch) {
  return atomic_load(&watch->stop) != 0;
}

/* Until the next sample is due; Xid events as they come. */
static void wait_until(even_gpu_watch *watch, uint64_t due_ns) {
  for (uint64_t now = even_clock_ns(); now < due_ns && !stops(watch); now = even_clock_ns()) {
    uint64_t left = due_ns - now < slice_ns ? due_ns - now : slice_ns;
    even_nvml_event event = {.device = NULL};
    if (watch->events == NULL) {
      even_futex_wait(&watch->stop, 0, left);
      continue;
    }
    int code = watch->nvml.events_wait(watch->events, &event, (unsigned)(left / 1000000u) + 1);
    if (code != EVEN_NVML_OK && code != EVEN_NVML_TIMED_OUT) { /* a lost GPU: it did not wait */
      even_futex_wait(&watch->stop, 0, left);
    }
    if (code != EVEN_NVML_OK || event.type != XID_EVENT) {
      continue;
    }
    for (size_t i = 0; i < watch->count; i++) {
      if (watch->gpus[i].device == event.device) {
        tell_xid(watch, i, event.data);
      }
    }
  }
}

/* Xid events of all GPUs; none where one call of it is refused. */
static void listen(even_gpu_watch *watch) {
  const even_nvml *from = &watch->nvml;
  bool any = false;
  if (from->events_make == NULL || from->events_register == NULL || from->events_wait == NULL ||
      from->events_free == NULL || from->events_make(&watch->events) != 0) {
    watch->events = NULL;
    return;
  }
  for (size_t i = 0; i < watch->count; i++) {
    if (watch->gpus[i].device != NULL) {
      any = from->events_register(watch->gpus[i].device, XID_EVENT, watch->events) == 0 || any;
    }
  }
  if (!any) {
    (void)from->events_free(watch->events);
    watch->events = NULL;
  }
}

static bool find(even_gpu_watch *watch) {
  bool any = false;
  for (size_t i = 0; i < watch->count; i++) {
    watched *gpu = &watch->gpus[i];
    if (gpu->uuid[0] != '\0' && watch->nvml.by_uuid(gpu->uuid, &gpu->device) != 0) {
      gpu->device = NULL;
    }
    any = any || gpu->device != NULL;
  }
  return any;
}

/* Whether there is something to watch; NVML is open then. */
static bool begin(even_gpu_watch *watch) {
  if (even_nvml_open(watch->library, &watch->nvml) != EVEN_OK) {
    even_error_clear();
    return false;
  }
  if (watch->nvml.by_uuid == NULL || watch->nvml.init() != 0) {
    return false;
  }
  if (!find(watch)) {
    (void)watch->nvml.shutdown();
    return false;
  }
  listen(watch);
  return true;
}

static void watch_all(even_gpu_watch *watch) {
  while (!stops(watch)) {
    uint64_t due = even_clock_ns() + watch->every_ns;
    sample_all(watch);
    wait_until(watch, due);
  }
  if (watch->events != NULL) {
    (void)watch->nvml.events_free(watch->events);
  }
  (void)watch->nvml.shutdown();
}

static void *body(void *argument) {
  even_gpu_watch *watch = argument;
  if (begin(watch)) {
    watch_all(watch);
  }
  atomic_store(&watch->ended, 1u);
  even_futex_wake_all(&watch->ended);
  return NULL;
}

static void release(even_gpu_watch *watch) {
  even_nvml_close(&watch->nvml);
  (void)pthread_mutex_destroy(&watch->lock);
  even_free(watch->library);
  even_free(watch->gpus);
  even_free(watch);
}

/* The thread may still begin when whoever asked has let go of the names. */
static even_status keep_names(even_gpu_watch *watch, const char *library, const char *const *uuids) {
  EVEN_TRY(even_duplicate(library, &watch->library));
  EVEN_TRY(EVEN_NEW_ARRAY(&watch->gpus, watch->count));
  for (size_t i = 0; i < watch->count; i++) {
    (void)snprintf(watch->gpus[i].uuid, sizeof watch->gpus[i].uuid, "%s", uuids[i] == NULL ? "" : uuids[i]);
  }
  return EVEN_OK;
}

even_status even_gpu_watch_open(const even_device_source *source, const char *const *uuids, size_t count,
                                uint64_t every_ns, even_gpu_watch **out) {
  even_gpu_watch *watch = NULL;
  bool any = false;
  *out = NULL;
  for (size_t i = 0; i < count; i++) {
    any = any || (uuids[i] != NULL && uuids[i][0] != '\0');
  }
  if (!any) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW(&watch));
  (void)pthread_mutex_init(&watch->lock, NULL);
  watch->count = count;
  watch->every_ns = every_ns;
  even_status status = keep_names(watch, source->nvml_library, uuids);
  status = status == EVEN_OK ? even_thread_start(body, watch, &watch->thread) : status;
  if (status != EVEN_OK) {
    release(watch);
    return status;
  }
  *out = watch;
  return EVEN_OK;
}

bool even_gpu_watch_is_over(even_gpu_watch *watch) {
  return watch != NULL && atomic_load(&watch->ended) != 0;
}

void even_gpu_watch_look(even_gpu_watch *watch, size_t gpu, even_gpu_sample *out) {
  *out = (even_gpu_sample){.at_ns = 0};
  if (watch != NULL && gpu < watch->count) {
    (void)pthread_mutex_lock(&watch->lock);
    *out = watch->gpus[gpu].sample;
    (void)pthread_mutex_unlock(&watch->lock);
  }
}

bool even_gpu_watch_news(even_gpu_watch *watch, even_gpu_news *out) {
  bool any = false;
  if (watch != NULL) {
    (void)pthread_mutex_lock(&watch->lock);
    any = watch->news_count > 0;
    if (any) {
      *out = watch->news[watch->first_news];
      watch->first_news = (watch->first_news + 1) % MOST_NEWS;
      watch->news_count--;
    }
    (void)pthread_mutex_unlock(&watch->lock);
  }
  return any;
}

void even_gpu_watch_close(even_gpu_watch *watch) {
  if (watch == NULL) {
    return;
  }
  uint64_t until = even_clock_ns() + patience_ns;
  atomic_store(&watch->stop, 1u);
  even_futex_wake_all(&watch->stop);
  for (uint64_t now = even_clock_ns(); atomic_load(&watch->ended) == 0 && now < until; now = even_clock_ns()) {
    even_futex_wait(&watch->ended, 0, until - now);
  }
  if (atomic_load(&watch->ended) != 0) { /* else NVML holds the thread: both are left where they are */
    even_thread_join(watch->thread);
    release(watch);
  }
}
