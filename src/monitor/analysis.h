/* The numbers of a whole run, over its steady steps. */
#ifndef EVEN_MONITOR_ANALYSIS_H
#define EVEN_MONITOR_ANALYSIS_H

#include "monitor/history.h"

typedef struct even_analysis_rank {
  double share_samples; /* means over the steady steps */
  double busy_seconds;
  double wait_fraction;           /* of all steady time */
  double samples_per_busy_second; /* median */
} even_analysis_rank;

typedef struct even_analysis {
  long steps;          /* done and kept: a step done again after a restart counts once */
  long steady_steps;   /* that the numbers below are over */
  double step_seconds; /* median */
  double mean_step_seconds;
  double samples_per_second;      /* median over the steps of batch / duration */
  double best_samples_per_second; /* median over the steps of the sum over ranks of samples / busy second */
  double efficiency;              /* of these two */
  double batch;
  double first_loss;
  double last_loss;
  int ranks;
  even_analysis_rank *rank;
} even_analysis;

/* Free with even_analysis_free, also after a failure. */
even_status even_analysis_make(even_history *history, even_analysis *out) EVEN_MUST_USE;
void even_analysis_free(even_analysis *analysis);

#endif
