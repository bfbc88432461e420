/* The engine thread: packs buckets in order as they become complete and reduces them. */
#include "sync/engine.h"

#include "base/fail.h"
#include "comm/kernels.h"
#include "comm/waits.h"
#include "os/clock.h"
#include "os/futex.h"

#include <string.h>

#define NAP_NS 1000000000u /* a lost wake would cost this much; none is known */

void even_sync_ring(even_sync *sync) {
  atomic_fetch_add(&sync->bell, 1u);
  if (atomic_load(&sync->sleepers) != 0) {
    even_futex_wake_all(&sync->bell);
  }
}

void even_sync_sleep(even_sync *sync, uint32_t bell) {
  atomic_fetch_add(&sync->sleepers, 1u);
  even_futex_wait(&sync->bell, bell, NAP_NS);
  atomic_fetch_sub(&sync->sleepers, 1u);
}

/* Sleeps until `wanted(sync)` holds. All words are sequentially consistent: whoever makes it true rings after. */
static void sleep_until(even_sync *sync, bool (*wanted)(even_sync *)) {
  for (;;) {
    uint32_t bell = atomic_load(&sync->bell);
    if (wanted(sync)) {
      even_waits_go_on();
      return;
    }
    even_waits_rest(&sync->bell, bell);
    even_sync_sleep(sync, bell);
  }
}

static void say_summed(even_sync *sync, uint32_t buckets) {
  atomic_store(&sync->summed, buckets);
  if (atomic_load(&sync->awaiting) != 0) {
    even_futex_wake_all(&sync->summed);
  }
}

static bool round_is_open(even_sync *sync) {
  uint32_t phase = atomic_load(&sync->phase);
  return phase == EVEN_SYNC_ROUND || phase == EVEN_SYNC_CLOSING || phase == EVEN_SYNC_STOP;
}

static bool round_is_closing(even_sync *sync) {
  uint32_t phase = atomic_load(&sync->phase);
  return phase == EVEN_SYNC_CLOSING || phase == EVEN_SYNC_STOP;
}

static bool bucket_can_go(even_sync *sync) {
  return atomic_load(&sync->pending[atomic_load(&sync->next)]) == 0 || round_is_closing(sync);
}

/* So much of a gradient is weighed at a time: what was written is still in the first-level cache when it is looked at.
 */
#define PIECE_BYTES ((size_t)16384)

/* slot = weight * gradient. Division by 1/weight is the reduction kernels' average over one source. */
static void weigh(const even_sync *sync, even_dtype dtype, void *slot, const void *gradient, size_t count) {
  if (sync->weight != 1.0) {
    void *targets[1] = {slot};
    const void *sources[1] = {gradient};
    even_kernels_best()->reduce[dtype][EVEN_AVG](targets, 1, sources, 1, count, 1.0 / sync->weight);
  } else if (slot != gradient) {
    memcpy(slot, gradient, count * even_dtype_bytes(dtype));
  }
}

/* What stays unsummed is not looked at before backward has ended: of models that are larger than caches it goes past
 * them. */
#define PAST_CACHES ((size_t)8 << 20)

/* The same, by way of `room` (PIECE_BYTES); gives where it may still be looked at. */
static const void *weigh_past_caches(const even_sync *sync, even_dtype dtype, void *slot, const void *gradient,
                                     size_t count, void *room) {
  if (sync->weight != 1.0) {
    weigh(sync, dtype, room, gradient, count);
    gradient = room;
  }
  even_copy_past_caches(slot, gradient, count * even_dtype_bytes(dtype));
  return gradient;
}

static void pack(even_sync *sync, size_t index) {
  const even_sync_parameter *parameter = &sync->parameters[index];
  unsigned char *slot = sync->base + sync->layout.places[index].offset;
  size_t size = even_dtype_bytes(parameter->dtype);
  const unsigned char *gradient = sync->gradients[index];
  bool finite = true;
  if (atomic_load(&sync->ready[index]) == 0 || sync->weight == 0.0) {
    memset(slot, 0, parameter->count * size);
    return;
  }
  _Alignas(64) unsigned char room[PIECE_BYTES];
  bool past_caches = sync->unsummed && sync->layout.bytes > PAST_CACHES && slot != gradient;
  for (size_t first = 0; first < parameter->count; first += PIECE_BYTES / size) {
    size_t left = parameter->count - first;
    size_t piece = left < PIECE_BYTES / size ? left : PIECE_BYTES / size;
    const void *packed = slot + first * size;
    if (past_caches) {
      packed = weigh_past_caches(sync, parameter->dtype, slot + first * size, gradient + first * size, piece, room);
    } else {
      weigh(sync, parameter->dtype, slot + first * size, gradient + first * size, piece);
    }
    finite = even_encoding_finite(packed, parameter->dtype, piece) && finite;
  }
  even_sync_saw(sync, index, finite);
}

void even_sync_saw(even_sync *sync, size_t index, bool finite) {
  if (!finite) {
    sync->bad[index] = EVEN_SYNC_NONFINITE_HERE;
  }
}

/* NULL: gradients are not of this dtype. */
static const void *one_of(even_dtype dtype) {
  static const float single = 1.0f;
  static const double wide = 1.0;
  static const uint16_t half = 0x3c00;
  static const uint16_t brain = 0x3f80;
  switch (dtype) {
    case EVEN_F32:
      return &single;
    case EVEN_F64:
      return &wide;
    case EVEN_F16:
      return &half;
    case EVEN_BF16:
      return &brain;
    default:
      return NULL;
  }
}

/* The mark is the last element of the last bucket: its sum is 0 where no rank has seen one. */
void even_sync_mark(const even_sync *sync, void *end, even_dtype dtype) {
  const void *one = one_of(dtype);
  if (!sync->layout.marked || one == NULL) {
    return;
  }
  size_t size = even_dtype_bytes(dtype);
  unsigned char *at = (unsigned char *)end - size;
  memset(at, 0, size);
  for (size_t i = 0; i < sync->parameter_count; i++) {
    if (sync->bad[i] != 0) {
      memcpy(at, one, size);
      return;
    }
  }
}

/* After its sum has been formed. */
static bool is_marked(const even_sync *sync) {
  const even_sync_span *last = &sync->layout.buckets[sync->layout.bucket_count - 1];
  double zero = 0;
  size_t size = even_dtype_bytes(last->dtype);
  return memcmp(sync->base + last->offset + last->bytes - size, &zero, size) != 0;
}

static even_status reduce_in_place(even_sync *sync, size_t bucket) {
  const even_sync_span *span = &sync->layout.buckets[bucket];
  for (size_t i = 0; i < span->members; i++) {
    pack(sync, sync->layout.order[sync->first[bucket] + i]);
  }
  if (bucket + 1 == sync->layout.bucket_count) {
    even_sync_mark(sync, sync->base + span->offset + span->bytes, span->dtype);
  }
  if (sync->unsummed) {
    return EVEN_OK; /* the flags, which follow, are when all ranks have packed */
  }
  return even_comm_all_reduce(sync->comm, sync->base + span->offset, span->bytes / even_dtype_bytes(span->dtype),
                              span->dtype, EVEN_SUM);
}

/* By the way that the bucket goes; the bytes that travel, and those of the gradients. */
static even_status reduce_on_its_way(even_sync *sync, size_t bucket, uint64_t *moved, uint64_t *full) {
  const even_sync_span *span = &sync->layout.buckets[bucket];
  if (sync->encoded != NULL && sync->encoded->buckets[bucket].count > 0) {
    return even_sync_reduce_encoded(sync, bucket, moved, full);
  }
  bool narrow = even_sync_is_narrow(&sync->layout, bucket);
  *moved = narrow || sync->unsummed ? span->bytes / 2 : span->bytes;
  *full = sync->unsummed ? *moved : span->bytes;
  return narrow ? even_sync_reduce_narrow(sync, bucket) : reduce_in_place(sync, bucket);
}

/* Of finite values in fp16 the sum may be more than that holds. It has the same bits on all ranks. */
static void look_at_sums(even_sync *sync, size_t bucket) {
  const even_sync_span *span = &sync->layout.buckets[bucket];
  bool by_wire = even_sync_is_narrow(&sync->layout, bucket) && sync->layout.wire == EVEN_F16;
  if (sync->unsummed || (span->dtype != EVEN_F16 && !by_wire)) {
    return;
  }
  for (size_t i = 0; i < span->members; i++) {
    size_t index = sync->layout.order[sync->first[bucket] + i];
    const void *sum = sync->base + sync->layout.places[index].offset;
    if (!even_encoding_finite(sum, span->dtype, sync->parameters[index].count)) {
      sync->bad[index] = (uint8_t)(sync->bad[index] | EVEN_SYNC_NONFINITE_ANYWHERE);
      sync->overflowed = true;
    }
  }
}

static even_status reduce_bucket(even_sync *sync, size_t bucket) {
  const even_sync_span *span = &sync->layout.buckets[bucket];
  uint64_t moved = 0;
  uint64_t full = 0;
  uint64_t began = even_clock_ns();
  uint64_t waited = even_comm_wait_ns(sync->comm);
  EVEN_TRY(reduce_on_its_way(sync, bucket, &moved, &full));
  if (full > 0) {
    look_at_sums(sync, bucket);
  }
  if (sync->encoded != NULL && sync->encoded->keeps && full > 0) { /* the same bits on all ranks */
    const void *sums = sync->base + span->offset;
    bool finite = even_encoding_finite(sums, span->dtype, span->bytes / even_dtype_bytes(span->dtype));
    sync->encoded->finite = sync->encoded->finite && finite;
  }
  uint64_t took = even_clock_ns() - began;
  waited = even_comm_wait_ns(sync->comm) - waited;
  waited = waited < took ? waited : took; /* for ranks that had not come yet: no communication */
  if (sync->report.buckets == 0) {
    sync->report.start_ns = began;
  }
  sync->report.communication_ns += took;
  sync->report.bytes += moved;
  sync->report.full_bytes += full;
  sync->report.buckets++;
  even_telemetry_span(sync->telemetry, &(even_span_record){.step = sync->step,
                                                           .span = EVEN_SPAN_COMMUNICATION,
                                                           .start_ns = began + waited,
                                                           .duration_ns = took - waited,
                                                           .bytes = moved});
  return EVEN_OK;
}

/* Which parameters had a gradient anywhere, and of which some was not finite: the larger number wins. */
static even_status reduce_flags(even_sync *sync) {
  enum { HAS = 1, HAS_BAD = 2 };
  for (size_t i = 0; i < sync->parameter_count; i++) {
    sync->used[i] = atomic_load(&sync->ready[i]) == 0 ? 0 : sync->bad[i] != 0 ? HAS_BAD : HAS;
  }
  EVEN_TRY(even_comm_all_reduce(sync->comm, sync->used, sync->parameter_count, EVEN_U8, EVEN_MAX));
  for (size_t i = 0; i < sync->parameter_count; i++) {
    if (sync->used[i] == HAS_BAD) {
      sync->used[i] = HAS;
      sync->bad[i] = (uint8_t)(sync->bad[i] | EVEN_SYNC_NONFINITE_ANYWHERE);
      sync->report.nonfinite++;
    }
  }
  return EVEN_OK;
}

static even_status run_round(even_sync *sync) {
  uint64_t waited = even_comm_wait_ns(sync->comm);
  for (size_t bucket = 0; bucket < sync->layout.bucket_count; bucket++) {
    atomic_store(&sync->next, bucket);
    sleep_until(sync, bucket_can_go);
    if (atomic_load(&sync->phase) == EVEN_SYNC_STOP) {
      return EVEN_OK;
    }
    EVEN_TRY(reduce_bucket(sync, bucket));
    say_summed(sync, (uint32_t)bucket + 1);
  }
  sleep_until(sync, round_is_closing);
  if (atomic_load(&sync->phase) == EVEN_SYNC_STOP) {
    return EVEN_OK;
  }
  if (!sync->known || is_marked(sync) || sync->overflowed) {
    EVEN_TRY(reduce_flags(sync));
  }
  if (sync->encoded != NULL) {
    even_encoded_end(sync->encoded, &sync->layout);
  }
  sync->report.peer_wait_ns = even_comm_wait_ns(sync->comm) - waited;
  return EVEN_OK;
}

void *even_sync_engine(void *argument) {
  even_sync *sync = argument;
  even_telemetry_set_row(EVEN_ROW_ENGINE);
  for (;;) {
    sleep_until(sync, round_is_open);
    even_status status = run_round(sync);
    (void)even_sync_ahead_take(sync, 0); /* of a round that has failed: gradients are the caller's again */
    if (status != EVEN_OK) {
      sync->broken = status;
      sync->error = *even_error_last();
      say_summed(sync, EVEN_SYNC_NO_SUMS);
    }
    sleep_until(sync, round_is_closing); /* a round that fails stays open until its caller closes it */
    uint32_t closing = EVEN_SYNC_CLOSING;
    if (!atomic_compare_exchange_strong(&sync->phase, &closing, EVEN_SYNC_DONE)) {
      return NULL; /* STOP */
    }
    even_futex_wake_all(&sync->phase);
  }
}
