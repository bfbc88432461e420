/* Signals as descriptors: blocked, then read in the event loop. */
#ifndef EVEN_OS_SIGNALS_H
#define EVEN_OS_SIGNALS_H

#include <evenstep/status.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/types.h>

typedef struct even_signals {
  int fd; /* readable when a signal came; -1 when closed */
  sigset_t before;
  struct sigaction pipe_before;
  struct sigaction child_before;
} even_signals;

/* Blocks what a job's agent handles (INT, TERM, HUP, USR1, USR2, CHLD) in the calling thread and in threads that it
 * starts later. Call it before any thread is started; even_signals_open includes it. */
even_status even_signals_block(void) EVEN_MUST_USE;
/* Blocks the same and opens a descriptor for them; SIGPIPE is ignored until close. */
even_status even_signals_open(even_signals *out) EVEN_MUST_USE;
/* Writing to a pipe or a connection that nobody reads any more fails from now on, and does not end the process;
 * *before is for even_signals_pipe_restore. */
even_status even_signals_pipe_ignore(struct sigaction *before) EVEN_MUST_USE;
void even_signals_pipe_restore(const struct sigaction *before);
/* The next signal, 0: none. */
int even_signals_next(even_signals *signals);
/* One of INT, TERM and HUP that came while they are blocked and was not read yet; it stays so. 0: none. */
int even_signals_end_pending(void);
/* So of TERM and USR1, which may be notice of the end to come. */
int even_signals_notice_pending(void);
/* Restores mask and handlers. Signals not read are discarded. */
void even_signals_close(even_signals *signals);
/* In a child that was forked meanwhile: closes its descriptor and restores handlers; the mask stays, and so does what
 * has come and was not read. */
void even_signals_leave(even_signals *signals);
/* From now on process `repeater` passes on to this one the INT, TERM, HUP, USR1 and USR2 that it gets
 * (os/supervisor.h): of those that are sent to both, by a terminal or to a whole group, even_signals_next tells one,
 * not two. */
void even_signals_repeated_by(pid_t repeater);
/* "SIGKILL"; "" for those that have no name here. A static string. */
const char *even_signal_name(int signal);

#endif
