/* The guardian and the sweep: marked processes end, others do not; a killed parent is avenged. */
#include "os/guardian.h"

#include "base/fail.h"
#include "os/clock.h"
#include "os/custody.h"
#include "os/process_stat.h"
#include "os/random.h"
#include "os/sweep.h"
#include "support/clock_ahead.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static char mark[EVEN_SWEEP_MARK];

static int make_mark(void **state) {
  char digits[17];
  (void)state;
  if (even_random_hex(digits, 16) != EVEN_OK) {
    return -1;
  }
  (void)snprintf(mark, sizeof mark, "EVENSTEP_JOB=%s", digits);
  return 0;
}

/* A sleeper with one more line in its environment behind `padding` bytes of others; ready when it returns. */
static pid_t start_sleeper(const char *line, size_t padding, bool own_session) {
  int ends[2];
  char byte = 0;
  assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
  char *stuffing = malloc(padding + 16);
  assert_non_null(stuffing);
  (void)sprintf(stuffing, "STUFFING=");
  memset(stuffing + 9, 'x', padding);
  stuffing[9 + padding] = '\0';
  pid_t pid = fork();
  if (pid == 0) {
    char *const words[] = {(char *)"sleep", (char *)"600", NULL};
    char *const lines[] = {(char *)"PATH=/usr/bin:/bin", stuffing, (char *)(uintptr_t)line, NULL};
    if (own_session) {
      (void)setsid();
    }
    (void)execvpe("sleep", words, lines);
    _exit(1);
  }
  free(stuffing);
  (void)close(ends[1]);
  assert_int_equal(read(ends[0], &byte, 1), 0); /* closed by exec */
  (void)close(ends[0]);
  return pid;
}

static bool is_alive(pid_t pid) {
  return waitpid(pid, NULL, WNOHANG) == 0;
}

static void end(pid_t pid) {
  (void)kill(pid, SIGKILL);
  (void)waitpid(pid, NULL, 0);
}

static void sweeps_the_marked_alone(void **state) {
  (void)state;
  char longer[EVEN_SWEEP_MARK + 8];
  char other[EVEN_SWEEP_MARK + 8];
  (void)snprintf(longer, sizeof longer, "%s0", mark);  /* another job whose name begins like ours */
  (void)snprintf(other, sizeof other, "NOT_%s", mark); /* ends like ours */
  pid_t marked = start_sleeper(mark, 10, false);
  pid_t far = start_sleeper(mark, 8192 - 40, true); /* the mark lies across the end of the first piece read */
  pid_t begins = start_sleeper(longer, 10, false);
  pid_t ends = start_sleeper(other, 10, false);
  pid_t session = start_sleeper("A=b", 10, true);
  even_sweep sweep = {.sessions = &session, .session_count = 1};
  memcpy(sweep.mark, mark, sizeof mark);
  assert_int_equal(even_sweep_kill(&sweep, 5000), 0);
  assert_int_equal(waitpid(marked, NULL, 0), marked);
  assert_int_equal(waitpid(far, NULL, 0), far);
  assert_int_equal(waitpid(session, NULL, 0), session);
  assert_true(is_alive(begins));
  sweep.begins = true;
  assert_int_equal(even_sweep_kill(&sweep, 5000), 0);
  assert_int_equal(waitpid(begins, NULL, 0), begins);
  assert_true(is_alive(ends));
  end(ends);
}

/* Every place of the mark against the edges of the pieces in which the environment is read. */
static void finds_the_mark_wherever_it_lies(void **state) {
  (void)state;
  for (size_t padding = 8192 - 80; padding < 8192 + 10; padding += 3) {
    pid_t pid = start_sleeper(mark, padding, false);
    even_sweep sweep = {.session_count = 0};
    memcpy(sweep.mark, mark, sizeof mark);
    assert_int_equal(even_sweep_kill(&sweep, 5000), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
  }
}

static int sleeps;

static int never_sleeps(const struct timespec *time) {
  (void)time;
  sleeps++;
  return 0;
}

static int open_descriptors(void) {
  int count = 0;
  for (int fd = 0; fd < 256; fd++) {
    count += fcntl(fd, F_GETFD) >= 0;
  }
  return count;
}

/* The ends of those killed are waited for, not slept away; and where nothing tells of them, all end all the same. */
static void waits_for_ends_not_for_time(void **state) {
  (void)state;
  int before = open_descriptors();
  even_sweep sweep = {.session_count = 0};
  memcpy(sweep.mark, mark, sizeof mark);
  for (int old_kernel = 0; old_kernel <= 1; old_kernel++) {
    pid_t pids[3];
    for (int i = 0; i < 3; i++) {
      pids[i] = start_sleeper(mark, 10, i == 1);
    }
    sleeps = 0;
    even_os.nanosleep = never_sleeps;
    if (old_kernel) {
      fault_os_from(FAULT_pidfd_open, 1, ENOSYS);
    }
    assert_int_equal(even_sweep_kill(&sweep, 5000), 0);
    assert_true(old_kernel ? sleeps > 0 : sleeps == 0);
    fault_reset();
    for (int i = 0; i < 3; i++) {
      assert_int_equal(waitpid(pids[i], NULL, 0), pids[i]);
    }
  }
  fault_os_from(FAULT_poll, 1, ENOMEM);
  pid_t pid = start_sleeper(mark, 10, false);
  assert_int_equal(even_sweep_kill(&sweep, 5000), 0);
  fault_reset();
  assert_int_equal(waitpid(pid, NULL, 0), pid);
  assert_int_equal(open_descriptors(), before);
}

static int kills;

static int counted_kill(pid_t pid, int signal) {
  kills++;
  return even_os_real.kill(pid, signal);
}

static int gone(int pidfd, int signal) {
  (void)pidfd;
  (void)signal;
  errno = ESRCH;
  return -1;
}

/* A number is no process: where the process that was looked at is gone, or no descriptor is free, nobody is hit. */
static void kills_by_number_on_old_kernels_only(void **state) {
  (void)state;
  even_sweep sweep = {.session_count = 0};
  memcpy(sweep.mark, mark, sizeof mark);
  pid_t pid = start_sleeper(mark, 10, false);
  even_os.kill = counted_kill;
  even_os.pidfd_send_signal = gone;
  assert_int_not_equal(even_sweep_kill(&sweep, 0), 0);
  even_os.pidfd_send_signal = even_os_real.pidfd_send_signal;
  fault_os_from(FAULT_pidfd_open, 1, EMFILE);
  assert_int_not_equal(even_sweep_kill(&sweep, 0), 0);
  assert_int_equal(kills, 0);
  fault_reset();
  assert_int_equal(even_sweep_kill(&sweep, 5000), 0);
  assert_int_equal(waitpid(pid, NULL, 0), pid);
}

static void says_when_proc_cannot_be_read(void **state) {
  (void)state;
  even_sweep sweep = {.session_count = 0};
  memcpy(sweep.mark, mark, sizeof mark);
  fault_os(FAULT_open, 1, EACCES);
  assert_int_not_equal(even_sweep_kill(&sweep, 0), 0);
  fault_reset();
}

static void works_when_told_to_stop(void **state) {
  (void)state;
  even_guardian guardian;
  char folder[] = "/tmp/evenstep-guardian-XXXXXX";
  assert_non_null(mkdtemp(folder));
  pid_t marked = start_sleeper(mark, 10, false);
  pid_t session = start_sleeper("A=b", 10, true);
  pid_t dropped = start_sleeper("A=b", 10, true);
  assert_int_equal(even_guardian_start(mark, &guardian), EVEN_OK);
  assert_int_equal(even_guardian_add_session(&guardian, session), EVEN_OK);
  assert_int_equal(even_guardian_add_session(&guardian, dropped), EVEN_OK);
  assert_int_equal(even_guardian_add_session(&guardian, dropped), EVEN_OK); /* once all the same */
  assert_int_equal(even_guardian_drop_session(&guardian, dropped), EVEN_OK);
  assert_int_equal(even_guardian_add_cgroup(&guardian, folder), EVEN_OK);
  assert_int_equal(kill(guardian.pid, SIGTERM), 0); /* what ends others does not end it */
  assert_int_equal(kill(guardian.pid, SIGINT), 0);
  even_guardian_stop(&guardian);
  assert_int_equal(waitpid(marked, NULL, 0), marked);
  assert_int_equal(waitpid(session, NULL, 0), session);
  assert_true(is_alive(dropped));
  assert_int_equal(access(folder, F_OK), -1);
  end(dropped);
  even_guardian_stop(&guardian); /* again: fine */
}

/* The parent is killed as it stands; the test holds the write end's twin to see when the guardian has ended. */
static void outlives_a_killed_parent(void **state) {
  (void)state;
  int ends[2];
  char byte = 0;
  pid_t marked = start_sleeper(mark, 10, true);
  assert_int_equal(pipe(ends), 0);
  pid_t parent = fork();
  if (parent == 0) {
    even_guardian guardian;
    (void)close(ends[0]);
    (void)dup2(ends[1], 2); /* a standard descriptor: the guardian keeps it until it ends */
    if (even_guardian_start(mark, &guardian) == EVEN_OK) {
      (void)!write(ends[1], "x", 1);
    }
    (void)pause();
    _exit(0);
  }
  (void)close(ends[1]);
  assert_int_equal(read(ends[0], &byte, 1), 1);
  assert_int_equal(kill(parent, SIGKILL), 0);
  assert_int_equal(read(ends[0], &byte, 1), 0);
  assert_int_equal(waitpid(marked, NULL, 0), marked);
  assert_int_equal(waitpid(parent, NULL, 0), parent);
  (void)close(ends[0]);
}

static even_status start_and_stop(void *context) {
  even_guardian guardian;
  (void)context;
  even_status status = even_guardian_start(mark, &guardian);
  if (status == EVEN_OK) {
    status = even_guardian_add_session(&guardian, 99999999);
  }
  even_guardian_stop(&guardian);
  return status;
}

static void survives_every_fault(void **state) {
  (void)state;
  even_guardian guardian;
  assert_int_equal(fault_each_allocation(start_and_stop, NULL), 2);
  assert_true(fault_each_os(start_and_stop, NULL, EAGAIN) >= 3);
  fault_os_from(FAULT_close_range, 1, ENOSYS); /* an older kernel: it must close what it holds one by one */
  assert_int_equal(start_and_stop(NULL), EVEN_OK);
  fault_reset();
  assert_int_equal(even_guardian_start("nothing", &guardian), EVEN_ERR_ARGUMENT);
}

/* Its parent lives, and says nothing. */
static void kills_when_a_limit_is_over(void **state) {
  even_guardian guardian;
  (void)state;
  assert_int_equal(even_guardian_start(mark, &guardian), EVEN_OK);
  for (int round = 0; round < 2; round++) { /* it goes on watching */
    pid_t session = start_sleeper("A=b", 10, true);
    assert_int_equal(even_guardian_add_session(&guardian, session), EVEN_OK);
    assert_int_equal(even_guardian_limit(&guardian, even_clock_boot_ns() + 3600000000000u, UINT64_MAX), EVEN_OK);
    assert_int_equal(even_guardian_limit(&guardian, 0, 0), EVEN_OK);
    assert_true(is_alive(session));
    uint64_t until = even_clock_boot_ns() + 50000000u;
    assert_int_equal(even_guardian_limit(&guardian, until, until), EVEN_OK);
    assert_int_equal(waitpid(session, NULL, 0), session);
    assert_int_equal(even_guardian_drop_session(&guardian, session), EVEN_OK);
  }
  even_guardian_stop(&guardian);
}

static void await_state(pid_t session, bool stands) {
  even_process_stat stat = {.state = '?'};
  uint64_t until = even_clock_ns() + 120000000000u;
  do {
    assert_true(even_clock_ns() < until);
    even_clock_sleep_ns(5000000);
    assert_int_equal(even_process_stat_read(session, &stat), 0);
  } while ((stat.state == 'T') != stands);
}

static void await_held(const even_guardian *guardian, bool holds, uint64_t *held_ns) {
  uint64_t until = even_clock_ns() + 120000000000u;
  while (even_guardian_holds(guardian, held_ns) != holds) {
    assert_true(even_clock_ns() < until);
    even_clock_sleep_ns(5000000);
  }
}

/* Its parent stands still for a while: nothing is lost. */
static void holds_until_there_is_a_later_limit(void **state) {
  even_guardian guardian;
  uint64_t held[2] = {0, 0};
  (void)state;
  assert_int_equal(even_guardian_start(mark, &guardian), EVEN_OK);
  pid_t session = start_sleeper("A=b", 10, true);
  assert_int_equal(even_guardian_add_session(&guardian, session), EVEN_OK);
  assert_false(even_guardian_holds(&guardian, &held[0]));
  assert_int_equal(held[0], 0);
  for (int round = 0; round < 2; round++) {
    assert_int_equal(even_guardian_limit(&guardian, even_clock_boot_ns(), UINT64_MAX), EVEN_OK);
    await_state(session, true);
    await_held(&guardian, true, &held[0]);
    assert_int_equal(kill(session, SIGCONT), 0); /* somebody lets it go: it is held again */
    await_state(session, true);
    pid_t late = start_sleeper(mark, 10, false); /* as are those that have begun since */
    await_state(late, true);
    end(late);
    uint64_t later = round == 0 ? even_clock_boot_ns() + 3600000000000u : 0;
    assert_int_equal(even_guardian_limit(&guardian, later, later), EVEN_OK);
    await_state(session, false);
    await_held(&guardian, false, &held[1]);
    assert_true(held[1] > held[0]);
    assert_true(is_alive(session));
  }
  uint64_t past = even_clock_boot_ns();
  assert_int_equal(even_guardian_limit(&guardian, past, UINT64_MAX), EVEN_OK);
  await_state(session, true);
  assert_int_equal(even_guardian_limit(&guardian, past, past), EVEN_OK); /* held for too long */
  assert_int_equal(waitpid(session, NULL, 0), session);
  even_guardian_stop(&guardian);
}

/* Its parent cannot have told it anything meanwhile: another leader may be there by now. */
static void a_limit_is_over_when_the_machine_has_slept(void **state) {
  const uint64_t hour_ns = 3600000000000u;
  even_guardian guardian;
  uint64_t held = 0;
  (void)state;
  assert_true(clock_slept_begin());
  assert_int_equal(even_guardian_start(mark, &guardian), EVEN_OK);
  pid_t session = start_sleeper("A=b", 10, true);
  assert_int_equal(even_guardian_add_session(&guardian, session), EVEN_OK);
  assert_int_equal(even_guardian_limit(&guardian, even_clock_boot_ns() + hour_ns, UINT64_MAX), EVEN_OK);
  clock_slept_add(2 * hour_ns);
  await_state(session, true);
  await_held(&guardian, true, &held);
  assert_int_equal(even_guardian_limit(&guardian, even_clock_boot_ns() + hour_ns, UINT64_MAX), EVEN_OK);
  await_state(session, false);
  even_guardian_stop(&guardian);
  assert_int_equal(waitpid(session, NULL, 0), session);
  clock_slept_end();
}

/* It is killed while it holds them: the one that takes its place holds them on, and lets them go. */
static void another_one_goes_on_with_what_it_held(void **state) {
  even_process_stat stat = {.state = '?'};
  even_guardian first;
  even_guardian next;
  uint64_t held[2] = {0, 0};
  (void)state;
  assert_int_equal(even_guardian_start(mark, &first), EVEN_OK);
  pid_t session = start_sleeper("A=b", 10, true);
  assert_int_equal(even_guardian_add_session(&first, session), EVEN_OK);
  assert_int_equal(even_guardian_limit(&first, even_clock_boot_ns(), UINT64_MAX), EVEN_OK);
  await_state(session, true);
  await_held(&first, true, &held[0]);
  assert_int_equal(kill(first.pid, SIGKILL), 0);
  assert_int_equal(even_guardian_start(mark, &next), EVEN_OK);
  assert_int_equal(even_guardian_add_session(&next, session), EVEN_OK);
  assert_int_equal(even_guardian_inherit(&next, &first), EVEN_OK);
  even_guardian_stop(&first);
  assert_true(even_guardian_holds(&next, &held[1]));
  assert_true(held[1] >= held[0]); /* it may have looked before it was told that they are held */
  assert_int_equal(even_process_stat_read(session, &stat), 0);
  assert_int_equal(stat.state, 'T');
  assert_int_equal(even_guardian_limit(&next, even_clock_boot_ns() + 3600000000000u, UINT64_MAX), EVEN_OK);
  await_state(session, false);
  await_held(&next, false, &held[1]);
  even_guardian_stop(&next);
  assert_int_equal(waitpid(session, NULL, 0), session);
}

/* Whoever started it is killed, and somebody else has kept its pipe: it goes on, and works when that one says so,
 * though the pipe is held by others still. */
static void is_taken_over(void **state) {
  (void)state;
  even_custody custody;
  even_guardian guardian;
  int childs = -1;
  int ends[2];
  pid_t number = 0;
  pid_t session = start_sleeper("A=b", 10, true);
  pid_t later = start_sleeper("A=b", 10, true);
  assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
  even_custody_open(&custody);
  assert_int_equal(even_custody_begin(&custody, &childs), EVEN_OK);
  pid_t parent = fork();
  if (parent == 0) {
    even_custody_join(&custody, childs);
    if (even_guardian_start(mark, &guardian) == EVEN_OK && even_guardian_add_session(&guardian, session) == EVEN_OK &&
        even_guardian_limit(&guardian, UINT64_MAX, UINT64_MAX) == EVEN_OK &&
        even_custody_keep(&custody, 1, 0, guardian.pipe) == EVEN_OK &&
        even_custody_keep(&custody, 2, 0, guardian.page_fd) == EVEN_OK) {
      (void)!write(ends[1], &guardian.pid, sizeof guardian.pid);
    }
    (void)raise(SIGKILL);
    _exit(1);
  }
  (void)close(childs);
  assert_int_equal(read(ends[0], &number, sizeof number), sizeof number);
  assert_int_equal(waitpid(parent, NULL, 0), parent);
  even_custody_hear(&custody);
  int pipe = even_custody_claim(&custody, 1, 0);
  assert_true(pipe >= 0);
  int held = dup(pipe);
  assert_int_equal(even_guardian_take(number, pipe, even_custody_claim(&custody, 2, 0), &guardian), EVEN_OK);
  assert_int_equal(even_guardian_add_session(&guardian, later), EVEN_OK);
  assert_true(is_alive(session));
  uint64_t since = 0;
  assert_int_equal(even_guardian_limit(&guardian, 1, UINT64_MAX), EVEN_OK); /* it hears of another limit, too */
  while (!even_guardian_holds(&guardian, &since)) {
    even_clock_sleep_ns(1000000);
  }
  assert_int_equal(even_guardian_limit(&guardian, UINT64_MAX, UINT64_MAX), EVEN_OK);
  while (even_guardian_holds(&guardian, &since)) {
    even_clock_sleep_ns(1000000);
  }
  even_guardian_stop(&guardian);
  even_process_stat stat;
  assert_true(even_process_stat_read(number, &stat) != 0 || even_process_stat_ended(&stat));
  assert_int_equal(waitpid(session, NULL, 0), session);
  assert_int_equal(waitpid(later, NULL, 0), later);
  (void)close(held);
  (void)close(ends[0]);
  (void)close(ends[1]);
  even_custody_close(&custody);
}

static int no_word_goes_on(pid_t pid, int signal) {
  if (signal == SIGKILL) { /* its end is waited for in earnest */
    even_os.nanosleep = even_os_real.nanosleep;
  }
  return signal == SIGCONT ? 0 : even_os_real.kill(pid, signal);
}

static int polls_at_once(struct pollfd *descriptors, nfds_t count, int timeout_ms) {
  (void)timeout_ms;
  return even_os_real.poll(descriptors, count, 0);
}

static int sleeps_a_second(const struct timespec *time) {
  (void)time;
  clock_ahead_add(1000000000u);
  return 0;
}

/* Somebody has stopped it: it goes on, and does all that it was told. */
static void one_that_was_stopped_goes_on(void **state) {
  even_guardian guardian;
  (void)state;
  pid_t session = start_sleeper("A=b", 10, true);
  (void)alarm(120); /* it is waited for without end otherwise */
  for (int often = 0; often < 2; often++) {
    assert_int_equal(even_guardian_start(mark, &guardian), EVEN_OK);
    assert_int_equal(kill(guardian.pid, SIGSTOP), 0);
    for (int i = 0; often == 1 && i < 1000; i++) { /* more than its pipe has room for */
      assert_int_equal(even_guardian_drop_session(&guardian, session), EVEN_OK);
    }
    assert_int_equal(even_guardian_add_session(&guardian, session), EVEN_OK);
    assert_int_equal(kill(guardian.pid, SIGSTOP), 0);
    even_guardian_stop(&guardian);
    assert_int_equal(waitpid(session, NULL, 0), session);
    session = start_sleeper("A=b", 10, true);
  }
  (void)alarm(0);
  end(session);
}

/* And where it does not go on, it is killed: whoever tells it is told that it is gone. */
static void one_that_does_not_go_on_is_given_up(void **state) {
  even_guardian guardian;
  (void)state;
  (void)alarm(120);
  even_os.kill = no_word_goes_on;
  even_os.poll = polls_at_once;
  assert_int_equal(even_guardian_start(mark, &guardian), EVEN_OK);
  assert_int_equal(kill(guardian.pid, SIGSTOP), 0);
  int told = 0;
  while (told < 1000 && even_guardian_add_session(&guardian, 99999999) == EVEN_OK) {
    told++;
  }
  assert_in_range(told, 1, 999);
  assert_int_equal(even_error_last()->system_error, EPIPE);
  even_guardian_stop(&guardian);
  assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
  assert_int_equal(even_guardian_start(mark, &guardian), EVEN_OK);
  assert_int_equal(kill(guardian.pid, SIGSTOP), 0);
  fault_os_from(FAULT_pidfd_open, 1, ENOSYS);
  even_os.nanosleep = sleeps_a_second;
  even_guardian_stop(&guardian);
  assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
  fault_reset();
  (void)alarm(0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup(sweeps_the_marked_alone, make_mark),
      cmocka_unit_test_setup(finds_the_mark_wherever_it_lies, make_mark),
      cmocka_unit_test_setup(waits_for_ends_not_for_time, make_mark),
      cmocka_unit_test_setup(kills_by_number_on_old_kernels_only, make_mark),
      cmocka_unit_test_setup(says_when_proc_cannot_be_read, make_mark),
      cmocka_unit_test_setup(works_when_told_to_stop, make_mark),
      cmocka_unit_test_setup(outlives_a_killed_parent, make_mark),
      cmocka_unit_test_setup(kills_when_a_limit_is_over, make_mark),
      cmocka_unit_test_setup(holds_until_there_is_a_later_limit, make_mark),
      cmocka_unit_test_setup(a_limit_is_over_when_the_machine_has_slept, make_mark),
      cmocka_unit_test_setup(another_one_goes_on_with_what_it_held, make_mark),
      cmocka_unit_test_setup(is_taken_over, make_mark),
      cmocka_unit_test_setup(one_that_was_stopped_goes_on, make_mark),
      cmocka_unit_test_setup(one_that_does_not_go_on_is_given_up, make_mark),
      cmocka_unit_test_setup(survives_every_fault, make_mark),
  };
  (void)signal(SIGPIPE, SIG_IGN);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
