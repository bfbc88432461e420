/* NVTX through its C functions: nvtxRangePushA, nvtxRangePop, nvtxRangeStartA, nvtxRangeEnd. */
#include "os/ranges.h"

#include "base/fail.h"
#include "os/library.h"

#include <pthread.h>
#include <string.h>

typedef int push_function(const char *name);
typedef int pop_function(void);
typedef uint64_t start_function(const char *name);
typedef void end_function(uint64_t range);

static struct {
  even_library library;
  push_function *push;
  pop_function *pop;
  start_function *start;
  end_function *end;
} nvtx;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
_Atomic bool even_ranges_open_flag;

static even_status take(const char *name) {
  even_library library;
  EVEN_TRY(even_library_open(name, &library));
  void *push = even_library_symbol(&library, "nvtxRangePushA");
  void *pop = even_library_symbol(&library, "nvtxRangePop");
  void *start = even_library_symbol(&library, "nvtxRangeStartA");
  void *end = even_library_symbol(&library, "nvtxRangeEnd");
  if (push == NULL || pop == NULL || start == NULL || end == NULL) {
    even_library_close(&library);
    return even_fail(EVEN_ERR_NOT_FOUND, "library %s lacks functions of NVTX (nvtxRangePushA …)", name);
  }
  memcpy(&nvtx.push, &push, sizeof push); /* ISO C knows no cast between the two kinds of pointers */
  memcpy(&nvtx.pop, &pop, sizeof pop);
  memcpy(&nvtx.start, &start, sizeof start);
  memcpy(&nvtx.end, &end, sizeof end);
  nvtx.library = library;
  return EVEN_OK;
}

static even_status take_any(void) {
  static const char *const names[] = {"libnvToolsExt.so.1", "libnvToolsExt.so", "libnvtx3interop.so.1",
                                      "libnvtx3interop.so"};
  even_status status = EVEN_ERR_NOT_FOUND;
  for (size_t i = 0; status != EVEN_OK && i < sizeof names / sizeof names[0]; i++) {
    status = take(names[i]);
  }
  if (status != EVEN_OK) {
    status = even_fail(EVEN_ERR_NOT_FOUND, "no NVTX library (libnvToolsExt.so.1, libnvtx3interop.so) is found");
  }
  return status;
}

even_status even_ranges_open(const char *library) {
  (void)pthread_mutex_lock(&lock);
  even_status status = even_ranges_on() ? EVEN_OK : library != NULL ? take(library) : take_any();
  if (status == EVEN_OK) {
    atomic_store_explicit(&even_ranges_open_flag, true, memory_order_release);
  } else {
    (void)even_error_fix(
        "pip install nvidia-nvtx-cu12, or set EVENSTEP_NVTX_LIBRARY to the library; or unset EVENSTEP_NVTX");
  }
  (void)pthread_mutex_unlock(&lock);
  return status;
}

void even_ranges_close(void) {
  (void)pthread_mutex_lock(&lock);
  atomic_store_explicit(&even_ranges_open_flag, false, memory_order_release);
  even_library_close(&nvtx.library);
  (void)pthread_mutex_unlock(&lock);
}

void even_range_push(const char *name) {
  (void)nvtx.push(name);
}

void even_range_pop(void) {
  (void)nvtx.pop();
}

uint64_t even_range_start(const char *name) {
  return nvtx.start(name);
}

void even_range_end(uint64_t range) {
  nvtx.end(range);
}
