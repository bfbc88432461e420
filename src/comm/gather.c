/* The collectives in which ranks own parts: reduce-scatter, all-gather, broadcast; and the barrier. */
#include "base/checked.h"
#include "base/fail.h"
#include "comm/writing.h"

#include <stdint.h>
#include <string.h>

/* From this size on an output is larger than what the caches would keep of it. */
#define PAST_CACHES ((size_t)8 << 20)

static void copy(void *target, const void *source, size_t bytes, bool past_caches) {
  if (bytes == 0 || target == source) {
    return;
  }
  if (past_caches) {
    even_copy_past_caches(target, source, bytes);
  } else {
    memmove(target, source, bytes);
  }
}

/* Of those that are not 0. */
static size_t smallest(const size_t *counts, int ranks) {
  size_t count = SIZE_MAX;
  for (int rank = 0; rank < ranks; rank++) {
    count = counts[rank] > 0 ? even_least_size(count, counts[rank]) : count;
  }
  return count;
}

/* How many ranks before this one have a part that is not empty. */
static size_t parts_before(const size_t *counts, int rank) {
  size_t parts = 0;
  for (int before = 0; before < rank; before++) {
    parts += counts[before] > 0;
  }
  return parts;
}

/* Elements before rank's part. */
static size_t part_begin(const size_t *counts, int rank) {
  size_t begin = 0;
  for (int before = 0; before < rank; before++) {
    begin += counts[before];
  }
  return begin;
}

/* ---- reduce-scatter ---- */

typedef even_comm_scattering scatter;

static void reduce_part(even_comm *comm, const scatter *job, void *target, size_t count) {
  if (count > 0) {
    job->reduce(&target, 1, comm->sources, (size_t)comm->ranks, count, job->divisor);
  }
}

static even_status scatter_small(even_comm *comm, const scatter *job) {
  uint32_t slot = comm->slot++;
  copy(even_comm_slot_of(comm, comm->rank, slot), job->input, job->total * job->element, false);
  EVEN_TRY(even_call_meet(comm));
  size_t begin = part_begin(job->counts, comm->rank) * job->element;
  for (int rank = 0; rank < comm->ranks; rank++) {
    comm->sources[rank] = even_comm_slot_of(comm, rank, slot) + begin;
  }
  reduce_part(comm, job, job->output, job->counts[comm->rank]);
  return EVEN_OK;
}

static even_status scatter_in_arena(even_comm *comm, const scatter *job) {
  size_t begin = part_begin(job->counts, comm->rank) * job->element;
  for (int rank = 0; rank < comm->ranks; rank++) {
    comm->sources[rank] = even_call_arena_data(comm, rank) + begin;
  }
  reduce_part(comm, job, job->output, job->counts[comm->rank]);
  return even_call_next(comm); /* the input may change only after all have read it */
}

/* In rounds: everybody stages the next cells of the parts that others have, all meet, everybody reduces its own cell.
 */
static even_status scatter_staged(even_comm *comm, const scatter *job) {
  size_t ranks = (size_t)comm->ranks;
  size_t own = (size_t)comm->rank;
  size_t own_begin = part_begin(job->counts, comm->rank);
  size_t own_cell = parts_before(job->counts, comm->rank);
  size_t parts = parts_before(job->counts, comm->ranks); /* 0 where there is nothing to reduce: no round then */
  size_t cell = comm->piece_bytes / (parts > 0 ? parts : 1) / EVEN_COMM_LINE * EVEN_COMM_LINE / job->element;
  size_t common = smallest(job->counts, comm->ranks);
  even_shared_staged_begins(comm, job->bytes);
  for (size_t first = 0, round = 0; first < job->largest; first += cell, round++) {
    unsigned char *staging = even_comm_staging_of(comm, comm->rank, round & 1u);
    size_t begin = 0;
    bool past_caches = even_writing_begin(comm, first + cell <= common);
    for (size_t rank = 0, part = 0; rank < ranks; begin += job->counts[rank], part += job->counts[rank] > 0, rank++) {
      if (rank != own && first < job->counts[rank]) {
        even_writing_copy(staging + part * cell * job->element, job->input + (begin + first) * job->element,
                          even_least_size(cell, job->counts[rank] - first) * job->element, past_caches);
      }
    }
    EVEN_TRY(even_call_next(comm));
    if (first < job->counts[own]) {
      for (int rank = 0; rank < comm->ranks; rank++) {
        comm->sources[rank] = even_comm_staging_of(comm, rank, round & 1u) + own_cell * cell * job->element;
      }
      comm->sources[own] = job->input + (own_begin + first) * job->element;
      reduce_part(comm, job, job->output + first * job->element, even_least_size(cell, job->counts[own] - first));
    }
    even_writing_end(comm, cell * job->element);
  }
  return even_shared_staged_ends(comm, job->bytes);
}

static even_status scatter_large(even_comm *comm, const scatter *job) {
  EVEN_TRY(even_call_meet(comm));
  return even_call_all_in_arena(comm) ? scatter_in_arena(comm, job) : scatter_staged(comm, job);
}

even_status even_shared_reduce_scatter(even_comm *comm, const even_comm_scattering *job) {
  EVEN_TRY(even_call_begin(comm, EVEN_CALL_REDUCE_SCATTER, job->dtype, job->op, 0, job->total, job->counts, job->input,
                           job->bytes));
  even_status status = EVEN_OK;
  if (comm->ranks == 1) {
    copy(job->output, job->input, job->bytes, false);
  } else {
    status = job->bytes <= EVEN_COMM_SLOT_BYTES ? scatter_small(comm, job) : scatter_large(comm, job);
  }
  return even_call_end(comm, status);
}

/* ---- all-gather ---- */

typedef even_comm_gathering gathering;

static even_status gather_small(even_comm *comm, const gathering *job) {
  uint32_t slot = comm->slot++;
  copy(even_comm_slot_of(comm, comm->rank, slot), job->input, job->counts[comm->rank] * job->element, false);
  EVEN_TRY(even_call_meet(comm));
  unsigned char *to = job->output;
  for (int rank = 0; rank < comm->ranks; rank++) {
    size_t bytes = job->counts[rank] * job->element;
    copy(to, even_comm_slot_of(comm, rank, slot), bytes, false);
    to += bytes;
  }
  return EVEN_OK;
}

static even_status gather_from_arenas(even_comm *comm, const gathering *job) {
  for (int step = 1; step < comm->ranks; step++) {
    int rank = (comm->rank + step) % comm->ranks;
    copy(job->output + part_begin(job->counts, rank) * job->element, even_call_arena_data(comm, rank),
         job->counts[rank] * job->element, (job->bytes >= PAST_CACHES));
  }
  return even_call_next(comm);
}

static even_status gather_staged(even_comm *comm, const gathering *job) {
  size_t cell = comm->piece_bytes;
  size_t own_bytes = job->counts[comm->rank] * job->element;
  size_t common = smallest(job->counts, comm->ranks) * job->element;
  even_shared_staged_begins(comm, job->bytes);
  for (size_t first = 0, round = 0; first < job->largest; first += cell, round++) {
    bool past_caches = even_writing_begin(comm, first + cell <= common);
    if (first < own_bytes) {
      even_writing_copy(even_comm_staging_of(comm, comm->rank, round & 1u), job->input + first,
                        even_least_size(cell, own_bytes - first), past_caches);
    }
    EVEN_TRY(even_call_next(comm));
    unsigned char *part = job->output;
    for (int rank = 0; rank < comm->ranks; rank++) {
      size_t bytes = job->counts[rank] * job->element;
      if (rank != comm->rank && first < bytes) {
        copy(part + first, even_comm_staging_of(comm, rank, round & 1u), even_least_size(cell, bytes - first),
             past_caches || (job->bytes >= PAST_CACHES));
      }
      part += bytes;
    }
    even_writing_end(comm, cell);
  }
  return even_shared_staged_ends(comm, job->bytes);
}

static even_status gather_large(even_comm *comm, const gathering *job) {
  EVEN_TRY(even_call_meet(comm));
  copy(job->output + part_begin(job->counts, comm->rank) * job->element, job->input,
       job->counts[comm->rank] * job->element, false);
  return even_call_all_in_arena(comm) ? gather_from_arenas(comm, job) : gather_staged(comm, job);
}

even_status even_shared_all_gather(even_comm *comm, const even_comm_gathering *job) {
  size_t own_bytes = job->counts[comm->rank] * job->element;
  EVEN_TRY(
      even_call_begin(comm, EVEN_CALL_ALL_GATHER, job->dtype, 0, 0, job->total, job->counts, job->input, own_bytes));
  even_status status = EVEN_OK;
  if (comm->ranks == 1) {
    copy(job->output, job->input, own_bytes, false);
  } else {
    status = job->largest <= EVEN_COMM_SLOT_BYTES ? gather_small(comm, job) : gather_large(comm, job);
  }
  return even_call_end(comm, status);
}

/* ---- broadcast and barrier ---- */

static even_status broadcast_small(even_comm *comm, void *data, size_t bytes, int root) {
  uint32_t slot = comm->slot++;
  if (comm->rank == root) {
    copy(even_comm_slot_of(comm, root, slot), data, bytes, false);
  }
  EVEN_TRY(even_call_meet(comm));
  if (comm->rank != root) {
    copy(data, even_comm_slot_of(comm, root, slot), bytes, false);
  }
  return EVEN_OK;
}

static even_status broadcast_large(even_comm *comm, unsigned char *data, size_t bytes, int root) {
  bool past_caches = bytes >= PAST_CACHES;
  EVEN_TRY(even_call_meet(comm));
  const size_t cell = comm->piece_bytes; /* as the meeting says */
  if (comm->controls[root].call[comm->call_count & 1u].arena_offset != EVEN_NOT_IN_ARENA) {
    if (comm->rank != root) {
      copy(data, even_call_arena_data(comm, root), bytes, past_caches);
    }
    return even_call_next(comm);
  }
  even_shared_staged_begins(comm, bytes);
  for (size_t first = 0, round = 0; first < bytes; first += cell, round++) {
    unsigned char *staging = even_comm_staging_of(comm, root, round & 1u);
    size_t part = even_least_size(cell, bytes - first);
    bool past = even_writing_begin(comm, part == cell);
    if (comm->rank == root) {
      even_writing_copy(staging, data + first, part, past);
    }
    EVEN_TRY(even_call_next(comm));
    if (comm->rank != root) {
      copy(data + first, staging, part, past || past_caches);
    }
    even_writing_end(comm, cell);
  }
  return even_shared_staged_ends(comm, bytes);
}

even_status even_shared_broadcast(even_comm *comm, unsigned char *data, size_t bytes, int root) {
  EVEN_TRY(even_call_begin(comm, EVEN_CALL_BROADCAST, EVEN_U8, 0, root, bytes, NULL, data, bytes));
  even_status status = EVEN_OK;
  if (comm->ranks > 1) {
    status = bytes <= EVEN_COMM_SLOT_BYTES ? broadcast_small(comm, data, bytes, root)
                                           : broadcast_large(comm, data, bytes, root);
  }
  return even_call_end(comm, status);
}

even_status even_shared_barrier(even_comm *comm) {
  EVEN_TRY(even_call_begin(comm, EVEN_CALL_BARRIER, 0, 0, 0, 0, NULL, NULL, 0));
  return even_call_end(comm, even_call_meet(comm));
}
