/* What all ranks have in common; see level.h. Plain arithmetic alone: every rank must get the same bits. */
#include "balancer/level.h"

#include <math.h>

enum {
  LEAST = 4,     /* steps of a rank before its model says what one takes, … */
  SETTLED = 12,  /* of a split, before a mean beside it tells, … */
  SCATTERED = 8, /* and that the ranks' scatter is of, before it is believed */
  MEMORY = 64,   /* that it is of at most, and what is usual of a split */
  MOVES = 64     /* for which the level is followed, once it was seen to move */
};

/* A step further off, to either side, is taken for so much: 1.6 times as long, or as short. A rank's is a stall; all
 * ranks' is a machine that is another one, and followed by forgetting. */
static const double furthest = 0.6;
static const double least = -0.375;
/* Ranks that scatter further are stopped: they say nothing of the others. */
static const double stopped = 0.2;
/* Of what a step is off, the part by which the level goes on; of the last few steps' mean, a step's. */
static const double gain = 0.5;
static const double recent_part = 0.125;
/* Standard errors that are no chance: each step is looked at. Less than this part of a step is not followed. */
static const double certain = 3.0;
static const double least_move = 0.004;
/* A rank goes with the others where it is off by this part of what is common, in the mean of the last few steps. */
static const double with_it = 0.5;
static const double few_part = 0.25;

/* By what part the rank took longer than its model says; whether that says something. */
static bool off_by(const even_rank_model *model, const even_step_timing *timing, double *off) {
  bool says = timing->samples > 0 && model->known && !model->guess && model->block == 1 && model->count >= LEAST &&
              model->noise < stopped;
  if (says) {
    double ratio = timing->busy_seconds / even_model_at(model, timing->samples);
    *off = fmax(least, fmin(ratio - 1.0, furthest));
  }
  return says;
}

static void insert(double *sorted, int count, double value) {
  int at = count;
  for (; at > 0 && sorted[at - 1] > value; at--) {
    sorted[at] = sorted[at - 1];
  }
  sorted[at] = value;
}

/* Of the variance of one rank's scatter, that of what so many have in common by chance. Normal variables, tried for 2
 * to 16: to 1 % where their number is odd (the median's, about pi / 2 of the mean's), to 8 % where it is even. */
static double by_chance(int ranks) {
  return ranks % 2 == 1 ? 1.571 / (ranks + 0.5) : 1.26 / (ranks + 4.5);
}

/* What each rank is off by, NAN where it says nothing; what they are together, and the variance of what each is by
 * itself. How many say so: two at least, or nothing is known of these. */
static int common_part(const even_rank_model *models, const even_step_timing *timings, size_t ranks, double *off,
                       double *common, double *own) {
  double sorted[EVEN_REPLAY_RANKS];
  double sum = 0.0;
  double squares = 0.0;
  int count = 0;
  for (size_t r = 0; r < ranks; r++) {
    if (off_by(&models[r], &timings[r], &off[r])) {
      insert(sorted, count++, off[r]);
      sum += off[r];
      squares += off[r] * off[r];
    } else {
      off[r] = (double)NAN;
    }
  }
  if (count < 2) {
    return count;
  }
  double low = sorted[(count - 1) / 2];
  double high = sorted[count / 2];
  *common = low > 0.0 ? low : (high < 0.0 ? high : 0.0);
  *own = fmax(0.0, (squares - sum * sum / count) / (count - 1));
  return count;
}

/* Whether all ranks but an eighth go with one another (of 4 to 11 one may not): most of them may be one host's. */
static bool agree(even_level *level, const double *off, size_t ranks, int say, double common) {
  int alone = 0;
  level->common += few_part * (common - level->common);
  double enough = with_it * level->common;
  for (size_t r = 0; r < ranks; r++) {
    if (!isnan(off[r])) {
      level->off[r] += few_part * (off[r] - level->off[r]);
      alone += level->common > 0.0 ? level->off[r] < enough : level->off[r] > enough;
    }
  }
  return 8 * alone <= say + 4;
}

/* Whether the step has the shares of the one before. */
static bool same_split(even_level *level, const even_step_timing *timings, size_t ranks) {
  bool same = true;
  for (size_t r = 0; r < ranks; r++) {
    same = same && level->shares[r] == timings[r].samples;
    level->shares[r] = timings[r].samples;
  }
  return same;
}

/* Whether all ranks take longer or shorter than they did with this split, but for chance. */
static bool moves(even_level *level, int ranks, double common, double own) {
  level->since++;
  level->known++;
  double usual_part = 1.0 / (double)(level->since < MEMORY ? level->since : MEMORY);
  double known_part = 1.0 / (double)(level->known < MEMORY ? level->known : MEMORY);
  bool scatters = level->known > SCATTERED;
  level->own += known_part * (fmin(own, scatters ? 4.0 * level->own : own) - level->own); /* a stall is none */
  level->usual += usual_part * (common - level->usual);
  level->recent += fmax(usual_part, recent_part) * (common - level->recent);
  double error = sqrt(by_chance(ranks) * level->own * (recent_part / (2.0 - recent_part) + usual_part));
  double moved = fabs(level->recent - level->usual);
  return scatters && level->since >= SETTLED && moved > certain * error && moved > least_move;
}

void even_level_take(even_level *level, even_rank_model *models, even_replay *replay, const even_step_timing *timings,
                     size_t ranks) {
  double off[EVEN_REPLAY_RANKS];
  double common = 0.0;
  double own = 0.0;
  if (replay->seconds == NULL) {
    return;
  }
  bool same = same_split(level, timings, ranks);
  int say = common_part(models, timings, ranks, off, &common, &own);
  if (say < 2) {
    return;
  }
  bool all = agree(level, off, ranks, say, common);
  if (!same) {
    level->since = 0; /* a change costs all ranks something, maybe */
    return;
  }
  if (moves(level, say, common, own)) {
    level->moves = MOVES;
  }
  if (level->moves == 0) {
    return;
  }
  level->moves--;
  if (!all || common >= furthest || common <= least) {
    return;
  }
  for (size_t r = 0; r < ranks; r++) {
    even_model_follow(&models[r], 1.0 + gain * common, 1.0 - gain);
  }
  even_replay_follow(replay, ranks, 1.0 + gain * common, 1.0 - gain);
}
