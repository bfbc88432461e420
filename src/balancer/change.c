/* What a change of shares costs. */
#include "balancer/change.h"

#include <string.h>

/* A change that costs more than this part of a step hides what the step would say of the ranks. */
static const double spoils = 0.25;
/* Only what is so many times more than steps take too long anyway is taken for the change's. */
static const double clearly = 3.0;

/* Not the middle: where ranks are stopped by quotas some steps are long whether shares change or not. */
enum { MEMORY = 64, SECOND = 1, LEAST = 3, SHORTEST_HORIZON = 64, LONGEST_HORIZON = 4096 };

static bool differs(const even_step_timing *before, const even_step_timing *timings, size_t ranks) {
  for (size_t r = 0; r < ranks; r++) {
    if (before[r].samples != timings[r].samples) {
      return true;
    }
  }
  return false;
}

/* Seconds that a step took beyond what was expected of it, below zero for none; whether that is known. */
static bool excess_of(const even_rank_model *models, const even_step_timing *timings, size_t ranks, double *expected,
                      double *excess) {
  double longest = 0.0;
  *expected = 0.0;
  for (size_t r = 0; r < ranks; r++) {
    if (!models[r].known) {
      return false;
    }
    double seconds = even_model_at(&models[r], timings[r].samples);
    *expected = seconds > *expected ? seconds : *expected;
    longest = timings[r].busy_seconds > longest ? timings[r].busy_seconds : longest;
  }
  *excess = longest - *expected;
  return true;
}

bool even_change_take(even_change *change, const even_rank_model *models, const even_step_timing *before,
                      const even_step_timing *timings, size_t ranks, int64_t step) {
  double expected = 0.0;
  double excess = 0.0;
  bool changed = differs(before, timings, ranks);
  change->last = changed ? step : change->last;
  if (!excess_of(models, timings, ranks, &expected, &excess)) {
    return false;
  }
  if (!changed) {
    change->usual_steps += change->usual_steps < MEMORY ? 1 : 0;
    change->usual += ((excess > 0.0 ? excess : 0.0) - change->usual) / change->usual_steps;
    return false;
  }
  change->excess[change->count % EVEN_CHANGES_KEPT] = excess > 0.0 ? excess : 0.0;
  change->count++;
  return even_change_seconds(change) > spoils * expected;
}

double even_change_seconds(const even_change *change) {
  double sorted[EVEN_CHANGES_KEPT];
  int kept = change->count < EVEN_CHANGES_KEPT ? change->count : EVEN_CHANGES_KEPT;
  if (kept < LEAST) {
    return 0.0;
  }
  for (int i = 0; i < kept; i++) {
    int at = i;
    for (; at > 0 && sorted[at - 1] > change->excess[i]; at--) {
      sorted[at] = sorted[at - 1];
    }
    sorted[at] = change->excess[i];
  }
  return sorted[SECOND] > clearly * change->usual ? sorted[SECOND] - change->usual : 0.0;
}

bool even_change_pays(const even_change *change, double gain_seconds, int64_t step) {
  int64_t held = step - change->last;
  held = held > SHORTEST_HORIZON ? held : SHORTEST_HORIZON;
  held = held < LONGEST_HORIZON ? held : LONGEST_HORIZON;
  return gain_seconds * (double)held > even_change_seconds(change);
}
