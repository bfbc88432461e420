/* Memory: zeroed, checked, and every failure said. */
#include "base/alloc.h"
#include "support/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static int restore(void **state) {
  (void)state;
  fault_reset();
  return 0;
}

static void memory_is_zeroed(void **state) {
  unsigned char *block = NULL;
  (void)state;
  assert_int_equal(EVEN_NEW_ARRAY(&block, 1000), EVEN_OK);
  for (size_t i = 0; i < 1000; i++) {
    assert_int_equal(block[i], 0);
  }
  even_free(block);
}

static void nothing_asked_gives_a_pointer(void **state) {
  void *block = NULL;
  (void)state;
  assert_int_equal(even_alloc(0, 8, &block), EVEN_OK);
  assert_non_null(block);
  even_free(block);
  even_free(NULL);
}

static void too_much_is_an_overflow(void **state) {
  void *block = &block;
  void *kept = NULL;
  (void)state;
  assert_int_equal(even_alloc(SIZE_MAX / 2, 3, &block), EVEN_ERR_OVERFLOW);
  assert_null(block);
  assert_int_equal(even_alloc(4, 1, &kept), EVEN_OK);
  void *before = kept;
  assert_int_equal(even_realloc(&kept, SIZE_MAX / 2, 3), EVEN_ERR_OVERFLOW);
  assert_ptr_equal(kept, before);
  even_free(kept);
}

static void a_failed_growth_keeps_the_old_block(void **state) {
  char *text = NULL;
  (void)state;
  fault_allocation(2);
  assert_int_equal(even_duplicate("kept", &text), EVEN_OK);
  assert_int_equal(even_realloc((void **)&text, 100, 1), EVEN_ERR_MEMORY);
  assert_string_equal(text, "kept");
  assert_int_equal(even_realloc((void **)&text, 100, 1), EVEN_OK);
  assert_string_equal(text, "kept");
  assert_int_equal(fault_live_blocks(), 1);
  even_free(text);
  assert_int_equal(fault_live_blocks(), 0);
}

static even_status duplicate_twice(void *context) {
  char *one = NULL;
  char *two = NULL;
  (void)context;
  even_status status = even_duplicate("one", &one);
  if (status == EVEN_OK) {
    status = even_duplicate("two", &two);
  }
  even_free(one);
  even_free(two);
  return status;
}

static void each_allocation_may_fail(void **state) {
  (void)state;
  assert_int_equal(fault_each_allocation(duplicate_twice, NULL), 2);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(memory_is_zeroed, restore),
      cmocka_unit_test_teardown(nothing_asked_gives_a_pointer, restore),
      cmocka_unit_test_teardown(too_much_is_an_overflow, restore),
      cmocka_unit_test_teardown(a_failed_growth_keeps_the_old_block, restore),
      cmocka_unit_test_teardown(each_allocation_may_fail, restore),
  };
  return cmocka_run_group_tests_name("base_alloc", tests, NULL, NULL);
}
