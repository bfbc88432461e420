/* What the balancer makes of noisy, changing, throttled ranks, beside a twin that knows the true speeds. */
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

enum { SEEDS = 4 };

typedef struct trial {
  even_cluster ranks;
  even_policy policy;
  int64_t batch;
  int steps;
  int from;      /* steps from here … */
  int to;        /* … to here are compared; 0: to the end */
  int change_at; /* the last rank becomes `slower` times slower … */
  double slower;
  int back_at;  /* … until here */
  double drift; /* and its time grows by this factor each step */
} trial;

typedef struct outcome {
  double efficiency; /* best / balancer, in seconds */
  int changes;
  int64_t shares[EVEN_CLUSTER_RANKS]; /* at the end */
} outcome;

static even_balancer *open_for(even_policy policy, size_t ranks, int64_t batch) {
  const even_balancer_params params = late_params(policy, ranks, batch);
  return late_balancer(&params);
}

static void set_speed(const trial *t, even_cluster *c, int step) {
  even_cluster_rank *last = &c->rank[c->ranks - 1];
  if (t->change_at > 0) {
    last->slower = step >= t->change_at && (t->back_at == 0 || step < t->back_at) ? t->slower : 1.0;
  }
  if (t->drift > 0.0) {
    last->slower = 1.0 + t->drift * step;
  }
}

static outcome run(const trial *t, uint64_t seed) {
  const even_balancer_params params = late_params(t->policy, t->ranks.ranks, t->batch);
  double seconds = 0.0;
  double best_seconds = 0.0;
  outcome out = {0};
  late_job job;
  late_open(&job, &params, &t->ranks, seed);
  for (int step = 0; step < t->steps; step++) {
    double before = job.seconds;
    double best_before = job.best_seconds;
    set_speed(t, &job.ranks, step);
    set_speed(t, &job.twin, step);
    late_steps(&job, 1);
    if (step >= t->from && (t->to == 0 || step < t->to)) {
      seconds += job.seconds - before;
      best_seconds += job.best_seconds - best_before;
    }
  }
  memcpy(out.shares, job.ran, sizeof out.shares);
  out.changes = job.changes;
  out.efficiency = best_seconds / seconds;
  late_close(&job);
  return out;
}

/* The worst over several seeds. */
static double worst(const trial *t) {
  double least = INFINITY;
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    least = fmin(least, run(t, seed * 7919).efficiency);
  }
  return least;
}

/* Speeds 1, 1/2, 1/3, 1/4 in turn; a fixed cost of two samples; a slow first step. */
static even_cluster unequal(size_t ranks, double noise) {
  even_cluster c = {.ranks = ranks, .first_step = 3.0};
  for (size_t r = 0; r < ranks; r++) {
    double slow = 1.0 + (double)(r % 4);
    c.rank[r] = (even_cluster_rank){.fixed = 0.002 * slow, .per_sample = 0.001 * slow, .noise = noise};
  }
  return c;
}

static void best_split_is_found_within_ten_steps(void **context) {
  (void)context;
  const size_t ranks[] = {2, 3, 5, 16, 64};
  for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
    trial t = {.policy = EVEN_POLICY_DYNAMIC, .batch = 32 * (int64_t)ranks[i], .steps = 40, .from = 10};
    t.ranks = unequal(ranks[i], 0.0);
    assert_true(worst(&t) >= 0.98);
    t.ranks = unequal(ranks[i], 0.05);
    assert_true(worst(&t) >= 0.97);
    t.ranks = unequal(ranks[i], 0.2);
    assert_true(worst(&t) >= 0.93);
  }
}

static void speed_ratios_up_to_sixteen(void **context) {
  (void)context;
  for (int ratio = 1; ratio <= 16; ratio *= 2) {
    trial t = {.policy = EVEN_POLICY_HYBRID, .batch = 64, .steps = 60, .from = 8};
    t.ranks = (even_cluster){.ranks = 2, .first_step = 3.0};
    t.ranks.rank[0] = (even_cluster_rank){.per_sample = 0.001, .noise = 0.05};
    t.ranks.rank[1] = (even_cluster_rank){.per_sample = 0.001 * ratio, .noise = 0.05};
    assert_true(worst(&t) >= 0.95);
  }
}

static void large_fixed_costs_are_learned(void **context) {
  (void)context;
  trial t = {.policy = EVEN_POLICY_HYBRID, .batch = 64, .steps = 60, .from = 12};
  t.ranks = (even_cluster){.ranks = 3, .first_step = 3.0};
  t.ranks.rank[0] = (even_cluster_rank){.fixed = 0.001, .per_sample = 0.001, .noise = 0.03};
  t.ranks.rank[1] = (even_cluster_rank){.fixed = 0.020, .per_sample = 0.001, .noise = 0.03};
  t.ranks.rank[2] = (even_cluster_rank){.fixed = 0.030, .per_sample = 0.0001, .noise = 0.03};
  assert_true(worst(&t) >= 0.95);
}

static void noise_without_a_change_costs_a_hundredth(void **context) {
  (void)context;
  const size_t ranks[] = {2, 4, 16};
  for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
    trial t = {.policy = EVEN_POLICY_HYBRID, .batch = 32 * (int64_t)ranks[i], .steps = 500, .from = 30};
    t.ranks = unequal(ranks[i], 0.2);
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
      outcome out = run(&t, seed);
      assert_true(out.efficiency >= 0.99);
      assert_true(out.changes <= 25);
    }
  }
}

static void four_times_slower_is_followed_and_so_is_recovery(void **context) {
  (void)context;
  const size_t ranks[] = {2, 4, 16, 64};
  for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
    /* two steps to believe it, two on their way: compared from the sixth on */
    trial t = {.policy = EVEN_POLICY_HYBRID,
               .batch = 32 * (int64_t)ranks[i],
               .steps = 56,
               .from = 46,
               .to = 56,
               .change_at = 40,
               .slower = 4.0};
    t.ranks = unequal(ranks[i], 0.05);
    assert_true(worst(&t) >= 0.93);
    trial back = t;
    back.steps = 100;
    back.back_at = 80;
    back.from = 87;
    back.to = 100;
    assert_true(worst(&back) >= 0.9);
  }
}

static void slow_drift_is_followed(void **context) {
  (void)context;
  trial t = {.policy = EVEN_POLICY_HYBRID, .batch = 128, .steps = 300, .from = 20, .drift = 0.01};
  t.ranks = unequal(4, 0.05);
  assert_true(worst(&t) >= 0.93);
}

static void rare_stalls_of_every_rank_are_borne(void **context) {
  (void)context;
  trial t = {.policy = EVEN_POLICY_HYBRID, .batch = 128, .steps = 400, .from = 20};
  t.ranks = unequal(4, 0.1);
  for (size_t r = 0; r < 4; r++) {
    t.ranks.rank[r].outliers = 0.03;
  }
  assert_true(worst(&t) >= 0.93);
}

static void cpu_quota_is_a_slow_rank(void **context) {
  (void)context;
  const struct {
    double period, work, reach;
  } cases[] = {{0.01, 0.0002, 0.90}, {0.01, 0.001, 0.96}, {0.01, 0.004, 0.98}, {0.1, 0.004, 0.92}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    trial t = {.policy = EVEN_POLICY_HYBRID, .batch = 64, .steps = 300, .from = 20};
    t.ranks = (even_cluster){.ranks = 2, .first_step = 3.0};
    t.ranks.rank[0] = (even_cluster_rank){.fixed = 3 * cases[i].work, .per_sample = cases[i].work, .noise = 0.05};
    t.ranks.rank[1] = t.ranks.rank[0];
    t.ranks.rank[1].quota = 0.25;
    t.ranks.rank[1].period = cases[i].period;
    t.ranks.rank[1].left = 0.25 * cases[i].period;
    assert_true(worst(&t) >= cases[i].reach);
  }
}

static void observe_line(even_balancer *balancer, int64_t batch, double first, double second, double factor) {
  int64_t shares[2];
  assert_int_equal(even_balancer_shares(balancer, batch, shares), EVEN_OK);
  const even_step_timing timings[2] = {{shares[0], first * (double)shares[0] * factor},
                                       {shares[1], second * (double)shares[1]}};
  assert_int_equal(even_balancer_observe(balancer, timings), EVEN_OK);
}

/* What a rank did before it became slower it may do again at once when it is as fast as then; not when it is only less
 * slow. */
static void a_rank_that_recovers_has_its_share_back_at_once(void **context) {
  (void)context;
  const struct {
    double slow, back;
  } cases[] = {{4.0, 1.0}, {8.0, 2.0}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    even_balancer *balancer = open_for(EVEN_POLICY_HYBRID, 2, 64);
    int64_t shares[2];
    for (int step = 0; step < 60; step++) {
      observe_line(balancer, 64, 0.001, step < 30 ? 0.001 : 0.001 * cases[i].slow, 1.0);
    }
    assert_int_equal(even_balancer_shares(balancer, 64, shares), EVEN_OK);
    int64_t least = shares[1];
    assert_true(least >= 6 && least <= 13);
    for (int step = 0; step < 2; step++) { /* two steps are needed to believe it */
      observe_line(balancer, 64, 0.001, 0.001 * cases[i].back, 1.0);
    }
    assert_int_equal(even_balancer_shares(balancer, 64, shares), EVEN_OK);
    if (i == 0) {
      assert_true(llabs(shares[1] - 32) <= 1);
    } else {
      assert_true(shares[1] > least && shares[1] <= 2 * least + 1);
    }
    even_balancer_close(balancer);
  }
}

static void one_outlier_moves_nothing(void **context) {
  (void)context;
  for (int settled = 3; settled < 40; settled += 6) {
    even_balancer *balancer = open_for(EVEN_POLICY_HYBRID, 2, 60);
    int64_t before[2];
    int64_t after[2];
    for (int step = 0; step < settled; step++) {
      observe_line(balancer, 60, 0.001, 0.002, 1.0);
    }
    assert_int_equal(even_balancer_shares(balancer, 60, before), EVEN_OK);
    assert_true(before[0] >= 39 && before[0] <= 41);
    observe_line(balancer, 60, 0.001, 0.002, 10.0);
    for (int step = 0; step < 10; step++) {
      assert_int_equal(even_balancer_shares(balancer, 60, after), EVEN_OK);
      assert_true(llabs(after[0] - before[0]) <= 1); /* the rest of finding the optimum */
      observe_line(balancer, 60, 0.001, 0.002, 1.0);
    }
    even_balancer_close(balancer);
  }
}

static void equal_ranks_stay_equal(void **context) {
  (void)context;
  trial t = {.policy = EVEN_POLICY_HYBRID, .batch = 64, .steps = 300, .from = 5};
  t.ranks = (even_cluster){.ranks = 2, .first_step = 4.0};
  t.ranks.rank[0] = t.ranks.rank[1] = (even_cluster_rank){.fixed = 0.01, .per_sample = 0.001, .noise = 0.03};
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    outcome out = run(&t, seed);
    assert_true(out.changes <= 1);
    assert_true(llabs(out.shares[0] - 32) <= 1);
  }
}

/* Two sizes seen: the fixed part and the slope are both known, also far from the sizes that were run. */
static void line_is_identified_from_two_sizes(void **context) {
  (void)context;
  even_balancer *balancer = open_for(EVEN_POLICY_EQUAL, 2, 100);
  const int64_t sizes[2] = {30, 60};
  for (int step = 0; step < 16; step++) {
    int64_t a = sizes[step % 2];
    const even_step_timing timings[2] = {{a, 0.020 + 0.001 * (double)a}, {100 - a, 0.001 + 0.004 * (double)(100 - a)}};
    assert_int_equal(even_balancer_observe(balancer, timings), EVEN_OK);
  }
  assert_float_equal(even_balancer_predict(balancer, 0, 90), 0.110, 0.003);
  assert_float_equal(even_balancer_predict(balancer, 0, 10), 0.030, 0.003);
  assert_float_equal(even_balancer_predict(balancer, 1, 10), 0.041, 0.004);
  int64_t shares[2];
  assert_int_equal(even_balancer_shares(balancer, 100, shares), EVEN_OK);
  assert_int_equal(shares[0], 50); /* this policy measures, and does not act */
  even_balancer_close(balancer);
}

/* A rank so slow that it gets nothing, then fast again: seen by its dummy batches, or by probing where it idles. */
static void rank_without_samples_comes_back(void **context) {
  (void)context;
  for (int idles = 0; idles <= 1; idles++) {
    even_balancer *balancer = open_for(EVEN_POLICY_HYBRID, 3, 12);
    even_cluster c = {.ranks = 3, .idles = idles != 0, .state = 5};
    for (size_t r = 0; r < 3; r++) {
      c.rank[r] = (even_cluster_rank){.per_sample = 0.001, .noise = 0.03};
    }
    even_step_timing timings[3];
    int64_t shares[3];
    c.rank[2].slower = 50.0;
    int used = 0;
    for (int step = 0; step < 400; step++) {
      assert_int_equal(even_balancer_shares(balancer, 12, shares), EVEN_OK);
      used += step >= 20 && shares[2] > 0;
      (void)even_cluster_step(&c, shares, timings);
      assert_int_equal(even_balancer_observe(balancer, timings), EVEN_OK);
    }
    if (c.idles) {
      assert_true(used <= 2); /* it was tried, once, and not again soon: it had been very slow */
      assert_int_equal(shares[2], 0);
    }
    c.rank[2].slower = 1.0;
    int waited = 0;
    for (; waited < 40000 && shares[2] < 4; waited++) {
      (void)even_cluster_step(&c, shares, timings);
      assert_int_equal(even_balancer_observe(balancer, timings), EVEN_OK);
      assert_int_equal(even_balancer_shares(balancer, 12, shares), EVEN_OK);
    }
    assert_true(waited <= (c.idles ? 20000 : 30));
    even_balancer_close(balancer);
  }
}

/* Every dummy batch of these leaves out a part of its work. */
static void observe_spared(even_balancer *balancer, const even_step_timing *timings) {
  const bool spared[3] = {true, true, true};
  assert_int_equal(even_balancer_observe_spared(balancer, timings, spared), EVEN_OK);
}

/* A rank that makes steps longer with one sample than the others need for all: with none it runs a dummy batch, which
 * leaves out the most of a sample's work. It gets none, and samples again once it is fast. */
static void rank_of_no_use_is_left_out_until_it_is_of_use(void **context) {
  (void)context;
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    even_balancer *balancer = open_for(EVEN_POLICY_AUTO, 3, 12);
    even_cluster c = {.ranks = 3, .dummy = 0.35, .state = seed, .first_step = 3.0};
    for (size_t r = 0; r < 3; r++) {
      c.rank[r] = (even_cluster_rank){.fixed = 0.001, .per_sample = 0.001, .noise = 0.05};
    }
    c.rank[2].slower = 8.0; /* 16 ms with one sample, where the others need 7 ms for six */
    even_step_timing timings[3];
    int64_t shares[3];
    int used = 0;
    for (int step = 0; step < 600; step++) {
      assert_int_equal(even_balancer_shares(balancer, 12, shares), EVEN_OK);
      used += step >= 40 && shares[2] > 0;
      (void)even_cluster_step(&c, shares, timings);
      observe_spared(balancer, timings);
    }
    assert_true(used <= 40); /* trials of equal shares, and now and then one sample, to look */
    assert_float_equal(even_balancer_predict(balancer, 2, 0), 0.0056, 0.0012);
    assert_true(even_balancer_predict(balancer, 2, 1) > 0.011);
    c.rank[2].slower = 1.0;
    int waited = 0;
    for (; waited < 1000 && shares[2] < 3; waited++) {
      (void)even_cluster_step(&c, shares, timings);
      observe_spared(balancer, timings);
      assert_int_equal(even_balancer_shares(balancer, 12, shares), EVEN_OK);
    }
    assert_true(waited <= 60); /* its dummy batches became as much faster */
    even_balancer_close(balancer);
  }
}

/* "The same inputs give the same shares" leaves out who asked for shares in between, and how often: the last batch of
 * an epoch comes earlier for a rank that loads ahead. With a rank that idles, and others whose splits are tried. */
static void asking_for_shares_changes_nothing(void **context) {
  (void)context;
  const struct {
    double tilt, outliers, lognormal, slower;
  } cases[] = {{2.0, 0.0, 0.0, 6.0}, {0.0, 0.03, 0.2, 12.0}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    even_balancer *silent = open_for(EVEN_POLICY_HYBRID, 3, 7);
    even_balancer *asked = open_for(EVEN_POLICY_HYBRID, 3, 7);
    even_cluster c = {.ranks = 3, .idles = true, .tilt = cases[i].tilt, .state = 5};
    for (size_t r = 0; r < 3; r++) {
      c.rank[r] = (even_cluster_rank){.per_sample = 0.001, .noise = 0.05};
    }
    c.rank[1].outliers = cases[i].outliers;
    c.rank[1].lognormal = cases[i].lognormal;
    c.rank[2].slower = cases[i].slower;
    int probed = 0; /* times, */
    int held = 0;   /* and steps in all */
    bool before = false;
    for (int step = 0; step < 5000; step++) {
      even_step_timing timings[3];
      int64_t shares[3];
      int64_t same[3];
      int64_t last[3];
      assert_int_equal(even_balancer_shares(silent, 7, shares), EVEN_OK);
      assert_int_equal(even_balancer_shares(asked, 7, same), EVEN_OK);
      assert_memory_equal(shares, same, sizeof shares);
      held += step > 20 && shares[2] > 0;
      probed += step > 20 && shares[2] > 0 && !before;
      before = shares[2] > 0;
      (void)even_cluster_step(&c, shares, timings);
      assert_int_equal(even_balancer_observe(silent, timings), EVEN_OK);
      assert_int_equal(even_balancer_observe(asked, timings), EVEN_OK);
      assert_int_equal(even_balancer_shares(asked, 6, last), EVEN_OK);
    }
    /* one sample for two steps, or for the 36 of one trial; were it kept, a tenth slower */
    assert_true(probed >= 1 && probed <= 8 && held <= 2 * probed + 40);
    even_balancer_close(silent);
    even_balancer_close(asked);
  }
}

static void smaller_last_batch_and_caps(void **context) {
  (void)context;
  const int64_t caps[2] = {35, -1};
  even_balancer_params params = {
      .size = sizeof params, .policy = EVEN_POLICY_DYNAMIC, .ranks = 2, .batch = 60, .caps = caps};
  even_balancer *balancer = NULL;
  assert_int_equal(even_balancer_open(&params, &balancer), EVEN_OK);
  for (int step = 0; step < 8; step++) {
    observe_line(balancer, 60, 0.001, 0.002, 1.0);
  }
  int64_t shares[2];
  assert_int_equal(even_balancer_shares(balancer, 60, shares), EVEN_OK);
  assert_int_equal(shares[0], 35);
  assert_int_equal(even_balancer_shares(balancer, 9, shares), EVEN_OK);
  assert_true(shares[0] >= 6 && shares[0] <= 7);
  assert_int_equal(even_balancer_shares(balancer, 1, shares), EVEN_OK);
  assert_int_equal(shares[0] + shares[1], 1);
  even_balancer_close(balancer);
}

static void prior_speeds_set_the_first_step(void **context) {
  (void)context;
  const double speeds[2] = {3.0, 1.0};
  const struct {
    even_policy policy;
    int64_t first, learned;
  } cases[] = {{EVEN_POLICY_EQUAL, 30, 30},
               {EVEN_POLICY_PROPORTIONAL, 45, 45},
               {EVEN_POLICY_DYNAMIC, 30, 40},
               {EVEN_POLICY_HYBRID, 45, 40}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    even_balancer_params params = {
        .size = sizeof params, .policy = cases[i].policy, .ranks = 2, .batch = 60, .speeds = speeds};
    even_balancer *balancer = NULL;
    int64_t shares[2];
    assert_int_equal(even_balancer_open(&params, &balancer), EVEN_OK);
    assert_int_equal(even_balancer_shares(balancer, 60, shares), EVEN_OK);
    assert_int_equal(shares[0], cases[i].first);
    for (int step = 0; step < 8; step++) {
      observe_line(balancer, 60, 0.001, 0.002, 1.0);
    }
    assert_int_equal(even_balancer_shares(balancer, 60, shares), EVEN_OK);
    assert_true(llabs(shares[0] - cases[i].learned) <= (cases[i].learned == 40 ? 1 : 0));
    even_balancer_close(balancer);
  }
}

/* A line through small sizes says little about large ones: a share grows to at most twice what the rank was measured
 * at, and so reaches its place in a few steps. */
static void share_at_most_doubles(void **context) {
  (void)context;
  const double speeds[2] = {1000.0, 1.0};
  even_balancer_params params = {
      .size = sizeof params, .policy = EVEN_POLICY_HYBRID, .ranks = 2, .batch = 1000, .speeds = speeds};
  even_balancer *balancer = NULL;
  int64_t shares[2];
  int64_t most = 0;
  int grew = 0;
  assert_int_equal(even_balancer_open(&params, &balancer), EVEN_OK);
  for (int step = 0; step < 60; step++) {
    assert_int_equal(even_balancer_shares(balancer, 1000, shares), EVEN_OK);
    assert_true(step == 0 || shares[1] <= 2 * most + 1); /* from none to one, too */
    grew += shares[1] > most;
    most = shares[1] > most ? shares[1] : most;
    observe_line(balancer, 1000, 0.001, 0.001, 1.0);
  }
  assert_true(grew >= 8 && shares[1] >= 490 && shares[1] <= 510);
  even_balancer_close(balancer);
}

static void fewer_samples_than_ranks(void **context) {
  (void)context;
  trial t = {.policy = EVEN_POLICY_HYBRID, .batch = 3, .steps = 60, .from = 20};
  t.ranks = unequal(8, 0.05);
  assert_true(worst(&t) >= 0.9);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(best_split_is_found_within_ten_steps),
      cmocka_unit_test(speed_ratios_up_to_sixteen),
      cmocka_unit_test(large_fixed_costs_are_learned),
      cmocka_unit_test(noise_without_a_change_costs_a_hundredth),
      cmocka_unit_test(four_times_slower_is_followed_and_so_is_recovery),
      cmocka_unit_test(a_rank_that_recovers_has_its_share_back_at_once),
      cmocka_unit_test(slow_drift_is_followed),
      cmocka_unit_test(rare_stalls_of_every_rank_are_borne),
      cmocka_unit_test(cpu_quota_is_a_slow_rank),
      cmocka_unit_test(one_outlier_moves_nothing),
      cmocka_unit_test(equal_ranks_stay_equal),
      cmocka_unit_test(line_is_identified_from_two_sizes),
      cmocka_unit_test(rank_without_samples_comes_back),
      cmocka_unit_test(rank_of_no_use_is_left_out_until_it_is_of_use),
      cmocka_unit_test(asking_for_shares_changes_nothing),
      cmocka_unit_test(smaller_last_batch_and_caps),
      cmocka_unit_test(prior_speeds_set_the_first_step),
      cmocka_unit_test(share_at_most_doubles),
      cmocka_unit_test(fewer_samples_than_ranks),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
