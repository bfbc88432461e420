/* Hosts that were lost come back while the others go on (--recovery replace): the leader starts their agents again, as
 * it does before an attempt, and has processes take the places of their ranks there. Without a part in the attempt an
 * agent has ranks, a number and a board as before, but nobody is a member of it: the board begins with the generation
 * that the others are at (boards.h). The host of a leader that is lost is started again so by the next one. Nothing of
 * it of hosts that came by themselves, and of such as nobody here can start. */
#ifndef EVEN_ORCHESTRATOR_RETURNS_H
#define EVEN_ORCHESTRATOR_RETURNS_H

#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"

/* Starts agents of lost hosts, gives those that have come a part in the attempt; about ten times a second. */
void even_returns_tick(even_job *job);
/* A host could not do its part: where it got that while the attempt runs, it is lost once more, and that is all (true).
 */
bool even_returns_failed(even_host_agent *agent, const char *why);
/* The attempt is over: who has no part yet is waited for, or not, as any lost host is. */
void even_returns_end(even_job *job);

#endif
