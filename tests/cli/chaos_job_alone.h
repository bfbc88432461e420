/* A job under `evenstep chaos` that has no agent and no history: what its faults do, to processes that a test starts.
 */
#ifndef EVEN_TESTS_CLI_CHAOS_JOB_ALONE_H
#define EVEN_TESTS_CLI_CHAOS_JOB_ALONE_H

#include "cli/chaos.h"

enum { ALONE_RANKS = 2 };

typedef struct alone {
  even_chaos_job job; /* its folder is the scratch folder; of two ranks, of which the second is the victim */
  even_chaos_fault plan[2];
  even_chaos_done done[2];
  even_process_stat rank; /* the victim; pid 0: none was started */
} alone;

/* Why the fault that was tried last was left for later; "": it was not. */
extern char alone_postponed[192];

/* A job with one fault of that kind, which is next, in a scratch folder of its own. */
void alone_open(alone *made, even_chaos_kind kind, uint64_t dice);
/* Everything is let go of, and the rank is ended. */
void alone_close(alone *made);
/* Starts the victim, which sleeps, with these variables (NULL-terminated) and PATH. */
void alone_start_rank(alone *made, char *const *variables);
/* The fault comes; whether it has. */
bool alone_inject(alone *made);
/* Goes on to another fault of the job, of that kind. */
void alone_next(alone *made, even_chaos_kind kind, uint64_t dice);
/* Waits until the process is in that state ('Z' ended, 'S' sleeps), a minute at most: whether it is. */
bool alone_comes_to(pid_t pid, char wanted);

#endif
