/* Two splits compared by what their steps took: the one in force, the challenger, and the one in force again, so that
 * ranks that change meanwhile favour neither. */
#ifndef EVEN_BALANCER_TRIAL_H
#define EVEN_BALANCER_TRIAL_H

#include <stdbool.h>

enum {
  EVEN_TRIAL_WINDOW = 48,    /* last steps of the split in force that are remembered */
  EVEN_TRIAL_CHALLENGE = 32, /* steps of a challenger */
  EVEN_TRIAL_MISSED = 288 /* of the split whose turn it is not, more than shares are ever late: the other never comes,
                             as where what runs of both is the same, since nobody may have a single sample */
};

/* Step times, the oldest overwritten. */
typedef struct even_series {
  int taken; /* in all */
  double seconds[EVEN_TRIAL_WINDOW];
} even_series;

typedef enum even_trial_state {
  EVEN_TRIAL_IDLE,
  EVEN_TRIAL_CHALLENGER_RUNS,
  EVEN_TRIAL_CHECKED /* the challenger was faster: the split in force runs again */
} even_trial_state;

typedef enum even_trial_result { EVEN_TRIAL_GOES_ON, EVEN_TRIAL_WON, EVEN_TRIAL_LOST } even_trial_result;

typedef struct even_trial {
  even_trial_state state;
  even_series before;
  even_series challenger;
  even_series after;
  int missed;    /* steps, the last ones, that ran with the split whose turn it was not */
  int settling;  /* steps that are passed over: what the other split left behind wears off */
  double lost;   /* seconds that the challenger cost beyond the split in force */
  double margin; /* gain that it must show, as a part of a step */
} even_trial;

void even_series_clear(even_series *series);
int even_series_count(const even_series *series);
/* Mean, with the outermost value at each end cut to the next: a lone outlier never counts. 0 when empty. */
double even_series_mean(const even_series *series);

void even_trial_begin(even_trial *trial, double margin);
/* A step's seconds; challenger: which of the two splits it ran with. After WON or LOST the trial is idle, and
 * challenger, before and lost say what was measured. */
even_trial_result even_trial_take(even_trial *trial, bool challenger, double seconds);

#endif
