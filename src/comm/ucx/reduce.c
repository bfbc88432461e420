/* Reductions over UCX. Each rank receives the others' parts of what it owns, from each of them directly, and reduces
 * them in rank order: the same bits as over shared memory, and no more bytes through any link than a ring moves. */
#include "comm/ucx/group.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"

#include <string.h>

/* What one rank sends to one other at a time. */
#define LARGEST_CHUNK ((size_t)1 << 20)
#define SMALLEST_CHUNK ((size_t)64 << 10)
#define STAGING ((size_t)32 << 20) /* the chunks of all peers, twice, where they are not the smallest */

/* The steps of piece p of a call. */
static uint64_t scatter_step(size_t piece) {
  return 1 + 2 * (uint64_t)piece;
}
static uint64_t gather_step(size_t piece) {
  return 2 + 2 * (uint64_t)piece;
}

static size_t chunk_bytes(int ranks) {
  size_t bytes = STAGING / 2 / (size_t)ranks / EVEN_COMM_LINE * EVEN_COMM_LINE;
  return bytes > LARGEST_CHUNK ? LARGEST_CHUNK : bytes < SMALLEST_CHUNK ? SMALLEST_CHUNK : bytes;
}

static even_status need_staging(even_ucx_group *group) {
  return group->staging != NULL ? EVEN_OK
                                : EVEN_NEW_ARRAY(&group->staging, 2 * (size_t)group->ranks * chunk_bytes(group->ranks));
}

static unsigned char *staging_of(const even_ucx_group *group, int rank, size_t piece) {
  return group->staging + ((piece & 1u) * (size_t)group->ranks + (size_t)rank) * chunk_bytes(group->ranks);
}

/* The transfers of a piece's scatter, or of its gather. */
static even_ucx_transfer *transfers_of(const even_ucx_group *group, size_t piece, bool gathers) {
  return group->transfers + ((piece & 1u) * 2 + (gathers ? 1u : 0u)) * 2 * (size_t)group->ranks;
}

/* ---- all-reduce ---- */

typedef struct pipeline {
  size_t chunk; /* elements; a piece is one for each rank */
  size_t pieces;
} pipeline;

static pipeline plan(const even_ucx_group *group, const even_comm_reduction *job) {
  size_t ranks = (size_t)group->ranks;
  size_t line = EVEN_COMM_LINE / job->element;
  size_t largest = chunk_bytes(group->ranks) / EVEN_COMM_LINE * line;
  size_t pieces = job->count / (largest * ranks) + (job->count % (largest * ranks) != 0);
  size_t chunk = (job->count - 1) / (pieces * ranks) + 1;
  return (pipeline){.chunk = (chunk + line - 1) / line * line, .pieces = pieces};
}

typedef struct span {
  unsigned char *at;
  size_t count;
  size_t bytes;
} span;

/* The chunk of `piece` that `rank` reduces. */
static span chunk_of(const even_ucx_group *group, const even_comm_reduction *job, const pipeline *pipe, size_t piece,
                     int rank) {
  size_t number = piece * (size_t)group->ranks + (size_t)rank;
  size_t begin = even_least_size(number * pipe->chunk, job->count);
  size_t count = even_least_size(pipe->chunk, job->count - begin);
  return (span){.at = job->data + begin * job->element, .count = count, .bytes = count * job->element};
}

static void begin_scatter(even_ucx_group *group, const even_comm_reduction *job, const pipeline *pipe, size_t piece) {
  even_ucx_transfer *transfer = transfers_of(group, piece, false);
  span own = chunk_of(group, job, pipe, piece, group->rank);
  (void)pthread_mutex_lock(&group->lock);
  for (int step = 1; step < group->ranks; step++) {
    int from = (group->rank + group->ranks - step) % group->ranks;
    int to = (group->rank + step) % group->ranks;
    span other = chunk_of(group, job, pipe, piece, to);
    if (own.bytes > 0) {
      even_ucx_receive(group, transfer++, from, even_ucx_call_tag(group, from, scatter_step(piece)),
                       staging_of(group, from, piece), own.bytes);
    }
    if (other.bytes > 0) {
      even_ucx_send(group, transfer++, to, even_ucx_call_tag(group, group->rank, scatter_step(piece)), other.at,
                    other.bytes);
    }
  }
  (void)pthread_mutex_unlock(&group->lock);
}

static void begin_gather(even_ucx_group *group, const even_comm_reduction *job, const pipeline *pipe, size_t piece) {
  even_ucx_transfer *transfer = transfers_of(group, piece, true);
  span own = chunk_of(group, job, pipe, piece, group->rank);
  (void)pthread_mutex_lock(&group->lock);
  for (int step = 1; step < group->ranks; step++) {
    int from = (group->rank + group->ranks - step) % group->ranks;
    int to = (group->rank + step) % group->ranks;
    span other = chunk_of(group, job, pipe, piece, from);
    if (other.bytes > 0) {
      even_ucx_receive(group, transfer++, from, even_ucx_call_tag(group, from, gather_step(piece)), other.at,
                       other.bytes);
    }
    if (own.bytes > 0) {
      even_ucx_send(group, transfer++, to, even_ucx_call_tag(group, group->rank, gather_step(piece)), own.at,
                    own.bytes);
    }
  }
  (void)pthread_mutex_unlock(&group->lock);
}

static even_status finish(even_ucx_group *group, size_t piece, bool gathers) {
  return even_ucx_wait(group, transfers_of(group, piece, gathers), 2 * (size_t)group->ranks);
}

static void reduce_own(even_ucx_group *group, const even_comm_reduction *job, const pipeline *pipe, size_t piece) {
  span own = chunk_of(group, job, pipe, piece, group->rank);
  void *target = own.at;
  for (int rank = 0; rank < group->ranks; rank++) {
    group->sources[rank] = rank == group->rank ? own.at : staging_of(group, rank, piece);
  }
  if (own.count > 0) {
    job->reduce(&target, 1, group->sources, (size_t)group->ranks, own.count, job->divisor);
  }
}

/* Piece k is gathered while piece k+1 is scattered. */
static even_status reduce_large(even_ucx_group *group, const even_comm_reduction *job) {
  pipeline pipe = plan(group, job);
  EVEN_TRY(need_staging(group));
  EVEN_TRY(even_ucx_call_meet(group, 0, NULL));
  begin_scatter(group, job, &pipe, 0);
  for (size_t piece = 0; piece < pipe.pieces; piece++) {
    if (piece + 1 < pipe.pieces) {
      begin_scatter(group, job, &pipe, piece + 1);
    }
    EVEN_TRY(finish(group, piece, false));
    reduce_own(group, job, &pipe, piece);
    if (piece >= 2) {
      EVEN_TRY(finish(group, piece, true)); /* of piece - 2, whose transfers are now this one's */
    }
    begin_gather(group, job, &pipe, piece);
  }
  EVEN_TRY(finish(group, 0, true));
  return finish(group, 1, true);
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

even_status even_ucx_all_reduce(even_comm *comm, const even_comm_reduction *job) {
  even_ucx_group *group = even_ucx_of(comm);
  EVEN_TRY(even_ucx_call_begin(group, EVEN_CALL_ALL_REDUCE, job->dtype, job->op, 0, job->count, NULL));
  return even_ucx_call_end(group,
                           job->bytes <= EVEN_UCX_SMALL_BYTES ? reduce_small(group, job) : reduce_large(group, job));
}

/* ---- reduce-scatter ---- */

typedef struct scatter {
  const even_comm_scattering *job;
  size_t cell; /* elements of a rank's part that one other sends at a time */
  size_t own_begin;
} scatter;

/* What of a part of `count` elements is in a round. */
static size_t in_round(const scatter *work, size_t count, size_t round) {
  size_t first = round * work->cell;
  return first >= count ? 0 : even_least_size(count - first, work->cell);
}

static void begin_round(even_ucx_group *group, const scatter *work, size_t round) {
  const even_comm_scattering *job = work->job;
  even_ucx_transfer *transfer = transfers_of(group, round, false);
  size_t own = in_round(work, job->counts[group->rank], round);
  size_t begin = 0;
  (void)pthread_mutex_lock(&group->lock);
  for (int rank = 0; rank < group->ranks; begin += job->counts[rank], rank++) {
    size_t other = in_round(work, job->counts[rank], round);
    if (rank == group->rank) {
      continue;
    }
    if (own > 0) {
      even_ucx_receive(group, transfer++, rank, even_ucx_call_tag(group, rank, scatter_step(round)),
                       staging_of(group, rank, round), own * job->element);
    }
    if (other > 0) {
      even_ucx_send(group, transfer++, rank, even_ucx_call_tag(group, group->rank, scatter_step(round)),
                    job->input + (begin + round * work->cell) * job->element, other * job->element);
    }
  }
  (void)pthread_mutex_unlock(&group->lock);
}

static void reduce_round(even_ucx_group *group, const scatter *work, size_t round) {
  const even_comm_scattering *job = work->job;
  size_t first = round * work->cell;
  size_t count = in_round(work, job->counts[group->rank], round);
  void *target = job->output + first * job->element;
  for (int rank = 0; rank < group->ranks; rank++) {
    group->sources[rank] = staging_of(group, rank, round);
  }
  group->sources[group->rank] = job->input + (work->own_begin + first) * job->element;
  if (count > 0) {
    job->reduce(&target, 1, group->sources, (size_t)group->ranks, count, job->divisor);
  }
}

static even_status scatter_large(even_ucx_group *group, const scatter *work) {
  size_t rounds = work->job->largest / work->cell + (work->job->largest % work->cell != 0);
  EVEN_TRY(need_staging(group));
  EVEN_TRY(even_ucx_call_meet(group, 0, NULL));
  begin_round(group, work, 0);
  for (size_t round = 0; round < rounds; round++) {
    if (round + 1 < rounds) {
      begin_round(group, work, round + 1);
    }
    EVEN_TRY(finish(group, round, false));
    reduce_round(group, work, round);
  }
  return EVEN_OK;
}

static even_status scatter_small(even_ucx_group *group, const scatter *work) {
  const even_comm_scattering *job = work->job;
  void *target = job->output;
  if (job->bytes > 0) {
    memcpy(group->outgoing[group->rank].data, job->input, job->bytes);
  }
  EVEN_TRY(even_ucx_call_meet(group, job->bytes, NULL));
  for (int rank = 0; rank < group->ranks; rank++) {
    const unsigned char *data = rank == group->rank ? job->input : group->arrived[rank].data;
    group->sources[rank] = data == NULL ? NULL : data + work->own_begin * job->element;
  }
  if (job->counts[group->rank] > 0) {
    job->reduce(&target, 1, group->sources, (size_t)group->ranks, job->counts[group->rank], job->divisor);
  }
  return EVEN_OK;
}

even_status even_ucx_reduce_scatter(even_comm *comm, const even_comm_scattering *job) {
  even_ucx_group *group = even_ucx_of(comm);
  size_t line = EVEN_COMM_LINE / job->element;
  scatter work = {.job = job, .cell = chunk_bytes(group->ranks) / EVEN_COMM_LINE * line};
  for (int rank = 0; rank < group->rank; rank++) {
    work.own_begin += job->counts[rank];
  }
  EVEN_TRY(even_ucx_call_begin(group, EVEN_CALL_REDUCE_SCATTER, job->dtype, job->op, 0, job->total, job->counts));
  return even_ucx_call_end(
      group, job->bytes <= EVEN_UCX_SMALL_BYTES ? scatter_small(group, &work) : scatter_large(group, &work));
}
