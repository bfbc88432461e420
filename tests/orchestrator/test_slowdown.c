/* Slower ranks: a control group where one may be made, busy neighbours where not. */
#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/slowdown.h"
#include "support/fault.h"

#include <errno.h>
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static int32_t cpu;
static int32_t other;
static even_device devices[2];
static const even_device_list list = {devices, 2};
static const double quota[2] = {(double)NAN, 0.5};
static even_guardian nobody = {.pid = -1, .pipe = -1};

static int make_devices(void **state) {
  (void)state;
  cpu = sched_getcpu();
  other = cpu + 1; /* nothing is started there */
  for (int i = 0; i < 2; i++) {
    devices[i] = (even_device){.cpus = i == 1 ? &cpu : &other, .cpu_count = 1, .cores = 1};
  }
  return 0;
}

static void nobody_is_slowed_without_quotas(void **state) {
  (void)state;
  even_slowdown slow;
  assert_int_equal(even_slowdown_open(&list, NULL, true, "0123456789abcdef", &nobody, &slow), EVEN_OK);
  assert_null(even_slowdown_join(&slow, 0));
  even_slowdown_close(&slow);
}

static void a_group_is_joined_and_removed(void **state) {
  (void)state;
  even_slowdown slow;
  char folder[EVEN_CGROUP_PATH];
  assert_int_equal(even_slowdown_open(&list, quota, true, "0123456789abcdef", &nobody, &slow), EVEN_OK);
  if (slow.refused[0] != '\0') {
    even_slowdown_close(&slow);
    skip(); /* no control group may be made here */
  }
  assert_null(even_slowdown_join(&slow, 0));
  assert_non_null(strstr(even_slowdown_join(&slow, 1), "evenstep-0123456789ab-rank-1/cgroup.procs"));
  memcpy(folder, slow.groups[1].folder, sizeof folder);
  assert_int_equal(access(folder, F_OK), 0);
  even_slowdown_close(&slow);
  assert_int_equal(access(folder, F_OK), -1);
}

static void neighbours_take_over_where_groups_are_refused(void **state) {
  (void)state;
  even_slowdown slow;
  fault_os(FAULT_mkdir, 1, EACCES);
  assert_int_equal(even_slowdown_open(&list, quota, true, "0123456789abcdef", &nobody, &slow), EVEN_OK);
  fault_reset();
  assert_true(slow.refused[0] != '\0');
  assert_null(even_slowdown_join(&slow, 1));
  assert_int_equal(slow.neighbour_count, 1); /* one as heavy as the rank leaves it half */
  pid_t pid = slow.neighbours[0].pid;
  assert_int_equal(waitpid(pid, NULL, WNOHANG), 0); /* it runs */
  even_slowdown_close(&slow);
  assert_int_equal(waitpid(pid, NULL, WNOHANG), -1);
}

static void expect_refused(bool pinned, const char *what, const char *fix) {
  even_slowdown slow;
  fault_os(FAULT_mkdir, 1, EACCES);
  assert_int_equal(even_slowdown_open(&list, quota, pinned, "0123456789abcdef", &nobody, &slow), EVEN_ERR_UNSUPPORTED);
  fault_reset();
  if (strstr(even_error_last()->what, what) == NULL || strstr(even_error_last()->fix, fix) == NULL) {
    fail_msg("it says \"%s\", fix \"%s\"", even_error_last()->what, even_error_last()->fix);
  }
  assert_int_equal(slow.neighbour_count, 0);
  even_slowdown_close(&slow);
}

/* A neighbour slows a CPU: that is the rank alone only where it stays there and has it for itself. */
static void neighbours_that_would_slow_others_are_refused(void **state) {
  (void)state;
  expect_refused(false, "cannot slow rank 1 with --no-pin", "leave out --no-pin");
  devices[0].cpus = &cpu; /* more ranks than cores */
  expect_refused(true, "with rank 0, busy neighbours would slow both", "CPUs of its own");
}

static void a_neighbour_that_was_reaped_is_forgotten(void **state) {
  (void)state;
  even_slowdown slow;
  size_t rank = 9;
  fault_os(FAULT_mkdir, 1, EACCES);
  assert_int_equal(even_slowdown_open(&list, quota, true, "0123456789abcdef", &nobody, &slow), EVEN_OK);
  fault_reset();
  pid_t pid = slow.neighbours[0].pid;
  assert_false(even_slowdown_forget(&slow, pid + 1, &rank));
  assert_true(even_slowdown_forget(&slow, pid, &rank));
  assert_int_equal(rank, 1);
  assert_int_equal(slow.neighbour_count, 0);
  even_slowdown_close(&slow);
  assert_int_equal(waitpid(pid, NULL, WNOHANG), 0); /* not ended by a number that is no longer known to be its */
  assert_int_equal(kill(pid, SIGKILL), 0);
  assert_int_equal(waitpid(pid, NULL, 0), pid);
}

static void a_neighbour_without_its_place_is_an_error(void **state) {
  (void)state;
  even_slowdown slow;
  fault_os(FAULT_mkdir, 1, EACCES);
  fault_os(FAULT_setaffinity, 1, EINVAL);
  assert_int_not_equal(even_slowdown_open(&list, quota, true, "0123456789abcdef", &nobody, &slow), EVEN_OK);
  fault_reset();
  even_slowdown_close(&slow);
  assert_non_null(strstr(even_error_last()->what, "a busy neighbour could not be pinned to CPU"));
}

/* The words for an error that ends the job outlast the cleaning up, also where that fails. */
static void closing_keeps_the_record(void **state) {
  (void)state;
  even_slowdown slow = {.ranks = 1};
  assert_int_equal(EVEN_NEW_ARRAY(&slow.groups, 1), EVEN_OK);
  (void)snprintf(slow.groups[0].folder, sizeof slow.groups[0].folder, "/proc/self/task"); /* cannot be removed */
  assert_int_equal(even_fail(EVEN_ERR_NO_SPACE, "the cause"), EVEN_ERR_NO_SPACE);
  even_slowdown_close(&slow);
  assert_int_equal(even_error_last()->status, EVEN_ERR_NO_SPACE);
  assert_string_equal(even_error_last()->what, "the cause");
}

static even_status open_and_close(void *context) {
  even_slowdown slow;
  (void)context;
  even_status status = even_slowdown_open(&list, quota, true, "0123456789abcdef", &nobody, &slow);
  even_slowdown_close(&slow);
  return status;
}

static void survives_every_fault(void **state) {
  (void)state;
  assert_true(fault_each_os(open_and_close, NULL, EACCES) >= 3);
  assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup(nobody_is_slowed_without_quotas, make_devices),
      cmocka_unit_test_setup(a_group_is_joined_and_removed, make_devices),
      cmocka_unit_test_setup(neighbours_take_over_where_groups_are_refused, make_devices),
      cmocka_unit_test_setup(neighbours_that_would_slow_others_are_refused, make_devices),
      cmocka_unit_test_setup(a_neighbour_that_was_reaped_is_forgotten, make_devices),
      cmocka_unit_test_setup(a_neighbour_without_its_place_is_an_error, make_devices),
      cmocka_unit_test_setup(closing_keeps_the_record, make_devices),
      cmocka_unit_test_setup(survives_every_fault, make_devices),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
