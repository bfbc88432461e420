/* A rank that holds the others up for long is ended on purpose where that was asked for (--on-straggler): the others go
 * on without it, or another process takes its place. Slow is never taken for dead: it is ended by what its steps say,
 * many of them, and only where the balancer's models say that steps are shorter then. */
#ifndef EVEN_ORCHESTRATOR_STRAGGLERS_H
#define EVEN_ORCHESTRATOR_STRAGGLERS_H

#include "orchestrator/job.h"

typedef struct even_stragglers even_stragglers;

enum { EVEN_STRAGGLERS_STEPS = 32 }; /* that must say so in a row, besides the patience */

/* For a job whose params and ranks are set. *out NULL: params.on_straggler is EVEN_ON_STRAGGLER_KEEP, the ranks have no
 * rings, or another agent leads. */
even_status even_stragglers_open(const even_job *job, even_stragglers **out) EVEN_MUST_USE;
/* NULL is allowed, here and below. */
void even_stragglers_close(even_stragglers *stragglers);
/* An attempt begins. */
void even_stragglers_begin(even_stragglers *stragglers);
/* Another process is at the rank's place. */
void even_stragglers_begin_rank(even_stragglers *stragglers, size_t rank);
/* Reads what the ranks did, and ends one where it is time; about ten times a second. */
void even_stragglers_tick(even_stragglers *stragglers, even_job *job);
/* For tests: a second has passed since it last decided. */
void even_stragglers_look_now(even_stragglers *stragglers);
/* So long no other process is to start in the place of one that was ended for another's sake: 0 where it was not. */
uint64_t even_stragglers_rest_ns(const even_stragglers *stragglers, size_t rank);

#endif
