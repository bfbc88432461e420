/* Buckets of fp32 gradients that travel in 16 bits: narrowed into one place of the arena, reduced there, widened into
 * their slots. */
#include "base/fail.h"
#include "comm/kernels.h"
#include "sync/engine.h"

#include <string.h>

bool even_sync_is_narrow(const even_sync_layout *layout, size_t bucket) {
  return layout->wire != EVEN_F32 && layout->buckets[bucket].dtype == EVEN_F32;
}

/* Where a parameter of the bucket lies on the wire: as far into it as its slot into the bucket, at half the bytes. */
static uint16_t *on_wire(const even_sync *sync, const even_sync_span *span, size_t index) {
  size_t into = (sync->layout.places[index].offset - span->offset) / 2;
  return (uint16_t *)(void *)(sync->base + sync->layout.wire_offset + into);
}

static float *slot_of(const even_sync *sync, size_t index) {
  return (float *)(void *)(sync->base + sync->layout.places[index].offset);
}

/* The gaps between the parameters are reduced too: zeros, as in a bucket. */
static void narrow(even_sync *sync, const even_sync_span *span, size_t bucket) {
  const even_kernels *kernels = even_kernels_best();
  const size_t *members = sync->layout.order + sync->first[bucket];
  uint16_t *end = (uint16_t *)(void *)(sync->base + sync->layout.wire_offset) + span->bytes / sizeof(float);
  for (size_t i = 0; i < span->members; i++) {
    uint16_t *to = on_wire(sync, span, members[i]);
    uint16_t *next = i + 1 < span->members ? on_wire(sync, span, members[i + 1]) : end;
    if (atomic_load(&sync->ready[members[i]]) != 0 && sync->weight != 0.0) {
      size_t count = sync->parameters[members[i]].count;
      kernels->narrow[sync->layout.wire](to, sync->gradients[members[i]], count, (float)sync->weight);
      even_sync_saw(sync, members[i], even_encoding_finite(to, sync->layout.wire, count));
      to += count;
    }
    memset(to, 0, (size_t)(next - to) * sizeof *to);
  }
}

even_status even_sync_reduce_narrow(even_sync *sync, size_t bucket) {
  const even_sync_span *span = &sync->layout.buckets[bucket];
  const size_t *members = sync->layout.order + sync->first[bucket];
  uint16_t *wire = (uint16_t *)(void *)(sync->base + sync->layout.wire_offset);
  size_t count = span->bytes / sizeof(float);
  bool last = bucket + 1 == sync->layout.bucket_count;
  narrow(sync, span, bucket);
  if (last) {
    even_sync_mark(sync, wire + count, sync->layout.wire);
  }
  EVEN_TRY(even_comm_all_reduce(sync->comm, wire, count, sync->layout.wire, EVEN_SUM));
  if (last && sync->layout.marked) { /* to where it lies in other buckets */
    float *end = (float *)(void *)(sync->base + span->offset + span->bytes);
    even_kernels_best()->widen[sync->layout.wire](end - 1, wire + count - 1, 1);
  }
  for (size_t i = 0; i < span->members; i++) {
    even_kernels_best()->widen[sync->layout.wire](slot_of(sync, members[i]), on_wire(sync, span, members[i]),
                                                  sync->parameters[members[i]].count);
  }
  return EVEN_OK;
}
