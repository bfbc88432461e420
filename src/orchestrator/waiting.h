/* All ranks of several hosts wait in collectives, for one another: no host's agent sees that alone. Each says of its
 * own ranks, once a second, that all of them have waited for longer than they may; the leader says when that is so on
 * all hosts, and each agent tells of its own ranks then (hangs.h). What is not said again does not hold. */
#ifndef EVEN_ORCHESTRATOR_WAITING_H
#define EVEN_ORCHESTRATOR_WAITING_H

#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"

/* An attempt begins. */
void even_job_waiting_begin(even_job *job);
/* Whether all ranks of the other hosts wait so, as far as is known here now. */
bool even_job_waiting_elsewhere(const even_job *job, uint64_t now_ns);
/* Whether this host's ranks do, in each tick: said to the leader, or, where that is this one, to all of them once all
 * do. */
void even_job_waiting_say(even_job *job, bool own, uint64_t now_ns);

/* ---- the message WAITING, as JSON ---- */
/* `agent` NULL: of the leader. EVEN_ERR_INPUT: nothing that is said. */
even_status even_job_waiting_take(even_job *job, even_host_agent *agent, const json_t *content,
                                  uint64_t now_ns) EVEN_MUST_USE;

#endif
