/* What a rank's process takes of the host: CPU time, memory, and the time that its quota stopped it. */
#ifndef EVEN_DEVICE_USAGE_H
#define EVEN_DEVICE_USAGE_H

#include "device/pressure.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct even_rank_usage {
  uint64_t at_ns; /* 0: never looked */
  double cpu_seconds;
  double rss_bytes;
  double throttled_seconds; /* NAN: the rank is under no quota that can be read */
  even_pressure pressure;   /* of the rank's own process */
  /* of the living processes below it, already in cpu_seconds and rss_bytes */
  size_t workers;
  double workers_bytes;   /* private memory when it was last measured */
  double workers_rss;     /* the sum of their resident sets then */
  uint64_t workers_at_ns; /* when that was; 0: never */
} even_rank_usage;

/* Looks at process `pid` now: /proc/PID/stat and its cgroup's cpu.stat, v1 or v2; and at the living processes below it
 * (DataLoader workers). CPU time is that of all of them and of those that have ended; memory the resident set of `pid`
 * and what the others have for themselves alone, so that pages shared by a fork count once (their measuring is dear:
 * at once when their number or their resident sets change by an eighth, else every 30 s). `before` is what was seen the
 * last time, at_ns 0 for nothing. false: the process is gone, or has ended. What cannot be read is NAN. */
bool even_usage_look(pid_t pid, uint64_t now_ns, const even_rank_usage *before, even_rank_usage *out);

/* For tests: the contents of these files. */
/* seconds throttled in a cpu.stat of v1 (throttled_time, ns) or v2 (throttled_usec); NAN without */
double even_usage_parse_throttled(const char *cpu_stat);
/* Where the cpu.stat of a /proc/PID/cgroup lies, for candidate number `which` (0 …); false: no more candidates. */
bool even_usage_cgroup_path(const char *cgroup, int which, char *out, size_t bytes);

#endif
