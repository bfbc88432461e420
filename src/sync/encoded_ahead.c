/* The thread that encodes the next bucket while the engine exchanges one. It takes a bucket of which this rank has
 * every gradient: some rank then has each, so that nothing of it depends on what the others will say. */
#include "base/fail.h"
#include "os/futex.h"
#include "os/thread.h"
#include "sync/engine.h"

#define NAP_NS 1000000000u

/* What is asked for is given up where the bucket stays incomplete: the engine then takes it back. */
static bool can_begin(even_sync *sync) {
  uint32_t asked = EVEN_SYNC_AHEAD_ASKED;
  return atomic_load(&sync->ahead.state) == EVEN_SYNC_AHEAD_ASKED &&
         atomic_load(&sync->pending[atomic_load(&sync->ahead.bucket)]) == 0 &&
         atomic_compare_exchange_strong(&sync->ahead.state, &asked, EVEN_SYNC_AHEAD_WORKS);
}

static void *encode_ahead(void *argument) {
  even_sync *sync = argument;
  for (;;) {
    uint32_t bell = atomic_load(&sync->bell);
    if (atomic_load(&sync->ahead.state) == EVEN_SYNC_AHEAD_STOP) {
      return NULL;
    }
    if (can_begin(sync)) {
      even_sync_encode_ahead(sync, atomic_load(&sync->ahead.bucket));
      atomic_store(&sync->ahead.state, EVEN_SYNC_AHEAD_DONE);
      even_futex_wake_all(&sync->ahead.state);
      continue;
    }
    even_sync_sleep(sync, bell);
  }
}

even_status even_sync_ahead_open(even_sync *sync) {
  EVEN_TRY(even_thread_start(encode_ahead, sync, &sync->ahead.thread));
  sync->ahead.runs = true;
  return EVEN_OK;
}

void even_sync_ahead_close(even_sync *sync) {
  if (sync->ahead.runs) {
    atomic_store(&sync->ahead.state, EVEN_SYNC_AHEAD_STOP);
    even_sync_ring(sync);
    even_thread_join(sync->ahead.thread);
    sync->ahead.runs = false;
  }
}

void even_sync_ahead_ask(even_sync *sync, size_t bucket) {
  if (sync->ahead.runs && bucket < sync->layout.bucket_count && sync->encoded->buckets[bucket].count > 0) {
    atomic_store(&sync->ahead.bucket, bucket);
    atomic_store(&sync->ahead.state, EVEN_SYNC_AHEAD_ASKED);
    even_sync_ring(sync);
  }
}

bool even_sync_ahead_take(even_sync *sync, size_t bucket) {
  uint32_t state = EVEN_SYNC_AHEAD_ASKED;
  if (atomic_load(&sync->ahead.state) == EVEN_SYNC_AHEAD_IDLE ||
      atomic_compare_exchange_strong(&sync->ahead.state, &state, EVEN_SYNC_AHEAD_IDLE)) {
    return false;
  }
  while (atomic_load(&sync->ahead.state) == EVEN_SYNC_AHEAD_WORKS) {
    even_futex_wait(&sync->ahead.state, EVEN_SYNC_AHEAD_WORKS, NAP_NS);
  }
  atomic_store(&sync->ahead.state, EVEN_SYNC_AHEAD_IDLE);
  return atomic_load(&sync->ahead.bucket) == bucket;
}
