/* Membership of a job on one host, in memory that its agent and its ranks share. The agent alone says who is in it:
 * each time it sees a rank's process end it makes a new generation, of those that are left, and so all have the same
 * members whatever they noticed themselves, and when. Ranks say whether they could go on without another, and where to
 * meet. */
#ifndef EVEN_FAULT_GENERATION_H
#define EVEN_FAULT_GENERATION_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct even_generation even_generation;

#define EVEN_GENERATION_WORDS 200 /* with the NUL */

/* A new segment, generation 0: all are members, none has said that it could go on. *fd is the caller's, close-on-exec.
 */
even_status even_generation_create(int ranks, int *fd) EVEN_MUST_USE;
/* Maps the segment; the caller keeps `fd`. EVEN_ERR_INPUT: it is none of these. */
even_status even_generation_open(int fd, even_generation **out) EVEN_MUST_USE;
/* NULL is let be. */
void even_generation_close(even_generation *generation);
int even_generation_ranks(const even_generation *generation);

/* The newest, 0 at the start of an attempt. Any thread, as all that follow. */
uint32_t even_generation_number(const even_generation *generation);
/* Whether the rank is a member of that generation, the newest or an earlier one. */
bool even_generation_has(const even_generation *generation, int rank, uint32_t number);
/* Returns when there is a newer one than `after`, when the agent has given the attempt up, or after timeout_ns; the
 * newest. */
uint32_t even_generation_wait(even_generation *generation, uint32_t after, uint64_t timeout_ns);
/* Whether the agent has given the attempt up: nobody goes on. */
bool even_generation_refused(const even_generation *generation);

/* ---- ranks ---- */

/* Says that the rank could go on without others (why ""), or in a few words why not; until it says so it cannot. */
void even_generation_say(even_generation *generation, int rank, const char *why);
/* The first member says on which port of this host (1 … 65535) those of this generation meet. */
void even_generation_meet(even_generation *generation, uint32_t number, uint32_t port);
/* That port; 0 where it was not said within timeout_ns, or this generation is over. */
uint32_t even_generation_port(even_generation *generation, uint32_t number, uint64_t timeout_ns);

/* ---- the agent ---- */

/* Before an attempt whose ranks have not started: as new. */
void even_generation_begin(even_generation *generation);
/* Whether all ranks but those in `lost` could go on; else *rank is one that could not and `why` its reason. */
bool even_generation_able(const even_generation *generation, const bool *lost, int *rank,
                          char why[EVEN_GENERATION_WORDS]);
/* A new generation without those in `lost`; its number. */
uint32_t even_generation_lose(even_generation *generation, const bool *lost);
/* Nobody goes on: who waits for a new generation fails at once. */
void even_generation_refuse(even_generation *generation);

#endif
