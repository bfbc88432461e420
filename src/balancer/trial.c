/* Two splits compared by what their steps took. */
#include "balancer/trial.h"

#include <math.h>
#include <stddef.h>

enum {
  CHECK = 16, /* steps of the split in force after a challenger that was faster */
  SETTLE = 3, /* steps passed over after each change */
  SHOWN = 3,  /* steps of a challenger before it may be given up */
  BLOCKS = 4  /* of consecutive steps, whose means tell how sure a series' mean is */
};

/* A trial ends early once the challenger has lost this many steps' time: its cost is bounded, however bad it is. */
static const double most_lost_steps = 4.0;
/* The same for its very first steps, in which what the other split left behind may count. */
static const double most_lost_at_once = 8.0;

void even_series_clear(even_series *series) {
  series->taken = 0;
}

static void take(even_series *series, double seconds) {
  series->seconds[series->taken % EVEN_TRIAL_WINDOW] = seconds;
  series->taken++;
}

int even_series_count(const even_series *series) {
  return series->taken < EVEN_TRIAL_WINDOW ? series->taken : EVEN_TRIAL_WINDOW;
}

static double mean_of(const double *values, int count) {
  double sum = 0.0;
  int least = 0;
  int most = 0;
  double second_least = INFINITY;
  double second_most = -INFINITY;
  for (int i = 0; i < count; i++) {
    least = values[i] < values[least] ? i : least;
    most = values[i] > values[most] ? i : most;
    sum += values[i];
  }
  if (count < 3 || least == most) {
    return count > 0 ? sum / count : 0.0;
  }
  for (int i = 0; i < count; i++) {
    second_least = i != least && values[i] < second_least ? values[i] : second_least;
    second_most = i != most && values[i] > second_most ? values[i] : second_most;
  }
  return (sum - values[least] - values[most] + second_least + second_most) / count;
}

double even_series_mean(const even_series *series) {
  return mean_of(series->seconds, even_series_count(series));
}

/* Variance of the mean by batch means: consecutive steps under a quota are not independent of one another. */
static double variance_of(const even_series *series) {
  int count = even_series_count(series) / BLOCKS;
  if (count == 0) {
    return 0.0;
  }
  double mean = 0.0;
  double squares = 0.0;
  double block[BLOCKS];
  for (int i = 0; i < BLOCKS; i++) {
    block[i] = mean_of(series->seconds + (ptrdiff_t)i * count, count);
    mean += block[i] / (double)BLOCKS;
  }
  for (int i = 0; i < BLOCKS; i++) {
    squares += (block[i] - mean) * (block[i] - mean);
  }
  return squares / (double)((BLOCKS - 1) * BLOCKS);
}

void even_trial_begin(even_trial *trial, double margin) {
  trial->state = EVEN_TRIAL_CHALLENGER_RUNS;
  even_series_clear(&trial->challenger);
  even_series_clear(&trial->after);
  trial->settling = SETTLE;
  trial->lost = 0.0;
  trial->missed = 0;
  trial->margin = margin;
}

static even_trial_result end(even_trial *trial, even_trial_result result) {
  trial->state = EVEN_TRIAL_IDLE;
  return result;
}

static even_trial_result challenge(even_trial *trial, double seconds) {
  double before = even_series_mean(&trial->before);
  trial->lost += seconds - before;
  int count = even_series_count(&trial->challenger);
  double most = count >= SHOWN - 1 && trial->settling == 0 ? most_lost_steps : most_lost_at_once;
  bool given_up = trial->lost > most * before;
  if (trial->settling > 0 && !given_up) {
    trial->settling--;
    return EVEN_TRIAL_GOES_ON;
  }
  take(&trial->challenger, seconds);
  if (given_up) {
    return end(trial, EVEN_TRIAL_LOST);
  }
  count++;
  if (count < EVEN_TRIAL_CHALLENGE) {
    return EVEN_TRIAL_GOES_ON;
  }
  double gain = before - even_series_mean(&trial->challenger);
  double error = sqrt(variance_of(&trial->before) + variance_of(&trial->challenger));
  if (!(gain > trial->margin * before && gain > error)) {
    return end(trial, EVEN_TRIAL_LOST);
  }
  trial->state = EVEN_TRIAL_CHECKED;
  trial->settling = SETTLE;
  return EVEN_TRIAL_GOES_ON;
}

even_trial_result even_trial_take(even_trial *trial, bool challenger, double seconds) {
  if (trial->state == EVEN_TRIAL_IDLE) {
    if (!challenger) {
      take(&trial->before, seconds);
    }
    return EVEN_TRIAL_GOES_ON;
  }
  bool awaited = challenger == (trial->state == EVEN_TRIAL_CHALLENGER_RUNS);
  trial->missed = awaited ? 0 : trial->missed + 1;
  if (!awaited) {
    return trial->missed < EVEN_TRIAL_MISSED ? EVEN_TRIAL_GOES_ON : end(trial, EVEN_TRIAL_LOST);
  }
  if (trial->state == EVEN_TRIAL_CHALLENGER_RUNS) {
    return challenge(trial, seconds);
  }
  if (trial->settling > 0) {
    trial->settling--;
    return EVEN_TRIAL_GOES_ON;
  }
  take(&trial->after, seconds);
  if (even_series_count(&trial->after) < CHECK) {
    return EVEN_TRIAL_GOES_ON;
  }
  bool faster = even_series_mean(&trial->challenger) < even_series_mean(&trial->after) * (1.0 - trial->margin);
  return end(trial, faster ? EVEN_TRIAL_WON : EVEN_TRIAL_LOST);
}
