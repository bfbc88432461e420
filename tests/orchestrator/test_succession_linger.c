/* How long a leader that has ended its job stays. */
#include "orchestrator/succession_linger.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>

#include <cmocka.h>

enum { BEGUN = 1000, PATIENCE = 300 };

static uint64_t until(const even_voter_view *view) {
  return even_succession_linger_until(view, BEGUN, PATIENCE);
}

static void it_stays_for_nobody_where_all_have_the_word(void **state) {
  const even_voter_view view = {.untold = false};
  (void)state;
  assert_int_equal(until(&view), 0);
}

static void it_stays_for_one_that_is_missing_for_as_long_as_that_one_waits(void **state) {
  const even_voter_view before = {.missing_ns = 900};
  const even_voter_view later = {.missing_ns = 1200}; /* it was untold, until its connection was known to be broken */
  (void)state;
  assert_int_equal(until(&before), 1200);
  assert_int_equal(until(&later), 1500);
}

/* Its host is dead, and it is still missing. */
static void one_that_is_missing_for_long_leaves_the_others_their_time(void **state) {
  even_voter_view view = {.missing_ns = 100, .untold = true};
  (void)state;
  assert_int_equal(until(&view), 1300);
  view.untold = false;
  assert_true(until(&view) < BEGUN);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(it_stays_for_nobody_where_all_have_the_word),
      cmocka_unit_test(it_stays_for_one_that_is_missing_for_as_long_as_that_one_waits),
      cmocka_unit_test(one_that_is_missing_for_long_leaves_the_others_their_time),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
