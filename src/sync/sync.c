/* Gradient synchronisation as its callers see it: rounds of begin, ready, finish. */
#include <evenstep/sync.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"
#include "base/params.h"
#include "comm/waits.h"
#include "os/clock.h"
#include "os/futex.h"
#include "os/thread.h"
#include "sync/engine.h"

#include <evenstep/flight.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#define NAP_NS 1000000000u

even_status even_sync_arena_bytes(const even_sync_params *params, size_t *out) {
  even_sync_params own;
  even_sync_layout layout;
  *out = 0;
  EVEN_TRY(EVEN_TAKE_PARAMS(even_sync_params, &own, params));
  params = &own;
  EVEN_TRY(even_sync_layout_make(params, &layout));
  size_t bytes = layout.bytes;
  even_sync_layout_free(&layout);
  if (!even_add_size(params->arena_offset, bytes, out)) {
    return even_fail(EVEN_ERR_OVERFLOW, "an arena of %zu + %zu bytes", params->arena_offset, bytes);
  }
  return EVEN_OK;
}

static even_status allocate(even_sync *sync, const even_sync_params *params) {
  size_t count = params->parameter_count;
  EVEN_TRY(even_sync_layout_make(params, &sync->layout));
  EVEN_TRY(EVEN_NEW_ARRAY(&sync->parameters, count));
  EVEN_TRY(EVEN_NEW_ARRAY(&sync->gradients, count));
  EVEN_TRY(EVEN_NEW_ARRAY(&sync->ready, count));
  EVEN_TRY(EVEN_NEW_ARRAY(&sync->used, count));
  EVEN_TRY(EVEN_NEW_ARRAY(&sync->told, count));
  EVEN_TRY(EVEN_NEW_ARRAY(&sync->bad, count));
  EVEN_TRY(EVEN_NEW_ARRAY(&sync->pending, sync->layout.bucket_count));
  EVEN_TRY(EVEN_NEW_ARRAY(&sync->first, sync->layout.bucket_count));
  if (count > 0) {
    memcpy(sync->parameters, params->parameters, count * sizeof *params->parameters);
  }
  for (size_t b = 1; b < sync->layout.bucket_count; b++) {
    sync->first[b] = sync->first[b - 1] + sync->layout.buckets[b - 1].members;
  }
  return EVEN_OK;
}

/* Whether the parts of sums can be left where they are. */
static even_status check_unsummed(const even_sync_params *params, const even_comm *comm) {
  if (params->wire != EVEN_F32 || params->encoding != EVEN_SYNC_PLAIN) {
    return even_fail(EVEN_ERR_ARGUMENT,
                     "gradients that stay unsummed do not travel, so neither in 16 bits nor encoded");
  }
  if (strcmp(even_comm_engine_name(comm), "shm") != 0) {
    return even_fail(EVEN_ERR_UNSUPPORTED, "gradients stay unsummed in the memory of one host alone, not over \"%s\"",
                     even_comm_engine_name(comm));
  }
  return EVEN_OK;
}

static even_status set_up(even_sync *sync, const even_sync_params *params, even_comm *comm) {
  size_t needed = 0;
  EVEN_TRY(even_sync_arena_bytes(params, &needed));
  if (params->unsummed) {
    EVEN_TRY(check_unsummed(params, comm));
  }
  size_t there = even_comm_arena_bytes(comm);
  if (needed > there) {
    return even_fail(EVEN_ERR_ARGUMENT, "the buckets need %zu bytes of arena and the group has %zu", needed, there);
  }
  EVEN_TRY(allocate(sync, params));
  EVEN_TRY(even_encoded_open(params, &sync->layout, comm, &sync->encoded));
  sync->comm = comm;
  sync->unsummed = params->unsummed != 0;
  even_comm_set_site(comm, "the reduction of gradients");
  sync->telemetry = params->telemetry;
  sync->parameter_count = params->parameter_count;
  sync->base = needed == 0 ? NULL : (unsigned char *)even_comm_arena(comm) + params->arena_offset;
  if (sync->layout.bytes > 0) {
    memset(sync->base, 0, sync->layout.bytes); /* the gaps between slots stay zero for ever */
  }
  if (sync->encoded != NULL) {
    EVEN_TRY(even_sync_ahead_open(sync));
  }
  atomic_store(&sync->summed, EVEN_SYNC_NO_SUMS);
  EVEN_TRY(even_thread_start(even_sync_engine, sync, &sync->thread));
  sync->thread_runs = true;
  return EVEN_OK;
}

even_status even_sync_open(const even_sync_params *params, even_comm *comm, even_sync **out) {
  even_sync *sync = NULL;
  even_sync_params own;
  *out = NULL;
  EVEN_TRY(EVEN_TAKE_PARAMS(even_sync_params, &own, params));
  EVEN_TRY(EVEN_NEW(&sync));
  even_status status = set_up(sync, &own, comm);
  if (status != EVEN_OK) {
    even_error error = *even_error_last();
    even_sync_close(sync);
    return even_error_restore(&error);
  }
  *out = sync;
  return EVEN_OK;
}

void even_sync_close(even_sync *sync) {
  if (sync == NULL) {
    return;
  }
  if (sync->thread_runs) {
    uint32_t phase = atomic_exchange(&sync->phase, EVEN_SYNC_STOP);
    if (phase == EVEN_SYNC_ROUND || phase == EVEN_SYNC_CLOSING) {
      even_comm_revoke(sync->comm); /* the engine may be inside a collective that nobody will complete */
    }
    even_sync_ring(sync);
    even_thread_join(sync->thread);
  }
  even_sync_ahead_close(sync);
  even_encoded_close(sync->encoded);
  even_sync_layout_free(&sync->layout);
  even_free(sync->parameters);
  even_free(sync->gradients);
  even_free(sync->ready);
  even_free(sync->used);
  even_free(sync->told);
  even_free(sync->bad);
  even_free(sync->pending);
  even_free(sync->first);
  even_free(sync);
}

even_status even_sync_know(even_sync *sync, const uint8_t *used) {
  if (atomic_load(&sync->phase) != EVEN_SYNC_IDLE) {
    return even_fail(EVEN_ERR_STATE, "which parameters are used is told while a round of gradients is open");
  }
  if (!sync->layout.marked) {
    return even_fail(EVEN_ERR_ARGUMENT, "which parameters are used is told, but not as of a static graph");
  }
  sync->known = used != NULL;
  if (sync->known) {
    memcpy(sync->told, used, sync->parameter_count);
  }
  return EVEN_OK;
}

int even_sync_nonfinite(const even_sync *sync, size_t index) {
  return index < sync->parameter_count ? sync->bad[index] : 0;
}

void *even_sync_slot(even_sync *sync, size_t index) {
  return index < sync->parameter_count ? sync->base + sync->layout.places[index].offset : NULL;
}

even_status even_sync_begin(even_sync *sync, double weight, uint32_t step) {
  if (atomic_load(&sync->phase) != EVEN_SYNC_IDLE) {
    return even_fail(EVEN_ERR_STATE, "a round of gradients begins while one is open");
  }
  if (sync->broken != EVEN_OK) {
    return even_error_restore(&sync->error);
  }
  if (!isfinite(weight) || weight < 0.0) {
    return even_fail(EVEN_ERR_ARGUMENT, "a gradient weight of %g", weight);
  }
  sync->weight = weight;
  sync->step = step;
  sync->report = (even_sync_report){0};
  sync->overflowed = false;
  if (sync->encoded != NULL) {
    even_encoded_begin(sync->encoded, step);
  }
  for (size_t i = 0; i < sync->parameter_count; i++) {
    atomic_store_explicit(&sync->ready[i], 0, memory_order_relaxed);
    sync->bad[i] = 0;
  }
  for (size_t b = 0; b < sync->layout.bucket_count; b++) {
    atomic_store_explicit(&sync->pending[b], sync->layout.buckets[b].members, memory_order_relaxed);
  }
  atomic_store(&sync->next, 0u);
  atomic_store(&sync->summed, 0u);
  atomic_store(&sync->phase, EVEN_SYNC_ROUND);
  even_sync_ring(sync);
  return EVEN_OK;
}

even_status even_sync_ready(even_sync *sync, size_t index, const void *gradient) {
  if (index >= sync->parameter_count) {
    return even_fail(EVEN_ERR_ARGUMENT, "parameter %zu of %zu", index, sync->parameter_count);
  }
  if (atomic_load(&sync->phase) != EVEN_SYNC_ROUND) {
    return even_fail(EVEN_ERR_STATE, "the gradient of parameter %zu comes outside a round", index);
  }
  if (atomic_exchange(&sync->ready[index], 1) != 0) {
    return even_fail(EVEN_ERR_STATE, "the gradient of parameter %zu comes twice in one round", index);
  }
  sync->gradients[index] = gradient; /* the engine looks once `pending` says so, or after finish */
  size_t bucket = sync->layout.places[index].bucket;
  if (atomic_fetch_sub(&sync->pending[bucket], 1u) == 1u) {
    size_t next = atomic_load(&sync->next);
    if (bucket == next || (bucket == next + 1 && sync->ahead.runs)) {
      even_sync_ring(sync);
    }
  }
  return EVEN_OK;
}

even_status even_sync_await(even_sync *sync, size_t index) {
  if (index >= sync->parameter_count) {
    return even_fail(EVEN_ERR_ARGUMENT, "parameter %zu of %zu", index, sync->parameter_count);
  }
  if (sync->unsummed) {
    return even_fail(EVEN_ERR_UNSUPPORTED, "no sum of parameter %zu is formed: gradients stay unsummed", index);
  }
  size_t bucket = sync->layout.places[index].bucket;
  atomic_fetch_add(&sync->awaiting, 1u);
  uint32_t summed = atomic_load(&sync->summed);
  while (summed <= bucket) {
    even_futex_wait(&sync->summed, summed, NAP_NS);
    summed = atomic_load(&sync->summed);
  }
  atomic_fetch_sub(&sync->awaiting, 1u);
  if (summed != EVEN_SYNC_NO_SUMS) {
    return EVEN_OK;
  }
  if (sync->broken != EVEN_OK) {
    return even_error_restore(&sync->error);
  }
  return even_fail(EVEN_ERR_STATE, "no round of gradients was begun");
}

even_status even_sync_complete(even_sync *sync) {
  if (atomic_load(&sync->phase) != EVEN_SYNC_ROUND) {
    return even_fail(EVEN_ERR_STATE, "no round of gradients is open");
  }
  atomic_store(&sync->phase, EVEN_SYNC_CLOSING);
  even_sync_ring(sync);
  return EVEN_OK;
}

/* The engine cannot ask where in the program its rank is, nor who else there may call: for that this one can. */
static void sleep_until_closed(even_sync *sync, uint64_t began) {
  even_waiting waiting = {0};
  while (atomic_load(&sync->phase) == EVEN_SYNC_CLOSING) {
    even_waits_rest_behind(sync->comm, &waiting, &sync->phase, EVEN_SYNC_CLOSING, began);
    even_futex_wait(&sync->phase, EVEN_SYNC_CLOSING, EVEN_WAITS_TOLD_NS);
  }
  even_waits_go_on();
}

even_status even_sync_finish(even_sync *sync, uint8_t *used, even_sync_report *report) {
  uint64_t began = even_clock_ns();
  if (atomic_load(&sync->phase) == EVEN_SYNC_IDLE) {
    return even_fail(EVEN_ERR_STATE, "no round of gradients is open");
  }
  if (atomic_load(&sync->phase) == EVEN_SYNC_ROUND) {
    EVEN_TRY(even_sync_complete(sync));
  }
  sleep_until_closed(sync, began);
  atomic_store(&sync->phase, EVEN_SYNC_IDLE);
  sync->report.exposed_ns = even_clock_ns() - began;
  if (report != NULL) {
    *report = sync->report;
  }
  if (sync->broken != EVEN_OK) {
    return even_error_restore(&sync->error);
  }
  if (used != NULL && sync->parameter_count > 0) {
    memcpy(used, sync->known ? sync->told : sync->used, sync->parameter_count);
  }
  return EVEN_OK;
}
