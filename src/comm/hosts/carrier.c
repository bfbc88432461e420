/* The carriers' threads: one piece of work at a time, and how far it is. */
#include "comm/hosts/carrier.h"

#include "base/fail.h"
#include "os/thread.h"

static void *carry(void *argument) {
  even_carrier *carrier = argument;
  (void)pthread_mutex_lock(&carrier->lock);
  while (!carrier->closing) {
    if (carrier->work == NULL) {
      (void)pthread_cond_wait(&carrier->changed, &carrier->lock);
      continue;
    }
    (void)pthread_mutex_unlock(&carrier->lock);
    even_status status = carrier->work(carrier->context);
    (void)pthread_mutex_lock(&carrier->lock);
    carrier->status = status;
    if (status != EVEN_OK) {
      carrier->why = *even_error_of(status);
    }
    carrier->work = NULL;
    (void)pthread_cond_broadcast(&carrier->changed);
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

even_status even_carrier_begin(even_carrier *carrier, even_carrier_work *work, void *context) {
  if (!carrier->started) {
    EVEN_TRY(start(carrier));
  }
  (void)pthread_mutex_lock(&carrier->lock);
  carrier->work = work;
  carrier->context = context;
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
  (void)pthread_cond_broadcast(&carrier->changed);
  (void)pthread_mutex_unlock(&carrier->lock);
}

void even_carrier_stop(even_carrier *carrier) {
  if (carrier->started) {
    (void)pthread_mutex_lock(&carrier->lock);
    carrier->stopped = true;
    (void)pthread_cond_broadcast(&carrier->changed);
    (void)pthread_mutex_unlock(&carrier->lock);
  }
}

bool even_carrier_may(even_carrier *carrier, size_t pieces) {
  (void)pthread_mutex_lock(&carrier->lock);
  while (carrier->allowed < pieces && !carrier->stopped) {
    (void)pthread_cond_wait(&carrier->changed, &carrier->lock);
  }
  bool may = !carrier->stopped;
  (void)pthread_mutex_unlock(&carrier->lock);
  return may;
}

void even_carrier_tell(even_carrier *carrier, size_t pieces) {
  (void)pthread_mutex_lock(&carrier->lock);
  carrier->done = pieces;
  (void)pthread_cond_broadcast(&carrier->changed);
  (void)pthread_mutex_unlock(&carrier->lock);
}

even_status even_carrier_await(even_carrier *carrier, size_t pieces) {
  if (!carrier->started) {
    return EVEN_OK;
  }
  (void)pthread_mutex_lock(&carrier->lock);
  while (carrier->done < pieces && carrier->work != NULL) {
    (void)pthread_cond_wait(&carrier->changed, &carrier->lock);
  }
  even_status status = carrier->status == EVEN_OK ? EVEN_OK : even_error_restore(&carrier->why);
  (void)pthread_mutex_unlock(&carrier->lock);
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
