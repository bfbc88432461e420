/* What the last steps would have taken with another split: each rank's step as long, beside what its model expects, as
 * it was. The mean over them estimates the expected maximum, E[max t_r], whatever the ranks' scatter looks like; and
 * two splits are compared by the same steps, so that what both have in common (a slow phase of the machine, one rank's
 * stall) is no difference between them (common random numbers; Law, Simulation Modeling and Analysis, 11.2). */
#ifndef EVEN_BALANCER_REPLAY_H
#define EVEN_BALANCER_REPLAY_H

#include "balancer/model.h"

#include <evenstep/balancer.h>

enum {
  EVEN_REPLAY_STEPS = 80, /* remembered */
  EVEN_REPLAY_LEAST = 32, /* before they say anything, */
  EVEN_REPLAY_FEW = 8,    /* … before they may speak against what the models say */
  EVEN_REPLAY_RANKS = 16  /* more are left to the headroom: every look would cost too much */
};

typedef struct even_replay {
  int64_t taken; /* steps, in all */
  double *samples;
  double *seconds; /* of EVEN_REPLAY_STEPS steps, one after the other, each rank's; NULL: too many ranks */
  double *ratios;  /* of the steps that are replayed: as many times as long as expected; the last step first */
} even_replay;

/* Of two splits. */
typedef struct even_replay_gain {
  double seconds; /* a step of the one */
  double gain;    /* by which the other is shorter */
  double error;   /* standard error of the gain */
} even_replay_gain;

/* Of zeros. */
even_status even_replay_open(even_replay *replay, size_t ranks) EVEN_MUST_USE;
void even_replay_close(even_replay *replay);
void even_replay_take(even_replay *replay, const even_step_timing *timings, size_t ranks);
/* The rank's steps took so many seconds more than was taken (< 0: fewer). */
void even_replay_shift(even_replay *replay, size_t rank, size_t ranks, double seconds);
/* As even_model_follow, of all ranks. */
void even_replay_follow(even_replay *replay, size_t ranks, double factor, double kept);
/* How many of the last steps speak of the ranks as they are now, and are replayed by what follows; 0: fewer than
 * `least` (at least EVEN_REPLAY_FEW), or ranks that are stopped rather than scatter. */
int even_replay_begin(even_replay *replay, const even_rank_model *models, const int64_t *shares, size_t ranks,
                      int least);
/* How far each rank's steps scatter about what today's model expects of them, beside what all ranks share (a slow phase
 * of the machine), by the last 48 steps of the ranks as they are now: squares[r] is a variance, as part of a step. What
 * a model is off by all the time is no scatter, nor are stalls (up to an eighth of the steps); 0 before eight such
 * steps. Of at most EVEN_REPLAY_RANKS ranks. */
void even_replay_scatter(even_replay *replay, const even_rank_model *models, const int64_t *shares, size_t ranks,
                         double *squares);
/* Moves samples between ranks while that shortens the mean of the last `steps` steps; no share leaves 1 … most[r]. */
void even_replay_descend(const even_replay *replay, const even_rank_model *models, const int64_t *most, size_t ranks,
                         int steps, int64_t *shares);
even_replay_gain even_replay_compare(const even_replay *replay, const even_rank_model *models, size_t ranks, int steps,
                                     const int64_t *one, const int64_t *other);

#endif
