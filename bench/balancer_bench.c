/* What balancing costs, in microseconds: the exact split, also of ranks that have more than a table (beside its bound:
 * 1 ms for 1024 ranks), and one step's learning, beside the bound: 50 us, or 0.2 % of the step. */
#include <evenstep/balancer.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "os/clock.h"

enum { REPEATS = 101, POINTS = 6, MOST_RANKS = 1024 };

static uint64_t state = 1;

static double random_unit(void) {
  state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (double)(state >> 11) * 0x1.0p-53;
}

static int by_value(const void *a, const void *b) {
  const double *x = a;
  const double *y = b;
  return (*x > *y) - (*x < *y);
}

static double median(double *values) {
  qsort(values, REPEATS, sizeof *values, by_value);
  return values[REPEATS / 2];
}

static void fail(void) {
  (void)fprintf(stderr, "balancer_bench: %s\n", even_error_last()->what);
  exit(1);
}

/* What ranks have beyond a table of measured times. */
typedef enum extra { PLAIN, CAPS, BUCKETS, TOGETHER, PLATEAUS, EXTRAS } extra;

static const char *const extra_names[EXTRAS] = {"plain", "caps", "buckets", "together", "plateaus"};

static int64_t samples[MOST_RANKS][POINTS];
static double seconds[MOST_RANKS][POINTS];
static even_rank_cost costs[MOST_RANKS];
static int64_t caps[MOST_RANKS];

/* Six measured points, speeds from 1 to 1/16. Plateaus: each second point is as long as the one before, and many ranks
 * have the same edges. */
static void invent_table(size_t rank, bool plateaus) {
  double slow = plateaus ? (double)(1 << (int)(4.0 * random_unit())) : 1.0 + 15.0 * random_unit();
  double at = plateaus ? 0.0 : 0.01 * random_unit();
  for (size_t p = 0; p < POINTS; p++) {
    samples[rank][p] = (int64_t)(8 * p);
    seconds[rank][p] = at;
    double more = slow * 0.008 * (plateaus ? 1.0 : 0.5 + random_unit());
    at += plateaus && p % 2 == 1 ? 0.0 : more;
  }
  costs[rank] = (even_rank_cost){.table = {samples[rank], seconds[rank], POINTS}};
}

/* Caps of most ranks a little below what they would get; tiles of several sizes; and all that a rank can have. */
static void invent(size_t rank, extra what) {
  static const int64_t tiles[] = {0, 8, 12, 16, 48, 64};
  invent_table(rank, what == PLATEAUS || (what == TOGETHER && rank % 2 == 0));
  caps[rank] = (what == CAPS || what == TOGETHER) && random_unit() < 0.8 ? 16 + (int64_t)(24.0 * random_unit()) : -1;
  if (what == BUCKETS || what == TOGETHER) {
    costs[rank].bucket = tiles[(size_t)(6.0 * random_unit())];
  }
  if (what == TOGETHER) {
    costs[rank].constant_seconds = 0.01 * random_unit();
    costs[rank].micro_batch = random_unit() < 0.5 ? 4 + (int64_t)(28.0 * random_unit()) : 0;
    costs[rank].leaves_out = random_unit() < 0.5;
  }
}

static double solve(size_t count, extra what) {
  static int64_t shares[MOST_RANKS];
  double times[REPEATS];
  for (size_t i = 0; i < REPEATS; i++) {
    for (size_t r = 0; r < count; r++) {
      invent(r, what);
    }
    caps[0] = -1; /* the others' may hold less than the batch */
    uint64_t start = even_clock_ns();
    if (even_balancer_solve_costs(costs, caps, count, 32 * (int64_t)count, shares, NULL) != EVEN_OK) {
      fail();
    }
    times[i] = (double)(even_clock_ns() - start) * 1e-3;
  }
  return median(times);
}

/* Observing a noisy step and asking for the next shares, after the models' windows are full: the mean, because most
 * steps only take note and some learn. */
static double step(size_t count) {
  enum { WARM_UP = 200, STEPS = 2000 };
  static even_step_timing timings[MOST_RANKS];
  static int64_t shares[MOST_RANKS];
  uint64_t spent = 0;
  even_balancer *balancer = NULL;
  even_balancer_params params = {
      .size = sizeof params, .policy = EVEN_POLICY_HYBRID, .ranks = count, .batch = 32 * (int64_t)count};
  if (even_balancer_open(&params, &balancer) != EVEN_OK ||
      even_balancer_shares(balancer, params.batch, shares) != EVEN_OK) {
    fail();
  }
  for (int i = 0; i < WARM_UP + STEPS; i++) {
    for (size_t r = 0; r < count; r++) {
      double slow = 1.0 + (double)(r % 4);
      timings[r].samples = shares[r];
      timings[r].busy_seconds = slow * (0.002 + 0.001 * (double)shares[r]) * (0.95 + 0.1 * random_unit());
    }
    uint64_t start = even_clock_ns();
    if (even_balancer_observe(balancer, timings) != EVEN_OK ||
        even_balancer_shares(balancer, params.batch, shares) != EVEN_OK) {
      fail();
    }
    spent += i >= WARM_UP ? even_clock_ns() - start : 0;
  }
  even_balancer_close(balancer);
  return (double)spent * 1e-3 / (double)STEPS;
}

static const double bound_us = 50.0;
static const double bound_part = 0.002;
static const double split_bound_us = 1000.0; /* of all numbers of ranks here */
static const size_t ranks[] = {2, 4, 16, 64, 256, 1024};

enum { COUNTS = sizeof ranks / sizeof ranks[0] };

static void splits(void) {
  (void)printf("%6s", "ranks");
  for (int what = 0; what < EXTRAS; what++) {
    (void)printf(" %11s", extra_names[what]);
  }
  (void)printf("  exact split, us: 1 ms holds\n");
  for (size_t i = 0; i < COUNTS; i++) {
    double longest = 0.0;
    (void)printf("%6zu", ranks[i]);
    for (int what = 0; what < EXTRAS; what++) {
      double took = solve(ranks[i], (extra)what);
      longest = took > longest ? took : longest;
      (void)printf(" %11.1f", took);
    }
    (void)printf("  %s\n", longest <= split_bound_us ? "yes" : "NO");
  }
}

int main(void) {
  splits();
  (void)printf("\n%6s %18s  %s\n", "ranks", "step (mean), us", "50 us or 0.2 % holds for");
  for (size_t i = 0; i < COUNTS; i++) {
    double step_us = step(ranks[i]);
    (void)printf("%6zu %18.1f  ", ranks[i], step_us);
    if (step_us <= bound_us) {
      (void)printf("any step\n");
    } else {
      (void)printf("steps of %.0f ms and more\n", step_us * 1e-3 / bound_part);
    }
  }
  return 0;
}
