/* Who gets how many samples. Pure: numbers in, numbers out; no I/O, no threads, no clock. The same
 * inputs give the same shares on every rank and machine, so that no leader is needed.
 *
 * Threads: one balancer belongs to one thread at a time; different ones do not touch one another. Arrays and structs
 * that are passed stay the caller's, may be freed after the call, and must not be NULL unless it says so. */
#ifndef EVENSTEP_BALANCER_H
#define EVENSTEP_BALANCER_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, number, text) */
#define EVEN_POLICY_LIST(X)          \
  X(EQUAL, 0, "equal")               \
  X(PROPORTIONAL, 1, "proportional") \
  X(DYNAMIC, 2, "dynamic")           \
  X(HYBRID, 3, "hybrid")

typedef enum even_policy {
#define EVEN_POLICY_ENUM(name, number, text) EVEN_POLICY_##name = (number),
  EVEN_POLICY_LIST(EVEN_POLICY_ENUM)
#undef EVEN_POLICY_ENUM
} even_policy;

/* "hybrid" -> EVEN_POLICY_HYBRID; unknown: EVEN_ERR_ARGUMENT, the nearest name in the fix. */
EVEN_PUBLIC even_status even_policy_parse(const char *text, even_policy *out) EVEN_MUST_USE;
/* The policy's text, "unknown" for a number that is no policy; a static string, never NULL. Any thread. */
EVEN_PUBLIC const char *even_policy_name(even_policy policy);

/* Measured step time of one rank: seconds[i] for samples[i] samples. samples strictly rising from >= 0, seconds finite,
 * >= 0, non-decreasing. Between points linear; past the last point along the last slope (one point: through the
 * origin); below the first point along the line to (0, 0) or, with samples[0] == 0, exact. */
typedef struct even_time_table {
  const int64_t *samples;
  const double *seconds;
  size_t points;
} even_time_table;

/* Seconds that the table gives for `samples` >= 0. The table is not checked: it must be as said above, with at least
 * one point. Any thread. */
EVEN_PUBLIC double even_time_table_at(const even_time_table *table, int64_t samples);

/* The integer optimum: shares[r] >= 0, sum = batch, shares[r] <= caps[r] (caps NULL or < 0: none), that minimises
 * max_r t_r(shares[r]); a zero share costs t_r(0). Where several splits are optimal, the one in proportion to what each
 * rank could do in the optimal time (largest remainders, ties to the lower rank), so that all have the same headroom.
 * Method: bisection on the step time (each t_r is monotone), then the greedy choice of the next cheapest sample; exact
 * (Ibaraki and Katoh, Resource Allocation Problems, 1988, chapter 5). Below 1 ms for 1024 ranks.
 * *step_seconds (may be NULL) = the optimum. Errors: EVEN_ERR_ARGUMENT (says which rank), caps that cannot hold the
 * batch included; EVEN_ERR_MEMORY. Any thread. */
EVEN_PUBLIC even_status even_balancer_solve(const even_time_table *tables, const int64_t *caps, size_t ranks,
                                            int64_t batch, int64_t *shares, double *step_seconds) EVEN_MUST_USE;

typedef struct even_balancer even_balancer;

typedef struct even_balancer_params {
  size_t size; /* sizeof(even_balancer_params) */
  even_policy policy;
  size_t ranks;         /* >= 1 */
  int64_t batch;        /* global batch, >= 1; fewer samples than ranks is allowed: some shares are 0 */
  const double *speeds; /* relative prior speeds, > 0 and finite; NULL: all equal */
  const int64_t *caps;  /* most samples of each rank; NULL or < 0: none */
} even_balancer_params;

/* One rank's measurement of one step, as exchanged in the commit vote. */
typedef struct even_step_timing {
  int64_t samples;     /* its share in that step (0: a dummy batch ran) */
  double busy_seconds; /* from the step's start to its last gradient, plus its optimizer; without waiting for peers */
} even_step_timing;

/* *out is the caller's, closed with even_balancer_close; NULL after a failure. The parameters are copied. Errors:
 * EVEN_ERR_ARGUMENT (says which, caps that cannot hold the batch included), EVEN_ERR_MEMORY. */
EVEN_PUBLIC even_status even_balancer_open(const even_balancer_params *params, even_balancer **out) EVEN_MUST_USE;
/* NULL is allowed. */
EVEN_PUBLIC void even_balancer_close(even_balancer *balancer);
/* Takes the timings of one step, one per rank. Robust to single outliers; follows real changes within a few steps. A
 * timing that is not finite or negative: EVEN_ERR_ARGUMENT and nothing is learned. */
EVEN_PUBLIC even_status even_balancer_observe(even_balancer *balancer, const even_step_timing *timings) EVEN_MUST_USE;
/* Shares for a step of `batch` samples (the global batch, or a smaller last one) into shares[ranks]. Asking changes
 * nothing: only what was observed decides on later shares. Errors: EVEN_ERR_ARGUMENT (batch < 1, or more than the caps
 * hold). */
EVEN_PUBLIC even_status even_balancer_shares(even_balancer *balancer, int64_t batch, int64_t *shares) EVEN_MUST_USE;
/* Whether balanced shares were measured slower than equal ones, so that equal ones are given until a later trial
 * finds balanced ones faster. *balanced_seconds and *equal_seconds (may be NULL): a step in the last such trial; 0
 * before the first. */
EVEN_PUBLIC bool even_balancer_on_equal(const even_balancer *balancer, double *balanced_seconds, double *equal_seconds);
/* What the balancer now believes: busy seconds of `rank` for `samples`, > 0; for 0 samples, where no dummy batch runs,
 * >= 0. NaN while that is unknown (nothing was observed of the rank yet), and for a rank or a number of samples that
 * there cannot be. */
EVEN_PUBLIC double even_balancer_predict(const even_balancer *balancer, size_t rank, int64_t samples);

#ifdef __cplusplus
}
#endif
#endif
