/* A rank that is slower for a while: event, table, report, page, view and terminal, with the cause that its host shows.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "monitor/monitored.h"
#include "monitor/parts.h"
#include "monitor/report.h"
#include "os/path.h"

#include <math.h>
#include <sqlite3.h>
#include <stdio.h>
#include <string.h>

static char told[2048];

static void take_notice(void *context, const char *text) {
  (void)context;
  size_t length = strlen(told);
  (void)snprintf(told + length, sizeof told - length, "%s|", text);
}

/* Steps of 32 ms. What its host shows of rank 1 is the test's. */
static void start(monitored *made) {
  told[0] = '\0';
  made->ranks.speeds[0] = 400;
  made->ranks.speeds[1] = 100;
  made->notice = take_notice;
  monitored_start(made);
  made->monitor->state->rank[1].elsewhere = true;
}

static void throttled(monitored *made, double part) {
  even_state_rank *at = &made->monitor->state->rank[1];
  at->usage_before = (even_rank_usage){.at_ns = 1000000000, .pressure = {NAN, NAN, NAN, NAN}};
  at->usage = (even_rank_usage){
      .at_ns = 2000000000, .cpu_seconds = 0.2, .throttled_seconds = part, .pressure = {NAN, NAN, NAN, NAN}};
}

/* As many ticks, in each of which usage is looked at. */
static void steps_and_looks(monitored *made, int steps, int looks) {
  monitored_steps(made, steps, 13);
  for (int i = 0; i < looks; i++) {
    made->monitor->looked_ns = 0;
    assert_int_equal(even_monitor_tick(made->monitor), EVEN_OK);
  }
}

static long number(const monitored *made, const char *query) {
  sqlite3 *history = NULL;
  sqlite3_stmt *row = NULL;
  assert_int_equal(sqlite3_open(monitored_path(made, "run.db"), &history), SQLITE_OK);
  assert_int_equal(sqlite3_prepare_v2(history, query, -1, &row, NULL), SQLITE_OK);
  assert_int_equal(sqlite3_step(row), SQLITE_ROW);
  long value = (long)sqlite3_column_int64(row, 0);
  assert_int_equal(sqlite3_finalize(row), SQLITE_OK);
  assert_int_equal(sqlite3_close(history), SQLITE_OK);
  return value;
}

static void expect_report(const monitored *made, const char *words) {
  even_report *report = NULL;
  even_text text = EVEN_TEXT_EMPTY;
  const even_report_params params = {.folder = made->folder};
  assert_int_equal(even_report_open(&params, &report), EVEN_OK);
  even_report_lines(report, false, &text);
  assert_int_equal(even_text_status(&text), EVEN_OK);
  if (strstr(even_text_string(&text), words) == NULL) {
    fail_msg("%s not in: %s", words, even_text_string(&text));
  }
  even_text_free(&text);
  even_report_close(report);
}

static void expect_told(const char *words, bool said) {
  if ((strstr(told, words) != NULL) != said) {
    fail_msg("%s: %s in: %s", words, said ? "not" : "still", told);
  }
}

static void a_slow_rank_is_told_when_it_begins_and_when_it_ends(void **state) {
  monitored *made = *state;
  even_text view = EVEN_TEXT_EMPTY;
  char host[64];
  char words[256];
  even_host_name(host, sizeof host);
  start(made);
  steps_and_looks(made, 100, 1);
  made->ranks.speeds[1] = 25;
  throttled(made, 0.75);
  steps_and_looks(made, 10, 3);
  expect_told("slower", false); /* not for long enough yet */
  steps_and_looks(made, 50, 1);
  (void)snprintf(words, sizeof words,
                 "rank 1 (cpu:1 on %s) is 4.0x slower since step 100: CPU quota, stopped by its CPU quota 75%% of the "
                 "time|",
                 host);
  expect_told(words, true);
  assert_int_equal(even_monitor_view(made->monitor, 400, false, &view), EVEN_OK);
  assert_non_null(strstr(even_text_string(&view), "is 4.0x slower since step 100: CPU quota"));
  even_text_free(&view);
  made->ranks.speeds[1] = 100;
  throttled(made, 0);
  steps_and_looks(made, 60, 2);
  (void)snprintf(words, sizeof words, "rank 1 (cpu:1 on %s) was 4.0x slower from step 100 to 159 (7.34 s): CPU quota",
                 host);
  expect_told(words, true);
  assert_int_equal(even_monitor_view(made->monitor, 400, false, &view), EVEN_OK);
  assert_null(strstr(even_text_string(&view), "slower since")); /* it is over */
  even_text_free(&view);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);

  expect_report(made, words);
  assert_int_equal(number(made, "SELECT count(*) FROM events WHERE event='straggler' AND rank=1"), 2);
  assert_int_equal(number(made, "SELECT count(*) FROM events WHERE event='straggler' AND value=0 AND step=159"), 1);
  assert_int_equal(
      number(made, "SELECT count(*) FROM events WHERE event='straggler' AND step=100 AND value BETWEEN 390 AND 410"),
      1);
  assert_int_equal(number(made, "SELECT count(*) FROM stragglers"), 1);
  assert_int_equal(number(made,
                          "SELECT count(*) FROM stragglers WHERE rank=1 AND device='cpu:1' AND cause='quota' AND "
                          "factor BETWEEN 3.9 AND 4.1 AND begin_step=100 AND end_step=159 AND end_ns>begin_ns"),
                   1);
  json_t *data = monitored_page(made);
  const json_t *one = json_array_get(json_object_get(json_object_get(data, "summary"), "stragglers"), 0);
  assert_int_equal(json_integer_value(json_object_get(one, "begin_step")), 100);
  assert_int_equal(json_integer_value(json_object_get(one, "end_step")), 159);
  assert_string_equal(json_string_value(json_object_get(one, "cause")), "quota");
  assert_string_equal(json_string_value(json_object_get(one, "host")), host);
  assert_true(json_is_false(json_object_get(one, "lasts")));
  json_decref(data);
}

static void what_lasts_is_over_with_its_process(void **state) {
  monitored *made = *state;
  start(made);
  steps_and_looks(made, 60, 1);
  made->ranks.speeds[1] = 20;
  steps_and_looks(made, 60, 3); /* its host shows nothing */
  expect_told("is 5.0x slower since step 60: cause unknown|", true);
  even_monitor_rank_gone(made->monitor, 1);
  expect_told("was 5.0x slower from step 60 to 119", true);
  told[0] = '\0';
  steps_and_looks(made, 60, 3); /* of another process: as fast as it is */
  even_monitor_attempt(made->monitor, 1);
  made->ranks.step = 0;
  steps_and_looks(made, 60, 3);
  expect_told("slower", false);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  assert_int_equal(number(made, "SELECT count(*) FROM stragglers WHERE end_step IS NOT NULL"), 1);
}

static void a_rank_slow_from_its_start_is_told_with_a_cause_alone(void **state) {
  monitored *made = *state;
  start(made);
  steps_and_looks(made, 60, 8); /* rank 1 is four times slower as it is made */
  expect_told("slower", false);
  throttled(made, 0.75);
  steps_and_looks(made, 20, 2);
  expect_told("slower", false);
  steps_and_looks(made, 20, 3);
  expect_told("slower since step 0: CPU quota", true);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  expect_report(made, "slower from step 0 to 99");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_slow_rank_is_told_when_it_begins_and_when_it_ends, monitored_set_up,
                                      monitored_tear_down),
      cmocka_unit_test_setup_teardown(what_lasts_is_over_with_its_process, monitored_set_up, monitored_tear_down),
      cmocka_unit_test_setup_teardown(a_rank_slow_from_its_start_is_told_with_a_cause_alone, monitored_set_up,
                                      monitored_tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
