/* Checked arithmetic at the edges. */
#include "base/checked.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

static void sums_and_products_say_when_they_overflow(void **state) {
  size_t size = 7;
  (void)state;
  assert_true(even_add_size(SIZE_MAX - 1, 1, &size));
  assert_true(size == SIZE_MAX);
  assert_false(even_add_size(SIZE_MAX, 1, &size));
  assert_true(even_multiply_size(SIZE_MAX / 4, 4, &size));
  assert_false(even_multiply_size(SIZE_MAX / 4 + 1, 4, &size));
}

static void alignment_rounds_up(void **state) {
  size_t size = 0;
  (void)state;
  assert_true(even_align_size(0, 64, &size));
  assert_int_equal(size, 0);
  assert_true(even_align_size(1, 64, &size));
  assert_int_equal(size, 64);
  assert_true(even_align_size(64, 64, &size));
  assert_int_equal(size, 64);
  assert_false(even_align_size(SIZE_MAX, 64, &size));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(sums_and_products_say_when_they_overflow),
      cmocka_unit_test(alignment_rounds_up),
  };
  return cmocka_run_group_tests_name("base_checked", tests, NULL, NULL);
}
