/* What all ranks have in common: how many times as long as before all of them take (the machine's frequency, a
 * neighbour on its host). It is followed while it moves and taken off what was measured before; else it would be taken
 * for the slope of a rank's line where shares moved meanwhile, and for a change of a rank where they did not.
 *
 * The common part of a step is the median of what the ranks are off their models' times by, and of the two middle ones
 * that nearer to none: what one rank does by itself is no part of it, of two ranks neither. Nearly all ranks must be
 * off by it in the mean of some steps: most of them may be those of one of two hosts. What is common is a local level,
 * which random shocks move (Harvey, Forecasting, Structural Time Series Models and the Kalman Filter, 1989, 2.3): it
 * goes on by a part of what each step is off, and the steps before get what of that was theirs (fixed-interval
 * smoothing, 3.6.2). Whether it moves at all is asked of steps of one split alone, for models that are wrong of a size
 * may be so of all ranks. */
#ifndef EVEN_BALANCER_LEVEL_H
#define EVEN_BALANCER_LEVEL_H

#include "balancer/model.h"
#include "balancer/replay.h"

#include <evenstep/balancer.h>

typedef struct even_level {
  int64_t shares[EVEN_REPLAY_RANKS]; /* of the last step */
  int64_t since;                     /* steps with these */
  double usual;                      /* mean common part of them … */
  double recent;                     /* … and of the last few */
  double own;                        /* mean square of what one rank is off by, beside the others … */
  int64_t known;                     /* … and of how many steps */
  double off[EVEN_REPLAY_RANKS];     /* mean of what each rank is off by in the last few steps … */
  double common;                     /* … and of the common part */
  int moves;                         /* steps for which the level is followed */
} even_level;

/* Learns from a step of a whole batch, which the models have not taken; a smaller one need not be told, and does not
 * count as another split. Where all ranks became slower or faster, the models and the replayed steps are of today's
 * level after that. Of up to EVEN_REPLAY_RANKS ranks. */
void even_level_take(even_level *level, even_rank_model *models, even_replay *replay, const even_step_timing *timings,
                     size_t ranks);

#endif
