/* What follows from the measured times. */
#include "monitor/measure.h"

#include <math.h>

const char *even_phase_text(even_phase phase) {
  switch (phase) {
    case EVEN_PHASE_STARTING:
      return "starting";
    case EVEN_PHASE_WARMING:
      return "warming up";
    case EVEN_PHASE_TRAINING:
      return "training";
    case EVEN_PHASE_STALLED:
      return "stalled";
    case EVEN_PHASE_DONE:
      return "done";
    case EVEN_PHASE_INTERRUPTED:
      return "interrupted";
    case EVEN_PHASE_FAILED:
      return "failed";
  }
  return "unknown";
}

void even_measure_derive(even_measure *measure) {
  double best = 0;
  for (int r = 0; r < measure->ranks; r++) {
    even_measure_rank *rank = &measure->rank[r];
    rank->samples_per_busy_second = rank->busy_seconds > 0 ? rank->share_samples / rank->busy_seconds : NAN;
    rank->wait_fraction = NAN;
    if (measure->step_seconds > 0 && isfinite(rank->busy_seconds)) {
      rank->wait_fraction = fmin(1, fmax(0, 1 - rank->busy_seconds / measure->step_seconds));
    }
    best += isfinite(rank->samples_per_busy_second) ? rank->samples_per_busy_second : 0;
  }
  measure->best_samples_per_second = best > 0 ? best : NAN;
  measure->efficiency = measure->samples_per_second / measure->best_samples_per_second;
}
