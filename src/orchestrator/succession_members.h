/* Who the members of the voters' group are, as their leader says it: to their agents, and to its own voter. And
 * what the files of succession share. */
#ifndef EVEN_ORCHESTRATOR_SUCCESSION_MEMBERS_H
#define EVEN_ORCHESTRATOR_SUCCESSION_MEMBERS_H

#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"
#include "orchestrator/voter.h"

/* NAMED: the agent is a member already, and hears where the others are. Only one that BEGINS makes a log, with the
 * others that do: whoever was started again has one, or is a new member. */
typedef enum even_member_start {
  EVEN_MEMBER_NAMED,
  EVEN_MEMBER_BEGINS,
  EVEN_MEMBER_JOINS,
  EVEN_MEMBER_RETURNS
} even_member_start;

/* Lets the agents' messages come, for a moment. */
even_status even_succession_turn(even_hosts *hosts) EVEN_MUST_USE;
/* EVEN_ERR_INTERRUPTED. */
even_status even_succession_interrupted(void);
/* Whether somebody leads a newer generation than this host's; the error for that. */
bool even_succession_is_over(const even_hosts *hosts, const even_voter_view *view);
even_status even_succession_fail_over(const even_voter_view *view);
/* Whether this host leads the job, by all that is known here. */
bool even_succession_leads(const even_hosts *hosts, const even_voter_view *view);
/* "b, c": those without an agent here. */
void even_succession_name_missing(const even_hosts *hosts, even_text *out);
/* Once, of one that hears no majority. */
void even_succession_tell_cut_off(even_job *job);
/* A majority is heard: nobody is given up for lost (even_succession_go_alone), and who asked for it is told. */
void even_succession_stay(even_hosts *hosts);
/* This host's member of the group, which takes the listener over. EVEN_ERR_NOT_FOUND: see even_voter_open. */
even_status even_succession_vote(even_hosts *hosts, const even_voter_member *members, size_t count, int listener,
                                 bool returns) EVEN_MUST_USE;
/* Leaves all agents what they need to take this one's place, and waits until each that is here has it: what a leader
 * says is not heard any more once there is another one. EVEN_ERR_TIMEOUT: one does not answer. */
even_status even_succession_confirm(even_job *job) EVEN_MUST_USE;
/* One that is lost is started again while the job runs, which waits for nobody: the member that it was or, where it has
 * forgotten that, a new one. */
void even_succession_keep_witness(even_job *job);
/* This host and all whose agents are members; the caller frees them. */
even_status even_succession_list(const even_hosts *hosts, even_voter_member **out, size_t *count) EVEN_MUST_USE;
even_status even_succession_say(even_host_agent *agent, const even_voter_member *members, size_t count,
                                even_member_start how) EVEN_MUST_USE;
/* To all, but for who is yet to be asked whether it is the member that it was. */
even_status even_succession_say_all(even_hosts *hosts) EVEN_MUST_USE;
/* These, and no others, shall be members. */
even_status even_succession_want(const even_hosts *hosts) EVEN_MUST_USE;

#endif
