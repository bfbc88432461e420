/* Ranks that outlast their agent (cli/job_restart.c). Whatever the agent has of them it also
 * leaves with the process that starts agents (os/custody.h): the ends of their pipes, the memory that they share with
 * it, the guardian's pipe, and a roll, in shared memory, of which process is at which place and how others have ended.
 * The agent that is started in a killed one's place goes on from there; meanwhile the ranks train, and whoever prints
 * more than a pipe holds waits. While ranks start, or are ended, none of that is whole: then they go with their agent,
 * and the job ends, or is started again from its newest checkpoint.
 *
 * With --recovery the memory of generations (fault/generation.h) is left, too: the words of the ranks and who goes on
 * are in it, and an agent alone writes the second. What the ranks may have seen counts: whoever is in the newest
 * generation is a member, though the roll, which is written after it, may say otherwise; of a rank that is in none and
 * has ended the others have gone on without it; of one that is in it and has ended nobody has drawn the conclusion, and
 * the next agent does, also where that makes a generation of the same members once more. Who waits for a generation is
 * waked (the one before may have been killed before it did), and waits a minute for the word of an agent. What is
 * known of each place (replace.c) is on the roll. While a process is being started in one, the ranks go with their
 * agent: it may be there, and nobody know of it.
 *
 * Of several hosts (outlast_hosts.c) the socket at which the leader's agent listens is left, too: as long as anybody
 * has it, another agent may come, and the others' keep their ranks and ask there again and again (follower_wait.c).
 * Where nobody has it any more they end them, as they do at once where the leader's host cannot be reached. Each is
 * told the generations that it has not heard of (boards.h), and tells all that its ranks have said. It is not so while
 * a place is empty or its process no member yet, nor while a newcomer has not got the state: a gift is on its way, or
 * an agent was asked to start a process, of which the next one knows nothing. Spares that wait are no such place. What
 * was sent of copies of checkpoints is on the roll (copies.h); of one on its way nothing is, and it is begun anew.
 * Which places are set aside is left for each attempt (legacy.h): the list of devices is to be cut before the roll is
 * called.
 *
 * An agent that serves a leader leaves its ranks in the same way, with the process that starts agents on its host, and
 * beside them its part and its connection (outlast_part.h): the next one holds the ranks as if the leader's agent had
 * been killed, and comes to the leader, which has not missed the one before. */
#ifndef EVEN_ORCHESTRATOR_OUTLAST_H
#define EVEN_ORCHESTRATOR_OUTLAST_H

#include "orchestrator/host_agent.h"
#include "orchestrator/host_memory.h"
#include "orchestrator/job.h"
#include "orchestrator/legacy.h"

typedef struct even_outlast even_outlast;

/* What is kept, each under its kind and a number: the rank's, or 0. */
typedef enum even_outlast_kind {
  EVEN_OUTLAST_ROLL = 1,
  EVEN_OUTLAST_TELEMETRY,
  EVEN_OUTLAST_GENERATION,
  EVEN_OUTLAST_GUARDIAN,
  EVEN_OUTLAST_OUTPUT,
  EVEN_OUTLAST_ERROR,
  EVEN_OUTLAST_SNAPSHOT,
  EVEN_OUTLAST_MEMORY, /* the lock of its folder, */
  EVEN_OUTLAST_KEEPER,
  EVEN_OUTLAST_LISTENER,
  EVEN_OUTLAST_STANDING,
  EVEN_OUTLAST_PORT,      /* what keeps the attempt's from other jobs */
  EVEN_OUTLAST_PART,      /* of an agent that serves a leader (outlast_part.h), */
  EVEN_OUTLAST_LINK,      /* and its connections to that one */
  EVEN_OUTLAST_UNWRITTEN, /* as a snapshot, of a rank that has ended: rank + turn * ranks */
  EVEN_OUTLAST_LIMIT,     /* the guardian's page */
  EVEN_OUTLAST_VOTER      /* at which the leader's member of the voters' group listens */
} even_outlast_kind;

/* ---- the agent before may have been killed ---- */

/* Whether ranks run that this agent is to go on with. `legacy` NULL: none do. */
bool even_outlast_due(const even_legacy *legacy);
/* Where they write their telemetry, the caller's from now on; -1: nowhere. */
int even_outlast_telemetry(const even_legacy *legacy);
/* Where they keep checkpoints in memory, the caller's from now on; NULL: nowhere. */
even_status even_outlast_memory(const even_legacy *legacy, even_host_memory **out) EVEN_MUST_USE;
/* The memory of the ranks' generations, the caller's from now on; -1: there is none. */
int even_outlast_generation(even_job *job);
/* What the ranks look at for those that stand still on other hosts; the caller's from now on; -1: there is none. */
int even_outlast_standing(even_job *job);
/* The guardian that was started before. */
even_status even_outlast_guardian(even_job *job) EVEN_MUST_USE;
/* In place of the start of the ranks: those that run, and those that have ended meanwhile. */
even_status even_outlast_adopt(even_job *job) EVEN_MUST_USE;

/* ---- of several hosts, before the agent before's ranks are gone on with ---- */

/* The socket at which it listened, the caller's from now on; -1: there is none. */
int even_outlast_listener(const even_legacy *legacy);
/* In place of the start of the other hosts' agents: waits for those that keep their ranks. EVEN_ERR_PEER_LOST: not all
 * have come; the agent is to end then, and the next one begins without ranks (even_legacy_ask_again). */
even_status even_outlast_hosts_meet(even_hosts *hosts) EVEN_MUST_USE;
/* Whether who greets so is another agent of a host whose agent was killed, with ranks of the attempt that runs. */
bool even_outlast_hosts_comes_anew(const even_host_agent *agent, const json_t *greeting);
/* The host is known by this link from now on, once it has said what runs there (RUNS): then it goes on. Until then it
 * is `renewed`. EVEN_ERR_PEER_LOST: what the one before had said last has changed that. */
even_status even_outlast_hosts_renew(even_host_agent *agent, even_link *link) EVEN_MUST_USE;
even_status even_outlast_hosts_take(even_host_agent *agent, json_t *runs) EVEN_MUST_USE;
/* They hear that the attempt goes on, and say what has become of their ranks. */
even_status even_outlast_hosts_adopt(even_job *job) EVEN_MUST_USE;

/* ---- this one may be ---- */

/* Whether another agent is started here, and these hosts are none of those that change or lead: then it is worth a
 * process on each that starts its agent. */
bool even_outlast_hosts_would(const even_hosts *hosts);
/* Whether the ranks of the job's hosts may ever outlast it, */
bool even_outlast_hosts_may(const even_job *job);
/* and whether they would now. */
bool even_outlast_hosts_calm(const even_job *job);
/* Whether all places of ranks, as far as is known here, are members' that have the state of training: the next agent
 * would not know who gives it to whom. Also where nobody takes a place. */
bool even_outlast_hosts_have_state(const even_job *job);

/* Once the job's loop is open. job->outlast stays NULL where the ranks go with their agent: nobody starts another one,
 * or there are hosts that may change, or lead. */
even_status even_outlast_open(even_job *job) EVEN_MUST_USE;
/* Leaves what the job has by itself, once it is open. */
void even_outlast_keep(even_job *job);
/* Nothing is kept any more. job->outlast may be NULL, here, before and below. */
void even_outlast_close(even_job *job);
/* What ranks keep in memory, where that was opened since. */
void even_outlast_keep_memory(even_job *job);
/* Something else could not be kept, for the reason of the last error, which is cleared: the ranks go with this agent.
 */
void even_outlast_forgo(even_job *job);
/* Whether a process that is started now is to outlive this one. */
bool even_outlast_holds(const even_job *job);
/* The attempt has a port of its own now. */
void even_outlast_chosen(even_job *job);
/* Before one starts at the rank's place, */
void even_outlast_starting(even_job *job, size_t rank);
/* and when it has: with its outputs. */
void even_outlast_started(even_job *job, size_t rank, const even_process *process);
/* It has ended, which is noted in job->ranks and job->order already. */
void even_outlast_ended(even_job *job, size_t rank);
/* The memory of its checkpoints is not its own any more; */
void even_outlast_vacated(even_job *job, size_t rank);
/* before that: what lies there is still to be written, the `turn`th of its place; and then it is. */
void even_outlast_unwritten(even_job *job, size_t rank, unsigned turn, int fd);
void even_outlast_saved(even_job *job, size_t rank, unsigned turn);
/* There is another guardian. */
void even_outlast_guarded(even_job *job);
/* After each turn: whether all is whole. */
void even_outlast_settle(even_job *job);

#endif
