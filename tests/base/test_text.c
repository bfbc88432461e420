/* A growing string: content, sticky errors, every allocation failing. */
#include "base/text.h"
#include "base/utf8.h"

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

static void appends_join(void **state) {
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  assert_string_equal(even_text_string(&text), "");
  even_text_add(&text, "one");
  even_text_append(&text, ", twofold", 5);
  even_text_format(&text, " %d%%", 3);
  assert_int_equal(even_text_status(&text), EVEN_OK);
  assert_string_equal(even_text_string(&text), "one, two 3%");
  assert_int_equal(text.length, 11);
  even_text_clear(&text);
  assert_string_equal(even_text_string(&text), "");
  even_text_append(&text, "a\0b", 3);
  assert_int_equal(text.length, 3);
  even_text_free(&text);
  assert_string_equal(even_text_string(&text), "");
}

static void growth_keeps_everything(void **state) {
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  for (int i = 0; i < 10000; i++) {
    even_text_format(&text, "%05d", i);
  }
  assert_int_equal(even_text_status(&text), EVEN_OK);
  assert_int_equal(text.length, 50000);
  assert_int_equal(strncmp(text.data + 5L * 4321, "04321", 5), 0);
  even_text_free(&text);
}

static void the_first_failure_sticks(void **state) {
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  even_text_add(&text, "whole");
  fault_allocation(1);
  char big[100] = {0};
  memset(big, 'x', sizeof big - 1);
  even_text_add(&text, big);
  even_text_add(&text, "y");
  assert_int_equal(even_text_status(&text), EVEN_ERR_MEMORY);
  assert_string_equal(even_text_string(&text), "whole");
  fault_reset();
  even_text_clear(&text);
  even_text_add(&text, "again");
  assert_int_equal(even_text_status(&text), EVEN_OK);
  assert_string_equal(even_text_string(&text), "again");
  even_text_free(&text);
}

static void a_length_past_memory_is_an_overflow(void **state) {
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  even_text_add(&text, "x");
  even_text_append(&text, "y", SIZE_MAX);
  assert_int_equal(even_text_status(&text), EVEN_ERR_OVERFLOW);
  even_text_free(&text);
}

static even_status grow(void *context) {
  even_text text = EVEN_TEXT_EMPTY;
  (void)context;
  for (int i = 0; i < 100; i++) {
    even_text_format(&text, "line %d\n", i);
  }
  even_status status = even_text_status(&text);
  even_text_free(&text);
  return status;
}

static void each_allocation_may_fail(void **state) {
  (void)state;
  assert_true(fault_each_allocation(grow, NULL) > 2);
}

static void passwords_in_urls_are_not_shown(void **state) {
  static const char *const cases[][2] = {
      {"run --checkpoint-to sftp://me:p@ss@host/a@b -n 2", "run --checkpoint-to sftp://host/a@b -n 2"},
      {"simplecache::ftp://me@host s3://bucket/run@2 x@y", "simplecache::ftp://host s3://bucket/run@2 x@y"},
      {"a://b://c@d", "a://b://d"},
      {"://", "://"},
      {"://@", "://"},
      {"", ""},
      {"no URL: me@host", "no URL: me@host"},
  };
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    even_text text = EVEN_TEXT_EMPTY;
    even_text_add_shown(&text, cases[i][0]);
    assert_int_equal(even_text_status(&text), EVEN_OK);
    assert_string_equal(even_text_string(&text), cases[i][1]);
    even_text_free(&text);
  }
}

static void what_others_wrote_commands_no_terminal(void **state) {
  char out[64];
  (void)state;
  assert_string_equal(even_utf8_clean("weight.0 \xC3\xA9\xE2\x82\xAC", out, sizeof out),
                      "weight.0 \xC3\xA9\xE2\x82\xAC");
  assert_string_equal(even_utf8_clean("\x1B]52;c;eA==\a\r\n\x7F", out, sizeof out), "?]52;c;eA==????");
  assert_string_equal(even_utf8_clean("\xC2\x9B"
                                      "31m \x9B \xFF\xC3",
                                      out, sizeof out),
                      "?31m ? ??");
  assert_string_equal(even_utf8_clean("abc\xE2\x82\xAC", out, 6), "abc"); /* cut, but no character in two */
}

static void an_end_is_known(void **state) {
  (void)state;
  assert_true(even_ends_with("step.partial", ".partial") && even_ends_with(".partial", ".partial"));
  assert_true(even_ends_with("step", ""));
  assert_false(even_ends_with("partial", ".partial") || even_ends_with("step.partial1", ".partial"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(appends_join, restore),
      cmocka_unit_test_teardown(growth_keeps_everything, restore),
      cmocka_unit_test_teardown(the_first_failure_sticks, restore),
      cmocka_unit_test_teardown(a_length_past_memory_is_an_overflow, restore),
      cmocka_unit_test_teardown(each_allocation_may_fail, restore),
      cmocka_unit_test(passwords_in_urls_are_not_shown),
      cmocka_unit_test(an_end_is_known),
      cmocka_unit_test(what_others_wrote_commands_no_terminal),
  };
  return cmocka_run_group_tests_name("base_text", tests, NULL, NULL);
}
