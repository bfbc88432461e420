/* Shares that follow the measured steps: one time model a rank, the exact optimum of the models, and a change
 * only where it pays. */
#include "balancer/model.h"
#include "balancer/solve.h"
#include "base/alloc.h"
#include "base/fail.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

enum {
  POINTS = 3,       /* of a rank's table: the dummy batch, one sample, a straight line through the batch */
  LEAST_STEPS = 2,  /* a rank's first step is warm-up: nothing changes before its second */
  LEARN_EVERY = 16, /* steps between two looks at a model whose rank does what is expected */
  FRESH = 12,       /* steps for which a model is looked at each time */
  PROBE_EVERY = 64  /* steps between two trials of ranks that idle */
};

/* A change must promise this part of the step, and more while the models are uncertain. */
static const double least_gain = 0.01;
static const double most_gain = 0.10;
/* What looking after a rank without samples may cost of the run. */
static const double probe_cost = 0.002;

/* Prior speeds below this part of the fastest are raised to it, so that all times stay finite. */
static const double slowest = 1e-9;

struct even_balancer {
  even_policy policy;
  size_t ranks;
  int64_t batch;
  double *speeds;
  int64_t *caps;
  even_rank_model *models;
  int64_t *current; /* shares of a whole batch */
  int64_t *candidate;
  int64_t *reach; /* caps, and how far a rank's share may grow beyond what was measured */
  even_time_table *tables;
  int64_t *table_samples;
  double *table_seconds;
  even_solve_room room;
  int64_t steps;
  int64_t next_probe; /* the step from which a rank without samples and without timings may be tried again */
  int64_t probe_left; /* steps that the trial goes on */
  size_t probed;      /* the rank that is, or was last, tried */
};

static even_status check(const even_balancer_params *params) {
  if (params == NULL || params->size != sizeof *params) {
    return even_fail(EVEN_ERR_ARGUMENT, "balancer: the parameters were made for another version of the library");
  }
  if ((int)params->policy < EVEN_POLICY_EQUAL || (int)params->policy > EVEN_POLICY_HYBRID) {
    return even_fail(EVEN_ERR_ARGUMENT, "balancer: there is no policy number %d", (int)params->policy);
  }
  if (params->ranks == 0) {
    return even_fail(EVEN_ERR_ARGUMENT, "balancer: there are no ranks to balance");
  }
  if (params->batch < 1) {
    return even_fail(EVEN_ERR_ARGUMENT, "balancer: the batch has %" PRId64 " samples, at least 1 is needed",
                     params->batch);
  }
  for (size_t r = 0; params->speeds != NULL && r < params->ranks; r++) {
    if (!isfinite(params->speeds[r]) || params->speeds[r] <= 0.0) {
      (void)even_fail(EVEN_ERR_ARGUMENT, "balancer: the speed of rank %zu is %g", r, params->speeds[r]);
      return even_error_fix("give each rank a positive speed, or none at all");
    }
  }
  return EVEN_OK;
}

static even_status make(even_balancer *b, const even_balancer_params *params) {
  b->policy = params->policy;
  b->ranks = params->ranks;
  b->batch = params->batch;
  b->next_probe = PROBE_EVERY;
  EVEN_TRY(EVEN_NEW_ARRAY(&b->speeds, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->caps, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->models, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->current, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->candidate, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->reach, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->tables, b->ranks));
  EVEN_TRY(even_alloc(b->ranks, POINTS * sizeof *b->table_samples, (void **)&b->table_samples));
  EVEN_TRY(even_alloc(b->ranks, POINTS * sizeof *b->table_seconds, (void **)&b->table_seconds));
  EVEN_TRY(even_solve_room_open(b->ranks, &b->room));
  bool prior = params->speeds != NULL && (b->policy == EVEN_POLICY_PROPORTIONAL || b->policy == EVEN_POLICY_HYBRID);
  double fastest = 0.0;
  for (size_t r = 0; prior && r < b->ranks; r++) {
    fastest = params->speeds[r] > fastest ? params->speeds[r] : fastest;
  }
  for (size_t r = 0; r < b->ranks; r++) {
    double relative = prior ? params->speeds[r] / fastest : 1.0;
    b->speeds[r] = relative > slowest ? relative : slowest;
    b->caps[r] = params->caps != NULL ? params->caps[r] : -1;
    b->tables[r].samples = b->table_samples + r * POINTS;
    b->tables[r].seconds = b->table_seconds + r * POINTS;
  }
  return EVEN_OK;
}

/* Straight lines from (0, idle) over (1, one) on. */
static void set_table(even_balancer *b, size_t rank, double idle, double one, double per_sample) {
  int64_t *samples = b->table_samples + rank * POINTS;
  double *seconds = b->table_seconds + rank * POINTS;
  samples[0] = 0;
  samples[1] = 1;
  samples[2] = INT64_C(1) << 40; /* far out, so that the slope keeps its digits */
  seconds[0] = idle < one ? idle : one;
  seconds[1] = one;
  seconds[2] = one + per_sample * (double)(samples[2] - 1);
  b->tables[rank].points = POINTS;
}

/* Tables of the prior speeds. */
static void expect(even_balancer *b) {
  for (size_t r = 0; r < b->ranks; r++) {
    set_table(b, r, 0.0, 1.0 / b->speeds[r], 1.0 / b->speeds[r]);
  }
}

static bool measured(const even_balancer *b) {
  return b->policy == EVEN_POLICY_DYNAMIC || b->policy == EVEN_POLICY_HYBRID;
}

static bool learned(const even_balancer *b) {
  bool any = false;
  for (size_t r = 0; r < b->ranks; r++) {
    const even_rank_model *model = &b->models[r];
    if (model->known && model->count >= LEAST_STEPS) {
      any = true;
    } else if (b->current[r] > 0) {
      return false;
    }
  }
  return any;
}

/* Tables of what was measured; a rank that never had samples is judged by its prior speed beside the others. */
static void believe(even_balancer *b) {
  double one = 0.0;
  double fixed = 0.0;
  double known = 0.0;
  for (size_t r = 0; r < b->ranks; r++) {
    if (b->models[r].known) {
      one += b->models[r].seconds_per_sample * b->speeds[r];
      fixed += b->models[r].fixed_seconds * b->speeds[r];
      known += 1.0;
    }
  }
  for (size_t r = 0; r < b->ranks; r++) {
    const even_rank_model *model = &b->models[r];
    if (model->known) {
      set_table(b, r, even_model_at(model, 0), even_model_at(model, 1), model->seconds_per_sample);
    } else {
      double per_sample = one / known / b->speeds[r];
      set_table(b, r, 0.0, fixed / known / b->speeds[r] + per_sample, per_sample);
    }
  }
}

even_status even_balancer_open(const even_balancer_params *params, even_balancer **out) {
  even_balancer *b = NULL;
  *out = NULL;
  EVEN_TRY(check(params));
  EVEN_TRY(EVEN_NEW(&b));
  even_status status = make(b, params);
  if (status == EVEN_OK) {
    expect(b);
    status = even_solve(&b->room, b->tables, b->caps, b->batch, b->current, NULL);
  }
  if (status != EVEN_OK) {
    even_balancer_close(b);
    return status;
  }
  *out = b;
  return EVEN_OK;
}

void even_balancer_close(even_balancer *b) {
  if (b == NULL) {
    return;
  }
  even_solve_room_close(&b->room);
  even_free(b->speeds);
  even_free(b->caps);
  even_free(b->models);
  even_free(b->current);
  even_free(b->candidate);
  even_free(b->reach);
  even_free(b->tables);
  even_free(b->table_samples);
  even_free(b->table_seconds);
  even_free(b);
}

static double step_seconds(const even_balancer *b, const int64_t *shares) {
  double most = 0.0;
  for (size_t r = 0; r < b->ranks; r++) {
    double seconds = even_time_table_at(&b->tables[r], shares[r]);
    most = seconds > most ? seconds : most;
  }
  return most;
}

/* A straight line is trusted up to twice the largest share that was measured. */
static void set_reach(even_balancer *b, double factor) {
  for (size_t r = 0; r < b->ranks; r++) {
    const even_rank_model *model = &b->models[r];
    double most = model->known ? factor * model->most_samples + 1.0 : factor;
    int64_t reach = most < (double)b->batch ? (int64_t)most : b->batch;
    b->reach[r] = b->caps[r] >= 0 && b->caps[r] < reach ? b->caps[r] : reach;
  }
}

static bool holds(const even_balancer *b) {
  int64_t missing = b->batch;
  for (size_t r = 0; r < b->ranks && missing > 0; r++) {
    missing -= b->reach[r] < missing ? b->reach[r] : missing;
  }
  return missing == 0;
}

/* The gain below which a difference of shares may be noise: the error of the least known model, and more for many
 * ranks, of which one errs most (the largest of n errors grows like the root of log n; this line is near it). */
static double worthwhile(const even_balancer *b) {
  double error = 0.0;
  for (size_t r = 0; r < b->ranks; r++) {
    if (b->models[r].known && b->models[r].count > 0) {
      double own = b->models[r].noise / sqrt((double)b->models[r].count);
      error = own > error ? own : error;
    }
  }
  double many = 1.0;
  for (size_t ranks = b->ranks; ranks > 2; ranks = (ranks + 1) / 2) {
    many += 0.3;
  }
  double gain = error * many;
  return gain < least_gain ? least_gain : (gain < most_gain ? gain : most_gain);
}

static even_status decide(even_balancer *b) {
  double promised = 0.0;
  believe(b);
  double factor = 2.0;
  set_reach(b, factor);
  while (!holds(b)) {
    factor *= 2.0;
    set_reach(b, factor);
  }
  EVEN_TRY(even_solve(&b->room, b->tables, b->reach, b->batch, b->candidate, &promised));
  if (promised < step_seconds(b, b->current) * (1.0 - worthwhile(b))) {
    memcpy(b->current, b->candidate, b->ranks * sizeof *b->current);
  }
  return EVEN_OK;
}

/* A rank whose share is zero and that runs no dummy batch shows nothing: from time to time it gets one sample for as
 * many steps as it takes to be believed, seldom enough that a rank as slow as before costs next to nothing. */
static void probe(even_balancer *b) {
  if (b->probe_left > 0) {
    b->probe_left--;
    return;
  }
  if (b->steps < b->next_probe) {
    return;
  }
  double step = step_seconds(b, b->current);
  for (size_t i = 1; i <= b->ranks; i++) {
    size_t r = (b->probed + i) % b->ranks;
    if (b->current[r] > 0 || b->models[r].dummy || b->caps[r] == 0) {
      continue;
    }
    double loss = step > 0.0 ? even_time_table_at(&b->tables[r], 1) / step - 1.0 : 0.0;
    double wait = loss > 0.0 ? (double)LEAST_STEPS * loss / probe_cost : 0.0;
    b->probed = r;
    b->probe_left = LEAST_STEPS;
    b->next_probe = b->steps + PROBE_EVERY + (wait < 1e9 ? (int64_t)wait : INT64_C(1000000000));
    return;
  }
  b->next_probe = b->steps + PROBE_EVERY;
}

static void give_probe(const even_balancer *b, int64_t *shares) {
  size_t largest = 0;
  for (size_t r = 1; r < b->ranks; r++) {
    largest = shares[r] > shares[largest] ? r : largest;
  }
  if (shares[b->probed] == 0 && shares[largest] > 0) {
    shares[largest]--;
    shares[b->probed]++;
  }
}

static even_status check_timings(const even_balancer *b, const even_step_timing *timings) {
  for (size_t r = 0; r < b->ranks; r++) {
    if (!isfinite(timings[r].busy_seconds) || timings[r].busy_seconds < 0.0 || timings[r].samples < 0) {
      return even_fail(EVEN_ERR_ARGUMENT, "balancer: rank %zu reports %g seconds for %" PRId64 " samples", r,
                       timings[r].busy_seconds, timings[r].samples);
    }
  }
  return EVEN_OK;
}

even_status even_balancer_observe(even_balancer *b, const even_step_timing *timings) {
  EVEN_TRY(check_timings(b, timings));
  bool look = false;
  b->steps++;
  for (size_t r = 0; r < b->ranks; r++) {
    even_rank_model *model = &b->models[r];
    even_model_take(model, timings[r].samples, timings[r].busy_seconds);
    /* the ranks take turns, so that a step costs the same as any other */
    bool turn = (b->steps + (int64_t)r) % LEARN_EVERY == 0;
    if (turn || model->count < FRESH || even_model_surprised(model)) {
      even_model_learn(model);
      look = true;
    }
  }
  if (!measured(b) || !learned(b)) {
    return EVEN_OK;
  }
  if (look) {
    EVEN_TRY(decide(b));
  }
  probe(b);
  return EVEN_OK;
}

even_status even_balancer_shares(even_balancer *b, int64_t batch, int64_t *shares) {
  if (batch < 1) {
    return even_fail(EVEN_ERR_ARGUMENT, "balancer: the batch has %" PRId64 " samples, at least 1 is needed", batch);
  }
  if (batch == b->batch) {
    memcpy(shares, b->current, b->ranks * sizeof *shares);
    if (b->probe_left > 0) {
      give_probe(b, shares);
    }
    return EVEN_OK;
  }
  if (measured(b) && learned(b)) {
    believe(b);
  } else {
    expect(b);
  }
  return even_solve(&b->room, b->tables, b->caps, batch, shares, NULL);
}

double even_balancer_predict(const even_balancer *b, size_t rank, int64_t samples) {
  if (rank >= b->ranks || samples < 0 || !b->models[rank].known) {
    return NAN;
  }
  return even_model_at(&b->models[rank], samples);
}
