/* The shared-memory engine's choice by costs: the size of staged pieces that a group begins with, by what earlier
 * groups found; what its own trials find goes there too. */
#include "comm/group.h"

#include "base/fail.h"
#include "comm/costs.h"

#include <stdio.h>
#include <string.h>

/* Trials compare costs for each byte of calls of many sizes: they are kept as those of a call of this one. */
#define KEPT_BYTES ((uint64_t)16 << 20)

static const char through_name[] = "through-caches";
static const char past_name[] = "past-caches";

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

static even_comm_cost_key key_of(const even_comm *comm, const char *way) {
  return (even_comm_cost_key){
      .collective = "all_reduce", .shape = comm->shape, .engine = comm->engine->name, .way = way, .bytes = KEPT_BYTES};
}

/* Begins with the cheapest of those that are known; with the chain, where it is a choice that is not known. */
static void recall(even_comm *comm) {
  double least = 0;
  uint32_t best = 0;
  for (uint32_t i = 0; i < comm->pieces.sizes; i++) {
    char name[EVEN_PIECES_NAME];
    double seconds = 0;
    even_pieces_name(comm->pieces.bytes[i], name);
    const even_comm_cost_key key = key_of(comm, name);
    bool known = even_comm_costs_find(comm->costs, &key, &seconds);
    if (!known && (comm->pieces.bytes[i] & EVEN_PIECES_CHAINED) != 0) {
      return;
    }
    if (known && (least == 0 || seconds < least)) {
      least = seconds;
      best = i;
    }
  }
  if (least > 0) {
    even_pieces_prefer(&comm->pieces, best);
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

even_status even_shared_follow(even_comm *comm, const even_comm_following *by, size_t *lacking) {
  size_t forced = by->way == NULL ? 0 : even_pieces_named(by->way);
  bool chain = by->way != NULL && strcmp(by->way, EVEN_PIECES_CHAIN) == 0;
  even_writing_way writing = writing_way(by->way);
  *lacking = 0;
  if (by->way != NULL && forced == 0 && !chain && writing == EVEN_WRITING_MEASURED) {
    return even_fail(EVEN_ERR_NOT_FOUND, "'%s' is no way of shared memory", by->way);
  }
  comm->pieces.forced = comm->pieces.chain = false;
  comm->writing.asked = (uint8_t)writing;
  even_comm_costs_close(comm->costs);
  comm->costs = even_comm_costs_hold(by->costs);
  (void)snprintf(comm->shape, sizeof comm->shape, "%s", by->shape == NULL ? "" : by->shape);
  if (chain) {
    even_pieces_force_chain(&comm->pieces);
  } else if (forced > 0) {
    even_pieces_force(&comm->pieces, nearest(&comm->pieces, forced));
  } else if (comm->costs != NULL) {
    recall(comm);
  }
  return EVEN_OK;
}

void even_shared_keep_costs(even_comm *comm) {
  even_pieces *pieces = &comm->pieces;
  for (uint32_t i = 0; i < pieces->sizes && comm->costs != NULL; i++) {
    char name[EVEN_PIECES_NAME];
    if (pieces->learnt[i] > 0) {
      even_pieces_name(pieces->bytes[i], name);
      const even_comm_cost_key key = key_of(comm, name);
      double seconds = (double)pieces->learnt[i] * (double)(KEPT_BYTES >> 10) * 1e-9;
      if (even_comm_costs_add(comm->costs, &key, seconds) != EVEN_OK) {
        even_error_clear(); /* no memory: it is lost to later jobs, and this one goes on */
      }
      pieces->learnt[i] = 0;
    }
  }
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
static double known_ms(const even_comm *comm, uint32_t index) {
  char name[EVEN_PIECES_NAME];
  double seconds = (double)comm->pieces.learnt[index] * (double)(KEPT_BYTES >> 10) * 1e-9;
  even_pieces_name(comm->pieces.bytes[index], name);
  const even_comm_cost_key key = key_of(comm, name);
  if (comm->pieces.learnt[index] == 0 && (comm->costs == NULL || !even_comm_costs_find(comm->costs, &key, &seconds))) {
    return 0;
  }
  return seconds * 1e3;
}

void even_shared_describe_pieces(const even_comm *comm, char *text, size_t bytes) {
  const even_pieces *pieces = &comm->pieces;
  double own = known_ms(comm, pieces->current);
  int length = 0;
  text[0] = '\0';
  if (pieces->forced) {
    (void)snprintf(text, bytes, ", as asked for");
    return;
  }
  if (comm->rank != 0 || own == 0) {
    return;
  }
  length = snprintf(text, bytes, " (%.3g ms for %llu MB", own, (unsigned long long)(KEPT_BYTES >> 20));
  for (uint32_t i = 0; i < pieces->sizes && length > 0 && (size_t)length < bytes; i++) {
    char name[EVEN_PIECES_NAME];
    double other = known_ms(comm, i);
    if (i != pieces->current && other > 0) {
      even_pieces_name(pieces->bytes[i], name);
      length += snprintf(text + length, bytes - (size_t)length, "; %s %.3g", name, other);
    }
  }
  if (length > 0 && (size_t)length < bytes) {
    (void)snprintf(text + length, bytes - (size_t)length, ")");
  }
}
