/* Invented ranks, unequal, noisy and changing, whose true speeds are known. */
#ifndef EVEN_BALANCER_CLUSTER_H
#define EVEN_BALANCER_CLUSTER_H

#include <evenstep/balancer.h>
#include <stdbool.h>

enum { EVEN_CLUSTER_RANKS = 64 };

typedef struct even_cluster_rank {
  double fixed;      /* seconds of work of every step */
  double per_sample; /* seconds of work of a sample */
  int64_t flat;      /* > 1: fewer samples take as long as so many: a device that they do not fill */
  int64_t bend;      /* > 0: each sample beyond so many takes `steeper` times as long, as where caches or memory end */
  double steeper;    /* >= 1 */
  int64_t tile;      /* > 1: a share takes as long as the next multiple, as kernels for whole tiles do */
  int64_t micro_batch; /* > 0: a larger share runs as micro-batches of so many samples, … */
  double per_piece;    /* … each of which takes so many seconds beyond its samples' */
  double slower;       /* factor now; 1: as built, 0 is read as 1 */
  double noise;        /* each step takes 1 - noise … 1 + noise of its time */
  double lognormal;    /* standard deviation of the logarithm of a step's time */
  double wander;   /* standard deviation of the logarithm of its speed, which comes and goes within some 100 steps */
  double outliers; /* chance of a step that takes five times as long */
  double quota;    /* of a core's time, in each period; 0: none. As the kernel's CPU quota does it: the work goes on at
                      full speed until the period's time is used up, then stands still until the next */
  double period;
  double meets;     /* of a core, for each meeting within a step; no part of its work, as what it waits there is none */
  double own;       /* seconds of the exchange that are its own, after all have met */
  double own_noise; /* each step takes 1 - own_noise … 1 + own_noise of them … */
  double own_seldom; /* … and this part of the steps none */
  double left;       /* of this period's time */
  double wandered;   /* the logarithm now */
} even_cluster_rank;

typedef struct even_cluster {
  size_t ranks;
  even_cluster_rank rank[EVEN_CLUSTER_RANKS];
  double now;
  uint64_t state;
  double change; /* seconds that a rank's step takes longer when its share is another than the step before */
  double tilt;   /* each rank is slower by this factor times the part of the batch by which the shares differ */
  int64_t
      centre[EVEN_CLUSTER_RANKS]; /* the split that suits them: tilt counts the distance from it; all 0: from equal */
  int64_t before[EVEN_CLUSTER_RANKS]; /* shares of the step before */
  double dummy;                       /* part of a sample's time that a dummy batch takes; 0 is read as 1 */
  bool clocked;      /* ranks under a quota tell what the clock saw alone, not what their CPU time lasts by the quota */
  bool idles;        /* ranks without samples take no time, instead of that of a dummy batch */
  double together;   /* seconds of each step's end in which all exchange, and none works */
  int meetings;      /* in each step's work all wait for all so often, after equal parts of it … */
  double uneven;     /* … but that its samples' work is less in each part, in the last by this logarithm … */
  double parts;      /* … and each part's time scatters: standard deviation of its logarithm */
  double first_step; /* factor of the first step's time: warm-up; 0 is read as 1 */
  int64_t steps;
  double exchange[EVEN_CLUSTER_RANKS]; /* of the last step: each rank's own part, … */
  double pass[EVEN_CLUSTER_RANKS];     /* … and how long its work lasted, with what it waited in meetings */
} even_cluster;

/* One step of all ranks; its time is the slowest rank's, with its own part of the exchange. The same state draws the
 * same noise whatever the shares. */
double even_cluster_step(even_cluster *c, const int64_t *shares, even_step_timing *timings);
/* Seconds of work of a share of `samples` >= 1, at the speed as built. */
double even_cluster_work(const even_cluster_rank *rank, double samples);
/* The best split at the true speeds. Errors: those of even_balancer_solve. */
even_status even_cluster_best(const even_cluster *c, int64_t batch, int64_t *shares) EVEN_MUST_USE;

#endif
