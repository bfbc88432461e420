/* The kernel's clocks, and so much. */
#include "support/clock_ahead.h"

#include "os/calls.h"

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
