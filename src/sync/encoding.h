/* One of the encodings, chosen: the bytes of so many values, there and back; and what is done with values before and
 * after, in loops that round every operation once on every path. */
#ifndef EVEN_SYNC_ENCODING_H
#define EVEN_SYNC_ENCODING_H

#include <evenstep/sync.h>
#include <stdbool.h>

typedef struct even_encoding {
  even_sync_encoding kind;
  double ratio; /* of TOP */
} even_encoding;

/* Values of a bucket that are encoded together: whose encoding does not depend on where a part of whole blocks begins.
 */
size_t even_encoding_block(const even_encoding *encoding);
/* Whether what it leaves out is to be kept; else it is right on average. */
bool even_encoding_leaves_out(const even_encoding *encoding);
/* Bytes of `count` values (up to 2^31 - 1), a multiple of 4; of none: 0. */
size_t even_encoding_bytes(const even_encoding *encoding, size_t count);
/* What encoding so many needs beside, at most; 4-byte aligned. */
size_t even_encoding_scratch_bytes(const even_encoding *encoding, size_t count);
void even_encoding_encode(const even_encoding *encoding, const float *values, size_t count, uint64_t seed,
                          void *payload, void *scratch);
/* into += factor (1 or -1) * what was encoded. EVEN_ERR_INPUT where a peer's bytes cannot be. */
even_status even_encoding_add(const even_encoding *encoding, const void *payload, float *into, size_t count,
                              float factor) EVEN_MUST_USE;

/* to = weight * from, in the type of `from` (F32, F16, BF16); weight 0: zeros, whatever `from` holds (NULL, too). */
void even_encoding_weigh(float *to, const void *from, even_dtype dtype, size_t count, float weight);
/* to += from. */
void even_encoding_add_values(float *to, const float *from, size_t count);
/* Whether all are: F32, F64, F16, BF16. */
bool even_encoding_finite(const void *values, even_dtype dtype, size_t count);

#endif
