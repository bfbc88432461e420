/* The exact optimum with memory that the caller keeps, so that a balancer allocates nothing while training. */
#ifndef EVEN_BALANCER_SOLVE_H
#define EVEN_BALANCER_SOLVE_H

#include <evenstep/balancer.h>

typedef struct even_solve_room {
  size_t ranks;
  int64_t *lower; /* what each rank finishes at a time that is too short */
  int64_t *upper; /* and at one that is long enough */
  int64_t *tried;
  int64_t *most; /* min(cap, batch) */
  struct even_solve_entry *entries;
} even_solve_room;

even_status even_solve_room_open(size_t ranks, even_solve_room *room) EVEN_MUST_USE;
void even_solve_room_close(even_solve_room *room);

/* even_balancer_solve_costs without checking the costs; only the caps can be wrong. */
even_status even_solve(const even_solve_room *room, const even_rank_cost *costs, const int64_t *caps, int64_t batch,
                       int64_t *shares, double *step_seconds) EVEN_MUST_USE;

#endif
