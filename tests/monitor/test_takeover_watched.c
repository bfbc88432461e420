/* What the killed agent watched when it was: the next one goes on where the history tells enough, and ends the rest. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "monitor/monitored.h"
#include "monitor/parts.h"

#include <math.h>

static void take_over(monitored *made) {
  monitored_kill(made);
  monitored_begin(made, true, 0);
}

static void slow_steps(monitored *made, int count, double speed) {
  made->ranks.speeds[1] = speed;
  for (int i = 0; i < count; i += 10) {
    monitored_steps(made, 10, 12);
  }
}

static void a_straggler_lasts_on_and_ends_once(void **state) {
  monitored *run = *state;
  run->ranks.speeds[0] = 40;
  monitored_begin(run, false, 0);
  slow_steps(run, 100, 20);
  slow_steps(run, 40, 4);
  for (int look = 0; look < 4; look++) { /* for a cause */
    run->monitor->looked_ns = 0;
    monitored_steps(run, 1, 12);
  }
  assert_true(run->monitor->state->faults[EVEN_FAULT_STRAGGLER].lasting == 1);
  monitored_committed(run);
  double begin_step = monitored_number(run, "SELECT begin_step FROM stragglers");
  take_over(run);
  slow_steps(run, 60, 4);
  assert_true(run->monitor->state->faults[EVEN_FAULT_STRAGGLER].lasting == 1);
  monitored_committed(run);
  assert_true(isnan(monitored_number(run, "SELECT end_step FROM stragglers")));
  slow_steps(run, 100, 20);
  monitored_committed(run);
  assert_true(run->monitor->state->faults[EVEN_FAULT_STRAGGLER].lasting == 0);
  assert_true(monitored_number(run, "SELECT count(*) FROM stragglers") == 1);
  assert_true(monitored_number(run, "SELECT begin_step FROM stragglers") == begin_step);
  assert_true(monitored_number(run, "SELECT end_step FROM stragglers") > 190);
  assert_true(monitored_number(run, "SELECT count(*) FROM events WHERE event = 'straggler'") == 2);
  assert_int_equal(even_monitor_close(run->monitor, 0), EVEN_OK);
}

/* Its steps, and what was told of it, do not say that it is one still. */
static void a_straggler_that_nobody_can_follow_is_over(void **state) {
  monitored *run = *state;
  monitored_begin(run, false, 0);
  monitored_steps(run, 3, 12);
  const even_state_straggler told = {.attempt = 0, .rank = 1, .factor = 1.2, .begin_step = 1, .begin_ns = 5};
  assert_int_equal(even_database_straggler(run->monitor->database, &told), EVEN_OK);
  even_monitor_note(run->monitor, EVEN_EVENT_STRAGGLER, 1, 120, "slow");
  monitored_committed(run);
  take_over(run);
  monitored_committed(run);
  assert_true(run->monitor->state->faults[EVEN_FAULT_STRAGGLER].lasting == 0);
  assert_true(monitored_number(run, "SELECT end_step FROM stragglers") == 2);
  assert_int_equal(even_monitor_close(run->monitor, 0), EVEN_OK);
}

/* The next agent sees anew whether a rank hangs; the numbers that are not finite are the ranks' own affair. */
static void what_the_agent_watched_is_over_and_what_ranks_tell_lasts(void **state) {
  monitored *run = *state;
  monitored_begin(run, false, 0);
  monitored_steps(run, 3, 12);
  feed_event(&run->ranks, 0, EVEN_EVENT_NONFINITE, 1, "gradients are not finite");
  even_monitor_hang(run->monitor, 1, false, "rank 1 hangs");
  monitored_committed(run);
  take_over(run);
  monitored_committed(run);
  assert_int_equal(run->monitor->state->faults[EVEN_FAULT_HANG].lasting, 0);
  assert_int_equal(run->monitor->state->faults[EVEN_FAULT_HANG].count, 1);
  assert_int_equal(run->monitor->state->faults[EVEN_FAULT_NONFINITE].lasting, 1);
  even_monitor_hang(run->monitor, 1, false, "rank 1 hangs");
  even_monitor_hang(run->monitor, 1, true, "rank 1 goes on");
  assert_int_equal(run->monitor->state->faults[EVEN_FAULT_HANG].lasting, 0);
  assert_int_equal(even_monitor_close(run->monitor, 0), EVEN_OK);
  assert_true(monitored_number(run, "SELECT count(*) FROM events WHERE event = 'hang'") == 4);
}

/* Losses of before say what a jump is: given by the script, or those of the steps. */
static void jumping_losses(monitored *run, bool given) {
  const uint32_t shares[2] = {12, 4};
  monitored_begin(run, false, 0);
  for (int i = 0; i < 60; i++) {
    if (given) {
      feed_scalar(&run->ranks, 0, run->ranks.step, "loss", 1);
    }
    feed_step(&run->ranks, shares);
  }
  monitored_committed(run);
  take_over(run);
  assert_int_equal(run->monitor->state->loss_given, given);
  if (given) {
    feed_scalar(&run->ranks, 0, run->ranks.step, "loss", 50);
  } else {
    const even_step_record record = {.step = run->ranks.step,
                                     .end_ns = run->ranks.now_ns + 1000000,
                                     .duration_ns = 1000000,
                                     .busy_ns = 1000000,
                                     .samples = 12,
                                     .batch = 16,
                                     .loss = 500};
    even_telemetry_step(run->ranks.writers[0], &record);
  }
  assert_int_equal(even_monitor_tick(run->monitor), EVEN_OK);
  assert_int_equal(run->monitor->state->faults[EVEN_FAULT_SPIKE].lasting, 1);
  monitored_committed(run);
  take_over(run); /* in the middle of it */
  assert_int_equal(run->monitor->state->faults[EVEN_FAULT_SPIKE].lasting, 1);
  assert_int_equal(even_monitor_close(run->monitor, 0), EVEN_OK);
}

static void a_loss_jumps_beside_those_of_before(void **state) {
  monitored *made = *state;
  jumping_losses(made, false);
}

static void a_loss_of_the_script_jumps_beside_those_of_before(void **state) {
  monitored *made = *state;
  jumping_losses(made, true);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, monitored_set_up, monitored_tear_down)
  const struct CMUnitTest tests[] = {
      TEST(a_straggler_lasts_on_and_ends_once),
      TEST(a_straggler_that_nobody_can_follow_is_over),
      TEST(what_the_agent_watched_is_over_and_what_ranks_tell_lasts),
      TEST(a_loss_jumps_beside_those_of_before),
      TEST(a_loss_of_the_script_jumps_beside_those_of_before),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
