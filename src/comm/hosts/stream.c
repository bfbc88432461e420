/* All-reduces in pieces: while one piece crosses between the hosts, the next is summed inside and the one before is
 * spread there. What crosses is carried by the host's first rank, or by all that carry a lane, each its part of every
 * piece. No sum's order depends on it. */
#include "comm/hosts/group.h"

#include "base/checked.h"
#include "base/fail.h"
#include "os/clock.h"

/* So many pieces, where they are not too small or too large for it: for each lane and host. */
#define PIECES 16u
#define LEAST_BYTES ((size_t)64 << 10)
#define MOST_BYTES ((size_t)1 << 20)
/* Pieces that are summed before the first one has to be back. */
#define AHEAD 2u

typedef struct carried {
  even_hosts_group *group;
  int lane;
  even_comm_reduction job;
  even_comm_flow flow;
} carried;

typedef struct stream {
  even_hosts_group *group;
  const even_comm_reduction *job;
  int lanes;
  size_t share; /* of a lane in a piece; in elements */
  size_t piece;
  size_t pieces;
  carried lane[EVEN_COMM_LANES];
} stream;

static void plan(stream *work) {
  const even_hosts_group *group = work->group;
  size_t parts = (size_t)work->lanes * (size_t)group->hosts;
  size_t line = EVEN_COMM_LINE / work->job->element;
  size_t bytes = work->job->bytes / PIECES / parts;
  bytes = bytes < LEAST_BYTES ? LEAST_BYTES : bytes > MOST_BYTES ? MOST_BYTES : bytes;
  work->share = bytes / EVEN_COMM_LINE * line * (size_t)group->hosts;
  work->piece = work->share * (size_t)work->lanes;
  work->pieces = (work->job->count - 1) / work->piece + 1;
}

/* Elements of a lane's part of a piece; *begin: where it is among all. */
static size_t part_of(const stream *work, size_t piece, int lane, size_t *begin) {
  size_t from = piece * work->piece + (size_t)lane * work->share;
  *begin = even_least_size(from, work->job->count);
  return even_least_size(work->share, work->job->count - *begin);
}

/* What each rank here carries of a piece, into group->counts; *begin: where this rank's begins. */
static size_t divide(const stream *work, size_t piece, size_t *begin) {
  even_hosts_group *group = work->group;
  size_t total = 0;
  for (int local = 0; local < group->locals; local++) {
    group->counts[local] = 0;
  }
  *begin = even_least_size(piece * work->piece, work->job->count);
  for (int lane = work->lanes - 1; lane >= 0; lane--) { /* the first of this rank's decides where they begin */
    size_t from = 0;
    size_t count = part_of(work, piece, lane, &from);
    group->counts[even_hosts_carrier_of(group, lane)] += count;
    *begin = group->lane[lane] != NULL ? from : *begin;
    total += count;
  }
  return total;
}

static even_status reduce_inside(const stream *work, size_t piece) {
  const even_comm_reduction *job = work->job;
  size_t own = 0;
  size_t total = divide(work, piece, &own);
  const unsigned char *range = job->data + piece * work->piece * job->element;
  if (work->group->locals == 1 || total == 0) {
    return EVEN_OK;
  }
  return even_comm_reduce_scatter(work->group->inside, range, job->data + own * job->element, work->group->counts,
                                  job->dtype, job->op == EVEN_AVG ? EVEN_SUM : job->op);
}

static even_status spread_inside(const stream *work, size_t piece) {
  const even_comm_reduction *job = work->job;
  size_t own = 0;
  size_t total = divide(work, piece, &own);
  unsigned char *range = job->data + piece * work->piece * job->element;
  if (work->group->locals == 1 || total == 0) {
    return EVEN_OK;
  }
  if (work->lanes == 1) {
    return even_comm_broadcast(work->group->inside, range, total * job->element, 0);
  }
  return even_comm_all_gather(work->group->inside, job->data + own * job->element, range, work->group->counts,
                              job->dtype);
}

/* ---- the carriers' side ---- */

static even_status carry(void *context) {
  carried *own = context;
  even_comm *comm = own->group->lane[own->lane];
  uint64_t before = even_comm_wait_ns(comm);
  even_status status = even_comm_engine_of(comm)->all_reduce(comm, &own->job);
  (void)atomic_fetch_add(&own->group->hidden_ns, even_comm_wait_ns(comm) - before);
  return status;
}

static void tell_done(void *context, size_t pieces) {
  carried *own = context;
  even_carrier_tell(&own->group->carriers[own->lane], pieces);
}

static even_status begin_lane(stream *work, int lane) {
  const even_comm_reduction *job = work->job;
  carried *own = &work->lane[lane];
  size_t begin = 0;
  (void)part_of(work, 0, lane, &begin);
  own->group = work->group;
  own->lane = lane;
  own->job = *job;
  own->job.data = job->data + begin * job->element;
  own->job.count = job->count - begin;
  own->job.bytes = own->job.count * job->element;
  own->job.flow = &own->flow;
  own->flow.piece = work->share;
  own->flow.stride = work->piece;
  own->flow.pieces = work->pieces;
  own->flow.done = tell_done;
  own->flow.context = own;
  atomic_init(&own->flow.ready, 0);
  return even_carrier_begin(&work->group->carriers[lane], work->group->lane[lane], carry, own);
}

/* So many pieces may cross. */
static void make_ready(stream *work, size_t pieces) {
  for (int lane = 0; lane < work->lanes; lane++) {
    even_comm *comm = work->group->lane[lane];
    if (comm != NULL) {
      atomic_store(&work->lane[lane].flow.ready, (uint32_t)pieces);
      even_comm_engine_of(comm)->stir(comm);
    }
  }
}

static even_status await_back(stream *work, size_t pieces) {
  even_hosts_group *group = work->group;
  uint64_t began = even_clock_ns();
  even_status status = EVEN_OK;
  for (int lane = 0; lane < work->lanes && status == EVEN_OK; lane++) {
    status = group->lane[lane] == NULL ? EVEN_OK : even_carrier_await(&group->carriers[lane], pieces);
  }
  (void)atomic_fetch_add(&group->awaited_ns, even_clock_ns() - began);
  return status;
}

/* ---- the rank's side ---- */

static even_status move_pieces(stream *work) {
  for (size_t turn = 0; turn < work->pieces + AHEAD; turn++) {
    if (turn < work->pieces) {
      EVEN_TRY(reduce_inside(work, turn));
      make_ready(work, turn + 1);
    }
    if (turn == 0) {
      even_hosts_await_others(work->group);
    }
    if (turn >= AHEAD) {
      EVEN_TRY(await_back(work, turn - AHEAD + 1));
      EVEN_TRY(spread_inside(work, turn - AHEAD));
    }
  }
  return EVEN_OK;
}

even_status even_hosts_stream(even_hosts_group *group, const even_comm_reduction *job, int lanes) {
  stream work = {.group = group, .job = job, .lanes = lanes};
  even_status status = EVEN_OK;
  int begun = 0;
  plan(&work);
  for (; begun < lanes && status == EVEN_OK; begun++) {
    status = group->lane[begun] == NULL ? EVEN_OK : begin_lane(&work, begun);
  }
  status = status == EVEN_OK ? move_pieces(&work) : status;
  if (status != EVEN_OK) { /* the carriers end, too */
    even_hosts_tell_failure(group);
  }
  even_error why = *even_error_last();
  for (int lane = 0; lane < begun; lane++) {
    even_status ended = group->lane[lane] == NULL ? EVEN_OK : even_carrier_finish(&group->carriers[lane]);
    if (status == EVEN_OK && ended != EVEN_OK) {
      status = ended;
      why = *even_error_last();
    }
  }
  return status == EVEN_OK ? EVEN_OK : even_error_restore(&why); /* the first */
}
