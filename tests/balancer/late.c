/* See late.h. */
#include "late.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

even_balancer_params late_params(even_policy policy, size_t ranks, int64_t batch) {
  return (even_balancer_params){.size = sizeof(even_balancer_params), .policy = policy, .ranks = ranks, .batch = batch};
}

even_balancer *late_balancer(const even_balancer_params *params) {
  even_balancer *balancer = NULL;
  assert_int_equal(even_balancer_open(params, &balancer), EVEN_OK);
  return balancer;
}

void late_open(late_job *job, const even_balancer_params *params, const even_cluster *ranks, uint64_t state) {
  memset(job, 0, sizeof *job);
  job->ranks = job->twin = *ranks;
  job->ranks.state = job->twin.state = state;
  job->batch = params->batch;
  job->balancer = late_balancer(params);
  for (int i = 0; i <= LATE_AHEAD; i++) {
    assert_int_equal(even_balancer_shares(job->balancer, job->batch, job->queue[i]), EVEN_OK);
  }
  memcpy(job->ran, job->queue[0], sizeof job->ran);
}

void late_close(late_job *job) {
  even_balancer_close(job->balancer);
}

static void step(late_job *job) {
  even_step_timing timings[EVEN_CLUSTER_RANKS];
  even_step_timing ignored[EVEN_CLUSTER_RANKS];
  int64_t best[EVEN_CLUSTER_RANKS];
  assert_int_equal(even_cluster_best(&job->twin, job->batch, best), EVEN_OK);
  job->changes += memcmp(job->ran, job->queue[0], sizeof job->ran) != 0;
  memcpy(job->ran, job->queue[0], sizeof job->ran);
  memmove(job->queue[0], job->queue[1], LATE_AHEAD * sizeof job->queue[0]);
  job->seconds += even_cluster_step(&job->ranks, job->ran, timings);
  job->best_seconds += even_cluster_step(&job->twin, best, ignored);
  const double *told = job->silent ? NULL : job->ranks.exchange;
  const double *passes = job->waits ? job->ranks.pass : NULL;
  assert_int_equal(even_balancer_observe_waits(job->balancer, timings, NULL, told, passes), EVEN_OK);
  assert_int_equal(even_balancer_shares(job->balancer, job->batch, job->queue[LATE_AHEAD]), EVEN_OK);
}

void late_steps(late_job *job, int count) {
  for (int i = 0; i < count; i++) {
    step(job);
  }
}

double late_efficiency(late_job *job, int count) {
  double seconds = job->seconds;
  double best_seconds = job->best_seconds;
  late_steps(job, count);
  return (job->best_seconds - best_seconds) / (job->seconds - seconds);
}
