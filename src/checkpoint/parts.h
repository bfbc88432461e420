/* Checksums of what several tensors have in one chunk of a file: they tell which of them is damaged, which the chunk's
 * own cannot. A tensor, or the header, has one for its bytes in its first chunk and one for those in its last, where it
 * shares these with others; a chunk that is one tensor's alone needs none. */
#ifndef EVEN_CHECKPOINT_PARTS_H
#define EVEN_CHECKPOINT_PARTS_H

#include "checkpoint/checksums.h"
#include "checkpoint/content.h"

struct even_part {
  uint64_t begin; /* in the file */
  uint64_t bytes; /* 0: a place that is empty */
  uint64_t sum;   /* XXH3, 64 bits */
};

enum { EVEN_PARTS_OF_A_PIECE = 2 };

/* Sums those of a piece, whose data are given, into its places of content->parts. */
void even_parts_sum(const even_content *content, size_t piece, const void *data);
/* The same of the bytes from `at` on of a chunk, which are given from its begin to its end, as they come: while they
 * are in the processor's cache. *piece is the one in which they begin, and then that in which the next ones do. `sums`
 * is one thread's, for chunks of any size. */
even_status even_parts_sum_next(const even_content *content, even_chunk_sums *sums, uint64_t at, const void *data,
                                size_t bytes, size_t *piece) EVEN_MUST_USE;
/* Sums those of all pieces that have their data, by several threads. */
even_status even_parts_sum_all(const even_content *content) EVEN_MUST_USE;
/* Moves the `places` together that are not empty; how many there are. */
size_t even_parts_pack(even_part *parts, size_t places);

#endif
