/* The made-up driver: contexts, memory, streams that run in threads of their own; and what tests control. */
#include "comm/fake_gpu.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int cuInit(unsigned int flags);
int cuDeviceGetCount(int *out);
int cuDeviceGet(int *out, int index);
int cuDevicePrimaryCtxRetain(void **out, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuCtxPushCurrent_v2(void *context);
int cuCtxPopCurrent_v2(void **out);
int cuMemAlloc_v2(unsigned long long *out, size_t bytes);
int cuMemFree_v2(unsigned long long memory);
int cuGetErrorString(int code, const char **out);
int cuEventCreate(void **out, unsigned int flags);
int cuEventDestroy_v2(void *event);
int cuEventRecord(void *event, void *stream);
int cuEventQuery(void *event);
int cuEventElapsedTime(float *milliseconds, void *from, void *to);
int cuStreamIsCapturing(void *stream, int *status);
int cuThreadExchangeStreamCaptureMode(int *mode);

typedef struct work {
  struct work *next;
  void (*run)(void *);
  void *argument;
} work;

struct fake_stream {
  int device;
  pthread_t thread;
  bool started, ending;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  work *first, *last;
  bool busy, held;
  atomic_bool captures;
};

/* A mark behind what is on a stream. */
typedef struct fake_event {
  atomic_int holders; /* its owner, and each record that is still on a stream */
  atomic_int pending;
  atomic_bool recorded;
  fake_stream *stream;
  _Atomic double at_ms;
} fake_event;

static struct {
  pthread_mutex_t lock;
  char function[64];
  int nth, result;
  bool here;
  pthread_t thread;
  char violation[256];
  char log[8192];
  fake_stream defaults[FAKE_DEVICES];
  int contexts[FAKE_DEVICES];
} fake = {.lock = PTHREAD_MUTEX_INITIALIZER};
static atomic_int live;
static atomic_bool hanging;
static _Thread_local int stack[16];
static _Thread_local int depth;

/* ---- control ---- */

void fake_gpu_reset(void) {
  (void)pthread_mutex_lock(&fake.lock);
  fake.function[0] = '\0';
  fake.violation[0] = '\0';
  fake.log[0] = '\0';
  (void)pthread_mutex_unlock(&fake.lock);
  atomic_store(&hanging, false);
  for (int rank = 0; rank < 16; rank++) {
    fake_gpu_async_error(rank, 0);
  }
  fake_gpu_polls(0);
  fake_gpu_say("");
}

static void fail_next(const char *function, int nth, int result, bool here) {
  (void)pthread_mutex_lock(&fake.lock);
  fake.here = here;
  fake.thread = pthread_self();
  (void)snprintf(fake.function, sizeof fake.function, "%s", function == NULL ? "" : function);
  fake.nth = nth;
  fake.result = result;
  (void)pthread_mutex_unlock(&fake.lock);
}

void fake_gpu_fail(const char *function, int nth, int result) {
  fail_next(function, nth, result, false);
}
void fake_gpu_fail_here(const char *function, int nth, int result) {
  fail_next(function, nth, result, true);
}

bool fake_fails(const char *function, int *result) {
  (void)pthread_mutex_lock(&fake.lock);
  bool meant = !fake.here || pthread_equal(fake.thread, pthread_self()) != 0;
  bool fails = meant && strcmp(function, fake.function) == 0 && --fake.nth == 0;
  *result = fake.result;
  (void)pthread_mutex_unlock(&fake.lock);
  return fails;
}

void fake_violate(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  (void)pthread_mutex_lock(&fake.lock);
  if (fake.violation[0] == '\0') {
    (void)vsnprintf(fake.violation, sizeof fake.violation, format, arguments);
  }
  (void)pthread_mutex_unlock(&fake.lock);
  va_end(arguments);
}

void fake_note(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  (void)pthread_mutex_lock(&fake.lock);
  size_t length = strlen(fake.log);
  (void)snprintf(fake.log + length, sizeof fake.log - length, "%s", length > 0 ? "; " : "");
  length = strlen(fake.log);
  (void)vsnprintf(fake.log + length, sizeof fake.log - length, format, arguments);
  (void)pthread_mutex_unlock(&fake.lock);
  va_end(arguments);
}

const char *fake_gpu_violation(void) {
  return fake.violation;
}
const char *fake_gpu_log(void) {
  return fake.log;
}
bool fake_gpu_was_called(const char *words) {
  (void)pthread_mutex_lock(&fake.lock);
  bool was = strstr(fake.log, words) != NULL;
  (void)pthread_mutex_unlock(&fake.lock);
  return was;
}
int fake_gpu_live(void) {
  return atomic_load(&live);
}
void fake_count(int change) {
  atomic_fetch_add(&live, change);
}
void fake_gpu_hang(bool hangs) {
  atomic_store(&hanging, hangs);
}
bool fake_is_hanging(void) {
  return atomic_load(&hanging);
}

/* ---- streams ---- */

static void *stream_main(void *argument) {
  fake_stream *stream = argument;
  (void)pthread_mutex_lock(&stream->lock);
  for (;;) {
    while ((stream->first == NULL || stream->held) && !stream->ending) {
      (void)pthread_cond_wait(&stream->changed, &stream->lock);
    }
    work *item = stream->first;
    if (item == NULL) {
      break;
    }
    stream->first = item->next;
    stream->busy = true;
    (void)pthread_mutex_unlock(&stream->lock);
    item->run(item->argument);
    free(item);
    (void)pthread_mutex_lock(&stream->lock);
    stream->busy = false;
    (void)pthread_cond_broadcast(&stream->changed);
  }
  (void)pthread_mutex_unlock(&stream->lock);
  return NULL;
}

static void stream_start(fake_stream *stream, int device) {
  stream->device = device;
  (void)pthread_mutex_init(&stream->lock, NULL);
  (void)pthread_cond_init(&stream->changed, NULL);
  stream->started = true;
  if (pthread_create(&stream->thread, NULL, stream_main, stream) != 0) {
    abort();
  }
}

static void stream_stop(fake_stream *stream) {
  (void)pthread_mutex_lock(&stream->lock);
  stream->ending = true;
  (void)pthread_cond_broadcast(&stream->changed);
  (void)pthread_mutex_unlock(&stream->lock);
  (void)pthread_join(stream->thread, NULL);
  (void)pthread_mutex_destroy(&stream->lock);
  (void)pthread_cond_destroy(&stream->changed);
  stream->started = stream->ending = false;
}

static fake_stream *default_stream(int device) {
  (void)pthread_mutex_lock(&fake.lock);
  fake_stream *stream = &fake.defaults[device < 0 ? 0 : device];
  if (!stream->started) {
    stream_start(stream, device < 0 ? 0 : device);
  }
  (void)pthread_mutex_unlock(&fake.lock);
  return stream;
}

fake_stream *fake_stream_of(void *handle) {
  return handle == NULL ? default_stream(fake_current_device()) : handle;
}
int fake_stream_device(const fake_stream *stream) {
  return stream->device;
}

void fake_stream_put(fake_stream *stream, void (*run)(void *), void *argument) {
  work *item = malloc(sizeof *item);
  if (item == NULL) {
    abort();
  }
  *item = (work){NULL, run, argument};
  (void)pthread_mutex_lock(&stream->lock);
  if (stream->first == NULL) {
    stream->first = item;
  } else {
    stream->last->next = item;
  }
  stream->last = item;
  (void)pthread_cond_broadcast(&stream->changed);
  (void)pthread_mutex_unlock(&stream->lock);
}

void *fake_gpu_stream(int device) {
  fake_stream *stream = calloc(1, sizeof *stream);
  if (stream == NULL) {
    abort();
  }
  stream_start(stream, device);
  return stream;
}

void fake_gpu_stream_free(void *stream) {
  stream_stop(stream);
  free(stream);
}

void fake_gpu_wait(void *handle, int device) {
  fake_stream *stream = handle == NULL ? default_stream(device) : handle;
  (void)pthread_mutex_lock(&stream->lock);
  while (stream->first != NULL || stream->busy) {
    (void)pthread_cond_wait(&stream->changed, &stream->lock);
  }
  (void)pthread_mutex_unlock(&stream->lock);
}

void fake_gpu_hold(void *handle, bool holds) {
  fake_stream *stream = handle;
  (void)pthread_mutex_lock(&stream->lock);
  stream->held = holds;
  (void)pthread_cond_broadcast(&stream->changed);
  (void)pthread_mutex_unlock(&stream->lock);
}

typedef struct fake_copy {
  void *to;
  const void *from;
  size_t bytes;
} fake_copy;

static void copy_now(void *argument) {
  fake_copy *copy = argument;
  memcpy(copy->to, copy->from, copy->bytes);
  free(copy);
}

void fake_gpu_copy(void *stream, void *to, const void *from, size_t bytes) {
  fake_copy *copy = malloc(sizeof *copy);
  if (copy == NULL) {
    abort();
  }
  *copy = (fake_copy){to, from, bytes};
  fake_stream_put(stream, copy_now, copy);
}

__attribute__((destructor)) static void stop_defaults(void) {
  for (int device = 0; device < FAKE_DEVICES; device++) {
    if (fake.defaults[device].started && !fake.defaults[device].busy) {
      stream_stop(&fake.defaults[device]);
    }
  }
}

/* ---- the driver ---- */

static int devices(void) {
  const char *text = getenv("EVENSTEP_FAKE_GPUS");
  int count = text == NULL ? 0 : atoi(text);
  return count > FAKE_DEVICES ? FAKE_DEVICES : count;
}

int fake_current_device(void) {
  return depth > 0 ? stack[depth - 1] : -1;
}

int cuInit(unsigned int flags) {
  int result = 0;
  return fake_fails("cuInit", &result) ? result : flags != 0 || devices() == 0 ? 100 : 0;
}
int cuDeviceGetCount(int *out) {
  int result = 0;
  *out = devices();
  return fake_fails("cuDeviceGetCount", &result) ? result : 0;
}
int cuDeviceGet(int *out, int index) {
  int result = 0;
  *out = 100 + index; /* a number of its own: nobody may take the index for it */
  return fake_fails("cuDeviceGet", &result) ? result : index < devices() ? 0 : 101;
}
int cuDevicePrimaryCtxRetain(void **out, int device) {
  int result = 0;
  if (fake_fails("cuDevicePrimaryCtxRetain", &result)) {
    return result;
  }
  if (device < 100 || device >= 100 + devices()) {
    fake_violate("a context of device %d, which cuDeviceGet never gave", device);
    return 101;
  }
  *out = &fake.contexts[device - 100];
  fake_count(1);
  return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
  (void)device;
  fake_count(-1);
  return 0;
}
int cuCtxPushCurrent_v2(void *context) {
  int result = 0;
  if (fake_fails("cuCtxPushCurrent_v2", &result)) {
    return result;
  }
  if (depth == 16) {
    fake_violate("contexts are pushed and not popped");
    return 201;
  }
  stack[depth++] = (int)((int *)context - fake.contexts);
  return 0;
}
int cuCtxPopCurrent_v2(void **out) {
  if (depth == 0) {
    fake_violate("a context is popped that was not pushed");
    return 201;
  }
  *out = &fake.contexts[stack[--depth]];
  return 0;
}
int cuMemAlloc_v2(unsigned long long *out, size_t bytes) {
  int result = 0;
  if (fake_fails("cuMemAlloc_v2", &result)) {
    return result;
  }
  if (depth == 0) {
    fake_violate("memory without a context");
    return 201;
  }
  void *memory = calloc(1, bytes);
  *out = (unsigned long long)(size_t)memory;
  fake_count(1);
  return memory == NULL ? 2 : 0;
}
int cuMemFree_v2(unsigned long long memory) {
  free((void *)(size_t)memory);
  fake_count(-1);
  return 0;
}
int cuGetErrorString(int code, const char **out) {
  *out = code == 100 ? "no CUDA-capable device is detected" : code == 2 ? "out of memory" : NULL;
  return *out == NULL ? 1 : 0;
}

/* ---- events ---- */

static void event_drop(fake_event *event) {
  if (atomic_fetch_sub(&event->holders, 1) == 1) {
    free(event);
  }
}

static void event_pass(void *argument) {
  fake_event *event = argument;
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  atomic_store(&event->at_ms, (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6);
  atomic_fetch_sub(&event->pending, 1);
  event_drop(event);
}

void *fake_gpu_mark(void *stream) {
  fake_event *mark = calloc(1, sizeof *mark);
  if (mark == NULL) {
    abort();
  }
  mark->stream = stream;
  atomic_init(&mark->holders, 2);
  atomic_init(&mark->pending, 1);
  fake_stream_put(stream, event_pass, mark);
  return mark;
}

bool fake_gpu_passed(const void *mark) {
  return atomic_load(&((const fake_event *)mark)->pending) == 0;
}

void fake_gpu_await(void *mark) {
  fake_stream *stream = ((fake_event *)mark)->stream;
  (void)pthread_mutex_lock(&stream->lock);
  while (!fake_gpu_passed(mark)) {
    (void)pthread_cond_wait(&stream->changed, &stream->lock);
  }
  (void)pthread_mutex_unlock(&stream->lock);
}

void fake_gpu_mark_free(void *mark) {
  event_drop(mark);
}

void fake_gpu_capture(void *stream, bool captures) {
  atomic_store(&((fake_stream *)stream)->captures, captures);
}

int cuEventCreate(void **out, unsigned int flags) {
  int result = 0;
  if (fake_fails("cuEventCreate", &result)) {
    return result;
  }
  if (depth == 0 || flags != 0) {
    fake_violate("an event without a context, or with flags %u", flags);
  }
  fake_event *event = calloc(1, sizeof *event);
  if (event == NULL) {
    abort();
  }
  atomic_init(&event->holders, 1);
  *out = event;
  fake_count(1);
  return 0;
}

int cuEventDestroy_v2(void *event) {
  event_drop(event);
  fake_count(-1);
  return 0;
}

int cuEventRecord(void *handle, void *on) {
  int result = 0;
  fake_event *event = handle;
  if (fake_fails("cuEventRecord", &result)) {
    return result;
  }
  event->stream = fake_stream_of(on);
  if (fake_stream_device(event->stream) != fake_current_device()) {
    fake_violate("an event of device %d on a stream of device %d", fake_current_device(),
                 fake_stream_device(event->stream));
  }
  atomic_fetch_add(&event->holders, 1);
  atomic_fetch_add(&event->pending, 1);
  atomic_store(&event->recorded, true);
  fake_stream_put(event->stream, event_pass, event);
  return 0;
}

int cuEventQuery(void *handle) {
  int result = 0;
  fake_event *event = handle;
  if (fake_fails("cuEventQuery", &result)) {
    return result;
  }
  if (!atomic_load(&event->recorded) || atomic_load(&event->stream->captures)) {
    fake_violate("an event is asked for that was not recorded, or was captured");
  }
  return atomic_load(&event->pending) > 0 ? 600 : 0;
}

int cuEventElapsedTime(float *milliseconds, void *from, void *to) {
  fake_event *first = from;
  fake_event *last = to;
  if (atomic_load(&first->pending) > 0 || atomic_load(&last->pending) > 0) {
    return 600;
  }
  *milliseconds = (float)(atomic_load(&last->at_ms) - atomic_load(&first->at_ms));
  return 0;
}

int cuStreamIsCapturing(void *handle, int *status) {
  *status = atomic_load(&fake_stream_of(handle)->captures) ? 1 : 0;
  return 0;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
  static _Thread_local int own; /* "global" */
  int before = own;
  own = *mode;
  *mode = before;
  return 0;
}
