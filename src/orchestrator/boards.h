/* The members of a job of several hosts. On each host the ranks look at memory that their own agent shares with them, a
 * board (fault/generation.h). The leader's counts: what changes there goes to all hosts, and what ranks say on the
 * board of their host goes to the leader. A job of one host has none of this (job->boards NULL). */
#ifndef EVEN_ORCHESTRATOR_BOARDS_H
#define EVEN_ORCHESTRATOR_BOARDS_H

#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"

typedef struct even_boards even_boards;

/* For a job with generations: nothing where it is of one host. */
even_status even_boards_open(even_job *job) EVEN_MUST_USE;
void even_boards_close(even_job *job);
/* Before the ranks of an attempt start. */
void even_boards_begin(even_job *job);
/* Another process takes the place of a rank: nothing that the one before has said is true any more, here, and of what
 * the leader knows. Also of a job of one host. */
void even_boards_vacate(even_job *job, size_t rank);
/* Of an agent that serves another: the leader is another one now, and knows nothing of what was told. */
void even_boards_retell(even_job *job);
/* The leader has become it while the attempt runs; all hosts know of `number`, and some of no newer one. */
void even_boards_adopt(even_job *job, uint32_t number);
/* The newest generation that an agent knows, as it says of ranks that run (RUNS); 0: of none. */
uint32_t even_boards_newest_of(const json_t *runs);
/* The leader's: another agent goes on with the ranks of a host, or this one with all. What that host has not heard of
 * is told to it: all generations after `known`, and what is asked now. EVEN_ERR_PEER_LOST: it is too far behind. */
even_status even_boards_catch_up(even_job *job, const even_host_agent *agent, uint32_t known) EVEN_MUST_USE;
/* Sends what has changed since the last time; cheap where nothing has. */
void even_boards_turn(even_job *job);
/* In how many ms a board is to be looked at again, for it does not ring: 0: whenever. */
int even_boards_look_ms(const even_job *job);

/* ---- what is in the messages GENERATION and BOARD, as JSON ---- */

/* The leader's: who goes on in that generation, where they meet as far as is known, what is asked of them now. Whether
 * all of it went into `out` is for even_text_status to say. */
void even_boards_write(const even_job *job, uint32_t number, even_text *out);
/* Of an agent that serves another: what the leader does not know yet, which counts as told then. False: nothing. */
bool even_boards_report(even_job *job, even_text *out);
/* The leader's: what the ranks of a host have said there. EVEN_ERR_INPUT: nothing that they could. */
even_status even_boards_take(even_job *job, even_host_agent *agent, const json_t *content) EVEN_MUST_USE;
/* Of an agent that serves another: what the leader says of its own. EVEN_ERR_INPUT: that cannot follow. */
even_status even_boards_follow(even_job *job, const json_t *content) EVEN_MUST_USE;

#endif
