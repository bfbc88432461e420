/* XXH3 (64 bits) over the chunks of a file, fed in pieces of any size. */
#ifndef EVEN_CHECKPOINT_CHECKSUMS_H
#define EVEN_CHECKPOINT_CHECKSUMS_H

#include <evenstep/status.h>
#include <stddef.h>
#include <stdint.h>

typedef struct even_chunk_sums even_chunk_sums;

/* chunk_bytes >= 1. */
even_status even_chunk_sums_open(size_t chunk_bytes, even_chunk_sums **out) EVEN_MUST_USE;
/* How many bytes still fit in the chunk that is being filled (>= 1): a piece of at most so much stays in the cache
 * between summing and writing. */
size_t even_chunk_sums_room(const even_chunk_sums *sums);
even_status even_chunk_sums_update(even_chunk_sums *sums, const void *data, size_t bytes) EVEN_MUST_USE;
/* Ends the chunk that was just filled, whole or not, gives its sum and forgets all that was summed. At least one byte
 * must have been. */
even_status even_chunk_sums_end(even_chunk_sums *sums, uint64_t *out) EVEN_MUST_USE;
/* Ends the last, shorter chunk and hands the sums over (free with even_free). Frees `sums`, also on failure. */
even_status even_chunk_sums_finish(even_chunk_sums *sums, uint64_t **out, size_t *count) EVEN_MUST_USE;
void even_chunk_sums_drop(even_chunk_sums *sums);

#endif
