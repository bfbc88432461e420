/* Shares that something else than the models decides on: a function of the caller's, and caps that change; and which
 * split is in force. */
#include "balancer/state.h"
#include "base/fail.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* Nobody's micro-batches cost more samples. */
static const double most_more = 0x1p40;

/* The best split by what is believed, before that by the prior speeds, into b->candidate. */
static even_status propose(even_balancer *b, int64_t batch) {
  if (!even_balancer_learned(b)) {
    even_balancer_expect(b);
  } else if (batch == b->batch) {
    return even_balancer_propose(b, NULL);
  } else {
    even_balancer_believe(b, batch);
  }
  return even_solve(&b->room, b->costs, b->caps, batch, b->candidate, NULL);
}

static even_status wrong(const char *what) {
  (void)even_fail(EVEN_ERR_ARGUMENT, "balancer: the policy %s", what);
  return even_error_fix("return one number >= 0 for each rank, within its cap, that add up to the batch");
}

static even_status check(const even_balancer *b, int64_t batch, const int64_t *shares) {
  char what[160];
  int64_t left = batch;
  for (size_t r = 0; r < b->ranks; r++) {
    if (shares[r] < 0) {
      (void)snprintf(what, sizeof what, "gave rank %zu %" PRId64 " samples", r, shares[r]);
      return wrong(what);
    }
    if (b->caps[r] >= 0 && shares[r] > b->caps[r]) {
      (void)snprintf(what, sizeof what, "gave rank %zu %" PRId64 " samples, more than its cap of %" PRId64, r,
                     shares[r], b->caps[r]);
      return wrong(what);
    }
    if (shares[r] > left) {
      (void)snprintf(what, sizeof what, "gave the ranks more than the batch of %" PRId64, batch);
      return wrong(what);
    }
    left -= shares[r];
  }
  if (left > 0) {
    (void)snprintf(what, sizeof what, "gave the ranks %" PRId64 " samples fewer than the batch of %" PRId64, left,
                   batch);
    return wrong(what);
  }
  return EVEN_OK;
}

even_status even_balancer_ask_callback(even_balancer *b, int64_t batch, int64_t *shares) {
  EVEN_TRY(propose(b, batch));
  for (size_t r = 0; r < b->ranks; r++) {
    b->view_fixed[r] = b->models[r].known ? b->models[r].fixed_seconds : (double)NAN;
    b->view_slope[r] = b->models[r].known ? b->models[r].seconds_per_sample : (double)NAN;
    shares[r] = -1; /* what the function leaves out is seen */
  }
  const even_policy_view view = {.size = sizeof view,
                                 .ranks = b->ranks,
                                 .batch = batch,
                                 .steps = b->steps,
                                 .caps = b->caps,
                                 .last = b->steps > 0 ? b->last : NULL,
                                 .fixed_seconds = b->view_fixed,
                                 .seconds_per_sample = b->view_slope,
                                 .proposed = b->candidate};
  const even_error aside = even_error_aside();
  EVEN_TRY(even_error_told(b->choose(b->choose_context, &view, shares), &aside));
  return check(b, batch, shares);
}

even_status even_balancer_set_caps(even_balancer *b, const int64_t *caps) {
  int64_t *wanted = b->unlimited;
  for (size_t r = 0; r < b->ranks; r++) {
    wanted[r] = caps != NULL ? caps[r] : -1;
  }
  even_balancer_expect(b);
  EVEN_TRY(even_solve(&b->room, b->costs, wanted, b->batch, b->candidate, NULL));
  memcpy(b->caps, wanted, b->ranks * sizeof *b->caps);
  b->probe_left = 0;
  EVEN_TRY(even_guard_caps_changed(b));
  if (even_balancer_measured(b) && even_balancer_learned(b)) {
    EVEN_TRY(even_balancer_propose(b, NULL));
  }
  memcpy(b->current, b->candidate, b->ranks * sizeof *b->current);
  return EVEN_OK;
}

even_status even_balancer_set_micro_batches(even_balancer *b, const int64_t *sizes, const double *more_samples) {
  for (size_t r = 0; r < b->ranks; r++) {
    if (sizes[r] < 0) {
      return even_fail(EVEN_ERR_ARGUMENT, "balancer: the micro-batches of rank %zu have %" PRId64 " samples", r,
                       sizes[r]);
    }
    if (!isfinite(more_samples[r]) || more_samples[r] < 0.0) {
      return even_fail(EVEN_ERR_ARGUMENT, "balancer: a micro-batch of rank %zu costs as much as %g samples more", r,
                       more_samples[r]);
    }
  }
  for (size_t r = 0; r < b->ranks; r++) {
    even_rank_model *model = &b->models[r];
    double more = sizes[r] > 0 && more_samples[r] < most_more ? more_samples[r] : sizes[r] > 0 ? most_more : 0.0;
    bool same = model->micro_batch == sizes[r] && !(model->piece_samples < more || model->piece_samples > more);
    if (!same) {
      bool told = more > 0.0 || model->piece_samples > 0.0;
      even_model_set_pieces(model, sizes[r], more);
      if (told && model->known) {
        even_model_learn(model);
      }
    }
  }
  return EVEN_OK;
}

even_status even_balancer_without_caps(even_balancer *b, int64_t *shares, double *step_seconds) {
  if (b->policy == EVEN_POLICY_EQUAL || b->guard.in_force == EVEN_FIXED_EQUAL) {
    even_balancer_expect_equal(b);
  } else if (b->guard.in_force == EVEN_FIXED_NONE && even_balancer_measured(b) && even_balancer_learned(b)) {
    even_balancer_believe(b, b->batch);
  } else {
    even_balancer_expect(b);
  }
  return even_solve(&b->room, b->costs, NULL, b->batch, shares, step_seconds);
}

bool even_balancer_on_equal(const even_balancer *b, double *balanced_seconds, double *equal_seconds) {
  const even_fixed *equal = &b->guard.fixed[EVEN_FIXED_EQUAL];
  if (balanced_seconds != NULL) {
    *balanced_seconds = equal->balanced_seconds;
  }
  if (equal_seconds != NULL) {
    *equal_seconds = equal->seconds;
  }
  return b->guard.in_force == EVEN_FIXED_EQUAL;
}

even_policy even_balancer_choice(const even_balancer *b, double *seconds, double *other_seconds) {
  const even_guard *g = &b->guard;
  bool models = g->in_force == EVEN_FIXED_NONE;
  const even_fixed *fixed = &g->fixed[models ? g->compared : g->in_force];
  if (seconds != NULL) {
    *seconds = models ? fixed->balanced_seconds : fixed->seconds;
  }
  if (other_seconds != NULL) {
    *other_seconds = models ? fixed->seconds : fixed->balanced_seconds;
  }
  if (!models) {
    return g->in_force == EVEN_FIXED_EQUAL ? EVEN_POLICY_EQUAL : EVEN_POLICY_PROPORTIONAL;
  }
  return even_balancer_measured(b) ? EVEN_POLICY_HYBRID : b->policy;
}
