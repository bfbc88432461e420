/* What a rank's process takes of the host: CPU time, memory, and the time that its quota stopped it. */
#ifndef EVEN_MONITOR_USAGE_H
#define EVEN_MONITOR_USAGE_H

#include "monitor/state.h"

/* Looks at process `pid` now: /proc/PID/stat (CPU time with ended children, resident pages) and its cgroup's cpu.stat,
 * v1 or v2. false: the process is gone, or has ended. What cannot be read is NAN. */
bool even_usage_look(pid_t pid, uint64_t now_ns, even_rank_usage *out);

/* For tests: the contents of these files. */
bool even_usage_parse_stat(const char *stat, long ticks_per_second, long page_bytes, even_rank_usage *out);
/* seconds throttled in a cpu.stat of v1 (throttled_time, ns) or v2 (throttled_usec); NAN without */
double even_usage_parse_throttled(const char *cpu_stat);
/* Where the cpu.stat of a /proc/PID/cgroup lies, for candidate number `which` (0 …); false: no more candidates. */
bool even_usage_cgroup_path(const char *cgroup, int which, char *out, size_t bytes);

#endif
