/* Invented ranks, unequal, noisy and changing, whose true speeds the tests know. */
#ifndef EVEN_TESTS_BALANCER_CLUSTER_H
#define EVEN_TESTS_BALANCER_CLUSTER_H

#include <evenstep/balancer.h>
#include <stdbool.h>

enum { CLUSTER_RANKS = 64 };

typedef struct cluster_rank {
  double fixed;      /* seconds of work of every step */
  double per_sample; /* seconds of work of a sample */
  double slower;     /* factor now; 1: as built, 0 is read as 1 */
  double noise;      /* each step takes 1 - noise … 1 + noise of its time */
  double lognormal;  /* standard deviation of the logarithm of a step's time */
  double outliers;   /* chance of a step that takes five times as long */
  double quota; /* of a core's time, in each period; 0: none. As the kernel's CPU quota does it: the work goes on at
                   full speed until the period's time is used up, then stands still until the next */
  double period;
  double left; /* of this period's time */
} cluster_rank;

typedef struct cluster {
  size_t ranks;
  cluster_rank rank[CLUSTER_RANKS];
  double now;
  uint64_t state;
  double change; /* seconds that a rank's step takes longer when its share is another than the step before */
  double tilt;   /* each rank is slower by this factor times the part of the batch by which the shares differ */
  int64_t centre[CLUSTER_RANKS]; /* the split that suits them: tilt counts the distance from it; all 0: from equal */
  int64_t before[CLUSTER_RANKS]; /* shares of the step before */
  double dummy;                  /* part of a sample's time that a dummy batch takes; 0 is read as 1 */
  bool idles;                    /* ranks without samples take no time, instead of that of a dummy batch */
  double first_step;             /* factor of the first step's time: warm-up; 0 is read as 1 */
  int64_t steps;
} cluster;

/* One step of all ranks; its time is the slowest rank's. The same state draws the same noise whatever the shares. */
double cluster_step(cluster *c, const int64_t *shares, even_step_timing *timings);
/* The best split at the true speeds. */
void cluster_best(const cluster *c, int64_t batch, int64_t *shares);

#endif
