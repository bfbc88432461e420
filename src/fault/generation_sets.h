/* Generations of ranks that train in sets, each with groups of its own: what of the job's generations concerns a set,
 * and where its members meet. On one host. */
#ifndef EVEN_FAULT_GENERATION_SETS_H
#define EVEN_FAULT_GENERATION_SETS_H

#include "fault/generation.h"

#include <stddef.h>

/* ---- ranks ---- */

/* The newest in which one of these ranks came or went, or nobody did (one that was stopped goes on); 0: none. */
uint32_t even_generation_number_of(const even_generation *generation, const int *ranks, size_t count);
/* The first member of a set says on which port its members of this generation, of theirs, meet. */
void even_generation_meet_at(even_generation *generation, int rank, uint32_t number, uint32_t port);
/* That port; 0 where it was not said within timeout_ns, or a generation after `seen`, of all ranks, is there. */
uint32_t even_generation_port_at(even_generation *generation, int rank, uint32_t number, uint32_t seen,
                                 uint64_t timeout_ns);
/* The ranks train in sets: what one of them does is no measure of another. */
void even_generation_train_apart(even_generation *generation);
/* The rank's process comes to its end by itself. */
void even_generation_leave(even_generation *generation, int rank);
/* Whether it has said so. */
bool even_generation_left(const even_generation *generation, int rank);

/* ---- the agent ---- */

/* Whether the ranks train in sets. */
bool even_generation_is_apart(const even_generation *generation);

#endif
