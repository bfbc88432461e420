/* What the ranks tell besides steps, on its way: rings, state, run.db, the page's data, the report. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "monitor/monitored.h"
#include "os/clock.h"

#include <math.h>
#include <string.h>

/* The nth event of a kind that a rank told of. */
static json_t *event_in(const json_t *list, const char *event, int rank, int nth) {
  size_t i;
  json_t *value;
  json_array_foreach(list, i, value) {
    if (strcmp(json_string_value(json_object_get(value, "event")), event) == 0 &&
        json_integer_value(json_object_get(value, "rank")) == rank && nth-- == 0) {
      return value;
    }
  }
  return NULL;
}

static void expect_event(const json_t *events, const char *name, int nth, int rank, int step, int value,
                         const char *words) {
  const json_t *event = event_in(events, name, rank, nth);
  assert_non_null(event);
  assert_int_equal(json_integer_value(json_object_get(event, "step")), step);
  assert_int_equal(json_integer_value(json_object_get(event, "value")), value);
  assert_string_equal(json_string_value(json_object_get(event, "words")), words);
}

static void equal_shares_that_won_are_told_everywhere(void **state) {
  monitored *made = *state;
  monitored_start(made);
  monitored_steps(made, 20, 13);
  feed_event(&made->ranks, 0, EVEN_EVENT_BALANCING, 1, "21.5 ms, equal 18.2 ms");
  monitored_steps(made, 20, 8);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  monitored_report_says(
      made, "balancing was measured slower than equal shares (21.5 ms, equal 18.2 ms): went back at step 20\n", true);
  json_t *data = monitored_page(made);
  assert_true(json_is_true(json_object_get(json_object_get(data, "summary"), "on_equal_shares")));
  expect_event(json_object_get(json_object_get(data, "events"), "events"), "balancing", 0, 0, 20, 1,
               "21.5 ms, equal 18.2 ms");
  json_decref(data);
}

static void what_compression_saves_is_told(void **state) {
  monitored *made = *state;
  monitored_start(made);
  monitored_steps(made, 20, 8);
  feed_event(&made->ranks, 0, EVEN_EVENT_COMPRESSION, 50, "compression bf16: 50% fewer bytes");
  monitored_steps(made, 20, 8);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  monitored_report_says(
      made,
      "  compression bf16: 50% fewer bytes; a step takes 8.16 ms (median), no rank waits less than 2% "
      "of it\n",
      true);
  json_t *data = monitored_page(made);
  expect_event(json_object_get(json_object_get(data, "events"), "events"), "compression", 0, 0, 20, 50,
               "compression bf16: 50% fewer bytes");
  json_decref(data);
}

static void what_becomes_of_the_global_batch_is_told(void **state) {
  monitored *made = *state;
  monitored_start(made);
  monitored_steps(made, 20, 13);
  feed_event(&made->ranks, 0, EVEN_EVENT_BATCH, 128, "batch 64 -> 128 samples: noise scale 310");
  monitored_steps(made, 20, 8);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  monitored_report_says(made, "  batch 64 -> 128 samples: noise scale 310 (step 20)\n", true);
  json_t *data = monitored_page(made);
  expect_event(json_object_get(json_object_get(data, "events"), "events"), "batch", 0, 0, 20, 128,
               "batch 64 -> 128 samples: noise scale 310");
  json_decref(data);
}

/* Until it is over, or the job is started again. */
static void what_limits_shares_is_told(void **state) {
  monitored *made = *state;
  monitored_start(made);
  monitored_steps(made, 20, 13);
  feed_event(&made->ranks, 0, EVEN_EVENT_MEMORY, 1, "memory holds 20 of 26 samples on rank 1");
  feed_event(&made->ranks, 0, EVEN_EVENT_LEFT_OUT, 1, "rank 1 has no samples: 20 ms a step instead of 61");
  monitored_steps(made, 20, 8);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  monitored_report_says(made, "  memory holds 20 of 26 samples on rank 1\n", true);
  monitored_report_says(made, "  rank 1 has no samples: 20 ms a step instead of 61\n", true);
  json_t *data = monitored_page(made);
  json_t *events = json_object_get(json_object_get(data, "events"), "events");
  expect_event(events, "memory", 0, 0, 20, 1, "memory holds 20 of 26 samples on rank 1");
  expect_event(events, "left_out", 0, 0, 20, 1, "rank 1 has no samples: 20 ms a step instead of 61");
  json_decref(data);
}

static void what_limited_shares_before_is_not(void **state) {
  monitored *made = *state;
  monitored_start(made);
  monitored_steps(made, 20, 13);
  feed_event(&made->ranks, 0, EVEN_EVENT_MEMORY, 1, "memory holds 20 of 26 samples on rank 1");
  feed_event(&made->ranks, 0, EVEN_EVENT_LEFT_OUT, 1, "rank 1 has no samples: 20 ms a step instead of 61");
  monitored_steps(made, 20, 8);
  feed_event(&made->ranks, 0, EVEN_EVENT_LEFT_OUT, 0, "rank 1 has samples again");
  even_monitor_attempt(made->monitor, 1);
  monitored_steps(made, 20, 13);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  monitored_report_says(made, "memory holds", false);
  monitored_report_says(made, "rank 1 has", false);
}

static void balanced_shares_that_won_again_too(void **state) {
  monitored *made = *state;
  monitored_start(made);
  monitored_steps(made, 20, 13);
  feed_event(&made->ranks, 0, EVEN_EVENT_BALANCING, 1, "21.5 ms, equal 18.2 ms");
  monitored_steps(made, 20, 8);
  feed_event(&made->ranks, 0, EVEN_EVENT_BALANCING, 0, "17.5 ms, equal 18.2 ms");
  monitored_steps(made, 20, 13);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  monitored_report_says(made, "went back", false);
  json_t *data = monitored_page(made);
  assert_true(json_is_false(json_object_get(json_object_get(data, "summary"), "on_equal_shares")));
  expect_event(json_object_get(json_object_get(data, "events"), "events"), "balancing", 1, 0, 40, 0,
               "17.5 ms, equal 18.2 ms");
  json_decref(data);
}

/* The ranks' balancers begin anew. */
static void a_restart_forgets_that_equal_shares_won(void **state) {
  monitored *made = *state;
  monitored_start(made);
  monitored_steps(made, 20, 13);
  feed_event(&made->ranks, 0, EVEN_EVENT_BALANCING, 1, "21.5 ms, equal 18.2 ms");
  even_monitor_attempt(made->monitor, 1);
  monitored_steps(made, 20, 13);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  monitored_report_says(made, "went back", false);
}

/* The number of kinds of faults in the summary, and the first of them. */
static size_t faults_in(json_t *data, json_t **first) {
  json_t *faults = json_object_get(json_object_get(data, "summary"), "faults");
  *first = json_array_get(faults, 0);
  return json_array_size(faults);
}

static void a_hang_is_told_everywhere(void **state) {
  monitored *made = *state;
  json_t *first = NULL;
  even_text view = EVEN_TEXT_EMPTY;
  monitored_start(made);
  monitored_steps(made, 20, 13);
  even_monitor_hang(made->monitor, 1, false, "rank 1 hangs: no progress for 30 s in data");
  assert_int_equal(even_monitor_view(made->monitor, 200, false, &view), EVEN_OK);
  assert_non_null(strstr(even_text_string(&view), "rank 1 hangs: no progress for 30 s in data\n"));
  even_monitor_hang(made->monitor, 1, true, "rank 1 goes on: it was slow, and did not hang");
  even_text_clear(&view);
  assert_int_equal(even_monitor_view(made->monitor, 200, false, &view), EVEN_OK);
  assert_null(strstr(even_text_string(&view), "hangs"));
  monitored_steps(made, 20, 8);
  even_monitor_hang(made->monitor, 0, false, "rank 0 hangs: no progress for 40 s in checkpoint");
  even_text_free(&view);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  monitored_report_says(
      made, "  2 hangs, the first at step 19; the last, at step 39: rank 0 hangs: no progress for 40 s in checkpoint\n",
      true);
  json_t *data = monitored_page(made);
  const json_t *events = json_object_get(json_object_get(data, "events"), "events");
  expect_event(events, "hang", 0, 1, 19, 1, "rank 1 hangs: no progress for 30 s in data");
  expect_event(events, "hang", 1, 1, 19, 0, "rank 1 goes on: it was slow, and did not hang");
  assert_int_equal(faults_in(data, &first), 1);
  assert_string_equal(json_string_value(json_object_get(first, "kind")), "hang");
  assert_int_equal(json_integer_value(json_object_get(first, "count")), 2);
  assert_int_equal(json_integer_value(json_object_get(first, "rank")), 0);
  assert_false(json_is_true(json_object_get(first, "lasts"))); /* the run has ended */
  json_decref(data);
}

/* Of the loss that the script gives, once it gives one. */
static void a_loss_that_jumps_is_told_everywhere(void **state) {
  monitored *made = *state;
  json_t *first = NULL;
  monitored_start(made);
  for (uint32_t step = 0; step < 100; step++) {
    monitored_steps(made, 1, 8);
    feed_scalar(&made->ranks, 0, step, "loss", step == 80 ? 40.0 : 2.0 + 0.01 * (step % 7));
    feed_scalar(&made->ranks, 1, step, "loss", step == 50 ? 90.0 : 2.0); /* another rank's says nothing */
  }
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  monitored_report_says(
      made, "  1 jump of the loss, at step 80: the loss has jumped to 40; the median of the steps before is 2.03",
      true);
  json_t *data = monitored_page(made);
  assert_int_equal(faults_in(data, &first), 1);
  assert_string_equal(json_string_value(json_object_get(first, "kind")), "loss_spike");
  assert_int_equal(json_integer_value(json_object_get(first, "first_step")), 80);
  assert_true(json_is_null(json_object_get(first, "rank")));
  json_decref(data);
  assert_true(monitored_number(made, "SELECT count(*) FROM events WHERE event='loss_spike' AND rank=-1") == 2);
  assert_true(monitored_number(made, "SELECT step FROM events WHERE event='loss_spike' AND value=0") == 81);
}

static void who_joins_is_named(void **state) {
  monitored *made = *state;
  monitored_start(made);
  for (int rank = 1; rank >= 0; rank--) {
    feed_event(&made->ranks, rank, EVEN_EVENT_JOINING, 0, "waits for all in es.prepare");
  }
  for (int rank = 0; rank < 2; rank++) {
    feed_event(&made->ranks, rank, EVEN_EVENT_JOINED, 0, "all ranks have come");
  }
  monitored_steps(made, 5, 8);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  json_t *data = monitored_page(made);
  const json_t *events = json_object_get(json_object_get(data, "events"), "events");
  for (int rank = 0; rank < 2; rank++) { /* each rank's own: none is taken for a repetition of another's */
    expect_event(events, "joining", 0, rank, 0, 0, "waits for all in es.prepare");
    expect_event(events, "joined", 0, rank, 0, 0, "all ranks have come");
  }
  json_decref(data);
}

static void what_a_script_logs_keeps_its_name_and_its_digits(void **state) {
  monitored *made = *state;
  monitored_start(made);
  monitored_steps(made, 5, 8);
  feed_scalar(&made->ranks, 0, 4, "validation_perplexity_wikitext", 23.456789012345678);
  feed_scalar(&made->ranks, 0, 4, "a_loss_that_is_gone", (double)NAN);
  feed_scalar(&made->ranks, 0, 4, "a_norm_without_end", (double)INFINITY);
  feed_event(&made->ranks, 0, EVEN_EVENT_SHARES, 0,
             "1000,1001,1002,1003,1004,1005,1006,1007,1008,1009,1010,1011,1012,1013,1014,1015,1016,1017,1018,1019,"
             "1020,1021,1022,1023,1024,1025,1026,1027");
  monitored_steps(made, 5, 8);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  static const char value[] = "SELECT value FROM events WHERE event='scalar' AND rank=0 AND step=4 AND words='";
  char query[256];
  (void)snprintf(query, sizeof query, "%s%s'", value, "validation_perplexity_wikitext");
  assert_true(monitored_number(made, query) == 23.456789012345678);
  (void)snprintf(query, sizeof query, "%s%s'", value, "a_loss_that_is_gone");
  assert_true(isnan(monitored_number(made, query)));
  (void)snprintf(query, sizeof query, "%s%s'", value, "a_norm_without_end");
  assert_true(isinf(monitored_number(made, query)));
  json_t *data = monitored_page(made);
  const json_t *events = json_object_get(json_object_get(data, "events"), "events");
  const json_t *event = event_in(events, "scalar", 0, 0);
  assert_string_equal(json_string_value(json_object_get(event, "words")), "validation_perplexity_wikitext");
  assert_true(json_real_value(json_object_get(event, "value")) == 23.456789012345678);
  assert_true(json_is_null(json_object_get(event_in(events, "scalar", 0, 1), "value")));
  const char *shares = json_string_value(json_object_get(event_in(events, "shares", 0, 0), "words"));
  assert_string_equal(shares + strlen(shares) - strlen("1023,…"), "1023,…");
  json_decref(data);
}

static void few_rows_are_kept(monitored *made, long long step_rows, bool merged) {
  made->step_rows = step_rows;
  monitored_start(made);
  for (int i = 0; i < 6; i++) {
    monitored_steps(made, 100, 8);
  }
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  assert_int_equal(monitored_number(made, "SELECT sum(steps) FROM steps"), 1200);
  assert_true((monitored_number(made, "SELECT count(*) FROM steps") < 1200) == merged);
  json_t *data = monitored_page(made);
  assert_int_equal(json_integer_value(json_object_get(json_object_get(data, "report"), "steps")), 600);
  assert_int_equal(json_integer_value(json_object_get(json_object_get(data, "summary"), "samples")), 600 * 16);
  json_decref(data);
}

static void old_steps_are_merged(void **state) {
  few_rows_are_kept(*state, 600, true);
}

static void no_step_is_merged_where_all_are_wanted(void **state) {
  few_rows_are_kept(*state, -1, false);
}

static double loss_at(const json_t *data, size_t step) {
  const json_t *points = json_object_get(json_object_get(data, "steps"), "points");
  const json_t *loss = json_array_get(json_array_get(points, step), 4);
  return json_is_null(loss) ? (double)NAN : json_number_value(loss);
}

/* Given before the step's record is written or after, and once more for a step that a restart did again. */
static void the_loss_that_a_script_gives_is_the_runs(void **state) {
  monitored *made = *state;
  monitored_start(made);
  feed_scalar(&made->ranks, 0, 0, "loss", 2.25);
  feed_scalar(&made->ranks, 1, 0, "loss", 99); /* rank 0's counts */
  monitored_steps(made, 10, 8);
  feed_scalar(&made->ranks, 0, 9, "loss", 1.75);
  monitored_steps(made, 10, 8);
  feed_scalar(&made->ranks, 0, 19, "loss", 1.25);
  assert_int_equal(even_monitor_tick(made->monitor), EVEN_OK);
  made->ranks.step = 15;
  even_monitor_attempt(made->monitor, 1);
  monitored_steps(made, 4, 8);
  feed_scalar(&made->ranks, 0, 18, "loss", 1.5);
  monitored_steps(made, 3, 8);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  json_t *data = monitored_page(made); /* read back from run.db: all steps first, then the events */
  assert_true(loss_at(data, 0) == 2.25);
  assert_true(isnan(loss_at(data, 1)));
  assert_true(loss_at(data, 9) == 1.75);
  assert_true(loss_at(data, 18) == 1.5);
  assert_true(isnan(loss_at(data, 19)));
  const json_t *report = json_object_get(data, "report");
  assert_true(json_number_value(json_object_get(json_object_get(data, "summary"), "loss")) == 1.5);
  assert_true(json_number_value(json_object_get(report, "first_loss")) == 2.25);
  assert_true(json_number_value(json_object_get(report, "last_loss")) == 1.5);
  json_decref(data);
}

/* Rank 0 waits for rank 1 most of each step: that is "wait", and no part of its communication. */
static void a_wait_for_peers_is_no_communication(void **state) {
  monitored *made = *state;
  monitored_start(made);
  monitored_steps(made, 40, 8); /* rank 0: 2 ms busy, rank 1: 8 ms, 2% of a step to exchange */
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  json_t *data = monitored_page(made);
  const json_t *ranks = json_object_get(json_object_get(data, "spans"), "ranks");
  const json_t *mine = json_object_get(json_array_get(ranks, 0), "seconds_per_step");
  assert_float_equal(json_number_value(json_object_get(mine, "wait")), 0.00616F, 1e-5F);
  assert_float_equal(json_number_value(json_object_get(mine, "communication")), 0.0004F, 1e-6F); /* both buckets */
  const json_t *summary = json_array_get(json_object_get(json_object_get(data, "summary"), "ranks"), 0);
  assert_float_equal(json_number_value(json_object_get(summary, "wait_fraction")), 1 - 2 / 8.16F, 1e-4F);
  json_decref(data);
}

/* The course in a page has fewer points where there are more ranks; all of the run is in it. */
static void a_page_of_many_ranks_is_bounded(void **state) {
  monitored *made = *state;
  enum { RANKS = 64, STEPS = 600, POINTS = 300 };
  uint32_t shares[RANKS];
  feed_close(&made->ranks);
  feed_open(&made->ranks, RANKS, 8 * RANKS, even_clock_ns());
  for (int rank = 0; rank < RANKS; rank++) {
    shares[rank] = 8;
  }
  assert_int_equal(monitored_open(made, -1), EVEN_OK);
  even_monitor_attempt(made->monitor, 0);
  for (int step = 0; step < STEPS; step++) {
    feed_step(&made->ranks, shares);
    if (step % 100 == 99) {
      assert_int_equal(even_monitor_tick(made->monitor), EVEN_OK);
    }
  }
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  json_t *data = monitored_page(made);
  const json_t *course = json_object_get(data, "steps");
  const json_t *points = json_object_get(course, "points");
  assert_int_equal(json_integer_value(json_object_get(course, "stride")), 2);
  assert_int_equal(json_array_size(points), POINTS);
  assert_int_equal(json_integer_value(json_array_get(json_array_get(points, POINTS - 1), 0)), STEPS - 1);
  assert_int_equal(json_array_size(json_array_get(json_array_get(points, 0), 6)), RANKS);
  json_decref(data);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, monitored_set_up, monitored_tear_down)
  const struct CMUnitTest tests[] = {
      TEST(equal_shares_that_won_are_told_everywhere),
      TEST(balanced_shares_that_won_again_too),
      TEST(what_compression_saves_is_told),
      TEST(what_becomes_of_the_global_batch_is_told),
      TEST(what_limits_shares_is_told),
      TEST(what_limited_shares_before_is_not),
      TEST(a_restart_forgets_that_equal_shares_won),
      TEST(a_hang_is_told_everywhere),
      TEST(a_loss_that_jumps_is_told_everywhere),
      TEST(who_joins_is_named),
      TEST(a_wait_for_peers_is_no_communication),
      TEST(a_page_of_many_ranks_is_bounded),
      TEST(old_steps_are_merged),
      TEST(no_step_is_merged_where_all_are_wanted),
      TEST(what_a_script_logs_keeps_its_name_and_its_digits),
      TEST(the_loss_that_a_script_gives_is_the_runs),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
