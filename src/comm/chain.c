/* All-reduce by a chain: a piece of shared memory goes from rank to rank, each adds its data to it, the last writes the
 * sum, and all take it. No rank waits for all others: it does what is there for it, several pieces at a time, and then
 * gives its core to whoever has something to do. That is for ranks that share cores; what is read and written is as
 * much as with parts for each rank, and lies in less room. */
#include "base/checked.h"
#include "base/fail.h"
#include "comm/group.h"

#include <string.h>

/* What a rank adds at a time, and how many of these are under way. Small enough to stay in a core's caches, or in those
 * that cores share; large enough that changing from rank to rank costs little beside it. A small call still has a few.
 */
#define MOST_BYTES ((size_t)256 * 1024)
#define LEAST_BYTES ((size_t)16 * 1024)
#define LEAST_PIECES 4u
#define SLOTS 8u
/* Sleepers are woken for so many pieces at once, or when who has made them waits. */
#define WOKEN_FOR 2u
/* Elements of 16 bits that are widened at a time. */
#define BLOCK ((size_t)512)

typedef even_comm_reduction reduction;

static int last_of(const even_comm *comm) {
  return comm->ranks - 1;
}

/* Pieces of this call to which a rank has added its data, and whose sums it has taken. */
static uint32_t added_by(const even_comm *comm, int rank) {
  return atomic_load(&comm->controls[rank].chain_added) - comm->chain.begin;
}
static uint32_t taken_by(const even_comm *comm, int rank) {
  return atomic_load(&comm->controls[rank].chain_taken) - comm->chain.begin;
}

/* The first rank that has not taken `pieces`, `ranks` where all have; the last one has its sums as it makes them. */
static int first_behind(const even_comm *comm, uint32_t pieces) {
  for (int rank = 0; rank < last_of(comm); rank++) {
    if (taken_by(comm, rank) < pieces) {
      return rank;
    }
  }
  return comm->ranks;
}

static bool can_add(const even_comm *comm) {
  const even_comm_chain *chain = &comm->chain;
  if (chain->added == chain->pieces) {
    return false;
  }
  if (comm->rank > 0) {
    return added_by(comm, comm->rank - 1) > chain->added;
  }
  return chain->added < chain->slots || first_behind(comm, chain->added - chain->slots + 1) == comm->ranks;
}

static bool can_take(const even_comm *comm) {
  return comm->rank < last_of(comm) && comm->chain.taken < added_by(comm, last_of(comm));
}

bool even_chain_has_done(const even_comm *comm, int rank) {
  return added_by(comm, rank) == comm->chain.pieces &&
         (rank == last_of(comm) || taken_by(comm, rank) == comm->chain.pieces);
}

/* Whom a rank waits for that can do nothing: of those who have added least the first, for those behind it wait, too;
 * unless that is the first of all, which may wait for room. */
int even_chain_missing(const even_comm *comm) {
  if (can_add(comm) || can_take(comm)) {
    return comm->ranks;
  }
  uint32_t least = added_by(comm, last_of(comm));
  int rank = 0;
  while (rank < last_of(comm) && added_by(comm, rank) > least) {
    rank++;
  }
  if (rank == 0 && least >= comm->chain.slots) {
    int behind = first_behind(comm, least - comm->chain.slots + 1);
    rank = behind < comm->ranks ? behind : rank;
  }
  return rank == comm->rank ? comm->ranks : rank; /* it can go on by now */
}

static unsigned char *slot_of(const even_comm *comm, uint32_t piece) {
  return even_comm_staging_of(comm, 0, 0) + (size_t)(piece % comm->chain.slots) * MOST_BYTES;
}

/* Elements of a piece, and where its data begin. */
static size_t piece_of(const even_comm *comm, const reduction *job, uint32_t piece, unsigned char **data) {
  size_t whole = comm->chain.elements;
  size_t first = (size_t)(comm->chain.backwards ? comm->chain.pieces - 1 - piece : piece) * whole;
  *data = job->data + first * job->element;
  return even_least_size(job->count - first, whole);
}

static bool is_narrow(even_dtype dtype) {
  return dtype == EVEN_F16 || dtype == EVEN_BF16;
}

/* Sums of 16-bit floats go through the chain in fp32 and are rounded once, by the last. */
static void add_narrow(const even_comm *comm, const reduction *job, float *slot, uint16_t *data, size_t count) {
  const even_kernels *kernels = comm->kernels;
  even_reduce_function *const step = kernels->reduce[EVEN_F32][job->op];
  for (size_t first = 0; first < count; first += BLOCK) {
    float term[BLOCK];
    size_t block = even_least_size(count - first, BLOCK);
    void *sum = comm->rank < last_of(comm) ? slot + first : term;
    const void *sources[2] = {slot + first, term};
    kernels->widen[job->dtype](term, data + first, block);
    if (comm->rank == 0) {
      memcpy(slot + first, term, block * sizeof *term);
    } else if (comm->rank < last_of(comm)) {
      comm->chain.step(&sum, 1, sources, 2, block, 1.0);
    } else {
      step(&sum, 1, sources, 2, block, job->divisor);
      kernels->narrow[job->dtype](data + first, term, block, 1.0f);
      memcpy((uint16_t *)(void *)slot + first, data + first,
             block * sizeof *data); /* of the slot's sums none is left before */
    }
  }
}

static void add_as_it_is(const even_comm *comm, const reduction *job, void *slot, void *data, size_t count) {
  void *targets[2] = {slot, data};
  const void *sources[2] = {slot, data};
  if (comm->rank == 0) {
    memcpy(slot, data, count * job->element);
  } else if (comm->rank < last_of(comm)) {
    comm->chain.step(targets, 1, sources, 2, count, 1.0);
  } else {
    job->reduce(targets, 2, sources, 2, count, job->divisor);
  }
}

static void add(even_comm *comm, const reduction *job) {
  unsigned char *data = NULL;
  void *slot = slot_of(comm, comm->chain.added);
  size_t count = piece_of(comm, job, comm->chain.added, &data);
  if (is_narrow(job->dtype)) {
    add_narrow(comm, job, slot, (uint16_t *)(void *)data, count);
  } else {
    add_as_it_is(comm, job, slot, data, count);
  }
  comm->chain.added++;
  atomic_store(&comm->controls[comm->rank].chain_added, comm->chain.begin + comm->chain.added);
}

static void take(even_comm *comm, const reduction *job) {
  unsigned char *data = NULL;
  size_t count = piece_of(comm, job, comm->chain.taken, &data);
  memcpy(data, slot_of(comm, comm->chain.taken), count * job->element);
  comm->chain.taken++;
  atomic_store(&comm->controls[comm->rank].chain_taken, comm->chain.begin + comm->chain.taken);
}

static void wake(even_comm *comm) {
  if (atomic_load(&comm->header->sleepers) != 0) {
    even_group_wake(comm);
  }
}

static even_status go_through(even_comm *comm, const reduction *job) {
  uint32_t unsaid = 0;
  while (!even_chain_has_done(comm, comm->rank)) {
    if (can_take(comm)) {
      take(comm, job);
    } else if (can_add(comm)) {
      add(comm, job);
    } else {
      wake(comm);
      unsaid = 0;
      EVEN_TRY(even_stage_wait(comm));
      continue;
    }
    if (++unsaid == WOKEN_FOR) {
      wake(comm);
      unsaid = 0;
    }
  }
  wake(comm);
  return EVEN_OK;
}

even_status even_chain_reduce(even_comm *comm, const reduction *job, bool backwards) {
  even_comm_chain *chain = &comm->chain;
  even_dtype summed = is_narrow(job->dtype) ? EVEN_F32 : job->dtype;
  size_t each = even_dtype_bytes(summed);
  size_t bytes = (job->count / LEAST_PIECES * each + EVEN_COMM_LINE) / EVEN_COMM_LINE * EVEN_COMM_LINE;
  bytes = bytes > MOST_BYTES ? MOST_BYTES : bytes < LEAST_BYTES ? LEAST_BYTES : bytes;
  size_t room = 4 * comm->layout.most_piece / MOST_BYTES;
  chain->elements = bytes / each;
  chain->pieces = (uint32_t)((job->count - 1) / chain->elements + 1);
  chain->slots = (uint32_t)even_least_size(SLOTS, room);
  chain->added = chain->taken = 0;
  chain->backwards = backwards;
  chain->step = comm->kernels->reduce[summed][job->op == EVEN_AVG ? EVEN_SUM : job->op];
  chain->under_way = true;
  even_status status = go_through(comm, job);
  chain->under_way = false;
  chain->begin += chain->pieces;
  return status;
}
