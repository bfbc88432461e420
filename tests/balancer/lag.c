/* Ranks that lag: who, since when, by how much; what is no lag; what the others would gain without one. The shares are
 * the balancer's own, two steps late, or stay equal. */
#include "balancer/lag.h"

#include "balancer/cluster.h"

#include <evenstep/balancer.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { BATCH = 64, MOST = 16, LATE = 2 };

typedef struct course {
  even_cluster cluster;
  even_balancer *balancer; /* NULL: equal shares */
  even_lags *lags;
  int64_t shares[LATE + 1][MOST]; /* of this step and of those that load */
  uint32_t step;
  uint64_t now_ns;
  int told; /* how often a rank began to lag */
  size_t who;
} course;

static void begin(course *on, size_t ranks, bool balanced, double fixed, double per_sample) {
  memset(on, 0, sizeof *on);
  on->cluster.ranks = ranks;
  on->cluster.state = 11;
  on->now_ns = 5000000000u;
  for (size_t r = 0; r < ranks; r++) {
    on->cluster.rank[r] = (even_cluster_rank){.fixed = fixed, .per_sample = per_sample};
  }
  for (int i = 0; i <= LATE; i++) {
    for (size_t r = 0; r < ranks; r++) {
      on->shares[i][r] = BATCH / (int64_t)ranks;
    }
  }
  if (balanced) {
    const even_balancer_params params = {
        .size = sizeof params, .policy = EVEN_POLICY_AUTO, .ranks = ranks, .batch = BATCH};
    assert_int_equal(even_balancer_open(&params, &on->balancer), EVEN_OK);
  }
  assert_int_equal(even_lags_open(ranks, &on->lags), EVEN_OK);
}

static void end(course *on) {
  even_balancer_close(on->balancer);
  even_lags_close(on->lags);
}

static bool lags(const course *on, size_t rank) {
  return even_lags_of(on->lags, rank).lags;
}

static void run(course *on, int steps) {
  even_step_timing timings[EVEN_CLUSTER_RANKS];
  for (int i = 0; i < steps; i++) {
    double seconds = even_cluster_step(&on->cluster, on->shares[0], timings);
    on->now_ns += (uint64_t)(seconds * 1e9);
    for (size_t r = 0; r < on->cluster.ranks; r++) {
      const even_lag_step step = {.step = on->step,
                                  .end_ns = on->now_ns,
                                  .duration_ns = (uint64_t)(seconds * 1e9),
                                  .samples = timings[r].samples,
                                  .busy_seconds = timings[r].busy_seconds};
      bool before = lags(on, r);
      even_lags_take(on->lags, r, &step);
      if (lags(on, r) && !before) {
        on->told++;
        on->who = r;
      }
    }
    on->step++;
    memmove(on->shares[0], on->shares[1], sizeof on->shares[0] * LATE);
    if (on->balancer != NULL) {
      assert_int_equal(even_balancer_observe(on->balancer, timings), EVEN_OK);
      assert_int_equal(even_balancer_shares(on->balancer, BATCH, on->shares[LATE]), EVEN_OK);
    }
  }
}

static void expect_told(const course *on, int times, const char *what) {
  if (on->told != times) {
    fail_msg("%s: told %d times, not %d (last rank %zu, from step %u, %.2f)", what, on->told, times, on->who,
             (unsigned)even_lags_of(on->lags, on->who).from_step, even_lags_of(on->lags, on->who).factor);
  }
}

static void a_rank_that_slows_is_told_with_its_steps_and_its_factor(void **context) {
  (void)context;
  const double factors[] = {2, 4, 10};
  const double fixed[] = {0.002, 0.016}; /* a small part of 34 or 48 ms, and a third of it */
  for (size_t i = 0; i < 2 * 2 * 2 * 3; i++) {
    bool balanced = i % 2 == 1;
    size_t ranks = i / 2 % 2 == 0 ? 2 : 4;
    double factor = factors[i / 8];
    char what[96];
    course on;
    begin(&on, ranks, balanced, fixed[i / 4 % 2], 0.001);
    for (size_t r = 0; r < ranks; r++) {
      on.cluster.rank[r].noise = 0.05;
    }
    (void)snprintf(what, sizeof what, "%zu ranks, %s, fixed %.3f, %.0f times", ranks, balanced ? "auto" : "equal",
                   fixed[i / 4 % 2], factor);
    run(&on, 200);
    expect_told(&on, 0, what);
    on.cluster.rank[1].slower = factor;
    run(&on, 200);
    expect_told(&on, 1, what);
    even_lag lag = even_lags_of(on.lags, 1);
    if (!lag.lags || on.who != 1 || lag.from_step < 197 || lag.from_step > 203 || lag.factor < 0.7 * factor ||
        lag.factor > 1.5 * factor) {
      fail_msg("%s: rank %zu lags %d from step %u, %.2f times", what, on.who, lag.lags, (unsigned)lag.from_step,
               lag.factor);
    }
    on.cluster.rank[1].slower = 1;
    run(&on, 200);
    expect_told(&on, 1, what);
    lag = even_lags_of(on.lags, 1);
    if (lags(&on, 1) || lag.from_step > 203 || lag.to_step < 396 || lag.to_step > 412) {
      fail_msg("%s: lags until step %u, %.2f times", what, (unsigned)lag.to_step, lag.factor);
    }
    end(&on);
  }
}

static void noise_is_no_lag(void **context) {
  (void)context;
  for (size_t ranks = 1; ranks <= MOST; ranks *= 2) {
    for (int kind = 0; kind < 4; kind++) {
      char what[64];
      course on;
      begin(&on, ranks, ranks > 1, 0.004, 0.001);
      for (size_t r = 0; r < ranks; r++) {
        on.cluster.rank[r].noise = 0.2;
        on.cluster.rank[r].outliers = kind == 1 ? 0.03 : 0;
        on.cluster.rank[r].slower = kind == 2 ? 1 + (double)r : 1; /* unequal from the start */
        on.cluster.rank[r].wander = kind == 3 ? 0.08 : 0;
      }
      (void)snprintf(what, sizeof what, "%zu ranks, noise of kind %d", ranks, kind);
      run(&on, 2000);
      expect_told(&on, 0, what);
      end(&on);
    }
  }
}

static void what_is_short_small_or_of_all_is_no_lag(void **context) {
  (void)context;
  course on;
  begin(&on, 4, true, 0.004, 0.001);
  run(&on, 200);
  on.cluster.rank[1].slower = 3;
  run(&on, 6); /* few steps */
  on.cluster.rank[1].slower = 1;
  run(&on, 200);
  expect_told(&on, 0, "a few slow steps");
  on.cluster.rank[2].slower = 1.3;
  run(&on, 400);
  on.cluster.rank[2].slower = 1;
  expect_told(&on, 0, "a little");
  run(&on, 100);
  for (size_t r = 0; r < 4; r++) {
    on.cluster.rank[r].slower = 3; /* as a longer sequence */
  }
  run(&on, 300);
  expect_told(&on, 0, "all alike");
  end(&on);
  /* one becomes faster: the other one's share falls to where half of its time, which no step has shown before, is fixed
   */
  begin(&on, 2, true, 0.030, 0.001);
  run(&on, 200);
  on.cluster.rank[0].slower = 0.1;
  run(&on, 300);
  assert_true(on.shares[0][1] < 16);
  expect_told(&on, 0, "a smaller share");
  end(&on);
}

/* A quota stops it for whole periods: most of its steps are as ever. */
static void a_quota_is_a_lag(void **context) {
  (void)context;
  course on;
  begin(&on, 2, false, 0.001, 0.0003);
  run(&on, 300);
  on.cluster.rank[1].quota = 0.25;
  on.cluster.rank[1].period = 0.1;
  run(&on, 500);
  even_lag lag = even_lags_of(on.lags, 1);
  if (!lag.lags || lag.factor < 2 || lag.factor > 6) {
    fail_msg("lags %d, %.2f times", lag.lags, lag.factor);
  }
  end(&on);
}

static void a_rank_that_becomes_slow_by_little_is_told(void **context) {
  (void)context;
  course on;
  begin(&on, 2, true, 0.004, 0.001);
  run(&on, 200);
  for (int i = 0; i < 200; i++) {
    on.cluster.rank[1].slower = 1 + 0.01 * i;
    run(&on, 1);
  }
  run(&on, 50);
  assert_true(lags(&on, 1));
  assert_false(lags(&on, 0));
  end(&on);
}

static void a_rank_slow_from_its_start_is_beside_others(void **context) {
  (void)context;
  const bool all[4] = {true, true, true, true};
  const bool own[4] = {false, false, true, false};
  course on;
  begin(&on, 4, true, 0.004, 0.001);
  on.cluster.rank[2].slower = 3;
  run(&on, 10);
  assert_true(isnan(even_lags_beside(on.lags, 2, all)));
  run(&on, 100);
  expect_told(&on, 0, "slow from its start");
  assert_float_equal(even_lags_beside(on.lags, 2, all), 3, 0.6);
  assert_float_equal(even_lags_beside(on.lags, 0, all), 1, 0.2);
  assert_true(isnan(even_lags_beside(on.lags, 2, own))); /* nobody to compare with */
  even_lags_since_start(on.lags, 2, 3);
  even_lag lag = even_lags_of(on.lags, 2);
  assert_true(lag.lags);
  assert_int_equal(lag.from_step, 0);
  assert_float_equal(lag.factor, 3, 1e-9);
  assert_int_equal(lag.to_step, on.step - 1); /* until now, by steps and by time */
  assert_int_equal(lag.to_ns, on.now_ns);
  run(&on, 100);
  assert_true(lags(&on, 2));
  on.cluster.rank[2].slower = 1;
  run(&on, 200);
  assert_false(lags(&on, 2));
  even_lags_forget(on.lags, 2);
  assert_int_equal(even_lags_of(on.lags, 2).from_step, 0);
  end(&on);
}

/* t(b) = 4 ms + b ms on four ranks, 64 samples: 20 ms, 25.33 without one. */
static void a_rank_is_worth_what_the_others_would_lose(void **context) {
  (void)context;
  const bool all[4] = {true, true, true, true};
  const bool three[4] = {true, true, true, false};
  const bool alone[4] = {false, true, false, false};
  even_lag_use use;
  course on;
  begin(&on, 4, false, 0.004, 0.001);
  assert_int_equal(even_lags_weigh(on.lags, 1, all, true, &use), EVEN_ERR_NOT_FOUND);
  run(&on, 100);
  assert_int_equal(even_lags_weigh(on.lags, 1, alone, true, &use), EVEN_ERR_NOT_FOUND);
  assert_int_equal(even_lags_weigh(on.lags, 3, three, true, &use), EVEN_ERR_NOT_FOUND);
  assert_int_equal(even_lags_weigh(on.lags, 1, all, true, &use), EVEN_OK);
  assert_float_equal(use.with, 0.020, 0.001);
  assert_float_equal(use.without, 0.026, 0.002);
  assert_float_equal(use.renewed, use.with, 1e-9);
  on.cluster.rank[1].slower = 30;
  run(&on, 300);
  assert_true(lags(&on, 1));
  /* equal shares wait for it: 600 ms, and 26 without it or 20 with it renewed */
  assert_int_equal(even_lags_weigh(on.lags, 1, all, false, &use), EVEN_OK);
  assert_float_equal(use.with, 0.600, 0.06);
  assert_float_equal(use.without, 0.026, 0.002);
  assert_float_equal(use.renewed, 0.020, 0.003);
  assert_float_equal(use.moved, 0.020, 0.003);
  /* so do balanced ones, whose fixed part alone takes longer than the others do with all samples */
  assert_int_equal(even_lags_weigh(on.lags, 1, all, true, &use), EVEN_OK);
  assert_true(use.with > 1.5 * use.without);
  on.cluster.rank[1].slower = 3; /* but not of one that is three times slower */
  run(&on, 300);
  assert_int_equal(even_lags_weigh(on.lags, 1, all, true, &use), EVEN_OK);
  assert_true(use.with < use.without);
  assert_true(use.renewed < use.with);
  end(&on);
}

/* Another factor, another time, and none. */
static void what_is_a_lag_may_be_said(void **context) {
  (void)context;
  course on;
  begin(&on, 2, false, 0.002, 0.001); /* steps of 34 ms */
  even_lags_limit(on.lags, 4, 10);
  assert_true(even_lags_begins(on.lags) == 4);
  run(&on, 200);
  on.cluster.rank[1].slower = 3;
  run(&on, 400);
  expect_told(&on, 0, "3 times, of 4");
  on.cluster.rank[1].slower = 1;
  run(&on, 200);
  on.cluster.rank[1].slower = 6;
  run(&on, 30); /* 6 s */
  expect_told(&on, 0, "6 times, for 6 s of 10");
  run(&on, 40);
  expect_told(&on, 1, "6 times, for 14 s");
  end(&on);
  begin(&on, 2, false, 0.002, 0.001);
  even_lags_limit(on.lags, 1.2, 0.5);
  run(&on, 200);
  on.cluster.rank[1].slower = 1.3;
  run(&on, 100);
  expect_told(&on, 1, "1.3 times, of 1.2");
  end(&on);
  begin(&on, 2, false, 0.002, 0.001);
  even_lags_limit(on.lags, (double)INFINITY, 0);
  run(&on, 200);
  on.cluster.rank[1].slower = 100;
  run(&on, 200);
  expect_told(&on, 0, "none is to be told");
  end(&on);
}

static void nonsense_is_passed_over(void **context) {
  (void)context;
  even_lags *lags_of = NULL;
  const even_lag_step wrong[] = {{.step = 1, .samples = -1, .busy_seconds = 1},
                                 {.step = 1, .samples = 1, .busy_seconds = -1},
                                 {.step = 1, .samples = 1, .busy_seconds = (double)NAN},
                                 {.step = 1, .samples = 1, .busy_seconds = (double)INFINITY}};
  assert_int_equal(even_lags_open(2, &lags_of), EVEN_OK);
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    for (int k = 0; k < 100; k++) {
      even_lags_take(lags_of, 0, &wrong[i]);
      even_lags_take(lags_of, 2, &wrong[i]); /* no such rank */
    }
  }
  assert_false(even_lags_of(lags_of, 0).lags);
  even_lags_close(lags_of);
  even_lags_close(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_rank_that_slows_is_told_with_its_steps_and_its_factor),
      cmocka_unit_test(noise_is_no_lag),
      cmocka_unit_test(what_is_short_small_or_of_all_is_no_lag),
      cmocka_unit_test(a_quota_is_a_lag),
      cmocka_unit_test(a_rank_that_becomes_slow_by_little_is_told),
      cmocka_unit_test(a_rank_slow_from_its_start_is_beside_others),
      cmocka_unit_test(a_rank_is_worth_what_the_others_would_lose),
      cmocka_unit_test(what_is_a_lag_may_be_said),
      cmocka_unit_test(nonsense_is_passed_over),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
