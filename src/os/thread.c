/* pthreads with signals blocked. */
#include "os/thread.h"

#include "base/fail.h"
#include "os/calls.h"

#include <stdatomic.h>

void even_thread_signals_block(sigset_t *before) {
  sigset_t all;
  (void)sigfillset(&all);
  (void)even_os.mask_signals(SIG_SETMASK, &all, before);
}

void even_thread_signals_restore(const sigset_t *before) {
  (void)even_os.mask_signals(SIG_SETMASK, before, NULL);
}

even_status even_thread_start(void *(*body)(void *), void *argument, pthread_t *out) {
  sigset_t before;
  even_thread_signals_block(&before);
  int failed = even_os.thread_create(out, NULL, body, argument);
  even_thread_signals_restore(&before);
  if (failed != 0) {
    (void)even_fail_errno(failed, "a thread could not be started");
    return even_error_fix("raise the limit of processes (ulimit -u) or end some");
  }
  return EVEN_OK;
}

pid_t even_own_process(void) {
  return even_os.getpid();
}

static _Atomic uint32_t process_mark = 1;
static pthread_once_t watched = PTHREAD_ONCE_INIT;

static void mark_child(void) {
  (void)atomic_fetch_add_explicit(&process_mark, 1u, memory_order_relaxed);
}

static void watch_forks(void) {
  (void)pthread_atfork(NULL, NULL, mark_child); /* fails without memory alone: forks are not noticed then */
}

uint32_t even_process_mark(void) {
  (void)pthread_once(&watched, watch_forks);
  return atomic_load_explicit(&process_mark, memory_order_relaxed);
}

bool even_process_fork_calls(void (*call)(void)) {
  return pthread_atfork(NULL, NULL, call) == 0;
}

void even_thread_join(pthread_t thread) {
  (void)pthread_join(thread, NULL);
}
