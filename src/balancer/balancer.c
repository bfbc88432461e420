/* Shares that follow the measured steps: one time model a rank, the exact optimum of the models, and a change
 * only where it pays. */
#include "balancer/floors.h"
#include "balancer/state.h"
#include "base/alloc.h"
#include "base/fail.h"
#include "base/params.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

enum {
  LEARN_EVERY = 16, /* steps between two looks at a model whose rank does what is expected */
  FRESH = 12        /* steps for which a model is looked at each time */
};

/* Prior speeds below this part of the fastest are raised to it, so that all times stay finite. */
static const double slowest = 1e-9;

static even_status check(const even_balancer_params *params) {
  if ((int)params->policy < EVEN_POLICY_EQUAL || (int)params->policy > EVEN_POLICY_CALLBACK) {
    return even_fail(EVEN_ERR_ARGUMENT, "balancer: there is no policy number %d", (int)params->policy);
  }
  if ((params->policy == EVEN_POLICY_CALLBACK) != (params->choose != NULL)) {
    return even_fail(EVEN_ERR_ARGUMENT, "balancer: a function that chooses shares goes with EVEN_POLICY_CALLBACK");
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
  for (size_t r = 0; params->buckets != NULL && r < params->ranks; r++) {
    if (params->buckets[r] < 0 || params->buckets[r] > EVEN_MOST_BUCKET) {
      (void)even_fail(EVEN_ERR_ARGUMENT, "balancer: the buckets of rank %zu have %" PRId64 " samples", r,
                      params->buckets[r]);
      return even_error_fix("give 1 to %d, 0 for none", EVEN_MOST_BUCKET);
    }
  }
  return EVEN_OK;
}

static even_status make(even_balancer *b, const even_balancer_params *params) {
  b->policy = params->policy;
  b->ranks = params->ranks;
  b->batch = params->batch;
  b->next_probe = EVEN_PROBE_EVERY;
  b->choose = params->choose;
  b->choose_context = params->choose_context;
  EVEN_TRY(EVEN_NEW_ARRAY(&b->speeds, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->caps, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->models, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->current, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->candidate, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->unlimited, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->reach, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->costs, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->last, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->scatters, b->ranks));
  b->scatters_at = -1;
  EVEN_TRY(EVEN_NEW_ARRAY(&b->view_fixed, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->view_slope, b->ranks));
  EVEN_TRY(even_alloc(b->ranks, EVEN_TABLE_POINTS * sizeof *b->table_samples, (void **)&b->table_samples));
  EVEN_TRY(even_alloc(b->ranks, EVEN_TABLE_POINTS * sizeof *b->table_seconds, (void **)&b->table_seconds));
  EVEN_TRY(even_solve_room_open(b->ranks, &b->room));
  EVEN_TRY(even_replay_open(&b->replay, b->ranks));
  EVEN_TRY(even_exchange_open(&b->exchange, b->ranks));
  bool prior = params->speeds != NULL && b->policy != EVEN_POLICY_EQUAL && b->policy != EVEN_POLICY_DYNAMIC;
  double fastest = 0.0;
  for (size_t r = 0; prior && r < b->ranks; r++) {
    fastest = params->speeds[r] > fastest ? params->speeds[r] : fastest;
  }
  for (size_t r = 0; r < b->ranks; r++) {
    b->models[r].block = 1;
    b->models[r].bucket = b->costs[r].bucket = params->buckets != NULL ? params->buckets[r] : 0;
    double relative = prior ? params->speeds[r] / fastest : 1.0;
    b->speeds[r] = relative > slowest ? relative : slowest;
    b->caps[r] = params->caps != NULL ? params->caps[r] : -1;
    b->costs[r].table.samples = b->table_samples + r * EVEN_TABLE_POINTS;
    b->costs[r].table.seconds = b->table_seconds + r * EVEN_TABLE_POINTS;
  }
  return EVEN_OK;
}

even_status even_balancer_open(const even_balancer_params *params, even_balancer **out) {
  even_balancer *b = NULL;
  even_balancer_params own;
  *out = NULL;
  EVEN_TRY(EVEN_TAKE_PARAMS(even_balancer_params, &own, params));
  params = &own;
  EVEN_TRY(check(params));
  EVEN_TRY(EVEN_NEW(&b));
  even_status status = make(b, params);
  if (status == EVEN_OK) {
    status = even_guard_open(&b->guard, b);
  }
  if (status == EVEN_OK) {
    even_balancer_expect(b);
    status = even_solve(&b->room, b->costs, b->caps, b->batch, b->current, NULL);
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
  even_guard_close(&b->guard);
  even_replay_close(&b->replay);
  even_exchange_close(&b->exchange);
  even_free(b->speeds);
  even_free(b->caps);
  even_free(b->models);
  even_free(b->current);
  even_free(b->candidate);
  even_free(b->unlimited);
  even_free(b->reach);
  even_free(b->costs);
  even_free(b->last);
  even_free(b->scatters);
  even_free(b->view_fixed);
  even_free(b->view_slope);
  even_free(b->table_samples);
  even_free(b->table_seconds);
  even_free(b);
}

static even_status check_timings(const even_balancer *b, const even_step_timing *timings,
                                 const double *exchange_seconds, const double *pass_seconds) {
  for (size_t r = 0; r < b->ranks; r++) {
    if (!isfinite(timings[r].busy_seconds) || timings[r].busy_seconds < 0.0 || timings[r].samples < 0) {
      return even_fail(EVEN_ERR_ARGUMENT, "balancer: rank %zu reports %g seconds for %" PRId64 " samples", r,
                       timings[r].busy_seconds, timings[r].samples);
    }
    if (exchange_seconds != NULL && (!isfinite(exchange_seconds[r]) || exchange_seconds[r] < 0.0)) {
      return even_fail(EVEN_ERR_ARGUMENT, "balancer: rank %zu reports %g seconds of its own in the exchange", r,
                       exchange_seconds[r]);
    }
    if (pass_seconds != NULL && (!isfinite(pass_seconds[r]) || pass_seconds[r] < 0.0)) {
      return even_fail(EVEN_ERR_ARGUMENT, "balancer: rank %zu reports %g seconds of work with its waits", r,
                       pass_seconds[r]);
    }
  }
  return EVEN_OK;
}

bool even_balancer_whole(const even_balancer *b, const even_step_timing *timings) {
  int64_t left = b->batch;
  for (size_t r = 0; r < b->ranks; r++) {
    if (timings[r].samples > left) {
      return false;
    }
    left -= timings[r].samples;
  }
  return left == 0;
}

/* What runs is the caller's affair: what is believed of a rank beyond its share begins from there. */
static void take_current(even_balancer *b, const even_step_timing *timings) {
  bool whole = even_balancer_whole(b, timings);
  for (size_t r = 0; whole && r < b->ranks; r++) {
    b->current[r] = timings[r].samples;
  }
}

even_status even_balancer_observe(even_balancer *b, const even_step_timing *timings) {
  return even_balancer_observe_spared(b, timings, NULL);
}

even_status even_balancer_observe_spared(even_balancer *b, const even_step_timing *timings, const bool *spared) {
  return even_balancer_observe_exchange(b, timings, spared, NULL);
}

even_status even_balancer_observe_exchange(even_balancer *b, const even_step_timing *timings, const bool *spared,
                                           const double *exchange_seconds) {
  return even_balancer_observe_waits(b, timings, spared, exchange_seconds, NULL);
}

even_status even_balancer_observe_waits(even_balancer *b, const even_step_timing *told, const bool *spared,
                                        const double *exchange_seconds, const double *pass_seconds) {
  EVEN_TRY(check_timings(b, told, exchange_seconds, pass_seconds));
  bool look = false;
  b->steps++;
  const even_step_timing *timings = even_exchange_take(b, told, exchange_seconds);
  even_meetings_take(b, told, timings, pass_seconds);
  bool spoiled = b->steps > 1 && even_change_take(&b->change, b->models, b->last, timings, b->ranks, b->steps);
  memcpy(b->last, told, b->ranks * sizeof *b->last);
  if (spoiled && even_balancer_measured(b)) {
    even_guard_pass(b);
    return EVEN_OK;
  }
  if (even_balancer_whole(b, timings)) {
    even_level_take(&b->level, b->models, &b->replay, timings, b->ranks);
  }
  even_scatter_take(&b->scatter, b->models, timings, b->ranks);
  even_replay_take(&b->replay, timings, b->ranks);
  for (size_t r = 0; r < b->ranks; r++) {
    even_rank_model *model = &b->models[r];
    bool taken = even_model_take(model, timings[r].samples, timings[r].busy_seconds, spared != NULL && spared[r]);
    /* the ranks take turns, so that a step costs the same as any other */
    bool turn = (b->steps + (int64_t)r) % LEARN_EVERY == 0;
    if (turn || (taken && (model->count < FRESH || even_model_surprised(model) || even_model_drifts(model)))) {
      even_model_learn(model);
      look = true;
    }
  }
  if (b->policy == EVEN_POLICY_CALLBACK) {
    take_current(b, timings);
  }
  if (!even_balancer_measured(b) || !even_balancer_learned(b)) {
    return EVEN_OK;
  }
  even_floors_forget(b);
  if (look && !even_guard_holds(b)) {
    EVEN_TRY(even_balancer_decide(b));
  }
  EVEN_TRY(even_guard_take(b, timings));
  even_balancer_probe(b);
  return EVEN_OK;
}

even_status even_balancer_shares(even_balancer *b, int64_t batch, int64_t *shares) {
  if (batch < 1) {
    return even_fail(EVEN_ERR_ARGUMENT, "balancer: the batch has %" PRId64 " samples, at least 1 is needed", batch);
  }
  if (batch == b->batch && b->policy != EVEN_POLICY_CALLBACK) {
    memcpy(shares, even_guard_shares(b), b->ranks * sizeof *shares);
    if (b->probe_left > 0) {
      even_balancer_give_probe(b, shares);
    }
    return EVEN_OK;
  }
  if (b->policy == EVEN_POLICY_CALLBACK) {
    return even_balancer_ask_callback(b, batch, shares);
  }
  /* where the whole batch is left equal, since nothing better is sure, so is a last one that is smaller */
  const int64_t *equal = b->guard.fixed[EVEN_FIXED_EQUAL].shares;
  bool left = batch < b->batch && memcmp(even_guard_shares(b), equal, b->ranks * sizeof *equal) == 0;
  if (b->guard.in_force == EVEN_FIXED_EQUAL || left) {
    even_balancer_expect_equal(b);
  } else if (b->guard.in_force == EVEN_FIXED_NONE && even_balancer_measured(b) && even_balancer_learned(b)) {
    even_balancer_believe(b, batch);
  } else {
    even_balancer_expect(b);
  }
  return even_solve(&b->room, b->costs, b->caps, batch, shares, NULL);
}

double even_balancer_predict(const even_balancer *b, size_t rank, int64_t samples) {
  if (rank >= b->ranks || samples < 0 || !b->models[rank].known) {
    return NAN;
  }
  return even_model_at(&b->models[rank], samples);
}
