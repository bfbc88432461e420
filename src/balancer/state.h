/* What a balancer knows, for the files that decide on it. */
#ifndef EVEN_BALANCER_STATE_H
#define EVEN_BALANCER_STATE_H

#include "balancer/change.h"
#include "balancer/exchange.h"
#include "balancer/guard.h"
#include "balancer/level.h"
#include "balancer/meetings.h"
#include "balancer/model.h"
#include "balancer/replay.h"
#include "balancer/scatter.h"
#include "balancer/solve.h"

enum {
  EVEN_TABLE_POINTS = EVEN_SHAPE_HOPES + 3, /* of a rank's table: the dummy batch, one sample, sizes, far out */
  EVEN_PROBE_EVERY = 64,                    /* steps between two trials of ranks that idle */
  EVEN_LEAST_STEPS = 2                      /* a rank's first step is warm-up: nothing changes before its second */
};

struct even_balancer {
  even_policy policy;
  size_t ranks;
  int64_t batch;
  double *speeds;
  int64_t *caps;
  even_rank_model *models;
  int64_t *current; /* shares of a whole batch */
  int64_t *candidate;
  int64_t *unlimited; /* the best split, were it trusted at once */
  int64_t *reach;     /* caps, and how far a rank's share may grow beyond what was measured */
  even_rank_cost *costs;
  int64_t *table_samples;
  double *table_seconds;
  even_solve_room room;
  even_guard guard;
  even_scatter scatter;
  double *scatters;    /* variances, beside the fastest rank, as the tables have them … */
  int64_t scatters_at; /* … after so many steps */
  even_replay replay;
  even_level level;
  even_change change;
  even_exchange exchange;
  even_meetings meetings;
  even_step_timing *last; /* the last step that was observed, as it was told */
  even_policy_function choose;
  void *choose_context;
  double *view_fixed; /* what the caller's policy is shown of the models */
  double *view_slope;
  int64_t steps;
  int64_t next_probe; /* the step from which a rank without samples and without timings may be tried again */
  int64_t probe_left; /* steps that the trial goes on */
  size_t probed;      /* the rank that is, or was last, tried */
};

/* Whether the step was one of a whole batch, not of a last one that is smaller. */
bool even_balancer_whole(const even_balancer *b, const even_step_timing *timings);
/* Whether the policy follows what is measured. */
bool even_balancer_measured(const even_balancer *b);
/* Whether every rank that has samples was measured. */
bool even_balancer_learned(const even_balancer *b);

/* Tables of the prior speeds, of equal speeds, and of what was measured: a rank that never had samples is judged by
 * its prior speed beside the others; one that its quota stops, by its floor; the headroom is that of a step of `batch`
 * samples. */
void even_balancer_expect(even_balancer *b);
void even_balancer_expect_equal(even_balancer *b);
/* Of one rank: a sample takes so long, and nothing else does. */
void even_balancer_expect_rate(even_balancer *b, size_t rank, double per_sample);
void even_balancer_believe(even_balancer *b, int64_t batch);
/* Seconds of a step with these shares, by the tables. */
double even_balancer_step_seconds(const even_balancer *b, const int64_t *shares);
/* The best split by what is believed, no further than what was measured allows, into b->candidate. */
even_status even_balancer_propose(even_balancer *b, double *promised) EVEN_MUST_USE;
/* A split that is shorter by this part `gain` of a step, if what may be hoped for of sizes that never ran is true;
 * whether there is any, which then is b->candidate. */
even_status even_balancer_hope(even_balancer *b, double gain, bool *any) EVEN_MUST_USE;
/* Takes the best split where it pays. */
even_status even_balancer_decide(even_balancer *b) EVEN_MUST_USE;

/* Shares of the caller's policy. */
even_status even_balancer_ask_callback(even_balancer *b, int64_t batch, int64_t *shares) EVEN_MUST_USE;

/* After each step: a rank whose share is zero and that runs no dummy batch shows nothing; from time to time it gets one
 * sample. */
void even_balancer_probe(even_balancer *b);
void even_balancer_give_probe(const even_balancer *b, int64_t *shares);

#endif
