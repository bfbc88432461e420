/* Two hosts and one folder: the file system says that it is NFS, the hosts' names are made up, and so is the clock. */
#include "os/lease.h"

#include "base/fail.h"
#include "base/stop.h"
#include "os/calls.h"
#include "support/descriptors.h"
#include "support/fault.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cmocka.h>

static char folder[64];
static char sign[96];
static char told[512];

/* ---- made-up calls ---- */

static uint64_t clock_ns;
static uint64_t slept_ns;
static uint64_t stretched = 1; /* so many looks are left out */
static void (*while_asleep)(void);

static int made_up_clock(clockid_t clock, struct timespec *out) {
  (void)clock;
  *out = (struct timespec){(time_t)(clock_ns / 1000000000u), (long)(clock_ns % 1000000000u)};
  return 0;
}

static int made_up_sleep(const struct timespec *time) {
  uint64_t ns = stretched * ((uint64_t)time->tv_sec * 1000000000u + (uint64_t)time->tv_nsec);
  clock_ns += ns;
  slept_ns += ns;
  if (while_asleep != NULL) {
    while_asleep();
  }
  return 0;
}

static int statfs_of_nfs(int fd, struct statfs *out) {
  int failed = even_os_real.fstatfs(fd, out);
  out->f_type = 0x6969;
  return failed;
}

static void play(void) {
  even_os.fstatfs = statfs_of_nfs;
  even_os.clock_gettime = made_up_clock;
  even_os.nanosleep = made_up_sleep;
}

static void host(const char *name) {
  assert_int_equal(setenv("EVENSTEP_HOST_ID", name, 1), 0);
}

static int make(void **state) {
  (void)state;
  (void)strcpy(folder, "/tmp/evenstep-lease-XXXXXX");
  if (mkdtemp(folder) == NULL) {
    return -1;
  }
  (void)snprintf(sign, sizeof sign, "%s/%s", folder, EVEN_LEASE_SIGN);
  clock_ns = 1000000000000u;
  slept_ns = 0;
  stretched = 1;
  while_asleep = NULL;
  told[0] = '\0';
  play();
  host("a");
  return 0;
}

static int end(void **state) {
  char command[128];
  (void)state;
  fault_reset();
  even_stop_when(NULL);
  (void)unsetenv("EVENSTEP_HOST_ID");
  (void)snprintf(command, sizeof command, "rm -rf %s", folder);
  return system(command);
}

static void tell(void *context, const char *words) {
  (void)context;
  (void)snprintf(told, sizeof told, "%s", words);
}

static even_lease_params params_of(const char *owner, uint64_t turn) {
  return (even_lease_params){
      .folder = folder, .owner = owner, .turn = turn, .alone = true, .patient = true, .tell = tell};
}

static even_lease *taken(const char *owner, uint64_t turn) {
  even_lease *lease = NULL;
  const even_lease_params params = params_of(owner, turn);
  assert_int_equal(even_lease_take(&params, &lease), EVEN_OK);
  assert_non_null(lease);
  return lease;
}

static even_status try_to_take(const even_lease_params *params) {
  even_lease *lease = NULL;
  even_status status = even_lease_take(params, &lease);
  assert_true(status == EVEN_OK || lease == NULL);
  even_lease_release(lease);
  return status;
}

/* Times of a file are coarse: they move by seconds here. */
static void move_times(void) {
  static time_t second = 2000000000;
  second++;
  const struct timespec times[2] = {{second, 0}, {second, 0}};
  assert_int_equal(utimensat(AT_FDCWD, sign, times, 0), 0);
}

static int entries(void) {
  int count = 0;
  DIR *stream = opendir(folder);
  assert_non_null(stream);
  for (struct dirent *each = readdir(stream); each != NULL; each = readdir(stream)) {
    count += each->d_name[0] != '.';
  }
  (void)closedir(stream);
  return count;
}

/* ---- tests ---- */

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
  assert_non_null(strstr(told, "looking for 30 s at most"));
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

static void what_this_host_left_is_taken_at_once(void **state) {
  (void)state;
  even_lease *dead = taken("one", 0);
  even_lease *lease = taken("two", 0);
  assert_int_equal(slept_ns, 0);
  even_lease_release(dead);
  assert_int_equal(entries(), 1);
  even_lease_release(lease);
}

/* Where no lock has told that nobody lives here. */
static void without_locks_this_host_is_watched_too(void **state) {
  (void)state;
  even_lease *dead = taken("one", 0);
  even_lease_params params = params_of("two", 0);
  params.alone = false;
  assert_int_equal(try_to_take(&params), EVEN_OK);
  assert_true(slept_ns >= EVEN_LEASE_NS);
  even_lease_release(dead);
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

static void one_whose_sign_is_gone_has_lost_it(void **state) {
  (void)state;
  even_lease *lease = taken("one", 0);
  assert_int_equal(unlink(sign), 0);
  even_lease_renew(lease);
  assert_int_equal(even_lease_check(lease), EVEN_ERR_IN_USE);
  assert_non_null(strstr(even_error_last()->what, "is gone"));
  even_lease_release(lease);
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

static even_status over_a_dead_one(void *context) {
  (void)context;
  play();
  int fd = open(sign, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0666);
  assert_true(fd >= 0);
  assert_true(write(fd, "z pid\nhost\n1\nzero\n0\n", 20) == 20);
  assert_int_equal(close(fd), 0);
  const even_lease_params params = params_of("two", 0);
  return try_to_take(&params);
}

static void every_call_may_fail(void **state) {
  (void)state;
  long failed = 0;
  stretched = 40;
  do { /* words may be missing */
    fault_reset();
    fault_allocation(++failed);
    (void)!over_a_dead_one(NULL);
    assert_int_equal(fault_live_blocks(), 0);
  } while (fault_allocations() >= failed);
  assert_true(failed > 5);
  assert_true(fault_each_os(over_a_dead_one, NULL, EIO) > 5);
}

/* The thread renews by the real clock: its first renewal is waited for. */
static void a_thread_keeps_it(void **state) {
  (void)state;
  even_os.clock_gettime = even_os_real.clock_gettime;
  even_os.nanosleep = even_os_real.nanosleep;
  even_lease *lease = taken("one", 0);
  assert_int_equal(even_lease_keep(lease), EVEN_OK);
  assert_int_equal(unlink(sign), 0);
  even_status status = EVEN_OK;
  while (status == EVEN_OK) { /* until it has looked */
    status = even_lease_check(lease);
    (void)usleep(10000);
  }
  assert_int_equal(status, EVEN_ERR_IN_USE);
  even_lease_release(lease);
  lease = taken("one", 0);
  fault_os(FAULT_thread_create, 1, EAGAIN);
  assert_int_not_equal(even_lease_keep(lease), EVEN_OK);
  even_lease_release(lease);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_file_system_of_one_host_needs_none, make, end),
      cmocka_unit_test_setup_teardown(it_is_made_and_removed_without_a_wait, make, end),
      cmocka_unit_test_setup_teardown(a_living_one_of_another_host_keeps_it, make, end),
      cmocka_unit_test_setup_teardown(a_dead_one_of_another_host_is_taken_in_time, make, end),
      cmocka_unit_test_setup_teardown(an_empty_sign_is_of_a_host_that_cannot_be_named, make, end),
      cmocka_unit_test_setup_teardown(what_this_host_left_is_taken_at_once, make, end),
      cmocka_unit_test_setup_teardown(without_locks_this_host_is_watched_too, make, end),
      cmocka_unit_test_setup_teardown(the_next_leader_takes_it_at_once, make, end),
      cmocka_unit_test_setup_teardown(one_that_stood_still_asks_first, make, end),
      cmocka_unit_test_setup_teardown(one_whose_sign_is_gone_has_lost_it, make, end),
      cmocka_unit_test_setup_teardown(what_cannot_be_looked_at_is_not_lost, make, end),
      cmocka_unit_test_setup_teardown(of_two_newcomers_one_gets_it, make, end),
      cmocka_unit_test_setup_teardown(a_disk_without_room_leaves_no_half_sign, make, end),
      cmocka_unit_test_setup_teardown(the_wait_is_interrupted, make, end),
      cmocka_unit_test_setup_teardown(every_call_may_fail, make, end),
      cmocka_unit_test_setup_teardown(a_thread_keeps_it, make, end),
  };
  return cmocka_run_group_tests_name("os_lease", tests, NULL, NULL);
}
