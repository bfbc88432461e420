/* From what was measured to shares: tables of the models, the best split of them, and a change only where it
 * pays. */
#include "balancer/state.h"
#include "base/fail.h"

#include <math.h>
#include <string.h>

/* A change must promise this part of the step, and more while the models are uncertain. */
static const double least_gain = 0.01;
static const double most_gain = 0.30;
/* Of two splits that the last steps were replayed with: a gain of so many standard errors, and of this part of a step.
 */
static const double certain_gain = 1.75;
static const double least_replayed = 0.003;
/* Ranks of one kind are mostly as fast as one another, and what noise moves beyond equal shares costs a step as much as
 * it promises: of the last steps a gain over these is to be so many standard errors, … */
static const double certain_unequal = 2.0;
/* … and since a rank changed there are to be steps enough that leaving it would have saved so much of one: what soon
 * passes, as a neighbour's work does, is not followed and undone, and what stays is late by that part of a step, once.
 */
static const double patience = 0.4;
/* What looking after a rank without samples may cost of the run. */
static const double probe_cost = 0.002;

enum { STRAIGHT_POINTS = 3 };
static const int64_t far_out = INT64_C(1) << 40; /* so that the slope keeps its digits */

/* Straight lines from (0, idle) over (1, one) on. */
static void set_table(even_balancer *b, size_t rank, double idle, double one, double per_sample) {
  int64_t *samples = b->table_samples + rank * EVEN_TABLE_POINTS;
  double *seconds = b->table_seconds + rank * EVEN_TABLE_POINTS;
  samples[0] = 0;
  samples[1] = 1;
  samples[2] = far_out;
  seconds[0] = idle < one ? idle : one;
  seconds[1] = one;
  seconds[2] = one + per_sample * (double)(samples[2] - 1);
  b->costs[rank].table.points = STRAIGHT_POINTS;
  b->costs[rank].micro_batch = 0;
  b->costs[rank].constant_seconds = 0.0;
}

/* A dummy batch and one sample as the model has them, then these points, each `more` seconds later; straight between
 * them, and beyond by `slope`. */
static void set_points(even_balancer *b, size_t rank, const double *at, const double *took, int count, double slope,
                       double more) {
  const even_rank_model *model = &b->models[rank];
  int64_t *samples = b->table_samples + rank * EVEN_TABLE_POINTS;
  double *seconds = b->table_seconds + rank * EVEN_TABLE_POINTS;
  size_t points = 2;
  samples[0] = 0;
  samples[1] = 1;
  seconds[1] = fmin(even_model_at(model, 1), took[0]) + more;
  seconds[0] = fmin(even_model_at(model, 0), seconds[1]);
  for (int i = 0; i < count; i++) {
    if ((int64_t)at[i] > 1) {
      samples[points] = (int64_t)at[i];
      seconds[points++] = took[i] + more;
    }
  }
  samples[points] = far_out;
  seconds[points] = seconds[points - 1] + slope * (double)(far_out - samples[points - 1]);
  b->costs[rank].table.points = points + 1;
  b->costs[rank].micro_batch = 0;
  b->costs[rank].constant_seconds = 0.0;
}

/* The table is that of a micro-batch; what a step takes whatever their number is a constant. Where a micro-batch is
 * said to cost more than the whole fixed part that was measured, that is below zero, and whole steps are still as
 * measured. */
static void set_pieces(even_balancer *b, size_t rank) {
  const even_rank_model *model = &b->models[rank];
  double *seconds = b->table_seconds + rank * EVEN_TABLE_POINTS;
  double constant = seconds[1] - model->seconds_per_sample * (1.0 + model->piece_samples);
  for (int i = 0; i < STRAIGHT_POINTS; i++) {
    seconds[i] = seconds[i] > constant ? seconds[i] - constant : 0.0;
  }
  b->costs[rank].micro_batch = model->micro_batch;
  b->costs[rank].constant_seconds = constant;
}

void even_balancer_expect_rate(even_balancer *b, size_t rank, double per_sample) {
  set_table(b, rank, 0.0, per_sample, per_sample);
}

void even_balancer_expect(even_balancer *b) {
  for (size_t r = 0; r < b->ranks; r++) {
    even_balancer_expect_rate(b, r, 1.0 / b->speeds[r]);
  }
}

void even_balancer_expect_equal(even_balancer *b) {
  for (size_t r = 0; r < b->ranks; r++) {
    even_balancer_expect_rate(b, r, 1.0);
  }
}

bool even_balancer_measured(const even_balancer *b) {
  return b->policy == EVEN_POLICY_DYNAMIC || b->policy == EVEN_POLICY_HYBRID || b->policy == EVEN_POLICY_AUTO;
}

bool even_balancer_learned(const even_balancer *b) {
  bool any = false;
  for (size_t r = 0; r < b->ranks; r++) {
    const even_rank_model *model = &b->models[r];
    if (model->known && model->count >= EVEN_LEAST_STEPS) {
      any = true;
    } else if (b->current[r] > 0) {
      return false;
    }
  }
  return any;
}

/* Seconds of a sample, on the whole. */
static double steepness(const even_rank_model *model) {
  return even_model_bent(model) ? model->shape.slope : model->seconds_per_sample;
}

/* Of each rank, beside the fastest one, which a slow one is not to keep waiting. Of few ranks that is measured anew
 * after each step, by today's models: what was scatter to a model of the first steps may have been the model's fault.
 */
static void set_scatter(even_balancer *b, size_t fastest) {
  if (b->scatters_at == b->steps) {
    return;
  }
  b->scatters_at = b->steps;
  bool few = b->replay.seconds != NULL;
  if (few) {
    even_replay_scatter(&b->replay, b->models, b->current, b->ranks, b->scatters);
  }
  double own = few ? b->scatters[fastest] : 0.0;
  for (size_t r = 0; r < b->ranks; r++) {
    double square = few ? (b->scatters[r] + own) / 2.0 : even_scatter_square(&b->scatter);
    b->scatters[r] = square;
  }
}

/* Tables of what was measured; a rank that never had samples is judged by its prior speed beside the others. */
/* The share at which it shows whether the rank's floor counts: of one that is held back for waits within steps that
 * after the present one, for what a sample more does to the others. */
static int64_t beyond(const even_balancer *b, size_t rank) {
  int64_t share = b->current[rank];
  int64_t bucket = b->models[rank].bucket;
  if (!b->guard.met[rank]) {
    return share;
  }
  share++;
  return bucket > 1 ? (share + bucket - 1) / bucket * bucket : share; /* as the model counts it */
}

void even_balancer_believe(even_balancer *b, int64_t batch) {
  double one = 0.0;
  double fixed = 0.0;
  double known = 0.0;
  double step = 0.0;
  double least = INFINITY;
  size_t fastest = 0;
  for (size_t r = 0; r < b->ranks; r++) {
    if (b->models[r].known) {
      step = fmax(step, even_model_at(&b->models[r], b->current[r]));
      fastest = steepness(&b->models[r]) < least ? r : fastest;
      least = fmin(least, steepness(&b->models[r]));
      one += b->models[r].seconds_per_sample * b->speeds[r];
      fixed += b->models[r].fixed_seconds * b->speeds[r];
      known += 1.0;
    }
  }
  set_scatter(b, fastest);
  step *= (double)batch / (double)b->batch;
  for (size_t r = 0; r < b->ranks; r++) {
    const even_rank_model *model = &b->models[r];
    if (model->known) {
      double scatter = even_scatter_seconds(b->scatters[r], b->ranks, step);
      double headroom = even_scatter_headroom(scatter, steepness(model) / least);
      double floor = b->guard.floors[r];
      int64_t share = beyond(b, r);
      if (floor * (double)share > even_model_at(model, share)) {
        set_table(b, r, 0.0, floor, floor);
      } else if (even_model_bent(model)) {
        set_points(b, r, model->shape.samples, model->shape.seconds, model->shape.points, model->shape.slope, headroom);
      } else {
        set_table(b, r, even_model_at(model, 0), even_model_line(model, 1.0) + headroom, model->seconds_per_sample);
        if (model->micro_batch > 0 && model->piece_samples > 0.0) {
          set_pieces(b, r);
        }
      }
    } else {
      double per_sample = one / known / b->speeds[r];
      set_table(b, r, 0.0, fixed / known / b->speeds[r] + per_sample, per_sample);
    }
  }
}

double even_balancer_step_seconds(const even_balancer *b, const int64_t *shares) {
  double most = 0.0;
  for (size_t r = 0; r < b->ranks; r++) {
    double seconds = even_rank_cost_at(&b->costs[r], shares[r]);
    most = seconds > most ? seconds : most;
  }
  return most;
}

/* A straight line is trusted up to twice the largest share that was measured: at today's speed, or, where the rank is
 * as fast again as it was then, before it became slower. */
static void set_reach(even_balancer *b, double factor) {
  for (size_t r = 0; r < b->ranks; r++) {
    const even_rank_model *model = &b->models[r];
    double most = model->known ? factor * model->most_samples + 1.0 : factor;
    most = model->known ? fmax(most, even_model_measured(model)) : most;
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

even_status even_balancer_propose(even_balancer *b, double *promised) {
  even_balancer_believe(b, b->batch);
  double factor = 2.0;
  set_reach(b, factor);
  while (!holds(b)) {
    factor *= 2.0;
    set_reach(b, factor);
  }
  return even_solve(&b->room, b->costs, b->reach, b->batch, b->candidate, promised);
}

/* Instead of what is believed, for ranks whose sizes were measured. */
static void hope(even_balancer *b) {
  double samples[EVEN_SHAPE_HOPES] = {0};
  double seconds[EVEN_SHAPE_HOPES] = {0};
  for (size_t r = 0; r < b->ranks; r++) {
    const even_rank_model *model = &b->models[r];
    double headroom = even_rank_cost_at(&b->costs[r], 1) - even_model_at(model, 1);
    int points = model->known && b->costs[r].micro_batch == 0 && !(b->guard.floors[r] > 0.0)
                     ? even_shape_hopes(&model->shape, samples, seconds)
                     : 0;
    if (points > 0) {
      set_points(b, r, samples, seconds, points, steepness(model), fmax(0.0, headroom));
    }
  }
}

/* The nearer a split is to what runs, the more is known of it: the fewest samples more that promise enough. */
even_status even_balancer_hope(even_balancer *b, double gain, bool *any) {
  EVEN_TRY(even_balancer_propose(b, NULL));
  double now = even_balancer_step_seconds(b, b->current);
  *any = false;
  hope(b);
  now = fmin(now, even_balancer_step_seconds(b, b->current)); /* what is hoped of sizes that run is no gain */
  for (int64_t more = 1; !*any && more < b->batch; more += 1 + more / 3) {
    double promised = now;
    int64_t most = 0;
    for (size_t r = 0; r < b->ranks; r++) {
      int64_t near = b->current[r] < b->batch - more ? b->current[r] + more : b->batch;
      b->unlimited[r] = near < b->reach[r] ? near : b->reach[r];
      most = b->batch - most > b->unlimited[r] ? most + b->unlimited[r] : b->batch;
    }
    if (most == b->batch) {
      EVEN_TRY(even_solve(&b->room, b->costs, b->unlimited, b->batch, b->candidate, &promised));
    }
    *any = promised < now * (1.0 - gain) && memcmp(b->candidate, b->current, b->ranks * sizeof *b->current) != 0;
  }
  return EVEN_OK;
}

/* Whether some rank could take more than its reach in the `promised` time; else the best split of all is no faster. */
static bool limited(const even_balancer *b, double promised) {
  for (size_t r = 0; r < b->ranks; r++) {
    bool own = b->reach[r] >= b->batch || b->reach[r] == b->caps[r];
    if (!own && even_rank_cost_at(&b->costs[r], b->reach[r] + 1) <= promised) {
      return true;
    }
  }
  return false;
}

static bool floored(const even_balancer *b) {
  for (size_t r = 0; r < b->ranks; r++) {
    if (b->guard.floors[r] > 0.0) {
      return true; /* stopped by a quota: trials decide */
    }
  }
  return false;
}

static bool runs(const even_balancer *b, const int64_t *shares) {
  return memcmp(b->current, shares, b->ranks * sizeof *shares) == 0;
}

static void run(even_balancer *b, const int64_t *shares) {
  memcpy(b->current, shares, b->ranks * sizeof *shares);
}

/* Equal shares, within the caps; NULL where they are further than what was measured allows. */
static const int64_t *equal_shares(const even_balancer *b) {
  const int64_t *equal = b->guard.fixed[EVEN_FIXED_EQUAL].shares;
  for (size_t r = 0; r < b->ranks; r++) {
    if (equal[r] > b->reach[r]) {
      return NULL;
    }
  }
  return equal;
}

/* Where the last steps tell what splits near one another would have taken, they decide: whether `instead` runs now. */
static bool replays_faster(even_balancer *b, int steps, const int64_t *instead, double certain) {
  even_replay_gain found = even_replay_compare(&b->replay, b->models, b->ranks, steps, b->current, instead);
  bool faster = found.gain > certain * found.error && found.gain > least_replayed * found.seconds &&
                even_change_pays(&b->change, found.gain, b->steps);
  if (faster) {
    run(b, instead);
  }
  return faster;
}

static void decide_by_replay(even_balancer *b, int steps) {
  const int64_t *equal = equal_shares(b);
  even_replay_descend(&b->replay, b->models, b->reach, b->ranks, steps, b->candidate);
  if (equal != NULL) {
    even_replay_gain beyond = even_replay_compare(&b->replay, b->models, b->ranks, steps, equal, b->candidate);
    bool sure = beyond.gain > certain_unequal * beyond.error;
    if (!sure && (runs(b, equal) || replays_faster(b, steps, equal, 0.0))) {
      return;
    }
  }
  (void)replays_faster(b, steps, b->candidate, certain_gain);
}

/* Steps of the ranks as they are now. */
static double steps_as_now(const even_balancer *b) {
  double steps = INFINITY;
  for (size_t r = 0; r < b->ranks; r++) {
    const even_rank_model *model = &b->models[r];
    if (b->current[r] > 0 && model->known && !model->guess) {
      steps = fmin(steps, (double)model->count * model->block);
    }
  }
  return steps;
}

/* Whether a split of `seconds` is to run instead of equal shares, by the models. Two models of one speed differ where
 * one of them has forgotten the past, for the machine's speed is another now, and the other has not yet: the same few
 * steps of all ranks tell. Of ranks that are stopped these do not, nor is it known that noise left equal shares. */
static bool surpasses(even_balancer *b, double seconds, const int64_t *equal) {
  double gain = 1.0 - seconds / even_balancer_step_seconds(b, equal);
  double told = steps_as_now(b);
  int steps = floored(b) ? 0 : even_replay_begin(&b->replay, b->models, b->current, b->ranks, EVEN_REPLAY_FEW);
  if (steps == 0 && told >= (double)EVEN_REPLAY_FEW) {
    return true;
  }
  if (!(gain > worthwhile(b) && gain * told >= patience)) {
    return false;
  }
  if (steps == 0 || !runs(b, equal)) {
    return true;
  }
  even_replay_gain found = even_replay_compare(&b->replay, b->models, b->ranks, steps, equal, b->candidate);
  return found.gain > certain_unequal * found.error;
}

/* Else the models: whether a split of `seconds` runs now. */
static bool promises(even_balancer *b, const int64_t *instead, double seconds) {
  double now = even_balancer_step_seconds(b, b->current);
  bool faster = seconds < now && even_change_pays(&b->change, now - seconds, b->steps);
  if (faster) {
    run(b, instead);
  }
  return faster;
}

/* A small share that may only double gains little at first: what lies at the end of the way counts. */
static even_status decide_by_models(even_balancer *b, double promised) {
  const int64_t *equal = equal_shares(b);
  double now = even_balancer_step_seconds(b, b->current);
  double end = promised;
  if (limited(b, promised)) {
    EVEN_TRY(even_solve(&b->room, b->costs, b->caps, b->batch, b->unlimited, &end));
  }
  if (equal != NULL && !surpasses(b, end, equal)) {
    double seconds = even_balancer_step_seconds(b, equal);
    if (runs(b, equal) || (seconds < now * (1.0 - worthwhile(b)) && promises(b, equal, seconds))) {
      return EVEN_OK;
    }
  }
  if (end < now * (1.0 - worthwhile(b))) {
    (void)promises(b, b->candidate, promised);
  }
  return EVEN_OK;
}

even_status even_balancer_decide(even_balancer *b) {
  double promised = 0.0;
  EVEN_TRY(even_balancer_propose(b, &promised));
  int steps = even_replay_begin(&b->replay, b->models, b->current, b->ranks, EVEN_REPLAY_LEAST);
  if (steps > 0 && !floored(b) && !limited(b, promised)) {
    decide_by_replay(b, steps);
    return EVEN_OK;
  }
  return decide_by_models(b, promised);
}

/* A rank whose share is zero and that runs no dummy batch shows nothing: from time to time it gets one sample for as
 * many steps as it takes to be believed, seldom enough that a rank as slow as before costs next to nothing. It waits
 * while a split is tried, which is measured without it. */
void even_balancer_probe(even_balancer *b) {
  if (b->guard.trial.state != EVEN_TRIAL_IDLE) {
    return;
  }
  if (b->probe_left > 0) {
    b->probe_left--;
    return;
  }
  if (b->steps < b->next_probe || even_guard_holds(b)) {
    return;
  }
  /* The tables are whoever's came last, even a caller's who only asked for shares. */
  even_balancer_believe(b, b->batch);
  double step = even_balancer_step_seconds(b, b->current);
  for (size_t i = 1; i <= b->ranks; i++) {
    size_t r = (b->probed + i) % b->ranks;
    bool shows = b->models[r].dummy && !even_model_idles(&b->models[r]); /* a sample's work */
    if (b->current[r] > 0 || shows || b->caps[r] == 0) {
      continue;
    }
    double loss = step > 0.0 ? even_rank_cost_at(&b->costs[r], 1) / step - 1.0 : 0.0;
    double wait = loss > 0.0 ? (double)EVEN_LEAST_STEPS * loss / probe_cost : 0.0;
    b->probed = r;
    b->probe_left = EVEN_LEAST_STEPS;
    b->next_probe = b->steps + EVEN_PROBE_EVERY + (wait < 1e9 ? (int64_t)wait : INT64_C(1000000000));
    return;
  }
  b->next_probe = b->steps + EVEN_PROBE_EVERY;
}

void even_balancer_give_probe(const even_balancer *b, int64_t *shares) {
  size_t largest = 0;
  if (b->guard.trial.state != EVEN_TRIAL_IDLE) {
    return;
  }
  for (size_t r = 1; r < b->ranks; r++) {
    largest = shares[r] > shares[largest] ? r : largest;
  }
  if (shares[b->probed] == 0 && shares[largest] > 0) {
    shares[largest]--;
    shares[b->probed]++;
  }
}
