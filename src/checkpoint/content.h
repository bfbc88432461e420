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

typedef struct even_content {
  even_content_piece *pieces;
  size_t count;
  uint64_t bytes;
  even_checkpoint_fetch fetch; /* NULL: all pieces have their data */
  void *fetch_context;
} even_content;

/* The header and the tensors of a safetensors file; both must last as long. Free with even_content_free, also after a
 * failure. */
even_status even_content_of_tensors(const even_checkpoint_file *file, const even_safetensors_layout *layout,
                                    even_content *out) EVEN_MUST_USE;
void even_content_free(even_content *content);

/* Writes all of it and gives a checksum (XXH3, 64 bits) for each EVEN_CHECKPOINT_CHUNK_BYTES (free with even_free).
 * output->bytes is what was written, after a failure, too. EVEN_ERR_INTERRUPTED where the thread's question says so
 * (base/stop.h). */
even_status even_content_write(const even_content *content, even_output *output, uint64_t **sums,
                               size_t *sum_count) EVEN_MUST_USE;
/* Copies all of it to `to`. */
even_status even_content_copy(const even_content *content, char *to) EVEN_MUST_USE;

#endif
