/* Hosts that join while the others train (--max-ranks with --recovery shrink or replace): they get places that were
 * kept for them, or that a host that joined so had before it was lost, and a part in the attempt that runs, as a lost
 * host has that comes back (returns.h). Processes start there while the others train, get the state of training from
 * one of them, and join between two steps (replace.c); nobody else's process is touched. Where that cannot be, the job
 * restarts with the host, as without --recovery (elastic.h). */
#ifndef EVEN_ORCHESTRATOR_GROWTH_H
#define EVEN_ORCHESTRATOR_GROWTH_H

#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"

/* Whether hosts that come now can take part so, as far as is known: once the ranks have said that they can go on. */
bool even_growth_may(const even_job *job);
/* Refuses a host, by what it says of itself, whose ranks the others could not be connected to. EVEN_ERR_MISMATCH. */
even_status even_growth_check(const even_host_agent *guest, const json_t *facts) EVEN_MUST_USE;
/* The first of `count` places in a row that no host has; job->count: there are none. */
size_t even_growth_places(const even_job *job, size_t count);
/* Ranks of hosts that have come and wait for it: the training is not asked to end for them. */
size_t even_growth_waiting(const even_job *job);
/* Takes those in that wait, or has the job restart for them; about ten times a second, outside of the loop's calls. */
void even_growth_tick(even_job *job);

#endif
