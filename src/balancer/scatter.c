/* Scatter between ranks; see scatter.h. Plain arithmetic alone: every rank must get the same bits, whatever its
 * library. */
#include "balancer/scatter.h"

#include <math.h>

enum { MEMORY = 64, LEAST = 8 }; /* steps */

/* One rank's step further off than this is a stall: it counts as far off, no further. */
static const double furthest = 0.5;
/* Scatter up to which headroom is given in full, and from which on it is not: such ranks are stopped, not noisy, and
 * trials find what is best for them. */
static const double noisy = 0.15;
static const double stopped = 0.22;
static double ratio_of(const even_rank_model *model, const even_step_timing *timing) {
  return timing->busy_seconds / even_model_at(model, timing->samples);
}

static double off_by(const even_rank_model *model, const even_step_timing *timing, double mean) {
  double off = ratio_of(model, timing) - mean;
  return off > furthest ? furthest : (off < -furthest ? -furthest : off);
}

void even_scatter_take(even_scatter *scatter, const even_rank_model *models, const even_step_timing *timings,
                       size_t ranks) {
  double sum = 0.0;
  double squares = 0.0;
  size_t count = 0;
  for (size_t r = 0; r < ranks; r++) {
    if (models[r].known && timings[r].samples > 0) {
      double ratio = ratio_of(&models[r], &timings[r]);
      sum += ratio > 1.0 + furthest ? 1.0 + furthest : ratio;
      count++;
    }
  }
  if (count < 2) {
    return;
  }
  for (size_t r = 0; r < ranks; r++) {
    if (models[r].known && timings[r].samples > 0) {
      double off = off_by(&models[r], &timings[r], sum / (double)count);
      squares += off * off;
    }
  }
  scatter->steps += scatter->steps < MEMORY ? 1 : 0;
  scatter->square += (squares / (double)(count - 1) - scatter->square) / scatter->steps;
}

/* ln x for x >= 1, to 1e-5. */
static double logarithm(double x) {
  double halvings = 0.0;
  while (x > 2.0) {
    x /= 2.0;
    halvings += 1.0;
  }
  double z = (x - 1.0) / (x + 1.0);
  double square = z * z;
  return halvings * 0.6931471805599453 + 2.0 * z * (1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square / 7)));
}

/* The scale of the extreme-value distribution nearest to the largest of `ranks` normal ones, for their standard
 * deviation: for two that of the logistic difference, sqrt(6) / pi, for many 1 / sqrt(2 ln ranks). */
static double scale(size_t ranks) {
  double many = 1.0 / sqrt(2.0 * logarithm((double)ranks));
  return many < 0.7797 ? many : 0.7797;
}

double even_scatter_square(const even_scatter *scatter) {
  return scatter->steps < LEAST ? 0.0 : scatter->square;
}

double even_scatter_seconds(double square, size_t ranks, double step_seconds) {
  if (ranks < 2) {
    return 0.0;
  }
  double deviation = sqrt(square);
  if (deviation > noisy) {
    deviation = deviation < stopped ? noisy * (stopped - deviation) / (stopped - noisy) : 0.0;
  }
  return scale(ranks) * deviation * step_seconds;
}

double even_scatter_headroom(double scatter_seconds, double times) {
  return scatter_seconds > 0.0 && times > 1.0 ? scatter_seconds * logarithm(times < 1e6 ? times : 1e6) : 0.0;
}

double even_scatter_most_headroom(size_t ranks, double step_seconds, double times) {
  return ranks < 2 ? 0.0 : even_scatter_headroom(scale(ranks) * noisy * step_seconds, times);
}
