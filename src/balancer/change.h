/* What a change of shares costs by itself (a compiler runs for the new sizes, memory is laid out anew), and whether a
 * gain is worth it: over as many steps as the shares have held so far, for that long they may be expected to hold. */
#ifndef EVEN_BALANCER_CHANGE_H
#define EVEN_BALANCER_CHANGE_H

#include "balancer/model.h"

#include <evenstep/balancer.h>

enum { EVEN_CHANGES_KEPT = 5 };

typedef struct even_change {
  int count;                        /* changes measured */
  double excess[EVEN_CHANGES_KEPT]; /* seconds beyond what was expected of the first step of the last ones */
  double usual;                     /* the mean of the same over steps without a change, of late */
  int usual_steps;
  int64_t last; /* the step of the last change */
} even_change;

/* Takes step number `step`, which the models must not know yet; `before`: the step before it. Whether shares changed,
 * and the step says more of that than of the ranks. */
bool even_change_take(even_change *change, const even_rank_model *models, const even_step_timing *before,
                      const even_step_timing *timings, size_t ranks, int64_t step);
/* Seconds that a change costs: the second least of the last ones, less what other steps take too long on the mean; 0
 * while fewer than three were measured. */
double even_change_seconds(const even_change *change);
/* Whether a step that is shorter by `gain_seconds` pays for a change at step number `step`. */
bool even_change_pays(const even_change *change, double gain_seconds, int64_t step);

#endif
