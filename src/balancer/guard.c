/* Splits that the models do not know to be better, tried and measured against the one in force. */
#include "balancer/guard.h"

#include "balancer/floors.h"
#include "balancer/rates.h"
#include "balancer/state.h"
#include "base/alloc.h"
#include "base/fail.h"

#include <math.h>
#include <string.h>

enum {
  FIRST_CAUTION = 48,
  FIRST_MEETINGS = 25, /* more than a checkpoint remembers: no trial begins of what is replayed */
  FIRST_RELEASE = 192,
  FIRST_EQUAL = 256,
  FIRST_RETURN = 256,
  FIRST_RATES = 512,
  LONGEST_PAUSE = 8192,
  DOZEN = 12
};

static const double often = 0.15;
/* A dozen steps that differ so much from those before are not chance. */
static const double changed_by = 1.6;
/* What the trials of each question may cost of the run. */
static const double trial_cost[EVEN_GUARD_QUESTIONS] = {
    [EVEN_GUARD_CAUTION] = 0.01, [EVEN_GUARD_MEETINGS] = 0.01, [EVEN_GUARD_RELEASE] = 0.005,
    [EVEN_GUARD_MODELS] = 0.01,  [EVEN_GUARD_SIZES] = 0.01,    [EVEN_GUARD_RATES] = 0.002,
    [EVEN_GUARD_EQUAL] = 0.003,  [EVEN_GUARD_PRIOR] = 0.003,   [EVEN_GUARD_RETURN] = 0.005};
/* A gain that decides for a challenger. */
static const double least_gain = 0.015;
/* Where the models promise so much more than they did as a fixed split was measured faster, that is no longer true. */
static const double against_it = 1.15;
/* A fixed split that the models say to take so many times as long is not believed to be faster at once. */
static const double far_slower = 1.1;
/* A gain that is hoped for, and worth a trial. */
static const double hoped_gain = 0.02;
/* What is remembered of blame from one step to the next. */
static const double memory = 1.0 - 1.0 / 32.0;

static const int64_t first_pause[EVEN_GUARD_QUESTIONS] = {
    [EVEN_GUARD_CAUTION] = FIRST_CAUTION, [EVEN_GUARD_MEETINGS] = FIRST_MEETINGS, [EVEN_GUARD_RELEASE] = FIRST_RELEASE,
    [EVEN_GUARD_MODELS] = FIRST_CAUTION,  [EVEN_GUARD_SIZES] = FIRST_CAUTION,     [EVEN_GUARD_RATES] = FIRST_RATES,
    [EVEN_GUARD_EQUAL] = FIRST_EQUAL,     [EVEN_GUARD_PRIOR] = FIRST_EQUAL,       [EVEN_GUARD_RETURN] = FIRST_RETURN,
};

even_status even_guard_open(even_guard *g, even_balancer *b) {
  g->ranks = b->ranks;
  g->released = 0.9;
  EVEN_TRY(EVEN_NEW_ARRAY(&g->floors, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&g->floors_tried, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&g->met, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&g->blame, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&g->busy, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&g->scatter, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&g->bursts, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&g->watched, b->ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&g->challenger, b->ranks));
  EVEN_TRY(even_stops_open(&g->stops, b->ranks));
  for (int i = 0; i < EVEN_GUARD_QUESTIONS; i++) {
    g->next[i] = g->pause[i] = first_pause[i];
  }
  g->in_force = g->doubted = EVEN_FIXED_NONE;
  EVEN_TRY(even_fixed_open(g->fixed, b->ranks));
  return even_fixed_split(b);
}

void even_guard_close(even_guard *g) {
  even_free(g->floors);
  even_free(g->floors_tried);
  even_free(g->met);
  even_free(g->blame);
  even_free(g->busy);
  even_free(g->scatter);
  even_free(g->bursts);
  even_free(g->watched);
  even_fixed_close(g->fixed);
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
  return even_series_count(&g->trial.before) >= EVEN_GUARD_SETTLED && bursty(b);
}

static const int64_t *in_force(const even_balancer *b) {
  const even_guard *g = &b->guard;
  return g->in_force != EVEN_FIXED_NONE ? g->fixed[g->in_force].shares : b->current;
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

/* The slowest rank is blamed for what the others waited for it alone. */
static void blame(even_balancer *b, const even_step_timing *timings) {
  even_guard *g = &b->guard;
  double part = g->blame_weight > 0.0 ? 1.0 - memory : 1.0;
  double longest = 0.0;
  double second = 0.0;
  size_t slowest = 0;
  for (size_t r = 0; r < b->ranks; r++) {
    double seconds = timings[r].busy_seconds;
    g->blame[r] *= memory;
    double off = seconds - g->busy[r];
    g->bursts[r] += ((fabs(off) > EVEN_GUARD_FAR * g->busy[r] ? 1.0 : 0.0) - g->bursts[r]) * (1.0 - memory);
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
  g->busy_of += (longest - g->busy_of) * part;
  even_meetings_remember(&b->meetings, part);
  g->blame[slowest] += (longest - second) * (1.0 - memory);
  g->blame_weight += (1.0 - g->blame_weight) * (1.0 - memory);
}

static bool changed(const even_guard *g) {
  double mean = even_series_mean(&g->trial.before);
  bool differs = g->recent > mean * changed_by || g->recent * changed_by < mean;
  return even_series_count(&g->trial.before) >= EVEN_GUARD_SETTLED && differs;
}

static void begin_window(even_balancer *b) {
  even_guard *g = &b->guard;
  even_series_clear(&g->trial.before);
  memset(g->blame, 0, b->ranks * sizeof *g->blame);
  g->blame_weight = 0.0;
  memcpy(g->watched, in_force(b), b->ranks * sizeof *g->watched);
}

/* The ranks' speeds are others: how often they were far from their means says nothing of these. */
static void begin_other_speeds(even_balancer *b) {
  memset(b->guard.bursts, 0, b->ranks * sizeof *b->guard.bursts);
  b->guard.doubted = EVEN_FIXED_NONE; /* the trial that it won was of the speeds before */
  begin_window(b);
}

void even_guard_shift(even_guard *g, size_t rank, double seconds) {
  g->busy[rank] = fmax(0.0, g->busy[rank] + seconds);
}

void even_guard_begin_anew(even_balancer *b) {
  even_guard *g = &b->guard;
  g->trial.state = EVEN_TRIAL_IDLE;
  g->doubted = EVEN_FIXED_NONE;
  for (int name = 0; name < EVEN_FIXED_COUNT; name++) {
    g->fixed[name].first_steps = 0;
  }
  begin_window(b);
}

even_status even_guard_caps_changed(even_balancer *b) {
  b->guard.trial.state = EVEN_TRIAL_IDLE;
  b->guard.doubted = EVEN_FIXED_NONE;
  EVEN_TRY(even_fixed_split(b));
  begin_window(b);
  return EVEN_OK;
}

/* `again`: after a refusal, whether the same may well be asked as soon as this time. */
static void wait(even_balancer *b, even_guard_question question, bool won, bool again) {
  even_guard *g = &b->guard;
  double mean = even_series_mean(&g->trial.before);
  double lost = g->trial.lost + even_change_seconds(&b->change); /* for the way back */
  double steps = mean > 0.0 && lost > 0.0 ? lost / mean / trial_cost[question] : 0.0;
  int64_t *pause = &g->pause[question];
  if (won) {
    *pause = first_pause[question];
  }
  int64_t cost = steps < (double)LONGEST_PAUSE ? (int64_t)steps : LONGEST_PAUSE;
  g->next[question] = b->steps + (*pause > cost ? *pause : cost);
  if (!won && !again && *pause < LONGEST_PAUSE) {
    *pause *= 2;
  }
}

static even_guard_question about(even_fixed_name name) {
  return name == EVEN_FIXED_EQUAL ? EVEN_GUARD_EQUAL : EVEN_GUARD_PRIOR;
}

/* How many times the step of the models' split the fixed one's is, by the models. */
static double against(even_balancer *b, even_fixed_name name) {
  even_balancer_believe(b, b->batch);
  double models = even_balancer_step_seconds(b, b->current);
  return models > 0.0 ? even_balancer_step_seconds(b, b->guard.fixed[name].shares) / models : 1.0;
}

/* A fixed split and the models' were compared: the answer holds for both questions, and what the fixed one took as the
 * run began is no reason any more to ask again. */
static void answer_both(even_balancer *b, bool won) {
  even_guard *g = &b->guard;
  bool back = g->question == EVEN_GUARD_RETURN;
  even_fixed *fixed = &g->fixed[g->compared];
  double before = even_series_mean(&g->trial.before);
  double challenger = even_series_mean(&g->trial.challenger);
  fixed->seconds = back ? before : challenger;
  fixed->balanced_seconds = back ? challenger : before;
  fixed->first_steps = 0;
  if (won) {
    even_guard_question reverse = back ? about(g->compared) : EVEN_GUARD_RETURN;
    g->in_force = back ? EVEN_FIXED_NONE : g->compared;
    g->against = against(b, g->compared);
    g->next[reverse] = b->steps + g->pause[reverse];
  }
}

static bool on_fixed(even_guard_question question) {
  return question == EVEN_GUARD_EQUAL || question == EVEN_GUARD_PRIOR || question == EVEN_GUARD_RETURN;
}

/* Whether a fixed split has won by chance, maybe: where ranks come and go, a trial of 32 steps may have met their best
 * ones. What won a second time has won. */
static bool doubts(even_balancer *b, bool won) {
  even_guard *g = &b->guard;
  bool first = g->doubted != g->compared;
  g->doubted = EVEN_FIXED_NONE;
  if (won && first && g->question == about(g->compared) && against(b, g->compared) > far_slower) {
    g->doubted = g->compared;
    begin_window(b);
  }
  return g->doubted != EVEN_FIXED_NONE;
}

static void conclude(even_balancer *b, bool won) {
  even_guard *g = &b->guard;
  even_guard_question question = g->question;
  if (on_fixed(question) && doubts(b, won)) {
    return;
  }
  bool again = question == EVEN_GUARD_MEETINGS && !even_meetings_answer(b, won);
  wait(b, question, won, again);
  if (on_fixed(question)) {
    answer_both(b, won);
  } else if (won) {
    memcpy(b->current, g->challenger, b->ranks * sizeof *b->current);
    memcpy(g->floors, g->floors_tried, b->ranks * sizeof *g->floors);
  }
  if (!won && (question == EVEN_GUARD_CAUTION || question == EVEN_GUARD_MODELS)) {
    even_floors_learn(b);
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

void even_guard_begin(even_balancer *b, even_guard_question question) {
  even_guard *g = &b->guard;
  memcpy(g->challenger, b->candidate, b->ranks * sizeof *g->challenger);
  g->question = question;
  even_stops_begin(&g->stops);
  even_trial_begin(&g->trial, least_gain);
}

void even_guard_wait(even_balancer *b, even_guard_question question) {
  b->guard.next[question] = b->steps + EVEN_GUARD_SETTLED;
}

void even_guard_ask_anew(even_balancer *b, even_guard_question question) {
  b->guard.pause[question] = first_pause[question];
  even_guard_wait(b, question);
}

even_status even_guard_candidate(even_balancer *b, bool *other) {
  even_guard *g = &b->guard;
  double *floors = g->floors;
  g->floors = g->floors_tried;
  even_status status = even_balancer_propose(b, NULL);
  g->floors = floors;
  EVEN_TRY(status);
  *other = !same(b, b->candidate, b->current);
  return EVEN_OK;
}

even_status even_guard_challenge(even_balancer *b, even_guard_question question, bool *begun) {
  EVEN_TRY(even_guard_candidate(b, begun));
  if (*begun) {
    even_guard_begin(b, question);
  } else {
    even_guard_wait(b, question);
  }
  return EVEN_OK;
}

static even_status models(even_balancer *b, bool *begun) {
  memcpy(b->guard.floors_tried, b->guard.floors, b->ranks * sizeof *b->guard.floors);
  return even_guard_challenge(b, EVEN_GUARD_MODELS, begun);
}

/* With floors as they are, where there is a candidate. */
static void try_candidate(even_balancer *b, even_guard_question question, bool any) {
  even_guard *g = &b->guard;
  if (any) {
    memcpy(g->floors_tried, g->floors, b->ranks * sizeof *g->floors);
    even_guard_begin(b, question);
  } else {
    even_guard_wait(b, question);
  }
}

/* Where the time of a rank is no straight line, its cliffs lie between sizes that ran. */
static even_status sizes(even_balancer *b, bool *begun) {
  bool bent = false;
  for (size_t r = 0; r < b->ranks; r++) {
    bent = bent || even_model_bent(&b->models[r]);
  }
  if (bent) {
    EVEN_TRY(even_balancer_hope(b, hoped_gain, begun));
  }
  try_candidate(b, EVEN_GUARD_SIZES, *begun);
  return EVEN_OK;
}

static even_status rates(even_balancer *b, bool *begun) {
  if (!bursty(b)) {
    EVEN_TRY(even_rates_hope(b, begun));
  }
  try_candidate(b, EVEN_GUARD_RATES, *begun);
  return EVEN_OK;
}

/* The challenger is the fixed split; or, where that is in force, the models'. */
static void compare(even_balancer *b, even_fixed_name name, bool *begun) {
  even_guard *g = &b->guard;
  bool back = g->in_force == name;
  even_guard_question question = back ? EVEN_GUARD_RETURN : about(name);
  if (!even_fixed_asked(b, name)) {
    even_guard_wait(b, question);
    g->doubted = EVEN_FIXED_NONE;
    return;
  }
  *begun = true;
  g->question = question;
  g->compared = name;
  memcpy(g->challenger, back ? b->current : g->fixed[name].shares, b->ranks * sizeof *g->challenger);
  even_trial_begin(&g->trial, least_gain);
}

/* A fixed split is tried at once where the models' is slower than it was as the run began, else when the trial costs
 * next to nothing of the steps since the last. */
static bool is_due(even_balancer *b, even_fixed_name name, double mean) {
  even_guard *g = &b->guard;
  even_guard_question question = about(name);
  if (g->doubted == name) {
    return true;
  }
  if (b->steps < g->next[question]) {
    return even_fixed_was_faster(&g->fixed[name], mean) && even_fixed_asked(b, name);
  }
  double changes = 2.0 * even_change_seconds(&b->change) / mean;
  return (double)(b->steps - g->next[question] + g->pause[question]) >=
         (even_fixed_trial_steps(b, name, mean) + changes) / trial_cost[question];
}

void even_guard_pass(even_balancer *b) {
  even_trial *trial = &b->guard.trial;
  if (trial->state == EVEN_TRIAL_CHALLENGER_RUNS) {
    trial->lost += fmax(0.0, b->meetings.longest - even_series_mean(&trial->before));
  }
}

/* A trial changes shares twice, for its steps and back: the run so far must be worth that. */
static bool may_ask(const even_balancer *b, even_guard_question question) {
  double run = (double)b->steps * even_series_mean(&b->guard.trial.before);
  return b->steps >= b->guard.next[question] && run * trial_cost[question] >= 2.0 * even_change_seconds(&b->change);
}

/* A fixed split was measured faster at speeds that are no longer the ranks': the models' is followed again at once. */
static void leave_fixed(even_balancer *b) {
  even_guard *g = &b->guard;
  even_fixed_name name = g->in_force;
  if (against(b, name) > fmax(g->against, 1.0) * against_it) {
    g->in_force = EVEN_FIXED_NONE;
    g->pause[EVEN_GUARD_RETURN] = first_pause[EVEN_GUARD_RETURN];
    g->next[about(name)] = b->steps + g->pause[about(name)];
    begin_other_speeds(b);
  }
}

/* What is asked before as many steps of a split are there as others have: where waits are long, they are no chance. */
static even_status early(even_balancer *b) {
  bool settled = even_series_count(&b->guard.trial.before) >= EVEN_GUARD_SETTLED;
  bool begun = false;
  if (settled && b->guard.in_force == EVEN_FIXED_NONE && even_meetings_are_long(b) && may_ask(b, EVEN_GUARD_MEETINGS)) {
    EVEN_TRY(even_meetings_ask(b, &begun));
  }
  return EVEN_OK;
}

static even_status ask(even_balancer *b) {
  even_guard *g = &b->guard;
  bool begun = false;
  if (even_series_count(&g->trial.before) < EVEN_TRIAL_CHALLENGE) {
    return early(b);
  }
  if (g->in_force != EVEN_FIXED_NONE) {
    if (may_ask(b, EVEN_GUARD_RETURN)) {
      compare(b, g->in_force, &begun);
    }
    return EVEN_OK;
  }
  if (may_ask(b, EVEN_GUARD_CAUTION)) {
    EVEN_TRY(even_floors_caution(b, &begun));
  }
  if (!begun && may_ask(b, EVEN_GUARD_MEETINGS)) {
    EVEN_TRY(even_meetings_ask(b, &begun));
  }
  if (!begun && may_ask(b, EVEN_GUARD_RELEASE)) {
    EVEN_TRY(even_floors_release(b, &begun));
  }
  if (!begun && bursty(b) && may_ask(b, EVEN_GUARD_MODELS)) {
    EVEN_TRY(models(b, &begun));
  }
  if (!begun && may_ask(b, EVEN_GUARD_SIZES)) {
    EVEN_TRY(sizes(b, &begun));
  }
  if (!begun && may_ask(b, EVEN_GUARD_RATES)) {
    EVEN_TRY(rates(b, &begun));
  }
  int names = b->policy == EVEN_POLICY_AUTO ? EVEN_FIXED_COUNT : EVEN_FIXED_EQUAL + 1;
  for (int name = 0; !begun && name < names; name++) {
    if (is_due(b, (even_fixed_name)name, even_series_mean(&g->trial.before))) {
      compare(b, (even_fixed_name)name, &begun);
    }
  }
  return EVEN_OK;
}

even_status even_guard_take(even_balancer *b, const even_step_timing *timings) {
  even_guard *g = &b->guard;
  if (!even_balancer_whole(b, timings)) {
    return EVEN_OK;
  }
  if (!running(g) && changed(g)) {
    begin_other_speeds(b);
  } else if (!running(g) && !same(b, g->watched, in_force(b))) {
    begin_window(b);
  }
  if (!running(g) && g->in_force != EVEN_FIXED_NONE && even_series_count(&g->trial.before) < EVEN_TRIAL_CHALLENGE) {
    leave_fixed(b); /* the window has just begun: something has changed */
  }
  double longest = b->meetings.longest;
  for (int name = 0; b->steps > 1 && b->steps < EVEN_TRIAL_CHALLENGE && name < EVEN_FIXED_COUNT; name++) {
    if (distance(b, timings, g->fixed[name].shares) == 0) {
      even_fixed_take(&g->fixed[name], longest);
    }
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
