/* Time: one clock for all spans, the same for all processes of a host. */
#ifndef EVEN_OS_CLOCK_H
#define EVEN_OS_CLOCK_H

#include <evenstep/status.h>
#include <stdint.h>

/* CLOCK_MONOTONIC in nanoseconds. Never fails on Linux. Any thread. */
EVEN_PUBLIC uint64_t even_clock_ns(void); /* public as of telemetry.h */
/* The same clock, some milliseconds behind, for a fraction of the price. Any thread. */
uint64_t even_clock_coarse_ns(void);
/* CLOCK_BOOTTIME: as even_clock_ns, and goes on while the computer sleeps. Any thread. */
uint64_t even_clock_boot_ns(void);
/* Sleeps for that long, or less where a signal comes. */
void even_clock_sleep_ns(uint64_t ns);
/* CLOCK_REALTIME in nanoseconds since 1970 (UTC), for names and files. Any thread. */
uint64_t even_clock_wall_ns(void);
/* CPU time of the calling thread in nanoseconds. */
uint64_t even_clock_thread_cpu_ns(void);

#endif
