/* Floors: what is tried with ranks that a quota stops. */
#include "balancer/floors.h"

#include "balancer/state.h"
#include "base/fail.h"

#include <math.h>

enum { MOST_CUTS = 12 };

/* Waiting for one rank alone that is worth a trial, as a part of a step. */
static const double least_blame = 0.03;
/* A rank that is busy for less of the step than this has no lack of time on the whole. */
static const double mostly_waits = 0.95;
/* What a slower challenger has told: a rank that got more, and was stopped for it, needs so many seconds for a sample.
 */
void even_floors_learn(even_balancer *b) {
  even_guard *g = &b->guard;
  double mean = even_series_mean(&g->trial.challenger);
  for (size_t r = 0; r < b->ranks; r++) {
    if (g->challenger[r] > b->current[r] && !(g->floors[r] > 0.0) && even_stops_of(&g->stops, r, mean, g->bursts[r])) {
      g->floors[r] = mean / (double)g->challenger[r];
    }
  }
}

void even_floors_forget(even_balancer *b) {
  for (size_t r = 0; r < b->ranks; r++) {
    if (b->models[r].sped_up) {
      b->guard.floors[r] = b->guard.floors_tried[r] = 0.0; /* nor does a trial's end bring it back */
      b->guard.met[r] = false;
      b->models[r].sped_up = false;
    }
  }
}

/* Whether the rank is busy for less of the steps than it would be without stops, by their mean and by that of the same
 * steps: where the machine becomes faster, the last ones alone are shorter than the others. */
static bool waits(const even_guard *g, size_t rank, double mean) {
  return g->busy[rank] < mostly_waits * fmin(mean, g->busy_of);
}

/* Whether the rank is fast on the whole, and stopped now and then: by the spread of its times, for chance alone does
 * not make a third of the mean. */
static bool stopped(const even_balancer *b, size_t rank, double mean) {
  const even_guard *g = &b->guard;
  double spread = EVEN_GUARD_FAR * g->busy[rank];
  return b->current[rank] > 0 && waits(g, rank, mean) && g->scatter[rank] > spread * spread;
}

/* The worst rank gets less; not at the cost of others that are stopped, too, unless it is tried alone. */
static void set_floors(even_balancer *b, size_t worst, double mean) {
  even_guard *g = &b->guard;
  for (size_t r = 0; r < b->ranks; r++) {
    bool held = r == worst || (!g->alone && stopped(b, r, mean));
    g->floors_tried[r] = held ? mean / (double)b->current[r] : g->floors[r];
  }
}

even_status even_floors_caution(even_balancer *b, bool *begun) {
  even_guard *g = &b->guard;
  double mean = even_series_mean(&g->trial.before);
  size_t worst = b->ranks;
  double most = 0.0;
  for (size_t r = 0; r < b->ranks; r++) {
    bool blamed = g->blame[r] > least_blame * mean * g->blame_weight && waits(g, r, mean);
    if (blamed && g->scatter[r] > most && b->current[r] > 0) {
      worst = r;
      most = g->scatter[r];
    }
  }
  if (worst == b->ranks) {
    return EVEN_OK;
  }
  set_floors(b, worst, mean);
  EVEN_TRY(even_guard_challenge(b, EVEN_GUARD_CAUTION, begun));
  if (!*begun) {
    g->alone = !g->alone;
    set_floors(b, worst, mean);
    EVEN_TRY(even_guard_challenge(b, EVEN_GUARD_CAUTION, begun));
  }
  return EVEN_OK;
}

even_status even_floors_release(even_balancer *b, bool *begun) {
  even_guard *g = &b->guard;
  bool any = false;
  for (size_t r = 0; r < b->ranks; r++) {
    g->floors_tried[r] = g->floors[r];
    any = any || g->floors[r] > 0.0;
  }
  if (!any) {
    even_guard_wait(b, EVEN_GUARD_RELEASE);
  }
  for (int cuts = 0; any && !*begun && cuts < MOST_CUTS; cuts++) {
    for (size_t r = 0; r < b->ranks; r++) {
      g->floors_tried[r] *= g->released;
    }
    EVEN_TRY(even_guard_challenge(b, EVEN_GUARD_RELEASE, begun));
  }
  return EVEN_OK;
}
