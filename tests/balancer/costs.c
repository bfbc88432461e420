/* Shares that cost more than a table says: buckets, micro-batches, constant parts, ranks left out. Against brute force,
 * with the costs written once more by what they mean. */
#include <evenstep/balancer.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "balancer/pseudo_random.h"

enum { MOST_POINTS = 5, MOST_RANKS = 4, MOST_BATCH = 24, MANY = 1024 };

typedef struct problem {
  even_rank_cost costs[MOST_RANKS];
  int64_t samples[MOST_RANKS][MOST_POINTS];
  double seconds[MOST_RANKS][MOST_POINTS];
  int64_t caps[MOST_RANKS];
  size_t ranks;
  int64_t batch;
} problem;

/* Seconds that are sums of a few halves, so that the order of additions does not matter and ties are frequent. */
static double some_seconds(uint64_t *state) {
  return 0.5 * (double)even_pseudo_random_between(state, 0, 6);
}

static void invent_table(uint64_t *state, problem *p, size_t rank) {
  size_t points = (size_t)even_pseudo_random_between(state, 1, MOST_POINTS);
  int64_t samples = even_pseudo_random_between(state, 0, 2);
  double seconds = some_seconds(state);
  for (size_t i = 0; i < points; i++) {
    p->samples[rank][i] = samples;
    p->seconds[rank][i] = seconds;
    samples += 1 << even_pseudo_random_between(state, 0, 3);
    seconds += some_seconds(state);
  }
  p->costs[rank].table = (even_time_table){p->samples[rank], p->seconds[rank], points};
}

static void invent(uint64_t *state, problem *p) {
  memset(p, 0, sizeof *p);
  p->ranks = (size_t)even_pseudo_random_between(state, 1, MOST_RANKS);
  p->batch = even_pseudo_random_between(state, 1, p->ranks == MOST_RANKS ? MOST_BATCH / 2 : MOST_BATCH);
  int64_t room = 0;
  for (size_t r = 0; r < p->ranks; r++) {
    invent_table(state, p, r);
    p->costs[r].bucket = even_pseudo_random_between(state, 0, 1) == 0 ? even_pseudo_random_between(state, 0, 8) : 0;
    p->costs[r].micro_batch =
        even_pseudo_random_between(state, 0, 1) == 0 ? even_pseudo_random_between(state, 1, 9) : 0;
    p->costs[r].constant_seconds = even_pseudo_random_between(state, 0, 1) == 0 ? some_seconds(state) : 0.0;
    p->costs[r].leaves_out = even_pseudo_random_between(state, 0, 2) == 0;
    p->caps[r] = even_pseudo_random_between(state, 0, 2) == 0 ? even_pseudo_random_between(state, 0, p->batch) : -1;
    room += p->caps[r] < 0 ? p->batch : p->caps[r];
  }
  if (room < p->batch) {
    p->caps[0] = -1;
  }
}

/* One micro-batch after the other, each padded to whole buckets. */
static double seconds_of(const even_rank_cost *cost, int64_t samples) {
  double seconds = cost->constant_seconds;
  if (samples == 0) {
    return cost->leaves_out ? 0.0 : seconds + even_time_table_at(&cost->table, 0);
  }
  while (samples > 0) {
    int64_t now = cost->micro_batch > 0 && cost->micro_batch < samples ? cost->micro_batch : samples;
    int64_t padded = now;
    while (cost->bucket > 1 && padded % cost->bucket != 0) {
      padded++;
    }
    seconds += even_time_table_at(&cost->table, padded);
    samples -= now;
  }
  return seconds;
}

static int64_t most_of(const problem *p, size_t rank) {
  return p->caps[rank] < 0 ? p->batch : p->caps[rank];
}

static double brute_force(const problem *p, size_t rank, int64_t left, double so_far) {
  if (rank + 1 == p->ranks || rank + 1 == MOST_RANKS) {
    return left > most_of(p, rank) ? INFINITY : fmax(so_far, seconds_of(&p->costs[rank], left));
  }
  double best = INFINITY;
  for (int64_t share = 0; share <= left && share <= most_of(p, rank); share++) {
    double here = fmax(so_far, seconds_of(&p->costs[rank], share));
    best = here < best ? fmin(best, brute_force(p, rank + 1, left - share, here)) : best;
  }
  return best;
}

static bool near(double one, double other) {
  return fabs(one - other) <= 1e-12 * fmax(1.0, fabs(other));
}

/* Shares neither at their caps nor whole buckets: the batch allows that at most one is such. */
static int broken_buckets(const problem *p, const int64_t *shares) {
  int broken = 0;
  for (size_t r = 0; r < p->ranks; r++) {
    const even_rank_cost *cost = &p->costs[r];
    bool fits = cost->bucket > 1 && (cost->micro_batch == 0 || cost->micro_batch % cost->bucket == 0);
    broken += fits && shares[r] % cost->bucket != 0 && shares[r] != p->caps[r];
  }
  return broken;
}

static void optimum_equals_brute_force(void **context) {
  (void)context;
  uint64_t state = 11;
  int whole = 0;
  for (int round = 0; round < 20000; round++) {
    problem p;
    int64_t shares[MOST_RANKS];
    int64_t sum = 0;
    double step = -1.0;
    double reached = 0.0;
    invent(&state, &p);
    assert_int_equal(even_balancer_solve_costs(p.costs, p.caps, p.ranks, p.batch, shares, &step), EVEN_OK);
    for (size_t r = 0; r < p.ranks; r++) {
      assert_true(shares[r] >= 0 && shares[r] <= most_of(&p, r));
      sum += shares[r];
      reached = fmax(reached, seconds_of(&p.costs[r], shares[r]));
    }
    double best = brute_force(&p, 0, p.batch, 0.0);
    assert_int_equal(sum, p.batch);
    assert_true(near(step, best) && (reached < best || near(reached, best)));
    assert_true(broken_buckets(&p, shares) <= 1);
    whole += broken_buckets(&p, shares) == 0;
  }
  assert_true(whole > 15000);
}

static void cost_is_what_it_means_and_never_falls(void **context) {
  (void)context;
  uint64_t state = 12;
  for (int round = 0; round < 5000; round++) {
    problem p;
    invent(&state, &p);
    for (int i = 0; i < MOST_POINTS; i++) { /* seconds that do not add up without rounding */
      p.seconds[0][i] *= 0.1 + even_pseudo_random_unit(&state) * 1e-9;
      p.seconds[0][i] = i > 0 ? fmax(p.seconds[0][i], p.seconds[0][i - 1]) : p.seconds[0][i];
    }
    double before = 0.0;
    for (int64_t samples = 0; samples < 100; samples++) {
      double seconds = even_rank_cost_at(&p.costs[0], samples);
      assert_true(seconds >= before);
      assert_true(near(seconds, seconds_of(&p.costs[0], samples)));
      before = seconds;
    }
  }
}

static int64_t eighth[2] = {8, 16};
static double fast_at_eight[2] = {1.0, 2.0};

static even_rank_cost in_eights(void) {
  return (even_rank_cost){.table = {eighth, fast_at_eight, 2}, .bucket = 8};
}

static void whole_buckets_are_shared_out(void **context) {
  (void)context;
  even_rank_cost costs[3] = {in_eights(), in_eights(), in_eights()};
  int64_t shares[3];
  double step = 0.0;
  assert_int_equal(even_balancer_solve_costs(costs, NULL, 3, 40, shares, &step), EVEN_OK);
  const int64_t wanted[3] = {16, 16, 8};
  assert_memory_equal(shares, wanted, sizeof wanted);
  assert_true(near(step, 2.0));
  assert_int_equal(even_balancer_solve_costs(costs, NULL, 3, 43, shares, &step), EVEN_OK);
  const int64_t more[3] = {16, 16, 11}; /* the last three in a bucket that is paid for either way */
  assert_memory_equal(shares, more, sizeof more);
}

static void a_rank_that_costs_more_than_it_helps_is_left_out(void **context) {
  (void)context;
  const int64_t one = 1;
  const double second = 1.0;
  even_rank_cost costs[2] = {{.table = {&one, &second, 1}},
                             {.table = {&one, &second, 1}, .constant_seconds = 9.5, .leaves_out = true}};
  int64_t shares[2];
  double step = 0.0;
  assert_int_equal(even_balancer_solve_costs(costs, NULL, 2, 10, shares, &step), EVEN_OK);
  assert_int_equal(shares[1], 0); /* ten seconds alone; with one sample the other would take 10.5 */
  assert_true(near(step, 10.0));
  costs[1].constant_seconds = 7.5;
  assert_int_equal(even_balancer_solve_costs(costs, NULL, 2, 10, shares, &step), EVEN_OK);
  assert_int_equal(shares[1], 1); /* 9 and 8.5 */
  costs[1].leaves_out = false; /* its dummy batch and its constant part are waited for: 12 seconds whatever it gets */
  costs[1].constant_seconds = 12.0;
  assert_int_equal(even_balancer_solve_costs(costs, NULL, 2, 10, shares, &step), EVEN_OK);
  assert_true(near(step, 12.0));
}

/* The least time for `samples` in micro-batches of any sizes up to `most`. */
static double any_cut(const even_time_table *table, int64_t samples, int64_t most) {
  double best[MOST_BATCH + 1] = {0.0};
  for (int64_t n = 1; n <= samples; n++) {
    best[n] = INFINITY;
    for (int64_t last = 1; last <= n && last <= most; last++) {
      best[n] = fmin(best[n], best[n - last] + even_time_table_at(table, last));
    }
  }
  return best[samples];
}

static void best_micro_batch_is_the_cheapest_a_sample(void **context) {
  (void)context;
  uint64_t state = 13;
  for (int round = 0; round < 5000; round++) {
    problem p;
    invent(&state, &p);
    const even_time_table *table = &p.costs[0].table;
    int64_t most = even_pseudo_random_between(&state, 1, MOST_BATCH);
    int64_t best = even_time_table_best_micro_batch(table, most);
    assert_true(best >= 1 && best <= most);
    double least = even_time_table_at(table, best) / (double)best;
    for (int64_t samples = 1; samples <= most; samples++) {
      assert_true(even_time_table_at(table, samples) / (double)samples >= least - 1e-12);
    }
    /* a fixed time and one a sample: nothing is faster than few, large ones */
    const int64_t at[2] = {0, 1};
    const double line[2] = {some_seconds(&state), 4.0};
    const even_rank_cost cut = {.table = {at, line, 2},
                                .micro_batch = even_time_table_best_micro_batch(&(even_time_table){at, line, 2}, most)};
    int64_t share = even_pseudo_random_between(&state, 1, MOST_BATCH);
    assert_true(near(even_rank_cost_at(&cut, share), any_cut(&cut.table, share, most)));
  }
}

/* What the solver's time is made of: it stays far below a millisecond where it looks at each rank's table so seldom. */
enum { LOOKS_A_RANK = 30 };

static long looks;
double __real_even_time_table_at(const even_time_table *table, int64_t samples);
double __wrap_even_time_table_at(const even_time_table *table, int64_t samples);

double __wrap_even_time_table_at(const even_time_table *table, int64_t samples) {
  looks++;
  return __real_even_time_table_at(table, samples);
}

/* Many equal ranks finish their buckets at the same moments: the search must not halve its way to each. */
static void many_equal_ranks_with_buckets(void **context) {
  (void)context;
  static even_rank_cost costs[MANY];
  static int64_t shares[MANY];
  double step = 0.0;
  int64_t sum = 0;
  int whole = 0;
  for (size_t r = 0; r < MANY; r++) {
    costs[r] = in_eights();
  }
  looks = 0;
  assert_int_equal(even_balancer_solve_costs(costs, NULL, MANY, 20 * (int64_t)MANY + 3, shares, &step), EVEN_OK);
  assert_in_range(looks, MANY, LOOKS_A_RANK * MANY);
  for (size_t r = 0; r < MANY; r++) {
    sum += shares[r];
    whole += shares[r] % 8 == 0;
  }
  assert_int_equal(sum, 20 * MANY + 3);
  assert_true(near(step, 3.0));
  assert_int_equal(whole, MANY - 1);
}

/* Ranks with all that they can have, as bench/balancer_bench.c has them. */
static void invent_many(uint64_t *state, even_rank_cost *costs, int64_t *caps) {
  enum { POINTS = 6 };
  static const int64_t tiles[] = {0, 8, 12, 16, 48, 64};
  static int64_t at[MANY][POINTS];
  static double seconds[MANY][POINTS];
  for (size_t r = 0; r < MANY; r++) {
    double slow = 0.008 * (double)(1 << even_pseudo_random_between(state, 0, 3));
    double now = 0.0;
    for (int i = 0; i < POINTS; i++) {
      at[r][i] = 8 * (int64_t)i;
      seconds[r][i] = now;
      now += slow * (r % 2 == 1 ? 0.5 + even_pseudo_random_unit(state) : (i % 2 == 1 ? 0.0 : 1.0));
    }
    bool pieces = even_pseudo_random_between(state, 0, 1) == 0;
    costs[r] = (even_rank_cost){.table = {at[r], seconds[r], POINTS},
                                .constant_seconds = 0.01 * even_pseudo_random_unit(state),
                                .micro_batch = pieces ? even_pseudo_random_between(state, 4, 31) : 0,
                                .bucket = tiles[even_pseudo_random_between(state, 0, 5)],
                                .leaves_out = even_pseudo_random_between(state, 0, 1) == 0};
    caps[r] = r > 0 && even_pseudo_random_between(state, 0, 4) > 0 ? even_pseudo_random_between(state, 16, 39) : -1;
  }
}

static void a_split_of_many_ranks_takes_few_looks_at_their_tables(void **context) {
  (void)context;
  static even_rank_cost costs[MANY];
  static int64_t caps[MANY], shares[MANY];
  uint64_t state = 14;
  for (int round = 0; round < 50; round++) {
    invent_many(&state, costs, caps);
    looks = 0;
    assert_int_equal(even_balancer_solve_costs(costs, caps, MANY, 32 * (int64_t)MANY, shares, NULL), EVEN_OK);
    assert_in_range(looks, MANY, LOOKS_A_RANK * MANY);
  }
}

static void refused(const even_rank_cost *cost, const char *part) {
  int64_t shares[1];
  even_error_clear();
  assert_int_equal(even_balancer_solve_costs(cost, NULL, 1, 4, shares, NULL), EVEN_ERR_ARGUMENT);
  assert_non_null(strstr(even_error_last()->what, part));
}

static void wrong_costs_are_refused_by_name(void **context) {
  (void)context;
  const double wrong[] = {-1.0, NAN, INFINITY};
  for (size_t i = 0; i < 3; i++) {
    even_rank_cost cost = in_eights();
    cost.constant_seconds = wrong[i];
    refused(&cost, "constant part of a step of rank 0");
  }
  even_rank_cost cost = in_eights();
  cost.micro_batch = -1;
  refused(&cost, "micro-batches of rank 0 have -1 samples");
  cost = in_eights();
  cost.bucket = EVEN_MOST_BUCKET + 1;
  refused(&cost, "buckets of rank 0");
  cost.bucket = -8;
  refused(&cost, "-8 samples");
  cost = in_eights();
  cost.table.points = 0;
  refused(&cost, "no points");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(optimum_equals_brute_force),
      cmocka_unit_test(cost_is_what_it_means_and_never_falls),
      cmocka_unit_test(whole_buckets_are_shared_out),
      cmocka_unit_test(a_rank_that_costs_more_than_it_helps_is_left_out),
      cmocka_unit_test(best_micro_batch_is_the_cheapest_a_sample),
      cmocka_unit_test(many_equal_ranks_with_buckets),
      cmocka_unit_test(a_split_of_many_ranks_takes_few_looks_at_their_tables),
      cmocka_unit_test(wrong_costs_are_refused_by_name),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
