/* The words between `evenstep chaos` and its parts on other hosts: what is written is read as it was, and all else is
 * refused. */
#include "base/fail.h"
#include "cli/chaos_act.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static even_chaos_act read_again(const even_chaos_act *act) {
  even_text text = EVEN_TEXT_EMPTY;
  even_chaos_act found;
  even_chaos_act_write(act, &text);
  assert_int_equal(even_text_status(&text), EVEN_OK);
  assert_int_equal(even_chaos_act_read(even_text_string(&text), &found), EVEN_OK);
  even_text_free(&text);
  return found;
}

static void every_act_comes_as_it_was_asked(void **state) {
  even_chaos_act act = {.verb = EVEN_CHAOS_DO,
                        .kind = EVEN_CHAOS_MEMORY,
                        .run = "a0-b1",
                        .rank = 3,
                        .pid = 4711,
                        .seconds = 0.1,
                        .dice = UINT64_MAX};
  (void)state;
  even_chaos_act found = read_again(&act);
  assert_int_equal(found.kind, EVEN_CHAOS_MEMORY);
  assert_string_equal(found.run, "a0-b1");
  assert_int_equal(found.rank, 3);
  assert_int_equal(found.pid, 4711);
  assert_true(found.seconds == 0.1);
  assert_true(found.dice == UINT64_MAX);
  act.verb = EVEN_CHAOS_LIVES;
  found = read_again(&act);
  assert_int_equal(found.verb, EVEN_CHAOS_LIVES);
  assert_int_equal(found.pid, 4711);
  act = (even_chaos_act){.verb = EVEN_CHAOS_FEED, .number = 12};
  found = read_again(&act);
  assert_int_equal(found.verb, EVEN_CHAOS_FEED);
  assert_int_equal(found.number, 12);
}

static void every_kind_that_is_done_there_has_words(void **state) {
  (void)state;
  for (int kind = 0; kind < EVEN_CHAOS_KINDS; kind++) {
    const even_chaos_act act = {
        .verb = EVEN_CHAOS_DO, .kind = (even_chaos_kind)kind, .run = "x", .pid = 5, .seconds = 1};
    if (even_chaos_is_done_there(act.kind)) {
      assert_int_equal(read_again(&act).kind, kind);
    }
  }
  assert_false(even_chaos_is_done_there(EVEN_CHAOS_CUT));
}

static void what_is_no_act_is_refused(void **state) {
  static const char *const lines[] = {
      "",
      "do",
      "die x 5",
      "do partition x 1 5 1 7",
      "do bit-flip x 1 5 1 7",
      "do kill x 1 1 1 7",
      "do kill x 1 0 1 7",
      "do kill x 1 -5 1 7",
      "do kill x -1 5 1 7",
      "do kill x 1 5 -1 7",
      "do kill x 1 5 nan 7",
      "do kill x 1 5 1e99 7",
      "do kill x 1 5 1 -7",
      "do kill x 1 5 1 7 8",
      "do kill x 1 5 1",
      "do kill x 1 99999999999 1 7",
      "do kill 0123456789012345678901234567890123456789012345678901234567890123 1 5 1 7",
      "lives x",
      "lives x 1",
      "look",
      "look -1",
      "look 1 2",
      "feed 1x",
  };
  char longest[400];
  even_chaos_act found;
  (void)state;
  for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
    assert_int_equal(even_chaos_act_read(lines[i], &found), EVEN_ERR_INPUT);
  }
  memset(longest, 'x', sizeof longest - 1);
  longest[sizeof longest - 1] = '\0';
  assert_int_equal(even_chaos_act_read(longest, &found), EVEN_ERR_INPUT);
}

static void every_answer_comes_as_it_was_given(void **state) {
  even_text text = EVEN_TEXT_EMPTY;
  even_chaos_answer found;
  const even_chaos_answer answers[] = {
      {.said = EVEN_CHAOS_SAID_DONE, .number = 7, .words = "rank 1 (process 5)"},
      {.said = EVEN_CHAOS_SAID_LATER},
      {.said = EVEN_CHAOS_SAID_NOT, .words = "it is not permitted"},
      {.said = EVEN_CHAOS_SAID_YES},
      {.said = EVEN_CHAOS_SAID_NO},
      {.said = EVEN_CHAOS_SAID_OPEN},
      {.said = EVEN_CHAOS_SAID_OVER, .lack = 2, .broken = true, .words = "3 of it"},
  };
  (void)state;
  for (size_t i = 0; i < sizeof answers / sizeof answers[0]; i++) {
    even_text_clear(&text);
    even_chaos_answer_write(&answers[i], &text);
    assert_int_equal(even_text_status(&text), EVEN_OK);
    assert_int_equal(even_chaos_answer_read(even_text_string(&text), &found), EVEN_OK);
    assert_int_equal(found.said, answers[i].said);
    assert_int_equal(found.number, answers[i].number);
    assert_int_equal(found.lack, answers[i].lack);
    assert_int_equal(found.broken, answers[i].broken);
    assert_string_equal(found.words, answers[i].words);
  }
  even_text_free(&text);
}

/* What a login shell prints is none. */
static void what_is_no_answer_is_refused(void **state) {
  static const char *const lines[] = {"",          "Welcome",    "done",       "done x",
                                      "done -1 a", "over 3 0 a", "over 1 2 a", "over 1"};
  even_chaos_answer found;
  (void)state;
  for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
    assert_int_equal(even_chaos_answer_read(lines[i], &found), EVEN_ERR_INPUT);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_act_comes_as_it_was_asked), cmocka_unit_test(every_kind_that_is_done_there_has_words),
      cmocka_unit_test(what_is_no_act_is_refused),       cmocka_unit_test(every_answer_comes_as_it_was_given),
      cmocka_unit_test(what_is_no_answer_is_refused),
  };
  return cmocka_run_group_tests_name("cli_chaos_act", tests, NULL, NULL);
}
