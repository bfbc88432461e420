/* What keeps a process from its work on this host: others on its CPU, memory that is not there, a slow clock. */
#ifndef EVEN_DEVICE_PRESSURE_H
#define EVEN_DEVICE_PRESSURE_H

#include "os/process_stat.h"

/* NAN: cannot be read here. */
typedef struct even_pressure {
  double wait_seconds; /* that its threads could have run and had no CPU, summed up; a CPU quota's stops are in it */
  double major_faults; /* pages that were waited for from disk or swap, ever */
  double swap_bytes;   /* of its memory, out on swap now */
  double clock;        /* of the CPU that it ran on last: now, as a part of the highest */
} even_pressure;

/* Looks at process `pid`, whose stat was just read: /proc/PID/task/TID/schedstat, /proc/PID/status and cpufreq. */
void even_pressure_look(pid_t pid, const even_process_stat *stat, even_pressure *out);

/* For tests: the contents of these files, and a folder in the place of /sys/devices/system/cpu. */
double even_pressure_parse_wait(const char *schedstat);
double even_pressure_parse_swap(const char *status);
double even_pressure_clock(const char *folder, int cpu);

#endif
