/* A measured time table as a function of whole samples. The function is monotone in the
 * rounded arithmetic too (each operation is, and segment ends are clamped): the solver's exactness rests on it. */
#include "balancer/time_table.h"

#include "base/fail.h"

#include <inttypes.h>
#include <math.h>

even_status even_time_table_check(const even_time_table *table, size_t rank) {
  if (table->points == 0 || table->samples == NULL || table->seconds == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "balancer: the time table of rank %zu has no points", rank);
  }
  for (size_t i = 0; i < table->points; i++) {
    if (!isfinite(table->seconds[i]) || table->seconds[i] < 0.0) {
      return even_fail(EVEN_ERR_ARGUMENT, "balancer: the time table of rank %zu has %g seconds at point %zu", rank,
                       table->seconds[i], i);
    }
    if (table->samples[i] < 0) {
      return even_fail(EVEN_ERR_ARGUMENT, "balancer: the time table of rank %zu has %" PRId64 " samples at point %zu",
                       rank, table->samples[i], i);
    }
    if (i > 0 && table->samples[i] <= table->samples[i - 1]) {
      return even_fail(EVEN_ERR_ARGUMENT,
                       "balancer: the samples in the time table of rank %zu do not rise at point %zu", rank, i);
    }
    if (i > 0 && table->seconds[i] < table->seconds[i - 1]) {
      (void)even_fail(EVEN_ERR_ARGUMENT, "balancer: the seconds in the time table of rank %zu fall at point %zu", rank,
                      i);
      return even_error_fix("more samples cannot take less time: give each point at least the time of the one before");
    }
  }
  return EVEN_OK;
}

/* The number of points at or below `samples` and `seconds`: both rise along the table. */
static size_t points_within(const even_time_table *table, int64_t samples, double seconds) {
  size_t low = 0;
  size_t high = table->points;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (table->samples[middle] <= samples && table->seconds[middle] <= seconds) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

static double line(double seconds, double slope_seconds, double run, double width) {
  return seconds + slope_seconds * (run / width);
}

double even_time_table_at(const even_time_table *table, int64_t samples) {
  size_t last = table->points - 1;
  size_t below = points_within(table, samples, INFINITY);
  if (below > 0 && table->samples[below - 1] == samples) {
    return table->seconds[below - 1];
  }
  if (below == 0) {
    double seconds = line(0.0, table->seconds[0], (double)samples, (double)table->samples[0]);
    return seconds < table->seconds[0] ? seconds : table->seconds[0];
  }
  size_t left = below - 1;
  double run = (double)(samples - table->samples[left]);
  if (left < last) {
    double width = (double)(table->samples[left + 1] - table->samples[left]);
    double seconds = line(table->seconds[left], table->seconds[left + 1] - table->seconds[left], run, width);
    return seconds < table->seconds[left + 1] ? seconds : table->seconds[left + 1];
  }
  if (last == 0) {
    /* a single point at 0 samples knows only a constant */
    return table->samples[0] == 0 ? table->seconds[0]
                                  : line(table->seconds[0], table->seconds[0], run, (double)table->samples[0]);
  }
  double width = (double)(table->samples[last] - table->samples[last - 1]);
  return line(table->seconds[last], table->seconds[last] - table->seconds[last - 1], run, width);
}

double even_time_table_guess(const even_time_table *table, double seconds) {
  size_t low = points_within(table, INT64_MAX, seconds);
  if (low == 0 || table->points == 1) {
    return (double)table->samples[0] * (seconds / table->seconds[0]);
  }
  size_t left = low - 1;
  size_t from = left + 1 == table->points ? left - 1 : left; /* past the last point its slope goes on */
  double rise = table->seconds[from + 1] - table->seconds[from];
  double width = (double)(table->samples[from + 1] - table->samples[from]);
  return (double)table->samples[left] + (seconds - table->seconds[left]) / rise * width;
}
