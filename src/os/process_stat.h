/* What /proc/PID/stat says of one process. */
#ifndef EVEN_OS_PROCESS_STAT_H
#define EVEN_OS_PROCESS_STAT_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct even_process_stat {
  pid_t pid;
  char state; /* 'R', 'S' … 'Z' has ended and waits for its parent, 'X' is gone */
  pid_t group;
  pid_t session;
  int terminal;        /* that controls it, as the kernel numbers it; 0: none */
  uint64_t start_time; /* clock ticks since the host started: with the number it names the process for good */
  double cpu_seconds;  /* its own and that of the children it has waited for */
  double rss_bytes;    /* resident; 0 once it has ended */
  double
      minor_faults; /* pages that it, and the children it has waited for, touched for the first time, and were there */
  double major_faults; /* pages that were waited for from disk or swap */
  int threads;         /* of it; -1 where the text does not say */
  int cpu;             /* that it ran on last; -1 where the text does not say */
} even_process_stat;

/* Reads it for `pid`, 0 for the calling process. 0, or the errno: ENOENT and ESRCH where there is no such process,
 * EINVAL where the text is not as proc(5) says. Allocates nothing and records no error: also for the child of a fork.
 */
int even_process_stat_read(pid_t pid, even_process_stat *out);
/* The same from the file's text; whether it is as proc(5) says. */
bool even_process_stat_parse(const char *text, even_process_stat *out);
/* Whether it has ended: it waits for its parent, or is gone. */
bool even_process_stat_ended(const even_process_stat *stat);
/* Whether somebody typed it, or what started it, in a shell: it has a terminal, and is in none but a job of that
 * terminal's session (job control gives each job a group of its own), and not what the session began with. */
bool even_process_is_typed(void);

#endif
