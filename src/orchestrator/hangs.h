/* Ranks that hang: found by their silence, told with their stacks, and, where that is asked for, ended. */
#ifndef EVEN_ORCHESTRATOR_HANGS_H
#define EVEN_ORCHESTRATOR_HANGS_H

#include "orchestrator/job.h"

typedef struct even_hangs even_hangs;

/* For a job whose params and ranks are set. *out NULL: params.hang_seconds is 0, or the ranks have no rings. */
even_status even_hangs_open(const even_job *job, even_hangs **out) EVEN_MUST_USE;
/* NULL is allowed, here and below. */
void even_hangs_close(even_hangs *hangs);
/* An attempt begins. */
void even_hangs_begin(even_hangs *hangs);
/* Another process is at the rank's place. */
void even_hangs_begin_rank(even_hangs *hangs, size_t rank);
/* A rank printed something. */
void even_hangs_output(even_hangs *hangs, int rank);
/* Looks at all ranks, about ten times a second, once one of them has said what it is at, or while some wait in torch's
 * init_process_group of all ranks for those that have not come; silence of before counts for nothing. Tells of each
 * hang once: a notice with the phase, how long it has been silent and its limit; when it has answered, or after 5 s,
 * its stacks, of which logs/hang-rank-N.txt has all. Then, with params.restart_hung, marks it as hung (even_job_rank),
 * and *end is true: the attempt shall be ended. A rank that goes on after all is told, too. */
void even_hangs_tick(even_hangs *hangs, even_job *job, bool *end);
/* A rank hangs, of this host or another one, and shall be ended for it: the next tick ends the attempt, or, where all
 * ranks of all hosts wait for one another, one in which all are told of, or 7 s are over. */
void even_hangs_end(even_hangs *hangs);
/* What rank's hang was, for the cause of its end: "no progress for 31 s in data". "" where it did not. */
const char *even_hangs_words(const even_hangs *hangs, size_t rank);

#endif
