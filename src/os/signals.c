/* signalfd. */
#include "os/signals.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/clock.h"

#include <errno.h>
#include <string.h>
#include <sys/signalfd.h>

/* A hang-up that the user had ignored (nohup) stays ignored: a blocked signal would come all the same. */
static sigset_t handled(void) {
  static const int numbers[] = {SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGCHLD};
  sigset_t set;
  struct sigaction hang_up;
  (void)sigemptyset(&set);
  memset(&hang_up, 0, sizeof hang_up);
  (void)even_os.sigaction(SIGHUP, NULL, &hang_up);
  if (hang_up.sa_handler != SIG_IGN) {
    (void)sigaddset(&set, SIGHUP);
  }
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
    (void)sigaddset(&set, numbers[i]);
  }
  return set;
}

static even_status block(sigset_t *before) {
  sigset_t set = handled();
  int error_number = even_os.mask_signals(SIG_BLOCK, &set, before);
  return error_number == 0 ? EVEN_OK : even_fail_errno(error_number, "signals could not be blocked");
}

even_status even_signals_block(void) {
  return block(NULL);
}

even_status even_signals_open(even_signals *out) {
  sigset_t set = handled();
  struct sigaction ignore;
  memset(out, 0, sizeof *out);
  out->fd = -1;
  EVEN_TRY(block(&out->before));
  out->fd = even_os.signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  if (out->fd < 0) {
    even_status status = even_fail_errno(errno, "signals could not be watched");
    (void)even_os.mask_signals(SIG_SETMASK, &out->before, NULL);
    return status;
  }
  memset(&ignore, 0, sizeof ignore);
  ignore.sa_handler = SIG_IGN;
  (void)even_os.sigaction(SIGPIPE, &ignore, &out->pipe_before);
  ignore.sa_handler = SIG_DFL; /* an ignored SIGCHLD would reap the children unseen */
  (void)even_os.sigaction(SIGCHLD, &ignore, &out->child_before);
  return EVEN_OK;
}

even_status even_signals_pipe_ignore(struct sigaction *before) {
  struct sigaction ignore;
  memset(&ignore, 0, sizeof ignore);
  ignore.sa_handler = SIG_IGN;
  if (even_os.sigaction(SIGPIPE, &ignore, before) != 0) {
    return even_fail_errno(errno, "SIGPIPE cannot be ignored");
  }
  return EVEN_OK;
}

void even_signals_pipe_restore(const struct sigaction *before) {
  (void)even_os.sigaction(SIGPIPE, before, NULL);
}

/* How often each way has told of a signal; what one tells that the other has told already is the same once more. One
 * that is much later is another one: what came one way alone (kill of one process) would take another's word for ever.
 */
typedef struct ways {
  int number;
  uint32_t directly;
  uint32_t repeated;
  uint64_t last_ns; /* when either did */
} ways;

static const uint64_t same_ns = 10000000000u; /* a repeater that has no processor may be late */

static pid_t repeats; /* who does; 0: nobody */
static ways counted[] = {
    {.number = SIGINT}, {.number = SIGTERM}, {.number = SIGHUP}, {.number = SIGUSR1}, {.number = SIGUSR2}};

void even_signals_repeated_by(pid_t repeater) {
  repeats = repeater;
  for (size_t i = 0; i < sizeof counted / sizeof counted[0]; i++) {
    counted[i].directly = counted[i].repeated = 0;
  }
}

static bool was_told(const struct signalfd_siginfo *facts) {
  for (size_t i = 0; repeats != 0 && i < sizeof counted / sizeof counted[0]; i++) {
    if (counted[i].number == (int)facts->ssi_signo) {
      uint64_t now = even_clock_ns();
      if (now - counted[i].last_ns > same_ns) {
        counted[i].directly = counted[i].repeated = 0;
      }
      counted[i].last_ns = now;
      bool its = facts->ssi_code == SI_USER && (pid_t)facts->ssi_pid == repeats;
      uint32_t *count = its ? &counted[i].repeated : &counted[i].directly;
      return ++*count <= (its ? counted[i].directly : counted[i].repeated);
    }
  }
  return false;
}

int even_signals_next(even_signals *signals) {
  struct signalfd_siginfo facts;
  ssize_t got = 0;
  do {
    got = even_os.read(signals->fd, &facts, sizeof facts);
  } while ((got < 0 && errno == EINTR) || (got == (ssize_t)sizeof facts && was_told(&facts)));
  return got == (ssize_t)sizeof facts ? (int)facts.ssi_signo : 0;
}

/* The first of them that is; they end with 0. */
static int pending_of(const int *numbers) {
  sigset_t pending;
  if (even_os.pending_signals(&pending) != 0) {
    return 0;
  }
  while (*numbers != 0 && sigismember(&pending, *numbers) != 1) {
    numbers++;
  }
  return *numbers;
}

int even_signals_end_pending(void) {
  static const int ends[] = {SIGINT, SIGTERM, SIGHUP, 0};
  return pending_of(ends);
}

int even_signals_notice_pending(void) {
  static const int notices[] = {SIGTERM, SIGUSR1, 0};
  return pending_of(notices);
}

void even_signals_leave(even_signals *signals) {
  if (signals->fd >= 0) {
    (void)even_os.close(signals->fd);
    (void)even_os.sigaction(SIGPIPE, &signals->pipe_before, NULL);
    (void)even_os.sigaction(SIGCHLD, &signals->child_before, NULL);
    signals->fd = -1;
  }
}

void even_signals_close(even_signals *signals) {
  if (signals->fd < 0) {
    return;
  }
  while (even_signals_next(signals) != 0) {
  }
  even_signals_leave(signals);
  (void)even_os.mask_signals(SIG_SETMASK, &signals->before, NULL);
}

const char *even_signal_name(int signal) {
  switch (signal) {
#define SIGNAL_NAME(name) \
  case name:              \
    return #name;
    SIGNAL_NAME(SIGHUP)
    SIGNAL_NAME(SIGINT)
    SIGNAL_NAME(SIGQUIT)
    SIGNAL_NAME(SIGILL)
    SIGNAL_NAME(SIGTRAP)
    SIGNAL_NAME(SIGABRT)
    SIGNAL_NAME(SIGBUS)
    SIGNAL_NAME(SIGFPE)
    SIGNAL_NAME(SIGKILL)
    SIGNAL_NAME(SIGUSR1)
    SIGNAL_NAME(SIGSEGV)
    SIGNAL_NAME(SIGUSR2)
    SIGNAL_NAME(SIGPIPE)
    SIGNAL_NAME(SIGALRM)
    SIGNAL_NAME(SIGTERM)
    SIGNAL_NAME(SIGSTOP)
    SIGNAL_NAME(SIGTSTP)
    SIGNAL_NAME(SIGTTIN)
    SIGNAL_NAME(SIGTTOU)
    SIGNAL_NAME(SIGXCPU)
    SIGNAL_NAME(SIGXFSZ)
    SIGNAL_NAME(SIGSYS)
#undef SIGNAL_NAME
    default:
      return "";
  }
}
