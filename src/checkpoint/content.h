/* The bytes of one file of a checkpoint, where they lie in memory, and their way into the file with a checksum for each
 * chunk. Large content goes by several threads, chunk by chunk: one sums while another one's bytes are on their way. */
#ifndef EVEN_CHECKPOINT_CONTENT_H
#define EVEN_CHECKPOINT_CONTENT_H

#include "checkpoint/layout.h"
#include "os/stream.h"

#include <evenstep/checkpoint.h>

typedef struct even_content_piece {
  const void *data; /* NULL and bytes > 0: `fetch` gives it when it is its turn */
  uint64_t begin;   /* its place in the file: the pieces follow each other without a gap */
  size_t bytes;
  size_t index; /* for `fetch` */
} even_content_piece;

typedef struct even_part even_part; /* parts.h */

typedef struct even_content {
  even_content_piece *pieces;
  size_t count;
  uint64_t bytes;
  even_checkpoint_fetch fetch; /* NULL: all pieces have their data */
  void *fetch_context;
  even_part *parts; /* EVEN_PARTS_OF_A_PIECE places a piece, which are filled as it is written; NULL: nobody wants
                       them. The caller's */
} even_content;

/* The header, which is laid out here (*layout: zeros before; even_safetensors_layout_free, also after a failure), and
 * the tensors of a safetensors file, or a file's raw bytes. All must last as long. Free with even_content_free, also
 * after a failure. */
even_status even_content_of_file(const even_checkpoint_file *file, even_safetensors_layout *layout,
                                 even_content *out) EVEN_MUST_USE;
void even_content_free(even_content *content);

/* Writes all of it and gives a checksum (XXH3, 64 bits) for each EVEN_CHECKPOINT_CHUNK_BYTES (free with even_free).
 * output->bytes is what was written, after a failure, too. EVEN_ERR_INTERRUPTED where the thread's question says so
 * (base/stop.h). */
even_status even_content_write(const even_content *content, even_output *output, uint64_t **sums,
                               size_t *sum_count) EVEN_MUST_USE;
/* The same by several threads, where all data are there. */
even_status even_content_write_side_by_side(const even_content *content, even_output *output, uint64_t **sums,
                                            size_t *sum_count) EVEN_MUST_USE;

/* Chunks of the content, and what the file under construction has of them already. */
typedef struct even_content_chunks {
  size_t count;
  bool *there;    /* one a chunk: it is not written */
  uint64_t *sums; /* one a chunk: given for those that are there, else as they are written */
} even_content_chunks;

size_t even_content_chunk_count(const even_content *content);
/* The bytes of one of them: the last may be shorter. */
uint64_t even_content_chunk_bytes(const even_content *content, size_t chunk);
/* Whether all its data are in memory, so that it can be summed before it is written. */
bool even_content_is_here(const even_content *content);
/* Sums it by several threads: there[i] becomes whether `there[i]` was true and chunk i has the sum sums[i]. What is
 * false is not summed. */
even_status even_content_find_same(const even_content *content, even_content_chunks *chunks) EVEN_MUST_USE;
/* As even_content_write, by several threads, of what is not there; output->bytes counts what is. All data are here. */
even_status even_content_write_rest(const even_content *content, even_output *output,
                                    even_content_chunks *chunks) EVEN_MUST_USE;

typedef struct even_content_copy {
  const even_content *content;
  char *to; /* content->bytes of them */
} even_content_copy;

/* Copies all of it, by several threads; what has to be asked for is, first, by this one. */
even_status even_contents_copy(const even_content_copy *copies, size_t count) EVEN_MUST_USE;
/* Copies what has to be asked for, and that alone. */
even_status even_content_fetch(const even_content *content, char *to) EVEN_MUST_USE;
/* Whether its chunks have these checksums: no more is summed once one differs. What has to be asked for is not, and
 * never the same. */
even_status even_content_compare(const even_content *content, const uint64_t *sums, size_t count,
                                 bool *same) EVEN_MUST_USE;

#endif
