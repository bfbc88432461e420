/* The carriers' threads: one piece of work at a time, and how far it is. */
#include "comm/hosts/carrier.h"

#include "base/fail.h"
#include "comm/waits.h"
#include "os/clock.h"
#include "os/futex.h"
#include "os/thread.h"

/* With the lock held. Before the carrier rests: whoever rests behind it does not any more. */
static void step(even_carrier *carrier) {
  (void)atomic_fetch_add(&carrier->steps, 1u);
  even_futex_wake_all(&carrier->steps);
}

static void *carry(void *argument) {
  even_carrier *carrier = argument;
  even_waits_carry();
  (void)pthread_mutex_lock(&carrier->lock);
  while (!carrier->closing) {
    if (carrier->work == NULL) {
      even_waits_rest(NULL, 0);
      (void)pthread_cond_wait(&carrier->changed, &carrier->lock);
      continue;
    }
    (void)pthread_mutex_unlock(&carrier->lock);
    even_waits_go_on();
    even_waits_carrier_ends(); /* from here on it is seen itself */
    even_status status = carrier->work(carrier->context);
    (void)pthread_mutex_lock(&carrier->lock);
    carrier->status = status;
    if (status != EVEN_OK) {
      carrier->why = *even_error_of(status);
    }
    carrier->work = NULL;
    step(carrier);
  }
  (void)pthread_mutex_unlock(&carrier->lock);
  return NULL;
}

static even_status start(even_carrier *carrier) {
  (void)pthread_mutex_init(&carrier->lock, NULL);
  (void)pthread_cond_init(&carrier->changed, NULL);
  even_status status = even_thread_start(carry, carrier, &carrier->thread);
  if (status != EVEN_OK) {
    (void)pthread_cond_destroy(&carrier->changed);
    (void)pthread_mutex_destroy(&carrier->lock);
    return status;
  }
  carrier->process_mark = even_process_mark();
  carrier->started = true;
  return EVEN_OK;
}

even_status even_carrier_begin(even_carrier *carrier, even_comm *comm, even_carrier_work *work, void *context) {
  if (!carrier->started) {
    EVEN_TRY(start(carrier));
  }
  even_waits_carrier_begins();
  (void)pthread_mutex_lock(&carrier->lock);
  carrier->work = work;
  carrier->context = context;
  carrier->comm = comm;
  carrier->done = 0;
  carrier->allowed = 0;
  carrier->stopped = false;
  carrier->status = EVEN_OK;
  (void)pthread_cond_broadcast(&carrier->changed);
  (void)pthread_mutex_unlock(&carrier->lock);
  return EVEN_OK;
}

void even_carrier_allow(even_carrier *carrier, size_t pieces) {
  (void)pthread_mutex_lock(&carrier->lock);
  carrier->allowed = pieces;
  (void)atomic_fetch_add(&carrier->allows, 1u);
  (void)pthread_cond_broadcast(&carrier->changed);
  (void)pthread_mutex_unlock(&carrier->lock);
}

void even_carrier_stop(even_carrier *carrier) {
  if (carrier->started) {
    (void)pthread_mutex_lock(&carrier->lock);
    carrier->stopped = true;
    (void)atomic_fetch_add(&carrier->allows, 1u);
    (void)pthread_cond_broadcast(&carrier->changed);
    (void)pthread_mutex_unlock(&carrier->lock);
  }
}

bool even_carrier_may(even_carrier *carrier, size_t pieces) {
  (void)pthread_mutex_lock(&carrier->lock);
  while (carrier->allowed < pieces && !carrier->stopped) {
    even_waits_rest(&carrier->allows, atomic_load(&carrier->allows));
    (void)pthread_cond_wait(&carrier->changed, &carrier->lock);
  }
  bool may = !carrier->stopped;
  (void)pthread_mutex_unlock(&carrier->lock);
  even_waits_go_on();
  return may;
}

void even_carrier_tell(even_carrier *carrier, size_t pieces) {
  (void)pthread_mutex_lock(&carrier->lock);
  carrier->done = pieces;
  step(carrier);
  (void)pthread_mutex_unlock(&carrier->lock);
}

/* Whether it has stood there since `began_ns` is told only of one that has for long. */
static void rest_behind(even_carrier *carrier, even_waiting *waiting, uint32_t seen, uint64_t began_ns) {
  if (even_clock_ns() - began_ns >= EVEN_WAITS_TOLD_NS) {
    even_waits_rest_behind(carrier->comm, waiting, &carrier->steps, seen, began_ns);
  }
  even_futex_wait(&carrier->steps, seen, EVEN_WAITS_TOLD_NS);
}

even_status even_carrier_await(even_carrier *carrier, size_t pieces) {
  even_waiting waiting = {.told = false};
  uint64_t began = 0;
  if (!carrier->started) {
    return EVEN_OK;
  }
  (void)pthread_mutex_lock(&carrier->lock);
  while (carrier->done < pieces && carrier->work != NULL) {
    uint32_t seen = atomic_load(&carrier->steps);
    (void)pthread_mutex_unlock(&carrier->lock);
    began = began == 0 ? even_clock_ns() : began;
    rest_behind(carrier, &waiting, seen, began);
    (void)pthread_mutex_lock(&carrier->lock);
  }
  even_status status = carrier->status == EVEN_OK ? EVEN_OK : even_error_restore(&carrier->why);
  (void)pthread_mutex_unlock(&carrier->lock);
  even_waits_go_on();
  return status;
}

even_status even_carrier_finish(even_carrier *carrier) {
  return even_carrier_await(carrier, SIZE_MAX);
}

void even_carrier_close(even_carrier *carrier) {
  if (!carrier->started || carrier->process_mark != even_process_mark()) {
    return;
  }
  (void)pthread_mutex_lock(&carrier->lock);
  carrier->closing = true;
  (void)pthread_cond_broadcast(&carrier->changed);
  (void)pthread_mutex_unlock(&carrier->lock);
  even_thread_join(carrier->thread);
  (void)pthread_cond_destroy(&carrier->changed);
  (void)pthread_mutex_destroy(&carrier->lock);
  carrier->started = false;
}
