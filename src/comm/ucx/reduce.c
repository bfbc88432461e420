/* All-reduce over UCX. Each rank receives the others' parts of what it owns, from each of them directly, and reduces
 * them in rank order: the same bits as over shared memory however the parts are cut, and no more bytes through any link
 * than a ring moves. */
#include "comm/ucx/reduce.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"
#include "os/clock.h"

#include <string.h>

#define LARGEST_CHUNK ((size_t)1 << 20)
#define SMALLEST_CHUNK ((size_t)64 << 10)
#define STAGING ((size_t)32 << 20) /* the chunks of all peers, twice, where they are not the smallest */
/* Scatters and gathers overlap from piece to piece: in so many, where one is not too small for it. */
#define FITTED_PIECES 8u

size_t even_ucx_chunk_bytes(int ranks) {
  size_t bytes = STAGING / 2 / (size_t)ranks / EVEN_COMM_LINE * EVEN_COMM_LINE;
  return bytes > LARGEST_CHUNK ? LARGEST_CHUNK : bytes < SMALLEST_CHUNK ? SMALLEST_CHUNK : bytes;
}

even_status even_ucx_need_staging(even_ucx_group *group) {
  return group->staging != NULL
             ? EVEN_OK
             : EVEN_NEW_ARRAY(&group->staging, 2 * (size_t)group->ranks * even_ucx_chunk_bytes(group->ranks));
}

/* ---- the plan of a call ---- */

/* How a call's data are cut: into the caller's pieces (one of all where it has none), each of these into steps, each
 * step into a part for each rank. In elements. */
typedef struct pipeline {
  size_t whole;       /* of a caller's piece, */
  size_t stride;      /* from one to the next, */
  size_t end;         /* and where the last is cut off */
  size_t step;        /* of a step */
  size_t steps;       /* in each of the caller's pieces */
  size_t count;       /* of all steps */
  const size_t *cuts; /* where in a step each rank's part begins; ranks + 1 */
} pipeline;

static size_t ceiling(size_t value, size_t by) {
  return value / by + (value % by != 0);
}

/* Parts of one size, as many lines each. */
static void cut_evenly(even_ucx_group *group, pipeline *pipe, size_t largest, size_t line) {
  size_t ranks = (size_t)group->ranks;
  pipe->steps = ceiling(pipe->whole, largest * ranks);
  size_t chunk = ceiling(ceiling(pipe->whole, pipe->steps * ranks), line) * line;
  pipe->step = chunk * ranks;
  for (size_t rank = 0; rank <= ranks; rank++) {
    group->fit.cuts[rank] = rank * chunk;
  }
}

/* Parts by the speeds of the links. */
static void cut_fitted(even_ucx_group *group, pipeline *pipe, size_t largest, size_t line) {
  size_t widest = even_ucx_fit_widest(group);
  size_t most = (size_t)((uint64_t)(largest - 3 * line) * EVEN_UCX_FIT_WHOLE / widest); /* cuts are rounded to lines */
  size_t least = SMALLEST_CHUNK / EVEN_COMM_LINE * line * (size_t)group->ranks;
  size_t wanted = even_least_size(FITTED_PIECES, ceiling(pipe->whole, least));
  pipe->steps = ceiling(pipe->whole, most);
  pipe->steps = pipe->steps < wanted ? wanted : pipe->steps;
  pipe->step = ceiling(ceiling(pipe->whole, pipe->steps), line) * line;
  group->fit.cuts[0] = 0;
  for (int rank = 0; rank < group->ranks; rank++) {
    size_t cut = (size_t)((uint64_t)pipe->step * group->fit.ends[rank] / EVEN_UCX_FIT_WHOLE);
    group->fit.cuts[rank + 1] = rank + 1 == group->ranks ? pipe->step : cut / line * line;
  }
}

static pipeline plan(even_ucx_group *group, const even_comm_reduction *job, bool fitted) {
  const even_comm_flow *flow = job->flow;
  size_t line = EVEN_COMM_LINE / job->element;
  size_t largest = even_ucx_chunk_bytes(group->ranks) / EVEN_COMM_LINE * line;
  pipeline pipe = {.whole = flow == NULL ? job->count : flow->piece,
                   .stride = flow == NULL ? 0 : flow->stride,
                   .end = job->count,
                   .cuts = group->fit.cuts};
  if (fitted) {
    cut_fitted(group, &pipe, largest, line);
  } else {
    cut_evenly(group, &pipe, largest, line);
  }
  pipe.count = (flow == NULL ? 1 : flow->pieces) * pipe.steps;
  return pipe;
}

typedef struct span {
  unsigned char *at;
  size_t count;
  size_t bytes;
} span;

/* What of step `number` is `rank`'s to reduce. */
static span chunk_of(const even_comm_reduction *job, const pipeline *pipe, size_t number, int rank) {
  size_t piece = number / pipe->steps * pipe->stride;
  size_t end = even_least_size(piece + pipe->whole, pipe->end);
  size_t begin = piece + number % pipe->steps * pipe->step;
  size_t first = even_least_size(begin + pipe->cuts[rank], end);
  size_t count = even_least_size(begin + pipe->cuts[rank + 1], end) - first;
  return (span){.at = job->data + first * job->element, .count = count, .bytes = count * job->element};
}

/* ---- all-reduce in parts ---- */

/* With the group's lock held. */
static void begin_scatter(even_ucx_group *group, const even_comm_reduction *job, const pipeline *pipe, size_t number) {
  even_ucx_transfer *transfer = even_ucx_transfers_of(group, number, false);
  uint64_t step = even_ucx_scatter_step(number);
  span own = chunk_of(job, pipe, number, group->rank);
  bool measured =
      job->flow == NULL && even_ucx_legs_start(group); /* else hosts have their first piece at other times */
  for (int turn = 1; turn < group->ranks; turn++) {
    int from = (group->rank + group->ranks - turn) % group->ranks;
    int to = (group->rank + turn) % group->ranks;
    span other = chunk_of(job, pipe, number, to);
    if (own.bytes > 0) {
      even_ucx_receive(group, transfer++, from, even_ucx_call_tag(group, from, step),
                       even_ucx_staging_of(group, from, number), own.bytes);
      even_ucx_legs_watch(group, transfer - 1, measured);
    }
    if (other.bytes > 0) {
      even_ucx_send(group, transfer++, to, even_ucx_call_tag(group, group->rank, step), other.at, other.bytes);
    }
  }
}

/* With the group's lock held. */
static void begin_gather(even_ucx_group *group, const even_comm_reduction *job, const pipeline *pipe, size_t number) {
  even_ucx_transfer *transfer = even_ucx_transfers_of(group, number, true);
  uint64_t step = even_ucx_gather_step(number);
  span own = chunk_of(job, pipe, number, group->rank);
  bool measured = even_ucx_legs_start(group); /* who begins this has something of everybody */
  for (int turn = 1; turn < group->ranks; turn++) {
    int from = (group->rank + group->ranks - turn) % group->ranks;
    int to = (group->rank + turn) % group->ranks;
    span other = chunk_of(job, pipe, number, from);
    if (other.bytes > 0) {
      even_ucx_receive(group, transfer++, from, even_ucx_call_tag(group, from, step), other.at, other.bytes);
      even_ucx_legs_watch(group, transfer - 1, measured);
    }
    if (own.bytes > 0) {
      even_ucx_send(group, transfer++, to, even_ucx_call_tag(group, group->rank, step), own.at, own.bytes);
    }
  }
}

static void reduce_own(even_ucx_group *group, const even_comm_reduction *job, const pipeline *pipe, size_t number) {
  span own = chunk_of(job, pipe, number, group->rank);
  void *target = own.at;
  for (int rank = 0; rank < group->ranks; rank++) {
    group->sources[rank] = rank == group->rank ? own.at : even_ucx_staging_of(group, rank, number);
  }
  if (own.count > 0) {
    job->reduce(&target, 1, group->sources, (size_t)group->ranks, own.count, job->divisor);
  }
}

/* How far a call is, in steps. A step's buffers and transfers are those of the one two before it. */
typedef struct advance {
  const even_comm_reduction *job;
  const pipeline *pipe;
  size_t begun;
  size_t reduced;
  size_t done;
} advance;

static bool is_settled(even_ucx_group *group, size_t number, bool gathers) {
  even_ucx_transfer *transfers = even_ucx_transfers_of(group, number, gathers);
  bool settled = true;
  for (size_t i = 0; i < 2 * (size_t)group->ranks && settled; i++) {
    settled = even_ucx_settled(group, &transfers[i]);
  }
  return settled;
}

static bool can_begin(const advance *at) {
  const even_comm_flow *flow = at->job->flow;
  return at->begun < at->pipe->count && at->begun < at->reduced + 2 &&
         (flow == NULL || at->begun / at->pipe->steps < atomic_load(&flow->ready));
}
static bool can_reduce(even_ucx_group *group, const advance *at) {
  return at->reduced < at->begun && at->reduced < at->done + 2 && is_settled(group, at->reduced, false);
}
static bool can_finish(even_ucx_group *group, const advance *at) {
  return at->done < at->reduced && is_settled(group, at->done, true);
}

static bool can_advance(even_ucx_group *group, const void *context) {
  const advance *at = context;
  return can_begin(at) || can_reduce(group, at) || can_finish(group, at);
}

/* What is reduced is gathered without anybody's doing. Else it is this rank that has no more pieces ready, or another:
 * whoever has not begun the step has sent nothing for it. */
static void tell_wait(even_ucx_group *group, const void *context, uint64_t now_ns) {
  const advance *at = context;
  const even_comm_flow *flow = at->job->flow;
  uint32_t ready = flow == NULL ? 0 : atomic_load(&flow->ready);
  if (flow == NULL || at->done < at->reduced) {
    (void)even_ucx_tell_nothing(group);
  } else if (at->reduced < at->begun) {
    even_ucx_tell_step(group, even_ucx_transfers_of(group, at->reduced, false), 2 * (size_t)group->ranks, at->reduced,
                       now_ns);
  } else if (at->begun / at->pipe->steps >= ready) {
    even_ucx_tell_rest(group, &flow->ready, ready);
  }
}

static void tell_done(const advance *at) {
  const even_comm_flow *flow = at->job->flow;
  if (flow != NULL && at->done % at->pipe->steps == 0) {
    flow->done(flow->context, at->done / at->pipe->steps);
  }
}

/* Does one thing of those that can be done. */
static void advance_once(even_ucx_group *group, advance *at) {
  (void)pthread_mutex_lock(&group->lock);
  bool begins = can_begin(at);
  if (begins) {
    begin_scatter(group, at->job, at->pipe, at->begun++);
    group->steps = at->begun;
  }
  bool finishes = !begins && can_finish(group, at);
  bool reduces = !begins && !finishes && can_reduce(group, at);
  (void)pthread_mutex_unlock(&group->lock);
  if (finishes) {
    at->done++;
    tell_done(at);
  } else if (reduces) {
    reduce_own(group, at->job, at->pipe, at->reduced);
    (void)pthread_mutex_lock(&group->lock);
    begin_gather(group, at->job, at->pipe, at->reduced++);
    (void)pthread_mutex_unlock(&group->lock);
  }
}

/* A step is gathered while the next one is scattered. */
static even_status reduce_parts(even_ucx_group *group, const even_comm_reduction *job, bool fitted) {
  pipeline pipe = plan(group, job, fitted);
  advance at = {.job = job, .pipe = &pipe};
  while (at.done < pipe.count) {
    EVEN_TRY(even_ucx_wait_until(group, group->transfers, EVEN_UCX_TRANSFERS * (size_t)group->ranks, can_advance,
                                 tell_wait, &at));
    advance_once(group, &at);
  }
  return EVEN_OK;
}

/* Everybody sends all its data to everybody and reduces everything: one exchange less, more bytes among more ranks. */
static even_status reduce_whole(even_ucx_group *group, const even_comm_reduction *job) {
  even_ucx_transfer *transfer = group->transfers;
  void *target = job->data;
  (void)pthread_mutex_lock(&group->lock);
  bool measured = even_ucx_legs_start(group);
  for (int step = 1; step < group->ranks; step++) {
    int from = (group->rank + group->ranks - step) % group->ranks;
    int to = (group->rank + step) % group->ranks;
    even_ucx_receive(group, transfer++, from, even_ucx_call_tag(group, from, even_ucx_scatter_step(0)),
                     even_ucx_staging_of(group, from, 0), job->bytes);
    even_ucx_legs_watch(group, transfer - 1, measured);
    even_ucx_send(group, transfer++, to, even_ucx_call_tag(group, group->rank, even_ucx_scatter_step(0)), job->data,
                  job->bytes);
  }
  (void)pthread_mutex_unlock(&group->lock);
  EVEN_TRY(even_ucx_wait(group, group->transfers, 2 * (size_t)group->ranks));
  for (int rank = 0; rank < group->ranks; rank++) {
    group->sources[rank] = rank == group->rank ? job->data : even_ucx_staging_of(group, rank, 0);
  }
  job->reduce(&target, 1, group->sources, (size_t)group->ranks, job->count, job->divisor);
  return EVEN_OK;
}

/* ---- which way ---- */

enum { PARTS, WHOLE, FITTED }; /* as rank 0 announces them */
static const char *const way_names[] = {"parts", "whole"};
static const char *const fit_names[] = {"fitted", "parts"};

/* Only who chooses has a choice: what the others measured would be of calls whose way they guess. */
void even_ucx_start_ways(even_ucx_group *group) {
  bool chooses = group->ranks > 1 && group->rank == 0;
  even_ways_start(&group->reduce_ways, "all_reduce", way_names, chooses ? 2 : 1);
  even_ways_start(&group->fit.ways, "all_reduce", fit_names, chooses && group->ranks > 2 ? 2 : 1);
  even_ways_set_range(&group->fit.ways, EVEN_UCX_FIT_BYTES, (size_t)1 << 30);
}

size_t even_ucx_choice_bytes(const even_ucx_group *group) {
  return even_ucx_chunk_bytes(group->ranks);
}

/* What rank 0 chose has come with the words that announce the call. */
static uint64_t way_of(const even_ucx_group *group) {
  return group->rank == 0 ? group->call.piece_bytes : group->arrived[0].call.piece_bytes;
}

static even_status reduce_middling(even_ucx_group *group, const even_comm_reduction *job) {
  group->call.piece_bytes = group->rank == 0 ? (uint64_t)even_ways_next(&group->reduce_ways, job->bytes) : PARTS;
  EVEN_TRY(even_ucx_call_meet(group, 0, NULL));
  even_ucx_legs_begin(group);
  even_ways_call_begins(&group->reduce_ways, even_clock_ns());
  EVEN_TRY(way_of(group) == WHOLE ? reduce_whole(group, job) : reduce_parts(group, job, false));
  even_ways_call_ends(&group->reduce_ways, job->bytes, even_clock_ns());
  return EVEN_OK;
}

/* By the links' speeds where these differ, unless the calls themselves say that equal parts are faster. */
static even_status reduce_large(even_ucx_group *group, const even_comm_reduction *job) {
  bool fits = group->ranks > 2 && job->bytes >= EVEN_UCX_FIT_BYTES;
  bool measured = false;
  group->call.piece_bytes = PARTS;
  if (fits && group->rank == 0 && group->fit.unequal && even_ways_next(&group->fit.ways, job->bytes) == 0) {
    group->call.piece_bytes = FITTED;
  }
  EVEN_TRY(even_ucx_call_meet(group, 0, NULL));
  if (fits) {
    EVEN_TRY(even_ucx_fit_measure(group, &measured));
  }
  even_ucx_legs_begin(group);
  if (measured) {
    return reduce_parts(group, job, group->fit.unequal);
  }
  if (fits && group->fit.unequal) {
    even_ways_call_begins(&group->fit.ways, even_clock_ns());
  }
  EVEN_TRY(reduce_parts(group, job, way_of(group) == FITTED));
  even_ways_call_ends(&group->fit.ways, job->bytes, even_clock_ns());
  return EVEN_OK;
}

static even_status reduce_small(even_ucx_group *group, const even_comm_reduction *job) {
  void *target = job->data;
  if (job->count == 0) {
    return even_ucx_call_meet(group, 0, NULL);
  }
  memcpy(group->outgoing[group->rank].data, job->data, job->bytes);
  EVEN_TRY(even_ucx_call_meet(group, job->bytes, NULL));
  for (int rank = 0; rank < group->ranks; rank++) {
    group->sources[rank] = rank == group->rank ? job->data : group->arrived[rank].data;
  }
  job->reduce(&target, 1, group->sources, (size_t)group->ranks, job->count, job->divisor);
  return EVEN_OK;
}

static even_status reduce(even_ucx_group *group, const even_comm_reduction *job) {
  if (job->flow == NULL && job->bytes <= EVEN_UCX_SMALL_BYTES) {
    return reduce_small(group, job);
  }
  EVEN_TRY(even_ucx_need_staging(group));
  bool middling = job->flow == NULL && job->bytes <= even_ucx_choice_bytes(group);
  EVEN_TRY(middling ? reduce_middling(group, job) : reduce_large(group, job));
  even_ucx_legs_end(group);
  return EVEN_OK;
}

even_status even_ucx_all_reduce(even_comm *comm, const even_comm_reduction *job) {
  even_ucx_group *group = even_ucx_of(comm);
  EVEN_TRY(even_ucx_call_begin(group, EVEN_CALL_ALL_REDUCE, job->dtype, job->op, 0, job->count, NULL));
  return even_ucx_call_end(group, reduce(group, job));
}
