/* What a newcomer does with the sign of another job: what lives is refused, what is dead is taken. */
#include "os/two_hosts.h"

#include "base/fail.h"
#include "base/stop.h"
#include "os/calls.h"
#include "os/host.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static even_lease *of_a;

static void a_renews(void) {
  if (slept_ns > EVEN_LEASE_RENEW_NS) {
    move_times(); /* coarse: by hand, and by its owner */
    even_lease_renew(of_a);
  }
}

static void a_living_one_of_another_host_keeps_it(void **state) {
  (void)state;
  of_a = taken("one", 0);
  host("b");
  const even_lease_params params = params_of("two", 7);
  while_asleep = a_renews;
  assert_int_equal(try_to_take(&params), EVEN_ERR_IN_USE);
  assert_non_null(strstr(even_error_last()->what, "is running on host "));
  assert_non_null(strstr(even_error_last()->what, "(process "));
  assert_non_null(strstr(even_error_last()->fix, "--name"));
  assert_non_null(strstr(told, "looking for 30 s "));
  assert_true(slept_ns < 2 * EVEN_LEASE_RENEW_NS);
  assert_int_equal(even_lease_check(of_a), EVEN_OK);
  assert_int_equal(entries(), 1);
  even_lease_release(of_a);
}

/* Whose process was killed with its host: the sign stays, and stands still. */
static void a_dead_one_of_another_host_is_taken_in_time(void **state) {
  (void)state;
  even_lease *dead = taken("one", 0);
  host("b");
  even_lease *lease = taken("two", 0);
  assert_true(slept_ns >= EVEN_LEASE_NS && slept_ns < EVEN_LEASE_NS + EVEN_LEASE_RENEW_NS);
  assert_int_equal(entries(), 1);
  assert_int_equal(even_lease_check(lease), EVEN_OK);
  even_lease_renew(dead); /* it was only slow */
  assert_int_equal(even_lease_check(dead), EVEN_ERR_IN_USE);
  assert_non_null(strstr(even_error_last()->what, "taken over from host "));
  even_lease_release(dead); /* not the other's sign */
  even_lease_renew(lease);
  assert_int_equal(even_lease_check(lease), EVEN_OK);
  even_lease_release(lease);
  assert_int_equal(entries(), 0);
}

static void an_empty_sign_is_of_a_host_that_cannot_be_named(void **state) {
  (void)state;
  int fd = open(sign, O_CREAT | O_WRONLY | O_CLOEXEC, 0666);
  assert_true(fd >= 0);
  assert_int_equal(close(fd), 0);
  even_lease_params params = params_of("one", 0);
  params.patient = false;
  assert_int_equal(try_to_take(&params), EVEN_ERR_IN_USE);
  assert_non_null(strstr(even_error_last()->what, "on another host"));
  assert_int_equal(slept_ns, 0);
  even_lease_release(taken("one", 0));
  assert_true(slept_ns >= EVEN_LEASE_NS);
}

static void leave_sign_of(pid_t process) {
  char identity[256];
  even_host_identity(identity, sizeof identity);
  FILE *file = fopen(sign, "wxe");
  assert_non_null(file);
  assert_true(fprintf(file, "%s\nhost\n%d\none\n0\nmark\n", identity, (int)process) > 0);
  assert_int_equal(fclose(file), 0);
}

static void what_this_host_left_is_taken_at_once(void **state) {
  (void)state;
  for (int reaped = 0; reaped < 2; reaped++) {
    siginfo_t ended;
    pid_t process = fork();
    if (process == 0) {
      _exit(0);
    }
    assert_true(process > 0);
    assert_int_equal(waitid(P_PID, (id_t)process, &ended, WEXITED | (reaped ? 0 : WNOWAIT)), 0);
    leave_sign_of(process);
    even_lease_release(taken("two", 0));
    assert_int_equal(slept_ns, 0);
    assert_int_equal(entries(), 0);
    assert_true(reaped || waitpid(process, NULL, 0) == process);
  }
}

/* It may have the folder mounted twice, with locks of each mount's own. */
static void what_lives_on_this_host_is_watched_too(void **state) {
  (void)state;
  of_a = taken("one", 0);
  const even_lease_params params = params_of("two", 0);
  while_asleep = a_renews;
  assert_int_equal(try_to_take(&params), EVEN_ERR_IN_USE);
  while_asleep = NULL;
  slept_ns = 0;
  assert_int_equal(try_to_take(&params), EVEN_OK);
  assert_true(slept_ns >= EVEN_LEASE_NS);
  even_lease_release(of_a);
}

/* ---- looks that fail ---- */

static uint64_t hangs_ns; /* one look does, and nobody can renew meanwhile */
static int refuses;       /* errno of all looks between 1 s and until_ns */
static uint64_t until_ns;

static int open_of_a_bad_server(const char *path, int flags, mode_t mode) {
  bool look = strcmp(path, sign) == 0 && (flags & O_CREAT) == 0 && slept_ns > 1000000000u;
  if (look && hangs_ns > 0) {
    clock_ns += hangs_ns;
    hangs_ns = 0;
    until_ns = slept_ns + 1000000000u;
  }
  if (look && refuses != 0 && slept_ns < until_ns) {
    errno = refuses;
    return -1;
  }
  return even_os_real.open(path, flags, mode);
}

static void a_renews_later(void) {
  if (hangs_ns == 0 && slept_ns > until_ns) {
    move_times();
  }
}

static void time_when_nobody_could_look_does_not_count(void **state) {
  (void)state;
  static const uint64_t hangs[] = {EVEN_LEASE_NS + 10000000000u, 0};
  for (size_t i = 0; i < 2; i++) {
    host("a");
    slept_ns = 0;
    hangs_ns = hangs[i];
    refuses = hangs_ns > 0 ? 0 : EIO;
    until_ns = hangs_ns > 0 ? UINT64_MAX : EVEN_LEASE_NS + 10000000000u;
    of_a = taken("one", 0);
    host("b");
    even_os.open = open_of_a_bad_server;
    while_asleep = a_renews_later;
    const even_lease_params params = params_of("two", 0);
    assert_int_equal(try_to_take(&params), EVEN_ERR_IN_USE);
    assert_int_equal(entries(), 1);
    even_lease_renew(of_a);
    assert_int_equal(even_lease_check(of_a), EVEN_OK);
    even_lease_release(of_a);
    while_asleep = NULL;
  }
}

static void what_can_hardly_be_looked_at_is_refused_in_time(void **state) {
  (void)state;
  even_lease *dead = taken("one", 0);
  host("b");
  hangs_ns = 0;
  refuses = EIO;
  until_ns = UINT64_MAX;
  even_os.open = open_of_a_bad_server;
  const even_lease_params params = params_of("two", 0);
  assert_int_equal(try_to_take(&params), EVEN_ERR_IN_USE);
  assert_non_null(strstr(even_error_last()->what, "can hardly be looked at"));
  assert_true(slept_ns < 5 * EVEN_LEASE_NS);
  even_os.open = even_os_real.open;
  even_lease_release(dead);
}

static void what_cannot_be_read_at_all_is_refused(void **state) {
  (void)state;
  even_lease *lease = taken("one", 0);
  fault_os_from(FAULT_read, 1, EACCES);
  play();
  const even_lease_params params = params_of("two", 0);
  assert_int_equal(try_to_take(&params), EVEN_ERR_IN_USE);
  assert_non_null(strstr(even_error_last()->what, "the sign of another job"));
  fault_reset();
  play();
  even_lease_release(lease);
}

static int rename_after_a_renewal(const char *from, const char *to) {
  move_times();
  return even_os_real.rename(from, to);
}

/* Its holder lives: it renews after the last look, and before it is renamed away. */
static void what_is_renewed_at_last_goes_back(void **state) {
  (void)state;
  of_a = taken("one", 0);
  host("b");
  even_os.rename = rename_after_a_renewal;
  const even_lease_params params = params_of("two", 0);
  assert_int_equal(try_to_take(&params), EVEN_ERR_IN_USE);
  assert_int_equal(entries(), 1);
  even_lease_renew(of_a);
  assert_int_equal(even_lease_check(of_a), EVEN_OK);
  even_os.rename = even_os_real.rename;
  even_lease_release(of_a);
}

static void the_next_leader_takes_it_at_once(void **state) {
  (void)state;
  even_lease *old = taken("one", 1);
  host("b");
  even_lease_params params = params_of("one", 2);
  params.patient = false;
  even_lease *next = NULL;
  assert_int_equal(even_lease_take(&params, &next), EVEN_OK);
  assert_int_equal(slept_ns, 0);
  even_lease_renew(old);
  assert_int_equal(even_lease_check(old), EVEN_ERR_IN_USE);
  assert_non_null(strstr(even_error_last()->what, "this job goes on from host "));
  host("a");
  params.turn = 1; /* one that was late */
  assert_int_equal(try_to_take(&params), EVEN_ERR_IN_USE);
  params = params_of("other", 9);
  params.patient = false;
  assert_int_equal(try_to_take(&params), EVEN_ERR_IN_USE);
  assert_int_equal(slept_ns, 0);
  even_lease_renew(next);
  assert_int_equal(even_lease_check(next), EVEN_OK);
  even_lease_release(old);
  even_lease_release(next);
  assert_int_equal(entries(), 0);
}

static even_lease *of_c;

/* A third host is faster, in the moment between the last look and the renaming. */
static int rename_late(const char *from, const char *to) {
  even_os.rename = even_os_real.rename;
  host("c");
  assert_int_equal(unlink(sign), 0);
  of_c = taken("three", 0);
  host("b");
  return even_os_real.rename(from, to);
}

static void of_two_newcomers_one_gets_it(void **state) {
  (void)state;
  static const int refusals[] = {0, EPERM}; /* a file system without links */
  for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
    host("a");
    even_lease *dead = taken("one", 0);
    host("b");
    if (refusals[i] != 0) {
      fault_os_from(FAULT_link, 1, refusals[i]);
      play();
    }
    even_os.rename = rename_late;
    const even_lease_params params = params_of("two", 0);
    assert_int_equal(try_to_take(&params), EVEN_ERR_IN_USE);
    assert_int_equal(entries(), 1);
    even_lease_renew(of_c);
    assert_int_equal(even_lease_check(of_c), EVEN_OK);
    even_lease_release(of_c);
    even_lease_release(dead);
    assert_int_equal(entries(), 0);
    fault_reset();
    play();
  }
}

static bool asked(void) {
  return slept_ns > EVEN_LEASE_RENEW_NS;
}

static void the_wait_is_interrupted(void **state) {
  (void)state;
  even_lease *dead = taken("one", 0);
  host("b");
  even_stop_when(asked);
  const even_lease_params params = params_of("two", 0);
  assert_int_equal(try_to_take(&params), EVEN_ERR_INTERRUPTED);
  assert_true(slept_ns < 2 * EVEN_LEASE_RENEW_NS);
  even_lease_renew(dead);
  assert_int_equal(even_lease_check(dead), EVEN_OK);
  even_lease_release(dead);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_living_one_of_another_host_keeps_it, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(a_dead_one_of_another_host_is_taken_in_time, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(an_empty_sign_is_of_a_host_that_cannot_be_named, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(what_this_host_left_is_taken_at_once, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(what_lives_on_this_host_is_watched_too, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(time_when_nobody_could_look_does_not_count, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(what_can_hardly_be_looked_at_is_refused_in_time, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(what_cannot_be_read_at_all_is_refused, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(what_is_renewed_at_last_goes_back, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(the_next_leader_takes_it_at_once, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(of_two_newcomers_one_gets_it, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(the_wait_is_interrupted, two_hosts_make, two_hosts_end),
  };
  return cmocka_run_group_tests_name("os_lease_taking", tests, NULL, NULL);
}
