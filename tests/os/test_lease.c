/* A folder of one's own among hosts: held, renewed, lost, and without. */
#include "os/two_hosts.h"

#include "base/fail.h"
#include "os/calls.h"
#include "support/descriptors.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static void a_file_system_of_one_host_needs_none(void **state) {
  (void)state;
  even_lease *lease = NULL;
  const even_lease_params params = params_of("one", 0);
  even_os.fstatfs = even_os_real.fstatfs;
  assert_int_equal(even_lease_take(&params, &lease), EVEN_OK);
  assert_null(lease);
  assert_int_equal(entries(), 0);
  assert_int_equal(even_lease_check(NULL), EVEN_OK);
  even_lease_release(NULL);
}

static void it_is_made_and_removed_without_a_wait(void **state) {
  (void)state;
  int before = open_descriptors();
  even_lease *lease = taken("one", 0);
  assert_int_equal(access(sign, F_OK), 0);
  assert_int_equal(entries(), 1);
  assert_int_equal(even_lease_check(lease), EVEN_OK);
  even_lease_release(lease);
  assert_int_equal(entries(), 0);
  assert_int_equal(slept_ns, 0);
  assert_int_equal(open_descriptors(), before);
}

/* ---- file systems whose times stand still ---- */

static void where_no_time_can_be_moved_there_is_no_sign(void **state) {
  (void)state;
  fault_os_from(FAULT_touch, 1, ENOSYS);
  play();
  const even_lease_params params = params_of("one", 0);
  even_status status = try_to_take(&params);
  assert_true(status != EVEN_OK && status != EVEN_ERR_IN_USE);
  assert_int_equal(entries(), 0);
}

static int touch_nothing(int fd) {
  (void)fd;
  return 0;
}

static void renew_for(even_lease *lease, uint64_t ns, bool moves) {
  for (uint64_t end = clock_ns + ns; clock_ns <= end; clock_ns += EVEN_LEASE_RENEW_NS) {
    if (moves) {
      move_times();
    }
    even_lease_renew(lease);
  }
}

static void a_time_that_does_not_move_is_noticed(void **state) {
  (void)state;
  even_lease *lease = taken("one", 0);
  renew_for(lease, 2 * EVEN_LEASE_NS, true);
  assert_true(even_lease_is_seen(lease));
  even_lease_release(lease);
  even_os.touch = touch_nothing;
  lease = taken("one", 0);
  renew_for(lease, EVEN_LEASE_NS / 3, false);
  assert_true(even_lease_is_seen(lease));
  renew_for(lease, EVEN_LEASE_NS / 2, false);
  assert_false(even_lease_is_seen(lease));
  assert_int_equal(entries(), 1); /* under another name, for those who work for it */
  assert_int_equal(access(sign, F_OK), -1);
  renew_for(lease, 2 * EVEN_LEASE_NS, false); /* that is not lost */
  clock_ns += 2 * EVEN_LEASE_NS;
  assert_int_equal(even_lease_check(lease), EVEN_OK);
  assert_int_equal(even_lease_ask(lease), EVEN_OK);
  even_lease_release(lease);
  assert_int_equal(entries(), 0);
  assert_true(even_lease_is_seen(NULL));
}

static void one_that_cannot_be_renamed_goes_all_the_same(void **state) {
  (void)state;
  even_os.touch = touch_nothing;
  even_lease *lease = taken("one", 0);
  fault_os_from(FAULT_rename, 1, EIO);
  play();
  even_os.touch = touch_nothing;
  renew_for(lease, EVEN_LEASE_NS, false);
  assert_false(even_lease_is_seen(lease));
  assert_int_equal(access(sign, F_OK), 0);
  even_lease_release(lease);
  assert_int_equal(entries(), 0);
}

/* A process that was stopped looks before it goes on, also where its thread has not come to it. */
static void one_that_stood_still_asks_first(void **state) {
  (void)state;
  even_lease *slow = taken("one", 0);
  host("b");
  even_lease *lease = taken("two", 0);
  clock_ns += EVEN_LEASE_RENEW_NS + 1;
  assert_int_equal(even_lease_check(slow), EVEN_ERR_IN_USE);
  assert_non_null(strstr(even_error_last()->fix, "stood still"));
  even_lease_release(slow);
  even_lease_release(lease);
}

/* Nor does its clock tell, but for that which goes on while a computer sleeps. */
static void one_whose_computer_slept_asks_first(void **state) {
  (void)state;
  even_lease *slow = taken("one", 0);
  assert_int_equal(unlink(sign), 0); /* taken over, and ended well */
  suspended_ns = EVEN_LEASE_NS + 1;
  assert_int_equal(even_lease_check(slow), EVEN_ERR_IN_USE);
  even_lease_release(slow);
}

static void before_the_last_files_it_is_looked_for_anew(void **state) {
  (void)state;
  even_lease *old = taken("one", 1);
  host("b");
  even_lease *next = taken("one", 2);
  assert_int_equal(even_lease_check(old), EVEN_OK); /* that was not to look */
  assert_int_equal(even_lease_ask(old), EVEN_ERR_IN_USE);
  assert_int_equal(even_lease_ask(next), EVEN_OK);
  assert_int_equal(even_lease_ask(NULL), EVEN_OK);
  even_lease_release(old);
  even_lease_release(next);
}

static void one_whose_sign_is_gone_has_lost_it(void **state) {
  (void)state;
  char away[128];
  even_lease *lease = taken("one", 0);
  (void)snprintf(away, sizeof away, "%s.away", sign);
  for (int i = 0; i < 3; i++) { /* it is put back */
    assert_int_equal(rename(sign, away), 0);
    even_lease_renew(lease);
    assert_int_equal(even_lease_check(lease), EVEN_OK);
    assert_int_equal(rename(away, sign), 0);
    even_lease_renew(lease);
  }
  assert_int_equal(unlink(sign), 0);
  even_lease_renew(lease);
  even_lease_renew(lease);
  assert_int_equal(even_lease_check(lease), EVEN_ERR_IN_USE);
  assert_non_null(strstr(even_error_last()->what, "is gone"));
  even_lease_release(lease);
}

static void it_goes_with_its_folder(void **state) {
  (void)state;
  char other[80];
  even_lease *lease = taken("one", 0);
  (void)snprintf(other, sizeof other, "%s.1", folder);
  assert_int_equal(rename(folder, other), 0);
  assert_int_equal(even_lease_follow(lease, other), EVEN_OK);
  even_lease_renew(lease);
  even_lease_renew(lease);
  assert_int_equal(even_lease_check(lease), EVEN_OK);
  even_lease_release(lease);
  assert_int_equal(rmdir(other), 0);
  assert_int_equal(mkdir(folder, 0700), 0);
  assert_int_equal(even_lease_follow(NULL, other), EVEN_OK);
}

static void what_cannot_be_looked_at_is_not_lost(void **state) {
  (void)state;
  static const fault_call calls[] = {FAULT_open, FAULT_read, FAULT_fstat, FAULT_touch};
  even_lease *lease = taken("one", 0);
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    fault_os_from(calls[i], 1, EIO);
    even_lease_renew(lease);
    assert_true(fault_os_calls(calls[i]) > 0);
    fault_reset();
    play();
    assert_int_equal(even_lease_check(lease), EVEN_OK);
  }
  even_lease_renew(lease);
  assert_int_equal(even_lease_check(lease), EVEN_OK);
  even_lease_release(lease);
}

static void a_disk_without_room_leaves_no_half_sign(void **state) {
  (void)state;
  static const fault_call calls[] = {FAULT_write, FAULT_fsync, FAULT_close};
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    fault_os(calls[i], calls[i] == FAULT_close ? 3 : 1, ENOSPC); /* after the folder, and the host's name */
    play();
    const even_lease_params params = params_of("one", 0);
    assert_int_equal(try_to_take(&params), EVEN_ERR_NO_SPACE);
    assert_int_equal(entries(), 0);
    fault_reset();
    play();
  }
}

/* Of owner "zero", before: the same one's next waits for nothing. */
static even_status over_a_dead_one(void *owner) {
  play();
  int fd = open(sign, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0666);
  assert_true(fd >= 0);
  assert_true(write(fd, "z pid\nhost\n1\nzero\n0\n", 20) == 20);
  assert_int_equal(close(fd), 0);
  const even_lease_params params = params_of(owner, 1);
  return try_to_take(&params);
}

static void every_call_may_fail(void **state) {
  (void)state;
  long failed = 0;
  do { /* words may be missing */
    fault_reset();
    fault_allocation(++failed);
    (void)!over_a_dead_one("two");
    assert_int_equal(fault_live_blocks(), 0);
  } while (fault_allocations() >= failed);
  assert_true(failed > 5);
  assert_true(fault_each_os(over_a_dead_one, "zero", EIO) > 5);
}

static _Atomic int waits;
static _Atomic int touched;
static sem_t has_waited;

/* Its waits end at once, but for the third. */
static long futex_without_waits(uint32_t *word, int operation, uint32_t value, const struct timespec *timeout) {
  if (operation != FUTEX_WAIT || timeout == NULL) {
    return even_os_real.futex(word, operation, value, timeout);
  }
  if (++waits < 3) {
    return 0;
  }
  (void)sem_post(&has_waited);
  return even_os_real.futex(word, operation, value, NULL);
}

static int count_touches(int fd) {
  touched++;
  return even_os_real.touch(fd);
}

static void a_thread_keeps_it(void **state) {
  (void)state;
  assert_int_equal(sem_init(&has_waited, 0, 0), 0);
  even_lease *lease = taken("one", 0);
  even_os.futex = futex_without_waits;
  even_os.touch = count_touches;
  assert_int_equal(even_lease_keep(lease), EVEN_OK);
  while (sem_wait(&has_waited) != 0) {
  }
  assert_int_equal(touched, 2);
  even_lease_release(lease);
  lease = taken("one", 0);
  fault_os(FAULT_thread_create, 1, EAGAIN);
  assert_int_not_equal(even_lease_keep(lease), EVEN_OK);
  even_lease_release(lease);
  assert_int_equal(sem_destroy(&has_waited), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_file_system_of_one_host_needs_none, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(it_is_made_and_removed_without_a_wait, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(where_no_time_can_be_moved_there_is_no_sign, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(a_time_that_does_not_move_is_noticed, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(one_that_cannot_be_renamed_goes_all_the_same, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(one_that_stood_still_asks_first, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(one_whose_computer_slept_asks_first, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(before_the_last_files_it_is_looked_for_anew, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(one_whose_sign_is_gone_has_lost_it, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(it_goes_with_its_folder, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(what_cannot_be_looked_at_is_not_lost, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(a_disk_without_room_leaves_no_half_sign, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(every_call_may_fail, two_hosts_make, two_hosts_end),
      cmocka_unit_test_setup_teardown(a_thread_keeps_it, two_hosts_make, two_hosts_end),
  };
  return cmocka_run_group_tests_name("os_lease", tests, NULL, NULL);
}
