/* Median plus many deviations, made anew every few losses. */
#include "monitor/spike.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A jump is above the median by many standard deviations, as MAD tells them of normal noise, and by so much of the
 * median at least: the noise of a loss that hardly moves any more is no measure. */
static const double DEVIATION_OF_MAD = 1.4826;
static const double LEAST_PART = 0.1;
enum { MADE_ANEW_EVERY = 8 };

static int compare(const void *a, const void *b) {
  double x = *(const double *)a;
  double y = *(const double *)b;
  return x < y ? -1 : x > y;
}

static double median_of(double *values, size_t count) {
  qsort(values, count, sizeof *values, compare);
  return count % 2 == 1 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

static void make_limit(even_spikes *spikes) {
  double values[EVEN_SPIKE_WINDOW];
  size_t count = spikes->count < EVEN_SPIKE_WINDOW ? spikes->count : EVEN_SPIKE_WINDOW;
  memcpy(values, spikes->losses, count * sizeof *values);
  spikes->median = median_of(values, count);
  for (size_t i = 0; i < count; i++) {
    values[i] = fabs(values[i] - spikes->median);
  }
  double deviation = DEVIATION_OF_MAD * median_of(values, count);
  double times = spikes->deviations > 0 ? spikes->deviations : (double)EVEN_SPIKE_DEVIATIONS;
  spikes->limit = spikes->median + fmax(times * deviation, LEAST_PART * fabs(spikes->median));
  spikes->counted = spikes->count;
}

bool even_spikes_take(even_spikes *spikes, uint32_t step, double loss) {
  bool before = spikes->inside;
  if (!isfinite(loss) || isinf(spikes->deviations)) {
    return false;
  }
  if (spikes->count >= EVEN_SPIKE_LEAST) {
    bool old = spikes->counted == 0 || spikes->count - spikes->counted >= MADE_ANEW_EVERY;
    if (old || (loss > spikes->limit && spikes->counted != spikes->count)) {
      make_limit(spikes);
    }
    spikes->inside = loss > spikes->limit;
    spikes->since = spikes->inside && !before ? step : spikes->since;
  }
  spikes->losses[spikes->count++ % EVEN_SPIKE_WINDOW] = loss;
  return spikes->inside != before;
}

void even_spikes_forget(even_spikes *spikes) {
  *spikes = (even_spikes){.deviations = spikes->deviations};
}
