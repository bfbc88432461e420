/* The size of staged pieces. Small ones stay in the caches; large ones need fewer meetings of all ranks, which is what
 * counts where a rank does not get its core at once. Which of the two it is, depends on who else runs, and changes: so
 * each size is tried, now and then, against its neighbour. */
#include "comm/pieces.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A trial: calls of the current size, then as many of the other. */
#define CALLS 3u
#define SHORTEST_PAUSE 8u
#define LONGEST_PAUSE 256u

void even_pieces_name(size_t bytes, char name[EVEN_PIECES_NAME]) {
  bool large = bytes >= (size_t)1 << 20 && bytes % ((size_t)1 << 20) == 0;
  if ((bytes & EVEN_PIECES_CHAINED) != 0) {
    (void)snprintf(name, EVEN_PIECES_NAME, "%s", EVEN_PIECES_CHAIN);
  } else {
    (void)snprintf(name, EVEN_PIECES_NAME, "pieces-%zu%c", large ? bytes >> 20 : bytes >> 10, large ? 'M' : 'K');
  }
}

size_t even_pieces_named(const char *name) {
  static const char prefix[] = "pieces-";
  const char *digits = name + sizeof prefix - 1;
  char *end = NULL;
  if (strncmp(name, prefix, sizeof prefix - 1) != 0 || digits[0] < '1' || digits[0] > '9') {
    return 0;
  }
  unsigned long long number = strtoull(digits, &end, 10);
  if ((*end != 'K' && *end != 'M') || end[1] != '\0' || number > 1 << 20) {
    return 0;
  }
  return (size_t)number << (*end == 'K' ? 10 : 20);
}

void even_pieces_start(even_pieces *pieces, size_t least, size_t most, bool crowded) {
  memset(pieces, 0, sizeof *pieces);
  for (size_t bytes = least; pieces->sizes == 0 || (bytes <= most && pieces->sizes < 4); bytes *= 4) {
    pieces->bytes[pieces->sizes++] = bytes;
  }
  pieces->current = crowded ? pieces->sizes - 1 : 0;
  pieces->up = !crowded;
  pieces->other = pieces->current;
  pieces->pause = SHORTEST_PAUSE;
}

static size_t chained(const even_pieces *pieces) {
  return pieces->bytes[pieces->sizes > 1 ? 1 : 0] | EVEN_PIECES_CHAINED;
}

void even_pieces_add_chain(even_pieces *pieces) {
  pieces->bytes[pieces->sizes++] = chained(pieces);
  pieces->current = pieces->other = pieces->sizes - 1;
}

void even_pieces_force_chain(even_pieces *pieces) {
  pieces->chain = true;
  pieces->forced = true;
}

static bool in_trial(const even_pieces *pieces) {
  return pieces->call < 2 * CALLS;
}
static bool tries_other(const even_pieces *pieces) {
  return in_trial(pieces) && pieces->call >= CALLS;
}

size_t even_pieces_bytes(const even_pieces *pieces) {
  if (pieces->chain) {
    return chained(pieces);
  }
  return pieces->bytes[tries_other(pieces) && !pieces->forced ? pieces->other : pieces->current];
}

bool even_pieces_tries(const even_pieces *pieces) {
  return in_trial(pieces) && pieces->sizes > 1 && !pieces->forced;
}

/* The neighbour to try: in the direction last taken, or the other way where there is none. The chain and pieces of 1 MB
 * are neighbours: larger ones are for ranks that must all meet, which the chain spares them. */
static void begin_trial(even_pieces *pieces) {
  uint32_t last = pieces->sizes - 1;
  bool has_chain = (pieces->bytes[last] & EVEN_PIECES_CHAINED) != 0;
  uint32_t beside = last > 1 ? 1 : 0; /* the chain: what costs as many bytes in the caches */
  pieces->up = pieces->current == 0 ? true : (pieces->current == last ? false : pieces->up);
  if (last == 0) {
    pieces->other = 0;
  } else if (has_chain && (pieces->current == last || (pieces->current == beside && pieces->up))) {
    pieces->other = pieces->current == last ? beside : last;
  } else {
    pieces->other = pieces->up ? pieces->current + 1 : pieces->current - 1;
  }
  pieces->cost[0] = pieces->cost[1] = 0;
}

void even_pieces_begin_with(even_pieces *pieces, uint32_t index) {
  pieces->current = pieces->other = index;
}

void even_pieces_prefer(even_pieces *pieces, uint32_t index) {
  pieces->current = pieces->other = index;
  pieces->call = 2 * CALLS;
}

void even_pieces_force(even_pieces *pieces, uint32_t index) {
  pieces->chain = false;
  pieces->current = pieces->other = index;
  pieces->forced = true;
}

/* The other must be clearly better: a tenth. */
static void end_trial(even_pieces *pieces) {
  pieces->learnt[pieces->current] = pieces->cost[0] / CALLS;
  pieces->learnt[pieces->other] = pieces->cost[1] / CALLS;
  if (pieces->cost[1] < pieces->cost[0] - pieces->cost[0] / 10) {
    pieces->current = pieces->other;
    pieces->pause = SHORTEST_PAUSE;
    return;
  }
  pieces->up = !pieces->up;
  pieces->pause = pieces->pause < LONGEST_PAUSE ? 2 * pieces->pause : LONGEST_PAUSE;
}

void even_pieces_begin(even_pieces *pieces, size_t bytes, uint64_t now_ns) {
  bool measured = bytes >= EVEN_PIECES_MEASURED && pieces->sizes > 1 && !pieces->forced;
  pieces->began = measured ? now_ns : 0;
  if (measured && pieces->call == 0) {
    begin_trial(pieces);
  }
}

void even_pieces_end(even_pieces *pieces, size_t bytes, uint64_t now_ns) {
  if (pieces->began == 0) {
    return;
  }
  if (in_trial(pieces)) {
    uint64_t took = now_ns > pieces->began ? now_ns - pieces->began : 0;
    pieces->cost[tries_other(pieces)] += took / (bytes >> 10);
  }
  pieces->began = 0;
  pieces->call++;
  if (pieces->call == 2 * CALLS) {
    end_trial(pieces);
  } else if (pieces->call >= 2 * CALLS + pieces->pause) {
    pieces->call = 0;
  }
}
