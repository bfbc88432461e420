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
  X(HYBRID, 3, "hybrid")             \
  X(AUTO, 4, "auto")                 \
  X(CALLBACK, 5, "callback")

typedef enum even_policy {
#define EVEN_POLICY_ENUM(name, number, text) EVEN_POLICY_##name = (number),
  EVEN_POLICY_LIST(EVEN_POLICY_ENUM)
#undef EVEN_POLICY_ENUM
} even_policy;

/* "auto" -> EVEN_POLICY_AUTO; unknown: EVEN_ERR_ARGUMENT, the nearest name in the fix. "callback" is unknown: a
 * function has no name. */
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

/* The integer optimum: shares[r] >= 0, sum = batch (>= 1), shares[r] <= caps[r] (caps NULL or < 0: none), that
 * minimises max_r t_r(shares[r]); a zero share costs t_r(0). Where several splits are optimal, the one in proportion to
 * what each rank could do in the optimal time (largest remainders, ties to the lower rank), so that all have the same
 * headroom. Method: bisection on the step time (each t_r is monotone), then the greedy choice of the next cheapest
 * sample; exact (Ibaraki and Katoh, Resource Allocation Problems, 1988, chapter 5). Below 1 ms for 1024 ranks.
 * *step_seconds (may be NULL) = the optimum. Errors: EVEN_ERR_ARGUMENT (says which rank), caps that cannot hold the
 * batch included; EVEN_ERR_MEMORY; EVEN_ERR_OVERFLOW (more ranks than memory can hold). Any thread. */
EVEN_PUBLIC even_status even_balancer_solve(const even_time_table *tables, const int64_t *caps, size_t ranks,
                                            int64_t batch, int64_t *shares, double *step_seconds) EVEN_MUST_USE;

/* What a share costs a rank beyond a plain table. All zero but the table: even_balancer_solve's meaning. */
typedef struct even_rank_cost {
  even_time_table table;   /* seconds of one micro-batch: of the whole share where micro_batch is 0 */
  double constant_seconds; /* of each step whatever the share: its optimizer, its communication; finite, >= 0 */
  int64_t micro_batch; /* > 0: a larger share runs as micro-batches of so many samples and one of what is left over */
  int64_t bucket;      /* > 1: a micro-batch takes as long as one of the next multiple, as kernels made for whole
                          tiles do; at most EVEN_MOST_BUCKET. 0, 1: no buckets */
  bool leaves_out;     /* a share of zero takes no time at all: no dummy batch, no part in the step */
} even_rank_cost;

enum { EVEN_MOST_BUCKET = 1 << 20 };

/* Seconds of a step in which the rank has `samples` >= 0: never falls with more of them. The cost is not checked. Any
 * thread. */
EVEN_PUBLIC double even_rank_cost_at(const even_rank_cost *cost, int64_t samples);

/* The size of a micro-batch, at most `most` >= 1 (what memory holds), that takes the least time a sample: always at a
 * point of the table, or `most`. Of equally good ones the largest. Where each micro-batch costs a fixed time and one a
 * sample, no other way to cut a share is faster. */
EVEN_PUBLIC int64_t even_time_table_best_micro_batch(const even_time_table *table, int64_t most);

/* even_balancer_solve for such costs, with its errors. Among the optimal splits one whose shares are whole buckets as
 * far as the batch allows: beside shares at their caps at most one rank's is not (where micro_batch is a multiple of
 * bucket, or none). */
EVEN_PUBLIC even_status even_balancer_solve_costs(const even_rank_cost *costs, const int64_t *caps, size_t ranks,
                                                  int64_t batch, int64_t *shares, double *step_seconds) EVEN_MUST_USE;

typedef struct even_balancer even_balancer;

/* One rank's measurement of one step, as exchanged in the commit vote. */
typedef struct even_step_timing {
  int64_t samples;     /* its share in that step (0: a dummy batch ran) */
  double busy_seconds; /* from the step's start to its last gradient, plus its optimizer; without waiting for peers */
} even_step_timing;

/* What a policy of the caller's is told. The arrays have one entry a rank and are the balancer's: valid in the call. */
typedef struct even_policy_view {
  size_t size; /* sizeof(even_policy_view) */
  size_t ranks;
  int64_t batch;                    /* samples to be shared out now: the global batch, or a smaller last one */
  int64_t steps;                    /* observed so far */
  const int64_t *caps;              /* most samples of each rank; < 0: none */
  const even_step_timing *last;     /* the last step that was observed; NULL before the first */
  const double *fixed_seconds;      /* what is believed: a rank is busy for fixed_seconds + samples * … */
  const double *seconds_per_sample; /* … these; NaN while nothing was observed of it */
  const int64_t *proposed;          /* the best split by what is believed, before that by the prior speeds */
} even_policy_view;

/* Shares of view->batch samples into shares[ranks], each >= 0 and within its cap, with that sum; anything else is an
 * error of even_balancer_shares. Every rank asks its own copy, maybe more often than there are steps: the answer must
 * depend on the view alone. Not EVEN_OK: shares could not be found; the status is even_balancer_shares's. */
typedef even_status (*even_policy_function)(void *context, const even_policy_view *view, int64_t *shares);

typedef struct even_balancer_params {
  size_t size; /* sizeof(even_balancer_params) */
  even_policy policy;
  size_t ranks;                /* >= 1 */
  int64_t batch;               /* global batch, >= 1; fewer samples than ranks is allowed: some shares are 0 */
  const double *speeds;        /* relative prior speeds, > 0 and finite; NULL: all equal */
  const int64_t *caps;         /* most samples of each rank; NULL or < 0: none */
  const int64_t *buckets;      /* even_rank_cost's, of each rank; NULL: none */
  even_policy_function choose; /* of EVEN_POLICY_CALLBACK, else NULL */
  void *choose_context;        /* passed on to it; must live as long as the balancer */
} even_balancer_params;

/* *out is the caller's, closed with even_balancer_close; NULL after a failure. The parameters are copied. Errors:
 * EVEN_ERR_ARGUMENT (says which, caps that cannot hold the batch included), EVEN_ERR_MEMORY, EVEN_ERR_OVERFLOW. */
EVEN_PUBLIC even_status even_balancer_open(const even_balancer_params *params, even_balancer **out) EVEN_MUST_USE;
/* NULL is allowed. */
EVEN_PUBLIC void even_balancer_close(even_balancer *balancer);
/* Takes the timings of one step, one per rank. Robust to single outliers; follows real changes within a few steps.
 * Where all ranks become slower or faster together (of up to 16; the machine's frequency, a neighbour on its host),
 * what was measured before counts as if it had been so then: such a drift is neither a change of one rank nor what
 * other shares cost, and even_balancer_predict is of today's level. A change of one rank stays its own, of two ranks as
 * well. A timing that is not finite or negative: EVEN_ERR_ARGUMENT and nothing is learned. */
EVEN_PUBLIC even_status even_balancer_observe(even_balancer *balancer, const even_step_timing *timings) EVEN_MUST_USE;
/* The same, where ranks without samples may have left out a part of their dummy batch's work, as backward: spared[r]
 * (NULL: none). Such a step tells what t(0) is, and how much faster or slower the rank has become; not what a sample
 * takes. */
EVEN_PUBLIC even_status even_balancer_observe_spared(even_balancer *balancer, const even_step_timing *timings,
                                                     const bool *spared) EVEN_MUST_USE;
/* The same, with what each rank needs for the exchange by itself, before its busy time or after: exchange_seconds[r]
 * (NULL: all 0), without waiting for others and without what lies between two meetings of all, which no split shortens.
 * What a rank needs beyond the one with the least counts as part of its busy time: the median over the last 32 steps
 * (24 at least), once it is more than five standard errors, and was more than 1 % of the longest busy time in three
 * quarters of them, until it is less than half of that 1 %. What all ranks need alike changes nothing. Numbers that are
 * not finite or negative: as with timings. */
EVEN_PUBLIC even_status even_balancer_observe_exchange(even_balancer *balancer, const even_step_timing *timings,
                                                       const bool *spared,
                                                       const double *exchange_seconds) EVEN_MUST_USE;
/* The same, with how long each rank's work lasted in a step in which it waited for others before the work was done
 * (they meet within it: statistics of all ranks' samples, a script's own collectives): pass_seconds[r] with these
 * waits, but without the vote, the exchange of gradients, and what busy_seconds leaves out as no part of a step; 0
 * (NULL: all): it waited for nobody. A step's time is the longest of all ranks' busy and pass seconds wherever measured
 * steps are compared, and where that stays longer than all ranks are busy, trials ask whether less for one of them is
 * faster. Where all are 0 every share is, to the bit, what even_balancer_observe_exchange makes it. Numbers that are
 * not finite or negative: as with timings. */
EVEN_PUBLIC even_status even_balancer_observe_waits(even_balancer *balancer, const even_step_timing *timings,
                                                    const bool *spared, const double *exchange_seconds,
                                                    const double *pass_seconds) EVEN_MUST_USE;
/* Shares for a step of `batch` samples (the global batch, or a smaller last one) into shares[ranks]. Asking changes
 * nothing: only what was observed decides on later shares. Errors: EVEN_ERR_ARGUMENT (batch < 1, or more than the caps
 * hold; the caller's policy gave no split of the batch), and those of the caller's policy. */
EVEN_PUBLIC even_status even_balancer_shares(even_balancer *balancer, int64_t batch, int64_t *shares) EVEN_MUST_USE;
/* Other caps from now on (NULL: none), as memory proves larger or smaller than was thought; what was learned stays.
 * Errors, after which the caps are those of before: EVEN_ERR_ARGUMENT (they cannot hold the global batch). */
EVEN_PUBLIC even_status even_balancer_set_caps(even_balancer *balancer, const int64_t *caps) EVEN_MUST_USE;
/* A share that is larger than sizes[r] > 0 (0: none) runs as micro-batches of so many samples and one of what is left
 * over, as in even_rank_cost, each of which costs as much as more_samples[r] >= 0 samples beyond its own: from now on,
 * and in what was measured. Where that is more than 0, shares end with whole ones where that is faster. Until it is
 * known give 0. Errors, after which nothing has changed: EVEN_ERR_ARGUMENT (a number that there cannot be). */
EVEN_PUBLIC even_status even_balancer_set_micro_batches(even_balancer *balancer, const int64_t *sizes,
                                                        const double *more_samples) EVEN_MUST_USE;
/* What the balancer has learned, for a checkpoint: its models, trials and their results, all that its later decisions
 * depend on. Some 5 KB a rank, the same bytes on every machine. Writes to bytes[capacity] where that has room for all
 * (else nothing that may be used; NULL: only asks). How many bytes all are. Changes nothing. */
EVEN_PUBLIC size_t even_balancer_save(even_balancer *balancer, void *bytes, size_t capacity);
/* Goes on from what even_balancer_save wrote of one of the same policy, ranks, batch and buckets, whatever this one has
 * learned: given the same steps it gives the same shares, to the bit. The caps stay this one's; where those of then are
 * other ones, as if they were set now. Errors, after which nothing has changed: EVEN_ERR_ARGUMENT (of another policy,
 * other ranks or another batch), EVEN_ERR_CORRUPT (damaged, or cut), EVEN_ERR_UNSUPPORTED (of a later version),
 * EVEN_ERR_MEMORY. */
EVEN_PUBLIC even_status even_balancer_restore(even_balancer *balancer, const void *bytes, size_t size) EVEN_MUST_USE;
/* The split of the global batch that would be given were there no caps, into shares[ranks], and the seconds that such a
 * step is believed to take (may be NULL; before anything was learned in no unit): what caps cost. Changes nothing. */
EVEN_PUBLIC even_status even_balancer_without_caps(even_balancer *balancer, int64_t *shares,
                                                   double *step_seconds) EVEN_MUST_USE;

enum { EVEN_MEMORY_SIZES = 8 };

/* What memory a rank needs for how many samples, by the peaks that were measured. All zero: nothing is known. */
typedef struct even_memory_curve {
  int sizes;                          /* different ones, rising */
  int64_t samples[EVEN_MEMORY_SIZES]; /* >= 1 */
  double bytes[EVEN_MEMORY_SIZES];    /* never falling */
} even_memory_curve;

/* Takes the peak of a step with `samples` >= 1; others, and bytes that are not finite and positive, are passed over. Of
 * one size the largest peak counts, and a size needs at least what a smaller one did. Of many sizes the outermost and
 * those far from one another are kept. */
EVEN_PUBLIC void even_memory_curve_take(even_memory_curve *curve, int64_t samples, double peak_bytes);
/* The most samples that `limit_bytes` hold, for even_balancer_set_caps; -1: nothing is known. Between two sizes
 * straight; beyond the largest along the steepest line that leads to it, from one size alone along that from (0, 0):
 * such a cap may be too small, and grows as other sizes are measured. Below the smallest in proportion. Any thread. */
EVEN_PUBLIC int64_t even_memory_curve_cap(const even_memory_curve *curve, double limit_bytes);
/* The bytes that a step with `samples` >= 0 is expected to need, by the same lines: what even_memory_curve_cap turns
 * round. NaN: nothing is known. Any thread. */
EVEN_PUBLIC double even_memory_curve_bytes(const even_memory_curve *curve, int64_t samples);

/* What a rank tells of its memory at the end of a step. */
typedef struct even_memory_report {
  uint64_t pool;   /* ranks with the same number share one memory: a host's, a control group's, a GPU's */
  int64_t samples; /* that it had in the step */
  int64_t cap;     /* the most that a limit of its own holds; < 0: there is none */
  int64_t room;    /* so many more its pool's memory holds (< 0: fewer); EVEN_ROOM_UNKNOWN */
} even_memory_report;

#define EVEN_ROOM_UNKNOWN INT64_MAX

/* Caps for even_balancer_set_caps from the reports of one step: caps[r] = the most that rank r's limits hold, -1 where
 * none is known; not cut to the batch. A pool holds what its ranks had and the room that is left. Of different rooms
 * the largest counts: who looked while another was still at its peak saw less. Where a pool holds less than the batch,
 * this is dealt out in proportion to wanted[] (even_balancer_without_caps), so that samples may move within it; else
 * each of its ranks may have all of it. The same on every rank. Any thread. */
EVEN_PUBLIC void even_memory_caps(const even_memory_report *reports, size_t ranks, int64_t batch, const int64_t *wanted,
                                  int64_t *caps);

/* Which split runs: EVEN_POLICY_EQUAL and EVEN_POLICY_PROPORTIONAL while those shares are given, by the policy or
 * because trials measured them to be fastest (the last under EVEN_POLICY_AUTO alone), EVEN_POLICY_HYBRID while they
 * follow the models, EVEN_POLICY_CALLBACK. *seconds and *other_seconds (may be NULL): a step of that split and of the
 * one it was preferred to, as the last trial of the two measured them; 0 before the first. */
EVEN_PUBLIC even_policy even_balancer_choice(const even_balancer *balancer, double *seconds, double *other_seconds);
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
