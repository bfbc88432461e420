/* A handler that asks who sends. */
#include "os/end_signal.h"

#include "base/fail.h"
#include "os/calls.h"

#include <errno.h>
#include <signal.h>
#include <string.h>

/* The signal is blocked in here, and ends the process when this returns. */
static void end_for_parent(int number, siginfo_t *facts, void *context) {
  struct sigaction fallback;
  const int kept = errno;
  (void)context;
  if (facts->si_code > 0 || facts->si_code == SI_QUEUE || facts->si_pid == even_os.getppid() ||
      facts->si_pid == even_os.getpid()) {
    memset(&fallback, 0, sizeof fallback);
    fallback.sa_handler = SIG_DFL;
    (void)even_os.sigaction(number, &fallback, NULL);
    (void)raise(number);
  }
  errno = kept;
}

even_status even_end_signal_hold(bool always) {
  struct sigaction action;
  struct sigaction before;
  memset(&action, 0, sizeof action);
  memset(&before, 0, sizeof before);
  if (even_os.sigaction(SIGTERM, NULL, &before) != 0) {
    return even_fail_errno(errno, "what SIGTERM does cannot be told");
  }
  bool set = (before.sa_flags & SA_SIGINFO) != 0 || before.sa_handler != SIG_DFL;
  if (set && !always) {
    return EVEN_OK;
  }
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  action.sa_sigaction = end_for_parent;
  return even_os.sigaction(SIGTERM, &action, NULL) == 0
             ? EVEN_OK
             : even_fail_errno(errno, "SIGTERM of others than its parent cannot be held back");
}
