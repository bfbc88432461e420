/* What encodings have left out so far, for those who keep it beyond the engine's life. */
#include "base/fail.h"
#include "sync/engine.h"

#include <string.h>

static even_status check_between_rounds(const even_sync *sync) {
  if (atomic_load(&sync->phase) != EVEN_SYNC_IDLE) {
    return even_fail(EVEN_ERR_STATE, "what encodings leave out is asked for while a round of gradients is open");
  }
  return EVEN_OK;
}

/* Where the parameter begins among its bucket's values. */
static size_t begin_of(const even_sync *sync, size_t bucket, size_t index) {
  const size_t *member = sync->layout.order + sync->first[bucket];
  size_t at = 0;
  for (; *member != index; member++) {
    at += sync->parameters[*member].count;
  }
  return at;
}

/* Where a parameter lies among its bucket's values, and which of its sums this rank encodes. */
typedef struct extent {
  const even_encoded_bucket *bucket; /* NULL: nothing is kept of it */
  size_t begin, end;
  size_t from, until; /* no sums: until <= from */
} extent;

static even_status find(const even_sync *sync, size_t index, extent *out) {
  *out = (extent){0};
  EVEN_TRY(check_between_rounds(sync));
  if (index >= sync->parameter_count) {
    return even_fail(EVEN_ERR_ARGUMENT, "parameter %zu of %zu", index, sync->parameter_count);
  }
  size_t number = sync->layout.places[index].bucket;
  if (sync->encoded == NULL || !sync->encoded->keeps || sync->encoded->buckets[number].count == 0) {
    return EVEN_OK;
  }
  const even_encoded_bucket *bucket = &sync->encoded->buckets[number];
  size_t begin = begin_of(sync, number, index);
  size_t end = begin + sync->parameters[index].count;
  size_t own_end = bucket->own_first + bucket->own_count;
  *out = (extent){.bucket = bucket,
                  .begin = begin,
                  .end = end,
                  .from = begin > bucket->own_first ? begin : bucket->own_first,
                  .until = end < own_end ? end : own_end};
  return EVEN_OK;
}

even_status even_sync_left_out(even_sync *sync, size_t index, int of_sums, even_sync_left *out) {
  extent at;
  *out = (even_sync_left){0};
  EVEN_TRY(find(sync, index, &at));
  if (at.bucket == NULL) {
    return EVEN_OK;
  }
  if (of_sums == 0) {
    *out = (even_sync_left){.values = even_encoded_before(sync->encoded, at.bucket) + at.begin,
                            .count = at.end - at.begin};
  } else if (at.from < at.until) {
    float *sums = even_encoded_sum_before(sync->encoded, at.bucket);
    *out = (even_sync_left){
        .values = sums + (at.from - at.bucket->own_first), .first = at.from - at.begin, .count = at.until - at.from};
  }
  return EVEN_OK;
}

even_status even_sync_keep(even_sync *sync, size_t index) {
  extent at;
  EVEN_TRY(find(sync, index, &at));
  if (at.bucket == NULL || !at.bucket->discarded) {
    return EVEN_OK;
  }
  memcpy(even_encoded_before(sync->encoded, at.bucket) + at.begin,
         even_encoded_values(sync->encoded, at.bucket) + at.begin, (at.end - at.begin) * sizeof(float));
  if (at.from < at.until) {
    size_t first = at.from - at.bucket->own_first;
    memcpy(even_encoded_sum_before(sync->encoded, at.bucket) + first,
           even_encoded_sum(sync->encoded, at.bucket) + first, (at.until - at.from) * sizeof(float));
  }
  return EVEN_OK;
}

even_status even_sync_discard(even_sync *sync) {
  if (atomic_load(&sync->phase) != EVEN_SYNC_ROUND) {
    return even_fail(EVEN_ERR_STATE, "a round of gradients is to count nothing, and none is open");
  }
  if (sync->encoded != NULL) {
    sync->encoded->counts = false; /* which the engine reads once the phase says that the round closes */
  }
  return EVEN_OK;
}

even_status even_sync_forget(even_sync *sync) {
  EVEN_TRY(check_between_rounds(sync));
  if (sync->encoded != NULL) {
    even_encoded_forget(sync->encoded, &sync->layout);
  }
  return EVEN_OK;
}
