/* What balancing costs: the exact split, and one step's learning, in microseconds, beside the bound: 50 us, or 0.2 % of
 * the step. */
#include <evenstep/balancer.h>
#include <inttypes.h>
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

/* Tables of six measured points, speeds from 1 to 1/16. */
static double solve(size_t ranks) {
  static int64_t samples[MOST_RANKS][POINTS];
  static double seconds[MOST_RANKS][POINTS];
  static even_time_table tables[MOST_RANKS];
  static int64_t shares[MOST_RANKS];
  double times[REPEATS];
  for (size_t i = 0; i < REPEATS; i++) {
    for (size_t r = 0; r < ranks; r++) {
      double slow = 1.0 + 15.0 * random_unit();
      double at = 0.01 * random_unit();
      for (size_t p = 0; p < POINTS; p++) {
        samples[r][p] = (int64_t)(8 * p);
        seconds[r][p] = at;
        at += slow * 0.008 * (0.5 + random_unit());
      }
      tables[r] = (even_time_table){samples[r], seconds[r], POINTS};
    }
    uint64_t start = even_clock_ns();
    if (even_balancer_solve(tables, NULL, ranks, 32 * (int64_t)ranks, shares, NULL) != EVEN_OK) {
      fail();
    }
    times[i] = (double)(even_clock_ns() - start) * 1e-3;
  }
  return median(times);
}

/* Observing a noisy step and asking for the next shares, after the models' windows are full: the mean, because most
 * steps only take note and some learn. */
static double step(size_t ranks) {
  enum { WARM_UP = 200, STEPS = 2000 };
  static even_step_timing timings[MOST_RANKS];
  static int64_t shares[MOST_RANKS];
  uint64_t spent = 0;
  even_balancer *balancer = NULL;
  even_balancer_params params = {
      .size = sizeof params, .policy = EVEN_POLICY_HYBRID, .ranks = ranks, .batch = 32 * (int64_t)ranks};
  if (even_balancer_open(&params, &balancer) != EVEN_OK ||
      even_balancer_shares(balancer, params.batch, shares) != EVEN_OK) {
    fail();
  }
  for (int i = 0; i < WARM_UP + STEPS; i++) {
    for (size_t r = 0; r < ranks; r++) {
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

int main(void) {
  static const size_t ranks[] = {2, 4, 16, 64, 256, 1024};
  (void)printf("%6s %18s %18s  %s\n", "ranks", "exact split, us", "step (mean), us", "50 us or 0.2 % holds for");
  for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
    double split_us = solve(ranks[i]);
    double step_us = step(ranks[i]);
    (void)printf("%6zu %18.1f %18.1f  ", ranks[i], split_us, step_us);
    if (step_us <= bound_us) {
      (void)printf("any step\n");
    } else {
      (void)printf("steps of %.0f ms and more\n", step_us * 1e-3 / bound_part);
    }
  }
  return 0;
}
