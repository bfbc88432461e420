/* The part of `evenstep bench balance` that runs on invented ranks (src/balancer/cluster.h): more of them than this
 * host has, and speeds that change as told. The balancer is the real one; no clock: the same figures on every machine.
 */
#include "balancer/cluster.h"
#include "balancer/pseudo_random.h"
#include "base/fail.h"
#include "base/json_writer.h"
#include "cli/bench_balance.h"

#include <math.h>
#include <string.h>

enum {
  AHEAD = 2, /* shares reach the ranks two steps late, as they do when loading is ahead */
  MOST_RANKS = 5,
  SAMPLES_A_RANK = 32,
  CHANGE_AT = 600,
  CHANGE_BACK_AT = 900,
  WATCHED = 100, /* steps after a change within which the split may come back */
  HELD = 3       /* steps for which it must stay good to be back */
};

static const double back_at = 0.9; /* of the new optimum */

typedef enum course { STEADY, DRIFTING, BURSTY, SLOWING } course;

static const char *const course_names[] = {"steady", "drifting", "bursty", "slowing"};

typedef struct scenario {
  const char *name;
  size_t ranks;
  double speeds[MOST_RANKS];
  course course; /* of the last rank's speed */
  double noise;  /* evenly to either side; 0: log-normal of 5 % */
} scenario;

static const scenario scenarios[] = {
    {"1:1", 2, {1, 1}, STEADY, 0},
    {"2:1", 2, {2, 1}, STEADY, 0},
    {"4:1", 2, {4, 1}, STEADY, 0},
    {"16:1", 2, {16, 1}, STEADY, 0},
    {"4:2:1", 3, {4, 2, 1}, STEADY, 0},
    {"RTX 3060, 3050, GTX 1650, 1650", 4, {12.7, 9.1, 3, 3}, STEADY, 0},
    {"16:8:4:2:1", 5, {16, 8, 4, 2, 1}, STEADY, 0},
    {"2:1, the second drifts to 8:1", 2, {2, 1}, DRIFTING, 0},
    {"RTX 3060, 3050, GTX 1650, 1650, the last drifts to a quarter", 4, {12.7, 9.1, 3, 3}, DRIFTING, 0},
    {"2:1, the second bursty (6:1 for 10 to 40 steps)", 2, {2, 1}, BURSTY, 0},
    {"4:2:2:1:1, the last bursty", 5, {4, 2, 2, 1, 1}, BURSTY, 0},
    {"1:1, the second 4 times slower for a while", 2, {1, 1}, SLOWING, 0},
    {"4:2:1:1, the last 4 times slower for a while", 4, {4, 2, 1, 1}, SLOWING, 0},
    {"2:1, noise of 20 %", 2, {2, 1}, STEADY, 0.20},
    {"4:2:1:1, noise of 20 %", 4, {4, 2, 1, 1}, STEADY, 0.20},
};

enum { SCENARIOS = sizeof scenarios / sizeof scenarios[0] };

static int64_t batch_of(const scenario *s) {
  return SAMPLES_A_RANK * (int64_t)s->ranks;
}

/* A step of the best split takes about 50 ms, of which each rank's fixed part is that of three samples. */
static even_cluster make(const scenario *s, uint64_t seed) {
  even_cluster c = {.ranks = s->ranks, .first_step = 3.0, .state = seed * 7919};
  double sum = 0.0;
  for (size_t r = 0; r < s->ranks; r++) {
    sum += s->speeds[r];
  }
  double work = 0.05 * sum / ((double)batch_of(s) + 3.0 * (double)s->ranks);
  for (size_t r = 0; r < s->ranks; r++) {
    c.rank[r] = (even_cluster_rank){.fixed = 3.0 * work / s->speeds[r],
                                    .per_sample = work / s->speeds[r],
                                    .noise = s->noise,
                                    .lognormal = s->noise > 0.0 ? 0.0 : 0.05};
  }
  return c;
}

/* How many times slower than at first the last rank is, in each step. */
static void draw_course(const scenario *s, uint64_t seed, int steps, double *slower) {
  uint64_t state = seed * 104729;
  bool slow = false;
  int64_t until = 0;
  for (int step = 0; step < steps; step++) {
    if (s->course == BURSTY && step >= until) {
      until = step + even_pseudo_random_between(&state, 10, slow ? 80 : 40);
      slow = !slow && step > 0;
    }
    slower[step] = s->course == DRIFTING                                                ? 1.0 + 3.0 * step / steps
                   : s->course == SLOWING && step >= CHANGE_AT && step < CHANGE_BACK_AT ? 4.0
                   : s->course == BURSTY && slow                                        ? 3.0
                                                                                        : 1.0;
  }
}

/* Sums over steps and seeds. */
typedef struct sums {
  double seconds;
  double best_seconds; /* of the best split of each step, with the same noise */
  double busy[MOST_RANKS];
  double mean_busy;
  int64_t samples;
  int slow_steps[EVEN_BENCH_SEEDS]; /* until the split was back after the rank slowed; -1: never */
  int fast_steps[EVEN_BENCH_SEEDS]; /* and after it recovered */
} sums;

/* Seconds of a step with these shares, noise left out. */
static double quiet_seconds(const even_cluster *c, const int64_t *shares) {
  double longest = 0.0;
  for (size_t r = 0; r < c->ranks; r++) {
    const even_cluster_rank *rank = &c->rank[r];
    double samples = shares[r] > 0 ? (double)shares[r] : 1.0;
    double factor = rank->slower > 0.0 ? rank->slower : 1.0;
    longest = fmax(longest, (rank->fixed + rank->per_sample * samples) * factor);
  }
  return longest;
}

/* Looks when the split is at `back_at` of the optimum again, for HELD steps. */
typedef struct watch {
  int begun;
  int good;
  int found;
} watch;

static void look(watch *at, int step, double efficiency) {
  if (at->found >= 0 || step < at->begun || step >= at->begun + WATCHED) {
    return;
  }
  at->good = efficiency >= back_at ? at->good + 1 : 0;
  if (at->good == HELD) {
    at->found = step - at->begun - HELD + 1;
  }
}

static void add_step(sums *out, const scenario *s, const even_step_timing *timings, double seconds, double best) {
  double busy = 0.0;
  for (size_t r = 0; r < s->ranks; r++) {
    out->busy[r] += timings[r].busy_seconds;
    busy += timings[r].busy_seconds;
  }
  out->seconds += seconds;
  out->best_seconds += best;
  out->mean_busy += busy / (double)s->ranks;
  out->samples += batch_of(s);
}

/* One training of `steps` steps with a policy, or (balancer NULL) with fixed shares. */
static even_status train(const scenario *s, even_balancer *balancer, const int64_t *fixed, int seed, int steps,
                         sums *out) {
  double slower[EVEN_BENCH_STEPS];
  even_cluster own = make(s, (uint64_t)seed + 1);
  even_cluster twin = own;
  int64_t queue[AHEAD + 1][EVEN_CLUSTER_RANKS] = {{0}};
  int64_t best[EVEN_CLUSTER_RANKS];
  even_step_timing timings[EVEN_CLUSTER_RANKS];
  even_step_timing ignored[EVEN_CLUSTER_RANKS];
  watch slowed = {CHANGE_AT, 0, -1};
  watch recovered = {CHANGE_BACK_AT, 0, -1};
  draw_course(s, (uint64_t)seed + 1, steps, slower);
  for (int i = 0; i <= AHEAD; i++) {
    if (balancer != NULL) {
      EVEN_TRY(even_balancer_shares(balancer, batch_of(s), queue[i]));
    } else {
      memcpy(queue[i], fixed, s->ranks * sizeof *fixed);
    }
  }
  for (int step = 0; step < steps; step++) {
    own.rank[s->ranks - 1].slower = twin.rank[s->ranks - 1].slower = slower[step];
    EVEN_TRY(even_cluster_best(&twin, batch_of(s), best));
    double efficiency = quiet_seconds(&twin, best) / quiet_seconds(&own, queue[0]);
    look(&slowed, step, efficiency);
    look(&recovered, step, efficiency);
    double theirs = even_cluster_step(&twin, best, ignored);
    double mine = even_cluster_step(&own, queue[0], timings);
    if (step >= EVEN_BENCH_FIRST) {
      add_step(out, s, timings, mine, theirs);
    }
    if (balancer != NULL) {
      memmove(queue[0], queue[1], AHEAD * sizeof queue[0]);
      EVEN_TRY(even_balancer_observe(balancer, timings));
      EVEN_TRY(even_balancer_shares(balancer, batch_of(s), queue[AHEAD]));
    }
  }
  out->slow_steps[seed] = slowed.found;
  out->fast_steps[seed] = recovered.found;
  return EVEN_OK;
}

static even_status train_by(const scenario *s, even_policy policy, int seeds, int steps, sums *out) {
  memset(out, 0, sizeof *out);
  for (int seed = 0; seed < seeds; seed++) {
    even_balancer *balancer = NULL;
    even_balancer_params params = {
        .size = sizeof params, .policy = policy, .ranks = s->ranks, .batch = batch_of(s), .speeds = s->speeds};
    EVEN_TRY(even_balancer_open(&params, &balancer));
    even_status status = train(s, balancer, NULL, seed, steps, out);
    even_balancer_close(balancer);
    EVEN_TRY(status);
  }
  return EVEN_OK;
}

/* The fastest rank alone with the whole batch: where speeds change, the first is the fastest and stays it. */
static even_status train_single(const scenario *s, int seeds, int steps, sums *out) {
  const int64_t all[MOST_RANKS] = {batch_of(s)};
  memset(out, 0, sizeof *out);
  for (int seed = 0; seed < seeds; seed++) {
    sums spread = {0};
    even_cluster c = make(s, (uint64_t)seed + 1);
    even_step_timing timing;
    EVEN_TRY(train(s, NULL, all, seed, steps, &spread)); /* for the best split's time */
    out->best_seconds += spread.best_seconds;
    c.ranks = 1;
    for (int step = 0; step < steps; step++) {
      double seconds = even_cluster_step(&c, all, &timing);
      out->seconds += step >= EVEN_BENCH_FIRST ? seconds : 0.0;
      out->samples += step >= EVEN_BENCH_FIRST ? batch_of(s) : 0;
    }
  }
  out->busy[0] = out->seconds;
  out->mean_busy = out->seconds / (double)s->ranks;
  return EVEN_OK;
}

static even_status fixed_seconds(const scenario *s, const int64_t *shares, int seeds, int steps, double *out) {
  sums sum = {0};
  for (int seed = 0; seed < seeds; seed++) {
    EVEN_TRY(train(s, NULL, shares, seed, steps, &sum));
  }
  *out = sum.seconds;
  return EVEN_OK;
}

/* Seconds of the best fixed split: from that at the true speeds, samples move between any two ranks while it helps. */
static even_status best_fixed(const scenario *s, int seeds, int steps, double *least) {
  int64_t shares[EVEN_CLUSTER_RANKS] = {0};
  even_cluster c = make(s, 1);
  bool better = true;
  EVEN_TRY(even_cluster_best(&c, batch_of(s), shares));
  EVEN_TRY(fixed_seconds(s, shares, seeds, steps, least));
  while (better) {
    better = false;
    for (size_t move = 0; move < s->ranks * s->ranks; move++) {
      size_t from = move / s->ranks;
      size_t to = move % s->ranks;
      double seconds = 0.0;
      if (from == to || shares[from] < 1) {
        continue;
      }
      shares[from]--;
      shares[to]++;
      EVEN_TRY(fixed_seconds(s, shares, seeds, steps, &seconds));
      if (seconds < *least * 0.9999) {
        *least = seconds;
        better = true;
      } else {
        shares[from]++;
        shares[to]--;
      }
    }
  }
  return EVEN_OK;
}

static void add_row(even_json *json, const scenario *s, const char *policy, const sums *sum) {
  even_json_object(json, NULL);
  even_json_string(json, "case", s->name);
  even_json_string(json, "course", course_names[s->course]);
  even_json_integer(json, "ranks", (int64_t)s->ranks);
  even_json_string(json, "policy", policy);
  even_json_number(json, "samples_per_second", (double)sum->samples / sum->seconds);
  even_json_number(json, "bound_samples_per_second", (double)sum->samples / sum->best_seconds);
  even_json_number(json, "of_bound", sum->best_seconds / sum->seconds);
  even_json_array(json, "utilisation");
  for (size_t r = 0; r < s->ranks; r++) {
    even_json_number(json, NULL, sum->busy[r] / sum->seconds);
  }
  even_json_array_end(json);
  even_json_number(json, "imbalance", sum->seconds / sum->mean_busy - 1.0);
  even_json_object_end(json);
}

static void add_waits(even_json *json, const char *key, const int *steps, int seeds) {
  even_json_array(json, key);
  for (int seed = 0; seed < seeds; seed++) {
    if (steps[seed] < 0) {
      even_json_null(json, NULL);
    } else {
      even_json_integer(json, NULL, steps[seed]);
    }
  }
  even_json_array_end(json);
}

static void add_change(even_json *json, const scenario *s, const char *policy, const sums *sum, int seeds) {
  even_json_object(json, NULL);
  even_json_string(json, "case", s->name);
  even_json_string(json, "policy", policy);
  add_waits(json, "steps_after_slowing", sum->slow_steps, seeds);
  add_waits(json, "steps_after_recovery", sum->fast_steps, seeds);
  even_json_object_end(json);
}

static even_status add_noise(even_json *json, const scenario *s, const char *policy, const sums *sum, double least) {
  even_json_object(json, NULL);
  even_json_string(json, "case", s->name);
  even_json_string(json, "policy", policy);
  even_json_number(json, "lost", 1.0 - least / sum->seconds);
  even_json_object_end(json);
  return even_text_status(json->text);
}

/* A scenario's rows into three arrays that are written beside one another. */
static even_status run_scenario(const scenario *s, const even_bench_plan *plan, even_json *rows, even_json *changes,
                                even_json *noise) {
  double least = 0.0;
  sums sum;
  if (s->noise > 0.0) {
    EVEN_TRY(best_fixed(s, plan->seeds, plan->steps, &least));
  }
  for (size_t p = 0; p < plan->policy_count; p++) {
    const char *name = even_policy_name(plan->policies[p]);
    EVEN_TRY(train_by(s, plan->policies[p], plan->seeds, plan->steps, &sum));
    add_row(rows, s, name, &sum);
    if (s->course == SLOWING && plan->steps > CHANGE_BACK_AT + WATCHED) {
      add_change(changes, s, name, &sum, plan->seeds);
    }
    if (s->noise > 0.0) {
      EVEN_TRY(add_noise(noise, s, name, &sum, least));
    }
  }
  EVEN_TRY(train_single(s, plan->seeds, plan->steps, &sum));
  add_row(rows, s, "single", &sum);
  return even_text_status(rows->text);
}

even_status even_bench_simulate(const even_bench_plan *plan, even_text *out) {
  even_text texts[3] = {EVEN_TEXT_EMPTY, EVEN_TEXT_EMPTY, EVEN_TEXT_EMPTY};
  even_json arrays[3];
  static const char *const names[3] = {"rows", "changes", "noise"};
  even_status status = EVEN_OK;
  for (int i = 0; i < 3; i++) {
    arrays[i] = even_json_begin(&texts[i], 0);
    even_json_array(&arrays[i], NULL);
  }
  for (size_t i = 0; i < SCENARIOS && status == EVEN_OK; i++) {
    status = run_scenario(&scenarios[i], plan, &arrays[0], &arrays[1], &arrays[2]);
  }
  even_json json = even_json_begin(out, 0);
  even_json_object(&json, NULL);
  even_json_integer(&json, "seeds", plan->seeds);
  even_json_integer(&json, "steps", plan->steps);
  for (int i = 0; i < 3; i++) {
    even_json_array_end(&arrays[i]);
    even_json_raw(&json, names[i], even_text_string(&texts[i]));
    status = status == EVEN_OK ? even_text_status(&texts[i]) : status;
    even_text_free(&texts[i]);
  }
  even_json_object_end(&json);
  return status == EVEN_OK ? even_text_status(out) : status;
}
