/* Splits that the models do not know to be better, tried and measured: less for a rank that a quota stops, more for it
 * again, and fixed ones (no regret). */
#ifndef EVEN_BALANCER_GUARD_H
#define EVEN_BALANCER_GUARD_H

#include <evenstep/balancer.h>
#include <stdbool.h>

#include "balancer/fixed.h"
#include "balancer/stops.h"
#include "balancer/trial.h"

enum { EVEN_GUARD_SETTLED = 16 }; /* steps of a split before it counts as measured */

/* A rank whose time is often further than this part from its mean is bursty. */
static const double EVEN_GUARD_FAR = 1.0 / 3.0;

/* What a trial asks. */
typedef enum even_guard_question {
  EVEN_GUARD_CAUTION,  /* does a rank that is mostly fast, and sometimes stopped, do better with less? */
  EVEN_GUARD_MEETINGS, /* ranks wait for one another within steps: is less for one of them faster? */
  EVEN_GUARD_RELEASE,  /* does one that was cut do as well with more? */
  EVEN_GUARD_MODELS,   /* ranks are bursty: is the split that the models propose faster? */
  EVEN_GUARD_SIZES,    /* times are no straight lines: is a size that never ran as fast as the next smaller one? */
  EVEN_GUARD_RATES,    /* ranks take unequal times: would shares by what each does in a second be faster? */
  EVEN_GUARD_EQUAL,    /* would equal shares be faster? */
  EVEN_GUARD_PRIOR,    /* would the profile's be? */
  EVEN_GUARD_RETURN,   /* one of these two is in force: would the models' split be faster now? */
  EVEN_GUARD_QUESTIONS
} even_guard_question;

typedef struct even_guard {
  size_t ranks;
  double *floors;       /* seconds that a sample takes a rank at least, whatever its busy seconds say; 0: no floor */
  double *floors_tried; /* of the challenger */
  bool *met;            /* its floor is for what others wait for it within steps: it counts at any share */
  double *blame;        /* seconds that the others waited for each rank alone, of late */
  double blame_weight;  /* how much of a memory it has */
  double *busy;         /* mean busy seconds of each rank, of late */
  double busy_of;       /* and the steps', in the same mean: a machine that becomes faster leaves no rank idle */
  double *scatter;      /* and their variance */
  double *bursts;       /* how often each rank's time is far from its mean */
  double recent;        /* mean seconds of the last dozen steps */
  int64_t *watched;     /* the split whose steps the trial remembers */
  int64_t *challenger;  /* shares of a whole batch in a trial */
  even_fixed fixed[EVEN_FIXED_COUNT];
  even_fixed_name in_force; /* a fixed split: the models' was measured slower */
  even_fixed_name compared; /* in the last trial of a fixed split against the models' */
  even_fixed_name doubted;  /* it won a trial, though the models say that it is far slower: it is tried again at once */
  double against;           /* how many times the models' step the one in force took by the models, as it won */
  even_trial trial;
  even_stops stops;                   /* in the challenger's steps */
  even_guard_question question;       /* of the trial that runs */
  bool alone;                         /* the next trial of caution holds back one rank, not all that are stopped */
  double released;                    /* by what factor floors are lowered in the next trial */
  int64_t next[EVEN_GUARD_QUESTIONS]; /* steps before which the question is not asked again */
  int64_t pause[EVEN_GUARD_QUESTIONS];
} even_guard;

struct even_balancer;

even_status even_guard_open(even_guard *guard, struct even_balancer *balancer) EVEN_MUST_USE;
void even_guard_close(even_guard *guard);
/* Takes one step's timings; ends and begins trials. */
even_status even_guard_take(struct even_balancer *balancer, const even_step_timing *timings) EVEN_MUST_USE;
/* Takes a step that says nothing of a split, for a change to it took its time: a trial that runs has cost it. */
void even_guard_pass(struct even_balancer *balancer);
/* The rank's steps took so many seconds more than was taken (< 0: fewer); even_guard_begin_anew follows. */
void even_guard_shift(even_guard *guard, size_t rank, double seconds);
/* What was measured of splits is no longer true: a trial is given up, and the one in force is measured anew. */
void even_guard_begin_anew(struct even_balancer *balancer);
/* Whether shares must stay as they are: a trial runs, or ranks are so bursty that only measuring a split tells. */
bool even_guard_holds(const struct even_balancer *balancer);
/* The caps are other ones: fixed splits are made anew, a trial is given up. */
even_status even_guard_caps_changed(struct even_balancer *balancer) EVEN_MUST_USE;
/* Whether `guard.floors_tried` lead to another split, which then is the challenger. */
even_status even_guard_challenge(struct even_balancer *balancer, even_guard_question question,
                                 bool *begun) EVEN_MUST_USE;
/* Its halves: the split that these floors lead to, as b->candidate, and whether it is another than the one that runs; …
 */
even_status even_guard_candidate(struct even_balancer *balancer, bool *other) EVEN_MUST_USE;
/* … the trial of b->candidate and `guard.floors_tried`; or the question's next turn is some steps away. */
void even_guard_begin(struct even_balancer *balancer, even_guard_question question);
void even_guard_wait(struct even_balancer *balancer, even_guard_question question);
/* What was asked and refused is no longer true: it is asked as at the beginning. */
void even_guard_ask_anew(struct even_balancer *balancer, even_guard_question question);
/* The shares of a whole batch that are to run now. */
const int64_t *even_guard_shares(const struct even_balancer *balancer);

#endif
