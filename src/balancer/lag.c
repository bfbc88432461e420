/* A model and a usual time for each rank. */
#include "balancer/lag.h"

#include "balancer/model.h"
#include "base/alloc.h"
#include "base/fail.h"

#include <evenstep/balancer.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
  LEARN_EVERY = 16, /* as the balancer does */
  FRESH = 12,
  TABLE_POINTS = 3,
  EXACT_MEDIAN = 64 /* of more ranks the median is that of all, made once a step */
};

/* What is still taken for a step as usual. */
static const double usual_step = 1.25;
/* Of what a lag is above 1: below which part one has caught up, below which a suspicion ends, and what all its steps
 * must have shown; no more of the last than with the usual factor. */
static const double ends_part = 0.5;
static const double doubtful_part = 0.7;
static const double certain_part = 0.3;
static const double most_certain = 1.15;
/* Of the usual time at the usual share no more than this part is taken as fixed before a smaller share was measured:
 * what a smaller one takes beyond that was no mistake of the line. */
static const double most_fixed = 0.5;
static const double shown_steps = 16; /* that this is the mean of, as it were: newer ones count more */
static const double most_shown = 8;
/* A usual time goes to a shorter one within some of so many steps, to a longer one by this part a step: what has been
 * so for a thousand steps is usual. */
static const double shorter_steps = 64;
static const double leak = 0.0002;
/* Shares that differ by more are others, for so many steps. */
static const double other_share = 0.1;
enum { SETTLED = 64 };

typedef struct watched {
  even_rank_model model;
  long steps;
  uint32_t first_step;
  uint64_t first_ns;
  int64_t share;      /* of the last step */
  double usual_share; /* at which */
  double usual;       /* a step took so many seconds; 0: not known yet */
  double slowness;    /* the model's time there now, as a multiple of it; 1 where not known */
  double shown;       /* as take_shown; 1 where not known */
  long settled;       /* steps at a share other than the usual one */
  uint32_t last_step;
  uint64_t last_ns;
  uint32_t fine_step; /* the last that was as expected, and its end */
  uint64_t fine_ns;
  bool suspected;
  long slow_steps; /* since it is */
  double slow_sum; /* of the slowness in them */
  uint64_t caught_up_ns;
  long caught_up; /* steps since then */
  even_lag lag;
} watched;

struct even_lags {
  size_t ranks;
  watched *rank;
  double *room; /* a number each */
  uint32_t median_step;
  double median;
  double begins;  /* a rank lags from this factor on, */
  double seconds; /* for so long */
};

even_status even_lags_open(size_t ranks, even_lags **out) {
  even_lags *lags = NULL;
  *out = NULL;
  EVEN_TRY(EVEN_NEW(&lags));
  lags->ranks = ranks;
  lags->median_step = UINT32_MAX;
  lags->begins = EVEN_LAG_BEGINS;
  lags->seconds = EVEN_LAG_SECONDS;
  even_status status = EVEN_NEW_ARRAY(&lags->rank, ranks);
  status = status == EVEN_OK ? EVEN_NEW_ARRAY(&lags->room, ranks) : status;
  if (status != EVEN_OK) {
    even_lags_close(lags);
    return status;
  }
  for (size_t r = 0; r < ranks; r++) {
    even_lags_forget(lags, r);
  }
  *out = lags;
  return EVEN_OK;
}

void even_lags_close(even_lags *lags) {
  if (lags != NULL) {
    even_free(lags->rank);
    even_free(lags->room);
    even_free(lags);
  }
}

void even_lags_limit(even_lags *lags, double begins, double seconds) {
  lags->begins = begins > 0 ? begins : EVEN_LAG_BEGINS;
  lags->seconds = seconds > 0 ? seconds : (double)EVEN_LAG_SECONDS;
}

double even_lags_begins(const even_lags *lags) {
  return lags->begins;
}

/* So far of the way from 1 to where a lag begins. */
static double part_of(const even_lags *lags, double part) {
  return 1 + part * (lags->begins - 1);
}

void even_lags_forget(even_lags *lags, size_t rank) {
  lags->rank[rank] = (watched){.model = {.block = 1}, .slowness = 1, .shown = 1};
}

even_status even_lags_grow(even_lags *lags, size_t ranks) {
  size_t before = lags->ranks;
  if (ranks <= before) {
    return EVEN_OK;
  }
  EVEN_TRY(even_realloc((void **)&lags->room, ranks, sizeof *lags->room));
  EVEN_TRY(even_realloc((void **)&lags->rank, ranks, sizeof *lags->rank));
  lags->ranks = ranks;
  for (size_t r = before; r < ranks; r++) {
    even_lags_forget(lags, r);
  }
  return EVEN_OK;
}

even_lag even_lags_of(const even_lags *lags, size_t rank) {
  return lags->rank[rank].lag;
}

/* ---- the others ---- */

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a;
  double y = *(const double *)b;
  return x < y ? -1 : x > y;
}

/* The lower one of two: of two others, the one that is slow itself excuses nobody. */
static double median_of(double *values, size_t count) {
  if (count == 0) {
    return NAN;
  }
  qsort(values, count, sizeof *values, ascending);
  return values[(count - 1) / 2];
}

/* By how much the others are slower than usual; at least 1: that they are faster makes nobody slow. */
static double others_slowness(even_lags *lags, size_t rank) {
  bool many = lags->ranks > EXACT_MEDIAN;
  uint32_t step = lags->rank[rank].last_step;
  size_t count = 0;
  if (many && lags->median_step == step) {
    return lags->median;
  }
  for (size_t r = 0; r < lags->ranks; r++) {
    if ((many || r != rank) && lags->rank[r].usual > 0) {
      lags->room[count++] = lags->rank[r].slowness;
    }
  }
  double median = median_of(lags->room, count);
  lags->median_step = step;
  lags->median = median > 1 ? median : 1;
  return lags->median;
}

/* ---- one rank ---- */

static void learn(watched *at, const even_lag_step *step) {
  bool taken = even_model_take(&at->model, step->samples, step->busy_seconds, step->samples == 0);
  if (at->steps % LEARN_EVERY == 0 || (taken && (at->model.count < FRESH || even_model_surprised(&at->model)))) {
    even_model_learn(&at->model);
  }
}

static void set_usual(watched *at, double share, double seconds) {
  at->usual_share = share;
  at->usual = seconds;
  at->settled = 0;
}

static double line(const watched *at, double samples) {
  return even_model_line(&at->model, samples);
}

/* The usual time follows what is faster, slowly what is slower, and the share. Of a rank that is not suspected. */
static void follow(watched *at) {
  double share = (double)(at->share > 0 ? at->share : 1);
  if (at->usual == 0) {
    if (at->steps >= EVEN_LAG_LEARNS && at->share > 0) {
      set_usual(at, share, line(at, share));
    }
    return;
  }
  bool other = at->share > 0 && fabs(share - at->usual_share) > other_share * at->usual_share;
  at->settled = other ? at->settled + 1 : 0;
  if (at->slowness < 1) {
    at->usual *= 1 + (at->slowness - 1) / shorter_steps;
  } else if (at->slowness > 1) {
    at->usual *= 1 + leak;
  }
  if (at->settled >= SETTLED) { /* as slow as it is at the old one, so that creeping is not forgotten */
    set_usual(at, share, line(at, share) / fmax(1, line(at, at->usual_share) / at->usual));
  }
}

/* What its steps take as multiples of what they could take, by their shares, whatever part of that is fixed. */
static void take_shown(watched *at, double seconds) {
  double part = (double)(at->share > 0 ? at->share : 1) / at->usual_share;
  double fixed = fmin(1, fmax(most_fixed, at->model.fixed_seconds / line(at, at->usual_share)));
  double most = at->usual * (part < 1 ? fixed + (1 - fixed) * part : part);
  at->shown += (fmin(most_shown, seconds / most) - at->shown) / shown_steps;
}

static bool proven(const even_lags *lags, const watched *at) {
  return at->shown >= fmin(most_certain, part_of(lags, certain_part));
}

static void begin_suspicion(watched *at, double slowness) {
  at->suspected = true;
  at->slow_steps = at->caught_up = 0;
  at->slow_sum = 0;
  at->lag = (even_lag){.from_step = at->fine_step + 1,
                       .from_ns = at->fine_ns,
                       .to_step = at->last_step,
                       .to_ns = at->last_ns,
                       .factor = slowness};
}

static void end_suspicion(watched *at) {
  at->suspected = at->lag.lags = false;
}

/* Of a rank that is suspected, or lags; `expected`: seconds, by the model before this step. */
static void judge(const even_lags *lags, watched *at, const even_lag_step *step, double slowness, double expected) {
  bool slow = at->lag.lags ? slowness >= part_of(lags, ends_part)
                           : slowness >= part_of(lags, doubtful_part) && proven(lags, at);
  if (slow) {
    at->caught_up = 0;
    at->slow_steps++;
    at->slow_sum += slowness;
    if (!(step->busy_seconds * usual_step < expected)) { /* else it may be the first that is as fast as before */
      at->lag.to_step = step->step;
      at->lag.to_ns = step->end_ns;
    }
    at->lag.factor = at->slow_sum / (double)at->slow_steps;
  } else if (!at->lag.lags) {
    end_suspicion(at);
    return;
  } else {
    at->caught_up_ns = at->caught_up == 0 ? step->end_ns - step->duration_ns : at->caught_up_ns;
    at->caught_up++;
  }
  const uint64_t least_ns = (uint64_t)(lags->seconds * 1e9);
  if (slow && at->slow_steps >= EVEN_LAG_STEPS && step->end_ns - at->lag.from_ns >= least_ns) {
    at->lag.lags = true;
  } else if (at->caught_up >= EVEN_LAG_STEPS / 2 && step->end_ns - at->caught_up_ns >= least_ns / 2) {
    end_suspicion(at);
  }
}

void even_lags_take(even_lags *lags, size_t rank, const even_lag_step *step) {
  if (rank >= lags->ranks || step->samples < 0 || !(step->busy_seconds >= 0) || !isfinite(step->busy_seconds)) {
    return;
  }
  watched *at = &lags->rank[rank];
  if (at->steps > 0 && !at->suspected && step->step + SETTLED < at->last_step) {
    even_lags_forget(lags, rank); /* it began anew far before */
  }
  double expected = at->model.known ? even_model_at(&at->model, step->samples) : (double)NAN;
  if (at->steps++ == 0) {
    at->first_step = step->step;
    at->first_ns = step->end_ns - step->duration_ns;
    at->fine_step = step->step - 1; /* wraps at 0, and comes back */
    at->fine_ns = at->first_ns;
  }
  at->share = step->samples;
  learn(at, step);
  at->slowness = at->usual > 0 && at->model.known ? line(at, at->usual_share) / at->usual : 1;
  at->last_step = step->step;
  at->last_ns = step->end_ns;
  if (at->usual > 0 && at->model.known) {
    take_shown(at, step->busy_seconds);
  }
  bool matters = at->slowness > fmin(usual_step, part_of(lags, ends_part)); /* to whom: the others are not cheap */
  double slowness = matters ? at->slowness / others_slowness(lags, rank) : at->slowness;
  if (!at->suspected && at->usual > 0 && slowness >= lags->begins && proven(lags, at)) {
    begin_suspicion(at, slowness);
  }
  if (at->suspected) {
    judge(lags, at, step, slowness, expected);
  } else if (at->model.known) {
    follow(at);
  }
  if (!at->suspected && !(step->busy_seconds > usual_step * expected)) {
    at->fine_step = step->step;
    at->fine_ns = step->end_ns;
  }
}

/* ---- beside the others ---- */

/* Of the ranks in `in`, but one: the median time for so many samples. */
static double median_time(const even_lags *lags, size_t but, const bool *in, double samples) {
  size_t count = 0;
  for (size_t r = 0; r < lags->ranks; r++) {
    if (r != but && in[r] && lags->rank[r].model.known && lags->rank[r].steps >= EVEN_LAG_LEARNS) {
      lags->room[count++] = line(&lags->rank[r], samples);
    }
  }
  return median_of(lags->room, count);
}

double even_lags_beside(const even_lags *lags, size_t rank, const bool *beside) {
  const watched *at = &lags->rank[rank];
  double samples = 0;
  double ranks = 0;
  for (size_t r = 0; r < lags->ranks; r++) {
    samples += lags->rank[r].steps > 0 ? (double)lags->rank[r].share : 0;
    ranks += lags->rank[r].steps > 0 ? 1 : 0;
  }
  if (at->steps < EVEN_LAG_LEARNS || !at->model.known || !(samples > 0)) {
    return NAN;
  }
  return line(at, samples / ranks) / median_time(lags, rank, beside, samples / ranks);
}

size_t even_lags_slowest(const even_lags *lags, const bool *members) {
  double samples = 0;
  double count = 0;
  size_t found = SIZE_MAX;
  double most = 0;
  for (size_t r = 0; r < lags->ranks; r++) {
    samples += members[r] ? (double)lags->rank[r].share : 0;
    count += members[r] ? 1 : 0;
  }
  for (size_t r = 0; r < lags->ranks && samples > 0; r++) {
    double own = members[r] && lags->rank[r].model.known ? line(&lags->rank[r], samples / count) : 0;
    if (own > most) {
      most = own;
      found = r;
    }
  }
  return found;
}

void even_lags_since_start(even_lags *lags, size_t rank, double factor) {
  watched *at = &lags->rank[rank];
  double share = (double)(at->share > 0 ? at->share : 1);
  if (at->suspected || !at->model.known || !(factor >= lags->begins)) {
    return;
  }
  set_usual(at, share, line(at, share) / factor);
  at->slowness = factor;
  at->fine_step = at->first_step - 1;
  at->fine_ns = at->first_ns;
  begin_suspicion(at, factor);
  at->slow_steps = at->steps;
  at->slow_sum = factor * (double)at->steps;
  at->lag.lags = true;
}

/* ---- what a rank is worth ---- */

typedef struct weighing {
  size_t count; /* of members */
  size_t place; /* of the rank among them */
  int64_t batch;
  even_rank_cost *costs;
  int64_t (*samples)[TABLE_POINTS];
  double (*seconds)[TABLE_POINTS];
  int64_t *shares; /* that they have now, */
  int64_t *split;  /* and that the solver finds */
} weighing;

/* As balancer/decide.c: straight lines from (0, idle) over (1, one) on. */
static void set_table(weighing *on, size_t place, const watched *at, double factor) {
  const int64_t far = INT64_C(1) << 40;
  double idle = even_model_at(&at->model, 0) * factor;
  double one = line(at, 1) * factor;
  on->samples[place][0] = 0;
  on->samples[place][1] = 1;
  on->samples[place][2] = far;
  on->seconds[place][0] = idle < one ? idle : one;
  on->seconds[place][1] = one;
  on->seconds[place][2] = one + at->model.seconds_per_sample * factor * (double)(far - 1);
  on->costs[place] =
      (even_rank_cost){.table = {.samples = on->samples[place], .seconds = on->seconds[place], .points = TABLE_POINTS}};
}

/* A step of the members but `out`; SIZE_MAX: of all. */
static even_status step_of(const weighing *on, size_t out, bool follows, double *seconds) {
  int64_t left = 0;
  *seconds = 0;
  if (follows) { /* what is out takes no time, and no sample */
    even_rank_cost own = {.micro_batch = 0};
    if (out < on->count) {
      own = on->costs[out];
      on->costs[out] = on->costs[on->count - 1];
    }
    size_t count = out < on->count ? on->count - 1 : on->count;
    even_status status = even_balancer_solve_costs(on->costs, NULL, count, on->batch, on->split, seconds);
    if (out < on->count) {
      on->costs[out] = own;
    }
    return status;
  }
  for (size_t i = 0; i < on->count; i++) {
    left += i == out ? 0 : on->shares[i];
  }
  for (size_t i = 0; i < on->count; i++) {
    double part = left > 0 ? (double)on->shares[i] / (double)left : 1.0 / (double)on->count;
    double share = ceil(part * (double)on->batch);
    *seconds = i == out ? *seconds : fmax(*seconds, even_rank_cost_at(&on->costs[i], (int64_t)share));
  }
  return EVEN_OK;
}

static even_status weigh(const even_lags *lags, weighing *on, size_t rank, const bool *members, bool follows,
                         even_lag_use *out) {
  const watched *at = &lags->rank[rank];
  size_t place = 0;
  for (size_t r = 0; r < lags->ranks; r++) {
    if (members[r]) {
      on->shares[place] = lags->rank[r].share;
      on->place = r == rank ? place : on->place;
      on->batch += lags->rank[r].share;
      set_table(on, place++, &lags->rank[r], 1);
    }
  }
  if (on->batch < 1) {
    return even_fail(EVEN_ERR_NOT_FOUND, "no samples");
  }
  double equal = fmax(1, (double)on->batch / (double)on->count);
  double like_others = median_time(lags, rank, members, equal) / line(at, equal);
  EVEN_TRY(step_of(on, SIZE_MAX, follows, &out->with));
  EVEN_TRY(step_of(on, on->place, follows, &out->without));
  set_table(on, on->place, at, at->lag.lags ? 1 / at->slowness : 1);
  EVEN_TRY(step_of(on, SIZE_MAX, follows, &out->renewed));
  set_table(on, on->place, at, isfinite(like_others) ? like_others : 1);
  return step_of(on, SIZE_MAX, follows, &out->moved);
}

even_status even_lags_weigh(const even_lags *lags, size_t rank, const bool *members, bool follows, even_lag_use *out) {
  weighing on = {.count = 0};
  *out = (even_lag_use){NAN, NAN, NAN, NAN};
  for (size_t r = 0; r < lags->ranks; r++) {
    on.count += members[r] ? 1 : 0;
    if (members[r] && (!lags->rank[r].model.known || lags->rank[r].steps < EVEN_LAG_LEARNS)) {
      return even_fail(EVEN_ERR_NOT_FOUND, "rank %zu has not been measured for long enough", r);
    }
  }
  if (on.count < 2 || rank >= lags->ranks || !members[rank]) {
    return even_fail(EVEN_ERR_NOT_FOUND, "rank %zu is no member beside others", rank);
  }
  even_status status = EVEN_NEW_ARRAY(&on.costs, on.count);
  status = status == EVEN_OK ? even_alloc(on.count, sizeof *on.samples, (void **)&on.samples) : status;
  status = status == EVEN_OK ? even_alloc(on.count, sizeof *on.seconds, (void **)&on.seconds) : status;
  status = status == EVEN_OK ? EVEN_NEW_ARRAY(&on.shares, on.count) : status;
  status = status == EVEN_OK ? EVEN_NEW_ARRAY(&on.split, on.count) : status;
  status = status == EVEN_OK ? weigh(lags, &on, rank, members, follows, out) : status;
  even_free(on.costs);
  even_free(on.samples);
  even_free(on.seconds);
  even_free(on.shares);
  even_free(on.split);
  return status;
}
