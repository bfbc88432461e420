/* What counts as a JSON object: what the reader of the program takes, and nothing else. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/json_check.h"
#include "base/json_reader.h"

#include <string.h>

static void what_readers_take_passes(void **state) {
  static const char *const TEXTS[] = {
      "{}",
      " { } \n",
      "{\"a\":[1,-2,0,-0,3.5,1e3,1.5E-7,true,false,null,\"\",[],{}],\"b\":{\"c\":{}}}",
      "{\"\\u00e9\\n\\\"\\\\\\/\":\"\\ud83d\\ude00 \xc3\xa9\"}",
      "{\"a\":9223372036854775807,\"b\":-9223372036854775808}",
  };
  (void)state;
  for (size_t i = 0; i < sizeof TEXTS / sizeof TEXTS[0]; i++) {
    json_t *tree = NULL;
    assert_int_equal(even_json_parse("text", TEXTS[i], strlen(TEXTS[i]), &tree), EVEN_OK);
    json_decref(tree);
    assert_int_equal(even_json_check_object("text", TEXTS[i]), EVEN_OK);
  }
}

static void what_readers_refuse_does_not(void **state) {
  static const char *const TEXTS[] = {"",
                                      "{ } junk }",
                                      "{",
                                      "}",
                                      "[1}",
                                      "{\"a\"}",
                                      "{\"a\":}",
                                      "{\"a\":1,}",
                                      "{\"a\":[1,]}",
                                      "{a:1}",
                                      "{\"a\":NaN}",
                                      "{\"a\":Infinity}",
                                      "{\"a\":01}",
                                      "{\"a\":1.}",
                                      "{\"a\":.5}",
                                      "{\"a\":1e}",
                                      "{\"a\":-}",
                                      "{\"a\":1e400}",
                                      "{\"a\":9223372036854775808}",
                                      "{\"a\":\"x}",
                                      "{\"a\":\"\n\"}",
                                      "{\"a\":\"\\x\"}",
                                      "{\"a\":\"\\u12g4\"}",
                                      "{\"a\":\"\\u0000\"}",
                                      "{\"a\":\"\\ud800\"}",
                                      "{\"a\":\"\\udc00\"}",
                                      "{\"a\":\"\\ud800\\u0041\"}",
                                      "{\"a\":\"\xff\"}",
                                      "{\"a\":tru}",
                                      "{\"a\" 1}",
                                      "{\"a\":1 \"b\":2}",
                                      "{} {}",
                                      "{\"a\":\"\\",
                                      "{\"a\":'b'}"};
  (void)state;
  for (size_t i = 0; i < sizeof TEXTS / sizeof TEXTS[0]; i++) {
    json_t *tree = NULL;
    assert_int_equal(even_json_parse("text", TEXTS[i], strlen(TEXTS[i]), &tree), EVEN_ERR_INPUT);
    assert_int_equal(even_json_check_object("text", TEXTS[i]), EVEN_ERR_ARGUMENT);
    assert_non_null(strstr(even_error_last()->what, "text"));
  }
  assert_int_equal(even_json_check_object("text", "[1]"), EVEN_ERR_ARGUMENT);
}

static void depth_has_a_limit(void **state) {
  static char text[200001];
  (void)state;
  memset(text, '[', 200000);
  memcpy(text, "{\"a\":", 5);
  assert_int_equal(even_json_check_object("text", text), EVEN_ERR_ARGUMENT);
  assert_non_null(strstr(even_error_last()->what, "deep"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(what_readers_take_passes),
      cmocka_unit_test(what_readers_refuse_does_not),
      cmocka_unit_test(depth_has_a_limit),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
