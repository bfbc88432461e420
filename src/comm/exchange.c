/* All-to-all with parts of any sizes; a gather or a scatter is one in which few parts are not empty. */
#include "base/checked.h"
#include "base/fail.h"
#include "comm/called.h"
#include "comm/writing.h"

#include <string.h>

/* Behind the words for each rank: what its sends come to, and what it expects, as numbers whose sums over all ranks are
 * the same where every rank gets what it expects. So all ranks find together that one does not. */
#define CHECK_WORDS 2

typedef struct exchange {
  const void *const *inputs; /* a part for each rank */
  void *const *outputs;      /* a part from each rank */
  const size_t *sends;       /* bytes of either */
  const size_t *receives;
  uint32_t slot;
} exchange;

/* Every rank writes what it sends to whom into its slot, and the parts too where all of them find room behind it. */
static const uint64_t *row_of(const even_comm *comm, const exchange *job, int rank) {
  return (const uint64_t *)(const void *)even_comm_slot_of(comm, rank, job->slot);
}

static size_t row_words(const even_comm *comm) {
  return (size_t)comm->ranks + CHECK_WORDS;
}

/* Of so many bytes of these elements from one rank to another; splitmix64's finaliser (Steele, Lea, Flood, OOPSLA
 * 2014). */
static uint64_t mark_of(int from, int to, size_t bytes, uint32_t elements) {
  uint64_t mark = (((uint64_t)(uint32_t)from << 32 | (uint32_t)to) + 1u) * 0x9e3779b97f4a7c15u ^ (uint64_t)bytes;
  mark ^= bytes == 0 ? 0 : (uint64_t)elements << 48;
  mark = (mark ^ (mark >> 30)) * 0xbf58476d1ce4e5b9u;
  mark = (mark ^ (mark >> 27)) * 0x94d049bb133111ebu;
  return mark ^ (mark >> 31);
}

/* What a rank's row says of its parts for others. */
typedef struct outgoing {
  bool in_slot;
  size_t total;   /* bytes of all of them */
  size_t before;  /* bytes of the parts for lower ranks than the one in question */
  size_t largest; /* of the parts */
  size_t parts;   /* that are not empty */
  size_t index;   /* of the one in question among them */
} outgoing;

static outgoing read_row(const even_comm *comm, const exchange *job, int from, int to) {
  const uint64_t *row = row_of(comm, job, from);
  outgoing out = {0};
  size_t room = EVEN_COMM_SLOT_BYTES - row_words(comm) * sizeof *row;
  size_t total = 0;
  for (int rank = 0; rank < comm->ranks; rank++) {
    size_t bytes = rank == from ? 0 : (size_t)row[rank];
    out.before = rank == to ? total : out.before;
    out.index = rank == to ? out.parts : out.index;
    out.parts += bytes > 0;
    out.largest = bytes > out.largest ? bytes : out.largest;
    total += bytes; /* checked by its rank: it does not overflow */
  }
  out.total = total;
  out.in_slot = total <= room;
  return out;
}

/* In each round a rank stages a cell of every part that is not empty. */
static size_t cell_of(const even_comm *comm, const outgoing *out) {
  return comm->piece_bytes / out->parts / EVEN_COMM_LINE * EVEN_COMM_LINE;
}

static size_t rounds_of(const even_comm *comm, const outgoing *out) {
  if (out->in_slot) {
    return 0;
  }
  size_t cell = cell_of(comm, out);
  return out->largest / cell + (out->largest % cell != 0);
}

static size_t part_in_round(size_t bytes, size_t cell, size_t round) {
  size_t first = round * cell;
  return first >= bytes ? 0 : even_least_size(bytes - first, cell);
}

static void announce(even_comm *comm, const exchange *job) {
  unsigned char *slot = even_comm_slot_of(comm, comm->rank, job->slot);
  uint64_t *row = (uint64_t *)(void *)slot;
  uint64_t *marks = row + comm->ranks;
  marks[0] = marks[1] = 0;
  for (int rank = 0; rank < comm->ranks; rank++) {
    row[rank] = job->sends[rank];
    marks[0] += mark_of(comm->rank, rank, job->sends[rank], comm->call.op);
    marks[1] += mark_of(rank, comm->rank, job->receives[rank], comm->call.op);
  }
  outgoing own = read_row(comm, job, comm->rank, 0);
  unsigned char *at = slot + row_words(comm) * sizeof *row;
  for (int rank = 0; own.in_slot && rank < comm->ranks; rank++) {
    if (rank != comm->rank && job->sends[rank] > 0) {
      memcpy(at, job->inputs[rank], job->sends[rank]);
      at += job->sends[rank];
    }
  }
}

static uint32_t elements_of(const even_comm *comm, int rank) {
  return comm->controls[rank].call[comm->call_count & 1u].op;
}

/* Names both sides, and where they called, to all ranks: each has found by the marks that something differs, and says
 * where it is. */
static even_status refuse(even_comm *comm, int from, size_t sent, size_t expected) {
  char own[EVEN_FLIGHT_SITE_BYTES];
  char other[EVEN_FLIGHT_SITE_BYTES];
  char given[48];
  char wanted[48];
  even_flight_hear(&comm->flight, comm->rank, own, sizeof own);
  even_flight_hear(&comm->flight, from, other, sizeof other);
  even_call_describe_elements(elements_of(comm, from), given, sizeof given);
  even_call_describe_elements(comm->call.op, wanted, sizeof wanted);
  (void)even_fail(EVEN_ERR_MISMATCH, "in all_to_all rank %d sends %zu bytes%s to rank %d, which expects %zu%s%s%s%s%s",
                  even_comm_number(comm, from), sent, given, even_comm_number(comm, comm->rank), expected, wanted,
                  own[0] == '\0' ? "" : "; called", own, other[0] == '\0' ? "" : ", by the other", other);
  (void)even_error_place(even_comm_number(comm, from), NULL);
  (void)even_error_fix("what one rank's sizes and dtype say it sends must be what the other's say it receives");
  const even_error why = *even_error_last();
  even_group_end_told(comm, &why);
  return even_error_restore(&why);
}

/* Where the marks differ, somebody finds something, or all go on: bytes fit what another names otherwise. */
static even_status check_parts(even_comm *comm, const exchange *job) {
  uint64_t open = 0;
  for (int rank = 0; rank < comm->ranks; rank++) {
    const uint64_t *marks = row_of(comm, job, rank) + comm->ranks;
    open += marks[0] - marks[1];
  }
  if (open == 0) {
    return EVEN_OK;
  }
  even_flight_say(&comm->flight);
  for (int rank = 0; rank < comm->ranks; rank++) {
    size_t sent = (size_t)row_of(comm, job, rank)[comm->rank];
    if (sent != job->receives[rank] || (sent > 0 && !even_called_fits(elements_of(comm, rank), comm->call.op))) {
      return refuse(comm, rank, sent, job->receives[rank]);
    }
  }
  return even_call_next(comm); /* another's expectation differs, and ends the group */
}

static void stage_cells(even_comm *comm, const exchange *job, const outgoing *own, size_t round) {
  size_t cell = cell_of(comm, own);
  unsigned char *at = even_comm_staging_of(comm, comm->rank, round & 1u);
  for (int rank = 0; rank < comm->ranks; rank++) {
    if (rank != comm->rank && job->sends[rank] > 0) {
      even_writing_copy(at, (const unsigned char *)job->inputs[rank] + round * cell,
                        part_in_round(job->sends[rank], cell, round), even_writing_goes_past(comm));
      at += cell;
    }
  }
}

/* What lies in the slots (round 0 only) and, of what is staged, this round's cells. */
static void take(even_comm *comm, const exchange *job, size_t round, bool slots) {
  for (int rank = 0; rank < comm->ranks; rank++) {
    unsigned char *to = job->outputs[rank];
    size_t bytes = job->receives[rank];
    if (rank == comm->rank || bytes == 0) {
      continue;
    }
    outgoing out = read_row(comm, job, rank, comm->rank);
    if (out.in_slot && slots) {
      size_t rows = row_words(comm) * sizeof(uint64_t);
      memcpy(to, even_comm_slot_of(comm, rank, job->slot) + rows + out.before, bytes);
    } else if (!out.in_slot && !slots) {
      size_t cell = cell_of(comm, &out);
      even_writing_copy(to + round * cell, even_comm_staging_of(comm, rank, round & 1u) + out.index * cell,
                        part_in_round(bytes, cell, round), even_writing_goes_past(comm));
    }
  }
}

static void copy_own(const even_comm *comm, const exchange *job) {
  if (job->sends[comm->rank] > 0) {
    memmove(job->outputs[comm->rank], job->inputs[comm->rank], job->sends[comm->rank]);
  }
}

static even_status run(even_comm *comm, exchange *job) {
  size_t rounds = 0;
  size_t most = 0; /* that a rank stages */
  job->slot = comm->slot++;
  announce(comm, job);
  EVEN_TRY(even_call_meet(comm));
  EVEN_TRY(check_parts(comm, job));
  for (int rank = 0; rank < comm->ranks; rank++) {
    outgoing out = read_row(comm, job, rank, 0);
    size_t needed = rounds_of(comm, &out);
    rounds = needed > rounds ? needed : rounds;
    most = !out.in_slot && out.total > most ? out.total : most;
  }
  outgoing own = read_row(comm, job, comm->rank, 0);
  copy_own(comm, job);
  take(comm, job, 0, true);
  even_shared_staged_begins(comm, most);
  for (size_t round = 0; round < rounds; round++) {
    if (!own.in_slot) {
      stage_cells(comm, job, &own, round);
    }
    EVEN_TRY(even_call_next(comm));
    take(comm, job, round, false);
  }
  return even_shared_staged_ends(comm, most);
}

even_status even_shared_all_to_all(even_comm *comm, const even_comm_exchange *given) {
  exchange job = {
      .inputs = given->inputs, .outputs = given->outputs, .sends = given->sends, .receives = given->receives};
  if (row_words(comm) * sizeof(uint64_t) > EVEN_COMM_SLOT_BYTES) {
    return even_fail(EVEN_ERR_UNSUPPORTED, "all_to_all in a group of %d ranks: %zu at most can do it", comm->ranks,
                     EVEN_COMM_SLOT_BYTES / sizeof(uint64_t) - CHECK_WORDS);
  }
  EVEN_TRY(even_call_begin(comm, EVEN_CALL_ALL_TO_ALL, EVEN_U8, 0, 0, 0, NULL, NULL, 0));
  return even_call_end(comm, run(comm, &job));
}
