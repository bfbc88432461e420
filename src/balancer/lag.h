/* Ranks that lag: that have become slower than they were, beside the others; since which step, by how much, and what
 * the others would gain without one. Pure: steps in, answers out; the agent and the monitor have one each.
 *
 * A rank's speed is that of its time model (model.h), the balancer's own, at the share that it usually had: outliers,
 * noise, quotas and shares that move are the model's affair. Its usual time there is kept; what all ranks share (a slow
 * phase of the machine, a longer sequence) is taken off by the median of the others. */
#ifndef EVEN_BALANCER_LAG_H
#define EVEN_BALANCER_LAG_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct even_lags even_lags;

typedef struct even_lag_step {
  uint32_t step;
  uint64_t end_ns;
  uint64_t duration_ns;
  int64_t samples; /* the rank's share; 0: a dummy batch ran, or none */
  double busy_seconds;
} even_lag_step;

typedef struct even_lag {
  bool lags;          /* now, for so long that it is told */
  double factor;      /* so many times as long as usual its steps take, as a mean since from_step */
  uint32_t from_step; /* the first slow step, and when it began */
  uint64_t from_ns;
  uint32_t to_step; /* the last slow one, and its end */
  uint64_t to_ns;
} even_lag;

/* A rank lags from this factor on, and has caught up where half of what is above 1 is gone: below 1.25. */
#define EVEN_LAG_BEGINS 1.5
enum {
  EVEN_LAG_STEPS = 8,   /* that it must have lagged for, */
  EVEN_LAG_SECONDS = 2, /* and so long, before it is told; it has caught up after half of both */
  EVEN_LAG_LEARNS = 24  /* steps before a rank's usual time is known */
};

even_status even_lags_open(size_t ranks, even_lags **out) EVEN_MUST_USE;
/* NULL is allowed. */
void even_lags_close(even_lags *lags);
/* Another factor and other seconds than those above, from 1.2 and 0.5 on; 0: as they are. Before the first step. */
void even_lags_limit(even_lags *lags, double begins, double seconds);
/* The factor. */
double even_lags_begins(const even_lags *lags);
/* There are more ranks from now on; of those that were there all is kept. EVEN_ERR_MEMORY: nothing has changed. */
even_status even_lags_grow(even_lags *lags, size_t ranks) EVEN_MUST_USE;
/* Another process is at the rank's place, or none any more: what was known of it counts no longer. */
void even_lags_forget(even_lags *lags, size_t rank);
/* A step of a rank; one that makes no sense is passed over. */
void even_lags_take(even_lags *lags, size_t rank, const even_lag_step *step);
/* What is known of a rank. */
even_lag even_lags_of(const even_lags *lags, size_t rank);

/* How many times as long as the median of the ranks in `beside` (itself apart) the rank takes for an equal share; NAN
 * while that is not known. */
double even_lags_beside(const even_lags *lags, size_t rank, const bool *beside);
/* The rank has lagged since its first step by that factor, as its caller knows: its usual time is set so. */
void even_lags_since_start(even_lags *lags, size_t rank, double factor);

/* Of the members the one that takes longest for an equal share; SIZE_MAX where nothing is known. */
size_t even_lags_slowest(const even_lags *lags, const bool *members);

/* What a step takes, in seconds, by the models. */
typedef struct even_lag_use {
  double with;    /* all members as they are */
  double without; /* the others alone, with the same batch */
  double renewed; /* all, the rank as fast as it usually was; of one that does not lag as `with` */
  double moved;   /* all, the rank as fast as the others' median */
} even_lag_use;

/* Of `rank` among the members; `follows`: the shares follow the speeds (else they stay in the ratio that they have).
 * EVEN_ERR_NOT_FOUND: not every member was measured, or nobody else is one. */
even_status even_lags_weigh(const even_lags *lags, size_t rank, const bool *members, bool follows,
                            even_lag_use *out) EVEN_MUST_USE;

#endif
