/* Waits within a step; see meetings.h. */
#include "balancer/meetings.h"

#include "balancer/state.h"
#include "base/fail.h"

#include <math.h>
#include <string.h>

/* Nobody's pass is longer. */
static const double longest_seconds = 1e9;
/* Waits that are worth a trial, as a part of a step. */
static const double least_waits = 0.05;
/* Where they are as much, half as many steps show it. */
static const double long_waits = 0.15;
/* A candidate must promise this part of a step, were this part of the waits left in it. */
static const double hoped_gain = 0.02;
static const double left = 0.5;
/* A rank whose samples take so many times as long as the fastest one's is a slow one. */
static const double slow = 1.25;

/* What is asked in a round, of each rank in turn. */
typedef enum kind {
  LESS,  /* a sample takes a slow rank as long as a step did, per sample of its share, waits included */
  NONE,  /* as long as the step */
  HALF,  /* as the first, of half the waits */
  OTHERS /* as the first, of ranks that are not slow */
} kind;

_Static_assert((int)OTHERS + 1 == EVEN_MEETINGS_KINDS, "each kind is asked of each rank");

enum {
  NOBODY_MEETS = 64, /* steps without any wait: no split makes them so where ranks meet */
  MOST_TURNS = 16    /* looked at in one step, until one leads to another split */
};

/* What ranks were held back for is gone: their models decide again, and where waits come back they are asked of anew.
 */
static void forget(even_balancer *b) {
  even_guard *g = &b->guard;
  for (size_t r = 0; r < b->ranks; r++) {
    g->floors[r] = g->met[r] ? 0.0 : g->floors[r];
    g->met[r] = false;
  }
  even_guard_ask_anew(b, EVEN_GUARD_MEETINGS);
}

void even_meetings_take(even_balancer *b, const even_step_timing *told, const even_step_timing *timings,
                        const double *pass_seconds) {
  even_meetings *m = &b->meetings;
  double busy = 0.0;
  double pass = 0.0;
  for (size_t r = 0; r < b->ranks; r++) {
    busy = fmax(busy, timings[r].busy_seconds);
    if (pass_seconds != NULL && pass_seconds[r] > 0.0) {
      double own = timings[r].busy_seconds - told[r].busy_seconds; /* of the exchange: see exchange.h */
      pass = fmax(pass, fmin(pass_seconds[r], longest_seconds) + own);
    }
  }
  m->alone = pass > 0.0 ? 0 : m->alone + 1;
  if (m->alone == NOBODY_MEETS) {
    forget(b);
  }
  m->longest = fmax(busy, pass);
  m->waits = m->longest - busy;
}

void even_meetings_remember(even_meetings *m, double part) {
  m->waited += (m->waits - m->waited) * part;
}

bool even_meetings_are_long(const even_balancer *b) {
  return b->meetings.waited > long_waits * even_series_mean(&b->guard.trial.before);
}

/* The rank of which a sample takes longest but for so many others. What a sample of its share costs the step beyond its
 * own time the models do not know; they let it have one for several of a faster rank's, and err most of it. */
static size_t steepest_but(const even_balancer *b, size_t others) {
  for (size_t r = 0; r < b->ranks; r++) {
    size_t steeper = 0;
    for (size_t o = 0; o < b->ranks; o++) {
      double off = b->models[o].seconds_per_sample - b->models[r].seconds_per_sample;
      steeper += off > 0.0 || (!(off < 0.0) && o < r) ? 1 : 0;
    }
    if (steeper == others) {
      return r;
    }
  }
  return 0;
}

/* Of `rank`, in steps of `mean` seconds. */
static double floor_of(const even_balancer *b, size_t rank, kind asked, double mean) {
  double share = (double)b->current[rank];
  double known = fmax(even_model_at(&b->models[rank], b->current[rank]), b->guard.floors[rank] * share);
  if (asked == NONE) {
    return mean;
  }
  return (asked == HALF ? (known + mean) / 2.0 : mean) / share;
}

/* The longest busy time with these shares, by the ranks' models. */
static double busy_with(const even_balancer *b, const int64_t *shares) {
  double busy = 0.0;
  for (size_t r = 0; r < b->ranks; r++) {
    busy = fmax(busy, b->models[r].known ? even_model_at(&b->models[r], shares[r]) : 0.0);
  }
  return busy;
}

/* Whether the candidate's ranks are all busy for so much less than a step lasts that it may be faster. Steps that were
 * measured have stalls in them, which models do not. */
static bool promises(const even_balancer *b, double mean) {
  double now = fmin(mean, busy_with(b, b->current) + b->meetings.waited);
  return busy_with(b, b->candidate) + left * b->meetings.waited < now * (1.0 - hoped_gain);
}

static bool is_asked(const even_balancer *b, size_t rank, kind asked) {
  double least = b->models[steepest_but(b, b->ranks - 1)].seconds_per_sample;
  bool is_slow = b->models[rank].seconds_per_sample > slow * least;
  return b->current[rank] > 0 && is_slow == (asked != OTHERS);
}

static even_status ask_of(even_balancer *b, size_t rank, kind asked, bool *begun) {
  even_guard *g = &b->guard;
  double mean = even_series_mean(&g->trial.before);
  memcpy(g->floors_tried, g->floors, b->ranks * sizeof *g->floors);
  g->floors_tried[rank] = fmax(g->floors[rank], floor_of(b, rank, asked, mean));
  EVEN_TRY(even_guard_candidate(b, begun));
  *begun = *begun && promises(b, mean);
  if (*begun) {
    even_guard_begin(b, EVEN_GUARD_MEETINGS);
  }
  return EVEN_OK;
}

static void pass_turn(even_balancer *b) {
  even_meetings *m = &b->meetings;
  m->turn = (m->turn + 1) % ((size_t)EVEN_MEETINGS_KINDS * b->ranks);
  m->round = m->round || m->turn == 0;
}

even_status even_meetings_ask(even_balancer *b, bool *begun) {
  even_meetings *m = &b->meetings;
  double mean = even_series_mean(&b->guard.trial.before);
  if (!(m->waited > least_waits * mean)) {
    return EVEN_OK;
  }
  for (int looked = 0; !*begun && looked < MOST_TURNS; looked++) {
    size_t rank = steepest_but(b, m->turn % b->ranks);
    kind asked = (kind)(m->turn / b->ranks);
    if (is_asked(b, rank, asked)) {
      EVEN_TRY(ask_of(b, rank, asked, begun));
    }
    if (!*begun) {
      pass_turn(b);
    }
  }
  if (!*begun) {
    even_guard_wait(b, EVEN_GUARD_MEETINGS);
  }
  return EVEN_OK;
}

bool even_meetings_answer(even_balancer *b, bool won) {
  even_meetings *m = &b->meetings;
  even_guard *g = &b->guard;
  for (size_t r = 0; won && r < b->ranks; r++) {
    g->met[r] = g->met[r] || g->floors_tried[r] > g->floors[r];
  }
  bool round = !won;
  if (!won) {
    pass_turn(b);
    round = m->round;
  }
  m->round = false;
  return round;
}
