/* An attempt in pieces (attempt.c), and what its loop asks of the endings (ending.c). */
#ifndef EVEN_ORCHESTRATOR_JOB_ATTEMPT_H
#define EVEN_ORCHESTRATOR_JOB_ATTEMPT_H

#include "orchestrator/job.h"

/* Starts all ranks, here and on the other hosts. */
even_status even_job_begin_attempt(even_job *job) EVEN_MUST_USE;
/* What is seen of ranks begins anew: nothing is known of any. */
void even_job_begin_watch(even_job *job);
/* A process that was started, or adopted, has ended, was stopped or goes on. */
void even_job_take_end(even_job *job, const even_process_end *end);
/* The same of all children that have ended, or stand still, since. */
void even_job_reap(even_job *job);
/* Begins to read what a rank prints, which is appended to its log; owns both descriptors, also on failure. */
even_status even_job_read_output(even_job *job, size_t rank, int output, int error) EVEN_MUST_USE;
/* Whether ranks live, or may be started again. */
bool even_job_attempt_lives(const even_job *job);
/* One turn of its loop, and what is due. */
even_status even_job_turn(even_job *job) EVEN_MUST_USE;
/* Reads how far the ranks are, for whoever has to go on with the job: in each turn, and before an attempt is judged. */
void even_job_note_progress(even_job *job);
/* Clears up what is left of it, also where `status` is a failure of the agent itself, which it returns. */
even_status even_job_finish_attempt(even_job *job, even_status status) EVEN_MUST_USE;
/* The ending goes on to the next stage when its time is over. */
void even_job_check_deadline(even_job *job);
void even_job_end_by_user(even_job *job, int number);
/* A rank was killed so long ago, and has not ended: where it waits in the kernel, and what happens `then`. */
void even_job_tell_unending(even_job *job, size_t rank, uint64_t since_ns, const char *then);
/* es.prepare waits for all ranks, and one that has ended cannot come any more: no matter how slow they are, ranks that
 * wait there would do so for ever. Scripts in which nobody waits are let be. */
void even_job_check_awaited(even_job *job);

#endif
