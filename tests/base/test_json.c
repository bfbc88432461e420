/* What the writer writes, the reader reads back; what is not JSON is refused with its place. */
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "base/utf8.h"
#include "support/fault.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
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

static void what_is_no_utf8_is_replaced(void **state) {
  static const char *const wrong[] = {
      "\x80", "\xE9",        "\xC3", "\xC0\xAF", "\xE2\x82", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xF0\x80\x80\xAF",
      "\xFF", "\xE0\x9F\xBF"};
  static const char right[] = "caf\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80 \xED\x9F\xBF \xF4\x8F\xBF\xBF \x7F";
  (void)state;
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0] + 1; i++) {
    char value[64];
    const char *piece = i == 0 ? right : wrong[i - 1];
    even_text text = EVEN_TEXT_EMPTY;
    json_t *parsed = NULL;
    (void)snprintf(value, sizeof value, "a%sb", piece);
    even_json json = even_json_begin(&text, 0);
    even_json_array(&json, NULL);
    even_json_string(&json, NULL, value);
    even_json_string(&json, NULL, piece); /* cut at the end of the text, too */
    even_json_array_end(&json);
    assert_int_equal(even_json_parse("sample", even_text_string(&text), text.length, &parsed), EVEN_OK);
    const char *back = json_string_value(json_array_get(parsed, 0));
    if (i == 0) {
      assert_string_equal(back, value);
      assert_true(even_utf8_valid(value));
    } else {
      assert_memory_equal(back, "a\xEF\xBF\xBD", 4);
      assert_int_equal(back[strlen(back) - 1], 'b');
      assert_false(even_utf8_valid(value));
    }
    json_decref(parsed);
    even_text_free(&text);
  }
}

static void a_cut_character_is_taken_away(void **state) {
  static const char whole[] = "e\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80";
  static const size_t kept[] = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10};
  (void)state;
  for (size_t cut = 0; cut < sizeof whole; cut++) {
    char text[sizeof whole] = "";
    memcpy(text, whole, cut);
    even_utf8_trim(text);
    assert_int_equal(strlen(text), kept[cut]);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(what_is_no_utf8_is_replaced),
      cmocka_unit_test(a_cut_character_is_taken_away),
      cmocka_unit_test_teardown(one_line_is_exact, restore),
      cmocka_unit_test_teardown(reads_back_with_indent, restore),
      cmocka_unit_test_teardown(not_json_is_refused_with_its_place, restore),
      cmocka_unit_test_teardown(each_allocation_may_fail, restore),
  };
  return cmocka_run_group_tests_name("base_json", tests, NULL, NULL);
}
