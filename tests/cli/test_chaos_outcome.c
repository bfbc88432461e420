/* What `evenstep chaos` tells of killed agents, and of ranks without memory: what Evenstep survived by itself is
 * counted apart from what was started again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cli/chaos.h"

#include <string.h>

static const char *sum_of(const even_chaos_done *done, size_t count, even_text *text) {
  even_text_clear(text);
  even_chaos_tended_sum(done, count, text);
  assert_int_equal(even_text_status(text), EVEN_OK);
  return even_text_string(text);
}

static void each_way_is_counted_apart(void **state) {
  static const even_chaos_done done[] = {{.tended = EVEN_CHAOS_OUTLASTED}, {.tended = EVEN_CHAOS_RESUMED_BY_US},
                                         {.tended = EVEN_CHAOS_OUTLASTED}, {.tended = EVEN_CHAOS_BEGUN_ANEW},
                                         {.tended = EVEN_CHAOS_REPLACED},  {.injected = true}};
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  assert_string_equal(
      sum_of(done, sizeof done / sizeof *done, &text),
      "agents killed: 2 outlasted by their ranks; 1 followed by another one and a new attempt; 1 replaced "
      "by another host's; 1 with the first process: chaos resumed the job\n");
  assert_string_equal(sum_of(done + 5, 1, &text), "");
  even_text_free(&text);
}

static void lack_that_hurt_nobody_is_told(void **state) {
  static const even_chaos_done done[] = {
      {.lack = EVEN_CHAOS_LACK_BORNE}, {.lack = EVEN_CHAOS_LACK_HURT}, {.lack = EVEN_CHAOS_LACK_UNKNOWN}};
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  assert_string_equal(sum_of(done, 3, &text),
                      "out-of-memory hurt 1 of 2 ranks: the others needed none, or did without\n");
  assert_string_equal(sum_of(done + 1, 2, &text), "");
  even_text_free(&text);
}

static void as_json(void **state) {
  static const even_chaos_done agent = {.tended = EVEN_CHAOS_RESUMED_BY_US};
  static const even_chaos_done lack = {.lack = EVEN_CHAOS_LACK_BORNE};
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  (void)state;
  even_json_object(&json, NULL);
  even_chaos_outcome_json(&agent, &json);
  even_json_object_end(&json);
  assert_non_null(strstr(even_text_string(&text), "\"agent\":\"resumed_by_chaos\""));
  assert_non_null(strstr(even_text_string(&text), "\"hurt\":null"));
  even_text_clear(&text);
  json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_chaos_outcome_json(&lack, &json);
  even_json_object_end(&json);
  assert_non_null(strstr(even_text_string(&text), "\"agent\":null"));
  assert_non_null(strstr(even_text_string(&text), "\"hurt\":false"));
  even_text_free(&text);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(each_way_is_counted_apart),
                                     cmocka_unit_test(lack_that_hurt_nobody_is_told), cmocka_unit_test(as_json)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
