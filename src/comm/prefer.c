/* The shared-memory engine's choice by costs: the sizes of staged pieces that a group begins with, by what earlier
 * groups found; what its own trials find goes there too. Each collective has a size of its own. */
#include "comm/group.h"

#include "base/fail.h"
#include "comm/costs.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

/* Trials compare costs for each byte of calls of many sizes: they are kept as those of a call of this one. */
#define KEPT_BYTES ((uint64_t)16 << 20)

static const char through_name[] = "through-caches";
static const char past_name[] = "past-caches";

static const char *const collectives[EVEN_STAGED_KINDS] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                                           "all_to_all"};

/* As which it goes; what passes through no staging may take any. */
static int kind_of(const even_comm *comm) {
  switch (comm->call.kind) {
    case EVEN_CALL_REDUCE_SCATTER:
    case EVEN_CALL_REDUCE:
      return EVEN_STAGED_REDUCE_SCATTER;
    case EVEN_CALL_ALL_GATHER:
      return EVEN_STAGED_ALL_GATHER;
    case EVEN_CALL_BROADCAST:
      return EVEN_STAGED_BROADCAST;
    case EVEN_CALL_ALL_TO_ALL:
    case EVEN_CALL_GATHER:
    case EVEN_CALL_SCATTER:
      return EVEN_STAGED_ALL_TO_ALL;
    default:
      return EVEN_STAGED_ALL_REDUCE;
  }
}

/* Where each meeting costs a turn of the scheduler, all-reduces begin with the chain, the others with pieces that are
 * larger than the least and stay in the caches. */
void even_shared_start_pieces(even_comm *comm, size_t least, size_t most, bool crowded) {
  for (int kind = 0; kind < EVEN_STAGED_KINDS; kind++) {
    even_pieces *pieces = &comm->pieces[kind];
    even_pieces_start(pieces, least, most, crowded);
    if (crowded && comm->ranks > 1 && kind == EVEN_STAGED_ALL_REDUCE) {
      even_pieces_add_chain(pieces);
    } else if (crowded) {
      even_pieces_begin_with(pieces, pieces->sizes > 1);
    }
  }
}

/* A reduce, gather or scatter goes as a reduce-scatter or an all-to-all in which one rank has most of the work: their
 * times do not compare. */
static bool teaches(const even_comm *comm) {
  uint32_t kind = comm->call.kind;
  return kind != EVEN_CALL_REDUCE && kind != EVEN_CALL_GATHER && kind != EVEN_CALL_SCATTER;
}

uint64_t even_shared_pieces_word(const even_comm *comm) {
  const even_pieces *pieces = &comm->pieces[kind_of(comm)];
  return even_pieces_bytes(pieces) | (teaches(comm) && even_pieces_tries(pieces) ? EVEN_PIECES_TIMED : 0);
}

static bool has_chain(const even_pieces *pieces) {
  return (pieces->bytes[pieces->sizes - 1] & EVEN_PIECES_CHAINED) != 0;
}

/* The group's size that is nearest to one that was asked for, by ratio: groups of many ranks have smaller ones. */
static uint32_t nearest(const even_pieces *pieces, size_t bytes) {
  uint32_t sizes = pieces->sizes - has_chain(pieces);
  uint32_t found = 0;
  while (found + 1 < sizes && bytes > 2 * pieces->bytes[found]) {
    found++;
  }
  return found;
}

static even_comm_cost_key key_of(const even_comm *comm, int kind, const char *way) {
  return (even_comm_cost_key){.collective = collectives[kind],
                              .shape = comm->shape,
                              .engine = comm->engine->name,
                              .way = way,
                              .bytes = KEPT_BYTES};
}

/* Begins with the cheapest of those that are known; with the chain, where it is a choice that is not known. */
static void recall(even_comm *comm, int kind) {
  even_pieces *pieces = &comm->pieces[kind];
  double least = 0;
  uint32_t best = 0;
  for (uint32_t i = 0; i < pieces->sizes; i++) {
    char name[EVEN_PIECES_NAME];
    double seconds = 0;
    even_pieces_name(pieces->bytes[i], name);
    const even_comm_cost_key key = key_of(comm, kind, name);
    bool known = even_comm_costs_find(comm->costs, &key, &seconds);
    if (!known && (pieces->bytes[i] & EVEN_PIECES_CHAINED) != 0) {
      return;
    }
    if (known && (least == 0 || seconds < least)) {
      least = seconds;
      best = i;
    }
  }
  if (least > 0) {
    even_pieces_prefer(pieces, best);
  }
}

static even_writing_way writing_way(const char *way) {
  if (way == NULL) {
    return EVEN_WRITING_MEASURED;
  }
  return strcmp(way, through_name) == 0 ? EVEN_WRITING_THROUGH
         : strcmp(way, past_name) == 0  ? EVEN_WRITING_PAST
                                        : EVEN_WRITING_MEASURED;
}

/* bytes 0: none is asked for. */
static void choose_pieces(even_comm *comm, int kind, bool chain, size_t bytes) {
  even_pieces *pieces = &comm->pieces[kind];
  pieces->forced = pieces->chain = false;
  if (chain && kind == EVEN_STAGED_ALL_REDUCE) {
    even_pieces_force_chain(pieces);
  } else if (chain) {
    even_pieces_force(pieces, pieces->sizes > 1);
  } else if (bytes > 0) {
    even_pieces_force(pieces, nearest(pieces, bytes));
  } else if (comm->costs != NULL) {
    recall(comm, kind);
  }
}

even_status even_shared_follow(even_comm *comm, const even_comm_following *by, size_t *lacking) {
  size_t forced = by->way == NULL ? 0 : even_pieces_named(by->way);
  bool chain = by->way != NULL && strcmp(by->way, EVEN_PIECES_CHAIN) == 0;
  even_writing_way writing = writing_way(by->way);
  *lacking = 0;
  if (by->way != NULL && forced == 0 && !chain && writing == EVEN_WRITING_MEASURED) {
    return even_fail(EVEN_ERR_NOT_FOUND, "'%s' is no way of shared memory", by->way);
  }
  comm->writing.asked = (uint8_t)writing;
  even_comm_costs_close(comm->costs);
  comm->costs = even_comm_costs_hold(by->costs);
  (void)snprintf(comm->shape, sizeof comm->shape, "%s", by->shape == NULL ? "" : by->shape);
  for (int kind = 0; kind < EVEN_STAGED_KINDS; kind++) {
    choose_pieces(comm, kind, chain, forced);
  }
  return EVEN_OK;
}

void even_shared_staged_begins(even_comm *comm, size_t bytes) {
  if (teaches(comm)) {
    even_pieces_begin(&comm->pieces[kind_of(comm)], bytes, even_clock_ns());
  }
}

static void keep_costs(even_comm *comm, int kind) {
  even_pieces *pieces = &comm->pieces[kind];
  for (uint32_t i = 0; i < pieces->sizes && comm->costs != NULL; i++) {
    char name[EVEN_PIECES_NAME];
    if (pieces->learnt[i] > 0) {
      even_pieces_name(pieces->bytes[i], name);
      const even_comm_cost_key key = key_of(comm, kind, name);
      double seconds = (double)pieces->learnt[i] * (double)(KEPT_BYTES >> 10) * 1e-9;
      if (even_comm_costs_add(comm->costs, &key, seconds) != EVEN_OK) {
        even_error_clear(); /* no memory: it is lost to later jobs, and this one goes on */
      }
      pieces->learnt[i] = 0;
    }
  }
}

even_status even_shared_staged_ends(even_comm *comm, size_t bytes) {
  int kind = kind_of(comm);
  if (comm->timed && bytes >= EVEN_PIECES_MEASURED && kind != EVEN_STAGED_ALL_REDUCE) {
    EVEN_TRY(even_call_next(comm)); /* who only gives is done before what it gave has come */
  }
  even_pieces_end(&comm->pieces[kind], bytes, even_clock_ns());
  keep_costs(comm, kind);
  return EVEN_OK;
}

void *even_shared_choice(even_comm *comm, int number, size_t *bytes) {
  *bytes = sizeof comm->writing.asked;
  if (number > 0) { /* it is there; another thread, which moves messages, may be looking */
    comm->writing.forced = comm->writing.asked;
    return NULL;
  }
  return &comm->writing.asked;
}

/* Of calls of KEPT_BYTES, in ms; 0: not known. */
static double known_ms(const even_comm *comm, int kind, uint32_t index) {
  const even_pieces *pieces = &comm->pieces[kind];
  char name[EVEN_PIECES_NAME];
  double seconds = (double)pieces->learnt[index] * (double)(KEPT_BYTES >> 10) * 1e-9;
  even_pieces_name(pieces->bytes[index], name);
  const even_comm_cost_key key = key_of(comm, kind, name);
  if (pieces->learnt[index] == 0 && (comm->costs == NULL || !even_comm_costs_find(comm->costs, &key, &seconds))) {
    return 0;
  }
  return seconds * 1e3;
}

/* " (9.1 ms for 16 MB; chain 12)"; nothing where the size in use was never timed. */
static void describe_figures(const even_comm *comm, int kind, char *text, size_t bytes) {
  const even_pieces *pieces = &comm->pieces[kind];
  double own = known_ms(comm, kind, pieces->current);
  int length = 0;
  text[0] = '\0';
  if (comm->rank != 0 || own == 0) {
    return;
  }
  length = snprintf(text, bytes, " (%.3g ms for %llu MB", own, (unsigned long long)(KEPT_BYTES >> 20));
  for (uint32_t i = 0; i < pieces->sizes && length > 0 && (size_t)length < bytes; i++) {
    char name[EVEN_PIECES_NAME];
    double other = known_ms(comm, kind, i);
    if (i != pieces->current && other > 0) {
      even_pieces_name(pieces->bytes[i], name);
      length += snprintf(text + length, bytes - (size_t)length, "; %s %.3g", name, other);
    }
  }
  if (length > 0 && (size_t)length < bytes) {
    (void)snprintf(text + length, bytes - (size_t)length, ")");
  }
}

void even_shared_describe_pieces(const even_comm *comm, char *text, size_t bytes) {
  if (comm->pieces[EVEN_STAGED_ALL_REDUCE].forced) {
    (void)snprintf(text, bytes, ", as asked for");
  } else {
    describe_figures(comm, EVEN_STAGED_ALL_REDUCE, text, bytes);
  }
}

void even_shared_describe_moves(const even_comm *comm, char *text, size_t bytes) {
  size_t length = 0;
  text[0] = '\0';
  for (int kind = EVEN_STAGED_ALL_REDUCE + 1; kind < EVEN_STAGED_KINDS; kind++) {
    const even_pieces *pieces = &comm->pieces[kind];
    char name[EVEN_PIECES_NAME];
    char figures[160];
    describe_figures(comm, kind, figures, sizeof figures);
    if (!pieces->forced && figures[0] != '\0' && length < bytes) {
      even_pieces_name(pieces->bytes[pieces->current], name);
      int added = snprintf(text + length, bytes - length, "; %s in %s%s", collectives[kind], name, figures);
      length += added > 0 ? (size_t)added : 0;
    }
  }
}
