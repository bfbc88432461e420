/* The kernel's clocks, and so much. */
#include "support/clock_ahead.h"

#include "os/calls.h"

#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>

static uint64_t ahead_ns;

static int ahead(clockid_t clock, struct timespec *out) {
  int result = even_os_real.clock_gettime(clock, out);
  uint64_t ns = (uint64_t)out->tv_nsec + ahead_ns;
  out->tv_sec += (time_t)(ns / 1000000000u);
  out->tv_nsec = (long)(ns % 1000000000u);
  return result;
}

void clock_ahead_set(uint64_t ns) {
  ahead_ns = ns;
  even_os.clock_gettime = ahead;
}

void clock_ahead_add(uint64_t ns) {
  clock_ahead_set(ahead_ns + ns);
}

/* ---- one of them alone ---- */

static _Atomic uint64_t *slept_ns; /* seen by children, too */

static int of_one_that_slept(clockid_t clock, struct timespec *out) {
  int result = even_os_real.clock_gettime(clock, out);
  if (clock == CLOCK_BOOTTIME) {
    uint64_t ns = (uint64_t)out->tv_nsec + atomic_load(slept_ns);
    out->tv_sec += (time_t)(ns / 1000000000u);
    out->tv_nsec = (long)(ns % 1000000000u);
  }
  return result;
}

bool clock_slept_begin(void) {
  void *page = mmap(NULL, sizeof *slept_ns, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) {
    return false;
  }
  slept_ns = page; /* zero */
  even_os.clock_gettime = of_one_that_slept;
  return true;
}

void clock_slept_add(uint64_t ns) {
  (void)atomic_fetch_add(slept_ns, ns);
}

void clock_slept_end(void) {
  even_os.clock_gettime = even_os_real.clock_gettime;
  (void)munmap((void *)slept_ns, sizeof *slept_ns);
}
