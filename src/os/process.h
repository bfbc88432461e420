/* Starting, signalling and reaping child processes. */
#ifndef EVEN_OS_PROCESS_H
#define EVEN_OS_PROCESS_H

#include "base/text.h"

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct even_process_params {
  char *const *arguments;   /* argv, NULL-terminated; [0] is looked for on PATH unless it has a '/' */
  char *const *environment; /* all of it, NULL-terminated */
  const int32_t *cpus;      /* to pin to; cpu_count 0: not pinned */
  size_t cpu_count;
  char *const *join;  /* cgroup.procs files that the child joins before it runs, NULL-terminated; may be NULL */
  const int *inherit; /* descriptors that stay open in the child under their numbers */
  size_t inherit_count;
  int input;            /* becomes its standard input; 0: the parent's, */
  bool no_input;        /* or /dev/null */
  uint64_t descriptors; /* its soft limit on open files; 0: the parent's */
  int ignored;          /* a signal that it begins with ignored; 0: none */
  bool outlives;        /* it is not killed when the calling thread ends: somebody else sees to that */
} even_process_params;

typedef struct even_process {
  pid_t pid;
  int output; /* read end of its standard output: non-blocking, close-on-exec; the caller closes it */
  int error;  /* of its standard error */
} even_process;

/* Starts a process in a session of its own (standard input is the parent's, but /dev/null for a terminal's), with
 * default signal handlers and an empty signal mask. It is killed when the calling thread ends, unless it `outlives`
 * that. What goes wrong in the child before its program runs (pinning, joining, exec) is reported here. Errors:
 * EVEN_ERR_NOT_FOUND (the program), EVEN_ERR_PERMISSION, EVEN_ERR_SYSTEM. Calls from several threads must not overlap.
 */
even_status even_process_start(const even_process_params *params, even_process *out) EVEN_MUST_USE;

typedef struct even_process_end {
  pid_t pid;
  bool stopped;               /* not ended: it stands still (SIGSTOP, SIGTSTP) */
  bool continued;             /* not ended: it stood still, and goes on (SIGCONT) */
  int signal;                 /* that ended (or stopped) it, 0: it exited */
  int code;                   /* with which it exited */
  uint64_t peak_memory_bytes; /* its largest resident set */
} even_process_end;

/* The next child of this process that ended, was stopped or goes on, without waiting; *any false: none. Ended children
 * are reaped. */
even_status even_process_reap(even_process_end *out, bool *any) EVEN_MUST_USE;
/* Waits until child `pid` has ended and reaps it; fine when it is no child any more. */
void even_process_wait(pid_t pid);
/* The same for at most `limit_ns` (one that the kernel holds may never end): whether it has ended. It need not be a
 * child: what an agent that was killed had started are its supervisor's. */
bool even_process_wait_within(pid_t pid, uint64_t limit_ns) EVEN_MUST_USE;
/* The first; the signal that ended it, 0: none, or it is no child any more. */
int even_process_end_signal(pid_t pid);
/* Waits until a process has ended that need not be a child, at most `limit_ns`, where the kernel has pidfds. */
void even_process_await(pid_t pid, uint64_t limit_ns);
/* Whether a child that was not reaped yet has ended. */
bool even_process_has_ended(pid_t pid);

/* Sends `signal` to one process, or to every process of the group that it leads: whether it could be sent (one that is
 * gone counts as sent to). Only for children not yet reaped: their numbers cannot belong to others. */
bool even_process_signal(pid_t pid, int signal);
bool even_process_signal_group(pid_t leader, int signal);
/* The same to one process that may be another one's child by now, and holds back what others send (end_signal.h): it
 * takes this for its parent's. */
bool even_process_signal_as_parent(pid_t pid, int signal);

/* Sends `signal` to a process that need not be a child, if it still is the one that began at `start_time`
 * (os/process_stat.h): whether it was sent. */
bool even_process_signal_exactly(pid_t pid, uint64_t start_time, int signal);

/* Adds the command of a process as it was typed, from the kernel: words separated by blanks, as they may be shown and
 * kept (even_text_add_shown). Nothing where it has ended. */
even_status even_process_add_command(pid_t pid, even_text *out) EVEN_MUST_USE;

/* Orphans below this process become its children from now on (so that it can reap them). */
even_status even_process_adopt_orphans(void) EVEN_MUST_USE;

/* A child that runs `body` in a session of its own until it returns, with only descriptor `kept` (-1: none) and the
 * standard ones, and with all signals blocked: only SIGKILL ends it. `body` must call nothing that takes a lock or
 * allocates: the parent may have threads. With `dies_with_parent` it is killed when the calling thread ends. */
even_status even_process_fork(void (*body)(void *context, int kept), void *context, int kept, bool dies_with_parent,
                              pid_t *out) EVEN_MUST_USE;

/* The mask of these CPUs for sched_setaffinity, of any number of them; free it with even_free. */
even_status even_process_mask(const int32_t *cpus, size_t count, void **mask, size_t *bytes) EVEN_MUST_USE;
/* Pins the calling thread to these CPUs. */
even_status even_process_pin(const int32_t *cpus, size_t count) EVEN_MUST_USE;

#endif
