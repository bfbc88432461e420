/* Walking over JSON that was checked. */
#include "base/json_check.h"
#include "base/json_walk.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static even_json_walk root_of(const char *text) {
  assert_int_equal(even_json_check_object("text", text), EVEN_OK);
  return even_json_walk_begin(text);
}

static void members_come_in_order_whatever_lies_between(void **state) {
  static const char text[] =
      " { \"a\" : 1.5e1 ,\n\"skipped\":{\"x\":[1,{\"y\":\"}]\\\"\"}],\"z\":null},\"b\":\"two\", \"c\":[ ],\"d\":-0.5}";
  char name[16];
  double number = 0;
  even_json_walk inside;
  even_json_walk value;
  even_json_walk elements;
  (void)state;
  assert_true(even_json_walk_enter(root_of(text), '{', &inside));
  assert_true(even_json_walk_member(&inside, name, sizeof name, &value));
  assert_string_equal(name, "a");
  assert_true(even_json_walk_number(value, &number) && number == 15);
  assert_true(even_json_walk_member(&inside, name, sizeof name, &value));
  assert_string_equal(name, "skipped");
  assert_false(even_json_walk_number(value, &number));
  assert_true(even_json_walk_member(&inside, name, sizeof name, &value));
  char word[8];
  assert_true(even_json_walk_string(value, word, sizeof word));
  assert_string_equal(word, "two");
  assert_true(even_json_walk_member(&inside, name, sizeof name, &value));
  assert_string_equal(name, "c");
  assert_false(even_json_walk_enter(value, '{', &elements));
  assert_true(even_json_walk_enter(value, '[', &elements));
  assert_false(even_json_walk_element(&elements, &value));
  assert_true(even_json_walk_member(&inside, name, sizeof name, &value));
  assert_true(even_json_walk_number(value, &number) && number == -0.5);
  assert_false(even_json_walk_member(&inside, name, sizeof name, &value));
  assert_false(even_json_walk_member(&inside, name, sizeof name, &value));
}

static void elements_of_all_kinds(void **state) {
  static const char text[] = "{\"all\":[true, null ,\"s\",[1,2],{\"k\":3},4]}";
  static const char kinds[] = "tn\"[{4";
  char name[8];
  even_json_walk inside;
  even_json_walk list;
  even_json_walk value;
  (void)state;
  assert_true(even_json_walk_enter(root_of(text), '{', &inside));
  assert_true(even_json_walk_member(&inside, name, sizeof name, &list));
  assert_true(even_json_walk_enter(list, '[', &inside));
  for (size_t i = 0; kinds[i] != '\0'; i++) {
    assert_true(even_json_walk_element(&inside, &value));
    assert_int_equal(*value.at, kinds[i]);
  }
  assert_false(even_json_walk_element(&inside, &value));
}

static void strings_are_read_as_utf8(void **state) {
  static const char text[] =
      "{\"k\":\"a\\n\\\"\\\\\\/\\t\\u0041\\u00e9\\u20ac\\ud83d\\ude00 é\",\"a name that is long\":1}";
  char name[8];
  char out[64];
  even_json_walk inside;
  even_json_walk value;
  (void)state;
  assert_true(even_json_walk_enter(root_of(text), '{', &inside));
  assert_true(even_json_walk_member(&inside, name, sizeof name, &value));
  assert_true(even_json_walk_string(value, out, sizeof out));
  assert_string_equal(out, "a\n\"\\/\tA\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80 \xc3\xa9");
  size_t length = strlen(out);
  assert_false(even_json_walk_string(value, out, length));
  assert_true(even_json_walk_string(value, out, length + 1));
  assert_true(even_json_walk_member(&inside, name, sizeof name, &value));
  assert_string_equal(name, "");
  assert_false(even_json_walk_string(value, out, sizeof out));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(members_come_in_order_whatever_lies_between),
      cmocka_unit_test(elements_of_all_kinds),
      cmocka_unit_test(strings_are_read_as_utf8),
  };
  return cmocka_run_group_tests_name("base_json_walk", tests, NULL, NULL);
}
