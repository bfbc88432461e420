/* What the rounds of exact sums and their exchange share. */
#ifndef EVEN_SYNC_EXACT_ROUND_H
#define EVEN_SYNC_EXACT_ROUND_H

#include "sync/tree.h"

#include <evenstep/exact.h>
#include <stdbool.h>

/* The elements of a sum: those of F32, then those of F64, of which the last two are the weight and weight * loss. */
typedef struct even_exact_layout {
  size_t *places; /* of each parameter: its first element among those of its type */
  size_t narrow;  /* elements of F32 */
  size_t wide;    /* elements of F64 */
  size_t wide_at; /* where those begin, in bytes */
  size_t bytes;
} even_exact_layout;

/* The sum of one node's blocks. */
typedef struct even_exact_sum {
  even_tree_node node;
  unsigned char *elements;
} even_exact_sum;

/* A node of the cut of the whole tree into the ranks' ranges. */
typedef struct even_exact_source {
  int rank;
  size_t turn; /* its number among those of its rank */
} even_exact_source;

struct even_exact {
  even_comm *comm; /* NULL: alone */
  int rank;
  int ranks;
  even_sync_parameter *parameters;
  size_t parameter_count;
  size_t part_bytes;
  even_exact_layout layout;

  /* The round. */
  bool open;
  size_t *counts; /* blocks of each rank */
  size_t blocks;  /* of all */
  size_t next;    /* the block that is to be added */
  size_t end;     /* after this rank's last */
  uint8_t *used;
  even_exact_sum sums[EVEN_TREE_MOST + 1]; /* of this rank's blocks, from left to right; then memory for further ones */
  size_t sum_count;
  size_t room; /* sums that have memory */

  /* The exchange; see exact_exchange.c. */
  even_exact_source *sources;
  even_tree_node *nodes;
  size_t *stack;
  even_tree_addition *additions;
  size_t source_count;
  size_t source_room;
  size_t turns;         /* the most nodes that a rank has */
  unsigned char *parts; /* of the other ranks' sums: turns * ranks parts */
  size_t parts_bytes;
  const void **inputs; /* one a rank, as are the next four */
  void **outputs;
  size_t *input_bytes;
  size_t *output_bytes;
  size_t *lengths;       /* elements of the piece at work that each rank adds up */
  unsigned char *result; /* the sum over all blocks; alone: sums[0] has it */
};

/* Works out what is to be exchanged in this round; `counts` and `blocks` are set. */
even_status even_exact_plan(even_exact *exact) EVEN_MUST_USE;
/* Makes *result the sum over all blocks; collective. *bytes: sent. */
even_status even_exact_exchange(even_exact *exact, const unsigned char **result, uint64_t *bytes) EVEN_MUST_USE;

#endif
