/* What the ranks tell besides steps, on its way: rings, state, run.db, the page's data, the report. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "monitor/monitored.h"
#include "monitor/report.h"
#include "os/clock.h"

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

static void report_says(const monitored *made, const char *words, bool said) {
  even_report *report = NULL;
  even_text text = EVEN_TEXT_EMPTY;
  const even_report_params params = {.folder = made->folder};
  assert_int_equal(even_report_open(&params, &report), EVEN_OK);
  even_report_lines(report, false, &text);
  assert_int_equal(even_text_status(&text), EVEN_OK);
  if ((strstr(even_text_string(&text), words) != NULL) != said) {
    fail_msg("%s: %s in: %s", words, said ? "not" : "still", even_text_string(&text));
  }
  even_text_free(&text);
  even_report_close(report);
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
  report_says(made, "balancing was measured slower than equal shares (21.5 ms, equal 18.2 ms): went back at step 20\n",
              true);
  json_t *data = monitored_page(made);
  assert_true(json_is_true(json_object_get(json_object_get(data, "summary"), "on_equal_shares")));
  expect_event(json_object_get(json_object_get(data, "events"), "events"), "balancing", 0, 0, 20, 1,
               "21.5 ms, equal 18.2 ms");
  json_decref(data);
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
  report_says(made, "went back", false);
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
  report_says(made, "went back", false);
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
      TEST(equal_shares_that_won_are_told_everywhere), TEST(balanced_shares_that_won_again_too),
      TEST(a_restart_forgets_that_equal_shares_won),   TEST(who_joins_is_named),
      TEST(a_wait_for_peers_is_no_communication),      TEST(a_page_of_many_ranks_is_bounded),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
