/* Sizes and collectives as a user lists them. */
#include "base/fail.h"
#include "cli/bench_comm.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static void sizes_in_words_become_bytes(void **state) {
  even_text out = EVEN_TEXT_EMPTY;
  (void)state;
  assert_int_equal(even_bench_sizes("4,1K,64K,3M,1G", &out), EVEN_OK);
  assert_string_equal(even_text_string(&out), "4,1024,65536,3145728,1073741824");
  even_text_free(&out);
}

static void what_is_no_size_is_named(void **state) {
  static const char *const wrong[] = {"",
                                      "3",
                                      "0",
                                      "-4",
                                      "1X",
                                      "1KK",
                                      "1.5K",
                                      "2G",
                                      "1K,,2",
                                      "K",
                                      "1K,",
                                      " 4",
                                      "1048577K",
                                      "18446744073709551620",
                                      "99999999999999999999999999999"};
  (void)state;
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    even_text out = EVEN_TEXT_EMPTY;
    assert_int_equal(even_bench_sizes(wrong[i], &out), EVEN_ERR_USAGE);
    assert_non_null(strstr(even_error_last()->what, "--sizes"));
    even_text_free(&out);
  }
}

static void collectives_are_known_or_the_nearest_is_named(void **state) {
  (void)state;
  assert_int_equal(even_bench_collectives("all_reduce"), EVEN_OK);
  assert_int_equal(even_bench_collectives("send,broadcast,all_to_all,all_gather,reduce_scatter"), EVEN_OK);
  assert_int_equal(even_bench_collectives("all_reduce,brodcast"), EVEN_ERR_USAGE);
  assert_non_null(strstr(even_error_last()->fix, "did you mean broadcast?"));
  assert_int_equal(even_bench_collectives(""), EVEN_ERR_USAGE);
  assert_int_equal(even_bench_collectives("all_reduce,"), EVEN_ERR_USAGE);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(sizes_in_words_become_bytes),
      cmocka_unit_test(what_is_no_size_is_named),
      cmocka_unit_test(collectives_are_known_or_the_nearest_is_named),
  };
  return cmocka_run_group_tests_name("cli_bench_options", tests, NULL, NULL);
}
