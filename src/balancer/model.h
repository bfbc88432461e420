/* What one rank's step costs: t(b) = fixed + b * per_sample, learned from noisy steps. */
#ifndef EVEN_BALANCER_MODEL_H
#define EVEN_BALANCER_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "balancer/shape.h"
#include "balancer/spread.h"

enum { EVEN_MODEL_WINDOW = EVEN_SPREAD_MOST, EVEN_MODEL_IDLE = 16 };

typedef struct even_rank_model {
  int count;   /* entries of the window, oldest first: steps, or the means of `block` steps */
  int block;   /* 1; more where a rank's steps are mostly short and sometimes long, as under a CPU quota */
  int pending; /* steps of the entry that is not complete */
  double pending_samples;
  double pending_seconds;
  double pending_pieces;
  double samples[EVEN_MODEL_WINDOW]; /* as a step's time grows with them: padded, and with what micro-batches cost */
  double seconds[EVEN_MODEL_WINDOW];
  double pieces[EVEN_MODEL_WINDOW]; /* micro-batches beyond the first */
  int64_t bucket;      /* > 1: a step takes as long as one of the next multiple: sizes are counted as such */
  int64_t micro_batch; /* > 0: a larger share runs as micro-batches of so many samples and one of what is left over … */
  double piece_samples; /* … each of which but the first costs as much as so many samples more than its own */
  bool known;           /* something was measured */
  double fixed_seconds;
  double seconds_per_sample;
  double fixed_samples; /* prior: the fixed part costs as much as this many samples; survives changes of speed */
  double noise;         /* relative standard deviation of a step */
  double usual_noise;   /* the same before the last change of speed */
  bool sped_up;         /* it was steady for long, and is far faster since; whoever has looked at that clears it */
  double drift;         /* mean of what the last steps were off the line by, as a part of it */
  double restless;      /* recent changes of speed; each makes the next one harder to believe */
  double most_samples;  /* the largest share in the window, in whole buckets, without what micro-batches cost */
  double known_samples; /* the largest such that the last slowing made it forget; 0: none … */
  double known_seconds; /* … and what a step with it took before that */
  bool dummy;           /* steps with zero samples took time: a dummy batch runs */
  bool guess;           /* the window is of spared dummy batches, for want of better: of steps before any sample */
  /* Spared dummy batches after that: they tell what a step without samples takes, not what a sample does. */
  int idle_count;
  int idle_next;
  int idle_since; /* the last other step; EVEN_MODEL_IDLE at most */
  double idle[EVEN_MODEL_IDLE];
  double idle_reference; /* what such a step took when the line was true; 0: not known yet */
  even_shape shape;      /* of what the line does not explain */
} even_rank_model;

/* Takes one step; cheap. Whether the window has a new entry. A zero share that took no time tells nothing and is
 * passed over. spared: of a zero share, part of the dummy batch's work was left out. */
bool even_model_take(even_rank_model *model, int64_t samples, double seconds, bool spared);
/* Whether the last step lies outside of what the model expects. */
bool even_model_surprised(const even_rank_model *model);
/* Whether the last few do in the mean, maybe none of them by itself. */
bool even_model_drifts(const even_rank_model *model);
/* Learns from the window; drops what was before a change of speed. */
void even_model_learn(even_rank_model *model);
/* The share runs as other micro-batches, from now on and in all that was measured. */
void even_model_set_pieces(even_rank_model *model, int64_t micro_batch, double piece_samples);
/* All that was measured, a dummy batch too, took so many seconds more (< 0: fewer), whatever the share: the fixed part
 * is larger by them. */
void even_model_shift(even_rank_model *model, double seconds);
/* The rank takes `factor` times as long since its last steps: what was measured k steps ago, the last one as k = 1, as
 * much of that as is not there yet, kept^k. */
void even_model_follow(even_rank_model *model, double factor, double kept);
/* Whether its dummy batches are spared, so that they are less than a sample's work. */
bool even_model_idles(const even_rank_model *model);
/* Whether what its sizes took is believed instead of the line. */
bool even_model_bent(const even_rank_model *model);
/* Seconds that one more sample costs beyond `samples`. */
double even_model_slope(const even_rank_model *model, int64_t samples);
/* Seconds for `samples`; the model must be known. */
double even_model_at(const even_rank_model *model, int64_t samples);
/* The largest share that was measured at today's speed: in the window, or before the rank became slower for a while. */
double even_model_measured(const even_rank_model *model);
/* The same along the line, without buckets. */
double even_model_line(const even_rank_model *model, double samples);

#endif
