/* A thread's greater weight: its own alone, and none where it may not have one. */
#include "os/priority.h"

#include "support/fault.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static int reset(void **state) {
  (void)state;
  fault_reset();
  return 0;
}

static int own(void) {
  return getpriority(PRIO_PROCESS, 0);
}

/* The weight of a process that this one starts. */
static int of_a_child(void) {
  int status = 0;
  pid_t child = fork();
  if (child == 0) {
    _exit(own() + 20);
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  return WEXITSTATUS(status) - 20;
}

static void it_is_the_threads_alone(void **state) {
  (void)state;
  if (own() != 0 || !even_priority_raise()) {
    skip(); /* not as root, or under nice */
  }
  int raised = own();
  int child = of_a_child();
  even_priority_lower();
  assert_int_equal(raised, -10);
  assert_int_equal(child, 0);
  assert_int_equal(own(), 0);
}

static void nothing_changes_where_it_is_not_permitted(void **state) {
  static const fault_call calls[] = {FAULT_getpriority, FAULT_reset_on_fork, FAULT_setpriority};
  int before = own();
  (void)state;
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    fault_os(calls[i], 1, EPERM);
    assert_false(even_priority_raise());
    fault_reset();
    assert_int_equal(own(), before);
  }
}

/* In a child, which nobody misses: only root may take nice back. */
static void who_was_made_nice_stays_so(void **state) {
  int status = 0;
  (void)state;
  pid_t child = fork();
  if (child == 0) {
    bool other = setpriority(PRIO_PROCESS, 0, 15) == 0;
    _exit(other && !even_priority_raise() && own() == 15 ? 0 : 1);
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_int_equal(status, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(it_is_the_threads_alone, reset),
      cmocka_unit_test_teardown(nothing_changes_where_it_is_not_permitted, reset),
      cmocka_unit_test_teardown(who_was_made_nice_stays_so, reset),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
