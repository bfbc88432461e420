/* The solver: against brute force, and what must hold on tables too large for it. */
#include <evenstep/balancer.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "balancer/pseudo_random.h"

enum { MOST_POINTS = 6, MOST_RANKS = 5, MANY_RANKS = 64 };

typedef struct problem {
  even_time_table tables[MANY_RANKS];
  int64_t samples[MANY_RANKS][MOST_POINTS];
  double seconds[MANY_RANKS][MOST_POINTS];
  int64_t caps[MANY_RANKS];
  size_t ranks;
  int64_t batch;
} problem;

/* Tables with plateaus, jumps, several scales, with and without a point at 0. */
static void invent(uint64_t *state, problem *p, size_t most_ranks, int64_t most_batch) {
  p->ranks = (size_t)even_pseudo_random_between(state, 1, (int64_t)most_ranks);
  p->batch = even_pseudo_random_between(state, 1, most_batch);
  int64_t room = 0;
  for (size_t r = 0; r < p->ranks; r++) {
    size_t points = (size_t)even_pseudo_random_between(state, 1, MOST_POINTS);
    int64_t samples = even_pseudo_random_between(state, 0, 3);
    double seconds = even_pseudo_random_between(state, 0, 3) == 0 ? 0.0 : even_pseudo_random_unit(state);
    double scale = even_pseudo_random_between(state, 0, 4) == 0 ? 16.0 : 1.0;
    for (size_t i = 0; i < points; i++) {
      p->samples[r][i] = samples;
      p->seconds[r][i] = seconds * scale;
      samples += even_pseudo_random_between(state, 1, 4);
      int64_t kind = even_pseudo_random_between(state, 0, 3);
      seconds += kind == 0 ? 0.0 : (kind == 1 ? 0.5 : even_pseudo_random_unit(state));
    }
    p->tables[r] = (even_time_table){p->samples[r], p->seconds[r], points};
    p->caps[r] = even_pseudo_random_between(state, 0, 2) == 0 ? even_pseudo_random_between(state, 0, p->batch) : -1;
    room += p->caps[r] < 0 ? p->batch : p->caps[r];
  }
  if (room < p->batch) {
    p->caps[0] = -1;
  }
}

static int64_t most_of(const problem *p, size_t rank) {
  return p->caps[rank] < 0 ? p->batch : p->caps[rank];
}

static double brute_force(const problem *p, size_t rank, int64_t left, double so_far) {
  if (rank + 1 == p->ranks) {
    return left > most_of(p, rank) ? INFINITY : fmax(so_far, even_time_table_at(&p->tables[rank], left));
  }
  double best = INFINITY;
  for (int64_t share = 0; share <= left && share <= most_of(p, rank); share++) {
    double here = fmax(so_far, even_time_table_at(&p->tables[rank], share));
    best = here < best ? fmin(best, brute_force(p, rank + 1, left - share, here)) : best;
  }
  return best;
}

static double check_shares(const problem *p, const int64_t *shares) {
  int64_t sum = 0;
  double step = 0.0;
  for (size_t r = 0; r < p->ranks; r++) {
    assert_true(shares[r] >= 0 && shares[r] <= most_of(p, r));
    sum += shares[r];
    step = fmax(step, even_time_table_at(&p->tables[r], shares[r]));
  }
  assert_int_equal(sum, p->batch);
  return step;
}

static void optimum_equals_brute_force(void **context) {
  (void)context;
  uint64_t state = 1;
  for (int round = 0; round < 20000; round++) {
    problem p;
    int64_t shares[MANY_RANKS];
    double step = -1.0;
    invent(&state, &p, MOST_RANKS, round % 4 == 0 ? 24 : 12);
    assert_int_equal(even_balancer_solve(p.tables, p.caps, p.ranks, p.batch, shares, &step), EVEN_OK);
    double best = brute_force(&p, 0, p.batch, 0.0);
    assert_true(step >= best && step <= best);
    double reached = check_shares(&p, shares);
    assert_true(reached <= best);
  }
}

/* No time below the answer has room for the batch: the optimum, without trying all splits. */
static void nothing_faster_exists_on_large_problems(void **context) {
  (void)context;
  uint64_t state = 2;
  for (int round = 0; round < 1500; round++) {
    problem p;
    int64_t shares[MANY_RANKS];
    double step = 0.0;
    invent(&state, &p, MANY_RANKS, round % 3 == 0 ? 1000000000000 : 5000);
    assert_int_equal(even_balancer_solve(p.tables, p.caps, p.ranks, p.batch, shares, &step), EVEN_OK);
    assert_true(check_shares(&p, shares) <= step);
    bool idle_sets_it = false;
    double room = 0.0;
    for (size_t r = 0; r < p.ranks; r++) {
      idle_sets_it = idle_sets_it || even_time_table_at(&p.tables[r], 0) >= step;
      int64_t low = 0, high = most_of(&p, r);
      while (low < high) { /* most samples strictly faster than the answer */
        int64_t middle = low + (high - low + 1) / 2;
        if (even_time_table_at(&p.tables[r], middle) < step) {
          low = middle;
        } else {
          high = middle - 1;
        }
      }
      room += (double)low;
    }
    assert_true(idle_sets_it || room < (double)p.batch);
  }
}

static void equal_tables_give_equal_shares(void **context) {
  (void)context;
  int64_t samples = 1;
  double seconds = 0.25;
  even_time_table tables[4] = {
      {&samples, &seconds, 1}, {&samples, &seconds, 1}, {&samples, &seconds, 1}, {&samples, &seconds, 1}};
  int64_t shares[4];
  assert_int_equal(even_balancer_solve(tables, NULL, 4, 10, shares, NULL), EVEN_OK);
  const int64_t wanted[4] = {3, 3, 2, 2};
  assert_memory_equal(shares, wanted, sizeof wanted);
  assert_int_equal(even_balancer_solve(tables, NULL, 4, 2, shares, NULL), EVEN_OK);
  const int64_t few[4] = {1, 1, 0, 0};
  assert_memory_equal(shares, few, sizeof few);
}

static void slack_is_spread_in_proportion(void **context) {
  (void)context;
  /* rank 0 needs 8 seconds whatever it does; in that time rank 1 could do 16 and rank 2 could do 32 */
  const int64_t at[2] = {0, 100};
  const double idle[2] = {8.0, 8.0};
  const double half[2] = {0.0, 50.0};
  const double quarter[2] = {0.0, 25.0};
  even_time_table tables[3] = {{at, idle, 2}, {at, half, 2}, {at, quarter, 2}};
  const int64_t caps[3] = {0, -1, -1};
  int64_t shares[3];
  double step = 0.0;
  assert_int_equal(even_balancer_solve(tables, caps, 3, 12, shares, &step), EVEN_OK);
  assert_true(step >= 8.0 && step <= 8.0);
  const int64_t wanted[3] = {0, 4, 8};
  assert_memory_equal(shares, wanted, sizeof wanted);
}

static void plateaus_over_millions_end(void **context) {
  (void)context;
  const int64_t at[3] = {0, 1, 1000000000};
  const double flat[3] = {0.0, 1.0, 1.0};
  const double steep[3] = {0.0, 1.0, 1.0 + 1e-12};
  even_time_table tables[2] = {{at, flat, 3}, {at, steep, 3}};
  int64_t shares[2];
  double step = 0.0;
  assert_int_equal(even_balancer_solve(tables, NULL, 2, 1500000000, shares, &step), EVEN_OK);
  assert_int_equal(shares[0] + shares[1], 1500000000);
  assert_true(step <= 1.0 + 1e-12);
}

static void refused(const even_time_table *tables, const int64_t *caps, size_t ranks, int64_t batch, const char *part) {
  int64_t shares[4];
  even_error_clear();
  assert_int_equal(even_balancer_solve(tables, caps, ranks, batch, shares, NULL), EVEN_ERR_ARGUMENT);
  assert_non_null(strstr(even_error_last()->what, part));
}

static void wrong_input_is_refused_by_name(void **context) {
  (void)context;
  const int64_t at[2] = {1, 2};
  const int64_t twice[2] = {2, 2};
  const int64_t below[2] = {-1, 2};
  const double good[2] = {1.0, 2.0};
  const double falling[2] = {2.0, 1.0};
  const double nan_[2] = {1.0, NAN};
  const double infinite[2] = {1.0, INFINITY};
  const double negative[2] = {-1.0, 1.0};
  even_time_table tables[2] = {{at, good, 2}, {at, good, 2}};
  const int64_t caps[2] = {3, 4};
  refused(tables, caps, 2, 10, "3 fewer than the batch of 10");
  assert_non_null(strstr(even_error_last()->fix, "at most 7"));
  refused(tables, NULL, 2, 0, "0 samples");
  refused(tables, NULL, 0, 1, "no ranks");
  tables[1].samples = twice;
  refused(tables, NULL, 2, 4, "rank 1");
  tables[1].samples = below;
  refused(tables, NULL, 2, 4, "-1 samples");
  tables[1].samples = at;
  tables[1].seconds = falling;
  refused(tables, NULL, 2, 4, "fall at point 1");
  tables[1].seconds = nan_;
  refused(tables, NULL, 2, 4, "rank 1");
  tables[1].seconds = infinite;
  refused(tables, NULL, 2, 4, "rank 1");
  tables[1].seconds = negative;
  refused(tables, NULL, 2, 4, "rank 1");
  tables[1] = (even_time_table){at, good, 0};
  refused(tables, NULL, 2, 4, "no points");
}

static void table_is_read_as_documented(void **context) {
  (void)context;
  const int64_t at[3] = {2, 4, 8};
  const double seconds[3] = {1.0, 2.0, 8.0};
  even_time_table table = {at, seconds, 3};
  assert_float_equal(even_time_table_at(&table, 0), 0.0, 0.0);
  assert_float_equal(even_time_table_at(&table, 1), 0.5, 1e-15);
  assert_float_equal(even_time_table_at(&table, 2), 1.0, 0.0);
  assert_float_equal(even_time_table_at(&table, 3), 1.5, 1e-15);
  assert_float_equal(even_time_table_at(&table, 6), 5.0, 1e-15);
  assert_float_equal(even_time_table_at(&table, 10), 11.0, 1e-15);
  table.points = 1;
  assert_float_equal(even_time_table_at(&table, 10), 5.0, 1e-15);
  const int64_t zero = 0;
  even_time_table constant = {&zero, seconds, 1};
  assert_float_equal(even_time_table_at(&constant, 10), 1.0, 0.0);
}

static void policies_have_names(void **context) {
  (void)context;
  even_policy policy = EVEN_POLICY_EQUAL;
  assert_int_equal(even_policy_parse("hybrid", &policy), EVEN_OK);
  assert_int_equal(policy, EVEN_POLICY_HYBRID);
  assert_string_equal(even_policy_name(EVEN_POLICY_PROPORTIONAL), "proportional");
  assert_int_equal(even_policy_parse("hybird", &policy), EVEN_ERR_ARGUMENT);
  assert_non_null(strstr(even_error_last()->fix, "hybrid"));
  assert_int_equal(even_policy_parse("", &policy), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_policy_parse(NULL, &policy), EVEN_ERR_ARGUMENT);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(optimum_equals_brute_force),     cmocka_unit_test(nothing_faster_exists_on_large_problems),
      cmocka_unit_test(equal_tables_give_equal_shares), cmocka_unit_test(slack_is_spread_in_proportion),
      cmocka_unit_test(plateaus_over_millions_end),     cmocka_unit_test(wrong_input_is_refused_by_name),
      cmocka_unit_test(table_is_read_as_documented),    cmocka_unit_test(policies_have_names),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
