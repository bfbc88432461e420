/* Ranks that run a share as several micro-batches: shares end with whole ones where that is faster. */
#include <evenstep/balancer.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "balancer/model.h"
#include "balancer/pseudo_random.h"
#include "late.h"

enum { SEEDS = 4, BATCH = 64, SIZE = 16, TOLD_AT = 20, SETTLED = 40 };

static even_balancer *open_for(size_t ranks) {
  const even_balancer_params params = late_params(EVEN_POLICY_AUTO, ranks, BATCH);
  return late_balancer(&params);
}

/* The first rank runs micro-batches of 16 samples, each of which costs 6 ms more than them; the other takes
 * `per_sample` seconds for each in one piece. */
static even_cluster stairs(double per_sample, double noise) {
  even_cluster c = {.ranks = 2, .first_step = 3.0};
  c.rank[0] =
      (even_cluster_rank){.fixed = 0.001, .per_sample = 0.001, .micro_batch = SIZE, .per_piece = 0.006, .noise = noise};
  c.rank[1] = (even_cluster_rank){.fixed = 0.001, .per_sample = per_sample, .noise = noise};
  return c;
}

static const int64_t of_first[2] = {SIZE, 0};
static const double six[2] = {6.0, 0.0};

typedef struct outcome {
  double efficiency;
  double seconds;
  int64_t shares[EVEN_CLUSTER_RANKS]; /* of the last step */
} outcome;

/* Of so many steps after the first ones. Before long the balancer is told of micro-batches (NULL: nothing). */
static outcome run(const even_cluster *ranks, const int64_t *sizes, const double *more, int steps, uint64_t seed) {
  const even_balancer_params params = late_params(EVEN_POLICY_AUTO, ranks->ranks, BATCH);
  late_job job;
  late_open(&job, &params, ranks, seed * 7919);
  late_steps(&job, TOLD_AT);
  if (sizes != NULL) {
    assert_int_equal(even_balancer_set_micro_batches(job.balancer, sizes, more), EVEN_OK);
  }
  late_steps(&job, SETTLED - TOLD_AT);
  double before = job.seconds;
  outcome out = {.efficiency = late_efficiency(&job, steps)};
  out.seconds = job.seconds - before;
  memcpy(out.shares, job.ran, sizeof out.shares);
  late_close(&job);
  return out;
}

/* Four ranks of any speeds, each with micro-batches of its own. */
static even_cluster any_ranks(uint64_t *state, double noise, int64_t *sizes, double *more) {
  even_cluster c = {.ranks = 4, .first_step = 3.0};
  for (size_t r = 0; r < c.ranks; r++) {
    double each = 0.001 * (1.0 + 3.0 * even_pseudo_random_unit(state));
    sizes[r] = 4 + (int64_t)(20.0 * even_pseudo_random_unit(state));
    more[r] = 1.0 + 11.0 * even_pseudo_random_unit(state);
    c.rank[r] = (even_cluster_rank){
        .fixed = 0.002, .per_sample = each, .micro_batch = sizes[r], .per_piece = each * more[r], .noise = noise};
  }
  return c;
}

static void shares_end_with_whole_micro_batches_where_that_is_faster(void **context) {
  (void)context;
  const double noise[] = {0.0, 0.05, 0.10};
  for (size_t i = 0; i < 3; i++) {
    uint64_t state = 5;
    double told = 0.0;
    double silent = 0.0;
    for (int number = 0; number < 24; number++) {
      int64_t sizes[4];
      double more[4];
      const even_cluster ranks = any_ranks(&state, noise[i], sizes, more);
      outcome knows = run(&ranks, sizes, more, 200, 1);
      outcome not = run(&ranks, NULL, NULL, 200, 1);
      assert_true(knows.efficiency >= 0.94);
      told += knows.efficiency / 24.0;
      silent += not.efficiency / 24.0;
    }
    assert_true(told >= 0.99);
    assert_true(silent <= told - 0.005); /* it is worth it: else what sizes take has to be found by running them */
  }
}

static void noise_does_not_hide_it(void **context) {
  (void)context;
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    const even_cluster ranks = stairs(0.004, 0.05);
    outcome told = run(&ranks, of_first, six, 300, seed);
    assert_true(told.efficiency >= 0.97);
  }
}

static void the_split_is_the_best_one(void **context) {
  (void)context;
  const even_cluster ranks = stairs(0.004, 0.0);
  outcome told = run(&ranks, of_first, six, 100, 1);
  int64_t best[2];
  assert_int_equal(even_cluster_best(&ranks, BATCH, best), EVEN_OK);
  assert_int_equal(best[0], 48);
  assert_memory_equal(told.shares, best, sizeof best);
}

/* Sizes alone, of which is not known what they cost. */
static void what_costs_nothing_changes_nothing(void **context) {
  (void)context;
  const double nothing[2] = {0.0, 0.0};
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    const even_cluster ranks = stairs(0.003, 0.1);
    outcome told = run(&ranks, of_first, nothing, 300, seed);
    outcome silent = run(&ranks, NULL, NULL, 300, seed);
    assert_memory_equal(told.shares, silent.shares, ranks.ranks * sizeof *told.shares);
    assert_true(told.seconds <= silent.seconds && told.seconds >= silent.seconds);
  }
}

static void what_is_believed_is_a_staircase(void **context) {
  (void)context;
  const int64_t split[][2] = {{32, 32}, {40, 24}, {49, 15}, {20, 44}};
  even_balancer *balancer = open_for(2);
  for (int i = 0; i < 64; i++) {
    const int64_t *shares = split[i % 4];
    double pieces = ceil((double)shares[0] / (double)SIZE);
    const even_step_timing timings[2] = {{shares[0], 0.001 + 0.006 * pieces + 0.001 * (double)shares[0]},
                                         {shares[1], 0.002 * (double)shares[1]}};
    if (i == 30) {
      assert_int_equal(even_balancer_set_micro_batches(balancer, of_first, six), EVEN_OK);
    }
    assert_int_equal(even_balancer_observe(balancer, timings), EVEN_OK);
  }
  for (int64_t samples = 1; samples <= BATCH; samples++) {
    double truth = 0.001 + 0.006 * ceil((double)samples / (double)SIZE) + 0.001 * (double)samples;
    assert_true(fabs(even_balancer_predict(balancer, 0, samples) / truth - 1.0) < 0.02);
  }
  even_balancer_close(balancer);
}

/* Told of more than the whole fixed part: it still counts for each of them. */
static void a_first_one_that_costs_nothing_makes_the_others_no_cheaper(void **context) {
  (void)context;
  const int64_t split[][2] = {{32, 32}, {40, 24}, {49, 15}, {20, 44}};
  even_balancer *balancer = open_for(2);
  int64_t shares[2];
  for (int i = 0; i < 64; i++) {
    const int64_t *ran = split[i % 4];
    double further = ceil((double)ran[0] / (double)SIZE) - 1.0;
    const even_step_timing timings[2] = {{ran[0], 0.006 * further + 0.001 * (double)ran[0]},
                                         {ran[1], 0.004 * (double)ran[1]}};
    assert_int_equal(even_balancer_set_micro_batches(balancer, of_first, six), EVEN_OK);
    assert_int_equal(even_balancer_observe(balancer, timings), EVEN_OK);
  }
  assert_int_equal(even_balancer_without_caps(balancer, shares, NULL), EVEN_OK);
  assert_int_equal(shares[0], 48);
  even_balancer_close(balancer);
}

static even_rank_model measured(int64_t share, int64_t size, double more, double each) {
  even_rank_model model = {.block = 1};
  even_model_set_pieces(&model, size, more);
  for (int i = 0; i < 32; i++) {
    double further = ceil((double)share / (double)size) - 1.0;
    assert_true(even_model_take(&model, share, each * (4.0 + (double)share + more * further), false));
  }
  even_model_learn(&model);
  return model;
}

/* Not what they cost as so many samples more: a line is trusted up to twice that share. */
static void the_largest_share_is_in_samples(void **context) {
  (void)context;
  even_rank_model model = measured(32, 8, 60.0, 0.001);
  assert_true(fabs(model.most_samples - 32.0) < 1e-6);
  /* slower for a while, with less, and as fast again: what it did before counts, in samples, however it is cut now */
  for (int i = 0; i < 16; i++) {
    (void)even_model_take(&model, 8, 0.060, false);
    even_model_learn(&model);
  }
  assert_true(fabs(model.known_samples - 32.0) < 1e-6);
  assert_true(fabs(even_model_measured(&model) - 8.0) < 1e-6);
  for (int i = 0; i < 32; i++) {
    (void)even_model_take(&model, 8, 0.012, false);
    even_model_learn(&model);
  }
  assert_true(fabs(even_model_measured(&model) - 32.0) < 1e-6);
  even_model_set_pieces(&model, 4, 10.0);
  even_model_learn(&model);
  assert_true(model.most_samples < 9.0 && fabs(model.known_samples - 32.0) < 1e-6);
}

/* Steps that were taken together had 1.5 further ones in the mean: no whole number stands for them. */
static void means_of_steps_keep_how_many_there_were(void **context) {
  (void)context;
  even_rank_model model = {.block = 2};
  even_model_set_pieces(&model, 8, 2.0);
  assert_false(even_model_take(&model, 16, 0.020, false));
  assert_true(even_model_take(&model, 24, 0.030, false));
  even_model_set_pieces(&model, 8, 4.0);
  assert_true(fabs(model.samples[0] - (20.0 + 4.0 * 1.5)) < 1e-9);
}

/* Of a rank with buckets too: 13 samples in pieces of 6 are counted as 16, not as 24, until it is known. */
static void sizes_alone_pad_no_share(void **context) {
  (void)context;
  even_rank_model model = {.block = 1, .bucket = 8};
  even_model_set_pieces(&model, 6, 0.0);
  assert_true(even_model_take(&model, 13, 0.020, false));
  assert_true(fabs(model.samples[0] - 16.0) < 1e-9);
}

static void wrong_numbers_are_refused(void **context) {
  (void)context;
  const int64_t wrong_sizes[2] = {16, -1};
  const double wrong[][2] = {{NAN, 0.0}, {6.0, -1.0}, {INFINITY, 0.0}};
  even_balancer *balancer = open_for(2);
  assert_int_equal(even_balancer_set_micro_batches(balancer, wrong_sizes, six), EVEN_ERR_ARGUMENT);
  assert_non_null(strstr(even_error_last()->what, "rank 1"));
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    assert_int_equal(even_balancer_set_micro_batches(balancer, of_first, wrong[i]), EVEN_ERR_ARGUMENT);
  }
  even_balancer_close(balancer);
}

/* Legal but absurd, at any time: shares stay a split of the batch. */
static void absurd_numbers_do_no_harm(void **context) {
  (void)context;
  const double times[] = {1e308, 0.0, 5e-324, 1e-300, 0.1};
  const double more[] = {0.0, 1e308, 5e-324, 6.0, 1e12, 3.0};
  const int64_t sizes[] = {1, INT64_MAX, 16, 0, 7};
  even_balancer *balancer = open_for(2);
  for (int i = 0; i < 400; i++) {
    int64_t shares[2];
    assert_int_equal(even_balancer_shares(balancer, BATCH, shares), EVEN_OK);
    assert_true(shares[0] >= 0 && shares[1] >= 0);
    assert_int_equal(shares[0] + shares[1], BATCH);
    const int64_t cut[2] = {sizes[(i / 10) % 5], sizes[(i / 7) % 5]};
    const double cost[2] = {more[(i / 5) % 6], more[(i / 30) % 6]};
    assert_int_equal(even_balancer_set_micro_batches(balancer, cut, cost), EVEN_OK);
    const even_step_timing timings[2] = {{i % 9 == 0 ? INT64_MAX : shares[0], times[i % 5]},
                                         {shares[1], times[(i / 3) % 5]}};
    assert_int_equal(even_balancer_observe(balancer, timings), EVEN_OK);
    assert_true(isfinite(even_balancer_predict(balancer, 0, 7)));
  }
  even_balancer_close(balancer);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(shares_end_with_whole_micro_batches_where_that_is_faster),
      cmocka_unit_test(noise_does_not_hide_it),
      cmocka_unit_test(the_split_is_the_best_one),
      cmocka_unit_test(what_costs_nothing_changes_nothing),
      cmocka_unit_test(what_is_believed_is_a_staircase),
      cmocka_unit_test(a_first_one_that_costs_nothing_makes_the_others_no_cheaper),
      cmocka_unit_test(the_largest_share_is_in_samples),
      cmocka_unit_test(means_of_steps_keep_how_many_there_were),
      cmocka_unit_test(sizes_alone_pad_no_share),
      cmocka_unit_test(wrong_numbers_are_refused),
      cmocka_unit_test(absurd_numbers_do_no_harm),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
