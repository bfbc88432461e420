/* An agent that serves the leader of a job of several hosts: what its job tells it. */
#ifndef EVEN_ORCHESTRATOR_FOLLOWER_H
#define EVEN_ORCHESTRATOR_FOLLOWER_H

#include "orchestrator/job.h"
#include "orchestrator/message.h"

/* Called by the job (job->follower is there) instead of deciding anything itself. */
/* Sends the JSON that `text` holds, and frees it. */
void even_job_follower_send(even_job *job, even_message_kind kind, even_text *text);
/* Whether anybody leads: else what is sent is lost. */
bool even_job_follower_is_heard(const even_job *job);
/* This host's place in the voters' group; NULL: it has none. */
struct even_voter *even_job_follower_voter(const even_job *job);
void even_job_follower_tell_end(even_job *job, const even_job_rank *rank);
void even_job_follower_tell_stopped(even_job *job, const even_job_rank *rank, int signal);
/* Ranks that hang are marked. */
void even_job_follower_tell_hung(even_job *job);
/* The attempt is over here, but for a checkpoint that is being written. */
void even_job_follower_tell_writes(even_job *job);
/* The agent itself got notice that its host must end soon: the leader decides what follows. It is told, or, where
 * nobody leads, whoever does next. False: it was before. */
bool even_job_follower_drains(even_job *job, const even_notice *notice);
/* Tells the leader of job->own_notice, if there is one, and it was not. */
void even_job_follower_say_notice(even_job *job);
/* Whether another agent could serve the leader in this one's place, were this one killed now. */
bool even_job_follower_is_calm(const even_job *job);
/* The agent itself got INT, TERM or HUP. */
void even_job_follower_signalled(even_job *job, int number);

#endif
