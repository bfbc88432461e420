/* Shares that follow the measured steps: one time model a rank, the exact optimum of the models, and a change
 * only where it pays. */
#include "balancer/state.h"
#include "base/alloc.h"
#include "base/fail.h"

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
  b->next_probe = EVEN_PROBE_EVERY;
  EVEN_TRY(EVEN_NEW_ARRAY(&b->speeds, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->caps, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->models, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->current, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->candidate, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->unlimited, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->reach, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&b->tables, b->ranks));
  EVEN_TRY(even_alloc(b->ranks, EVEN_TABLE_POINTS * sizeof *b->table_samples, (void **)&b->table_samples));
  EVEN_TRY(even_alloc(b->ranks, EVEN_TABLE_POINTS * sizeof *b->table_seconds, (void **)&b->table_seconds));
  EVEN_TRY(even_solve_room_open(b->ranks, &b->room));
  bool prior = params->speeds != NULL && (b->policy == EVEN_POLICY_PROPORTIONAL || b->policy == EVEN_POLICY_HYBRID);
  double fastest = 0.0;
  for (size_t r = 0; prior && r < b->ranks; r++) {
    fastest = params->speeds[r] > fastest ? params->speeds[r] : fastest;
  }
  for (size_t r = 0; r < b->ranks; r++) {
    b->models[r].block = 1;
    double relative = prior ? params->speeds[r] / fastest : 1.0;
    b->speeds[r] = relative > slowest ? relative : slowest;
    b->caps[r] = params->caps != NULL ? params->caps[r] : -1;
    b->tables[r].samples = b->table_samples + r * EVEN_TABLE_POINTS;
    b->tables[r].seconds = b->table_seconds + r * EVEN_TABLE_POINTS;
  }
  return EVEN_OK;
}

even_status even_balancer_open(const even_balancer_params *params, even_balancer **out) {
  even_balancer *b = NULL;
  *out = NULL;
  EVEN_TRY(check(params));
  EVEN_TRY(EVEN_NEW(&b));
  even_status status = make(b, params);
  if (status == EVEN_OK) {
    status = even_guard_open(&b->guard, b);
  }
  if (status == EVEN_OK) {
    even_balancer_expect(b);
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
  even_guard_close(&b->guard);
  even_free(b->speeds);
  even_free(b->caps);
  even_free(b->models);
  even_free(b->current);
  even_free(b->candidate);
  even_free(b->unlimited);
  even_free(b->reach);
  even_free(b->tables);
  even_free(b->table_samples);
  even_free(b->table_seconds);
  even_free(b);
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
  even_scatter_take(&b->scatter, b->models, timings, b->ranks);
  for (size_t r = 0; r < b->ranks; r++) {
    even_rank_model *model = &b->models[r];
    bool taken = even_model_take(model, timings[r].samples, timings[r].busy_seconds);
    /* the ranks take turns, so that a step costs the same as any other */
    bool turn = (b->steps + (int64_t)r) % LEARN_EVERY == 0;
    if (turn || (taken && (model->count < FRESH || even_model_surprised(model)))) {
      even_model_learn(model);
      look = true;
    }
  }
  if (!even_balancer_measured(b) || !even_balancer_learned(b)) {
    return EVEN_OK;
  }
  if (look && !even_guard_holds(b)) {
    EVEN_TRY(even_balancer_decide(b));
  }
  EVEN_TRY(even_guard_take(b, timings));
  if (!even_guard_holds(b)) {
    even_balancer_probe(b);
  }
  return EVEN_OK;
}

even_status even_balancer_shares(even_balancer *b, int64_t batch, int64_t *shares) {
  if (batch < 1) {
    return even_fail(EVEN_ERR_ARGUMENT, "balancer: the batch has %" PRId64 " samples, at least 1 is needed", batch);
  }
  if (batch == b->batch) {
    memcpy(shares, even_guard_shares(b), b->ranks * sizeof *shares);
    if (b->probe_left > 0) {
      even_balancer_give_probe(b, shares);
    }
    return EVEN_OK;
  }
  if (b->guard.on_equal) {
    even_balancer_expect_equal(b);
  } else if (even_balancer_measured(b) && even_balancer_learned(b)) {
    even_balancer_believe(b, batch);
  } else {
    even_balancer_expect(b);
  }
  return even_solve(&b->room, b->tables, b->caps, batch, shares, NULL);
}

double even_balancer_predict(const even_balancer *b, size_t rank, int64_t samples) {
  if (rank >= b->ranks || samples < 0 || !b->models[rank].known) {
    return NAN;
  }
  return even_model_at(&b->models[rank], samples);
}
