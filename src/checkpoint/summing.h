/* What one thread has to sum a file with, chunk by chunk, window by window (items.h's `own`). */
#ifndef EVEN_CHECKPOINT_SUMMING_H
#define EVEN_CHECKPOINT_SUMMING_H

#include "checkpoint/checksums.h"

typedef struct even_summing {
  even_chunk_sums *sums;
  even_chunk_sums *parts; /* of what pieces have in a chunk (parts.h): NULL but for who opens it */
  char *window;           /* aligned as direct writes want it */
  void *memory;
} even_summing;

/* *own, an even_summing, is to be closed also on failure. Both sizes are >= 1. */
even_status even_summing_open(size_t chunk_bytes, size_t window_bytes, void **own) EVEN_MUST_USE;
/* NULL: nothing. */
void even_summing_close(void *own);

#endif
