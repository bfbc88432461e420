/* Finding and killing what a job left: processes that carry its mark, wherever they went. */
#ifndef EVEN_OS_SWEEP_H
#define EVEN_OS_SWEEP_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

enum { EVEN_SWEEP_MARK = 96 };

typedef struct even_sweep {
  char mark[EVEN_SWEEP_MARK]; /* "NAME=value" as it stands in the environment they were started with; */
  bool begins;                /* or how that begins */
  const pid_t *sessions;      /* sessions that are theirs as well (a process may have cleared its environment) */
  size_t session_count;
} even_sweep;

/* Kills every living process (but the caller) that was started with the mark in its environment or belongs to one of
 * the sessions, again and again until none is left or `limit_ms` are over: after each round it waits for the ends of
 * those it killed. Returns how many were seen alive in the last round: 0 when all is clean. Allocates nothing, takes no
 * lock. */
size_t even_sweep_kill(const even_sweep *sweep, int limit_ms);
/* Sends each of them a signal (SIGSTOP, SIGCONT) and waits for nothing. Allocates nothing, takes no lock. */
void even_sweep_signal(const even_sweep *sweep, int signal);

#endif
