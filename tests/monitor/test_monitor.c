/* A monitor over rings and a real database: everything that was written is read back, also after a restart or a crash.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/json_reader.h"
#include "monitor/analysis.h"
#include "monitor/monitored.h"
#include "monitor/parts.h"
#include "monitor/report.h"
#include "monitor/view.h"
#include "os/clock.h"

#include <math.h>
#include <sqlite3.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void everything_comes_back(void **state) {
  monitored *made = *state;
  even_history *history = NULL;
  even_analysis analysis;
  struct stat facts;
  monitored_start(made);
  assert_int_equal(stat(monitored_path(made, "agent.json"), &facts), 0);
  assert_int_equal(facts.st_mode & 0777, 0600);
  assert_true(even_history_alive(made->folder));
  feed_event(&made->ranks, 1, EVEN_EVENT_TOTAL_STEPS, 60, "");
  feed_event(&made->ranks, 0, EVEN_EVENT_SHARES, 0, "8,8");
  feed_event(&made->ranks, 1, EVEN_EVENT_SHARES, 0, "8,8");
  feed_event(&made->ranks, 1, EVEN_EVENT_MESSAGE, 7, "caf\xc3\xa9 \xff\x01 cut in the charact\xc3\xa9");
  monitored_steps(made, 20, 8);
  monitored_steps(made, 40, 13);
  even_monitor_rank_ended(made->monitor, 1, "exit code 3");
  assert_int_equal(even_monitor_close(made->monitor, 3), EVEN_OK);
  assert_int_equal(access(monitored_path(made, "agent.json"), F_OK), -1);
  assert_int_equal(access(monitored_path(made, "run.db-wal"), F_OK), -1);

  assert_int_equal(even_history_open(made->folder, &history), EVEN_OK);
  even_state *back = even_history_state(history);
  even_measure measure;
  even_state_measure(back, 0, &measure);
  assert_true(even_history_ended(history));
  assert_int_equal(measure.phase, EVEN_PHASE_FAILED);
  assert_int_equal(back->exit_code, 3);
  assert_int_equal(measure.step, 59);
  assert_int_equal(measure.total, 60);
  assert_string_equal(back->rank[1].cause, "exit code 3");
  assert_float_equal(back->rank[1].cores, 0.25, 0);
  assert_true(isnan(back->rank[0].quota));
  assert_float_equal(measure.rank[0].share_samples, 13, 1e-6F);
  /* two communication spans a step were summed */
  assert_int_equal(back->rank[0].span_bytes[EVEN_SPAN_COMMUNICATION], 60 * 1000000);
  int shares = 0;
  for (uint64_t i = 0; i < back->event_count; i++) {
    shares += back->events[i].event == EVEN_EVENT_SHARES;
    if (back->events[i].event == EVEN_EVENT_MESSAGE) {
      assert_string_equal(back->events[i].words, "caf\xc3\xa9 ?? cut in the charact\xc3\xa9");
    }
  }
  assert_int_equal(shares, 1);

  assert_int_equal(even_analysis_make(history, &analysis), EVEN_OK);
  assert_int_equal(analysis.steps, 60);
  assert_int_equal(analysis.steady_steps, 50);
  assert_float_equal(analysis.samples_per_second, 4826.546F, 1);
  assert_float_equal(analysis.best_samples_per_second, 5000, 1);
  assert_float_equal(analysis.efficiency, 0.965, 0.001);
  even_analysis_free(&analysis);
  even_history_close(history);
}

static int64_t pid_of_rank_1(const char *path) {
  sqlite3 *connection = NULL;
  sqlite3_stmt *row = NULL;
  assert_int_equal(sqlite3_open(path, &connection), SQLITE_OK);
  assert_int_equal(sqlite3_prepare_v2(connection, "SELECT pid FROM ranks WHERE rank = 1 AND ended = 1", -1, &row, NULL),
                   SQLITE_OK);
  assert_int_equal(sqlite3_step(row), SQLITE_ROW);
  int64_t pid = sqlite3_column_int64(row, 0);
  assert_int_equal(sqlite3_finalize(row), SQLITE_OK);
  assert_int_equal(sqlite3_close(connection), SQLITE_OK);
  return pid;
}

/* Ranks may end at different times: one that is done is not up until the last has ended, too. */
static void a_rank_that_is_gone_is_not_up(void **state) {
  monitored *made = *state;
  even_history *history = NULL;
  monitored_start(made);
  monitored_steps(made, 10, 8);
  even_monitor_rank_gone(made->monitor, 1);
  assert_int_equal(made->monitor->state->rank[0].pid, getpid());
  assert_int_equal(made->monitor->state->rank[1].pid, 0);
  even_monitor_rank_ended(made->monitor, 1, "ended with code 0");
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  assert_int_equal(pid_of_rank_1(monitored_path(made, "run.db")), getpid()); /* which it was stays known */
  assert_int_equal(even_history_open(made->folder, &history), EVEN_OK);
  assert_string_equal(even_history_state(history)->rank[1].cause, "ended with code 0");
  assert_int_equal(even_history_state(history)->rank[1].pid, 0);
  even_history_close(history);
}

static void a_restart_is_told_apart(void **state) {
  monitored *made = *state;
  even_history *history = NULL;
  even_analysis analysis;
  monitored_start(made);
  monitored_steps(made, 30, 13);
  even_monitor_rank_ended(made->monitor, 1, "killed by SIGKILL");
  made->ranks.step = 20; /* from the checkpoint of step 20 on, again */
  even_monitor_attempt(made->monitor, 1);
  even_monitor_rank_started(made->monitor, 1, getpid());
  monitored_steps(made, 30, 13);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  assert_int_equal(even_history_open(made->folder, &history), EVEN_OK);
  assert_int_equal(even_history_state(history)->attempt, 1);
  assert_int_equal(even_analysis_make(history, &analysis), EVEN_OK);
  assert_int_equal(analysis.steps, 50); /* 20 to 29 count once */
  even_analysis_free(&analysis);
  even_history_close(history);
}

/* Whoever reads run.db sees a restart that is still starting, as the page does. */
static void a_restart_without_a_step_is_told(void **state) {
  monitored *made = *state;
  even_history *history = NULL;
  even_report *report = NULL;
  even_measure measure;
  even_text view = EVEN_TEXT_EMPTY;
  monitored_start(made);
  monitored_steps(made, 30, 13);
  for (int attempt = 1; attempt < 3; attempt++) {
    even_monitor_rank_ended(made->monitor, 1, "killed by SIGKILL");
    even_monitor_attempt(made->monitor, attempt);
    even_monitor_rank_started(made->monitor, 1, getpid());
  }
  monitored_committed(made);
  assert_int_equal(even_history_open(made->folder, &history), EVEN_OK); /* as `evenstep top` does */
  even_state_measure(even_history_state(history), even_clock_ns(), &measure);
  assert_int_equal(measure.phase, EVEN_PHASE_STARTING);
  assert_int_equal(measure.attempt, 2);
  even_view_draw(even_history_state(history), even_clock_ns(), 80, false, &view);
  assert_non_null(strstr(even_text_string(&view), "test  starting (restart 2)"));
  even_text_free(&view);
  made->ranks.now_ns = even_clock_ns();
  made->ranks.step = 20;
  monitored_steps(made, 30, 13);
  monitored_committed(made);
  assert_int_equal(even_history_read(history), EVEN_OK);
  even_state_measure(even_history_state(history), made->ranks.now_ns, &measure);
  assert_int_equal(measure.phase, EVEN_PHASE_TRAINING);
  even_history_close(history);
  even_monitor_attempt(made->monitor, 3); /* and fails before its first step */
  assert_int_equal(even_monitor_close(made->monitor, 1), EVEN_OK);
  const even_report_params params = {.folder = made->folder};
  assert_int_equal(even_report_open(&params, &report), EVEN_OK);
  even_text json = EVEN_TEXT_EMPTY;
  even_report_json(report, &json);
  assert_non_null(strstr(even_text_string(&json), "\"restarts\": 3"));
  even_text_free(&json);
  even_report_close(report);
}

/* The page's data must parse as JSON and not end their script element, whatever the run was called. */
static void the_report_page_holds_its_data_safely(void **state) {
  monitored *made = *state;
  monitored_start(made);
  monitored_steps(made, 30, 13);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  json_t *parsed = monitored_page(made);
  assert_string_equal(json_string_value(json_object_get(json_object_get(parsed, "summary"), "command")),
                      "evenstep run --name </script><!-- train.py");
  json_decref(parsed);
}

static void an_interrupted_run_is_not_a_failed_one(void **state) {
  monitored *made = *state;
  even_history *history = NULL;
  even_measure measure;
  monitored_start(made);
  monitored_steps(made, 20, 8);
  assert_int_equal(even_monitor_close(made->monitor, 130), EVEN_OK);
  assert_int_equal(even_history_open(made->folder, &history), EVEN_OK);
  even_state_measure(even_history_state(history), 0, &measure);
  assert_int_equal(measure.phase, EVEN_PHASE_INTERRUPTED);
  assert_string_equal(even_phase_text(measure.phase), "interrupted");
  even_history_close(history);
}

/* An agent killed outright leaves a database without an end, and perhaps its agent.json. */
static void a_crashed_run_is_reported_as_far_as_it_came(void **state) {
  monitored *made = *state;
  monitored_start(made);
  monitored_steps(made, 30, 13);
  even_history *history = NULL;
  /* what a reader sees while the monitor lives and after it died is the same file: no close has run */
  assert_int_equal(even_history_open(made->folder, &history), EVEN_OK);
  assert_false(even_history_ended(history));
  even_history_give_up(history);
  even_measure measure;
  even_state_measure(even_history_state(history), even_clock_ns(), &measure);
  assert_int_equal(measure.phase, EVEN_PHASE_FAILED);
  even_history_close(history);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
}

/* Its folder is another job's by then. */
static void what_is_left_is_written_to_no_more(void **state) {
  monitored *made = *state;
  even_history *history = NULL;
  monitored_start(made);
  monitored_steps(made, 30, 13);
  even_monitor_leave(made->monitor);
  even_monitor_leave(NULL);
  assert_int_equal(even_history_open(made->folder, &history), EVEN_OK);
  assert_false(even_history_ended(history));
  even_history_close(history);
  assert_int_not_equal(access(monitored_path(made, "report.html"), F_OK), 0);
  assert_int_equal(access(monitored_path(made, "run.db-wal"), F_OK), 0);
}

static void a_run_without_a_step_is_reported(void **state) {
  monitored *made = *state;
  even_report *report = NULL;
  even_text text = EVEN_TEXT_EMPTY;
  monitored_start(made);
  assert_int_equal(even_monitor_close(made->monitor, 1), EVEN_OK);
  const even_report_params params = {.folder = made->folder, .other = made->folder};
  assert_int_equal(even_report_open(&params, &report), EVEN_OK);
  even_report_lines(report, false, &text);
  assert_int_equal(even_text_status(&text), EVEN_OK);
  assert_non_null(strstr(even_text_string(&text), "No step was measured."));
  even_text_free(&text);
  even_report_close(report);
}

static void expect_no_report(const monitored *made, even_status expected, const char *words) {
  even_report *report = NULL;
  const even_report_params params = {.folder = made->folder};
  assert_int_equal(even_report_open(&params, &report), expected);
  assert_null(report);
  if (strstr(even_error_last()->what, words) == NULL) {
    fail_msg("%s is not in: %s", words, even_error_last()->what);
  }
}

static void what_is_no_history_is_refused(void **state) {
  monitored *made = *state;
  expect_no_report(made, EVEN_ERR_NOT_FOUND, "is no run");
  monitored_put(made, "run.db",
                "this is no database, and long enough to be looked at as one ..............................."
                "........................................................................................");
  expect_no_report(made, EVEN_ERR_CORRUPT, "file is not a database");
  monitored_put(made, "run.db", "");
  expect_no_report(made, EVEN_ERR_CORRUPT, "no history of an evenstep run");
}

static void a_damaged_history_is_one_error(void **state) {
  monitored *made = *state;
  monitored_start(made);
  monitored_steps(made, 400, 13);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  FILE *file = fopen(monitored_path(made, "run.db"), "r+");
  assert_non_null(file);
  assert_int_equal(fseek(file, 30000, SEEK_SET), 0);
  for (int i = 0; i < 60000; i++) {
    (void)fputc(0x5a, file);
  }
  assert_int_equal(fclose(file), 0);
  expect_no_report(made, EVEN_ERR_CORRUPT, "run.db cannot be read");
}

static void a_plan_is_compared_or_refused(void **state) {
  monitored *made = *state;
  even_report *report = NULL;
  even_text text = EVEN_TEXT_EMPTY;
  monitored_start(made);
  monitored_steps(made, 30, 13);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  monitored_put(
      made, "plan.json",
      "{\"format\":\"evenstep-plan-1\",\"predicted\":{\"balanced\":{\"step_seconds\":0.0033,\"samples_per_second\":"
      "4850},"
      "\"equal\":{\"step_seconds\":0.008,\"samples_per_second\":2000},\"bound_samples_per_second\":5000}}");
  const even_report_params params = {.folder = made->folder};
  assert_int_equal(even_report_open(&params, &report), EVEN_OK);
  even_report_lines(report, false, &text);
  assert_non_null(strstr(even_text_string(&text), "4850"));
  even_text_free(&text);
  even_report_close(report);
  monitored_put(made, "plan.json", "{\"format\":");
  expect_no_report(made, EVEN_ERR_INPUT, "plan.json is not valid JSON");
  monitored_put(made, "plan.json", "{\"format\":\"other\"}");
  expect_no_report(made, EVEN_ERR_INPUT, "no plan");
}

static void the_run_before_is_kept_beside(void **state) {
  monitored *made = *state;
  monitored_start(made);
  monitored_steps(made, 5, 8);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  monitored_start(made);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  assert_int_equal(access(monitored_path(made, "run-previous.db"), F_OK), 0);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, monitored_set_up, monitored_tear_down)
  const struct CMUnitTest tests[] = {
      TEST(everything_comes_back),
      TEST(a_rank_that_is_gone_is_not_up),
      TEST(a_restart_is_told_apart),
      TEST(a_restart_without_a_step_is_told),
      TEST(the_report_page_holds_its_data_safely),
      TEST(an_interrupted_run_is_not_a_failed_one),
      TEST(a_crashed_run_is_reported_as_far_as_it_came),
      TEST(what_is_left_is_written_to_no_more),
      TEST(a_run_without_a_step_is_reported),
      TEST(what_is_no_history_is_refused),
      TEST(a_damaged_history_is_one_error),
      TEST(a_plan_is_compared_or_refused),
      TEST(the_run_before_is_kept_beside),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
