/* What models cannot know and only measuring tells: ranks that a quota stops, and balanced shares that are slower than
 * equal ones. Invented ranks, fixed seeds, no clock. */
#include <evenstep/balancer.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "balancer/floors.h"
#include "balancer/pseudo_random.h"
#include "balancer/state.h"

#include "late.h"

enum { SEEDS = 5, BATCH = 64 };

static void start(late_job *j, const even_cluster *ranks, uint64_t seed) {
  const even_balancer_params params = late_params(EVEN_POLICY_HYBRID, ranks->ranks, BATCH);
  late_open(j, &params, ranks, seed * 7919);
}

/* Seconds of `steps` steps. */
static double go(late_job *j, int steps) {
  double before = j->seconds;
  late_steps(j, steps);
  return j->seconds - before;
}

static double fixed_split(const even_cluster *ranks, uint64_t seed, const int64_t *shares, int from, int steps) {
  even_step_timing timings[EVEN_CLUSTER_RANKS];
  even_cluster c = *ranks;
  double seconds = 0.0;
  c.state = seed * 7919;
  for (int step = 0; step < from + steps; step++) {
    double one = even_cluster_step(&c, shares, timings);
    seconds += step >= from ? one : 0.0;
  }
  return seconds;
}

/* Seconds with the best of all fixed splits over two ranks, over all seeds. */
static double best_fixed(const even_cluster *ranks, int from, int steps) {
  double least = INFINITY;
  for (int64_t first = 1; first < BATCH; first++) {
    const int64_t shares[2] = {first, BATCH - first};
    double seconds = 0.0;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
      seconds += fixed_split(ranks, seed, shares, from, steps);
    }
    least = fmin(least, seconds);
  }
  return least;
}

/* A whole core and a quota of `quota` of one; both need `step` seconds at the best split. */
static even_cluster under_quota(double quota, double period, double step, double noise) {
  double work = step * (1.0 + quota) / ((double)BATCH + 6.0);
  even_cluster c = {.ranks = 2, .first_step = 3.0, .clocked = true};
  c.rank[0] = (even_cluster_rank){.fixed = 3.0 * work, .per_sample = work, .lognormal = noise};
  c.rank[1] = c.rank[0];
  c.rank[1].quota = quota;
  c.rank[1].period = period;
  c.rank[1].left = quota * period;
  return c;
}

static double efficiency(const even_cluster *ranks, int from, int steps) {
  double seconds = 0.0;
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    late_job j;
    start(&j, ranks, seed);
    (void)go(&j, from);
    seconds += go(&j, steps);
    late_close(&j);
  }
  return best_fixed(ranks, from, steps) / seconds;
}

/* Equal mean times are not the least mean of the slowest: where times scatter, a slow rank should seldom be the last.
 */
static void noise_leaves_slow_ranks_headroom(void **context) {
  (void)context;
  even_cluster c = {.ranks = 2, .first_step = 3.0};
  c.rank[0] = (even_cluster_rank){.fixed = 0.003, .per_sample = 0.001, .lognormal = 0.10};
  c.rank[1] = (even_cluster_rank){.fixed = 0.012, .per_sample = 0.004, .lognormal = 0.10};
  assert_true(efficiency(&c, 400, 800) >= 0.995); /* 0.988 at equal mean times */
}

/* A rank that is left out gets a sample for two steps now and then, and no more where a trial of others begins
 * meanwhile: the challenger would be measured with it, and lost. */
static void a_trial_is_not_measured_with_a_probe(void **context) {
  (void)context;
  for (uint64_t seed = 1; seed <= 10; seed++) {
    even_cluster c = {.ranks = 3, .idles = true, .state = seed * 7919};
    even_balancer_params params = {.size = sizeof params, .policy = EVEN_POLICY_HYBRID, .ranks = 3, .batch = BATCH};
    even_balancer *balancer = NULL;
    assert_int_equal(even_balancer_open(&params, &balancer), EVEN_OK);
    for (size_t r = 0; r < 3; r++) {
      c.rank[r] = (even_cluster_rank){.per_sample = 0.001, .lognormal = 0.05};
    }
    c.rank[1].quota = 0.25;
    c.rank[1].period = 0.1;
    c.rank[2].slower = 100.0;
    int given = 0; /* steps in a row */
    int most = 0;
    for (int step = 0; step < 3000; step++) {
      even_step_timing timings[3];
      int64_t shares[3];
      assert_int_equal(even_balancer_shares(balancer, BATCH, shares), EVEN_OK);
      given = shares[2] == 1 ? given + 1 : 0;
      most = given > most ? given : most;
      (void)even_cluster_step(&c, shares, timings);
      assert_int_equal(even_balancer_observe(balancer, timings), EVEN_OK);
    }
    assert_true(most <= 2);
    even_balancer_close(balancer);
  }
}

/* The headroom of a small last batch is that of its own short step: with a whole step's, a slow rank would get nothing
 * of it. */
static void a_small_last_batch_has_a_small_headroom(void **context) {
  (void)context;
  const double fixed[2] = {0.003, 0.012};
  const double per_sample[2] = {0.001, 0.004};
  int64_t shares[2];
  even_balancer *balancer = NULL;
  even_balancer_params params = {.size = sizeof params, .policy = EVEN_POLICY_HYBRID, .ranks = 2, .batch = BATCH};
  assert_int_equal(even_balancer_open(&params, &balancer), EVEN_OK);
  for (int step = 0; step < 100; step++) {
    even_step_timing timings[2];
    assert_int_equal(even_balancer_shares(balancer, BATCH, shares), EVEN_OK);
    for (size_t r = 0; r < 2; r++) { /* 8% to and fro, one rank against the other */
      double factor = (step + (int)r) % 2 == 0 ? 1.08 : 0.92;
      timings[r] = (even_step_timing){.samples = shares[r],
                                      .busy_seconds = factor * (fixed[r] + per_sample[r] * (double)shares[r])};
    }
    assert_int_equal(even_balancer_observe(balancer, timings), EVEN_OK);
  }
  assert_int_equal(even_balancer_shares(balancer, 16, shares), EVEN_OK);
  assert_int_equal(shares[1], 1); /* 15 and 1 samples take 18 and 16 ms, 16 and 0 would take 19 */
  even_balancer_close(balancer);
}

/* Equal mean times are not the least mean of the slowest: a rank that mostly waits, and is stopped now and then, must
 * get less than its mean time says. */
static void quotas_reach_the_best_fixed_split(void **context) {
  (void)context;
  const struct {
    double quota, period, step, noise, reach;
  } cases[] = {{0.25, 0.01, 0.011, 0.05, 0.95}, {0.25, 0.01, 0.05, 0.10, 0.95}, {0.25, 0.01, 0.22, 0.10, 0.95},
               {0.25, 0.1, 0.011, 0.05, 0.95},  {0.25, 0.1, 0.011, 0.10, 0.95}, {0.25, 0.1, 0.05, 0.10, 0.95},
               {0.25, 0.1, 0.1, 0.10, 0.93},    {0.25, 0.1, 0.22, 0.10, 0.95}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    even_cluster c = under_quota(cases[i].quota, cases[i].period, cases[i].step, cases[i].noise);
    double reached = efficiency(&c, 400, 800);
    if (!(reached >= cases[i].reach)) {
      print_error("case %zu: %.3f of the best fixed split\n", i, reached);
    }
    assert_true(reached >= cases[i].reach);
  }
}

/* Three of four ranks have quotas: the one that stops the step most must not get less at the cost of others that have
 * no time left either. Beside the split at the true speeds. */
static void several_quotas_are_found(void **context) {
  (void)context;
  const double quotas[] = {0.0, 0.5, 0.25, 0.1};
  const struct {
    double step, reach;
  } cases[] = {{0.011, 0.77}, {0.05, 0.88}}; /* of 400 seeds the first has 0.80 */
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    even_cluster c = {.ranks = 4, .first_step = 3.0, .clocked = true};
    double work = cases[i].step * 1.85 / ((double)BATCH + 12.0);
    for (size_t r = 0; r < 4; r++) {
      c.rank[r] = (even_cluster_rank){.fixed = 3.0 * work, .per_sample = work, .lognormal = 0.10, .quota = quotas[r]};
      c.rank[r].period = 0.1;
      c.rank[r].left = quotas[r] * 0.1;
    }
    int64_t best[EVEN_CLUSTER_RANKS];
    double ours = 0.0;
    double theirs = 0.0;
    assert_int_equal(even_cluster_best(&c, BATCH, best), EVEN_OK);
    for (uint64_t seed = 1; seed <= 4 * (uint64_t)SEEDS; seed++) {
      late_job j;
      start(&j, &c, seed);
      (void)go(&j, 400);
      ours += go(&j, 800);
      theirs += fixed_split(&c, seed, best, 400, 800);
      late_close(&j);
    }
    if (!(theirs / ours >= cases[i].reach)) {
      print_error("case %zu: %.3f of the best split\n", i, theirs / ours);
    }
    assert_true(theirs / ours >= cases[i].reach);
  }
}

/* The quota is lifted in mid-run: what the rank was held to is forgotten. */
static void lifted_quota_is_noticed(void **context) {
  (void)context;
  even_cluster c = under_quota(0.25, 0.1, 0.011, 0.05);
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    late_job j;
    start(&j, &c, seed);
    (void)go(&j, 500);
    assert_true(j.queue[0][1] <= 17);
    j.ranks.rank[1].quota = 0.0;
    (void)go(&j, 3000);
    assert_true(j.queue[0][1] >= 28);
    late_close(&j);
  }
}

/* Ranks of speed 1 and 0.7 that disturb one another the more their shares differ: each rank's own times speak for
 * unequal shares, the step's for equal ones. */
static even_cluster misleading(double tilt) {
  even_cluster c = {.ranks = 2, .first_step = 3.0, .tilt = tilt};
  c.rank[0] = (even_cluster_rank){.per_sample = 0.001, .lognormal = 0.05};
  c.rank[1] = (even_cluster_rank){.per_sample = 0.001 / 0.7, .lognormal = 0.05};
  return c;
}

/* By a trial, or because the ranks' times changed whenever the shares did. */
static void balancing_that_is_slower_is_given_up(void **context) {
  (void)context;
  int by_trial = 0;
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    even_cluster c = misleading(2.0);
    late_job j;
    double balanced = -1.0;
    double equal = -1.0;
    start(&j, &c, seed);
    assert_false(even_balancer_on_equal(j.balancer, &balanced, &equal));
    assert_float_equal(balanced, 0.0, 0.0);
    assert_float_equal(equal, 0.0, 0.0);
    (void)go(&j, 200);
    bool tried = even_balancer_on_equal(j.balancer, &balanced, &equal);
    by_trial += tried;
    assert_true(!tried || (balanced > equal * 1.02 && equal > 0.04 && equal < 0.055));
    (void)go(&j, LATE_AHEAD + 1);
    assert_int_equal(j.queue[0][0], BATCH / 2);
    int64_t last[2];
    assert_int_equal(even_balancer_shares(j.balancer, 10, last), EVEN_OK);
    assert_int_equal(last[0], 5);
    /* trials of balanced shares are rare: over a long time equal shares lose next to nothing */
    const int64_t halves[2] = {BATCH / 2, BATCH / 2};
    double mine = go(&j, 2000);
    assert_true(mine < fixed_split(&c, seed, halves, 203, 2000) * 1.01);
    if (!tried) {
      late_close(&j);
      continue;
    }
    /* the disturbance ends: balanced shares come back */
    j.ranks.tilt = 0.0;
    (void)go(&j, 8000);
    assert_false(even_balancer_on_equal(j.balancer, NULL, NULL));
    assert_true(j.queue[0][0] > 35);
    late_close(&j);
  }
  assert_true(by_trial >= 3);
}

/* Models that came back to equal shares by themselves remember of sizes what was the ranks' disturbing one another:
 * once that is over steps of equal shares alone would never show it. */
static void what_models_remember_wrongly_is_tried(void **context) {
  (void)context;
  const uint64_t seeds[] = {5, 6, 13, 15, 18}; /* whose models do so for good */
  for (size_t i = 0; i < sizeof seeds / sizeof seeds[0]; i++) {
    even_cluster c = misleading(2.0);
    late_job j;
    start(&j, &c, seeds[i]);
    (void)go(&j, 2200);
    j.ranks.tilt = 0.0;
    (void)go(&j, 8000);
    assert_true(j.balancer->current[0] > 35);
    late_close(&j);
  }
}

/* That equal shares were faster was measured of other speeds: a rank that becomes slower under them is not left to the
 * next trial. Ranks that all become slower say nothing against it. */
static void a_rank_slows_under_equal_shares(void **context) {
  (void)context;
  int tested = 0;
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    even_cluster c = misleading(2.0);
    late_job j;
    start(&j, &c, seed);
    (void)go(&j, 240);
    if (!even_balancer_on_equal(j.balancer, NULL, NULL)) { /* it came back to them by itself */
      late_close(&j);
      continue;
    }
    tested++;
    j.ranks.rank[0].slower = j.ranks.rank[1].slower = 3.0;
    for (int step = 0; step < 60; step++) {
      (void)go(&j, 1);
      assert_true(even_balancer_on_equal(j.balancer, NULL, NULL));
    }
    j.ranks.tilt = 0.0;
    j.ranks.rank[1].slower = 12.0;
    (void)go(&j, 16);
    assert_false(even_balancer_on_equal(j.balancer, NULL, NULL));
    assert_in_range(j.queue[0][0], 49, 60); /* steps of 1.1 times the best split's, which has 55, at the most */
    (void)go(&j, 40);
    assert_in_range(j.queue[0][0], 52, 60);
    late_close(&j);
  }
  assert_true(tested >= 3);
}

/* The trial that told which is faster is not repeated the other way round: not before 256 steps are over, whenever it
 * was, and then once. */
static void an_answer_holds_for_a_while(void **context) {
  (void)context;
  const int before[] = {0, 1000};
  for (size_t i = 0; i < sizeof before / sizeof before[0]; i++) {
    even_cluster c = misleading(i == 0 ? 2.0 : 0.0);
    late_job j;
    int waited = 0;
    start(&j, &c, 3);
    (void)go(&j, before[i]);
    j.ranks.tilt = 2.0;
    for (; !even_balancer_on_equal(j.balancer, NULL, NULL) && waited < 4000; waited++) {
      (void)go(&j, 1);
    }
    assert_true(waited < 4000);
    for (int step = 0; step < 255; step++) {
      assert_int_equal(j.queue[LATE_AHEAD][0], BATCH / 2);
      (void)go(&j, 1);
    }
    /* long after, balanced shares become faster and come back: equal ones are not tried again at once */
    (void)go(&j, 3000);
    j.ranks.tilt = 0.0;
    for (waited = 0; even_balancer_on_equal(j.balancer, NULL, NULL) && waited < 8192; waited++) {
      (void)go(&j, 1);
    }
    assert_true(waited < 8192);
    for (int step = 0; step < 255; step++) {
      assert_true(j.queue[LATE_AHEAD][0] > BATCH / 2 + 2);
      (void)go(&j, 1);
    }
    late_close(&j);
  }
}

/* Where balancing helps it stays, and looking whether equal shares would be faster costs next to nothing. */
static void balancing_that_helps_stays(void **context) {
  (void)context;
  const double slow[] = {0.25, 0.5, 0.7, 0.9};
  for (size_t i = 0; i < sizeof slow / sizeof slow[0]; i++) {
    even_cluster c = misleading(0.0);
    c.rank[1].per_sample = 0.001 / slow[i];
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
      late_job j;
      start(&j, &c, seed);
      (void)go(&j, 1000);
      assert_false(even_balancer_on_equal(j.balancer, NULL, NULL));
      late_close(&j);
    }
    assert_true(efficiency(&c, 40, 2000) >= 0.975);
  }
}

/* All ranks become slower at once, so that balanced steps are slower than equal ones were: no reason to go back. */
static void slower_times_for_all_do_not_mislead(void **context) {
  (void)context;
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    even_cluster c = misleading(0.0);
    late_job j;
    start(&j, &c, seed);
    (void)go(&j, 60);
    j.ranks.rank[0].slower = j.ranks.rank[1].slower = 3.0;
    for (int i = 0; i < 40; i++) {
      (void)go(&j, 10);
      assert_false(even_balancer_on_equal(j.balancer, NULL, NULL));
    }
    assert_true(j.queue[0][0] > 35);
    late_close(&j);
  }
}

/* Neither what holds nor what a trial of others would put in its place, when it wins. */
static void a_floor_goes_with_the_speed_it_was_learned_at(void **context) {
  (void)context;
  const even_balancer_params params = late_params(EVEN_POLICY_AUTO, 2, 20);
  even_balancer *b = late_balancer(&params);
  for (size_t r = 0; r < 2; r++) {
    b->guard.floors[r] = b->guard.floors_tried[r] = 0.01;
  }
  b->models[1].sped_up = true;
  even_floors_forget(b);
  assert_true(b->guard.floors[0] > 0.0 && b->guard.floors_tried[0] > 0.0);
  assert_false(b->guard.floors[1] > 0.0 || b->guard.floors_tried[1] > 0.0);
  assert_false(b->models[1].sped_up);
  even_balancer_close(b);
}

/* A rank is three times slower for 10 to 40 steps, and as fast as before for 10 to 80: a trial of equal shares may meet
 * its best ones, and those around it its worst. */
static void a_fixed_split_does_not_win_by_chance(void **context) {
  (void)context;
  const double speeds[2] = {2.0, 1.0};
  int off = 0;
  for (uint64_t seed = 1; seed <= 4 * SEEDS; seed++) {
    const even_balancer_params params = {
        .size = sizeof params, .policy = EVEN_POLICY_AUTO, .ranks = 2, .batch = BATCH, .speeds = speeds};
    even_cluster c = {.ranks = 2, .first_step = 3.0};
    c.rank[0] = (even_cluster_rank){.fixed = 0.003, .per_sample = 0.001, .lognormal = 0.05};
    c.rank[1] = (even_cluster_rank){.fixed = 0.006, .per_sample = 0.002, .lognormal = 0.05};
    uint64_t state = seed * 104729;
    int64_t until = 0;
    bool slow = true;
    late_job j;
    late_open(&j, &params, &c, seed * 7919);
    for (int64_t step = 0; step < 1200; step++) {
      if (step >= until) {
        until = step + even_pseudo_random_between(&state, 10, slow ? 80 : 40);
        slow = !slow;
      }
      j.ranks.rank[1].slower = slow ? 3.0 : 1.0;
      (void)go(&j, 1);
      off += even_balancer_choice(j.balancer, NULL, NULL) != EVEN_POLICY_HYBRID;
    }
    late_close(&j);
  }
  assert_true(25 * off <= 2 * 4 * SEEDS * 1200); /* one in seven steps where one trial was enough */
}

/* It would be asked in each step, or of other speeds. */
static void a_doubt_ends_with_its_question(void **context) {
  (void)context;
  const int64_t caps[2] = {BATCH - 1, BATCH - 1};
  even_cluster c = {.ranks = 2, .first_step = 3.0};
  c.rank[0] = c.rank[1] = (even_cluster_rank){.fixed = 0.003, .per_sample = 0.001, .lognormal = 0.01};
  late_job j;
  start(&j, &c, 7);
  (void)go(&j, 100);
  even_guard *g = &j.balancer->guard;
  g->doubted = EVEN_FIXED_EQUAL; /* which the models' is */
  (void)go(&j, 1);
  assert_int_equal(g->doubted, EVEN_FIXED_NONE);
  g->doubted = EVEN_FIXED_EQUAL;
  even_guard_begin_anew(j.balancer);
  assert_int_equal(g->doubted, EVEN_FIXED_NONE);
  g->doubted = EVEN_FIXED_EQUAL;
  assert_int_equal(even_balancer_set_caps(j.balancer, caps), EVEN_OK);
  assert_int_equal(g->doubted, EVEN_FIXED_NONE);
  (void)go(&j, 24);
  g->doubted = EVEN_FIXED_EQUAL;
  j.ranks.rank[0].slower = j.ranks.rank[1].slower = 100.0;
  (void)go(&j, 4);
  assert_true(even_series_count(&g->trial.before) < EVEN_TRIAL_CHALLENGE); /* nothing was asked */
  assert_int_equal(g->doubted, EVEN_FIXED_NONE);
  late_close(&j);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_trial_is_not_measured_with_a_probe),
      cmocka_unit_test(noise_leaves_slow_ranks_headroom),
      cmocka_unit_test(a_small_last_batch_has_a_small_headroom),
      cmocka_unit_test(several_quotas_are_found),
      cmocka_unit_test(quotas_reach_the_best_fixed_split),
      cmocka_unit_test(lifted_quota_is_noticed),
      cmocka_unit_test(balancing_that_is_slower_is_given_up),
      cmocka_unit_test(balancing_that_helps_stays),
      cmocka_unit_test(slower_times_for_all_do_not_mislead),
      cmocka_unit_test(an_answer_holds_for_a_while),
      cmocka_unit_test(what_models_remember_wrongly_is_tried),
      cmocka_unit_test(a_rank_slows_under_equal_shares),
      cmocka_unit_test(a_fixed_split_does_not_win_by_chance),
      cmocka_unit_test(a_doubt_ends_with_its_question),
      cmocka_unit_test(a_floor_goes_with_the_speed_it_was_learned_at),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
