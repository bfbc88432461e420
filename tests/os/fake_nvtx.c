/* The functions of NVTX that we use. */
#include "os/fake_nvtx.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { MOST_CALLS = 256, NAME_BYTES = 96 };

int nvtxRangePushA(const char *name);
int nvtxRangePop(void);
uint64_t nvtxRangeStartA(const char *name);
void nvtxRangeEnd(uint64_t range);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char calls[MOST_CALLS][NAME_BYTES];
static size_t count;
static char open_ranges[MOST_CALLS][NAME_BYTES];
static uint64_t ranges;
static int pushed; /* on all threads */
static int started;
static const char *violation;
static _Thread_local int depth;

static void note(char what, const char *name) {
  if (count < MOST_CALLS) {
    (void)snprintf(calls[count++], NAME_BYTES, "%c%.90s", what, name);
  }
}

static void complain(const char *what) {
  violation = violation == NULL ? what : violation;
}

int nvtxRangePushA(const char *name) {
  (void)pthread_mutex_lock(&lock);
  note('+', name);
  pushed++;
  (void)pthread_mutex_unlock(&lock);
  return depth++;
}

int nvtxRangePop(void) {
  (void)pthread_mutex_lock(&lock);
  note('-', "");
  pushed--;
  if (depth == 0) {
    complain("a pop on a thread that has pushed nothing");
  }
  (void)pthread_mutex_unlock(&lock);
  return depth > 0 ? --depth : -1;
}

uint64_t nvtxRangeStartA(const char *name) {
  (void)pthread_mutex_lock(&lock);
  note('<', name);
  started++;
  uint64_t range = ++ranges;
  (void)snprintf(open_ranges[range % MOST_CALLS], NAME_BYTES, "%.90s", name);
  (void)pthread_mutex_unlock(&lock);
  return range;
}

void nvtxRangeEnd(uint64_t range) {
  (void)pthread_mutex_lock(&lock);
  char *name = open_ranges[range % MOST_CALLS];
  note('>', name);
  started--;
  if (range == 0 || range > ranges || name[0] == '\0') {
    complain("the end of a range that is not open");
  }
  name[0] = '\0';
  (void)pthread_mutex_unlock(&lock);
}

size_t fake_nvtx_calls(void) {
  return count;
}

const char *fake_nvtx_call(size_t number) {
  return number < count ? calls[number] : "";
}

const char *fake_nvtx_violation(void) {
  if (violation == NULL && (pushed != 0 || started != 0)) {
    return "a range is still open";
  }
  return violation;
}

void fake_nvtx_reset(void) {
  count = 0;
  pushed = started = 0;
  violation = NULL;
  memset(open_ranges, 0, sizeof open_ranges);
}
