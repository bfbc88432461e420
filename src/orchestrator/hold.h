/* An attempt that outlasts its leader, in an agent whose host leads from now on: what its follower keeps for the job
 * that goes on with it (adopt.h). */
#ifndef EVEN_ORCHESTRATOR_HOLD_H
#define EVEN_ORCHESTRATOR_HOLD_H

#include "orchestrator/job.h"

#include <jansson.h>

/* Its ranks and the board that they look at; the follower's until it is handed over. */
const even_job *even_hold_job(const even_follower *follower);
/* In which generation of leaders it ran, or was taken over last. */
uint64_t even_hold_led(const even_follower *follower);
/* What this host has, as FACTS. */
const char *even_hold_facts(const even_follower *follower);
/* Where its ranks write their telemetry; the caller's from now on. -1: nowhere. */
int even_hold_telemetry(even_follower *follower);
/* Another host knows of a newer generation, as GENERATION. */
even_status even_hold_follow(even_follower *follower, const json_t *generation) EVEN_MUST_USE;
/* The job is the caller's, to be run and closed; its memory stays the follower's. */
even_job *even_hold_hand_over(even_follower *follower);
/* Ends the ranks where the job was not handed over, and frees all. NULL is allowed. */
void even_hold_free(even_follower *follower);

#endif
