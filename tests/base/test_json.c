/* What the writer writes, the reader reads back; what is not JSON is refused with its place. */
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "support/fault.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static int restore(void **state) {
  (void)state;
  fault_reset();
  return 0;
}

static void write_sample(even_text *text, int indent) {
  even_json json = even_json_begin(text, indent);
  even_json_object(&json, NULL);
  even_json_string(&json, "quote \" back \\ line \n bell \a", "tab\t é");
  even_json_string(&json, "nothing", NULL);
  even_json_integer(&json, "least", INT64_MIN);
  even_json_unsigned(&json, "most", UINT64_MAX);
  even_json_array(&json, "numbers");
  even_json_number(&json, NULL, 0.1);
  even_json_number(&json, NULL, 1.0 / 3.0);
  even_json_number(&json, NULL, 1e300);
  even_json_number(&json, NULL, (double)NAN);
  even_json_bool(&json, NULL, true);
  even_json_null(&json, NULL);
  even_json_raw(&json, NULL, "[1,2]");
  even_json_array_end(&json);
  even_json_object(&json, "empty");
  even_json_object_end(&json);
  even_json_object_end(&json);
}

static void one_line_is_exact(void **state) {
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  write_sample(&text, 0);
  assert_string_equal(even_text_string(&text),
                      "{\"quote \\\" back \\\\ line \\n bell \\u0007\":\"tab\\t é\",\"nothing\":null,"
                      "\"least\":-9223372036854775808,\"most\":18446744073709551615,"
                      "\"numbers\":[0.1,0.3333333333333333,1e+300,null,true,null,[1,2]],\"empty\":{}}");
  even_text_free(&text);
}

static void reads_back_with_indent(void **state) {
  even_text text = EVEN_TEXT_EMPTY;
  json_t *value = NULL;
  (void)state;
  even_json json = even_json_begin(&text, 2);
  even_json_object(&json, NULL);
  even_json_array(&json, "a");
  even_json_number(&json, NULL, 1.0 / 3.0);
  even_json_string(&json, NULL, "x\n");
  even_json_array_end(&json);
  even_json_object_end(&json);
  assert_non_null(strstr(even_text_string(&text), "\n    \"x\\n\"\n  ]\n}"));
  assert_int_equal(even_json_parse("here", even_text_string(&text), text.length, &value), EVEN_OK);
  json_t *array = json_object_get(value, "a");
  assert_true(json_real_value(json_array_get(array, 0)) == 1.0 / 3.0);
  assert_string_equal(json_string_value(json_array_get(array, 1)), "x\n");
  json_decref(value);
  even_text_free(&text);
}

static void not_json_is_refused_with_its_place(void **state) {
  static const char *const WRONG[] = {"", "{", "{\"a\":1,}", "{\"a\":1,\"a\":2}", "[1] x", "\xff", "nul"};
  json_t *value = NULL;
  (void)state;
  for (size_t i = 0; i < sizeof WRONG / sizeof WRONG[0]; i++) {
    assert_int_equal(even_json_parse("profile.json", WRONG[i], strlen(WRONG[i]), &value), EVEN_ERR_INPUT);
    assert_null(value);
    assert_non_null(strstr(even_error_last()->what, "profile.json"));
    assert_non_null(strstr(even_error_last()->what, "line "));
  }
}

static even_status write_and_free(void *context) {
  even_text text = EVEN_TEXT_EMPTY;
  (void)context;
  write_sample(&text, 2);
  even_status status = even_text_status(&text);
  even_text_free(&text);
  return status;
}

static void each_allocation_may_fail(void **state) {
  (void)state;
  assert_true(fault_each_allocation(write_and_free, NULL) > 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(one_line_is_exact, restore),
      cmocka_unit_test_teardown(reads_back_with_indent, restore),
      cmocka_unit_test_teardown(not_json_is_refused_with_its_place, restore),
      cmocka_unit_test_teardown(each_allocation_may_fail, restore),
  };
  return cmocka_run_group_tests_name("base_json", tests, NULL, NULL);
}
