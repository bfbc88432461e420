/* Slower ranks: a control group where one may be made, busy neighbours where not. */
#include "orchestrator/slowdown.h"
#include "support/fault.h"

#include <errno.h>
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static int32_t cpu;
static even_device devices[2];
static const even_device_list list = {devices, 2};
static const double quota[2] = {(double)NAN, 0.5};
static even_guardian nobody = {.pid = -1, .pipe = -1};

static int make_devices(void **state) {
  (void)state;
  cpu = sched_getcpu();
  for (int i = 0; i < 2; i++) {
    devices[i] = (even_device){.cpus = &cpu, .cpu_count = 1, .cores = 1};
  }
  return 0;
}

static void nobody_is_slowed_without_quotas(void **state) {
  (void)state;
  even_slowdown slow;
  assert_int_equal(even_slowdown_open(&list, NULL, "0123456789abcdef", &nobody, &slow), EVEN_OK);
  assert_null(even_slowdown_join(&slow, 0));
  even_slowdown_close(&slow);
}

static void a_group_is_joined_and_removed(void **state) {
  (void)state;
  even_slowdown slow;
  char folder[EVEN_CGROUP_PATH];
  assert_int_equal(even_slowdown_open(&list, quota, "0123456789abcdef", &nobody, &slow), EVEN_OK);
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
  assert_int_equal(even_slowdown_open(&list, quota, "0123456789abcdef", &nobody, &slow), EVEN_OK);
  fault_reset();
  assert_true(slow.refused[0] != '\0');
  assert_null(even_slowdown_join(&slow, 1));
  assert_int_equal(slow.neighbour_count, 1); /* one as heavy as the rank leaves it half */
  pid_t pid = slow.neighbours[0];
  assert_int_equal(waitpid(pid, NULL, WNOHANG), 0); /* it runs */
  even_slowdown_close(&slow);
  assert_int_equal(waitpid(pid, NULL, WNOHANG), -1);
}

static even_status open_and_close(void *context) {
  even_slowdown slow;
  (void)context;
  even_status status = even_slowdown_open(&list, quota, "0123456789abcdef", &nobody, &slow);
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
      cmocka_unit_test_setup(survives_every_fault, make_devices),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
