/* Splits that the models do not know to be better, tried and measured: less for a rank that a quota stops, more for it
 * again, and equal shares (no regret). */
#ifndef EVEN_BALANCER_GUARD_H
#define EVEN_BALANCER_GUARD_H

#include <evenstep/balancer.h>
#include <stdbool.h>

#include "balancer/stops.h"
#include "balancer/trial.h"

/* X(NAME): what a trial asks */
typedef enum even_guard_question {
  EVEN_GUARD_CAUTION, /* does a rank that is mostly fast, and sometimes stopped, do better with less? */
  EVEN_GUARD_RELEASE, /* does one that was cut do as well with more? */
  EVEN_GUARD_MODELS,  /* ranks are bursty: is the split that the models propose faster? */
  EVEN_GUARD_EQUAL,   /* would equal shares be faster? */
  EVEN_GUARD_RETURN,  /* equal shares are in force: would balanced ones be faster now? */
  EVEN_GUARD_QUESTIONS
} even_guard_question;

typedef struct even_guard {
  size_t ranks;
  double *floors;       /* seconds that a sample takes a rank at least, whatever its busy seconds say; 0: no floor */
  double *floors_tried; /* of the challenger */
  double *blame;        /* seconds that the others waited for each rank alone, of late */
  double blame_weight;  /* how much of a memory it has */
  double *busy;         /* mean busy seconds of each rank, of late */
  double *scatter;      /* and their variance */
  double *bursts;       /* how often each rank's time is far from its mean */
  double recent;        /* mean seconds of the last dozen steps */
  int64_t *watched;     /* the split whose steps the trial remembers */
  int64_t *equal;       /* equal shares of a whole batch */
  int64_t *challenger;  /* shares of a whole batch in a trial */
  even_trial trial;
  even_stops stops;                   /* in the challenger's steps */
  even_guard_question question;       /* of the trial that runs */
  bool on_equal;                      /* equal shares are in force: balancing was measured slower */
  double first_equal;                 /* seconds of the steps with equal shares as the run began, and their number … */
  int first_equals;                   /* … 0 once a trial has told more */
  bool alone;                         /* the next trial of caution holds back one rank, not all that are stopped */
  double released;                    /* by what factor floors are lowered in the next trial */
  int64_t next[EVEN_GUARD_QUESTIONS]; /* steps before which the question is not asked again */
  int64_t pause[EVEN_GUARD_QUESTIONS];
  double balanced_seconds; /* a step, as the last trial against equal shares measured them */
  double equal_seconds;
} even_guard;

struct even_balancer;

even_status even_guard_open(even_guard *guard, struct even_balancer *balancer) EVEN_MUST_USE;
void even_guard_close(even_guard *guard);
/* Takes one step's timings; ends and begins trials. */
even_status even_guard_take(struct even_balancer *balancer, const even_step_timing *timings) EVEN_MUST_USE;
/* Whether shares must stay as they are: a trial runs, or ranks are so bursty that only measuring a split tells. */
bool even_guard_holds(const struct even_balancer *balancer);
/* The shares of a whole batch that are to run now. */
const int64_t *even_guard_shares(const struct even_balancer *balancer);

#endif
