/* The parts of `evenstep bench balance`. */
#ifndef EVEN_CLI_BENCH_BALANCE_H
#define EVEN_CLI_BENCH_BALANCE_H

#include "base/text.h"

#include <evenstep/balancer.h>

enum {
  EVEN_BENCH_SEEDS = 9,
  EVEN_BENCH_STEPS = 1200, /* of a simulated training, at most */
  EVEN_BENCH_FIRST = 10,   /* step from which on simulated ones count */
  EVEN_BENCH_POLICIES = 5
};

/* What is simulated. */
typedef struct even_bench_plan {
  even_policy policies[EVEN_BENCH_POLICIES];
  size_t policy_count;
  int seeds; /* 1 … EVEN_BENCH_SEEDS */
  int steps; /* EVEN_BENCH_FIRST + 1 … EVEN_BENCH_STEPS; a rank that slows down in mid-run needs all of them */
} even_bench_plan;

/* bench_balance_options.c: "equal,auto" into the plan, each once. EVEN_ERR_USAGE names what is no policy, or the
 * nearest. */
even_status even_bench_policies(const char *text, even_bench_plan *plan) EVEN_MUST_USE;
/* Whether "1:1,4:1" are speeds of so many ranks each; else EVEN_ERR_USAGE. */
even_status even_bench_speeds(const char *text, size_t ranks) EVEN_MUST_USE;

/* Whether "steady,drifting" are courses of the real ranks' speeds; else EVEN_ERR_USAGE. */
even_status even_bench_courses(const char *text) EVEN_MUST_USE;

/* Whether this is a model that can be trained, `sizes` (NULL: as they are) are sizes of it ("layers=2,width=64", or
 * "published"), and `data` (NULL: synthetic) is a place that its images may be in; else EVEN_ERR_USAGE. */
even_status even_bench_model(const char *name, const char *sizes, const char *data) EVEN_MUST_USE;

/* bench_simulated.c: JSON, appended to `out`: {seeds, steps, rows: [{case, course, ranks, policy, samples_per_second,
 * bound_samples_per_second, of_bound, utilisation: [a rank …], imbalance}], changes: [{case, policy,
 * steps_after_slowing: [a seed …], steps_after_recovery}], noise: [{case, policy, lost}]}. Policy "single" is the
 * fastest rank alone. The bound is the best split of each step at the true speeds, with the same noise; utilisation is
 * the part of the time that a rank is busy, imbalance how much longer the longest rank of a step is busy than the mean
 * one, `lost` what the policy is slower than the best of all fixed splits. */
even_status even_bench_simulate(const even_bench_plan *plan, even_text *out) EVEN_MUST_USE;

#endif
