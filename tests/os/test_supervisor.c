/* The supervisor: passes signals on, each once, waits for what its child leaves behind, and takes its child along. */
#include "os/supervisor.h"

#include "base/fail.h"
#include "support/clock_ahead.h"
#include "support/fault.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static const uint64_t LONG_NS = 3600000000000u;

static int let_signals_come(void **state) {
  sigset_t none;
  (void)state;
  fault_reset();
  (void)sigemptyset(&none);
  return pthread_sigmask(SIG_SETMASK, &none, NULL);
}

/* ---- in the child ---- */

/* How many SIGINT there are before the next SIGUSR1, which the child has asked its parent to pass on. */
static int told_until_mark(even_signals *signals) {
  int told = 0;
  struct pollfd watched = {.fd = signals->fd, .events = POLLIN};
  (void)kill(getppid(), SIGUSR1);
  for (int number = 0; number != SIGUSR1; number = even_signals_next(signals)) {
    told += number == SIGINT;
    if (number == 0) {
      (void)poll(&watched, 1, 1000);
    }
  }
  return told;
}

static int told_now(even_signals *signals) {
  int told = 0;
  (void)kill(getpid(), SIGINT);
  for (int number = even_signals_next(signals); number != 0; number = even_signals_next(signals)) {
    told += number == SIGINT;
  }
  return told;
}

/* 0 where all was as it should be, else which was not. */
static int hear_each_once(void) {
  even_signals signals;
  if (even_signals_open(&signals) != EVEN_OK) {
    return 1;
  }
  if (told_now(&signals) != 1) { /* to both, this one first */
    return 2;
  }
  (void)kill(getppid(), SIGINT);
  if (told_until_mark(&signals) != 0) {
    return 3;
  }
  (void)kill(getppid(), SIGINT); /* to both, the parent first */
  if (told_until_mark(&signals) != 1) {
    return 4;
  }
  if (told_now(&signals) != 0) {
    return 5;
  }
  (void)kill(getppid(), SIGINT); /* to the parent alone */
  return told_until_mark(&signals) == 1 ? 0 : 6;
}

/* ---- the tests ---- */

static void each_signal_is_told_once(void **state) {
  (void)state;
  even_supervisor supervisor;
  even_process_end end;
  bool is_child = false;
  assert_int_equal(even_supervisor_open(&supervisor), EVEN_OK);
  even_status status = even_supervisor_start(&supervisor, &is_child);
  if (is_child) {
    _exit(status == EVEN_OK ? hear_each_once() : 99);
  }
  assert_int_equal(status, EVEN_OK);
  assert_int_equal(supervisor.asked, 0);
  assert_int_equal(even_supervisor_wait(&supervisor, &end), EVEN_OK);
  assert_int_equal(end.signal, 0);
  assert_int_equal(end.code, 0);
  assert_int_equal(supervisor.asked, SIGINT);
  assert_int_equal(supervisor.child, -1);
  even_supervisor_close(&supervisor);
}

/* Whichever of those that are passed on it is. */
static void any_signal_to_both_is_told_once(void **state) {
  static const int numbers[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};
  (void)state;
  even_signals signals;
  assert_int_equal(even_signals_open(&signals), EVEN_OK);
  even_signals_repeated_by(getpid());
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
    assert_int_equal(raise(numbers[i]), 0); /* the kernel tells it from kill's */
    assert_int_equal(even_signals_next(&signals), numbers[i]);
    assert_int_equal(kill(getpid(), numbers[i]), 0);
    assert_int_equal(even_signals_next(&signals), 0);
  }
  even_signals_repeated_by(0);
  even_signals_close(&signals);
}

/* One that only one process got takes none of the other's much later. */
static void what_came_one_way_alone_does_not_count_for_ever(void **state) {
  (void)state;
  even_signals signals;
  assert_int_equal(even_signals_open(&signals), EVEN_OK);
  even_signals_repeated_by(getpid());
  assert_int_equal(kill(getpid(), SIGUSR2), 0);
  assert_int_equal(even_signals_next(&signals), SIGUSR2);
  assert_int_equal(raise(SIGUSR2), 0);
  assert_int_equal(even_signals_next(&signals), 0); /* the same */
  assert_int_equal(kill(getpid(), SIGUSR2), 0);
  assert_int_equal(even_signals_next(&signals), SIGUSR2);
  clock_ahead_set(60000000000u);
  assert_int_equal(raise(SIGUSR2), 0);
  assert_int_equal(even_signals_next(&signals), SIGUSR2);
  even_os = even_os_real;
  even_signals_repeated_by(0);
  even_signals_close(&signals);
}

/* One with no repeater hears all, as ever. */
static void without_a_repeater_all_are_told(void **state) {
  (void)state;
  even_signals signals;
  even_signals_repeated_by(0);
  assert_int_equal(even_signals_open(&signals), EVEN_OK);
  for (int i = 0; i < 3; i++) {
    assert_int_equal(raise(SIGTERM), 0);
    assert_int_equal(even_signals_next(&signals), SIGTERM);
    assert_int_equal(even_signals_next(&signals), 0);
  }
  even_signals_close(&signals);
}

static void waits_for_what_a_killed_child_leaves(void **state) {
  (void)state;
  even_supervisor supervisor;
  even_process_end end;
  bool is_child = false;
  bool clear = true;
  char byte = 0;
  int ends[2];
  assert_int_equal(pipe(ends), 0);
  assert_int_equal(even_supervisor_open(&supervisor), EVEN_OK);
  even_status status = even_supervisor_start(&supervisor, &is_child);
  if (is_child) {
    if (status == EVEN_OK && fork() == 0) { /* in a session of its own, as ranks are */
      (void)setsid();
      (void)close(ends[1]);
      (void)!read(ends[0], &byte, 1);
      _exit(0);
    }
    (void)kill(getpid(), SIGKILL);
    _exit(99);
  }
  assert_int_equal(status, EVEN_OK);
  assert_int_equal(even_supervisor_wait(&supervisor, &end), EVEN_OK);
  assert_int_equal(end.signal, SIGKILL);
  assert_int_equal(even_supervisor_clear(&supervisor, 0, &clear), EVEN_OK);
  assert_false(clear);
  (void)close(ends[1]);
  assert_int_equal(even_supervisor_clear(&supervisor, LONG_NS, &clear), EVEN_OK);
  assert_true(clear);
  assert_int_equal(waitpid(-1, NULL, 0), -1);
  (void)close(ends[0]);
  even_supervisor_close(&supervisor);
}

static void its_child_goes_with_it(void **state) {
  (void)state;
  int ends[2];
  char byte = 0;
  assert_int_equal(pipe(ends), 0);
  pid_t parent = fork();
  if (parent == 0) {
    even_supervisor supervisor;
    even_process_end end;
    bool is_child = false;
    (void)close(ends[0]);
    if (even_supervisor_open(&supervisor) == EVEN_OK && even_supervisor_start(&supervisor, &is_child) == EVEN_OK) {
      if (is_child) {
        (void)!write(ends[1], "x", 1);
        (void)pause();
      }
      (void)close(ends[1]);
      (void)!even_supervisor_wait(&supervisor, &end);
    }
    _exit(0);
  }
  (void)close(ends[1]);
  assert_int_equal(read(ends[0], &byte, 1), 1);
  assert_int_equal(kill(parent, SIGKILL), 0);
  assert_int_equal(read(ends[0], &byte, 1), 0); /* nobody has the other end */
  assert_int_equal(waitpid(parent, NULL, 0), parent);
  (void)close(ends[0]);
}

static void a_pause_ends_when_it_is_asked_to(void **state) {
  (void)state;
  even_supervisor supervisor;
  assert_int_equal(even_supervisor_open(&supervisor), EVEN_OK);
  assert_int_equal(even_supervisor_pause(&supervisor, 1), EVEN_OK);
  assert_int_equal(supervisor.asked, 0);
  assert_int_equal(raise(SIGUSR1), 0); /* ends nothing */
  assert_int_equal(raise(SIGTERM), 0);
  assert_int_equal(even_supervisor_pause(&supervisor, LONG_NS), EVEN_OK);
  assert_int_equal(supervisor.asked, SIGTERM);
  even_supervisor_close(&supervisor);
}

/* It may keep more than its children may have open, who begin with the limit that it had. */
static void children_have_the_limit_that_there_was(void **state) {
  enum { FEW = 64, MANY = 100 };
  (void)state;
  struct rlimit before;
  struct rlimit few;
  even_supervisor supervisor;
  even_process_end end;
  bool is_child = false;
  assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
  few = (struct rlimit){.rlim_cur = FEW, .rlim_max = before.rlim_max};
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
  assert_int_equal(even_supervisor_open(&supervisor), EVEN_OK);
  for (int turn = 0; turn < 2; turn++) {
    even_status status = even_supervisor_start(&supervisor, &is_child);
    if (is_child) {
      struct rlimit own;
      bool same = status == EVEN_OK && getrlimit(RLIMIT_NOFILE, &own) == 0 && own.rlim_cur == FEW;
      for (int i = 0; same && turn == 0 && i < MANY; i++) {
        while (even_custody_keep(&supervisor.custody, 1, (uint32_t)i, 0) != EVEN_OK) { /* until its parent has read */
          (void)poll(NULL, 0, 1);
        }
      }
      for (int i = 0; same && turn == 1 && i < MANY; i++) {
        same = even_custody_claim(&supervisor.custody, 1, (uint32_t)i) >= 0;
      }
      _exit(same ? 0 : 1);
    }
    assert_int_equal(status, EVEN_OK);
    assert_int_equal(even_supervisor_wait(&supervisor, &end), EVEN_OK);
    assert_int_equal(end.code, 0);
    assert_false(supervisor.custody.broken);
  }
  even_supervisor_close(&supervisor);
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
}

static even_status start_and_wait(void *context) {
  even_supervisor supervisor;
  even_process_end end = {.pid = -1};
  bool is_child = false;
  bool clear = false;
  (void)context;
  EVEN_TRY(even_supervisor_open(&supervisor));
  even_status status = even_supervisor_start(&supervisor, &is_child);
  if (is_child) {
    _exit(status == EVEN_OK ? 0 : 7);
  }
  if (status == EVEN_OK) {
    status = even_supervisor_wait(&supervisor, &end);
  }
  if (status == EVEN_OK) {
    status = even_supervisor_clear(&supervisor, LONG_NS, &clear);
  }
  while (waitpid(-1, NULL, 0) > 0) {
  }
  even_supervisor_close(&supervisor);
  return status;
}

/* One that nobody was there for, in the next child. */
static int hears_what_was_missed(void) {
  even_signals signals;
  if (even_signals_open(&signals) != EVEN_OK) {
    return 1;
  }
  struct pollfd watched = {.fd = signals.fd, .events = POLLIN};
  bool came = poll(&watched, 1, 60000) == 1 && even_signals_next(&signals) == SIGUSR1;
  return came && even_signals_next(&signals) == 0 ? 0 : 2;
}

static void what_came_while_there_was_no_child_is_told_to_the_next(void **state) {
  even_supervisor supervisor;
  even_process_end end;
  bool is_child = false;
  (void)state;
  assert_int_equal(even_supervisor_open(&supervisor), EVEN_OK);
  for (int nth = 0; nth < 2; nth++) {
    even_status status = even_supervisor_start(&supervisor, &is_child);
    if (is_child) {
      _exit(status != EVEN_OK ? 3 : nth == 0 ? 0 : hears_what_was_missed());
    }
    assert_int_equal(status, EVEN_OK);
    assert_int_equal(even_supervisor_wait(&supervisor, &end), EVEN_OK);
    assert_int_equal(end.signal, 0);
    assert_int_equal(end.code, 0);
    assert_int_equal(kill(getpid(), SIGUSR1), 0);
    assert_int_equal(even_supervisor_pause(&supervisor, 1000000u), EVEN_OK);
    assert_int_equal(supervisor.missed, (uint64_t)1 << SIGUSR1);
  }
  bool clear = false;
  assert_int_equal(even_supervisor_clear(&supervisor, LONG_NS, &clear), EVEN_OK);
  assert_true(clear);
  assert_int_equal(supervisor.missed, 0); /* it was for those that are gone */
  even_supervisor_close(&supervisor);
}

static void survives_every_fault(void **state) {
  (void)state;
  even_supervisor supervisor;
  bool is_child = false;
  assert_int_equal(fault_each_allocation(start_and_wait, NULL), 0);
  assert_true(fault_each_os(start_and_wait, NULL, EAGAIN) >= 3);
  assert_int_equal(even_supervisor_open(&supervisor), EVEN_OK);
  fault_os(FAULT_fork, 1, EAGAIN);
  assert_int_equal(even_supervisor_start(&supervisor, &is_child), EVEN_ERR_SYSTEM);
  assert_false(is_child);
  assert_int_equal(supervisor.child, -1);
  fault_reset();
  fault_os(FAULT_poll, 1, EINTR); /* is none */
  assert_int_equal(even_supervisor_pause(&supervisor, 1000000), EVEN_OK);
  fault_reset();
  even_supervisor_close(&supervisor);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(each_signal_is_told_once, let_signals_come),
      cmocka_unit_test_teardown(any_signal_to_both_is_told_once, let_signals_come),
      cmocka_unit_test_teardown(what_came_one_way_alone_does_not_count_for_ever, let_signals_come),
      cmocka_unit_test_teardown(without_a_repeater_all_are_told, let_signals_come),
      cmocka_unit_test_teardown(waits_for_what_a_killed_child_leaves, let_signals_come),
      cmocka_unit_test_teardown(its_child_goes_with_it, let_signals_come),
      cmocka_unit_test_teardown(a_pause_ends_when_it_is_asked_to, let_signals_come),
      cmocka_unit_test_teardown(children_have_the_limit_that_there_was, let_signals_come),
      cmocka_unit_test_teardown(what_came_while_there_was_no_child_is_told_to_the_next, let_signals_come),
      cmocka_unit_test_teardown(survives_every_fault, let_signals_come),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
