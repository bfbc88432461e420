/* The state of training on its way to a host whose newcomers find nobody there who could give it (--recovery replace of
 * several hosts). The leader names, with the generation that they are new in, one member that gives it to all such
 * hosts. That one's agent sends what it gives as a parcel to each of them, whose agent holds it until its ranks have
 * taken it. What the leader names, and where it fails, goes with the boards (boards.h). A job of one host has none of
 * this (job->gifts NULL), nor has one of whose ranks no places are taken: then all of it does nothing. */
#ifndef EVEN_ORCHESTRATOR_GIFTS_H
#define EVEN_ORCHESTRATOR_GIFTS_H

#include "base/json_writer.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"

typedef struct even_gifts even_gifts;

/* For a job with boards. */
even_status even_gifts_open(even_job *job) EVEN_MUST_USE;
void even_gifts_close(even_job *job);
/* Before the ranks of an attempt start: from now on its parcels are taken. */
even_status even_gifts_begin(even_job *job) EVEN_MUST_USE;

/* The leader's, before it makes each further generation: who gives in it, and to which hosts. */
void even_gifts_plan(even_job *job);
/* Sends what was given, and lets go what was taken; after the boards have told what is new. */
void even_gifts_turn(even_job *job);
/* Whether a rank of this host is about to give, which it does without a word. */
bool even_gifts_await(const even_job *job);
/* Whether members of the newest generation wait for a state that travels, for as long as that takes. */
bool even_gifts_travel(const even_job *job);
/* Whether that may be why ranks of this host are silent: not where the one that shall give it has given nothing here
 * for too long. */
bool even_gifts_hold_up(const even_job *job);
/* Whether a member of this host has not taken the state that it joined for. */
bool even_gifts_any_lacks(const even_job *job);

/* ---- of the messages GENERATION and BOARD ---- */

/* How often what the hosts shall know of the newest generation's has changed. */
unsigned even_gifts_changes(const even_job *job);
/* What of that generation is to be known, as members of an object that is open. */
void even_gifts_write(const even_job *job, uint32_t number, even_json *json);
/* The same, read, before the ranks see that generation. EVEN_ERR_INPUT: there is no such rank, or host. */
even_status even_gifts_read(even_job *job, uint32_t number, const json_t *content) EVEN_MUST_USE;
/* Whether this host could not send what it shall, and the leader does not know yet. */
bool even_gifts_any_failed(const even_job *job);
/* That, as a member of an object that is open; it counts as told then. */
void even_gifts_report(even_job *job, even_json *json);
/* The same, read by the leader. */
even_status even_gifts_take_report(even_job *job, const even_host_agent *agent, const json_t *content) EVEN_MUST_USE;

#define EVEN_GIFT_PARCEL "rank-state"

#endif
