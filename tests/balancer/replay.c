/* The last steps, replayed with other splits: the best one of them, how sure that is, and when they tell nothing. */
#include "balancer/replay.h"
#include "balancer/pseudo_random.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 17, BATCH = 64 };

typedef struct ranks {
  size_t count;
  even_rank_model models[MOST];
  even_replay replay;
  uint64_t state;
} ranks;

static void open_ranks(ranks *of, size_t count) {
  memset(of, 0, sizeof *of);
  of->count = count;
  of->state = 7;
  for (size_t r = 0; r < count; r++) {
    of->models[r].known = true;
    of->models[r].block = 1;
    of->models[r].count = EVEN_MODEL_WINDOW;
    of->models[r].fixed_seconds = 0.003 * (double)(1 + 3 * r);
    of->models[r].seconds_per_sample = 0.001 * (double)(1 + 3 * r);
  }
  assert_int_equal(even_replay_open(&of->replay, count), EVEN_OK);
}

/* Rank r's time scatters evenly by scatter[r] to either side. */
static void take(ranks *of, const int64_t *shares, const double *scatter, int steps) {
  even_step_timing timings[MOST];
  for (int i = 0; i < steps; i++) {
    for (size_t r = 0; r < of->count; r++) {
      double off = scatter[r] * (2.0 * even_pseudo_random_unit(&of->state) - 1.0);
      timings[r] = (even_step_timing){shares[r], even_model_line(&of->models[r], (double)shares[r]) * (1.0 + off)};
    }
    even_replay_take(&of->replay, timings, of->count);
  }
}

static double mean(const ranks *of, const int64_t *shares, int steps) {
  return even_replay_compare(&of->replay, of->models, of->count, steps, shares, shares).seconds;
}

static void the_best_of_all_splits_is_found(void **context) {
  (void)context;
  const double scatter[][2] = {{0.0, 0.0}, {0.05, 0.20}, {0.20, 0.05}, {0.20, 0.20}};
  int64_t steady = 0;
  for (size_t i = 0; i < sizeof scatter / sizeof scatter[0]; i++) {
    const int64_t ran[2] = {50, 14};
    const int64_t most[2] = {BATCH, BATCH};
    int64_t found[2] = {48, 16};
    ranks of;
    open_ranks(&of, 2);
    take(&of, ran, scatter[i], 3 * EVEN_REPLAY_STEPS);
    int steps = even_replay_begin(&of.replay, of.models, ran, 2, EVEN_REPLAY_LEAST);
    assert_int_equal(steps, EVEN_REPLAY_STEPS);
    even_replay_descend(&of.replay, of.models, most, 2, steps, found);
    assert_int_equal(found[0] + found[1], BATCH);
    for (int64_t first = 1; first < BATCH; first++) {
      const int64_t other[2] = {first, BATCH - first};
      assert_true(mean(&of, found, steps) <= mean(&of, other, steps) * (1.0 + 1e-5));
    }
    assert_true(i == 0 || found[1] < steady); /* a slow rank that may be late gets less */
    steady = i == 0 ? found[1] : steady;
    even_replay_close(&of.replay);
  }
}

static void shares_stay_within_their_limits(void **context) {
  (void)context;
  const double scatter[2] = {0.1, 0.1};
  const int64_t ran[2] = {32, 32};
  const int64_t most[2] = {40, BATCH};
  int64_t found[2] = {32, 32};
  ranks of;
  open_ranks(&of, 2);
  take(&of, ran, scatter, EVEN_REPLAY_STEPS);
  assert_int_equal(even_replay_begin(&of.replay, of.models, ran, 2, EVEN_REPLAY_LEAST), EVEN_REPLAY_STEPS);
  even_replay_descend(&of.replay, of.models, most, 2, EVEN_REPLAY_STEPS, found);
  assert_int_equal(found[0], 40);
  assert_int_equal(found[1], 24);
  even_replay_close(&of.replay);
}

/* By the same steps: what all ranks share is no error of the difference. */
static void what_all_ranks_share_is_no_difference(void **context) {
  (void)context;
  const int64_t one[2] = {50, 14};
  const int64_t other[2] = {52, 12};
  even_step_timing timings[2];
  ranks of;
  open_ranks(&of, 2);
  for (int i = 0; i < EVEN_REPLAY_STEPS; i++) {
    double phase = i < EVEN_REPLAY_STEPS / 2 ? 1.0 : 1.3; /* the machine is slower by a third */
    for (size_t r = 0; r < 2; r++) {
      timings[r] = (even_step_timing){one[r], even_model_line(&of.models[r], (double)one[r]) * phase};
    }
    even_replay_take(&of.replay, timings, 2);
  }
  assert_int_equal(even_replay_begin(&of.replay, of.models, one, 2, EVEN_REPLAY_LEAST), EVEN_REPLAY_STEPS);
  even_replay_gain found = even_replay_compare(&of.replay, of.models, 2, EVEN_REPLAY_STEPS, one, other);
  assert_true(fabs(found.seconds - 0.068 * 1.15) < 1e-9);
  assert_true(fabs(found.gain - 0.008 * 1.15) < 1e-9);
  assert_true(found.gain > 5.0 * found.error && found.error > 0.0);
  even_replay_gain back = even_replay_compare(&of.replay, of.models, 2, EVEN_REPLAY_STEPS, other, one);
  assert_true(fabs(back.gain + found.gain) < 1e-12);
  even_replay_close(&of.replay);
}

static void what_tells_nothing_is_not_used(void **context) {
  (void)context;
  const double scatter[MOST] = {0.1, 0.1};
  const double stopped[MOST] = {0.1, 0.8};
  const int64_t shares[MOST] = {50, 14};
  const int64_t left_out[MOST] = {BATCH, 0};
  ranks of;
  open_ranks(&of, 2);
  take(&of, shares, scatter, EVEN_REPLAY_LEAST - 1);
  assert_int_equal(even_replay_begin(&of.replay, of.models, shares, 2, EVEN_REPLAY_LEAST), 0); /* too few */
  take(&of, shares, scatter, 1);
  assert_int_equal(even_replay_begin(&of.replay, of.models, shares, 2, EVEN_REPLAY_LEAST), EVEN_REPLAY_LEAST);
  assert_int_equal(even_replay_begin(&of.replay, of.models, left_out, 2, EVEN_REPLAY_LEAST), 0);
  of.models[0].count = EVEN_REPLAY_FEW; /* enough to speak against a change */
  assert_int_equal(even_replay_begin(&of.replay, of.models, shares, 2, EVEN_REPLAY_FEW), EVEN_REPLAY_FEW);
  of.models[0].count = EVEN_REPLAY_FEW - 1;
  assert_int_equal(even_replay_begin(&of.replay, of.models, shares, 2, EVEN_REPLAY_FEW), 0);
  of.models[0].count = EVEN_REPLAY_LEAST - 1; /* it was another rank before that */
  assert_int_equal(even_replay_begin(&of.replay, of.models, shares, 2, EVEN_REPLAY_LEAST), 0);
  of.models[0].count = EVEN_MODEL_WINDOW;
  of.models[1].bucket = 8;
  assert_int_equal(even_replay_begin(&of.replay, of.models, shares, 2, EVEN_REPLAY_LEAST), 0);
  of.models[1].bucket = 0;
  take(&of, shares, stopped, EVEN_REPLAY_STEPS);
  assert_int_equal(even_replay_begin(&of.replay, of.models, shares, 2, EVEN_REPLAY_LEAST), 0); /* stopped, not noisy */
  even_replay_close(&of.replay);
  open_ranks(&of, EVEN_REPLAY_RANKS + 1); /* too many */
  assert_null(of.replay.seconds);
  take(&of, shares, scatter, 1);
  assert_int_equal(even_replay_begin(&of.replay, of.models, shares, EVEN_REPLAY_RANKS + 1, EVEN_REPLAY_LEAST), 0);
  even_replay_close(&of.replay);
}

/* As many as only a broken caller tells of: they take very long, so such a step was fast. */
static void more_samples_than_a_model_counts_are_cut(void **context) {
  (void)context;
  ranks of;
  open_ranks(&of, 2);
  const int64_t current[2] = {50, 14};
  const even_step_timing timings[2] = {{INT64_MAX, 1.0}, {14, 0.068}};
  for (int i = 0; i < EVEN_REPLAY_STEPS; i++) {
    even_replay_take(&of.replay, timings, 2);
  }
  assert_true(even_replay_begin(&of.replay, of.models, current, 2, EVEN_REPLAY_LEAST) > 0);
  assert_true(of.replay.ratios[0] > 0.0 && of.replay.ratios[0] < 1e-9);
  even_replay_close(&of.replay);
}

/* So that a few do not hide what the other steps say. */
static void a_stall_counts_as_one_step_and_a_half(void **context) {
  (void)context;
  const double scatter[2] = {0.0, 0.0};
  const int64_t shares[2] = {50, 14};
  const even_step_timing stalled[2] = {{50, 5 * 0.053}, {14, 0.068}};
  ranks of;
  open_ranks(&of, 2);
  take(&of, shares, scatter, EVEN_REPLAY_STEPS - 1);
  even_replay_take(&of.replay, stalled, 2);
  assert_int_equal(even_replay_begin(&of.replay, of.models, shares, 2, EVEN_REPLAY_LEAST), EVEN_REPLAY_STEPS);
  double seconds = (0.068 * (double)(EVEN_REPLAY_STEPS - 1) + 1.5 * 0.053) / (double)EVEN_REPLAY_STEPS;
  assert_true(fabs(mean(&of, shares, EVEN_REPLAY_STEPS) - seconds) < 1e-9);
  even_replay_close(&of.replay);
}

/* What their steps scatter by is known, though not what they would take with other samples. */
static void ranks_in_whole_buckets_scatter(void **context) {
  (void)context;
  const double scatter[2] = {0.1, 0.1};
  const int64_t shares[2] = {48, 16};
  double squares[2] = {0};
  ranks of;
  open_ranks(&of, 2);
  of.models[0].bucket = of.models[1].bucket = 8;
  take(&of, shares, scatter, EVEN_REPLAY_STEPS);
  even_replay_scatter(&of.replay, of.models, shares, 2, squares);
  assert_true(squares[0] > 0.001 && squares[1] > 0.001);
  assert_int_equal(even_replay_begin(&of.replay, of.models, shares, 2, EVEN_REPLAY_LEAST), 0);
  even_replay_close(&of.replay);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_best_of_all_splits_is_found),
      cmocka_unit_test(shares_stay_within_their_limits),
      cmocka_unit_test(what_all_ranks_share_is_no_difference),
      cmocka_unit_test(what_tells_nothing_is_not_used),
      cmocka_unit_test(more_samples_than_a_model_counts_are_cut),
      cmocka_unit_test(a_stall_counts_as_one_step_and_a_half),
      cmocka_unit_test(ranks_in_whole_buckets_scatter),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
