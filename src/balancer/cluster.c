/* Invented ranks, unequal, noisy and changing. */
#include "balancer/cluster.h"

#include <math.h>

#include "balancer/pseudo_random.h"

enum { MOST_BENDS = 5 };

static double factor_of(const even_cluster_rank *rank) {
  return rank->slower > 0.0 ? rank->slower : 1.0;
}

/* Wall seconds for `work` seconds of a core's time under the rank's quota, from the cluster's present on. */
static double throttled(even_cluster_rank *rank, double now, double work) {
  double at = now;
  for (;;) {
    double next = (floor(at / rank->period + 1e-9) + 1.0) * rank->period;
    double possible = fmin(rank->left, next - at);
    if (work <= possible) {
      rank->left -= work;
      return at + work - now;
    }
    work -= possible;
    at = next;
    rank->left = rank->quota * rank->period;
  }
}

/* What is left of the quota's present period after all waited until `now`. */
static void refill(even_cluster_rank *rank, double before, double now) {
  if (floor(now / rank->period + 1e-9) > floor(before / rank->period + 1e-9)) {
    rank->left = rank->quota * rank->period;
  }
}

/* Box and Muller (1958). */
static double normal(even_cluster *c) {
  double radius = sqrt(-2.0 * log(1.0 - even_pseudo_random_unit(&c->state)));
  double angle = 6.283185307179586 * even_pseudo_random_unit(&c->state);
  return radius * cos(angle);
}

enum { WANDERS_IN = 50 };

/* An Ornstein-Uhlenbeck process: its speed is another one within so many steps. */
static double wandering(even_cluster *c, even_cluster_rank *rank) {
  double kept = 1.0 - 1.0 / (double)WANDERS_IN;
  rank->wandered = kept * rank->wandered + rank->wander * sqrt(1.0 - kept * kept) * normal(c);
  return exp(rank->wandered);
}

/* By how much all ranks are slower because the shares differ. */
static double tilted(const even_cluster *c, const int64_t *shares) {
  int64_t least = INT64_MAX;
  int64_t most = INT64_MIN;
  int64_t sum = 0;
  for (size_t r = 0; r < c->ranks; r++) {
    int64_t off = shares[r] - c->centre[r];
    least = off < least ? off : least;
    most = off > most ? off : most;
    sum += shares[r];
  }
  return 1.0 + c->tilt * (double)(most - least) / (double)sum;
}

/* Draws nothing where there is none: other ranks' noise stays. */
static double own_part(even_cluster *c, const even_cluster_rank *rank) {
  if (!(rank->own > 0.0)) {
    return 0.0;
  }
  double noise = 1.0 + rank->own_noise * (2.0 * even_pseudo_random_unit(&c->state) - 1.0);
  return even_pseudo_random_unit(&c->state) < rank->own_seldom ? 0.0 : rank->own * noise;
}

/* So many samples of a straight line take as long. */
static double bent(const even_cluster_rank *rank, double samples) {
  double as = samples < (double)rank->flat ? (double)rank->flat : samples;
  return rank->bend > 0 && as > (double)rank->bend ? as + (rank->steeper - 1.0) * (as - (double)rank->bend) : as;
}

static double tiled(const even_cluster_rank *rank, double samples) {
  return rank->tile > 1 ? ceil(samples / (double)rank->tile) * (double)rank->tile : samples;
}

double even_cluster_work(const even_cluster_rank *rank, double samples) {
  double pieces = rank->micro_batch > 0 ? ceil(samples / (double)rank->micro_batch) : 0.0;
  return rank->fixed + rank->per_sample * bent(rank, tiled(rank, samples)) + rank->per_piece * pieces;
}

/* What of the rank's work, in a step of `samples`, its samples are. */
static double part_of_samples(const even_cluster_rank *rank, int64_t samples) {
  double many = samples > 0 ? (double)samples : 1.0;
  double work = even_cluster_work(rank, many);
  return work > 0.0 ? 1.0 - rank->fixed / work : 0.0;
}

/* What of a step's work the part before each meeting is, and that after the last; of a rank of whose work so much are
 * its samples. */
static double part_of_work(even_cluster *c, int part, double samples) {
  double parts = (double)(c->meetings + 1);
  double even = 1.0 / parts;
  if (c->meetings == 0) {
    return even;
  }
  if (c->uneven > 0.0) {
    double falls = exp(-c->uneven / (double)c->meetings);
    even = (1.0 - samples) / parts + samples * pow(falls, part) * (1.0 - falls) / (1.0 - pow(falls, parts));
  }
  return c->parts > 0.0 ? even * exp(c->parts * normal(c)) : even;
}

/* Works off so many core seconds of each rank, a part before each meeting and one after the last, and tells how many
 * they became: for how long each was seen to work, and when it was done. */
static void work_and_meet(even_cluster *c, const int64_t *shares, double *seconds, double *seen, double *done) {
  double at = c->now;
  double worked[EVEN_CLUSTER_RANKS] = {0.0};
  for (size_t r = 0; r < c->ranks; r++) {
    seen[r] = 0.0;
  }
  for (int meeting = 0; meeting <= c->meetings; meeting++) {
    double met = at;
    for (size_t r = 0; r < c->ranks; r++) {
      even_cluster_rank *rank = &c->rank[r];
      double part = seconds[r] * part_of_work(c, meeting, part_of_samples(rank, shares[r]));
      double lasts = rank->quota > 0.0 ? throttled(rank, at, part) : part;
      worked[r] += part;
      seen[r] += lasts;
      done[r] = at + lasts;
      if (meeting < c->meetings && rank->meets > 0.0) {
        done[r] += rank->quota > 0.0 ? throttled(rank, done[r], rank->meets) : rank->meets;
      }
      met = fmax(met, done[r]);
    }
    for (size_t r = 0; meeting < c->meetings && r < c->ranks; r++) {
      if (c->rank[r].quota > 0.0) {
        refill(&c->rank[r], done[r], met);
      }
    }
    at = met;
  }
  for (size_t r = 0; c->meetings > 0 && r < c->ranks; r++) {
    seconds[r] = worked[r];
  }
}

double even_cluster_step(even_cluster *c, const int64_t *shares, even_step_timing *timings) {
  double longest = 0.0;
  double work[EVEN_CLUSTER_RANKS] = {0.0};
  double seen[EVEN_CLUSTER_RANKS] = {0.0};
  double done[EVEN_CLUSTER_RANKS] = {0.0};
  double tilt = tilted(c, shares);
  for (size_t r = 0; r < c->ranks; r++) {
    even_cluster_rank *rank = &c->rank[r];
    double noise = 1.0 + rank->noise * (2.0 * even_pseudo_random_unit(&c->state) - 1.0);
    noise *= rank->lognormal > 0.0 ? exp(rank->lognormal * normal(c)) : 1.0;
    noise *= rank->wander > 0.0 ? wandering(c, rank) : 1.0;
    noise *= even_pseudo_random_unit(&c->state) < rank->outliers ? 5.0 : 1.0;
    noise *= c->steps == 0 && c->first_step > 0.0 ? c->first_step : 1.0;
    work[r] = even_cluster_work(rank, shares[r] > 0 ? (double)shares[r] : 1.0) * factor_of(rank) * noise * tilt;
    work[r] *= shares[r] == 0 && c->dummy > 0.0 ? c->dummy : 1.0;
    if (shares[r] == 0 && c->idles) {
      work[r] = 0.0;
    }
    c->exchange[r] = own_part(c, rank);
  }
  work_and_meet(c, shares, work, seen, done);
  for (size_t r = 0; r < c->ranks; r++) {
    const even_cluster_rank *rank = &c->rank[r];
    double given = c->steps > 0 ? fmin(c->together, rank->period) : 0.0; /* as evenstep.step_times counts it */
    double lasts = !c->clocked && rank->quota > 0.0 ? work[r] / rank->quota - given : 0.0;
    double changes = c->steps > 0 && shares[r] != c->before[r] ? c->change : 0.0;
    c->before[r] = shares[r];
    timings[r] = (even_step_timing){.samples = shares[r], .busy_seconds = fmax(seen[r] + changes, lasts)};
    c->pass[r] = done[r] + changes - c->now;
    longest = fmax(longest, c->pass[r] + c->exchange[r]);
  }
  longest += c->together;
  for (size_t r = 0; r < c->ranks; r++) {
    if (c->rank[r].quota > 0.0) {
      refill(&c->rank[r], c->now + c->pass[r], c->now + longest);
    }
  }
  c->now += longest;
  c->steps++;
  return longest;
}

/* Where the line of a rank bends, rising; the first is a dummy batch's and the last far out. */
static size_t bends_of(const even_cluster_rank *rank, int64_t *samples) {
  int64_t low = rank->flat < rank->bend ? rank->flat : rank->bend;
  int64_t high = rank->flat < rank->bend ? rank->bend : rank->flat;
  size_t points = 0;
  samples[points++] = 0;
  samples[points++] = rank->tile > 1 ? rank->tile : 1;
  if (low > samples[points - 1]) {
    samples[points++] = low;
  }
  if (high > samples[points - 1]) {
    samples[points++] = high;
  }
  samples[points++] = 1 << 20;
  return points;
}

even_status even_cluster_best(const even_cluster *c, int64_t batch, int64_t *shares) {
  int64_t samples[EVEN_CLUSTER_RANKS][MOST_BENDS];
  double seconds[EVEN_CLUSTER_RANKS][MOST_BENDS] = {{0.0}};
  even_rank_cost costs[EVEN_CLUSTER_RANKS];
  for (size_t r = 0; r < c->ranks; r++) {
    const even_cluster_rank *rank = &c->rank[r];
    double speed = factor_of(rank) / (rank->quota > 0.0 ? rank->quota : 1.0);
    double own = rank->own * (1.0 - rank->own_seldom);
    double each = rank->micro_batch > 0 ? rank->per_piece : rank->fixed; /* micro-batch */
    double step = rank->micro_batch > 0 ? own + rank->fixed * speed : 0.0;
    double rest = rank->micro_batch > 0 ? 0.0 : own;
    size_t points = bends_of(rank, samples[r]);
    for (size_t i = 1; i < points; i++) {
      seconds[r][i] = (each + rank->per_sample * bent(rank, (double)samples[r][i])) * speed + rest;
    }
    seconds[r][0] = c->idles ? rest : seconds[r][1];
    costs[r] = (even_rank_cost){.table = {samples[r], seconds[r], points},
                                .constant_seconds = step,
                                .micro_batch = rank->micro_batch,
                                .bucket = rank->tile};
  }
  return even_balancer_solve_costs(costs, NULL, c->ranks, batch, shares, NULL);
}
