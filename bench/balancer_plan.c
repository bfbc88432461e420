/* What balancing reaches of the best split, on invented ranks whose speeds are known: seconds of a twin that is told
 * them, has the best split of each step, and draws the same noise, beside ours. No clock: the same figures on every
 * machine. */
#include "balancer/cluster.h"
#include "balancer/pseudo_random.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  AHEAD = 2,
  SEEDS = 5,
  STEPS = 1200,
  FIRST = 10,
  SETTLED = 400,
  SAMPLES_A_RANK = 32,
  MOST_SPEEDS = 5,
  CURVES = 8
};

/* How a rank's time grows with its share, where that is no straight line. */
typedef enum curve { STRAIGHT, SATURATING, CONVEX, TILES_8, TILES_32, MIXED } curve;

typedef struct scenario {
  const char *name;
  size_t ranks;
  double speeds[MOST_SPEEDS]; /* of a core, the first four repeated; with a period they are quotas */
  double period;              /* seconds; 0: a rank is slow, not stopped */
  double step;                /* seconds of a step at the best split */
  double noise;               /* evenly, to either side */
  double lognormal;
  double outliers;
  double slower; /* the last rank's factor from step 600 to 900 */
  double drift;  /* the last rank's time grows by this part of its first a step */
  double change; /* seconds that a change of its share costs a rank, in steps */
  curve curve;   /* of all ranks; each seed bends them elsewhere */
} scenario;

static const scenario scenarios[] = {
    {.name = "2 ranks, 1:1", .ranks = 2, .speeds = {1, 1}, .lognormal = 0.10},
    {.name = "2 ranks, 1:0.5", .ranks = 2, .speeds = {1, .5}, .lognormal = 0.10},
    {.name = "2 ranks, 1:0.25", .ranks = 2, .speeds = {1, .25}, .lognormal = 0.10},
    {.name = "2 ranks, 1:0.0625", .ranks = 2, .speeds = {1, .0625}, .lognormal = 0.10},
    {.name = "2 ranks, 1:0.25, quota of 10 ms", .ranks = 2, .speeds = {1, .25}, .lognormal = 0.10, .period = 0.01},
    {.name = "2 ranks, 1:0.25, quota of 100 ms", .ranks = 2, .speeds = {1, .25}, .lognormal = 0.10, .period = 0.1},
    {.name = "4 ranks, 1:0.5:0.25:0.1", .ranks = 4, .speeds = {1, .5, .25, .1}, .lognormal = 0.10},
    {.name = "the same, quotas of 10 ms", .ranks = 4, .speeds = {1, .5, .25, .1}, .lognormal = 0.10, .period = 0.01},
    {.name = "the same, quotas of 100 ms", .ranks = 4, .speeds = {1, .5, .25, .1}, .lognormal = 0.10, .period = 0.1},
    {.name = "64 ranks, speeds 1, 1/2, 1/3, 1/4", .ranks = 64, .speeds = {1, .5, 1. / 3, .25}, .lognormal = 0.05},
    {.name = "the same, 3 % of steps have a rank that stalls for 5",
     .ranks = 64,
     .speeds = {1, .5, 1. / 3, .25},
     .lognormal = 0.05,
     .outliers = 0.0005},
    {.name = "2 ranks, 1:0.5, noise of 20 % to either side", .ranks = 2, .speeds = {1, .5}, .noise = 0.20},
    {.name = "16 ranks, 1 to 1/4, noise of 20 %", .ranks = 16, .speeds = {1, .5, 1. / 3, .25}, .noise = 0.20},
    {.name = "4 ranks, one 4 times slower, then as before",
     .ranks = 4,
     .speeds = {1, .5, 1. / 3, .25},
     .lognormal = 0.05,
     .slower = 4},
    {.name = "4 ranks, one slower by 0.2 % each step",
     .ranks = 4,
     .speeds = {1, 1, 1, 1},
     .lognormal = 0.05,
     .drift = 0.002},
    {.name = "4 ranks, a change of shares costs 8 steps",
     .ranks = 4,
     .speeds = {1, .5, 1. / 3, .25},
     .noise = 0.20,
     .change = 8},
};

static int64_t batch_of(const scenario *s) {
  return (s->curve == TILES_32 ? 4 : 1) * SAMPLES_A_RANK * (int64_t)s->ranks;
}

static double speed_of(const scenario *s, size_t rank) {
  return s->speeds[s->ranks <= MOST_SPEEDS ? rank : rank % 4];
}

/* `share`: the rank's of the best split, were all lines straight. */
static void bend(even_cluster_rank *rank, curve kind, double share, double part) {
  rank->tile = kind == TILES_8 ? 8 : kind == TILES_32 ? 32 : 0;
  rank->flat = kind == SATURATING ? (int64_t)(share * (0.4 + 1.1 * part)) : 0;
  rank->bend = kind == CONVEX ? 1 + (int64_t)(share * (0.3 + 0.9 * part)) : 0;
  rank->steeper = 2.0;
}

static even_cluster make(const scenario *s, uint64_t seed) {
  even_cluster c = {.ranks = s->ranks, .first_step = 3.0, .state = seed * 7919};
  double batch = (double)batch_of(s);
  uint64_t bends = seed * 104729;
  double sum = 0.0;
  for (size_t r = 0; r < s->ranks; r++) {
    sum += speed_of(s, r);
  }
  double step = s->step > 0.0 ? s->step : 0.05;
  double work = step * sum / (batch + 3.0 * (double)s->ranks); /* a fixed part of three samples */
  for (size_t r = 0; r < s->ranks; r++) {
    double speed = speed_of(s, r);
    double slow = s->period > 0.0 ? 1.0 : 1.0 / speed;
    c.rank[r] = (even_cluster_rank){.fixed = 3.0 * work * slow,
                                    .per_sample = work * slow,
                                    .noise = s->noise,
                                    .lognormal = s->lognormal,
                                    .outliers = s->outliers};
    if (s->period > 0.0 && speed < 1.0) {
      c.rank[r].quota = speed;
      c.rank[r].period = s->period;
      c.rank[r].left = speed * s->period;
    }
    if (s->curve != STRAIGHT) {
      curve kind = s->curve == MIXED ? (curve)(SATURATING + (int)((seed + r) % 4)) : s->curve;
      bend(&c.rank[r], kind, batch * speed / sum, even_pseudo_random_unit(&bends));
      c.rank[r].slower = 0.8 + 0.4 * even_pseudo_random_unit(&bends);
    }
  }
  c.change = s->change * step;
  return c;
}

static void set_speed(const scenario *s, even_cluster *c, int step) {
  even_cluster_rank *last = &c->rank[c->ranks - 1];
  if (s->curve != STRAIGHT) {
    return;
  }
  last->slower = s->slower > 0.0 && step >= 600 && step < 900 ? s->slower : 1.0;
  last->slower += s->drift * step;
}

typedef struct outcome {
  double ours[2]; /* seconds from step FIRST on, and from SETTLED on */
  double best[2];
  int changes; /* of shares, from SETTLED on */
} outcome;

static void fail(void) {
  (void)fprintf(stderr, "balancer_plan: %s\n", even_error_last()->what);
  exit(1);
}

static void run(const scenario *s, even_policy policy, uint64_t seed, outcome *out) {
  even_cluster own = make(s, seed);
  even_cluster twin = own;
  int64_t batch = batch_of(s);
  int64_t queue[AHEAD + 1][EVEN_CLUSTER_RANKS]; /* shares reach the ranks two steps late */
  int64_t best[EVEN_CLUSTER_RANKS];
  even_step_timing timings[EVEN_CLUSTER_RANKS];
  even_step_timing ignored[EVEN_CLUSTER_RANKS];
  even_balancer *balancer = NULL;
  even_balancer_params params = {.size = sizeof params, .policy = policy, .ranks = s->ranks, .batch = batch};
  even_status status = even_balancer_open(&params, &balancer);
  twin.change = 0.0; /* the best of all splits of each step, had changes no cost */
  for (int i = 0; i <= AHEAD && status == EVEN_OK; i++) {
    status = even_balancer_shares(balancer, batch, queue[i]);
  }
  for (int step = 0; step < STEPS && status == EVEN_OK; step++) {
    set_speed(s, &own, step);
    set_speed(s, &twin, step);
    if (even_cluster_best(&twin, batch, best) != EVEN_OK) {
      fail();
    }
    double theirs = even_cluster_step(&twin, best, ignored);
    double mine = even_cluster_step(&own, queue[0], timings);
    out->changes += step >= SETTLED && memcmp(queue[0], queue[1], s->ranks * sizeof queue[0][0]) != 0;
    memmove(queue[0], queue[1], AHEAD * sizeof queue[0]);
    for (int i = 0; i < 2; i++) {
      out->ours[i] += step >= (i == 0 ? FIRST : SETTLED) ? mine : 0.0;
      out->best[i] += step >= (i == 0 ? FIRST : SETTLED) ? theirs : 0.0;
    }
    status = even_balancer_observe(balancer, timings);
    status = status == EVEN_OK ? even_balancer_shares(balancer, batch, queue[AHEAD]) : status;
  }
  if (status != EVEN_OK) {
    fail();
  }
  even_balancer_close(balancer);
}

static void print_straight(void) {
  (void)printf("best split at the true speeds of each step / ours, %d seeds of %d steps\n\n", SEEDS, STEPS);
  (void)printf("%-50s %10s %10s %10s\n", "", "equal", "auto", "auto");
  (void)printf("%-50s %10s %10s %10s\n", "ranks (log-normal noise of 5 or 10 % where not said)", "", "from 10 on",
               "from 400");
  for (size_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++) {
    outcome equal = {0};
    outcome balanced = {0};
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
      run(&scenarios[i], EVEN_POLICY_EQUAL, seed, &equal);
      run(&scenarios[i], EVEN_POLICY_AUTO, seed, &balanced);
    }
    (void)printf("%-50s %10.3f %10.3f %10.3f\n", scenarios[i].name, equal.best[1] / equal.ours[1],
                 balanced.best[0] / balanced.ours[0], balanced.best[1] / balanced.ours[1]);
  }
}

typedef struct kind {
  const char *name;
  curve curve;
} kind;

static const kind kinds[] = {{"flat, then straight", SATURATING},
                             {"twice as steep from a size on", CONVEX},
                             {"tiles of 8", TILES_8},
                             {"tiles of 32", TILES_32},
                             {"a mix of these", MIXED}};
static const scenario sets[] = {
    {.name = "1:1", .ranks = 2, .speeds = {1, 1}},
    {.name = "1:0.5", .ranks = 2, .speeds = {1, .5}},
    {.name = "1:0.25", .ranks = 2, .speeds = {1, .25}},
    {.name = "1:0.0625", .ranks = 2, .speeds = {1, .0625}},
    {.name = "1:0.5:0.25", .ranks = 3, .speeds = {1, .5, .25}},
    {.name = "1:0.5:0.25:0.1", .ranks = 4, .speeds = {1, .5, .25, .1}},
    {.name = "1:1:0.5:0.25:0.1", .ranks = 5, .speeds = {1, 1, .5, .25, .1}},
};

static void print_curved(const kind *of, const scenario *set, double noise) {
  scenario s = *set;
  outcome equal = {0};
  outcome balanced = {0};
  double worst = 1e9;
  s.lognormal = noise;
  s.curve = of->curve;
  for (uint64_t seed = 1; seed <= CURVES; seed++) {
    outcome one = {0};
    run(&s, EVEN_POLICY_EQUAL, seed, &equal);
    run(&s, EVEN_POLICY_AUTO, seed, &one);
    for (int i = 0; i < 2; i++) {
      balanced.ours[i] += one.ours[i];
      balanced.best[i] += one.best[i];
    }
    balanced.changes += one.changes;
    worst = fmin(worst, one.best[1] / one.ours[1]);
  }
  (void)printf("%-30s %-18s %3.0f %% %8.3f %10.3f %10.3f %10.3f %8.2f\n", of->name, set->name, 100.0 * noise,
               equal.best[1] / equal.ours[1], balanced.best[0] / balanced.ours[0], balanced.best[1] / balanced.ours[1],
               worst, 100.0 * balanced.changes / (CURVES * (STEPS - SETTLED)));
}

static void print_all_curved(void) {
  static const double noise[] = {0.01, 0.05};
  (void)printf("\ncurved times, %d curves of each kind\n\n", CURVES);
  (void)printf("%-30s %-18s %5s %8s %10s %10s %10s %8s\n", "", "", "", "equal", "auto", "auto", "worst", "changes");
  (void)printf("%-30s %-18s %5s %8s %10s %10s %10s %8s\n", "seconds of a share", "speeds", "noise", "", "from 10 on",
               "from 400", "from 400", "in 100");
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
    for (size_t j = 0; j < sizeof sets / sizeof sets[0]; j++) {
      for (size_t k = 0; k < 2; k++) {
        print_curved(&kinds[i], &sets[j], noise[k]);
      }
    }
  }
}

int main(void) {
  print_straight();
  print_all_curved();
  return 0;
}
