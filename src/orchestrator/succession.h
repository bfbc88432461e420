/* The leader's part of being replaced (docs/hosts.md, "When the leader is lost"): with three hosts or more, its agent
 * and those of the others are members of a group of voters (voter.h), and each has what the leader leaves (estate.h).
 * With two hosts, and without any, all of this does nothing. */
#ifndef EVEN_ORCHESTRATOR_SUCCESSION_H
#define EVEN_ORCHESTRATOR_SUCCESSION_H

#include "orchestrator/estate.h"
#include "orchestrator/host_agent.h"

struct even_legacy_votes;

/* Before the first attempt, all agents fit: they and this one become the group, of which this one leads. Waits for
 * nobody: where they do not reach one another the job runs without, and is told so after a while. */
even_status even_succession_open(even_job *job) EVEN_MUST_USE;
/* In a host that takes a leader's place: waits for the agents of the others, and goes on with those that come. */
even_status even_succession_take(even_hosts *hosts) EVEN_MUST_USE;
/* ---- succession_return.c: the leader's agent is killed, and the next one on its host leads on (outlast.h) ---- */
/* Whether that one could: this host leads in the first generation, may act, and all hosts are members. True of a job
 * whose leader nobody replaces. */
bool even_succession_may_return(const even_hosts *hosts);
/* Leaves it what it needs for that, while that is so, but for the listener (EVEN_OUTLAST_VOTER). */
even_status even_succession_leave(const even_hosts *hosts, struct even_legacy_votes *out) EVEN_MUST_USE;
/* In the next agent, before all that takes its time: it is the member that the one before was, and tells the guardian
 * of the ranks here until when they may run, as soon as a majority has answered. Nothing where none was left. */
even_status even_succession_return(even_hosts *hosts) EVEN_MUST_USE;
/* That guardian is the job's from now on, at `out`, where the member finds it (even_succession_guard). False: there is
 * none. `hosts` may be NULL. */
bool even_succession_give_guardian(even_hosts *hosts, even_guardian *out);
/* Waits until it may act. EVEN_ERR_PEER_LOST: another host leads by now, or too few are heard. */
even_status even_succession_await_return(even_hosts *hosts) EVEN_MUST_USE;
/* It does not go on: another host may. */
void even_succession_leave_to_others(even_hosts *hosts);

/* Of a job that ends, for whatever reason: nobody shall lead it after this one. Asks for it, and does not wait. */
void even_succession_finish(even_hosts *hosts);
/* Waits until that is so, for a moment. */
void even_succession_await_end(even_hosts *hosts);
/* Before the end of a leader that took another one's place: where members may only be cut off, waits for as long as
 * these wait for a majority, so that they hear of the end. */
void even_succession_linger(even_hosts *hosts);
void even_succession_close(even_hosts *hosts);
/* Leaves all agents what they need to take this one's place; before each attempt. */
even_status even_succession_bequeath(even_job *job) EVEN_MUST_USE;
/* Whether this one may still lead; several times a second. Where it may not act, its guardian holds its ranks; they go
 * on when it may, and are ended where that lasts, or another one leads. */
void even_succession_check(even_job *job);
/* Whether this one may act now: true where nobody votes, and of a job that it has ended itself. One that stood still
 * may not, until it has asked the others. */
bool even_succession_acts(const even_job *job);
/* Whether another one leads: this one says nothing to any agent any more. */
bool even_succession_is_superseded(const even_hosts *hosts);
/* EVEN_ERR_PEER_LOST where that is so: it says who leads. */
even_status even_succession_refuse_superseded(const even_hosts *hosts) EVEN_MUST_USE;
/* Whether the voter tells this job's guardian until when its ranks may run; before that one is stopped, it must not. */
void even_succession_guard(even_job *job, bool guards);
/* A turn of the job's loop begins, or is over: this host's member of the group hears it (even_voter_turns), whether the
 * host leads or serves; where it has given its part of the log up, that is told. What a job does before its loop, while
 * ranks that it adopts run already (even_job_open up to even_outlast_adopt), is one, too: no host is waited for there,
 * but its disk is written to. */
void even_succession_turns(even_job *job, bool begins);
/* Waits until it may start ranks, and meanwhile starts agents again that are lost: with them there may be a majority.
 * EVEN_ERR_PEER_LOST: another one leads now, or there was none for EVEN_MAJORITY_PATIENCE. EVEN_ERR_INTERRUPTED: the
 * thread's question. */
even_status even_succession_await(even_job *job) EVEN_MUST_USE;
/* The same before this one leads ranks that run already: an old leader, that may act for a moment yet, has none of
 * them, for it makes no generation without most of the hosts (even_succession_confirms). */
even_status even_succession_await_vote(even_job *job) EVEN_MUST_USE;
/* Before the ranks of the others go on without hosts that were lost since then, the log of who leads must say that
 * these are no members: then none of them can lead, with what it knew of the ranks, and a leader that is cut off itself
 * leaves out nobody. Whether that is so. True where nobody votes. */
bool even_succession_leaves_out(even_job *job, uint64_t since_ns);
/* The user says that the hosts that are missing, without which there is no majority, are lost for good: the job goes on
 * without them, and nobody takes this one's place any more. EVEN_ERR_STATE: it waits for none. */
even_status even_succession_go_alone(even_job *job) EVEN_MUST_USE;
#define EVEN_SUCCESSION_LOST "the hosts that are lost"
/* Whether it has done so, and the hosts are yet to change for it (elastic.h). */
bool even_succession_is_alone(const even_hosts *hosts);
/* Hosts could not be reached: whether that is so for most of them. Those that are not there are lost then. */
bool even_succession_is_cut(even_hosts *hosts);
/* Agents that were started again are the members that they were, or, where they have forgotten it, new ones. */
even_status even_succession_join(even_job *job) EVEN_MUST_USE;
/* One that is back while an attempt runs is a new member: the others went on without the one that it was. Nothing where
 * nobody votes. */
even_status even_succession_add(even_job *job, even_host_agent *agent) EVEN_MUST_USE;
/* Those that leave (even_host_agent.leaves), which are no members any more by what is wanted, vote no more when this
 * returns: then they may be told to go. Where the others do not agree on that within some seconds, and could elect
 * nobody without their votes, the user is told, and it waits for as long as for a majority (even_succession_await,
 * whose errors it has; EVEN_ERR_PEER_LOST: it took too long). */
even_status even_succession_release(even_job *job) EVEN_MUST_USE;
/* An agent says whether it is the member that it was named. */
void even_succession_take_votes(even_job *job, even_host_agent *agent, const json_t *content);

#endif
