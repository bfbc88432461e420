/* All-reduce: at once for small messages, in place for data in the arena, in a
 * pipeline of cache-sized pieces for any other. */
#include "base/checked.h"
#include "base/fail.h"
#include "comm/group.h"
#include "comm/writing.h"

#include <string.h>

/* What a rank claims at a time of a reduction in the arena. */
#define LARGEST_CLAIM ((size_t)64 * 1024)
#define SMALLEST_CLAIM ((size_t)4 * 1024)

typedef even_comm_reduction reduction;

/* Everybody writes, all meet, everybody reduces everything. */
static even_status reduce_small(even_comm *comm, const reduction *job) {
  uint32_t slot = comm->slot++;
  void *target = job->data;
  if (job->count > 0) {
    memcpy(even_comm_slot_of(comm, comm->rank, slot), job->data, job->count * job->element);
  }
  EVEN_TRY(even_call_meet(comm));
  for (int rank = 0; rank < comm->ranks; rank++) {
    comm->sources[rank] = even_comm_slot_of(comm, rank, slot);
  }
  job->reduce(&target, 1, comm->sources, (size_t)comm->ranks, job->count, job->divisor);
  return EVEN_OK;
}

/* Whether a call begins at its data's end: every second one of those whose data leave the caches does, for what the one
 * before it, or whoever made the data, has touched last is in the caches still. */
static bool turns_back(even_comm *comm, bool large) {
  bool back = large && comm->backwards;
  comm->backwards = large ? !comm->backwards : comm->backwards;
  return back;
}

/* Pieces are claimed, not assigned: a rank that has less of a processor does less of the work. Of two ranks each takes
 * its own from one end on, until they meet: what it has touched in the call before is nearer to it. The sum is in rank
 * order whoever forms it. */
static void reduce_claimed(even_comm *comm, const reduction *job) {
  size_t ranks = (size_t)comm->ranks;
  size_t piece_bytes = job->count * job->element / (ranks * 4);
  piece_bytes = piece_bytes > LARGEST_CLAIM    ? LARGEST_CLAIM
                : piece_bytes < SMALLEST_CLAIM ? SMALLEST_CLAIM
                                               : piece_bytes;
  size_t piece = piece_bytes / EVEN_COMM_LINE * EVEN_COMM_LINE / job->element;
  size_t pieces = job->count / piece + (job->count % piece != 0);
  _Atomic uint32_t *claim = &comm->header->claim[comm->call_count & 1u];
  /* Two ranks on one core have all of its memory to themselves: to ask ahead is in the way there. */
  bool alone = ranks == 2 && comm->arrival.yields;
  bool known = job->dtype == EVEN_F32 && ranks <= EVEN_IN_PLACE_RANKS && !alone;
  even_in_place_function *in_place = known ? comm->kernels->in_place[job->op] : NULL;
  for (size_t own = 0;; own++) {
    size_t claimed = atomic_fetch_add_explicit(claim, 1u, memory_order_relaxed);
    if (claimed >= pieces) {
      return;
    }
    size_t mine = ranks != 2 ? claimed : comm->rank == 0 ? own : pieces - 1 - own;
    size_t first = mine * piece;
    size_t count = even_least_size(job->count - first, piece);
    for (int rank = 0; rank < comm->ranks; rank++) {
      unsigned char *part = even_call_arena_data(comm, rank) + first * job->element;
      comm->sources[rank] = part;
      comm->targets[rank] = part;
    }
    if (in_place != NULL) {
      in_place(comm->targets, ranks, count, job->divisor);
    } else {
      job->reduce(comm->targets, ranks, comm->sources, ranks, count, job->divisor);
    }
  }
}

/* A piece is `ranks` chunks; chunk r of each piece is reduced by rank r. */
typedef struct pipeline {
  size_t chunk; /* elements */
  size_t pieces;
  bool backwards; /* the last piece comes first */
} pipeline;

static pipeline plan_pipeline(const even_comm *comm, const reduction *job) {
  size_t ranks = (size_t)comm->ranks;
  size_t line = EVEN_COMM_LINE / job->element;
  size_t largest = comm->piece_bytes / ranks / EVEN_COMM_LINE * line;
  size_t pieces = job->count / (largest * ranks) + (job->count % (largest * ranks) != 0);
  size_t chunk = (job->count - 1) / (pieces * ranks) + 1;
  return (pipeline){.chunk = (chunk + line - 1) / line * line, .pieces = pieces};
}

/* Where chunk `rank` of a piece begins, no further than the data's end. */
static size_t chunk_begin(const reduction *job, const pipeline *pipe, size_t ranks, size_t piece, size_t rank) {
  size_t begin = (piece * ranks + rank) * pipe->chunk;
  return even_least_size(begin, job->count);
}

/* Copies the chunks that others reduce into this rank's staging. */
static void stage_in(even_comm *comm, const reduction *job, const pipeline *pipe, size_t piece, bool past_caches) {
  size_t ranks = (size_t)comm->ranks;
  size_t own = (size_t)comm->rank;
  unsigned char *staging = even_comm_staging_of(comm, comm->rank, piece & 1u);
  size_t begin = chunk_begin(job, pipe, ranks, piece, 0);
  size_t own_begin = chunk_begin(job, pipe, ranks, piece, own);
  size_t own_end = chunk_begin(job, pipe, ranks, piece, own + 1);
  size_t end = chunk_begin(job, pipe, ranks, piece, ranks);
  even_writing_copy(staging, job->data + begin * job->element, (own_begin - begin) * job->element, past_caches);
  even_writing_copy(staging + (own_end - begin) * job->element, job->data + own_end * job->element,
                    (end - own_end) * job->element, past_caches);
}

/* Of two ranks, one may leave its result where it read the other's chunk: in the other's staging, whose lines it then
 * has at hand. That is less traffic between the cores than a place of its own. Among more ranks it would be more. Ranks
 * may write in different ways: each says where its result lies. */
static bool leaves_in_place(const even_comm *comm, bool past_caches) {
  return comm->ranks == 2 && !past_caches;
}

/* The chunk of `piece` that `rank` has reduced, for this rank. */
static const unsigned char *reduced_chunk(const even_comm *comm, const reduction *job, const pipeline *pipe,
                                          size_t piece, int rank) {
  size_t parity = piece & 1u;
  if (atomic_load_explicit(&comm->controls[rank].in_place[parity], memory_order_relaxed) != 0) {
    return even_comm_staging_of(comm, comm->rank, parity) + (size_t)rank * pipe->chunk * job->element;
  }
  return even_comm_staging_of(comm, rank, 2 + parity);
}

/* Reduces this rank's chunk into the data and, for the others, into staging. */
static void reduce_chunk(even_comm *comm, const reduction *job, const pipeline *pipe, size_t piece, bool past_caches) {
  size_t ranks = (size_t)comm->ranks;
  size_t own = (size_t)comm->rank;
  size_t begin = chunk_begin(job, pipe, ranks, piece, own);
  size_t end = chunk_begin(job, pipe, ranks, piece, own + 1);
  size_t offset = own * pipe->chunk * job->element;
  bool in_place = leaves_in_place(comm, past_caches);
  void *result = even_comm_staging_of(comm, comm->rank, 2 + (piece & 1u));
  for (int rank = 0; rank < comm->ranks; rank++) {
    unsigned char *chunk = even_comm_staging_of(comm, rank, piece & 1u) + offset;
    comm->sources[rank] = chunk;
    result = in_place && rank != comm->rank ? chunk : result;
  }
  atomic_store_explicit(&comm->controls[own].in_place[piece & 1u], in_place, memory_order_relaxed);
  comm->sources[own] = job->data + begin * job->element;
  void *targets[2] = {job->data + begin * job->element, result};
  job->reduce(targets, past_caches ? 1 : 2, comm->sources, ranks, end - begin, job->divisor);
  if (past_caches) {
    even_copy_past_caches(targets[1], targets[0], (end - begin) * job->element);
  }
}

/* Copies the chunks that others reduced. */
static void stage_out(even_comm *comm, const reduction *job, const pipeline *pipe, size_t piece, bool past_caches) {
  size_t ranks = (size_t)comm->ranks;
  for (size_t step = 1; step < ranks; step++) {
    size_t rank = ((size_t)comm->rank + step) % ranks;
    size_t begin = chunk_begin(job, pipe, ranks, piece, rank);
    size_t end = chunk_begin(job, pipe, ranks, piece, rank + 1);
    even_writing_copy(job->data + begin * job->element, reduced_chunk(comm, job, pipe, piece, (int)rank),
                      (end - begin) * job->element, past_caches);
  }
}

/* The piece that comes in turn `turn`. */
static size_t piece_at(const pipeline *pipe, size_t turn) {
  return pipe->backwards ? pipe->pieces - 1 - turn : turn;
}

static bool is_whole(const reduction *job, const pipeline *pipe, size_t piece) {
  return (piece + 1) * 2 * pipe->chunk <= job->count;
}

/* All three parts of a stage of two ranks, where the kernels have them in one loop and the pieces are whole; false:
 * they are to be done one after the other. */
static bool stage_at_once(even_comm *comm, const reduction *job, const pipeline *pipe, size_t stage) {
  even_staged_function *at_once = job->dtype == EVEN_F32 ? comm->kernels->staged[job->op] : NULL;
  size_t out = piece_at(pipe, stage - 2);
  size_t reduced = piece_at(pipe, stage - 1);
  size_t in = piece_at(pipe, stage);
  if (comm->ranks != 2 || at_once == NULL || !is_whole(job, pipe, out) || !is_whole(job, pipe, reduced) ||
      !is_whole(job, pipe, in)) {
    return false;
  }
  size_t own = (size_t)comm->rank;
  int other = 1 - comm->rank;
  size_t bytes = pipe->chunk * job->element;
  unsigned char *data = job->data + (2 * reduced + own) * bytes;
  unsigned char *result = even_comm_staging_of(comm, other, reduced & 1u) + own * bytes;
  even_staged work = {
      .out = job->data + (2 * out + (size_t)other) * bytes,
      .result = reduced_chunk(comm, job, pipe, out, other),
      .targets = {data, result},
      .in = job->data + (2 * in + (size_t)other) * bytes,
      .staging = even_comm_staging_of(comm, comm->rank, in & 1u) + (size_t)other * bytes,
  };
  work.sources[own] = data;
  work.sources[other] = result;
  atomic_store_explicit(&comm->controls[own].in_place[reduced & 1u], true, memory_order_relaxed);
  at_once(&work, pipe->chunk, job->divisor);
  return true;
}

/* Stage k copies piece k-2 out, reduces piece k-1 and copies piece k in, then all meet. A buffer written in stage k was
 * last read or written by others in stage k-1 (two of each: the piece's number says which). */
static even_status reduce_staged(even_comm *comm, const reduction *job) {
  pipeline pipe = plan_pipeline(comm, job);
  bool large = job->bytes >= comm->large_bytes;
  pipe.backwards = turns_back(comm, large);
  even_shared_staged_begins(comm, job->bytes);
  for (size_t stage = 0; stage < pipe.pieces + 2; stage++) {
    bool full = stage >= 2 && stage < pipe.pieces;
    bool past_caches = even_writing_begin(comm, full);
    bool done = full && large && !past_caches && stage_at_once(comm, job, &pipe, stage);
    if (stage >= 2 && !done) {
      stage_out(comm, job, &pipe, piece_at(&pipe, stage - 2), past_caches);
    }
    if (stage >= 1 && stage <= pipe.pieces && !done) {
      reduce_chunk(comm, job, &pipe, piece_at(&pipe, stage - 1), past_caches);
    }
    if (stage < pipe.pieces && !done) {
      stage_in(comm, job, &pipe, piece_at(&pipe, stage), past_caches);
    }
    if (stage <= pipe.pieces) {
      EVEN_TRY(even_call_next(comm));
    }
    even_writing_end(comm, pipe.chunk * job->element);
  }
  return even_shared_staged_ends(comm, job->bytes);
}

static even_status reduce_by_chain(even_comm *comm, const reduction *job) {
  even_shared_staged_begins(comm, job->bytes);
  EVEN_TRY(even_chain_reduce(comm, job, turns_back(comm, job->bytes >= 2 * comm->large_bytes / (size_t)comm->ranks)));
  return even_shared_staged_ends(comm, job->bytes);
}

static even_status reduce_large(even_comm *comm, const reduction *job) {
  EVEN_TRY(even_call_meet(comm));
  if (even_call_all_in_arena(comm)) {
    reduce_claimed(comm, job);
    return even_call_next(comm);
  }
  if (comm->chained) {
    return reduce_by_chain(comm, job);
  }
  return reduce_staged(comm, job);
}

even_status even_shared_all_reduce(even_comm *comm, const even_comm_reduction *job) {
  EVEN_TRY(
      even_call_begin(comm, EVEN_CALL_ALL_REDUCE, job->dtype, job->op, 0, job->count, NULL, job->data, job->bytes));
  even_status status = EVEN_OK;
  if (comm->ranks > 1) {
    status = job->bytes <= EVEN_COMM_SLOT_BYTES ? reduce_small(comm, job) : reduce_large(comm, job);
  }
  return even_call_end(comm, status);
}
