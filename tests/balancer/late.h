/* Invented ranks with a balancer whose shares reach them two steps late, as they do when loading is ahead; beside a
 * twin that is told the true speeds, has the best split of each step, and draws the same noise. */
#ifndef EVEN_TESTS_BALANCER_LATE_H
#define EVEN_TESTS_BALANCER_LATE_H

#include <evenstep/balancer.h>
#include <stdbool.h>

#include "balancer/cluster.h"

enum { LATE_AHEAD = 2 };

typedef struct late_job {
  even_cluster ranks;
  even_cluster twin; /* whoever changes how fast the ranks are changes both */
  even_balancer *balancer;
  int64_t batch;
  int64_t queue[LATE_AHEAD + 1][EVEN_CLUSTER_RANKS]; /* the next step's shares first */
  int64_t ran[EVEN_CLUSTER_RANKS];                   /* the last step's */
  bool silent;                                       /* nobody tells its own part of the exchange */
  bool waits;                                        /* all tell how long their work lasted with its waits */
  double seconds;                                    /* of all steps so far … */
  double best_seconds;                               /* … and the twin's */
  int changes;                                       /* steps with other shares than the one before */
} late_job;

/* These, and the defaults of all others. */
even_balancer_params late_params(even_policy policy, size_t ranks, int64_t batch);
/* A balancer with these parameters, which must open; the caller closes it. */
even_balancer *late_balancer(const even_balancer_params *params);

/* `state`: of the noise. The balancer is opened with these parameters; closed with late_close. */
void late_open(late_job *job, const even_balancer_params *params, const even_cluster *ranks, uint64_t state);
void late_close(late_job *job);
void late_steps(late_job *job, int count);
/* The twin's time / the job's, of so many steps more. */
double late_efficiency(late_job *job, int count);

#endif
