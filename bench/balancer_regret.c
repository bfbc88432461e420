/* What balancing loses against the best fixed split, on invented ranks: 1.000 is what the best of all fixed splits
 * reaches with the same noise. No clock: the same figures on every machine. */
#include "balancer/cluster.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { AHEAD = 2, SEEDS = 5, STEPS = 1200, SETTLED = 400, MOST_ROUNDS = 400, MOST_RANKS = 8 };

/* Meetings of all ranks within each step. */
typedef struct within {
  int meetings;
  double each;   /* seconds of a core from one to the next that are no samples', … */
  double uneven; /* … whose own are fewer from one to the next */
  double meets;  /* of a core that each of them takes each rank */
  double dummy;  /* part of a sample's time that a rank without samples takes; 0: all of it */
} within;

typedef struct scenario {
  const char *name;
  size_t ranks;
  double speeds[MOST_RANKS]; /* of a core; with a period they are quotas */
  double period;             /* seconds; 0: a rank is slow, not stopped */
  double step;               /* seconds of a step at the best split */
  double lognormal;          /* of all ranks, … */
  double outliers;
  int change_at; /* the last rank becomes `slower` times slower … */
  double slower;
  double scatters[MOST_RANKS]; /* … or of each */
  double wander;               /* of all ranks' speeds, each for itself */
  within within;
} scenario;

static const scenario scenarios[] = {
    {"1:1", 2, {1, 1}, 0, 0.05, 0.10, 0, 0, 1, {0}, 0, {0}},
    {"1:0.25", 2, {1, .25}, 0, 0.05, 0.10, 0, 0, 1, {0}, 0, {0}},
    {"1:0.25, 2 % of steps take 5 times as long", 2, {1, .25}, 0, 0.05, 0.10, 0.02, 0, 1, {0}, 0, {0}},
    {"1:0.5:0.25:0.1", 4, {1, .5, .25, .1}, 0, 0.05, 0.10, 0, 0, 1, {0}, 0, {0}},
    {"1:0.5:0.25:0.1, 2 % of steps take 5 times as long", 4, {1, .5, .25, .1}, 0, 0.05, 0.10, 0.02, 0, 1, {0}, 0, {0}},
    {"1:0.5, from step 700 on 1:0.125 (from 10 steps after)", 2, {1, .5}, 0, 0.05, 0.10, 0.0, 700, 4, {0}, 0, {0}},
    {"1:0.25, noise of 2 and 10 %", 2, {1, .25}, 0, 0.05, 0, 0.0, 0, 1, {.02, .10}, 0, {0}},
    {"1:0.25, noise of 10 and 2 %", 2, {1, .25}, 0, 0.05, 0, 0.0, 0, 1, {.10, .02}, 0, {0}},
    {"1:0.5:0.25:0.1, noise of 15, 3, 3, 3 %", 4, {1, .5, .25, .1}, 0, .05, 0, 0, 0, 1, {.15, .03, .03, .03}, 0, {0}},
    {"1:1:1:1, noise of 20, 3, 3, 3 %", 4, {1, 1, 1, 1}, 0, 0.05, 0, 0.0, 0, 1, {.20, .03, .03, .03}, 0, {0}},
    {"quotas 1:0.25 of 10 ms, steps of 11 ms", 2, {1, .25}, 0.01, 0.011, 0.10, 0, 0, 1, {0}, 0, {0}},
    {"quotas 1:0.25 of 10 ms, steps of 50 ms", 2, {1, .25}, 0.01, 0.05, 0.10, 0, 0, 1, {0}, 0, {0}},
    {"quotas 1:0.25 of 10 ms, steps of 220 ms", 2, {1, .25}, 0.01, 0.22, 0.10, 0, 0, 1, {0}, 0, {0}},
    {"the same, speeds wander by 3 %", 2, {1, .25}, 0.01, 0.22, 0.10, 0.0, 0, 1, {0}, .03, {0}},
    {"quotas 1:0.25 of 100 ms, steps of 11 ms", 2, {1, .25}, 0.1, 0.011, 0.10, 0, 0, 1, {0}, 0, {0}},
    {"quotas 1:0.25 of 100 ms, steps of 50 ms", 2, {1, .25}, 0.1, 0.05, 0.10, 0, 0, 1, {0}, 0, {0}},
    {"quotas 1:0.25 of 100 ms, steps of 100 ms", 2, {1, .25}, 0.1, 0.1, 0.10, 0, 0, 1, {0}, 0, {0}},
    {"quotas 1:0.25 of 100 ms, steps of 220 ms", 2, {1, .25}, 0.1, 0.22, 0.10, 0, 0, 1, {0}, 0, {0}},
    {"quotas 0.5:0.25 of 100 ms, steps of 50 ms", 2, {.5, .25}, 0.1, 0.05, 0.10, 0, 0, 1, {0}, 0, {0}},
    {"quotas 1:0.5:0.25:0.1 of 10 ms, steps of 50 ms", 4, {1, .5, .25, .1}, 0.01, 0.05, 0.10, 0, 0, 1, {0}, 0, {0}},
    {"quotas 1:0.5:0.25:0.1 of 100 ms, steps of 11 ms", 4, {1, .5, .25, .1}, 0.1, 0.011, 0.10, 0, 0, 1, {0}, 0, {0}},
    {"quotas 1:0.5:0.25:0.1 of 100 ms, steps of 50 ms", 4, {1, .5, .25, .1}, 0.1, 0.05, 0.10, 0, 0, 1, {0}, 0, {0}},
    {"1:1, 34 meetings", 2, {1, 1}, 0, .2, .05, 0, 0, 1, {0}, 0, {34, .0004, 3, .0006, 0}},
    {"1:.5, 34 meetings", 2, {1, .5}, 0, .2, .05, 0, 0, 1, {0}, 0, {34, .0004, 3, .0006, 0}},
    {"1:.25, 34 meetings", 2, {1, .25}, 0, .2, .05, 0, 0, 1, {0}, 0, {34, .0004, 3, .0006, 0}},
    {"1:.25, 34 meetings, none: half the time", 2, {1, .25}, 0, .1, .05, 0, 0, 1, {0}, 0, {34, .0006, 3, .0006, .5}},
    {"1:.25, 6 meetings", 2, {1, .25}, 0, .06, .05, 0, 0, 1, {0}, 0, {6, .0008, 3, .0008, 0}},
    {"1:.5:.25:.1, 34 meetings", 4, {1, .5, .25, .1}, 0, .2, .05, 0, 0, 1, {0}, 0, {34, .0004, 3, .0006, 0}},
    {"1:.5:.2, 34 meetings", 3, {1, .5, .2}, 0, .2, .05, 0, 0, 1, {0}, 0, {34, .0004, 3, .0006, 0}},
    {"quotas 1:.25 of 10 ms, 34 meetings", 2, {1, .25}, .01, .2, .05, 0, 0, 1, {0}, 0, {34, .0002, 3, .0006, 0}},
    {"quotas 1:.25 of 10 ms, 34 dear meetings", 2, {1, .25}, .01, .2, .05, 0, 0, 1, {0}, 0, {34, .0004, 3, .0008, 0}},
    {"quotas 1:.25 of 10 ms, 6 meetings", 2, {1, .25}, .01, .06, .05, 0, 0, 1, {0}, 0, {6, .0008, 3, .0008, 0}},
    {"quotas 1:.25 of 100 ms, 34 meetings", 2, {1, .25}, .1, .2, .05, 0, 0, 1, {0}, 0, {34, .0002, 3, .0006, 0}},
    {"quotas 1:.25 of 100 ms, 34 dear meetings", 2, {1, .25}, .1, .2, .05, 0, 0, 1, {0}, 0, {34, .0004, 3, .0008, 0}},
    {"quotas 1:.25 of 100 ms, 6 meetings", 2, {1, .25}, .1, .06, .05, 0, 0, 1, {0}, 0, {6, .0008, 3, .0008, 0}},
    {"quotas 1:.5:.25:.1, 10 ms, 34 meetings",
     4,
     {1, .5, .25, .1},
     .01,
     .2,
     .05,
     0,
     0,
     1,
     {0},
     0,
     {34, 2e-4, 3, 4e-4, 0}},
    {"quotas 1:.5:.25:.1, 100 ms, 34 meetings",
     4,
     {1, .5, .25, .1},
     .1,
     .2,
     .05,
     0,
     0,
     1,
     {0},
     0,
     {34, 2e-4, 3, 4e-4, 0}},
};

static void fail(void) {
  (void)fprintf(stderr, "balancer_regret: %s\n", even_error_last()->what);
  exit(1);
}

static even_cluster make(const scenario *s, int64_t batch, uint64_t seed) {
  even_cluster c = {.ranks = s->ranks, .first_step = 3.0, .state = seed * 7919};
  c.meetings = s->within.meetings;
  c.uneven = s->within.uneven;
  c.dummy = s->within.dummy;
  c.parts = s->within.meetings > 0 ? 0.1 : 0.0;
  double sum = 0.0;
  for (size_t r = 0; r < s->ranks; r++) {
    sum += s->speeds[r];
  }
  double work = s->step * sum / ((double)batch + 3.0 * (double)s->ranks); /* a fixed part of three samples */
  for (size_t r = 0; r < s->ranks; r++) {
    double slow = s->period > 0.0 ? 1.0 : 1.0 / s->speeds[r];
    double fixed = s->within.meetings > 0 ? s->within.each * (s->within.meetings + 1) : 3.0 * work;
    c.rank[r] = (even_cluster_rank){.fixed = fixed * slow,
                                    .per_sample = work * slow,
                                    .lognormal = s->lognormal > 0.0 ? s->lognormal : s->scatters[r],
                                    .outliers = s->outliers,
                                    .meets = s->within.meets * slow,
                                    .wander = s->wander};
    if (s->period > 0.0 && s->speeds[r] < 1.0) {
      c.rank[r].quota = s->speeds[r];
      c.rank[r].period = s->period;
      c.rank[r].left = s->speeds[r] * s->period;
    }
  }
  return c;
}

static void set_speed(const scenario *s, even_cluster *c, int step) {
  c->rank[c->ranks - 1].slower = s->change_at > 0 && step >= s->change_at ? s->slower : 1.0;
}

static double fixed_split(const scenario *s, int64_t batch, const int64_t *shares, int from) {
  even_step_timing timings[EVEN_CLUSTER_RANKS];
  double seconds = 0.0;
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    even_cluster c = make(s, batch, seed);
    for (int step = 0; step < STEPS; step++) {
      set_speed(s, &c, step);
      double one = even_cluster_step(&c, shares, timings);
      seconds += step >= from ? one : 0.0;
    }
  }
  return seconds;
}

/* Tries `many` samples of rank `a` on rank `b`; whether that is better, else the split stays. */
static bool move(const scenario *s, int64_t batch, int64_t *shares, size_t a, size_t b, int64_t many, int from,
                 double *least) {
  if (a == b || shares[a] < many || (shares[a] == many && !(s->within.dummy > 0.0))) {
    return false;
  }
  shares[a] -= many;
  shares[b] += many;
  double seconds = fixed_split(s, batch, shares, from);
  if (seconds < *least * 0.9999) {
    *least = seconds;
    return true;
  }
  shares[a] += many;
  shares[b] -= many;
  return false;
}

/* The best fixed split: from the one at the true speeds, moving samples between any two ranks while that helps. */
static double best_fixed(const scenario *s, int64_t batch, int from, int64_t *best) {
  even_cluster c = make(s, batch, 1);
  set_speed(s, &c, from);
  if (even_cluster_best(&c, batch, best) != EVEN_OK) {
    fail();
  }
  double least = fixed_split(s, batch, best, from);
  bool better = true;
  for (int round = 0; better && round < MOST_ROUNDS; round++) {
    better = false;
    for (size_t a = 0; a < s->ranks; a++) {
      for (size_t b = 0; b < s->ranks; b++) {
        for (int64_t many = 1; many <= 4; many *= 2) {
          better = move(s, batch, best, a, b, many, from, &least) || better;
        }
      }
    }
  }
  return least;
}

/* told: what ranks wait for others within steps is. */
static double balanced(const scenario *s, int64_t batch, uint64_t seed, int from, bool told, int64_t *last) {
  even_cluster c = make(s, batch, seed);
  even_step_timing timings[EVEN_CLUSTER_RANKS];
  int64_t queue[AHEAD + 1][EVEN_CLUSTER_RANKS]; /* shares reach the ranks two steps late */
  even_balancer *balancer = NULL;
  even_balancer_params params = {
      .size = sizeof params, .policy = EVEN_POLICY_HYBRID, .ranks = s->ranks, .batch = batch};
  even_status status = even_balancer_open(&params, &balancer);
  for (int i = 0; i <= AHEAD && status == EVEN_OK; i++) {
    status = even_balancer_shares(balancer, batch, queue[i]);
  }
  double seconds = 0.0;
  for (int step = 0; step < STEPS && status == EVEN_OK; step++) {
    set_speed(s, &c, step);
    memcpy(last, queue[0], s->ranks * sizeof *last);
    memmove(queue[0], queue[1], AHEAD * sizeof queue[0]);
    double one = even_cluster_step(&c, last, timings);
    seconds += step >= from ? one : 0.0;
    status = even_balancer_observe_waits(balancer, timings, NULL, NULL, told ? c.pass : NULL);
    status = status == EVEN_OK ? even_balancer_shares(balancer, batch, queue[AHEAD]) : status;
  }
  if (status != EVEN_OK) {
    fail();
  }
  even_balancer_close(balancer);
  return seconds;
}

static void print_shares(const char *title, size_t ranks, const int64_t *shares) {
  (void)printf("  %s", title);
  for (size_t r = 0; r < ranks; r++) {
    (void)printf("%c%" PRId64, r == 0 ? ' ' : ':', shares[r]);
  }
}

int main(void) {
  (void)printf("%-58s %s\n", "ranks (noise of 10 % where not said, of 5 % with meetings)",
               "of the best fixed split, from step 400 on");
  for (size_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++) {
    const scenario *s = &scenarios[i];
    int64_t batch = 32 * (int64_t)s->ranks;
    int from = s->change_at > 0 ? s->change_at + 10 : SETTLED;
    int64_t best[EVEN_CLUSTER_RANKS];
    int64_t last[EVEN_CLUSTER_RANKS];
    double seconds = 0.0;
    double untold = 0.0;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
      untold += s->within.meetings > 0 ? balanced(s, batch, seed, from, false, last) : 0.0;
      seconds += balanced(s, batch, seed, from, s->within.meetings > 0, last);
    }
    double least = best_fixed(s, batch, from, best);
    (void)printf("%-58s %.3f", s->name, least / seconds);
    if (s->within.meetings > 0) {
      (void)printf(" (waits untold %.3f)", least / untold);
    }
    print_shares("best", s->ranks, best);
    print_shares("at the end", s->ranks, last);
    (void)printf("\n");
  }
  return 0;
}
