/* What all ranks have in common: a drift of the whole machine is no slope of a rank's line, though shares move
 * meanwhile; what one rank does is told from it; noise is none. */
#include <evenstep/balancer.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "balancer/state.h"
#include "late.h"

enum { BATCH = 64, SEEDS = 20, OTHER_SPLIT = 100, STEPS = 130 };

/* What the machine, and one rank of it, does: so many times as long as at first. */
typedef double (*course)(int step);

static double steady(int step) {
  (void)step;
  return 1.0;
}

/* By a quarter within forty steps, while equal shares run. */
static double slower_bit_by_bit(int step) {
  return 1.0 + fmin(fmax(0.0, step - 60.0), 40.0) / 160.0;
}

static double faster_bit_by_bit(int step) {
  return 1.0 / slower_bit_by_bit(step);
}

static double slower_at_once(int step) {
  return step >= 70 ? 1.25 : 1.0;
}

static double faster_at_once(int step) {
  return 1.0 / slower_at_once(step);
}

/* Shares of the caller's: equal ones, then others. */
static even_status two_splits(void *context, const even_policy_view *view, int64_t *shares) {
  (void)context;
  int64_t equal = view->batch / (int64_t)view->ranks;
  for (size_t r = 0; r < view->ranks; r++) {
    shares[r] = equal;
  }
  if (view->steps >= OTHER_SPLIT) {
    shares[0] += equal / 4;
    shares[view->ranks - 1] -= equal / 4;
  }
  return EVEN_OK;
}

typedef struct job {
  even_balancer *balancer;
  even_cluster ranks;
  course machine;
  course last; /* of the last rank, by itself */
  int step;
  int followed; /* steps after which the level is */
} job;

static void open_job(job *j, size_t ranks, double noise, course machine, course last, uint64_t seed) {
  *j = (job){.machine = machine, .last = last};
  j->ranks = (even_cluster){.ranks = ranks, .first_step = 3.0, .state = seed * 7919};
  for (size_t r = 0; r < ranks; r++) {
    j->ranks.rank[r] = (even_cluster_rank){.fixed = 0.003, .per_sample = 0.001, .lognormal = noise};
  }
  even_balancer_params params = late_params(EVEN_POLICY_CALLBACK, ranks, BATCH);
  params.choose = two_splits;
  j->balancer = late_balancer(&params);
}

static void run(job *j, int steps) {
  even_step_timing timings[EVEN_CLUSTER_RANKS];
  int64_t shares[EVEN_CLUSTER_RANKS];
  for (int i = 0; i < steps; i++, j->step++) {
    for (size_t r = 0; r < j->ranks.ranks; r++) {
      j->ranks.rank[r].slower = j->machine(j->step) * (r + 1 == j->ranks.ranks ? j->last(j->step) : 1.0);
    }
    assert_int_equal(even_balancer_shares(j->balancer, BATCH, shares), EVEN_OK);
    (void)even_cluster_step(&j->ranks, shares, timings);
    assert_int_equal(even_balancer_observe(j->balancer, timings), EVEN_OK);
    j->followed += j->balancer->level.moves > 0;
  }
}

/* How far what is believed of a rank is from the truth, at worst, for half to one and a half of an equal share. */
static double wrong_by(const job *j, size_t rank) {
  double worst = 0.0;
  int64_t share = BATCH / (int64_t)j->ranks.ranks;
  for (int64_t samples = share / 2; samples <= share + share / 2; samples += share / 2) {
    double truth = even_cluster_work(&j->ranks.rank[rank], (double)samples) * j->ranks.rank[rank].slower;
    worst = fmax(worst, fabs(even_balancer_predict(j->balancer, rank, samples) / truth - 1.0));
  }
  return worst;
}

/* The worst rank's, in the mean of the seeds. */
static double after(size_t ranks, double noise, course machine, course last, int steps) {
  double sum = 0.0;
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    double worst = 0.0;
    job j;
    open_job(&j, ranks, noise, machine, last, seed);
    run(&j, steps);
    for (size_t r = 0; r < ranks; r++) {
      worst = fmax(worst, wrong_by(&j, r));
    }
    sum += worst;
    even_balancer_close(j.balancer);
  }
  return sum / (double)SEEDS;
}

static void check(size_t ranks, double noise, course machine, course last, double most) {
  double found = after(ranks, noise, machine, last, STEPS);
  if (!(found <= most)) {
    fail_msg("%zu ranks, noise %g: off by %.3f", ranks, noise, found);
  }
}

/* Of two ranks both have both sizes; of four the last and the first, and the others' fixed part is not known. */
static void a_drift_of_all_is_no_slope(void **context) {
  (void)context;
  const course drifts[] = {slower_bit_by_bit, faster_bit_by_bit};
  for (size_t i = 0; i < sizeof drifts / sizeof drifts[0]; i++) {
    check(2, 0.02, drifts[i], steady, 0.05); /* without a level 0.11, 0.25 */
    check(4, 0.02, drifts[i], steady, 0.08); /* 0.16, 0.22 */
    check(4, 0.05, drifts[i], steady, 0.10); /* 0.16, 0.19 */
  }
}

static void so_is_a_step_of_all(void **context) {
  (void)context;
  const course jumps[] = {slower_at_once, faster_at_once};
  for (size_t i = 0; i < sizeof jumps / sizeof jumps[0]; i++) {
    check(2, 0.02, jumps[i], steady, 0.04);
    check(2, 0.05, jumps[i], steady, 0.09);
    check(4, 0.05, jumps[i], steady, 0.09);
  }
}

/* Of two ranks as of four. */
static void a_change_of_one_rank_stays_its_own(void **context) {
  (void)context;
  const course changes[] = {slower_at_once, faster_at_once};
  for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
    check(2, 0.02, steady, changes[i], 0.03);
    check(2, 0.05, steady, changes[i], 0.07);
    check(4, 0.02, steady, changes[i], 0.08);
  }
}

static void so_does_one_amid_a_drift_of_all(void **context) {
  (void)context;
  check(2, 0.02, slower_bit_by_bit, slower_at_once, 0.06); /* without a level 0.10 */
  check(4, 0.02, slower_bit_by_bit, slower_at_once, 0.08); /* 0.16 */
  check(4, 0.02, faster_bit_by_bit, slower_at_once, 0.08); /* 0.22 */
}

/* Once in two thousand steps it seems so. */
static void noise_alone_has_no_level(void **context) {
  (void)context;
  const double noise[] = {0.02, 0.05, 0.10};
  for (size_t ranks = 2; ranks <= 4; ranks += 2) {
    int followed = 0;
    for (size_t i = 0; i < 3 * SEEDS; i++) {
      job j;
      open_job(&j, ranks, noise[i % 3], steady, steady, i + 1);
      run(&j, 400);
      followed += j.followed;
      even_balancer_close(j.balancer);
    }
    assert_true(100 * followed <= 6 * 3 * SEEDS * 400);
  }
}

/* The machine is now slower by a quarter, now as fast as before, within some sixty steps each. */
static double wave(int step) {
  double at = step % 120 / 60.0;
  return 1.0 + 0.25 * (at < 1.0 ? at : 2.0 - at);
}

/* Nor is a rank that is busy for less while the machine becomes faster one that a quota stops. */
static void equal_ranks_keep_equal_shares_while_all_drift(void **context) {
  (void)context;
  int unequal = 0;
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    even_cluster c = {.ranks = 2, .first_step = 3.0};
    c.rank[0] = c.rank[1] = (even_cluster_rank){.fixed = 0.003, .per_sample = 0.001, .lognormal = 0.05};
    const even_balancer_params params = late_params(EVEN_POLICY_AUTO, 2, BATCH);
    late_job of;
    late_open(&of, &params, &c, seed * 7919);
    for (int step = 0; step < 1000; step++) {
      of.ranks.rank[0].slower = of.ranks.rank[1].slower = wave(step);
      late_steps(&of, 1);
      unequal += step >= 10 && of.ran[0] != BATCH / 2;
    }
    late_close(&of);
  }
  assert_true(100 * unequal <= 2 * SEEDS * 990); /* 0.35 as long as such a rank was held back */
}

/* Steps until they take at most a tenth longer than the best split's, where the first `changed` of equal ranks become
 * slower by a half at once: in the mean of the seeds. */
static double steps_to_follow(size_t ranks, size_t changed) {
  int steps = 0;
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    even_cluster c = {.ranks = ranks, .first_step = 3.0};
    for (size_t r = 0; r < ranks; r++) {
      c.rank[r] = (even_cluster_rank){.fixed = 0.003, .per_sample = 0.001, .lognormal = 0.01};
    }
    const even_balancer_params params = late_params(EVEN_POLICY_AUTO, ranks, 32 * (int64_t)ranks);
    late_job of;
    late_open(&of, &params, &c, seed * 7919);
    late_steps(&of, 200);
    for (size_t r = 0; r < changed; r++) {
      of.ranks.rank[r].slower = of.twin.rank[r].slower = 1.5;
    }
    for (int i = 0; i < 40 && late_efficiency(&of, 1) < 0.9; i++) {
      steps++;
    }
    late_close(&of);
  }
  return (double)steps / (double)SEEDS;
}

/* Most of the ranks may be those of one of two hosts. */
static void what_most_ranks_do_is_not_the_machine(void **context) {
  (void)context;
  assert_true(steps_to_follow(3, 2) <= 5.5); /* 7.0 where half of the ranks were enough */
  assert_true(steps_to_follow(8, 5) <= 5.5);
}

/* Of 600 steps on a machine that drifts, how many are followed; every `epoch` steps (0: never) a smaller batch runs. */
static int followed_of_epochs(int epoch) {
  int followed = 0;
  even_cluster c = {.ranks = 2, .first_step = 3.0, .state = 7919};
  c.rank[0] = c.rank[1] = (even_cluster_rank){.fixed = 0.003, .per_sample = 0.001, .lognormal = 0.02};
  const even_balancer_params params = late_params(EVEN_POLICY_AUTO, 2, BATCH);
  even_balancer *b = late_balancer(&params);
  for (int step = 0; step < 600; step++) {
    even_step_timing timings[EVEN_CLUSTER_RANKS];
    int64_t shares[EVEN_CLUSTER_RANKS];
    int64_t batch = epoch > 0 && step % epoch == epoch - 1 ? BATCH / 2 - 2 : BATCH;
    c.rank[0].slower = c.rank[1].slower = wave(step);
    assert_int_equal(even_balancer_shares(b, batch, shares), EVEN_OK);
    (void)even_cluster_step(&c, shares, timings);
    assert_int_equal(even_balancer_observe(b, timings), EVEN_OK);
    followed += b->level.moves > 0;
  }
  even_balancer_close(b);
  return followed;
}

static void a_smaller_last_batch_is_no_other_split(void **context) {
  (void)context;
  int always = followed_of_epochs(0);
  assert_true(always > 300);
  assert_true(4 * followed_of_epochs(12) > 3 * always); /* never, as long as each epoch's end was two changes */
}

static even_rank_model measured(double fixed, double per_sample) {
  return (even_rank_model){.block = 1,
                           .count = 8,
                           .known = true,
                           .noise = 0.02,
                           .fixed_seconds = fixed,
                           .seconds_per_sample = per_sample,
                           .known_samples = 4.0,
                           .known_seconds = 4.0};
}

/* Steps of shares of `first` and the rest, each `times` as long as the models say. */
static void take_steps(even_level *level, even_rank_model *models, even_replay *replay, int64_t first, double times,
                       int steps) {
  for (int i = 0; i < steps; i++) {
    even_step_timing timings[2] = {{.samples = first}, {.samples = BATCH - first}};
    for (size_t r = 0; r < 2; r++) {
      timings[r].busy_seconds = times * even_model_at(&models[r], timings[r].samples);
    }
    even_level_take(level, models, replay, timings, 2);
    even_replay_take(replay, timings, 2);
  }
}

/* Models may be wrong of a size, all alike; what then changes with that split is common. */
static void a_move_is_one_of_a_single_split(void **context) {
  (void)context;
  even_level level = {0};
  even_rank_model models[2] = {measured(0.25, 0.0625), measured(0.25, 0.0625)};
  even_replay replay = {.taken = 0};
  assert_int_equal(even_replay_open(&replay, 2), EVEN_OK);
  take_steps(&level, models, &replay, 32, 1.0, 40);
  take_steps(&level, models, &replay, 24, 1.125, 40);
  assert_int_equal(level.moves, 0);
  assert_true(models[0].fixed_seconds == 0.25 && models[1].seconds_per_sample == 0.0625);
  take_steps(&level, models, &replay, 24, 1.25, 1);
  assert_true(level.moves > 0);
  assert_true(models[0].fixed_seconds == 0.25 * 1.125 && models[1].seconds_per_sample == 0.0625 * 1.125);
  take_steps(&level, models, &replay, 24, 2.0, 1); /* another machine, not this one's level */
  take_steps(&level, models, &replay, 24, 0.5, 1);
  assert_true(models[0].fixed_seconds == 0.25 * 1.125 && models[1].seconds_per_sample == 0.0625 * 1.125);
  even_replay_close(&replay);
}

static void near(double found, double expected) {
  if (!(fabs(found - expected) < 1e-9 * expected)) {
    fail_msg("%.12f, %.12f expected", found, expected);
  }
}

/* The machine takes a fifth longer since the last steps: of what was measured k steps ago 1 - 1 / 2^k of that is not
 * there yet. */
static void what_was_measured_is_as_if_of_today(void **context) {
  (void)context;
  even_rank_model single = measured(0.5, 0.25);
  even_rank_model blocks = measured(0.5, 0.25);
  single.count = blocks.count = 3;
  blocks.block = 4;
  blocks.pending = 2;
  blocks.pending_seconds = 2.0;
  single.idle_count = 1;
  single.idle[0] = single.idle_reference = 1.0;
  for (int i = 0; i < 3; i++) {
    single.seconds[i] = blocks.seconds[i] = 1.0;
  }
  even_model_follow(&single, 1.2, 0.5);
  even_model_follow(&blocks, 1.2, 0.5);
  near(single.seconds[2], 1.1);
  near(single.seconds[1], 1.15);
  near(single.seconds[0], 1.175);
  near(single.fixed_seconds, 0.6);
  near(single.seconds_per_sample, 0.3);
  near(single.known_seconds, 4.8);
  near(single.idle[0], 1.2);
  near(single.idle_reference, 1.2);
  near(blocks.pending_seconds, 2.0 * (1.0 + 0.2 * 3.0 / 4.0)); /* of the two last steps … */
  near(blocks.seconds[2], 1.0 + 0.2 * 63.0 / 64.0);            /* … and the six last ones */
  near(blocks.seconds[1], 1.0 + 0.2 * 1023.0 / 1024.0);
}

/* The oldest of the remembered steps is where the next one goes. */
static void so_are_replayed_steps(void **context) {
  (void)context;
  enum { OVER = 3 };
  even_replay replay = {.taken = 0};
  assert_int_equal(even_replay_open(&replay, 2), EVEN_OK);
  for (int i = 0; i < EVEN_REPLAY_STEPS + OVER; i++) {
    const even_step_timing timings[2] = {{8, 1.0}, {8, 3.0}};
    even_replay_take(&replay, timings, 2);
  }
  even_replay_follow(&replay, 2, 1.2, 0.5);
  near(replay.seconds[(OVER - 1) * 2], 1.1); /* the last one */
  near(replay.seconds[(OVER - 1) * 2 + 1], 3.3);
  near(replay.seconds[(OVER - 2) * 2], 1.15);
  near(replay.seconds[(EVEN_REPLAY_STEPS - 1) * 2 + 1], 3.0 * (1.0 + 0.2 * 15.0 / 16.0));
  assert_true(fabs(replay.seconds[OVER * 2] - 1.2) < 0.001); /* the oldest */
  even_replay_close(&replay);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_drift_of_all_is_no_slope),
      cmocka_unit_test(so_is_a_step_of_all),
      cmocka_unit_test(a_change_of_one_rank_stays_its_own),
      cmocka_unit_test(so_does_one_amid_a_drift_of_all),
      cmocka_unit_test(noise_alone_has_no_level),
      cmocka_unit_test(what_most_ranks_do_is_not_the_machine),
      cmocka_unit_test(a_smaller_last_batch_is_no_other_split),
      cmocka_unit_test(a_move_is_one_of_a_single_split),
      cmocka_unit_test(what_was_measured_is_as_if_of_today),
      cmocka_unit_test(so_are_replayed_steps),
      cmocka_unit_test(equal_ranks_keep_equal_shares_while_all_drift),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
