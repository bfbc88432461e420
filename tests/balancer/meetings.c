/* Ranks that wait for one another within steps: trials find the split that the models of single ranks do not, cost what
 * is said where there is no better one, and nothing changes where nobody waits. Invented ranks, fixed seeds, no clock.
 */
#include <evenstep/balancer.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "balancer/cluster.h"

#include "late.h"

enum { SEEDS = 3, BATCH = 64, FROM = 400, STEPS = 600, MOST = 24 };

/* Seconds of a core that lie between two meetings and are no sample's, and that each meeting takes. */
static const double between = 0.0008;
static const double meets = 0.0016;

static even_cluster meeting(size_t ranks, const double *speeds, double period) {
  even_cluster c = {.ranks = ranks, .first_step = 3.0, .meetings = 12, .uneven = 3.0, .parts = 0.1};
  for (size_t r = 0; r < ranks; r++) {
    double slow = period > 0.0 ? 1.0 : 1.0 / speeds[r];
    c.rank[r] = (even_cluster_rank){.fixed = between * (double)(c.meetings + 1) * slow,
                                    .per_sample = 0.0034 * slow,
                                    .meets = meets * slow,
                                    .lognormal = 0.05};
    if (period > 0.0 && speeds[r] < 1.0) {
      c.rank[r].quota = speeds[r];
      c.rank[r].period = period;
      c.rank[r].left = speeds[r] * period;
    }
  }
  return c;
}

static void start(late_job *of, const even_cluster *ranks, uint64_t seed, bool waits) {
  const even_balancer_params params = late_params(EVEN_POLICY_AUTO, ranks->ranks, BATCH);
  late_open(of, &params, ranks, seed * 7919);
  of->waits = waits;
}

/* Seconds of `count` steps after `from`, over all seeds. */
static double balanced(const even_cluster *ranks, bool waits, int from, int count) {
  double seconds = 0.0;
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    late_job of;
    start(&of, ranks, seed, waits);
    late_steps(&of, from);
    seconds -= of.seconds;
    late_steps(&of, count);
    seconds += of.seconds;
    late_close(&of);
  }
  return seconds;
}

static double fixed_split(const even_cluster *ranks, const int64_t *shares, int from, int count) {
  even_step_timing timings[EVEN_CLUSTER_RANKS];
  double seconds = 0.0;
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    even_cluster c = *ranks;
    c.state = seed * 7919;
    for (int step = 0; step < from + count; step++) {
      double one = even_cluster_step(&c, shares, timings);
      seconds += step >= from ? one : 0.0;
    }
  }
  return seconds;
}

/* The best split of two ranks whose second has MOST samples at most; of three, beside `third` samples of the third. */
static double best_fixed(const even_cluster *ranks, int64_t third, int from, int count) {
  double least = INFINITY;
  for (int64_t second = 0; second <= MOST; second++) {
    const int64_t shares[3] = {BATCH - second - third, second, third};
    least = fmin(least, fixed_split(ranks, shares, from, count));
  }
  return least;
}

static void two_ranks_come_to_the_best_split(void **context) {
  (void)context;
  const double periods[] = {0.0, 0.01, 0.1};
  for (size_t i = 0; i < sizeof periods / sizeof periods[0]; i++) {
    even_cluster ranks = meeting(2, (const double[]){1.0, 0.25}, periods[i]);
    double best = best_fixed(&ranks, 0, FROM, STEPS);
    assert_true(best / balanced(&ranks, true, FROM, STEPS) >= 0.98);
    assert_true(best / balanced(&ranks, false, FROM, STEPS) < 0.96); /* it is worth it */
  }
}

static void so_do_three(void **context) {
  (void)context;
  even_cluster ranks = meeting(3, (const double[]){1.0, 0.5, 0.2}, 0.0);
  double best = INFINITY;
  for (int64_t third = 0; third < MOST / 2; third++) {
    best = fmin(best, best_fixed(&ranks, third, FROM, STEPS / 4));
  }
  assert_true(best / balanced(&ranks, true, FROM, STEPS / 4) >= 0.96);
}

static void eight_are_no_slower_for_it(void **context) {
  (void)context;
  even_cluster ranks = meeting(8, (const double[]){1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25}, 0.0);
  assert_true(balanced(&ranks, false, FROM, STEPS) / balanced(&ranks, true, FROM, STEPS) >= 0.99);
}

/* A rank that only keeps the others waiting gets nothing, though it would be as long busy as they with some samples. */
static void none_is_less(void **context) {
  (void)context;
  even_cluster ranks = meeting(2, (const double[]){1.0, 0.1}, 0.0);
  ranks.dummy = 0.5;
  double best = best_fixed(&ranks, 0, FROM, STEPS);
  const int64_t none[2] = {BATCH, 0};
  assert_true(best >= fixed_split(&ranks, none, FROM, STEPS)); /* it is the best one */
  assert_true(best / balanced(&ranks, true, FROM, STEPS) >= 0.98);
  assert_true(best / balanced(&ranks, false, FROM, STEPS) < 0.90);
}

/* 0.01 of the run for this question, and what the others may take. */
static void where_nothing_is_better_it_costs_little(void **context) {
  (void)context;
  even_cluster ranks = meeting(2, (const double[]){1.0, 1.0}, 0.0);
  const int64_t equal[2] = {BATCH / 2, BATCH / 2};
  assert_true(fixed_split(&ranks, equal, FROM, 4 * STEPS) / balanced(&ranks, true, FROM, 4 * STEPS) > 0.99);
  /* meetings that cost nothing but what chance makes of the parts */
  for (size_t r = 0; r < ranks.ranks; r++) {
    ranks.rank[r].meets = 0.0;
  }
  ranks.parts = 0.3;
  assert_true(fixed_split(&ranks, equal, FROM, 4 * STEPS) / balanced(&ranks, true, FROM, 4 * STEPS) > 0.99);
}

/* A rank that was held back for `with` steps gets more within `without` steps in which nobody waits. */
static void expect_to_come_back(uint64_t seed, int with, int without) {
  even_cluster ranks = meeting(2, (const double[]){1.0, 0.25}, 0.0);
  late_job of;
  start(&of, &ranks, seed, true);
  late_steps(&of, with);
  int64_t held = of.ran[1];
  of.ranks.meetings = of.twin.meetings = 0;
  of.waits = false;
  late_steps(&of, without);
  assert_true(of.ran[1] > held + 1);
  late_close(&of);
}

static void samples_come_back_when_nobody_waits_any_more(void **context) {
  (void)context;
  expect_to_come_back(1, 1000, 1500);
}

/* However long it is until the question would be asked again. */
static void they_come_back_soon_in_a_long_run(void **context) {
  (void)context;
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    expect_to_come_back(seed, 8000, 300);
  }
}

/* Shares that must be multiples: those of a rank that is held back stay as the trials found them. */
static void shares_in_buckets_do_not_swing(void **context) {
  (void)context;
  enum { COUNT = 3, ALL = 96, RUN = 3000 };
  const int64_t buckets[COUNT] = {4, 4, 4};
  even_cluster ranks = meeting(COUNT, (const double[]){1.0, 0.5, 0.2}, 0.0);
  for (size_t r = 0; r < COUNT; r++) {
    ranks.rank[r].tile = buckets[r];
  }
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    const even_balancer_params params = {
        .size = sizeof params, .policy = EVEN_POLICY_AUTO, .ranks = COUNT, .batch = ALL, .buckets = buckets};
    even_balancer *balancer = NULL;
    even_step_timing timings[EVEN_CLUSTER_RANKS];
    int64_t shares[COUNT];
    int64_t before[COUNT];
    int changes = 0;
    even_cluster of = ranks;
    of.state = seed * 7919;
    assert_int_equal(even_balancer_open(&params, &balancer), EVEN_OK);
    assert_int_equal(even_balancer_shares(balancer, ALL, shares), EVEN_OK);
    for (int step = 0; step < RUN; step++) {
      (void)even_cluster_step(&of, shares, timings);
      assert_int_equal(even_balancer_observe_waits(balancer, timings, NULL, NULL, of.pass), EVEN_OK);
      memcpy(before, shares, sizeof before);
      assert_int_equal(even_balancer_shares(balancer, ALL, shares), EVEN_OK);
      changes += step >= RUN / 2 && memcmp(before, shares, sizeof before) != 0;
    }
    assert_in_range(changes, 0, 60);
    even_balancer_close(balancer);
  }
}

/* Whoever waits for nobody, or no longer than all are busy. */
static void where_nobody_waits_every_share_stays(void **context) {
  (void)context;
  even_cluster all[] = {meeting(2, (const double[]){1.0, 0.25}, 0.0), meeting(2, (const double[]){1.0, 0.25}, 0.01),
                        meeting(2, (const double[]){1.0, 0.25}, 0.1),
                        meeting(4, (const double[]){1.0, 0.5, 0.25, 0.1}, 0.1)};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    even_balancer *balancers[3];
    even_balancer_params params = late_params(EVEN_POLICY_AUTO, all[i].ranks, BATCH);
    even_cluster c = all[i];
    c.meetings = 0;
    c.state = 7919;
    for (int kind = 0; kind < 3; kind++) {
      balancers[kind] = late_balancer(&params);
    }
    for (int step = 0; step < 1500; step++) {
      int64_t shares[EVEN_CLUSTER_RANKS];
      int64_t others[EVEN_CLUSTER_RANKS];
      even_step_timing timings[EVEN_CLUSTER_RANKS];
      double none[EVEN_CLUSTER_RANKS] = {0.0};
      double busy[EVEN_CLUSTER_RANKS] = {0.0};
      assert_int_equal(even_balancer_shares(balancers[0], BATCH, shares), EVEN_OK);
      for (int kind = 1; kind < 3; kind++) {
        assert_int_equal(even_balancer_shares(balancers[kind], BATCH, others), EVEN_OK);
        assert_memory_equal(others, shares, c.ranks * sizeof *shares);
      }
      (void)even_cluster_step(&c, shares, timings);
      for (size_t r = 0; r < c.ranks; r++) {
        busy[r] = timings[r].busy_seconds;
      }
      assert_int_equal(even_balancer_observe(balancers[0], timings), EVEN_OK);
      assert_int_equal(even_balancer_observe_waits(balancers[1], timings, NULL, NULL, none), EVEN_OK);
      assert_int_equal(even_balancer_observe_waits(balancers[2], timings, NULL, NULL, busy), EVEN_OK);
    }
    for (int kind = 0; kind < 3; kind++) {
      even_balancer_close(balancers[kind]);
    }
  }
}

static void wrong_numbers_teach_nothing(void **context) {
  (void)context;
  const double wrong[][2] = {{0.0, NAN}, {INFINITY, 0.0}, {0.0, -1e-9}};
  const even_step_timing timings[2] = {{32, 0.032}, {32, 0.032}};
  const even_balancer_params params = late_params(EVEN_POLICY_AUTO, 2, BATCH);
  even_balancer *balancer = late_balancer(&params);
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    assert_int_equal(even_balancer_observe_waits(balancer, timings, NULL, NULL, wrong[i]), EVEN_ERR_ARGUMENT);
  }
  assert_non_null(strstr(even_error_last()->what, "rank 1 reports -1e-09 seconds of work with its waits"));
  assert_true(isnan(even_balancer_predict(balancer, 0, 1)));
  even_balancer_close(balancer);
}

/* Legal but absurd: shares stay a split of the batch. */
static void absurd_numbers_do_no_harm(void **context) {
  (void)context;
  const double times[] = {1e308, 0.0, 5e-324, 1e-300, 1e308, 1e9, 0.1};
  for (size_t ranks = 1; ranks <= 3; ranks++) {
    const even_balancer_params params = late_params(EVEN_POLICY_AUTO, ranks, BATCH);
    even_balancer *balancer = late_balancer(&params);
    for (int i = 0; i < 1500; i++) {
      int64_t shares[3];
      int64_t sum = 0;
      even_step_timing timings[3];
      double passes[3];
      assert_int_equal(even_balancer_shares(balancer, BATCH, shares), EVEN_OK);
      for (size_t r = 0; r < ranks; r++) {
        assert_true(shares[r] >= 0);
        sum += shares[r];
        timings[r] = (even_step_timing){shares[r], i < 700 ? 0.1 * (double)(r + 1) : times[(i / 3 + (int)r) % 7]};
        passes[r] = times[(i / 50 + (int)r) % 7];
      }
      assert_int_equal(sum, BATCH);
      assert_int_equal(even_balancer_observe_waits(balancer, timings, NULL, passes, passes), EVEN_OK);
    }
    even_balancer_close(balancer);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(two_ranks_come_to_the_best_split),
      cmocka_unit_test(so_do_three),
      cmocka_unit_test(eight_are_no_slower_for_it),
      cmocka_unit_test(none_is_less),
      cmocka_unit_test(where_nothing_is_better_it_costs_little),
      cmocka_unit_test(samples_come_back_when_nobody_waits_any_more),
      cmocka_unit_test(they_come_back_soon_in_a_long_run),
      cmocka_unit_test(shares_in_buckets_do_not_swing),
      cmocka_unit_test(where_nobody_waits_every_share_stays),
      cmocka_unit_test(wrong_numbers_teach_nothing),
      cmocka_unit_test(absurd_numbers_do_no_harm),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
