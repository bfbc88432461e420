/* "Did you mean": near names are found, far ones are not offered. */
#include "base/nearest.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static const char *const NAMES[] = {"run", "devices", "profile", "plan", "top", "report", "ckpt", "doctor"};
enum { COUNT = sizeof NAMES / sizeof NAMES[0] };

static void slips_are_recognised(void **state) {
  (void)state;
  assert_string_equal(even_nearest("devces", NAMES, COUNT), "devices");
  assert_string_equal(even_nearest("rnu", NAMES, COUNT), "run"); /* neighbours swapped */
  assert_string_equal(even_nearest("profiles", NAMES, COUNT), "profile");
  assert_string_equal(even_nearest("ckptt", NAMES, COUNT), "ckpt");
  assert_string_equal(even_nearest("plan", NAMES, COUNT), "plan");
}

static void strangers_are_not_offered(void **state) {
  (void)state;
  assert_null(even_nearest("zzzzzzzz", NAMES, COUNT));
  assert_null(even_nearest("", NAMES, COUNT));
  assert_null(even_nearest("run", NAMES, 0));
}

static void long_words_are_no_danger(void **state) {
  char word[200];
  (void)state;
  memset(word, 'a', sizeof word - 1);
  word[sizeof word - 1] = '\0';
  const char *const names[] = {word, "short"};
  assert_null(even_nearest(word, NAMES, COUNT));
  assert_null(even_nearest("aaaa", names, 2));
  word[63] = '\0';
  assert_ptr_equal(even_nearest(word, names, 2), word);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(slips_are_recognised),
      cmocka_unit_test(strangers_are_not_offered),
      cmocka_unit_test(long_words_are_no_danger),
  };
  return cmocka_run_group_tests_name("base_nearest", tests, NULL, NULL);
}
