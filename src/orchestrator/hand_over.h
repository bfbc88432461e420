/* The host that leads is drained (`evenstep drain`, docs/hosts.md): the training saves its state, another host takes
 * the lead, and begins anew from there without this one. Where nobody can take its place it cannot be drained. */
#ifndef EVEN_ORCHESTRATOR_HAND_OVER_H
#define EVEN_ORCHESTRATOR_HAND_OVER_H

#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"

/* EVEN_ERR_UNSUPPORTED: nobody ever takes this host's place. EVEN_ERR_STATE: not now. */
even_status even_hand_over_may(const even_job *job) EVEN_MUST_USE;
/* How many ranks the others shall have, which drain_move.h has noted; from now on the job is about to change. */
void even_hand_over_begin(even_job *job);
/* Between two attempts, nothing of the job runs anywhere. EVEN_OK: it could not be handed over, who asked for it knows
 * why, and it goes on here. EVEN_ERR_PEER_LOST: it is another host's now, and this one's part is over; or, which the
 * words say, nobody took it. */
even_status even_hand_over(even_job *job) EVEN_MUST_USE;

#endif
