/* Clocks in nanoseconds. */
#include "os/clock.h"

#include "os/calls.h"

static uint64_t read_clock(clockid_t clock) {
  struct timespec now = {0, 0};
  (void)even_os.clock_gettime(clock, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t even_clock_ns(void) {
  return read_clock(CLOCK_MONOTONIC);
}
uint64_t even_clock_coarse_ns(void) {
  return read_clock(CLOCK_MONOTONIC_COARSE);
}
uint64_t even_clock_boot_ns(void) {
  return read_clock(CLOCK_BOOTTIME);
}
void even_clock_sleep_ns(uint64_t ns) {
  const struct timespec time = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
  (void)even_os.nanosleep(&time);
}
uint64_t even_clock_wall_ns(void) {
  return read_clock(CLOCK_REALTIME);
}
uint64_t even_clock_thread_cpu_ns(void) {
  return read_clock(CLOCK_THREAD_CPUTIME_ID);
}
