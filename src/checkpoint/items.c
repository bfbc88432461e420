/* Threads for the time of one call. */
#include "checkpoint/items.h"

#include "base/fail.h"
#include "base/stop.h"
#include "os/thread.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

typedef struct items_state {
  const even_items_job *job;
  atomic_size_t next; /* the item that nobody has taken yet */
  atomic_bool failed;
  pthread_mutex_t lock; /* of what follows */
  size_t item;          /* that failed */
  even_error error;
} items_state;

static void fail_item(items_state *state, size_t item, even_status status) {
  (void)pthread_mutex_lock(&state->lock);
  bool first = !atomic_load(&state->failed);
  if (first || (status == EVEN_ERR_CORRUPT && state->error.status == EVEN_ERR_CORRUPT && item < state->item)) {
    state->error = *even_error_last();
    state->item = item;
    atomic_store(&state->failed, true);
  }
  (void)pthread_mutex_unlock(&state->lock);
}

static void take_items(items_state *state, bool asks) {
  const even_items_job *job = state->job;
  void *own = NULL;
  size_t item = SIZE_MAX;
  even_status status = job->open == NULL ? EVEN_OK : job->open(job->context, &own);
  while (status == EVEN_OK && !atomic_load(&state->failed)) {
    item = atomic_fetch_add(&state->next, 1);
    if (item >= job->count) {
      break;
    }
    status = asks && even_stop_asked() ? even_fail(EVEN_ERR_INTERRUPTED, "interrupted while %s", job->what)
                                       : job->work(job->context, own, item);
  }
  if (status != EVEN_OK) {
    fail_item(state, item, status);
  }
  if (job->close != NULL) {
    job->close(own);
  }
}

static void *take_items_beside(void *context) {
  take_items(context, false);
  return NULL;
}

even_status even_items_run(const even_items_job *job) {
  pthread_t threads[EVEN_ITEMS_MOST_THREADS - 1];
  size_t started = 0;
  items_state state = {.job = job, .lock = PTHREAD_MUTEX_INITIALIZER, .item = SIZE_MAX};
  even_error before = *even_error_last();
  while (started < EVEN_ITEMS_MOST_THREADS - 1 && started + 1 < job->most && started + 1 < job->count &&
         even_thread_start(take_items_beside, &state, &threads[started]) == EVEN_OK) {
    started++;
  }
  (void)even_error_restore(&before); /* fewer threads are slower, and that is all */
  take_items(&state, true);
  for (size_t i = 0; i < started; i++) {
    even_thread_join(threads[i]);
  }
  return atomic_load(&state.failed) ? even_error_restore(&state.error) : EVEN_OK;
}
