/* Who takes the ranks of a host that is drained: the command's words and what the job's hosts have, shared out by
 * places.h. A part of drain_move.h. */
#ifndef EVEN_ORCHESTRATOR_DRAIN_PLAN_H
#define EVEN_ORCHESTRATOR_DRAIN_PLAN_H

#include "orchestrator/drain_move.h"

/* Ranks that a host has in the attempt under way. */
size_t even_move_ranks_now(const even_job *job, const even_host_agent *agent);
/* By the command's words (even_move_begin): notes at each host what it is to have (next.count), names `from` and the
 * plan in the move, and starts agents of hosts that are new. After an error some of these may have been started
 * (even_guests_dismiss), and nothing else has changed. */
even_status even_move_plan(even_job *job, even_host_agent *from, const json_t *command) EVEN_MUST_USE;

#endif
