/* A rank's own part of the exchange: shares make up for it where it is really there, and stay to the bit what they are
 * where it is not. */
#include <evenstep/balancer.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "late.h"

enum { SEEDS = 4, BATCH = 64 };

static even_balancer *open_for(size_t ranks) {
  const even_balancer_params params = late_params(EVEN_POLICY_AUTO, ranks, BATCH);
  return late_balancer(&params);
}

static void open_job(late_job *of, const even_cluster *ranks, uint64_t seed) {
  const even_balancer_params params = late_params(EVEN_POLICY_AUTO, ranks->ranks, BATCH);
  late_open(of, &params, ranks, seed * 7919);
}

static even_cluster equal(size_t ranks, double noise) {
  even_cluster c = {.ranks = ranks, .first_step = 3.0};
  for (size_t r = 0; r < ranks; r++) {
    c.rank[r] = (even_cluster_rank){.fixed = 0.001, .per_sample = 0.001, .noise = noise};
  }
  return c;
}

/* The fastest of four pays most for its exchange. */
static even_cluster unequal(double noise) {
  even_cluster c = {.ranks = 4, .first_step = 3.0};
  for (size_t r = 0; r < c.ranks; r++) {
    double slow = (double)(r + 1);
    c.rank[r] = (even_cluster_rank){.fixed = 0.002 * slow, .per_sample = 0.001 * slow, .noise = noise};
    c.rank[r].own = 0.002;
    c.rank[r].own_noise = 0.3;
  }
  c.rank[0].own = 0.012;
  return c;
}

static void shares_make_up_for_it(void **context) {
  (void)context;
  const double noise[] = {0.0, 0.05};
  for (size_t i = 0; i < 2; i++) {
    even_cluster two = equal(2, noise[i]);
    two.rank[0].own = 0.010;
    two.rank[0].own_noise = 0.2;
    const even_cluster all[] = {two, unequal(noise[i])};
    for (size_t kind = 0; kind < 2; kind++) {
      for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        late_job told;
        late_job silent;
        open_job(&told, &all[kind], seed);
        open_job(&silent, &all[kind], seed);
        silent.silent = true;
        late_steps(&told, 40);
        late_steps(&silent, 40);
        assert_true(late_efficiency(&told, 200) >= 0.97);
        assert_true(late_efficiency(&silent, 200) < 0.92); /* it is worth it */
        late_close(&told);
        late_close(&silent);
      }
    }
  }
}

static void the_split_is_the_best_one(void **context) {
  (void)context;
  even_cluster ranks = equal(2, 0.0);
  ranks.rank[0].own = 0.010;
  late_job of;
  open_job(&of, &ranks, 1);
  late_steps(&of, 60);
  const int64_t best[2] = {27, 37};
  assert_memory_equal(of.queue[LATE_AHEAD], best, sizeof best);
  /* 0.001 + 27 * 0.001 + 0.010: what is believed has it in */
  assert_true(fabs(even_balancer_predict(of.balancer, 0, 27) - 0.038) < 0.0005);
  assert_true(fabs(even_balancer_predict(of.balancer, 1, 37) - 0.038) < 0.0005);
  late_close(&of);
}

/* All that was measured before counts with it: nothing has to be learned anew. */
static void it_counts_in_whole_at_once(void **context) {
  (void)context;
  even_cluster ranks = equal(2, 0.0);
  late_job of;
  open_job(&of, &ranks, 1);
  late_steps(&of, 100);
  int with = 0;
  for (int turn = 0; turn < 4; turn++) {
    of.ranks.rank[0].own = turn % 2 == 0 ? 0.010 : 0.0;
    for (int i = 0; i < 40; i++) {
      late_steps(&of, 1);
      double believed = even_balancer_predict(of.balancer, 0, 32);
      bool in = believed > 0.038;
      assert_true(fabs(believed - (in ? 0.043 : 0.033)) < 0.0005);
      with += in;
    }
  }
  assert_true(with > 40 && with < 120);
  late_close(&of);
}

/* Equal shares are faster by busy time alone: trials must count what the exchange takes. */
static void trials_do_not_take_it_back(void **context) {
  (void)context;
  even_cluster ranks = equal(2, 0.03);
  ranks.rank[0].own = 0.010;
  late_job of;
  open_job(&of, &ranks, 2);
  for (int i = 0; i < 2000; i++) {
    late_steps(&of, 1);
    assert_false(even_balancer_on_equal(of.balancer, NULL, NULL));
  }
  assert_true(late_efficiency(&of, 200) >= 0.97);
  late_close(&of);
}

static void it_comes_and_goes(void **context) {
  (void)context;
  even_cluster ranks = equal(3, 0.02);
  late_job of;
  open_job(&of, &ranks, 3);
  late_steps(&of, 100);
  for (int turn = 0; turn < 3; turn++) {
    of.ranks.rank[1].own = of.twin.rank[1].own = 0.008;
    late_steps(&of, 50);
    assert_true(late_efficiency(&of, 50) >= 0.97);
    of.ranks.rank[1].own = of.twin.rank[1].own = 0.0;
    late_steps(&of, 50);
    assert_true(late_efficiency(&of, 50) >= 0.97);
  }
  late_close(&of);
}

/* What is told changes no share in any step. */
static void assert_changes_nothing(const even_cluster *ranks, int count) {
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    late_job told;
    late_job silent;
    open_job(&told, ranks, seed);
    open_job(&silent, ranks, seed);
    silent.silent = true;
    for (int i = 0; i < count; i++) {
      late_steps(&told, 1);
      late_steps(&silent, 1);
      assert_memory_equal(told.queue, silent.queue, sizeof told.queue);
    }
    assert_true(even_balancer_predict(told.balancer, 0, 9) <= even_balancer_predict(silent.balancer, 0, 9));
    assert_true(even_balancer_predict(told.balancer, 0, 9) >= even_balancer_predict(silent.balancer, 0, 9));
    late_close(&told);
    late_close(&silent);
  }
}

static void what_all_have_in_common_changes_nothing(void **context) {
  (void)context;
  even_cluster ranks = unequal(0.05);
  for (size_t r = 0; r < ranks.ranks; r++) {
    ranks.rank[r].own = 0.020;
    ranks.rank[r].own_noise = 0.0;
  }
  assert_changes_nothing(&ranks, 400);
}

static void noise_changes_nothing(void **context) {
  (void)context;
  even_cluster ranks = unequal(0.05);
  for (size_t r = 0; r < ranks.ranks; r++) {
    ranks.rank[r].own = 0.010;
    ranks.rank[r].own_noise = 0.9;
  }
  assert_changes_nothing(&ranks, 2000);
}

static void less_than_a_hundredth_changes_nothing(void **context) {
  (void)context;
  even_cluster ranks = equal(2, 0.02);
  ranks.rank[1].own = 0.0003; /* of 33 ms */
  assert_changes_nothing(&ranks, 400);
}

static void what_is_not_there_in_most_steps_changes_nothing(void **context) {
  (void)context;
  even_cluster ranks = equal(2, 0.02);
  ranks.rank[1].own = 0.020;
  ranks.rank[1].own_seldom = 0.6;
  assert_changes_nothing(&ranks, 400);
}

static void wrong_numbers_teach_nothing(void **context) {
  (void)context;
  const double wrong[][2] = {{0.0, NAN}, {INFINITY, 0.0}, {0.0, -1e-9}};
  const even_step_timing timings[2] = {{32, 0.032}, {32, 0.032}};
  even_balancer *balancer = open_for(2);
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    assert_int_equal(even_balancer_observe_exchange(balancer, timings, NULL, wrong[i]), EVEN_ERR_ARGUMENT);
  }
  assert_non_null(strstr(even_error_last()->what, "rank 1"));
  assert_true(isnan(even_balancer_predict(balancer, 0, 1)));
  even_balancer_close(balancer);
}

/* Legal but absurd: shares stay a split of the batch. */
static void absurd_numbers_do_no_harm(void **context) {
  (void)context;
  const double times[] = {1e308, 0.0, 5e-324, 1e-300, 1e308, 1e9};
  even_balancer *balancer = open_for(2);
  for (int i = 0; i < 400; i++) {
    int64_t shares[2];
    assert_int_equal(even_balancer_shares(balancer, BATCH, shares), EVEN_OK);
    assert_true(shares[0] >= 0 && shares[1] >= 0);
    assert_int_equal(shares[0] + shares[1], BATCH);
    const even_step_timing timings[2] = {{shares[0], times[i % 6]}, {shares[1], times[(i / 3) % 6]}};
    const double exchange[2] = {times[(i / 50) % 6], times[(i / 20) % 6]};
    assert_int_equal(even_balancer_observe_exchange(balancer, timings, NULL, exchange), EVEN_OK);
    assert_true(isfinite(even_balancer_predict(balancer, 0, 7)));
  }
  even_balancer_close(balancer);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(shares_make_up_for_it),
      cmocka_unit_test(the_split_is_the_best_one),
      cmocka_unit_test(it_counts_in_whole_at_once),
      cmocka_unit_test(trials_do_not_take_it_back),
      cmocka_unit_test(it_comes_and_goes),
      cmocka_unit_test(what_all_have_in_common_changes_nothing),
      cmocka_unit_test(noise_changes_nothing),
      cmocka_unit_test(less_than_a_hundredth_changes_nothing),
      cmocka_unit_test(what_is_not_there_in_most_steps_changes_nothing),
      cmocka_unit_test(wrong_numbers_teach_nothing),
      cmocka_unit_test(absurd_numbers_do_no_harm),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
