/* The leader's part of being replaced (docs/hosts.md, "When the leader is lost"): with three hosts or more, its agent
 * and those of the others are members of a group of voters (voter.h), and each has what the leader leaves (estate.h).
 * With two hosts, and without any, all of this does nothing. */
#ifndef EVEN_ORCHESTRATOR_SUCCESSION_H
#define EVEN_ORCHESTRATOR_SUCCESSION_H

#include "orchestrator/estate.h"
#include "orchestrator/host_agent.h"

/* All agents fit: they and this one become the group, of which this one leads. */
even_status even_succession_open(even_hosts *hosts) EVEN_MUST_USE;
/* In a host that takes a leader's place: waits for the agents of the others, and goes on with those that come. */
even_status even_succession_take(even_hosts *hosts) EVEN_MUST_USE;
void even_succession_close(even_hosts *hosts);
/* Leaves all agents what they need to take this one's place; before each attempt. */
even_status even_succession_bequeath(even_job *job) EVEN_MUST_USE;
/* Whether this one may still lead; several times a second. Where it may not, its ranks are ended. */
void even_succession_check(even_job *job);
/* Waits until it may. EVEN_ERR_PEER_LOST: another one leads now. EVEN_ERR_INTERRUPTED: the thread's question. */
even_status even_succession_await(even_job *job) EVEN_MUST_USE;
/* Hosts could not be reached: whether that is so for most of them. Those that are not there are lost then. */
bool even_succession_is_cut(even_hosts *hosts);
/* Agents that were started again become members, too. */
even_status even_succession_join(even_hosts *hosts) EVEN_MUST_USE;

#endif
