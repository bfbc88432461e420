/* A rank that is slower for a while: event, table, report, page, view and terminal, with the cause that its host shows.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "monitor/lagging.h"
#include "monitor/monitored.h"
#include "monitor/parts.h"
#include "os/path.h"
#include "support/fault.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Steps of 32 ms. What its host shows of rank 1 is the test's. */
static void start(monitored *made) {
  monitored_listen(made);
  made->ranks.speeds[0] = 400;
  made->ranks.speeds[1] = 100;
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

/* As long as it is asked to wait, or for ever: also of other ranks, once they are watched anew. */
static void who_is_slow_may_be_said(void **state) {
  monitored *made = *state;
  const double speeds[] = {100, 25, 100, 12, 100};
  const char *const heard[] = {"", "", "", "8.3x slower since step", "was 8.3x slower from step"};
  made->limits.straggler_factor = 5; /* 4 times slower is not */
  made->limits.straggler_seconds = 6;
  start(made);
  for (size_t i = 0; i < sizeof speeds / sizeof speeds[0]; i++) {
    made->ranks.speeds[1] = speeds[i];
    steps_and_looks(made, 100, 4);
    monitored_expect_heard("slower", heard[i][0] != '\0');
    monitored_expect_heard(heard[i], true);
  }
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  made->limits = (even_monitor_limits){.straggler_factor = (double)INFINITY};
  start(made);
  for (size_t i = 0; i < 4; i++) {
    made->ranks.speeds[1] = speeds[i];
    steps_and_looks(made, 100, 4);
  }
  monitored_expect_heard("slower", false);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
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
  monitored_expect_heard("slower", false); /* not for long enough yet */
  steps_and_looks(made, 50, 1);
  (void)snprintf(words, sizeof words,
                 "rank 1 (cpu:1 on %s) is 4.0x slower since step 100: CPU quota, stopped by its CPU quota 75%% of the "
                 "time|",
                 host);
  monitored_expect_heard(words, true);
  assert_int_equal(even_monitor_view(made->monitor, 400, false, &view), EVEN_OK);
  assert_non_null(strstr(even_text_string(&view), "is 4.0x slower since step 100: CPU quota"));
  even_text_free(&view);
  made->ranks.speeds[1] = 100;
  throttled(made, 0);
  steps_and_looks(made, 60, 2);
  (void)snprintf(words, sizeof words, "rank 1 (cpu:1 on %s) was 4.0x slower from step 100 to 159 (7.34 s): CPU quota",
                 host);
  monitored_expect_heard(words, true);
  assert_int_equal(even_monitor_view(made->monitor, 400, false, &view), EVEN_OK);
  assert_null(strstr(even_text_string(&view), "slower since")); /* it is over */
  even_text_free(&view);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);

  monitored_report_says(made, words, true);
  assert_int_equal(monitored_number(made, "SELECT count(*) FROM events WHERE event='straggler' AND rank=1"), 2);
  assert_int_equal(
      monitored_number(made, "SELECT count(*) FROM events WHERE event='straggler' AND value=0 AND step=159"), 1);
  assert_int_equal(
      monitored_number(
          made, "SELECT count(*) FROM events WHERE event='straggler' AND step=100 AND value BETWEEN 390 AND 410"),
      1);
  assert_int_equal(monitored_number(made, "SELECT count(*) FROM stragglers"), 1);
  assert_int_equal(
      monitored_number(made,
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
  monitored_expect_heard("is 5.0x slower since step 60: cause unknown|", true);
  even_monitor_rank_gone(made->monitor, 1);
  monitored_expect_heard("was 5.0x slower from step 60 to 119", true);
  monitored_listen(made);
  steps_and_looks(made, 60, 3); /* of another process: as fast as it is */
  even_monitor_attempt(made->monitor, 1);
  made->ranks.step = 0;
  steps_and_looks(made, 60, 3);
  monitored_expect_heard("slower", false);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  assert_int_equal(monitored_number(made, "SELECT count(*) FROM stragglers WHERE end_step IS NOT NULL"), 1);
}

static void a_rank_slow_from_its_start_is_told_with_a_cause_alone(void **state) {
  monitored *made = *state;
  start(made);
  steps_and_looks(made, 60, 8); /* rank 1 is four times slower as it is made */
  monitored_expect_heard("slower", false);
  throttled(made, 0.75);
  steps_and_looks(made, 20, 2);
  monitored_expect_heard("slower", false);
  steps_and_looks(made, 20, 3);
  monitored_expect_heard("slower since step 0: CPU quota", true);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  monitored_report_says(made, "slower from step 0 to 99", true);
}

/* Of a rank of another host its agent tells what it sees there; the numbers of its process mean nothing here. */
static void a_rank_of_another_host_is_told_with_its_cause(void **state) {
  monitored *made = *state;
  start(made);
  steps_and_looks(made, 100, 1);
  made->ranks.speeds[1] = 25;
  for (int second = 1; second <= 4; second++) {
    const even_rank_usage usage = {.at_ns = (uint64_t)second * 1000000000u,
                                   .cpu_seconds = 0.2 * second,
                                   .rss_bytes = 1e8,
                                   .throttled_seconds = 0.75 * second,
                                   .pressure = {NAN, NAN, NAN, NAN}};
    even_monitor_usage(made->monitor, 1, &usage, NULL);
    even_monitor_usage(made->monitor, 0, &usage, NULL); /* this host's own: looked at here */
    even_monitor_usage(made->monitor, 2, &usage, NULL); /* nobody */
    steps_and_looks(made, 15, 2);
  }
  monitored_expect_heard("x slower since step 100: CPU quota, stopped by its CPU quota 75% of the time|", true);
  assert_true(isnan(made->monitor->state->rank[0].usage.throttled_seconds) ||
              made->monitor->state->rank[0].usage.rss_bytes != 1e8);
  even_measure measure;
  even_state_measure(made->monitor->state, made->ranks.now_ns, &measure);
  assert_float_equal(measure.rank[1].cpu_cores, 0.2, 1e-9);
  even_monitor_rank_started(made->monitor, 1, getpid()); /* another process is in its place */
  even_state_measure(made->monitor->state, made->ranks.now_ns, &measure);
  assert_true(isnan(measure.rank[1].throttled_fraction));
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  assert_float_equal(monitored_number(made, "SELECT count(*) FROM usage WHERE rank=1 AND rss_bytes=1e8"), 4, 0);
}

/* Those that run go on, and so does what lasts. */
static void a_host_that_joins_ends_nothing(void **state) {
  monitored *made = *state;
  static const even_monitor_rank facts[] = {
      {"cpu:0", "CPU", 1, NAN, NULL}, {"cpu:1", "CPU", 0.25, 0.25, "b"}, {"cpu:0", "CPU", 1, NAN, "c"}};
  start(made);
  steps_and_looks(made, 60, 1);
  made->ranks.speeds[1] = 20;
  steps_and_looks(made, 60, 3);
  monitored_expect_heard("is 5.0x slower since step 60", true);
  assert_int_equal(even_monitor_ranks(made->monitor, 3, facts, NULL), EVEN_OK);
  steps_and_looks(made, 20, 1);
  monitored_expect_heard("was 5.0x slower", false);
  made->ranks.speeds[1] = 100;
  steps_and_looks(made, 60, 1);
  monitored_expect_heard("was 5.0x slower from step 60 to 139", true);
  for (int rank = 0; rank < 2; rank++) { /* with the next attempt all begins anew */
    even_monitor_rank_gone(made->monitor, rank);
  }
  assert_int_equal(even_monitor_ranks(made->monitor, 2, facts, NULL), EVEN_OK);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  assert_float_equal(monitored_number(made, "SELECT count(*) FROM stragglers"), 1, 0);
}

/* Whatever allocation fails, those that were there are watched on, and no more are asked of. */
static void without_memory_for_more_the_others_are_watched(void **state) {
  monitored *made = *state;
  int failed = 0;
  start(made);
  throttled(made, 0.75); /* slower from its start on, so that it is compared with the others */
  steps_and_looks(made, 60, 1);
  for (;;) {
    fault_allocation(failed + 1);
    even_status status = even_lagging_grow(made->monitor->lagging, 400);
    fault_allocation(0);
    if (status == EVEN_OK) {
      break;
    }
    assert_int_equal(status, EVEN_ERR_MEMORY);
    failed++;
    steps_and_looks(made, 2, 1);
  }
  assert_int_equal(failed, 4);
  even_lagging_end(made->monitor, 399);
  steps_and_looks(made, 20, 3);
  monitored_expect_heard("slower since step 0: CPU quota", true);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_slow_rank_is_told_when_it_begins_and_when_it_ends, monitored_set_up,
                                      monitored_tear_down),
      cmocka_unit_test_setup_teardown(who_is_slow_may_be_said, monitored_set_up, monitored_tear_down),
      cmocka_unit_test_setup_teardown(what_lasts_is_over_with_its_process, monitored_set_up, monitored_tear_down),
      cmocka_unit_test_setup_teardown(a_rank_slow_from_its_start_is_told_with_a_cause_alone, monitored_set_up,
                                      monitored_tear_down),
      cmocka_unit_test_setup_teardown(a_rank_of_another_host_is_told_with_its_cause, monitored_set_up,
                                      monitored_tear_down),
      cmocka_unit_test_setup_teardown(a_host_that_joins_ends_nothing, monitored_set_up, monitored_tear_down),
      cmocka_unit_test_setup_teardown(without_memory_for_more_the_others_are_watched, monitored_set_up,
                                      monitored_tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
