/* Which way a large collective that is no all-reduce goes between hosts, by what each costs. Rank 0 chooses, and says
 * so in the words that announce the call. */
#include "comm/ucx/group.h"

#include "base/fail.h"
#include "os/clock.h"

static const char *const exchange_names[] = {"direct", "pairs"};
static const char *const broadcast_names[] = {"parts", "whole"};

/* In the words that announce a call: this one is tried, and over when all are done. */
#define MEASURED ((uint64_t)1 << 8)

void even_ucx_start_move_ways(even_ucx_group *group) {
  static const struct {
    const char *collective;
    const char *const *names;
    int least_ranks; /* with fewer there is nothing to choose */
  } moves[EVEN_UCX_MOVES] = {[EVEN_UCX_ALL_GATHER] = {"all_gather", exchange_names, 3},
                             [EVEN_UCX_BROADCAST] = {"broadcast", broadcast_names, 2},
                             [EVEN_UCX_REDUCE_SCATTER] = {"reduce_scatter", exchange_names, 3}};
  for (int move = 0; move < EVEN_UCX_MOVES; move++) {
    bool chooses = group->rank == 0 && group->ranks >= moves[move].least_ranks;
    even_ways_start(&group->move_ways[move], moves[move].collective, moves[move].names, chooses ? 2 : 1);
    even_ways_set_range(&group->move_ways[move], 2 * EVEN_UCX_SMALL_BYTES, (size_t)1 << 30);
  }
}

even_status even_ucx_by_cost(even_ucx_group *group, even_ucx_moved move, size_t bytes, even_ucx_run *run,
                             const void *job) {
  even_ways *ways = &group->move_ways[move];
  if (group->rank == 0) {
    group->call.piece_bytes = (uint64_t)even_ways_next(ways, bytes) | (even_ways_measures(ways, bytes) ? MEASURED : 0);
  }
  EVEN_TRY(even_ucx_call_meet(group, 0, NULL));
  uint64_t word = group->rank == 0 ? group->call.piece_bytes : group->arrived[0].call.piece_bytes;
  even_ways_call_begins(ways, even_clock_ns());
  EVEN_TRY(run(group, job, (int)(word & (MEASURED - 1))));
  if ((word & MEASURED) != 0) {
    EVEN_TRY(even_ucx_call_meet(group, 0, NULL)); /* who only gives is done before what it gave has come */
  }
  even_ways_call_ends(ways, bytes, even_clock_ns());
  return EVEN_OK;
}
