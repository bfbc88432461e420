/* Trials of one split against another: who wins, and that the worst challenger costs little. */
#include "balancer/trial.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* Steps of one second before the trial. */
static even_trial begun(void) {
  even_trial trial = {0};
  for (int i = 0; i < EVEN_TRIAL_WINDOW; i++) {
    assert_int_equal(even_trial_take(&trial, false, 1.0), EVEN_TRIAL_GOES_ON);
  }
  even_trial_begin(&trial, 0.015);
  return trial;
}

static void worst_challenger_costs_eight_steps_and_its_own_last(void **context) {
  (void)context;
  for (double slow = 1.05; slow < 1e4; slow *= 1.3) {
    even_trial trial = begun();
    double lost = 0.0;
    even_trial_result result = EVEN_TRIAL_GOES_ON;
    int steps = 0;
    for (; result == EVEN_TRIAL_GOES_ON; steps++) {
      assert_true(steps < 64);
      lost += slow - 1.0;
      result = even_trial_take(&trial, true, slow);
    }
    assert_int_equal(result, EVEN_TRIAL_LOST);
    assert_true(lost <= 8.0 + slow);
    assert_true(trial.lost <= lost + 1e-9 && trial.lost >= lost - 1e-9);
    assert_int_equal(trial.state, EVEN_TRIAL_IDLE);
  }
}

static void faster_challenger_wins_when_the_other_split_has_not_become_faster_too(void **context) {
  (void)context;
  const struct {
    double challenger, after;
    even_trial_result result;
  } cases[] = {{0.9, 1.0, EVEN_TRIAL_WON}, {0.9, 0.9, EVEN_TRIAL_LOST}, {0.99, 1.0, EVEN_TRIAL_LOST}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    even_trial trial = begun();
    even_trial_result result = EVEN_TRIAL_GOES_ON;
    for (int step = 0; result == EVEN_TRIAL_GOES_ON; step++) {
      assert_true(step < 128);
      bool challenger = trial.state == EVEN_TRIAL_CHALLENGER_RUNS;
      result = even_trial_take(&trial, challenger, challenger ? cases[i].challenger : cases[i].after);
    }
    assert_int_equal(result, cases[i].result);
  }
}

/* Whatever else would keep the shares as they are for ever. */
static void what_never_runs_has_lost(void **context) {
  (void)context;
  for (int ran = 0; ran <= 40; ran += 40) {
    even_trial trial = begun();
    even_trial_result result = EVEN_TRIAL_GOES_ON;
    for (int step = 0; step < ran; step++) {
      result = even_trial_take(&trial, true, 0.9);
      assert_int_equal(result, EVEN_TRIAL_GOES_ON);
    }
    bool checked = ran > 0;
    assert_int_equal(trial.state, checked ? EVEN_TRIAL_CHECKED : EVEN_TRIAL_CHALLENGER_RUNS);
    int steps = 0;
    for (; result == EVEN_TRIAL_GOES_ON; steps++) {
      assert_true(steps < EVEN_TRIAL_MISSED);
      result = even_trial_take(&trial, checked, 1.0);
    }
    assert_true(steps > 255);
    assert_int_equal(result, EVEN_TRIAL_LOST);
    assert_int_equal(trial.state, EVEN_TRIAL_IDLE);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(worst_challenger_costs_eight_steps_and_its_own_last),
      cmocka_unit_test(faster_challenger_wins_when_the_other_split_has_not_become_faster_too),
      cmocka_unit_test(what_never_runs_has_lost),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
