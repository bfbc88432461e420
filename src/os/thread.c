/* pthreads with signals blocked. */
#include "os/thread.h"

#include "base/fail.h"
#include "os/calls.h"

#include <signal.h>

even_status even_thread_start(void *(*body)(void *), void *argument, pthread_t *out) {
  sigset_t all;
  sigset_t before;
  (void)sigfillset(&all);
  (void)pthread_sigmask(SIG_SETMASK, &all, &before);
  int failed = even_os.thread_create(out, NULL, body, argument);
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (failed != 0) {
    (void)even_fail_errno(failed, "a thread could not be started");
    return even_error_fix("raise the limit of processes (ulimit -u) or end some");
  }
  return EVEN_OK;
}

void even_thread_join(pthread_t thread) {
  (void)pthread_join(thread, NULL);
}
