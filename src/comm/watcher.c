/* The thread that looks at groups over the network. It lives as long as there is one. */
#include "comm/watcher.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "comm/peers.h"
#include "os/futex.h"
#include "os/thread.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct watcher {
  struct watcher *parent; /* of the process from which this one was forked: its lock may be held for ever */
  uint32_t process_mark;
  pthread_mutex_t life; /* held while the thread is started or ended */
  pthread_mutex_t lock; /* held during looks */
  even_watch *first;
  _Atomic uint32_t stop; /* the futex, too */
  bool runs;
  pthread_t thread;
} watcher;

static _Atomic(watcher *) here;

static watcher *watcher_of_process(void) {
  watcher *found = atomic_load(&here);
  watcher *made = NULL;
  uint32_t mark = even_process_mark();
  if (found != NULL && found->process_mark == mark) {
    return found;
  }
  if (EVEN_NEW(&made) != EVEN_OK) {
    return NULL;
  }
  made->parent = found;
  made->process_mark = mark;
  (void)pthread_mutex_init(&made->life, NULL);
  (void)pthread_mutex_init(&made->lock, NULL);
  if (!atomic_compare_exchange_strong(&here, &found, made)) {
    (void)pthread_mutex_destroy(&made->life);
    (void)pthread_mutex_destroy(&made->lock);
    even_free(made);
    return found; /* another thread's, of this process */
  }
  return made;
}

static void look(watcher *own) {
  (void)pthread_mutex_lock(&own->lock);
  for (even_watch *watch = own->first; watch != NULL; watch = watch->next) {
    watch->look(watch->context);
  }
  (void)pthread_mutex_unlock(&own->lock);
}

void even_watcher_look(void) {
  const even_error kept = *even_error_last();
  watcher *own = atomic_load(&here);
  if (own != NULL && own->process_mark == even_process_mark()) {
    look(own);
  }
  (void)even_error_restore(&kept);
}

static void *watch_groups(void *argument) {
  watcher *own = argument;
  while (atomic_load(&own->stop) == 0) {
    look(own);
    even_futex_wait(&own->stop, 0, EVEN_COMM_LOOK_NS);
  }
  return NULL;
}

void even_watcher_add(even_watch *watch) {
  const even_error kept = *even_error_last();
  watcher *own = watcher_of_process();
  if (own != NULL) {
    (void)pthread_mutex_lock(&own->life);
    (void)pthread_mutex_lock(&own->lock);
    watch->next = own->first;
    own->first = watch;
    (void)pthread_mutex_unlock(&own->lock);
    if (!own->runs) {
      atomic_store(&own->stop, 0);
      own->runs = even_thread_start(watch_groups, own, &own->thread) == EVEN_OK;
    }
    atomic_store(&watch->runs, own->runs);
    (void)pthread_mutex_unlock(&own->life);
  }
  (void)even_error_restore(&kept);
}

/* Whether it was there. */
static bool unlink_watch(watcher *own, const even_watch *watch) {
  even_watch **at = &own->first;
  while (*at != NULL && *at != watch) {
    at = &(*at)->next;
  }
  bool found = *at != NULL;
  if (found) {
    *at = watch->next;
  }
  return found;
}

void even_watcher_remove(even_watch *watch) {
  watcher *own = atomic_load(&here);
  if (own == NULL || own->process_mark != even_process_mark()) {
    return;
  }
  (void)pthread_mutex_lock(&own->life);
  (void)pthread_mutex_lock(&own->lock);
  bool last = unlink_watch(own, watch) && own->first == NULL;
  (void)pthread_mutex_unlock(&own->lock);
  if (last && own->runs) {
    atomic_store(&own->stop, 1u);
    even_futex_wake_all(&own->stop);
    even_thread_join(own->thread);
    own->runs = false;
  }
  (void)pthread_mutex_unlock(&own->life);
}
