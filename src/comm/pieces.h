/* How large the pieces are in which data pass through staging: learnt from what the calls cost. */
#ifndef EVEN_COMM_PIECES_H
#define EVEN_COMM_PIECES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What one rank (rank 0 of a group) knows; the others go by what it announces. */
typedef struct even_pieces {
  size_t bytes[5];  /* the sizes to choose from, rising; last, where there is one, the chain (EVEN_PIECES_CHAINED) */
  uint32_t sizes;   /* how many */
  uint32_t current; /* the size in use */
  uint32_t other;   /* the one that it is tried against */
  uint32_t call;    /* of the trial and the pause after it */
  uint32_t pause;   /* measured calls from one trial to the next */
  uint64_t cost[2]; /* ns for 1024 bytes, the trial's calls added up: of the current size, of the other */
  bool up;          /* whether the next trial is of a larger size */
  uint64_t began;   /* the call under way; 0: not measured */
  uint64_t
      learnt[5]; /* ns for 1024 bytes with pieces of each size, by the last trial; 0: not tried since it was taken */
  bool forced;
  bool chain; /* the chain is forced */
} even_pieces;

/* In the word that announces a size: it is the chain; and it is one of a trial, so that all meet when it is done. */
#define EVEN_PIECES_CHAINED ((uint64_t)1)
#define EVEN_PIECES_TIMED ((uint64_t)2)

/* What users call a size: "pieces-256K", and the chain. */
#define EVEN_PIECES_NAME 32
#define EVEN_PIECES_CHAIN "chain"
void even_pieces_name(size_t bytes, char name[EVEN_PIECES_NAME]);
/* The size of such a name, not of the chain's; 0 where it is none. */
size_t even_pieces_named(const char *name);

/* Sizes from `least` on, each four times the one before, up to `most`. `crowded`: ranks share cores, so that each
 * meeting costs a turn of the scheduler: the largest first. */
void even_pieces_start(even_pieces *pieces, size_t least, size_t most, bool crowded);
/* Makes the chain (chain.c) one of the choices, with which it begins. */
void even_pieces_add_chain(even_pieces *pieces);
/* Always the chain, whether it is one of the choices or not. */
void even_pieces_force_chain(even_pieces *pieces);
/* Begins with size `index`, which costs less than the others as far as is known; the next trial comes after a pause. */
void even_pieces_prefer(even_pieces *pieces, uint32_t index);
/* Begins with size `index`, which is tried against its neighbours at once. */
void even_pieces_begin_with(even_pieces *pieces, uint32_t index);
/* Always size `index`. */
void even_pieces_force(even_pieces *pieces, uint32_t index);
/* The size for the next call, and whether that is one of a trial, if it is large enough. */
size_t even_pieces_bytes(const even_pieces *pieces);
bool even_pieces_tries(const even_pieces *pieces);
/* A staged call of `bytes` begins, or ends well: now_ns by one clock. Only calls of at least EVEN_PIECES_MEASURED bytes
 * are learnt from. */
#define EVEN_PIECES_MEASURED ((size_t)4 << 20)
void even_pieces_begin(even_pieces *pieces, size_t bytes, uint64_t now_ns);
void even_pieces_end(even_pieces *pieces, size_t bytes, uint64_t now_ns);

#endif
