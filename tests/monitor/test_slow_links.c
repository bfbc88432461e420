/* A link that is slow for a while: from the ranks' records to event, table, verdict, page and terminal. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "monitor/links.h"
#include "monitor/monitored.h"
#include "monitor/parts.h"

#include <stdio.h>
#include <string.h>

enum { TRANSFERS = 10, BYTES = 65536 };

static void start(monitored *made) {
  static const char *const names[] = {"first", "second"};
  monitored_listen(made);
  monitored_start(made);
  for (int rank = 0; rank < 2; rank++) {
    even_state_rank *at = &made->monitor->state->rank[rank];
    (void)snprintf(at->host, sizeof at->host, "%s", names[rank]);
    at->elsewhere = true; /* else it is this process, whatever holds that up */
  }
}

/* What both ranks tell of so many seconds, in which a transfer took so long; each is looked at. */
static void seconds(monitored *made, int count, double microseconds) {
  for (int second = 0; second < count; second++) {
    for (uint32_t rank = 0; rank < 2; rank++) {
      const even_leg_record leg = {.own = 100 + rank,
                                   .peer = 101 - rank,
                                   .at_ns = 1,
                                   .transfers = TRANSFERS,
                                   .bytes = (uint64_t)TRANSFERS * BYTES,
                                   .ns = (uint64_t)((double)TRANSFERS * microseconds * 1e3)};
      even_telemetry_leg(made->ranks.writers[rank], &leg);
    }
    made->monitor->looked_ns = 0;
    assert_int_equal(even_monitor_tick(made->monitor), EVEN_OK);
  }
}

static void a_slow_link_is_told_when_it_begins_and_when_it_ends(void **state) {
  monitored *made = *state;
  even_text view = EVEN_TEXT_EMPTY;
  static const char begins[] =
      "the link between hosts first and second is 8.0x slower than usual: a transfer takes 16 ms instead of 2";
  static const char ends[] = "the link between hosts first and second was 8.0x slower from about step 19 to 39";
  start(made);
  monitored_steps(made, 20, 13);
  seconds(made, 6, 2000);
  seconds(made, EVEN_LINK_LOOKS - 1, 16000);
  monitored_expect_heard("slower", false);
  seconds(made, 1, 16000);
  monitored_expect_heard(begins, true);
  assert_int_equal(even_monitor_view(made->monitor, 400, false, &view), EVEN_OK);
  assert_non_null(strstr(even_text_string(&view), begins)); /* it lasts */
  even_text_free(&view);
  monitored_steps(made, 20, 13);
  seconds(made, 4, 2000);
  monitored_expect_heard(ends, true);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  assert_int_equal(monitored_number(made, "SELECT count(*) FROM events WHERE event='link'"), 2);
  assert_int_equal(monitored_number(made, "SELECT max(value) FROM events WHERE event='link'"), 800);
  assert_int_equal(monitored_number(made, "SELECT min(value) FROM events WHERE event='link'"), 0);
}

/* Its own affair, and not the link's. */
static void what_the_kernel_says_of_a_rank_there_is_told_with_it(void **state) {
  monitored *made = *state;
  start(made);
  monitored_steps(made, 20, 13);
  seconds(made, 6, 2000);
  even_state_rank *at = &made->monitor->state->rank[1];
  at->usage_before = (even_rank_usage){.at_ns = 1000000000, .pressure = {0, 0, 0, 0}};
  at->usage = (even_rank_usage){.at_ns = 2000000000, .cpu_seconds = 0.2, .throttled_seconds = 0.75};
  seconds(made, EVEN_LINK_LOOKS, 16000);
  monitored_expect_heard("instead of 2; meanwhile rank 1: CPU quota, stopped by its CPU quota 75% of the time|", true);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
}

static void what_lasts_is_over_when_other_processes_meet(void **state) {
  monitored *made = *state;
  start(made);
  monitored_steps(made, 20, 13);
  seconds(made, 6, 2000);
  seconds(made, EVEN_LINK_LOOKS, 16000);
  even_monitor_attempt(made->monitor, 1);
  monitored_expect_heard("the link between hosts first and second was 8.0x slower from about step 19 to", true);
  seconds(made, 6, 16000); /* what is usual is learnt anew */
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  assert_int_equal(monitored_number(made, "SELECT count(*) FROM events WHERE event='link'"), 2);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_slow_link_is_told_when_it_begins_and_when_it_ends, monitored_set_up,
                                      monitored_tear_down),
      cmocka_unit_test_setup_teardown(what_the_kernel_says_of_a_rank_there_is_told_with_it, monitored_set_up,
                                      monitored_tear_down),
      cmocka_unit_test_setup_teardown(what_lasts_is_over_when_other_processes_meet, monitored_set_up,
                                      monitored_tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
