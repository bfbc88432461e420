/* fork, and a loop over two descriptors: signals, of which the child's end is one, and what the child asks for. */
#include "os/supervisor.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/descriptors.h"

#include <errno.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>

/* So often it looks, should a signal have been missed. */
static const uint64_t LOOK_NS = 1000000000u;
enum { KEPT = 65536 }; /* of descriptors */

even_status even_supervisor_open(even_supervisor *out) {
  *out = (even_supervisor){.signals = {.fd = -1}, .child = -1};
  even_custody_open(&out->custody);
  EVEN_TRY(even_process_adopt_orphans());
  EVEN_TRY(even_signals_block()); /* before: they stay blocked in the child, which begins with none lost */
  return even_signals_open(&out->signals);
}

/* A parent that died between fork and prctl would never send the signal: look once more. */
static even_status begin_child(even_supervisor *supervisor, pid_t parent) {
  even_signals_leave(&supervisor->signals);
  even_signals_repeated_by(parent);
  if (even_os.prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) {
    return even_fail_errno(errno, "the end of process %ld cannot be heard of", (long)parent);
  }
  return even_os.getppid() == parent ? EVEN_OK : even_fail(EVEN_ERR_STATE, "process %ld has ended", (long)parent);
}

/* For what children have kept: as many as the hard limit allows. Where there is no more room, less is kept. */
static void make_room(even_supervisor *supervisor) {
  bool tight = false;
  if (even_descriptors_raise(0, KEPT, &supervisor->limit, &tight) != EVEN_OK) {
    even_error_clear();
  }
}

/* It has them blocked, and so loses none. */
static void tell_missed(even_supervisor *supervisor) {
  for (int number = 1; number < 64; number++) {
    if ((supervisor->missed >> number & 1u) != 0) {
      (void)even_process_signal(supervisor->child, number);
    }
  }
  supervisor->missed = 0;
}

even_status even_supervisor_start(even_supervisor *supervisor, bool *is_child) {
  pid_t parent = even_os.getpid();
  int childs = -1;
  *is_child = false;
  EVEN_TRY(even_custody_begin(&supervisor->custody, &childs));
  if (supervisor->limit != 0) {
    (void)even_descriptors_limit(supervisor->limit);
  }
  pid_t pid = even_os.fork();
  *is_child = pid == 0;
  if (pid == 0) {
    even_custody_join(&supervisor->custody, childs);
    return begin_child(supervisor, parent);
  }
  int error_number = errno;
  (void)even_os.close(childs);
  errno = error_number;
  if (pid < 0) {
    (void)even_fail_errno(errno, "a process could not be started");
    return even_error_fix("look at the limits on processes (ulimit -u, pids.max) and memory");
  }
  supervisor->child = pid;
  make_room(supervisor);
  tell_missed(supervisor);
  return EVEN_OK;
}

static void take(even_supervisor *supervisor, int number) {
  bool ends = number == SIGINT || number == SIGTERM || number == SIGHUP;
  if (ends && supervisor->asked == 0) {
    supervisor->asked = number;
  }
  if (number == SIGCHLD) {
    return;
  }
  if (supervisor->child >= 0) {
    (void)even_process_signal(supervisor->child, number); /* not reaped yet: the number is its own */
  } else {
    supervisor->missed |= (uint64_t)1 << number;
  }
}

/* One wait, and what came meanwhile. */
static even_status turn(even_supervisor *supervisor, uint64_t longest_ns) {
  struct pollfd watched[] = {{.fd = supervisor->signals.fd, .events = POLLIN},
                             {.fd = supervisor->child < 0 ? -1 : supervisor->custody.socket, .events = POLLIN}};
  uint64_t wait_ns = longest_ns < LOOK_NS ? longest_ns : LOOK_NS;
  if (even_os.poll(watched, 2, (int)((wait_ns + 999999u) / 1000000u)) < 0 && errno != EINTR) {
    return even_fail_errno(errno, "signals could not be waited for");
  }
  even_custody_hear(&supervisor->custody);
  for (int number = even_signals_next(&supervisor->signals); number != 0;
       number = even_signals_next(&supervisor->signals)) {
    take(supervisor, number);
  }
  return EVEN_OK;
}

even_status even_supervisor_wait(even_supervisor *supervisor, even_process_end *end) {
  for (;;) {
    bool any = true;
    while (any) {
      EVEN_TRY(even_process_reap(end, &any));
      bool its = any && end->pid == supervisor->child;
      if (its && !end->stopped && !end->continued) {
        supervisor->child = -1;
        even_custody_hear(&supervisor->custody);
        return EVEN_OK;
      }
      if (any && !its) {
        even_custody_tell(&supervisor->custody, end);
      }
    }
    EVEN_TRY(turn(supervisor, LOOK_NS));
  }
}

/* Whether there is none that lives; those that have ended are reaped. */
static bool has_no_children(void) {
  pid_t pid = 0;
  while ((pid = even_os.wait4(-1, NULL, WNOHANG, NULL)) > 0 || (pid < 0 && errno == EINTR)) {
  }
  return pid < 0 && errno == ECHILD;
}

even_status even_supervisor_clear(even_supervisor *supervisor, uint64_t limit_ns, bool *clear) {
  uint64_t until = even_clock_ns() + limit_ns;
  even_custody_release(&supervisor->custody);
  for (;;) {
    uint64_t now = even_clock_ns();
    *clear = has_no_children();
    if (*clear || now >= until) {
      supervisor->missed = 0; /* they were for those that are gone */
      return EVEN_OK;
    }
    EVEN_TRY(turn(supervisor, until - now));
  }
}

even_status even_supervisor_pause(even_supervisor *supervisor, uint64_t pause_ns) {
  uint64_t until = even_clock_ns() + pause_ns;
  for (uint64_t now = even_clock_ns(); now < until && supervisor->asked == 0; now = even_clock_ns()) {
    EVEN_TRY(turn(supervisor, until - now));
  }
  return EVEN_OK;
}

void even_supervisor_close(even_supervisor *supervisor) {
  even_signals_close(&supervisor->signals);
  even_custody_close(&supervisor->custody);
}
