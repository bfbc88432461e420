/* What keeps ranks from their work on other hosts: each agent looks at its own ranks' processes and GPUs, once a
 * second, and tells the leader (USAGE), whose observer hears of all alike. Faults of GPUs are told as they come; while
 * nobody leads they wait. */
#ifndef EVEN_ORCHESTRATOR_USAGES_H
#define EVEN_ORCHESTRATOR_USAGES_H

#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"

typedef struct even_usages even_usages;

/* ---- of an agent that serves another one ---- */

/* For a job whose params and ranks are set. *out NULL: this agent leads, or nobody asks how its ranks are. */
even_status even_usages_open(const even_job *job, even_usages **out) EVEN_MUST_USE;
/* NULL is allowed, here and below. */
void even_usages_close(even_usages *usages);
/* Looks, and tells the leader, where a second has passed, and of faults at once; several times a second. */
void even_usages_tick(even_usages *usages, even_job *job);
/* What a USAGE says, of this host's ranks from *next on as many as one takes; false: there is nothing to say. *next:
 * the rank to go on with, job->count behind the last. */
bool even_usages_report(even_usages *usages, const even_job *job, size_t *next, even_text *out);
/* What a USAGE says of faults of this host's GPUs since the last one; false: there is nothing to say. */
bool even_usages_report_faults(even_usages *usages, const even_job *job, even_text *out);
/* Tells the leader of those, if anybody leads: also before this host says that its ranks have ended. */
void even_usages_tell_faults(even_usages *usages, even_job *job);
/* Another one leads, and knows nothing of what lasts. */
void even_usages_retell(even_usages *usages);
/* This host leads: its observer hears what nobody was told; closed. */
void even_usages_hand_over(even_usages *usages, const even_job *job);

/* ---- of the leader ---- */

/* What a host's agent says, to the observer. EVEN_ERR_INPUT: of a rank that is not there, or numbers that are none. */
even_status even_usages_take(even_job *job, const even_host_agent *agent, const json_t *content) EVEN_MUST_USE;

#endif
