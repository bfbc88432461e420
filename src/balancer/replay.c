/* The last steps, replayed with other splits. Plain arithmetic alone: every rank must get the same bits. */
#include "balancer/replay.h"

#include "base/alloc.h"
#include "base/fail.h"

#include <math.h>

enum {
  MOST_MOVES = 32,
  BLOCKS = 8,
  SCATTER_LEAST = 8, /* steps that tell how far ranks scatter, … */
  SCATTER_MOST = 48, /* … and no more of them, */
  SCATTER_CUT = 8,   /* of which this part at each end is cut to the next, … */
  SCATTER_NONE = 4   /* … as if so many more had not scattered at all: of few steps no more is believed than is sure */
};

/* What the mean square loses by that cut, in part: of 8 to 48 steps 0.58 to 0.61 are left of normal scatter, and 0.74
 * to 0.83 of even scatter. This is less than the one loses, and a little more than the other. */
static const double cut_back = 1.35;

/* One rank's step that was so many times longer than expected was a stall: it counts as so long, no longer. */
static const double furthest = 1.5;
/* A move that shortens steps by less than this part of them is none. */
static const double least_part = 1e-6;
/* Scatter (standard deviation of a rank's steps) from which on it is stopped, not noisy: what a stop takes does not
 * grow with its share, and how often it comes does. */
static const double stopped = 0.15;

even_status even_replay_open(even_replay *replay, size_t ranks) {
  if (ranks < 2 || ranks > EVEN_REPLAY_RANKS) {
    return EVEN_OK;
  }
  EVEN_TRY(even_alloc(ranks, EVEN_REPLAY_STEPS * sizeof *replay->samples, (void **)&replay->samples));
  EVEN_TRY(even_alloc(ranks, EVEN_REPLAY_STEPS * sizeof *replay->ratios, (void **)&replay->ratios));
  return even_alloc(ranks, EVEN_REPLAY_STEPS * sizeof *replay->seconds, (void **)&replay->seconds);
}

void even_replay_close(even_replay *replay) {
  even_free(replay->samples);
  even_free(replay->seconds);
  even_free(replay->ratios);
}

void even_replay_take(even_replay *replay, const even_step_timing *timings, size_t ranks) {
  if (replay->seconds == NULL) {
    return;
  }
  size_t at = (size_t)(replay->taken % EVEN_REPLAY_STEPS) * ranks;
  for (size_t r = 0; r < ranks; r++) {
    replay->samples[at + r] = (double)timings[r].samples;
    replay->seconds[at + r] = timings[r].busy_seconds;
  }
  replay->taken++;
}

void even_replay_shift(even_replay *replay, size_t rank, size_t ranks, double seconds) {
  for (size_t i = 0; replay->seconds != NULL && i < EVEN_REPLAY_STEPS; i++) {
    double *step = &replay->seconds[i * ranks + rank];
    *step = *step + seconds > 0.0 ? *step + seconds : 0.0;
  }
}

void even_replay_follow(even_replay *replay, size_t ranks, double factor, double kept) {
  int64_t steps = replay->taken < EVEN_REPLAY_STEPS ? replay->taken : EVEN_REPLAY_STEPS;
  double left = 1.0;
  for (int64_t i = 0; i < steps; i++) {
    double *step = &replay->seconds[(size_t)((replay->taken - 1 - i) % EVEN_REPLAY_STEPS) * ranks];
    left *= left > 0.001 ? kept : 1.0;
    for (size_t r = 0; r < ranks; r++) {
      step[r] *= 1.0 + (factor - 1.0) * (1.0 - left);
    }
  }
}

/* Larger sizes are cut, as in the models: a double may be more than an int64_t holds. */
static const double most_samples = 0x1p53;

/* How many times as long as expected the rank took in a step. */
static double ratio_of(const even_rank_model *model, double samples, double seconds) {
  if (!(samples > 0.0)) {
    return 1.0;
  }
  double ratio = seconds / even_model_at(model, (int64_t)(samples < most_samples ? samples : most_samples));
  return ratio < furthest ? ratio : furthest;
}

/* The last `steps` steps of a rank beside today's model; whether they scatter, rather than that it is stopped. */
static bool set_ratios(even_replay *replay, const even_rank_model *model, size_t rank, size_t ranks, int steps) {
  double sum = 0.0;
  double squares = 0.0;
  for (int i = 0; i < steps; i++) {
    size_t at = (size_t)((replay->taken - 1 - i) % EVEN_REPLAY_STEPS) * ranks + rank;
    double ratio = ratio_of(model, replay->samples[at], replay->seconds[at]);
    replay->ratios[(size_t)i * ranks + rank] = ratio;
    sum += ratio;
    squares += ratio * ratio;
  }
  double mean = sum / steps;
  return squares / steps - mean * mean < stopped * stopped * mean * mean;
}

/* Whether the rank's steps say something of it. */
static bool shows(const even_rank_model *model, int64_t share) {
  return share > 0 && model->known && !model->guess;
}

/* How many of the last steps speak of those ranks that show something, as they are now. */
static int steps_as_now(const even_replay *replay, const even_rank_model *models, const int64_t *shares, size_t ranks) {
  int64_t steps = replay->taken < EVEN_REPLAY_STEPS ? replay->taken : EVEN_REPLAY_STEPS;
  for (size_t r = 0; r < ranks; r++) {
    int64_t since = (int64_t)models[r].count * models[r].block; /* its last change of speed */
    steps = shows(&models[r], shares[r]) && since < steps ? since : steps;
  }
  return (int)steps;
}

int even_replay_begin(even_replay *replay, const even_rank_model *models, const int64_t *shares, size_t ranks,
                      int least) {
  int steps = replay->seconds != NULL ? steps_as_now(replay, models, shares, ranks) : 0;
  bool scatter = steps >= least;
  for (size_t r = 0; r < ranks && scatter; r++) {
    bool other = shows(&models[r], shares[r]) && models[r].bucket <= 1; /* what it would take with other samples */
    scatter = other && set_ratios(replay, &models[r], r, ranks, steps);
  }
  return scatter ? steps : 0;
}

/* ---- how far ranks scatter ---- */

/* Few, and their order is as good as any: sorted by insertion. */
static void sort(double *values, int count) {
  for (int i = 1; i < count; i++) {
    double value = values[i];
    int at = i;
    for (; at > 0 && values[at - 1] > value; at--) {
      values[at] = values[at - 1];
    }
    values[at] = value;
  }
}

/* Variance of values whose outermost are cut: a stall is none, nor is what a model is off by all the time. */
static double cut_variance(double *values, int count) {
  int cut = count / SCATTER_CUT;
  double sum = 0.0;
  double squares = 0.0;
  sort(values, count);
  for (int i = 0; i < count; i++) {
    double value = values[i < cut ? cut : (i >= count - cut ? count - 1 - cut : i)];
    sum += value;
    squares += value * value;
  }
  double variance = cut_back * (squares - sum * sum / count) / (count - 1);
  return variance > 0.0 ? variance : 0.0;
}

void even_replay_scatter(even_replay *replay, const even_rank_model *models, const int64_t *shares, size_t ranks,
                         double *squares) {
  double off[SCATTER_MOST];
  double mean[SCATTER_MOST] = {0.0};
  size_t shown = 0;
  int steps = steps_as_now(replay, models, shares, ranks);
  steps = steps < SCATTER_MOST ? steps : SCATTER_MOST;
  for (size_t r = 0; r < ranks; r++) {
    squares[r] = 0.0;
    if (steps >= SCATTER_LEAST && shows(&models[r], shares[r])) {
      (void)set_ratios(replay, &models[r], r, ranks, steps);
      shown++;
      for (int i = 0; i < steps; i++) {
        mean[i] += replay->ratios[(size_t)i * ranks + r];
      }
    }
  }
  for (size_t r = 0; r < ranks && shown > 1; r++) {
    if (shows(&models[r], shares[r])) {
      for (int i = 0; i < steps; i++) {
        off[i] = replay->ratios[(size_t)i * ranks + r] - mean[i] / (double)shown;
      }
      double many = (double)shown / (double)(shown - 1); /* the rank itself is in the mean that it is off from */
      squares[r] = many * cut_variance(off, steps) * steps / (steps + SCATTER_NONE);
    }
  }
}

/* Seconds of one of the steps where ranks are expected to take expected[r]; *last: the rank that ends it. */
static double replayed(const double *ratios, const double *expected, size_t ranks, size_t *last) {
  double longest = -1.0;
  for (size_t r = 0; r < ranks; r++) {
    double seconds = ratios[r] * expected[r];
    if (seconds > longest) {
      longest = seconds;
      *last = r;
    }
  }
  return longest;
}

static void expect(const even_rank_model *models, const int64_t *shares, size_t ranks, double *expected) {
  for (size_t r = 0; r < ranks; r++) {
    expected[r] = even_model_at(&models[r], shares[r]); /* a dummy batch's does not scatter with the share */
  }
}

/* Mean seconds of a step; dearer[r] = by how much one more sample on rank r would make it longer (its slope, times how
 * often it is the last). */
static double mean_of(const even_replay *replay, const even_rank_model *models, const int64_t *shares, size_t ranks,
                      int steps, double *dearer) {
  double expected[EVEN_REPLAY_RANKS];
  double sum = 0.0;
  expect(models, shares, ranks, expected);
  for (size_t r = 0; r < ranks; r++) {
    dearer[r] = 0.0;
  }
  for (int i = 0; i < steps; i++) {
    const double *ratios = replay->ratios + (size_t)i * ranks;
    size_t last = 0;
    sum += replayed(ratios, expected, ranks, &last);
    dearer[last] += ratios[last] * even_model_slope(&models[last], shares[last]);
  }
  return sum / steps;
}

void even_replay_descend(const even_replay *replay, const even_rank_model *models, const int64_t *most, size_t ranks,
                         int steps, int64_t *shares) {
  double dearer[EVEN_REPLAY_RANKS];
  double mean = mean_of(replay, models, shares, ranks, steps, dearer);
  for (int move = 0; move < MOST_MOVES; move++) {
    size_t from = ranks;
    size_t to = ranks;
    for (size_t r = 0; r < ranks; r++) {
      from = shares[r] > 1 && (from == ranks || dearer[r] > dearer[from]) ? r : from;
      to = shares[r] < most[r] && (to == ranks || dearer[r] < dearer[to]) ? r : to;
    }
    if (from == ranks || to == ranks || from == to) {
      return;
    }
    shares[from]--;
    shares[to]++;
    double moved = mean_of(replay, models, shares, ranks, steps, dearer);
    if (!(moved < mean * (1.0 - least_part))) {
      shares[from]++;
      shares[to]--;
      return;
    }
    mean = moved;
  }
}

even_replay_gain even_replay_compare(const even_replay *replay, const even_rank_model *models, size_t ranks, int steps,
                                     const int64_t *one, const int64_t *other) {
  even_replay_gain out = {0};
  double block[BLOCKS] = {0}; /* batch means: a quota's steps are not independent of one another */
  double expected[EVEN_REPLAY_RANKS];
  double instead[EVEN_REPLAY_RANKS];
  int length = steps / BLOCKS;
  size_t last = 0;
  expect(models, one, ranks, expected);
  expect(models, other, ranks, instead);
  for (int i = 0; i < steps; i++) {
    const double *ratios = replay->ratios + (size_t)i * ranks;
    double seconds = replayed(ratios, expected, ranks, &last);
    double gain = seconds - replayed(ratios, instead, ranks, &last);
    out.seconds += seconds / steps;
    out.gain += gain / steps;
    if (i / length < BLOCKS) {
      block[i / length] += gain / length;
    }
  }
  double mean = 0.0;
  double squares = 0.0;
  for (int i = 0; i < BLOCKS; i++) {
    mean += block[i] / (double)BLOCKS;
  }
  for (int i = 0; i < BLOCKS; i++) {
    squares += (block[i] - mean) * (block[i] - mean);
  }
  out.error = sqrt(squares / ((BLOCKS - 1) * BLOCKS));
  return out;
}
