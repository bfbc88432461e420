/* The thread that encodes the next bucket while the engine exchanges one. It takes a bucket of which this rank has
 * every gradient: some rank then has each, so that nothing of it depends on what the others will say. */
#include "base/fail.h"
#include "os/futex.h"
#include "os/thread.h"
#include "sync/engine.h"

#define NAP_NS 1000000000u

static bool is_asked(uint32_t word) {
  return word % EVEN_SYNC_AHEAD_STATES == EVEN_SYNC_AHEAD_ASKED;
}

bool even_sync_ahead_claim(even_sync *sync, uint32_t asked) {
  return atomic_compare_exchange_strong(&sync->ahead.state, &asked, EVEN_SYNC_AHEAD_WORKS);
}

/* What is asked for is given up where the bucket stays incomplete: the engine then takes it back. The bucket is that of
 * the word that is claimed: a later request has another one. */
static bool can_begin(even_sync *sync, size_t *bucket) {
  uint32_t word = atomic_load(&sync->ahead.state);
  *bucket = atomic_load(&sync->ahead.bucket);
  return is_asked(word) && atomic_load(&sync->pending[*bucket]) == 0 && even_sync_ahead_claim(sync, word);
}

static void *encode_ahead(void *argument) {
  even_sync *sync = argument;
  size_t bucket = 0;
  for (;;) {
    uint32_t bell = atomic_load(&sync->bell);
    if (atomic_load(&sync->ahead.state) == EVEN_SYNC_AHEAD_STOP) {
      return NULL;
    }
    if (can_begin(sync, &bucket)) {
      even_sync_encode_ahead(sync, bucket);
      uint32_t works = EVEN_SYNC_AHEAD_WORKS; /* else it is to stop */
      (void)atomic_compare_exchange_strong(&sync->ahead.state, &works, EVEN_SYNC_AHEAD_DONE);
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
    atomic_store(&sync->ahead.state, ++sync->ahead.requests * EVEN_SYNC_AHEAD_STATES + EVEN_SYNC_AHEAD_ASKED);
    even_sync_ring(sync);
  }
}

bool even_sync_ahead_take(even_sync *sync, size_t bucket) {
  uint32_t word = atomic_load(&sync->ahead.state);
  if (word == EVEN_SYNC_AHEAD_IDLE ||
      (is_asked(word) && atomic_compare_exchange_strong(&sync->ahead.state, &word, EVEN_SYNC_AHEAD_IDLE))) {
    return false;
  }
  while (atomic_load(&sync->ahead.state) == EVEN_SYNC_AHEAD_WORKS) {
    even_futex_wait(&sync->ahead.state, EVEN_SYNC_AHEAD_WORKS, NAP_NS);
  }
  atomic_store(&sync->ahead.state, EVEN_SYNC_AHEAD_IDLE);
  return atomic_load(&sync->ahead.bucket) == bucket;
}
