/* Splits that the models do not know to be better, tried and measured against the one in force. */
#include "balancer/guard.h"

#include "balancer/state.h"
#include "base/alloc.h"
#include "base/fail.h"

#include <math.h>
#include <string.h>

enum {
  FIRST_CAUTION = 48,
  FIRST_RELEASE = 192,
  FIRST_EQUAL = 256,
  FIRST_RETURN = 256,
  LONGEST_PAUSE = 8192,
  MOST_CUTS = 12,
  SETTLED = 16, /* steps of a split before it counts as measured */
  DOZEN = 12
};

/* A rank whose time is often further than this part from its mean is bursty. */
static const double far = 1.0 / 3.0;
static const double often = 0.15;
/* A dozen steps that differ so much from those before are not chance. */
static const double changed_by = 1.6;
/* What the trials of each question may cost of the run. */
static const double trial_cost[EVEN_GUARD_QUESTIONS] = {[EVEN_GUARD_CAUTION] = 0.01,
                                                        [EVEN_GUARD_RELEASE] = 0.005,
                                                        [EVEN_GUARD_MODELS] = 0.01,
                                                        [EVEN_GUARD_EQUAL] = 0.003,
                                                        [EVEN_GUARD_RETURN] = 0.005};
/* Waiting for one rank alone that is worth a trial, as a part of a step. */
static const double least_blame = 0.03;
/* A rank that is busy for less of the step than this has no lack of time on the whole. */
static const double mostly_waits = 0.95;
/* A gain that decides for a challenger. */
static const double least_gain = 0.015;
/* What is remembered of blame from one step to the next. */
static const double memory = 1.0 - 1.0 / 32.0;

static const int64_t first_pause[EVEN_GUARD_QUESTIONS] = {
    [EVEN_GUARD_CAUTION] = FIRST_CAUTION, [EVEN_GUARD_RELEASE] = FIRST_RELEASE, [EVEN_GUARD_MODELS] = FIRST_CAUTION,
    [EVEN_GUARD_EQUAL] = FIRST_EQUAL,     [EVEN_GUARD_RETURN] = FIRST_RETURN,
};

even_status even_guard_open(even_guard *g, even_balancer *b) {
  g->ranks = b->ranks;
  g->released = 0.9;
  EVEN_TRY(EVEN_NEW_ARRAY(&g->floors, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&g->floors_tried, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&g->blame, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&g->busy, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&g->scatter, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&g->bursts, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&g->watched, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&g->equal, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&g->challenger, b->ranks));
  EVEN_TRY(even_stops_open(&g->stops, b->ranks));
  for (int i = 0; i < EVEN_GUARD_QUESTIONS; i++) {
    g->next[i] = g->pause[i] = first_pause[i];
  }
  even_balancer_expect_equal(b);
  return even_solve(&b->room, b->tables, b->caps, b->batch, g->equal, NULL);
}

void even_guard_close(even_guard *g) {
  even_free(g->floors);
  even_free(g->floors_tried);
  even_free(g->blame);
  even_free(g->busy);
  even_free(g->scatter);
  even_free(g->bursts);
  even_free(g->watched);
  even_free(g->equal);
  even_free(g->challenger);
  even_stops_close(&g->stops);
}

static bool running(const even_guard *g) {
  return g->trial.state != EVEN_TRIAL_IDLE;
}

static bool bursty(const even_balancer *b) {
  for (size_t r = 0; r < b->ranks; r++) {
    if (b->guard.bursts[r] > often) {
      return true;
    }
  }
  return false;
}

bool even_guard_holds(const even_balancer *b) {
  const even_guard *g = &b->guard;
  if (running(g)) {
    return true;
  }
  return even_series_count(&g->trial.before) >= SETTLED && bursty(b);
}

static const int64_t *in_force(const even_balancer *b) {
  return b->guard.on_equal ? b->guard.equal : b->current;
}

const int64_t *even_guard_shares(const even_balancer *b) {
  return b->guard.trial.state == EVEN_TRIAL_CHALLENGER_RUNS ? b->guard.challenger : in_force(b);
}

static bool same(const even_balancer *b, const int64_t *one, const int64_t *other) {
  return memcmp(one, other, b->ranks * sizeof *one) == 0;
}

/* Both are splits of one batch, so that this is at most twice the batch: more than an int64_t holds, not than this. */
static uint64_t distance(const even_balancer *b, const even_step_timing *timings, const int64_t *shares) {
  uint64_t sum = 0;
  for (size_t r = 0; r < b->ranks; r++) {
    int64_t off = timings[r].samples - shares[r];
    sum += (uint64_t)(off < 0 ? -off : off);
  }
  return sum;
}

static bool whole(const even_balancer *b, const even_step_timing *timings) {
  int64_t left = b->batch;
  for (size_t r = 0; r < b->ranks; r++) {
    if (timings[r].samples > left) {
      return false;
    }
    left -= timings[r].samples;
  }
  return left == 0;
}

/* The slowest rank is blamed for what the others waited for it alone. */
static void blame(even_balancer *b, const even_step_timing *timings) {
  even_guard *g = &b->guard;
  double longest = 0.0;
  double second = 0.0;
  size_t slowest = 0;
  for (size_t r = 0; r < b->ranks; r++) {
    double seconds = timings[r].busy_seconds;
    g->blame[r] *= memory;
    double part = g->blame_weight > 0.0 ? 1.0 - memory : 1.0;
    double off = seconds - g->busy[r];
    g->bursts[r] += ((fabs(off) > far * g->busy[r] ? 1.0 : 0.0) - g->bursts[r]) * (1.0 - memory);
    g->busy[r] += off * part;
    g->scatter[r] = g->blame_weight > 0.0 ? memory * (g->scatter[r] + part * off * off) : 0.0; /* West (1979) */
    if (seconds > longest) {
      second = longest;
      longest = seconds;
      slowest = r;
    } else if (seconds > second) {
      second = seconds;
    }
  }
  g->blame[slowest] += (longest - second) * (1.0 - memory);
  g->blame_weight += (1.0 - g->blame_weight) * (1.0 - memory);
}

static bool changed(const even_guard *g) {
  double mean = even_series_mean(&g->trial.before);
  bool differs = g->recent > mean * changed_by || g->recent * changed_by < mean;
  return even_series_count(&g->trial.before) >= SETTLED && differs;
}

static void begin_window(even_balancer *b) {
  even_guard *g = &b->guard;
  even_series_clear(&g->trial.before);
  memset(g->blame, 0, b->ranks * sizeof *g->blame);
  g->blame_weight = 0.0;
  memcpy(g->watched, in_force(b), b->ranks * sizeof *g->watched);
}

static void wait(even_balancer *b, even_guard_question question, bool won) {
  even_guard *g = &b->guard;
  double mean = even_series_mean(&g->trial.before);
  double steps = mean > 0.0 && g->trial.lost > 0.0 ? g->trial.lost / mean / trial_cost[question] : 0.0;
  int64_t *pause = &g->pause[question];
  if (won) {
    *pause = first_pause[question];
  }
  int64_t cost = steps < (double)LONGEST_PAUSE ? (int64_t)steps : LONGEST_PAUSE;
  g->next[question] = b->steps + (*pause > cost ? *pause : cost);
  if (!won && *pause < LONGEST_PAUSE) {
    *pause *= 2;
  }
}

/* Equal and balanced shares were compared: the answer holds for both questions, and what equal shares took as the run
 * began is no reason any more to ask again. */
static void answer_both(even_balancer *b, bool won) {
  even_guard *g = &b->guard;
  bool equal = g->question == EVEN_GUARD_EQUAL;
  double before = even_series_mean(&g->trial.before);
  double challenger = even_series_mean(&g->trial.challenger);
  g->equal_seconds = equal ? challenger : before;
  g->balanced_seconds = equal ? before : challenger;
  g->first_equals = 0;
  if (won) {
    even_guard_question reverse = equal ? EVEN_GUARD_RETURN : EVEN_GUARD_EQUAL;
    g->on_equal = equal;
    g->next[reverse] = b->steps + g->pause[reverse];
  }
}

/* What a slower challenger has told: a rank that got more, and was stopped for it, needs so many seconds for a sample.
 */
static void learn_floors(even_balancer *b) {
  even_guard *g = &b->guard;
  double mean = even_series_mean(&g->trial.challenger);
  for (size_t r = 0; r < b->ranks; r++) {
    if (g->challenger[r] > b->current[r] && !(g->floors[r] > 0.0) && even_stops_of(&g->stops, r, mean, g->bursts[r])) {
      g->floors[r] = mean / (double)g->challenger[r];
    }
  }
}

static void conclude(even_balancer *b, bool won) {
  even_guard *g = &b->guard;
  even_guard_question question = g->question;
  wait(b, question, won);
  if (question == EVEN_GUARD_EQUAL || question == EVEN_GUARD_RETURN) {
    answer_both(b, won);
  } else if (won) {
    memcpy(b->current, g->challenger, b->ranks * sizeof *b->current);
    memcpy(g->floors, g->floors_tried, b->ranks * sizeof *g->floors);
  }
  if (!won && (question == EVEN_GUARD_CAUTION || question == EVEN_GUARD_MODELS)) {
    learn_floors(b);
  }
  if (question == EVEN_GUARD_CAUTION) {
    g->alone = !won && !g->alone;
  }
  if (question == EVEN_GUARD_RELEASE) {
    g->released = won ? g->released * g->released : 0.9;
  }
  if (won) {
    begin_window(b);
    g->trial.before = g->trial.challenger;
  }
}

/* Whether `g->floors_tried` lead to another split, which then is the challenger. */
static even_status challenge(even_balancer *b, even_guard_question question, bool *begun) {
  even_guard *g = &b->guard;
  double *floors = g->floors;
  g->floors = g->floors_tried;
  even_status status = even_balancer_propose(b, NULL);
  g->floors = floors;
  EVEN_TRY(status);
  *begun = !same(b, b->candidate, b->current);
  if (*begun) {
    memcpy(g->challenger, b->candidate, b->ranks * sizeof *g->challenger);
    g->question = question;
    even_stops_begin(&g->stops);
    even_trial_begin(&g->trial, least_gain);
  } else {
    g->next[question] = b->steps + SETTLED; /* nothing to ask now */
  }
  return EVEN_OK;
}

/* Whether the rank is fast on the whole, and stopped now and then: by the spread of its times, for chance alone does
 * not make a third of the mean. */
static bool stopped(const even_balancer *b, size_t rank, double mean) {
  const even_guard *g = &b->guard;
  double spread = far * g->busy[rank];
  return b->current[rank] > 0 && g->busy[rank] < mostly_waits * mean && g->scatter[rank] > spread * spread;
}

/* The worst rank gets less; not at the cost of others that are stopped, too, unless it is tried alone. */
static void set_floors(even_balancer *b, size_t worst, double mean) {
  even_guard *g = &b->guard;
  for (size_t r = 0; r < b->ranks; r++) {
    bool held = r == worst || (!g->alone && stopped(b, r, mean));
    g->floors_tried[r] = held ? mean / (double)b->current[r] : g->floors[r];
  }
}

static even_status caution(even_balancer *b, bool *begun) {
  even_guard *g = &b->guard;
  double mean = even_series_mean(&g->trial.before);
  size_t worst = b->ranks;
  double most = 0.0;
  for (size_t r = 0; r < b->ranks; r++) {
    bool blamed = g->blame[r] > least_blame * mean * g->blame_weight && g->busy[r] < mostly_waits * mean;
    if (blamed && g->scatter[r] > most && b->current[r] > 0) {
      worst = r;
      most = g->scatter[r];
    }
  }
  if (worst == b->ranks) {
    return EVEN_OK;
  }
  set_floors(b, worst, mean);
  EVEN_TRY(challenge(b, EVEN_GUARD_CAUTION, begun));
  if (!*begun) {
    g->alone = !g->alone;
    set_floors(b, worst, mean);
    EVEN_TRY(challenge(b, EVEN_GUARD_CAUTION, begun));
  }
  return EVEN_OK;
}

static even_status release(even_balancer *b, bool *begun) {
  even_guard *g = &b->guard;
  bool any = false;
  for (size_t r = 0; r < b->ranks; r++) {
    g->floors_tried[r] = g->floors[r];
    any = any || g->floors[r] > 0.0;
  }
  if (!any) {
    g->next[EVEN_GUARD_RELEASE] = b->steps + SETTLED;
  }
  for (int cuts = 0; any && !*begun && cuts < MOST_CUTS; cuts++) {
    for (size_t r = 0; r < b->ranks; r++) {
      g->floors_tried[r] *= g->released;
    }
    EVEN_TRY(challenge(b, EVEN_GUARD_RELEASE, begun));
  }
  return EVEN_OK;
}

static even_status models(even_balancer *b, bool *begun) {
  memcpy(b->guard.floors_tried, b->guard.floors, b->ranks * sizeof *b->guard.floors);
  return challenge(b, EVEN_GUARD_MODELS, begun);
}

static void against_equal(even_balancer *b, bool *begun) {
  even_guard *g = &b->guard;
  if (same(b, b->current, g->equal)) {
    g->next[g->on_equal ? EVEN_GUARD_RETURN : EVEN_GUARD_EQUAL] = b->steps + SETTLED;
    return;
  }
  *begun = true;
  g->question = g->on_equal ? EVEN_GUARD_RETURN : EVEN_GUARD_EQUAL;
  memcpy(g->challenger, g->on_equal ? b->current : g->equal, b->ranks * sizeof *g->challenger);
  even_trial_begin(&g->trial, least_gain);
}

/* Equal shares are tried at once where balanced ones are slower than equal ones were as the run began, else when the
 * trial costs next to nothing of the steps since the last. */
static bool equal_is_due(even_balancer *b, double mean) {
  even_guard *g = &b->guard;
  if (b->steps < g->next[EVEN_GUARD_EQUAL]) {
    return g->first_equals >= 3 && mean > g->first_equal / g->first_equals;
  }
  even_balancer_believe(b, b->batch);
  double loss = even_balancer_step_seconds(b, g->equal) / mean - 1.0;
  double steps = loss > 0.0 ? fmin(loss * (double)EVEN_TRIAL_CHALLENGE, 4.0 + 4.0 * loss) : 0.0;
  return (double)(b->steps - g->next[EVEN_GUARD_EQUAL] + g->pause[EVEN_GUARD_EQUAL]) >=
         steps / trial_cost[EVEN_GUARD_EQUAL];
}

static even_status ask(even_balancer *b) {
  even_guard *g = &b->guard;
  bool begun = false;
  if (even_series_count(&g->trial.before) < EVEN_TRIAL_CHALLENGE) {
    return EVEN_OK;
  }
  if (g->on_equal) {
    if (b->steps >= g->next[EVEN_GUARD_RETURN]) {
      against_equal(b, &begun);
    }
    return EVEN_OK;
  }
  if (b->steps >= g->next[EVEN_GUARD_CAUTION]) {
    EVEN_TRY(caution(b, &begun));
  }
  if (!begun && b->steps >= g->next[EVEN_GUARD_RELEASE]) {
    EVEN_TRY(release(b, &begun));
  }
  if (!begun && bursty(b) && b->steps >= g->next[EVEN_GUARD_MODELS]) {
    EVEN_TRY(models(b, &begun));
  }
  if (!begun && equal_is_due(b, even_series_mean(&g->trial.before))) {
    against_equal(b, &begun);
  }
  return EVEN_OK;
}

even_status even_guard_take(even_balancer *b, const even_step_timing *timings) {
  even_guard *g = &b->guard;
  if (!whole(b, timings)) {
    return EVEN_OK;
  }
  if (!running(g) && (changed(g) || !same(b, g->watched, in_force(b)))) {
    if (changed(g)) {
      memset(g->bursts, 0, b->ranks * sizeof *g->bursts);
    }
    begin_window(b);
  }
  double longest = 0.0;
  for (size_t r = 0; r < b->ranks; r++) {
    longest = fmax(longest, timings[r].busy_seconds);
  }
  if (b->steps > 1 && b->steps < EVEN_TRIAL_CHALLENGE && distance(b, timings, g->equal) == 0) {
    g->first_equal += longest;
    g->first_equals++;
  }
  bool challenger = running(g) && distance(b, timings, g->challenger) < distance(b, timings, in_force(b));
  if (!challenger && distance(b, timings, in_force(b)) > b->ranks) {
    return EVEN_OK; /* loaded before the shares changed */
  }
  if (!running(g)) {
    blame(b, timings);
    g->recent += (longest - g->recent) / (double)DOZEN;
  }
  if (challenger && g->trial.state == EVEN_TRIAL_CHALLENGER_RUNS) {
    even_stops_take(&g->stops, timings);
  }
  even_trial_result result = even_trial_take(&g->trial, challenger, longest);
  if (result != EVEN_TRIAL_GOES_ON) {
    conclude(b, result == EVEN_TRIAL_WON);
  }
  return running(g) ? EVEN_OK : ask(b);
}

bool even_balancer_on_equal(const even_balancer *b, double *balanced_seconds, double *equal_seconds) {
  if (balanced_seconds != NULL) {
    *balanced_seconds = b->guard.balanced_seconds;
  }
  if (equal_seconds != NULL) {
    *equal_seconds = b->guard.equal_seconds;
  }
  return b->guard.on_equal;
}
