/* What an attempt's loop asks of the endings (ending.c). */
#ifndef EVEN_ORCHESTRATOR_JOB_ATTEMPT_H
#define EVEN_ORCHESTRATOR_JOB_ATTEMPT_H

#include "orchestrator/job.h"

/* The ending goes on to the next stage when its time is over. */
void even_job_check_deadline(even_job *job);
void even_job_end_by_user(even_job *job, int number);
/* es.prepare waits for all ranks, and one that has ended cannot come any more: no matter how slow they are, ranks that
 * wait there would do so for ever. Scripts in which nobody waits are let be. */
void even_job_check_awaited(even_job *job);

#endif
