/* Clocks: units and direction. */
#include "os/calls.h"
#include "os/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static int a_known_time(clockid_t clock, struct timespec *out) {
  *out = (struct timespec){clock == CLOCK_REALTIME ? 1700000000 : 5, 25};
  return 0;
}

static void seconds_and_nanoseconds_are_joined(void **state) {
  (void)state;
  even_os.clock_gettime = a_known_time;
  assert_int_equal(even_clock_ns(), 5000000025u);
  assert_int_equal(even_clock_wall_ns(), 1700000000000000025u);
  assert_int_equal(even_clock_thread_cpu_ns(), 5000000025u);
  even_os = even_os_real;
}

static void the_monotonic_clock_never_goes_back(void **state) {
  (void)state;
  uint64_t last = even_clock_ns();
  for (int i = 0; i < 10000; i++) {
    uint64_t now = even_clock_ns();
    assert_true(now >= last);
    last = now;
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(seconds_and_nanoseconds_are_joined),
      cmocka_unit_test(the_monotonic_clock_never_goes_back),
  };
  return cmocka_run_group_tests_name("os_clock", tests, NULL, NULL);
}
