/* Which ranks were stopped and stand still, from agent to agent, so that ranks of other hosts that wait for them hear
 * so at once (fault/standing.h): nobody else sees a rank that is alone on its host. The agent there looks again and
 * again, and tells the leader for how long each has stood; the leader tells all agents, and each writes it into memory
 * that it shares with its ranks. Nothing of it stays valid without being said again, so no change of leaders leaves
 * anything behind. A job of one host has none of this (job->standing NULL). */
#ifndef EVEN_ORCHESTRATOR_STANDING_H
#define EVEN_ORCHESTRATOR_STANDING_H

#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"

typedef struct even_job_standing even_job_standing;

/* For a job of several hosts, or one that hosts may join. */
even_status even_job_standing_open(even_job *job) EVEN_MUST_USE;
void even_job_standing_close(even_job *job);
/* Before the ranks of an attempt start. */
void even_job_standing_begin(even_job *job);
/* The memory that the ranks inherit; -1: none. */
int even_job_standing_fd(const even_job *job);
/* In each turn: looks at this host's, and sends what there is to be said. Cheap where nobody stands. */
void even_job_standing_turn(even_job *job);
/* In how many ms that is to be done again; 0: whenever. */
int even_job_standing_look_ms(const even_job *job);

/* ---- what is in the message STANDING, as JSON, either way ---- */

/* What is to be said now, which counts as said then; false: nothing. */
bool even_job_standing_write(even_job *job, uint64_t now_ns, even_text *out);
/* Takes what the agent of another host says, of its ranks, or, of an agent that serves another, what the leader says
 * (agent NULL). EVEN_ERR_INPUT: nothing that they could. */
even_status even_job_standing_take(even_job *job, const even_host_agent *agent, const json_t *content) EVEN_MUST_USE;

#endif
