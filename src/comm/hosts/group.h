/* The engine of several hosts: shared memory inside each, a leader of each over the network, one group of both. */
#ifndef EVEN_COMM_HOSTS_GROUP_H
#define EVEN_COMM_HOSTS_GROUP_H

#include "base/checked.h"
#include "comm/board.h"
#include "comm/engine.h"
#include "comm/hosts/carrier.h"
#include "comm/watcher.h"
#include "comm/ways.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

/* The collectives that have several ways. */
typedef enum even_hosts_call {
  EVEN_HOSTS_ALL_REDUCE,
  EVEN_HOSTS_REDUCE_SCATTER,
  EVEN_HOSTS_ALL_GATHER,
  EVEN_HOSTS_BROADCAST,
  EVEN_HOSTS_CALLS /* how many */
} even_hosts_call;

typedef struct even_hosts_group {
  EVEN_COMM_BASE;
  even_comm *inside;   /* this host's ranks, in the order of their ranks here */
  even_comm *between;  /* the hosts' leaders, in the order of the hosts; NULL on a rank that leads none */
  even_comm *everyone; /* all ranks; NULL: no messages and no all-to-all */
  int lanes;
  even_comm *lane[EVEN_COMM_LANES];       /* `lanes` of them, the first `between`; NULL: carried by another rank here */
  even_carrier carriers[EVEN_COMM_LANES]; /* of those */
  int hosts;
  int own_host;
  int locals;    /* ranks on this host */
  int *members;  /* all ranks, host by host, in rank order on each */
  int *first;    /* where host h's begin in members; hosts + 1 of them */
  int *speakers; /* in the lanes: lane after lane, those of the hosts; the first ones lead them */
  bool in_order; /* members are 0, 1, 2 …: what is cut by hosts lies in one piece */
  _Atomic uint64_t timeout_ns;
  atomic_flag busy;
  even_board board; /* of all ranks; what is known of them */
  even_flight_writer flight;
  even_comm_call call;         /* the one under way, */
  uint64_t call_count;         /* and its number */
  _Atomic uint64_t stall_told; /* the number of the call of which it was */
  even_comm_stall_call *stall_call;
  void *stall_context;
  even_watch watch;
  _Atomic bool has_left;
  pthread_mutex_t ending; /* over these two: */
  _Atomic bool ended;
  even_error end; /* why, in this group's numbers */
  bool refuses;   /* a call has failed: `end` is an earlier failure for those that follow */
  /* for the call under way */
  size_t *counts;         /* one a rank */
  size_t *sizes;          /* one a rank */
  const void **pointers;  /* one a rank */
  size_t *nothing;        /* zeros, one a rank */
  size_t *parts;          /* of the carriers, lane after lane: what the hosts have in a piece, */
  unsigned char **places; /* and where it lies */
  unsigned char *scratch; /* some times piece_bytes at most, however large a call is */
  size_t scratch_bytes;
  size_t piece_bytes;                   /* of a collective that goes in pieces, or through the scratch */
  even_ways ways[EVEN_HOSTS_CALLS];     /* the same choices on all ranks */
  char inner_way[EVEN_COMM_COSTS_WORD]; /* what was asked for of the engine inside a host; "": it chooses */
  _Atomic uint64_t hidden_ns;           /* what carriers waited while this rank did other things, */
  _Atomic uint64_t awaited_ns;          /* and what it waited for them */
} even_hosts_group;

static inline even_hosts_group *even_hosts_of(even_comm *comm) {
  return (even_hosts_group *)(void *)comm;
}
/* NULL: a group of another engine. */
const even_hosts_group *even_hosts_within(const even_comm *comm);
static inline bool even_hosts_leads(const even_hosts_group *group) {
  return group->between != NULL;
}

/* ---- call.c ---- */

even_status even_hosts_begin(even_hosts_group *group, even_call_kind kind, uint32_t dtype, uint32_t op, int root,
                             size_t count) EVEN_MUST_USE;
even_status even_hosts_end(even_hosts_group *group, even_status status) EVEN_MUST_USE;
/* What the leader's step between the hosts came to, on all ranks of the host; the others' `status` is not looked at. */
even_status even_hosts_agree(even_hosts_group *group, even_status status) EVEN_MUST_USE;
/* At least that much memory, of any content, which stays until the group is closed. */
even_status even_hosts_scratch(even_hosts_group *group, size_t bytes) EVEN_MUST_USE;

/* A range of elements, or of bytes of a broadcast. */
typedef struct even_hosts_range {
  size_t from;
  size_t count;
} even_hosts_range;

/* Piece `number` of `whole` in `pieces` of whole lines; the first one is the largest. */
static inline even_hosts_range even_hosts_piece_of(even_hosts_range whole, size_t pieces, size_t number,
                                                   size_t element) {
  size_t line = EVEN_COMM_LINE / element;
  size_t step = ((whole.count - (whole.count > 0)) / pieces / line + 1) * line;
  size_t begin = even_least_size(number * step, whole.count);
  return (even_hosts_range){.from = whole.from + begin, .count = even_least_size(step, whole.count - begin)};
}

/* The inner limits of a call whose ranks have all come to it on this host: from here on they wait for other hosts. */
void even_hosts_await_others(even_hosts_group *group);

/* ---- lanes.c ---- */

/* Takes over what `params` say; the group's places are known. EVEN_ERR_ARGUMENT. */
even_status even_hosts_take_lanes(even_hosts_group *group, const even_comm_hosts *params) EVEN_MUST_USE;
/* The rank here, by its number here, that carries a lane. */
static inline int even_hosts_carrier_of(const even_hosts_group *group, int lane) {
  return even_comm_lane_rank(lane, group->lanes, group->locals);
}
/* The groups that this one is made of: the first `*at` from 0 on that there is; NULL behind the last. */
even_comm *even_hosts_part(const even_hosts_group *group, int *at);

/* ---- by_cost.c: which way ---- */

void even_hosts_start_ways(even_hosts_group *group);
void even_hosts_end_ways(even_hosts_group *group);
/* Returns when all ranks have come. */
even_status even_hosts_meet(even_hosts_group *group) EVEN_MUST_USE;
/* Makes a call over so many lanes; 0: in turns, one thing after the other; EVEN_HOSTS_DIRECT: between all ranks. */
#define EVEN_HOSTS_DIRECT (-1)
typedef even_status even_hosts_run(even_hosts_group *group, void *job, int lanes);
/* Between the beginning and the end of a call: the way that costs least, where it is large enough to have a choice. */
even_status even_hosts_by_cost(even_hosts_group *group, even_hosts_call call, size_t bytes, even_hosts_run *run,
                               void *job) EVEN_MUST_USE;
/* Rank 0: whether `way` (NULL: none) is one of what is done inside a host, where all are to take it then. */
bool even_hosts_ask_inside(even_hosts_group *group, const char *way);
/* All ranks, when they have rank 0's inner_way: takes it. */
void even_hosts_follow_inside(even_hosts_group *group);

/* ---- stream.c: all-reduces in pieces ---- */

#define EVEN_HOSTS_STREAM_BYTES ((size_t)1 << 20)

/* Between the beginning and the end of the call; all of the ranks take the same of `lanes` lanes. */
even_status even_hosts_stream(even_hosts_group *group, const even_comm_reduction *job, int lanes) EVEN_MUST_USE;

/* ---- relay.c: the other large collectives in pieces ---- */

/* As the collectives of these names, between their beginning and their end, over so many lanes. What is cut by ranks
 * needs a group that is in_order. The root of a broadcast is rank `local` of `host`. */
even_status even_hosts_relay_broadcast(even_hosts_group *group, unsigned char *data, size_t bytes, int host, int local,
                                       int lanes) EVEN_MUST_USE;
even_status even_hosts_relay_scatter(even_hosts_group *group, const even_comm_scattering *job, int lanes) EVEN_MUST_USE;
even_status even_hosts_relay_gather(even_hosts_group *group, const even_comm_gathering *job, int lanes) EVEN_MUST_USE;
/* sizes[h] = what host h's ranks have together. */
void even_hosts_sum_counts(const even_hosts_group *group, const size_t *counts, size_t *sizes);

/* ---- turns.c: what is cut by ranks, one thing after the other ---- */

/* As the collectives of these names, between their beginning and their end. */
even_status even_hosts_scatter_in_turns(even_hosts_group *group, const even_comm_scattering *job) EVEN_MUST_USE;
even_status even_hosts_gather_in_turns(even_hosts_group *group, const even_comm_gathering *job) EVEN_MUST_USE;

/* ---- ending.c: how the group ends, and who hears of it ---- */

/* Ends the group for all ranks, unless it has ended. Any thread. */
void even_hosts_tell(even_hosts_group *group, const even_error *why);
/* As the engine's `refused`: messages go between all ranks. */
bool even_hosts_refused(even_comm *comm, bool waits);
/* The same with why a part has ended, or with the calling thread's last error where none has. */
void even_hosts_tell_failure(even_hosts_group *group);
/* Looks whether a part has ended, which the others are told. */
void even_hosts_follow(even_hosts_group *group);
/* The same, and whether ranks make different calls, which ends it; the
 * watcher's, and of those who wait. */
void even_hosts_look(void *group);
/* The failure of the call under way as the calling thread's error: why the group has ended, which it has then. */
even_status even_hosts_failure(even_hosts_group *group) EVEN_MUST_USE;
/* The same for a call that comes when the group has ended already, and is not made. */
even_status even_hosts_ended(const even_hosts_group *group) EVEN_MUST_USE;

/* Leaves all parts together: who cannot be reached is waited for once, and not once in each. */
void even_hosts_leave_parts(even_hosts_group *group);

/* ---- collectives.c ---- */

/* The host's ranks' sum of `input` in `output` of its leader; the others' output is not touched. */
even_status even_hosts_reduce_inside(even_hosts_group *group, const void *input, void *output, size_t count,
                                     even_dtype dtype, even_reduce_op op) EVEN_MUST_USE;

even_status even_hosts_all_reduce(even_comm *comm, const even_comm_reduction *job) EVEN_MUST_USE;
even_status even_hosts_reduce_scatter(even_comm *comm, const even_comm_scattering *job) EVEN_MUST_USE;
even_status even_hosts_all_gather(even_comm *comm, const even_comm_gathering *job) EVEN_MUST_USE;
even_status even_hosts_broadcast(even_comm *comm, unsigned char *data, size_t bytes, int root) EVEN_MUST_USE;
even_status even_hosts_barrier(even_comm *comm) EVEN_MUST_USE;

#endif
