/* The limit on open files: raised where it must be, left alone where not; the standard streams. */
#include "os/descriptors.h"

#include "os/calls.h"
#include "os/pipe.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static struct rlimit real;

static int keep(void **state) {
  (void)state;
  return getrlimit(RLIMIT_NOFILE, &real);
}

static int restore(void **state) {
  (void)state;
  fault_reset();
  return setrlimit(RLIMIT_NOFILE, &real);
}

static void limit_to(rlim_t soft) {
  const struct rlimit limit = {.rlim_cur = soft, .rlim_max = real.rlim_max};
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

static void what_is_asked_for_fits_then(void **state) {
  (void)state;
  int opened[100];
  uint64_t before = 0;
  bool tight = true;
  limit_to(32);
  assert_int_equal(even_descriptors_raise(60, 40, &before, &tight), EVEN_OK);
  assert_int_equal(before, 32);
  assert_false(tight);
  for (int i = 0; i < 100; i++) {
    opened[i] = dup(0);
    assert_true(opened[i] >= 0);
  }
  for (int i = 0; i < 100; i++) {
    assert_int_equal(close(opened[i]), 0);
  }
  assert_true(even_descriptors_limit(before));
  struct rlimit limit;
  assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
  assert_int_equal(limit.rlim_cur, 32);
  assert_int_equal(limit.rlim_max, real.rlim_max); /* it may be raised again */
}

static void what_fits_changes_nothing(void **state) {
  (void)state;
  uint64_t before = 7;
  bool tight = true;
  fault_os(FAULT_setrlimit, 0, 0);
  assert_int_equal(even_descriptors_raise(1, 0, &before, &tight), EVEN_OK);
  assert_int_equal(before, 0);
  assert_int_equal(fault_os_calls(FAULT_setrlimit), 0);
}

static void what_the_hard_limit_forbids_is_an_error(void **state) {
  (void)state;
  uint64_t before = 7;
  bool tight = true;
  assert_int_equal(even_descriptors_raise(UINT64_MAX / 2, 0, &before, &tight), EVEN_ERR_SYSTEM);
  assert_int_equal(before, 0);
  assert_non_null(strstr(even_error_last()->what, "open files are needed"));
}

static struct rlimit set;

static int hard_limit_of_200(int resource, struct rlimit *out) {
  (void)resource;
  *out = (struct rlimit){.rlim_cur = set.rlim_cur, .rlim_max = 200};
  return 0;
}

static int note_the_limit(int resource, const struct rlimit *limit) {
  (void)resource;
  set = *limit;
  return 0;
}

/* What is only spare is no reason to refuse. */
static void the_spare_ones_are_had_as_far_as_the_hard_limit_goes(void **state) {
  (void)state;
  uint64_t before = 7;
  bool tight = false;
  set.rlim_cur = 32;
  even_os.getrlimit = hard_limit_of_200;
  even_os.setrlimit = note_the_limit;
  assert_int_equal(even_descriptors_raise(100, 1000, &before, &tight), EVEN_OK);
  assert_int_equal(before, 32);
  assert_int_equal(set.rlim_cur, 200);
  assert_true(tight);
  assert_int_equal(even_descriptors_raise(100, 1000, &before, &tight), EVEN_OK); /* it is there already */
  assert_int_equal(before, 0);
  assert_true(tight);
  assert_int_equal(even_descriptors_raise(200, 0, &before, &tight), EVEN_ERR_SYSTEM);
}

static void refusals_come_back(void **state) {
  (void)state;
  uint64_t before = 7;
  bool tight = true;
  limit_to(32);
  fault_os(FAULT_setrlimit, 1, EPERM);
  assert_int_equal(even_descriptors_raise(60, 40, &before, &tight), EVEN_ERR_PERMISSION);
  assert_int_equal(before, 0);
  fault_os(FAULT_getrlimit, 1, EPERM);
  assert_int_equal(even_descriptors_raise(60, 40, &before, &tight), EVEN_ERR_PERMISSION);
  fault_os(FAULT_getrlimit, 1, EPERM);
  assert_false(even_descriptors_limit(32));
  fault_reset();
  fault_os(FAULT_getdents64, 1, EACCES); /* without /proc a usual number is taken for what is open */
  assert_int_equal(even_descriptors_raise(1, 0, &before, &tight), EVEN_OK);
  assert_int_equal(before, 32);
}

/* In a child: this process's own streams stay. */
static void closed_streams_are_nobodys(void **state) {
  (void)state;
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    char byte = 0;
    (void)close(0);
    (void)close(2);
    even_descriptors_fill_standard();
    bool unusable = read(0, &byte, 1) < 0 && write(2, "x", 1) < 0;
    int next = dup(1);
    (void)close(0);
    (void)close(2);
    fault_os(FAULT_open, 1, EMFILE);
    even_descriptors_fill_standard();
    bool closed = fcntl(0, F_GETFD) < 0 && fcntl(2, F_GETFD) < 0;
    _exit(unusable && next > 2 && closed ? 0 : 1);
  }
  int how = 1;
  assert_int_equal(waitpid(child, &how, 0), child);
  assert_int_equal(how, 0);
}

/* Whatever it was: who reads it comes to its end. */
static void standard_input_can_be_emptied(void **state) {
  char byte = 0;
  int ends[2];
  int status = 1;
  (void)state;
  assert_int_equal(pipe(ends), 0); /* its other end stays open */
  pid_t child = fork();
  if (child == 0) {
    (void)dup2(ends[0], STDIN_FILENO);
    fault_os(FAULT_open, 1, EMFILE);
    bool failed = even_pipe_empty_input() != EVEN_OK;
    fault_os(FAULT_dup2, 1, EBUSY);
    failed = failed && even_pipe_empty_input() != EVEN_OK;
    _exit(failed && even_pipe_empty_input() == EVEN_OK && read(STDIN_FILENO, &byte, 1) == 0 ? 0 : 2);
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_int_equal(status, 0);
  (void)close(ends[0]);
  (void)close(ends[1]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(what_is_asked_for_fits_then, keep, restore),
      cmocka_unit_test_setup_teardown(what_fits_changes_nothing, keep, restore),
      cmocka_unit_test_setup_teardown(what_the_hard_limit_forbids_is_an_error, keep, restore),
      cmocka_unit_test_setup_teardown(the_spare_ones_are_had_as_far_as_the_hard_limit_goes, keep, restore),
      cmocka_unit_test_setup_teardown(refusals_come_back, keep, restore),
      cmocka_unit_test_setup_teardown(closed_streams_are_nobodys, keep, restore),
      cmocka_unit_test_setup_teardown(standard_input_can_be_emptied, keep, restore),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
