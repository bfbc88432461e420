/* What /proc/PID/stat says: of a text, of this process, of one that has ended, of none. */
#include "os/process_stat.h"

#include "os/calls.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static int tear_down(void **state) {
  (void)state;
  fault_reset();
  return 0;
}

static long sysconf_of_the_test(int name) {
  return name == _SC_CLK_TCK ? 100 : 4096;
}

static void a_line_is_read_behind_the_name(void **state) {
  even_process_stat stat;
  (void)state;
  even_os.sysconf = sysconf_of_the_test;
  assert_true(
      even_process_stat_parse("4711 (py) (thon 3) S 1 4710 4709 0 -1 4194560 100 20 7 0 250 50 30 20 20 0 3 0 "
                              "12345 100000000 2048 18446744073709551615 1 2 3 4 5 6 7 8 9 10 11 12 17 5 0 0",
                              &stat));
  assert_int_equal(stat.pid, 4711);
  assert_int_equal(stat.state, 'S');
  assert_int_equal(stat.group, 4710);
  assert_int_equal(stat.session, 4709);
  assert_int_equal(stat.terminal, 0);
  assert_int_equal(stat.start_time, 12345);
  assert_float_equal(stat.cpu_seconds, 3.5, 1e-9);
  assert_float_equal(stat.rss_bytes, 2048.0 * 4096, 0);
  assert_float_equal(stat.minor_faults, 120, 0);
  assert_float_equal(stat.major_faults, 7, 0);
  assert_int_equal(stat.threads, 3);
  assert_int_equal(stat.cpu, 5);
}

static void what_is_no_such_line_is_refused(void **state) {
  even_process_stat stat;
  (void)state;
  assert_false(even_process_stat_parse("4711 (python) S 1", &stat));
  assert_false(even_process_stat_parse("4711 python S 1 2 3", &stat));
  assert_false(even_process_stat_parse("(python) S 1 4710 4709 0 -1 0 1 0 0 0 1 1 1 1 20 0 3 0 5 6 7", &stat));
  assert_false(even_process_stat_parse("", &stat));
}

static void this_process_is_itself(void **state) {
  even_process_stat own;
  even_process_stat same;
  (void)state;
  assert_int_equal(even_process_stat_read(0, &own), 0);
  assert_int_equal(even_process_stat_read(getpid(), &same), 0);
  assert_int_equal(own.pid, getpid());
  assert_int_equal(own.session, getsid(0));
  assert_int_equal(own.state, 'R');
  assert_true(own.rss_bytes > 0);
  assert_true(own.start_time > 0);
  assert_int_equal(own.start_time, same.start_time);
}

/* In a session of its own: whether what a shell with job control, or none, starts there is taken for typed. */
static bool is_typed(bool with_terminal, bool job_of_its_own) {
  int status = 0;
  pid_t shell = fork();
  if (shell == 0) {
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    if (setsid() < 0 || master < 0 || grantpt(master) != 0 || unlockpt(master) != 0) {
      _exit(2);
    }
    int terminal = open(ptsname(master), O_RDWR | O_NOCTTY);
    if (terminal < 0 || (with_terminal && ioctl(terminal, TIOCSCTTY, 0) != 0)) {
      _exit(2);
    }
    pid_t job = fork();
    if (job == 0) {
      _exit(job_of_its_own && setpgid(0, 0) != 0 ? 2 : even_process_is_typed());
    }
    _exit(waitpid(job, &status, 0) == job && WIFEXITED(status) ? WEXITSTATUS(status) : 2);
  }
  assert_int_equal(waitpid(shell, &status, 0), shell);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) < 2);
  return WEXITSTATUS(status) == 1;
}

static void what_a_shell_of_a_terminal_starts_is_typed(void **state) {
  (void)state;
  assert_true(is_typed(true, true));
  assert_false(is_typed(true, false)); /* what the session began with, or a script of it */
  assert_false(is_typed(false, true));
  assert_false(is_typed(false, false));
}

static void one_that_has_ended_is_a_zombie_and_then_nobody(void **state) {
  even_process_stat stat;
  siginfo_t end;
  (void)state;
  pid_t child = fork();
  if (child == 0) {
    _exit(0);
  }
  assert_int_equal(waitid(P_PID, (id_t)child, &end, WEXITED | WNOWAIT), 0);
  assert_int_equal(even_process_stat_read(child, &stat), 0);
  assert_int_equal(stat.state, 'Z');
  assert_float_equal(stat.rss_bytes, 0, 0);
  assert_int_equal(waitpid(child, NULL, 0), child);
  assert_int_equal(even_process_stat_read(child, &stat), ENOENT);
}

static int reads;

static ssize_t read_in_pieces(int fd, void *buffer, size_t bytes) {
  if (++reads == 2) {
    errno = EINTR;
    return -1;
  }
  return even_os_real.read(fd, buffer, bytes < 7 ? bytes : 7);
}

static ssize_t read_nothing(int fd, void *buffer, size_t bytes) {
  (void)fd;
  (void)buffer;
  (void)bytes;
  errno = ESRCH; /* it ended after the open */
  return -1;
}

static void pieces_are_put_together_and_failures_said(void **state) {
  even_process_stat stat;
  (void)state;
  even_os.read = read_in_pieces;
  assert_int_equal(even_process_stat_read(0, &stat), 0);
  assert_int_equal(stat.pid, getpid());
  even_os.read = read_nothing;
  assert_int_equal(even_process_stat_read(0, &stat), ESRCH);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(a_line_is_read_behind_the_name, tear_down),
      cmocka_unit_test_teardown(what_is_no_such_line_is_refused, tear_down),
      cmocka_unit_test_teardown(this_process_is_itself, tear_down),
      cmocka_unit_test_teardown(what_a_shell_of_a_terminal_starts_is_typed, tear_down),
      cmocka_unit_test_teardown(one_that_has_ended_is_a_zombie_and_then_nobody, tear_down),
      cmocka_unit_test_teardown(pieces_are_put_together_and_failures_said, tear_down),
  };
  return cmocka_run_group_tests_name("os_process_stat", tests, NULL, NULL);
}
