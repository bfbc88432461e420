/* A history whose old steps were merged tells what the one that keeps them all tells. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/json_reader.h"
#include "monitor/analysis.h"
#include "monitor/database.h"
#include "monitor/json.h"

#include <math.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
  RANKS = 2,
  STEPS = 3000,
  RESTARTED_AT = 2600,
  RESTARTED_FROM = 2005,
  FEW_ROWS = 1000,
  MOST_ROWS = 1250,
  COMMIT_EVERY = 25
};

typedef struct written {
  char folder[64];
  even_database *database;
  uint64_t steps; /* written */
} written;

static char *path_of(const written *made) {
  static char path[96];
  (void)snprintf(path, sizeof path, "%s/run.db", made->folder);
  return path;
}

static void begin(written *made, int64_t most_rows) {
  made->steps = 0;
  (void)snprintf(made->folder, sizeof made->folder, "/tmp/evenstep-test-XXXXXX");
  assert_non_null(mkdtemp(made->folder));
  assert_int_equal(
      even_database_create(path_of(made), &(even_database_limits){.step_rows = most_rows, .ranks = 1}, &made->database),
      EVEN_OK);
  assert_int_equal(even_database_meta(made->database, "format", "evenstep-run-1"), EVEN_OK);
  assert_int_equal(even_database_meta(made->database, "ranks", "2"), EVEN_OK);
  assert_int_equal(even_database_meta(made->database, "started_ns", "1000000000"), EVEN_OK);
}

static void end(written *made) {
  char command[96];
  even_database_close(made->database);
  (void)unlink(path_of(made));
  (void)snprintf(command, sizeof command, "%s/run.db-wal", made->folder);
  (void)unlink(command);
  (void)snprintf(command, sizeof command, "%s/run.db-shm", made->folder);
  (void)unlink(command);
  assert_int_equal(rmdir(made->folder), 0);
}

/* Rank 0 makes 12 of 16 samples in 100 to 104 ms, rank 1 the rest in 50; every 7th loss is not known. Rank 1's record
 * of step 301 is lost. */
static void write_steps(written *made, int attempt, uint32_t from, uint32_t to) {
  for (uint32_t step = from; step < to; step++) {
    const uint64_t ends = 1000000000 + ++made->steps * UINT64_C(104000000);
    for (int rank = 0; rank < RANKS; rank++) {
      const uint64_t duration = 100000000 + step % 5 * UINT64_C(1000000);
      const even_step_record record = {.step = step,
                                       .epoch = step / 100,
                                       .end_ns = ends,
                                       .duration_ns = duration,
                                       .busy_ns = rank == 0 ? duration : 50000000,
                                       .samples = rank == 0 ? 12 : 4,
                                       .batch = 16,
                                       .loss = step % 7 == 3 ? NAN : 5 - (float)step / 1000,
                                       .predicted_seconds = 0.1F};
      const even_span_record span = {
          .step = step, .span = EVEN_SPAN_FORWARD, .start_ns = ends - duration, .duration_ns = 30000000, .bytes = 3};
      assert_int_equal(even_database_span(made->database, attempt, rank, &span), EVEN_OK);
      if (step != 301 || rank != 1) {
        assert_int_equal(even_database_step(made->database, attempt, rank, &record), EVEN_OK);
      }
    }
    if (step % COMMIT_EVERY == 0) {
      assert_int_equal(even_database_commit(made->database), EVEN_OK);
    }
  }
  assert_int_equal(even_database_commit(made->database), EVEN_OK);
}

static void write_run(written *made, int64_t most_rows) {
  begin(made, most_rows);
  write_steps(made, 0, 0, RESTARTED_AT);
  write_steps(made, 1, RESTARTED_FROM, STEPS);
}

static double one_number(const written *made, const char *query) {
  sqlite3 *connection = NULL;
  sqlite3_stmt *row = NULL;
  assert_int_equal(sqlite3_open(path_of(made), &connection), SQLITE_OK);
  assert_int_equal(sqlite3_prepare_v2(connection, query, -1, &row, NULL), SQLITE_OK);
  assert_int_equal(sqlite3_step(row), SQLITE_ROW);
  double value = sqlite3_column_double(row, 0);
  assert_int_equal(sqlite3_finalize(row), SQLITE_OK);
  assert_int_equal(sqlite3_close(connection), SQLITE_OK);
  return value;
}

static void the_rows_are_few_and_the_sums_the_same(void **state) {
  (void)state;
  static const char *const sums[] = {
      "SELECT sum(steps) FROM steps",
      "SELECT sum(samples) FROM steps WHERE rank = 0",
      "SELECT sum(duration_ns) FROM steps WHERE rank = 1 AND attempt = 0",
      "SELECT sum(batch) FROM steps",
      "SELECT sum(bytes) FROM spans WHERE rank = 1",
      "SELECT sum(duration_ns) FROM spans WHERE attempt = 1",
      "SELECT min(step) FROM steps WHERE attempt = 1",
      "SELECT max(step) FROM steps WHERE attempt = 0",
  };
  written all;
  written few;
  write_run(&all, INT64_MAX);
  write_run(&few, FEW_ROWS);
  const int rows = 2 * (RESTARTED_AT + STEPS - RESTARTED_FROM) - 1;
  assert_true(one_number(&all, "SELECT count(*) FROM steps") == rows);
  assert_true(one_number(&few, "SELECT count(*) FROM steps") <= (int)MOST_ROWS);
  assert_true(one_number(&few, "SELECT count(*) FROM spans") <= (int)MOST_ROWS);
  for (size_t i = 0; i < sizeof sums / sizeof sums[0]; i++) {
    assert_true(one_number(&all, sums[i]) == one_number(&few, sums[i]));
  }
  /* the newest stay as they are, and so do the first of an attempt */
  assert_true(one_number(&few, "SELECT max(steps) FROM (SELECT steps FROM steps ORDER BY rowid DESC LIMIT 400)") == 1);
  assert_true(one_number(&few, "SELECT max(steps) FROM steps WHERE step < 64") == 1);
  assert_true(one_number(&few, "SELECT max(steps) FROM steps WHERE attempt = 1 AND step < 2005 + 64") == 1);
  assert_true(one_number(&few, "SELECT max(steps) FROM steps") > 1);
  end(&all);
  end(&few);
}

static void expect_same_ranks(const even_state *all, const even_state *few) {
  for (int rank = 0; rank < RANKS; rank++) {
    assert_int_equal(few->rank[rank].steps, all->rank[rank].steps);
    assert_int_equal(few->rank[rank].samples, all->rank[rank].samples);
    assert_int_equal(few->rank[rank].busy_ns, all->rank[rank].busy_ns);
    assert_int_equal(few->rank[rank].wait_ns, all->rank[rank].wait_ns);
    assert_int_equal(few->rank[rank].span_ns[EVEN_SPAN_FORWARD], all->rank[rank].span_ns[EVEN_SPAN_FORWARD]);
    assert_int_equal(few->rank[rank].span_bytes[EVEN_SPAN_FORWARD], all->rank[rank].span_bytes[EVEN_SPAN_FORWARD]);
  }
}

static json_t *course(const even_state *state) {
  even_text text = EVEN_TEXT_EMPTY;
  json_t *value = NULL;
  even_monitor_json_steps(state, -1, 0, &text);
  assert_int_equal(even_json_parse("course", even_text_string(&text), text.length, &value), EVEN_OK);
  even_text_free(&text);
  return value;
}

static void expect_same_course(const even_state *all, const even_state *few) {
  json_t *mine = course(few);
  json_t *theirs = course(all);
  const json_t *points = json_object_get(mine, "points");
  assert_int_equal(json_integer_value(json_object_get(mine, "stride")),
                   json_integer_value(json_object_get(theirs, "stride")));
  assert_int_equal(json_array_size(points), json_array_size(json_object_get(theirs, "points")));
  for (size_t i = 0; i < json_array_size(points); i++) {
    const json_t *left = json_array_get(points, i);
    const json_t *right = json_array_get(json_object_get(theirs, "points"), i);
    assert_int_equal(json_integer_value(json_array_get(left, 0)), json_integer_value(json_array_get(right, 0)));
    assert_int_equal(json_integer_value(json_array_get(left, 1)), json_integer_value(json_array_get(right, 1)));
    assert_float_equal(json_number_value(json_array_get(left, 3)), json_number_value(json_array_get(right, 3)), 4);
  }
  json_decref(mine);
  json_decref(theirs);
}

static void what_is_read_back_is_the_same(void **state) {
  (void)state;
  written all;
  written few;
  even_history *whole = NULL;
  even_history *merged = NULL;
  even_measure measure;
  even_measure expected;
  even_analysis numbers;
  even_analysis wanted;
  write_run(&all, INT64_MAX);
  write_run(&few, FEW_ROWS);
  assert_int_equal(even_history_open(all.folder, &whole), EVEN_OK);
  assert_int_equal(even_history_open(few.folder, &merged), EVEN_OK);
  expect_same_ranks(even_history_state(whole), even_history_state(merged));
  expect_same_course(even_history_state(whole), even_history_state(merged));
  even_state_measure(even_history_state(whole), 0, &expected);
  even_state_measure(even_history_state(merged), 0, &measure);
  assert_int_equal(measure.step, STEPS - 1);
  assert_int_equal(measure.attempt, 1);
  assert_int_equal(measure.samples_total, expected.samples_total);
  assert_true(measure.samples_per_second == expected.samples_per_second);
  assert_true(measure.loss == expected.loss);

  assert_int_equal(even_analysis_make(whole, &wanted), EVEN_OK);
  assert_int_equal(even_analysis_make(merged, &numbers), EVEN_OK);
  assert_int_equal(wanted.steps, STEPS);
  assert_int_equal(numbers.steps, STEPS);
  assert_int_equal(numbers.steady_steps, wanted.steady_steps);
  assert_true(numbers.first_loss == wanted.first_loss);
  assert_true(numbers.last_loss == wanted.last_loss);
  assert_float_equal(numbers.mean_step_seconds, wanted.mean_step_seconds, 1e-5F);
  assert_float_equal(numbers.step_seconds, wanted.step_seconds, 5e-4F);
  assert_float_equal(numbers.samples_per_second, wanted.samples_per_second, 1);
  assert_float_equal(numbers.best_samples_per_second, wanted.best_samples_per_second, 1);
  for (int rank = 0; rank < RANKS; rank++) {
    assert_float_equal(numbers.rank[rank].share_samples, wanted.rank[rank].share_samples, 1e-9F);
    assert_float_equal(numbers.rank[rank].wait_fraction, wanted.rank[rank].wait_fraction, 1e-4F);
    assert_float_equal(numbers.rank[rank].samples_per_busy_second, wanted.rank[rank].samples_per_busy_second, 1);
  }
  even_analysis_free(&numbers);
  even_analysis_free(&wanted);
  even_history_close(whole);
  even_history_close(merged);
  end(&all);
  end(&few);
}

/* `evenstep top` was stopped (Ctrl-Z) while what it had not seen was merged. */
static void a_reader_that_stood_still_counts_nothing_twice(void **state) {
  (void)state;
  written all;
  written few;
  even_history *whole = NULL;
  even_history *merged = NULL;
  begin(&few, FEW_ROWS);
  write_steps(&few, 0, 0, 100);
  assert_int_equal(even_history_open(few.folder, &merged), EVEN_OK);
  write_steps(&few, 0, 100, RESTARTED_AT);
  write_steps(&few, 1, RESTARTED_FROM, STEPS);
  assert_int_equal(even_history_read(merged), EVEN_OK);
  write_run(&all, INT64_MAX);
  assert_int_equal(even_history_open(all.folder, &whole), EVEN_OK);
  expect_same_ranks(even_history_state(whole), even_history_state(merged));
  assert_int_equal(even_history_read(merged), EVEN_OK);
  expect_same_ranks(even_history_state(whole), even_history_state(merged));
  even_history_close(whole);
  even_history_close(merged);
  end(&all);
  end(&few);
}

/* es.load_checkpoint goes back within an attempt: the steps made again are the newest, whatever their numbers. */
static void going_back_merges_the_older_pass_alone(void **state) {
  (void)state;
  static const char *const sums[] = {"SELECT sum(steps) FROM steps WHERE rank = 0", "SELECT sum(samples) FROM steps",
                                     "SELECT sum(bytes) FROM spans"};
  written few;
  begin(&few, FEW_ROWS);
  write_steps(&few, 0, 0, 490);
  assert_true(one_number(&few, "SELECT count(*) FROM meta WHERE key = 'merged_rows'") == 0);
  write_steps(&few, 0, 0, 100); /* merged at 1000 rows, the middle one of the first pass */
  assert_true(one_number(&few, "SELECT max(steps) FROM steps") == 2);
  assert_true(one_number(&few, "SELECT count(*) FROM steps WHERE rank = 0 AND step < 100 AND steps = 1") >= 164);
  assert_true(one_number(&few, "SELECT max(steps) FROM (SELECT steps FROM steps ORDER BY rowid DESC LIMIT 500)") == 1);
  assert_true(one_number(&few, "SELECT max(rowid) FROM steps") == 2 * 590 - 1);
  assert_true(one_number(&few, "SELECT max(rowid) FROM spans") == 2 * 590);
  write_steps(&few, 0, 100, 2000);
  write_steps(&few, 0, 0, 1900);
  const int made = 590 + 1900 + 1900;
  const double expected[] = {made, 16 * made - 4 * 3, 3 * 2 * made}; /* rank 1's step 301 is lost in each pass */
  for (size_t i = 0; i < sizeof sums / sizeof sums[0]; i++) {
    assert_true(one_number(&few, sums[i]) == expected[i]);
  }
  assert_true(one_number(&few, "SELECT count(*) FROM steps") <= (int)(FEW_ROWS + FEW_ROWS / 2));
  assert_true(one_number(&few, "SELECT max(steps) FROM (SELECT steps FROM steps ORDER BY rowid DESC LIMIT 400)") == 1);
  assert_true(one_number(&few, "SELECT count(*) FROM steps WHERE rank = 0 AND rowid <= 128 AND steps = 1") == 64);
  assert_true(one_number(&few, "SELECT count(*) FROM steps WHERE steps > step + 1") == 0); /* no row of two passes */
  assert_true(one_number(&few, "SELECT max(rowid) FROM steps") == 2 * made - 3);
  end(&few);
}

static void spans_of_an_attempt_without_a_step_are_kept(void **state) {
  (void)state;
  written few;
  const even_span_record data = {.step = 0, .span = EVEN_SPAN_DATA, .start_ns = 5, .duration_ns = 7, .bytes = 9};
  begin(&few, FEW_ROWS);
  assert_int_equal(even_database_span(few.database, 0, 0, &data), EVEN_OK);
  assert_int_equal(even_database_span(few.database, 0, 1, &data), EVEN_OK);
  write_steps(&few, 1, 0, 2000);
  assert_true(one_number(&few, "SELECT max(steps) FROM steps") > 1);
  assert_true(one_number(&few, "SELECT count(*) FROM spans WHERE attempt = 0 AND step = 0") == 2);
  assert_true(one_number(&few, "SELECT sum(duration_ns) FROM spans WHERE span = 'data'") == 14);
  end(&few);
}

/* A run.db of a version that kept every step. */
static void a_history_without_counts_is_read(void **state) {
  (void)state;
  written all;
  sqlite3 *connection = NULL;
  even_history *history = NULL;
  even_analysis analysis;
  write_run(&all, INT64_MAX);
  assert_int_equal(sqlite3_open(path_of(&all), &connection), SQLITE_OK);
  assert_int_equal(sqlite3_exec(connection, "ALTER TABLE steps DROP COLUMN steps", NULL, NULL, NULL), SQLITE_OK);
  assert_int_equal(sqlite3_close(connection), SQLITE_OK);
  assert_int_equal(even_history_open(all.folder, &history), EVEN_OK);
  assert_int_equal(even_history_state(history)->rank[0].steps, RESTARTED_AT + STEPS - RESTARTED_FROM);
  assert_int_equal(even_analysis_make(history, &analysis), EVEN_OK);
  assert_int_equal(analysis.steps, STEPS);
  even_analysis_free(&analysis);
  even_history_close(history);
  end(&all);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_rows_are_few_and_the_sums_the_same),
      cmocka_unit_test(what_is_read_back_is_the_same),
      cmocka_unit_test(a_reader_that_stood_still_counts_nothing_twice),
      cmocka_unit_test(going_back_merges_the_older_pass_alone),
      cmocka_unit_test(spans_of_an_attempt_without_a_step_are_kept),
      cmocka_unit_test(a_history_without_counts_is_read),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
