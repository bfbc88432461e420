/* What balancing costs ranks that are as fast as one another, or nearly: beside equal shares and the best fixed split,
 * with noise as real ranks have it, for as many steps as `evenstep bench balance` gives them, and for long; and how
 * soon they leave equal shares for a reason. No clock: the same figures on every machine. */
#include "balancer/cluster.h"
#include "balancer/pseudo_random.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  AHEAD = 2, /* steps that shares come late by */
  SEEDS = 20,
  STEPS = 1200,
  FIRST = 10,
  BENCH = 250,   /* steps that a mode of the bench has in four rounds, … */
  TURN = 15,     /* … so many at once; then others run, and caches and memory are theirs */
  SETTLED = 400, /* a long run */
  SAMPLES = 32,  /* a rank */
  MOST_RANKS = 4,
  CHANGE_AT = 300,
  WATCHED = 200,
  FOLLOWED = 8 /* steps in a row near the best split */
};

static const double seconds_of_step = 0.05;
static const double slow_phase = 1.08;

typedef struct noise {
  const char *name;
  double own;     /* of each step of each rank (log-normal), */
  double machine; /* of all ranks alike, which comes and goes within some fifty steps, */
  double wander;  /* the same of each rank by itself, */
  double turns;   /* and another level of each rank in each turn */
  double visits;  /* chance of a turn in which one rank is slower by 8 % */
  double stalls;  /* chance of a stall of 10 to 100 ms of one rank */
  double phases;  /* chance that one rank is slower by 8 % for the next 5 to 15 steps, as where its core is shared */
} noise;

static const noise noises[] = {
    {"2 %", .02, 0, 0, 0, 0, 0, 0},
    {"10 %", .10, 0, 0, 0, 0, 0, 0},
    {"5 %, the machine's speed drifts by 10 %", .05, .10, 0, 0, 0, 0, 0},
    {"5 %, stalls of 10 to 100 ms in 2 % of steps", .05, 0, 0, 0, 0, .02, 0},
    {"2 %, phases of 5 to 15 steps 8 % slower", .02, 0, 0, 0, 0, 0, .02},
    {"2 %, each turn's level by 2 %", .02, 0, 0, .02, 0, 0, 0},
    {"2 %, a rank 8 % slower in one turn of three", .02, 0, 0, 0, .33, 0, 0},
    {"5 %, each rank drifts by 2 %", .05, 0, .02, 0, 0, 0, 0},
    {"all of these", .03, .10, .01, .01, .1, .01, .01},
};

typedef struct ranks {
  const char *name;
  size_t count;
  double speeds[MOST_RANKS];
} ranks;

static const ranks sets[] = {
    {"1:1", 2, {1, 1}},     {"1:0.97", 2, {1, .97}}, {"1:0.94", 2, {1, .94}},
    {"1:0.90", 2, {1, .9}}, {"1:0.80", 2, {1, .8}},  {"1:1:1:1", 4, {1, 1, 1, 1}},
};

typedef struct machine {
  even_cluster c;
  const noise *noise;
  uint64_t state;
  double drift; /* logarithm of the machine's factor */
  double level[MOST_RANKS];
  int slow_left;
  size_t slow_rank;
  double fixed[MOST_RANKS];
  double slower; /* of the last rank, by which it changes */
} machine;

static double unit(machine *m) {
  return even_pseudo_random_unit(&m->state);
}

/* Box and Muller (1958). */
static double normal(machine *m) {
  double radius = sqrt(-2.0 * log(1.0 - unit(m)));
  return radius * cos(6.283185307179586 * unit(m));
}

static machine make(const ranks *of, const noise *kind, uint64_t seed) {
  machine m = {.c = {.ranks = of->count, .first_step = 3.0, .state = seed * 7919},
               .noise = kind,
               .state = seed * 104729,
               .slower = 1.0};
  double work = seconds_of_step / ((double)SAMPLES + 3.0); /* a fixed part of three samples */
  for (size_t r = 0; r < of->count; r++) {
    m.fixed[r] = 3.0 * work / of->speeds[r];
    m.c.rank[r] = (even_cluster_rank){
        .per_sample = work / of->speeds[r], .lognormal = kind->own, .wander = kind->wander, .fixed = m.fixed[r]};
    m.level[r] = 1.0;
  }
  return m;
}

/* The same whatever the shares. */
static double step_of(machine *m, const int64_t *shares, even_step_timing *timings) {
  const noise *n = m->noise;
  double kept = 1.0 - 1.0 / 50.0;
  m->drift = kept * m->drift + n->machine * sqrt(1.0 - kept * kept) * normal(m);
  if (m->c.steps % TURN == 0) {
    bool visited = unit(m) < n->visits;
    size_t whose = (size_t)(unit(m) * (double)m->c.ranks);
    for (size_t r = 0; r < m->c.ranks; r++) {
      m->level[r] = exp(n->turns * normal(m)) * (visited && whose == r ? slow_phase : 1.0);
    }
  }
  bool begins = unit(m) < n->phases;
  double length = unit(m);
  double where = unit(m);
  if (begins && m->slow_left == 0) {
    m->slow_left = 5 + (int)(length * 11.0);
    m->slow_rank = (size_t)(where * (double)m->c.ranks);
  }
  bool stalls = unit(m) < n->stalls;
  double stall = 0.01 + 0.09 * unit(m);
  size_t stalled = (size_t)(unit(m) * (double)m->c.ranks);
  for (size_t r = 0; r < m->c.ranks; r++) {
    double factor = exp(m->drift) * m->level[r] * (m->slow_left > 0 && m->slow_rank == r ? slow_phase : 1.0);
    factor *= r == m->c.ranks - 1 ? m->slower : 1.0;
    m->c.rank[r].slower = factor;
    m->c.rank[r].fixed = m->fixed[r] + (stalls && r == stalled ? stall / factor : 0.0);
  }
  m->slow_left -= m->slow_left > 0 ? 1 : 0;
  return even_cluster_step(&m->c, shares, timings);
}

typedef struct outcome {
  double seconds[2]; /* of the bench's steps, and of a long run's */
  int steps[2];
  int unequal[2];
  int changes[2];
} outcome;

static void count(outcome *out, int step, double seconds, bool unequal, bool changed) {
  for (int i = 0; i < 2; i++) {
    if (i == 0 ? step >= FIRST && step < BENCH : step >= SETTLED) {
      out->seconds[i] += seconds;
      out->steps[i]++;
      out->unequal[i] += unequal;
      out->changes[i] += changed;
    }
  }
}

static void fail(void) {
  (void)fprintf(stderr, "balancer_alike: %s\n", even_error_last()->what);
  exit(1);
}

typedef struct job {
  machine m;
  even_balancer *balancer;
  int64_t batch;
  int64_t queue[AHEAD + 1][MOST_RANKS];
} job;

static void open_job(job *j, const ranks *of, const noise *kind, uint64_t seed) {
  *j = (job){.m = make(of, kind, seed), .batch = SAMPLES * (int64_t)of->count};
  even_balancer_params params = {
      .size = sizeof params, .policy = EVEN_POLICY_AUTO, .ranks = of->count, .batch = j->batch};
  even_status status = even_balancer_open(&params, &j->balancer);
  for (int i = 0; i <= AHEAD && status == EVEN_OK; i++) {
    status = even_balancer_shares(j->balancer, j->batch, j->queue[i]);
  }
  if (status != EVEN_OK) {
    fail();
  }
}

static double next(job *j, int64_t *ran) {
  even_step_timing timings[MOST_RANKS];
  memcpy(ran, j->queue[0], sizeof j->queue[0]);
  memmove(j->queue[0], j->queue[1], AHEAD * sizeof j->queue[0]);
  double seconds = step_of(&j->m, ran, timings);
  if (even_balancer_observe(j->balancer, timings) != EVEN_OK ||
      even_balancer_shares(j->balancer, j->batch, j->queue[AHEAD]) != EVEN_OK) {
    fail();
  }
  return seconds;
}

static void balanced(const ranks *of, const noise *kind, uint64_t seed, outcome *out) {
  int64_t before[MOST_RANKS] = {0};
  int64_t ran[MOST_RANKS] = {0};
  job j;
  open_job(&j, of, kind, seed);
  for (int step = 0; step < STEPS; step++) {
    double seconds = next(&j, ran);
    bool unequal = false;
    for (size_t r = 0; r < of->count; r++) {
      unequal = unequal || ran[r] != SAMPLES;
    }
    count(out, step, seconds, unequal, step > 0 && memcmp(before, ran, of->count * sizeof *ran) != 0);
    memcpy(before, ran, sizeof before);
  }
  even_balancer_close(j.balancer);
}

static void fixed(const ranks *of, const noise *kind, uint64_t seed, const int64_t *shares, outcome *out) {
  even_step_timing ignored[MOST_RANKS];
  machine m = make(of, kind, seed);
  for (int step = 0; step < STEPS; step++) {
    count(out, step, step_of(&m, shares, ignored), false, false);
  }
}

/* Samples of the last rank that go to the others, in turn. */
static void shares_with(const ranks *of, int64_t fewer, int64_t *shares) {
  for (size_t r = 0; r < of->count; r++) {
    shares[r] = SAMPLES;
  }
  for (int64_t i = 0; i < fewer; i++) {
    shares[(size_t)i % (of->count - 1)]++;
    shares[of->count - 1]--;
  }
}

static void print_case(const ranks *of, const noise *kind) {
  outcome equal = {0};
  outcome ours = {0};
  double best[2] = {INFINITY, INFINITY};
  int64_t shares[MOST_RANKS];
  for (int64_t fewer = 0; fewer <= 8; fewer++) {
    outcome one = {0};
    shares_with(of, fewer, shares);
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
      fixed(of, kind, seed, shares, &one);
    }
    equal = fewer == 0 ? one : equal;
    for (int i = 0; i < 2; i++) {
      best[i] = fmin(best[i], one.seconds[i]);
    }
  }
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    balanced(of, kind, seed, &ours);
  }
  (void)printf("%-9s%-46s", of->name, kind->name);
  for (int i = 0; i < 2; i++) {
    (void)printf("%8.4f %7.4f %6.1f %5.2f", equal.seconds[i] / ours.seconds[i], best[i] / ours.seconds[i],
                 100.0 * ours.unequal[i] / ours.steps[i], 100.0 * ours.changes[i] / ours.steps[i]);
  }
  (void)printf("\n");
}

/* Steps from a change on until shares are within a sample of the best ones for some steps in a row; WATCHED: not. */
static int until_followed(const noise *kind, double slower, bool back, uint64_t seed) {
  int64_t ran[MOST_RANKS] = {0};
  int good = 0;
  int found = WATCHED;
  job j;
  open_job(&j, &sets[0], kind, seed);
  j.m.slower = back ? slower : 1.0;
  for (int step = 0; step < CHANGE_AT + WATCHED && found == WATCHED; step++) {
    j.m.slower = step == CHANGE_AT ? (back ? 1.0 : slower) : j.m.slower;
    (void)next(&j, ran);
    double now = j.m.slower;
    double ideal = ((double)j.batch - 3.0 * (now - 1.0)) / (1.0 + now); /* of the last rank; fixed parts of three */
    double took = fmax(3.0 + (double)ran[0], now * (3.0 + (double)ran[1]));
    double least = now * (3.0 + ideal);
    good = least / took >= 0.95 ? good + 1 : 0;
    found = step >= CHANGE_AT && good >= FOLLOWED && step - good + 1 >= CHANGE_AT ? step - good + 1 - CHANGE_AT : found;
    if (step < CHANGE_AT) {
      good = 0;
    }
  }
  even_balancer_close(j.balancer);
  return found;
}

static void print_followed(const noise *kind) {
  static const double slower[] = {1.15, 1.3, 2.0, 4.0};
  (void)printf("%-46s", kind->name);
  for (int back = 0; back < 2; back++) {
    for (size_t i = 0; i < sizeof slower / sizeof slower[0]; i++) {
      double sum = 0.0;
      int most = 0;
      for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        int one = until_followed(kind, slower[i], back == 1, seed);
        most = one > most ? one : most;
        sum += one;
      }
      (void)printf("%7.1f %4d", sum / (double)SEEDS, most);
    }
  }
  (void)printf("\n");
}

int main(void) {
  size_t kinds = sizeof noises / sizeof noises[0];
  (void)printf(
      "equal, best: seconds of equal shares and of the best fixed split / auto's; off: %% of steps with other than\n"
      "equal shares; moves: changes of shares in 100 steps. %d seeds; steps of %.0f ms\n\n",
      SEEDS, 1e3 * seconds_of_step);
  (void)printf("%-9s%-46s%29s%29s\n", "", "", "steps 10 to 250, as in the bench", "steps 400 to 1200");
  (void)printf("%-9s%-46s%8s %7s %6s %5s%8s %7s %6s %5s\n", "speeds", "noise of each rank", "equal", "best", "off",
               "moves", "equal", "best", "off", "moves");
  for (size_t i = 0; i < sizeof sets / sizeof sets[0]; i++) {
    for (size_t k = 0; k < kinds; k++) {
      print_case(&sets[i], &noises[k]);
    }
  }
  (void)printf(
      "\nsteps after one of two equal ranks becomes slower (and, to the right, as fast again) until the shares reach\n"
      "0.95 of the best split for %d steps: mean and most of %d seeds; shares come %d steps late\n\n",
      FOLLOWED, SEEDS, AHEAD);
  (void)printf("%-46s%12s%12s%12s%12s%12s%12s%12s%12s\n", "noise of each rank", "x 1.15", "x 1.3", "x 2", "x 4",
               "from x 1.15", "x 1.3", "x 2", "x 4");
  for (size_t k = 0; k < kinds; k++) {
    print_followed(&noises[k]);
  }
  return 0;
}
