/* Which parameter lies in which bucket, and where in the arena. A function of the parameters alone, so that
 * all ranks have the same layout without talking. */
#ifndef EVEN_SYNC_LAYOUT_H
#define EVEN_SYNC_LAYOUT_H

#include <evenstep/sync.h>
#include <stdbool.h>

#define EVEN_SYNC_MARK_BYTES ((size_t)64)

typedef struct even_sync_place {
  size_t bucket;
  size_t offset; /* bytes from the beginning of the buckets */
} even_sync_place;

typedef struct even_sync_span {
  even_dtype dtype;
  size_t offset; /* bytes from the beginning of the buckets, a multiple of 64 */
  size_t bytes;  /* the gaps between its parameters included; a multiple of 64 */
  size_t members;
} even_sync_span;

typedef struct even_sync_layout {
  even_sync_place *places; /* one a parameter */
  even_sync_span *buckets; /* in the order in which they are reduced */
  size_t *order;           /* parameters bucket by bucket: bucket b has its members at order[first of b …] */
  size_t bucket_count;
  size_t bytes;       /* of all buckets, and of the wire after them */
  bool marked;        /* the last EVEN_SYNC_MARK_BYTES of the last bucket are no parameter's */
  even_dtype wire;    /* what fp32 buckets travel as; EVEN_F32: as they are */
  size_t wire_offset; /* where the bucket under way is narrowed to: one place, as large as the largest */
} even_sync_layout;

/* Errors: EVEN_ERR_ARGUMENT (a dtype that has no gradient), EVEN_ERR_OVERFLOW, EVEN_ERR_MEMORY. Free in any case. */
even_status even_sync_layout_make(const even_sync_params *params, even_sync_layout *out) EVEN_MUST_USE;
void even_sync_layout_free(even_sync_layout *layout);

#endif
