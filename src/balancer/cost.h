/* What a share costs a rank, as a function of whole samples, and its inverse. */
#ifndef EVEN_BALANCER_COST_H
#define EVEN_BALANCER_COST_H

#include <evenstep/balancer.h>

/* EVEN_ERR_ARGUMENT with the rank when the cost or its table breaks the rules. */
even_status even_rank_cost_check(const even_rank_cost *cost, size_t rank) EVEN_MUST_USE;

/* The largest b in least … most whose time is within `seconds`; `least` when none is (its own time is not
 * looked at). `cost` was checked. */
int64_t even_rank_cost_reach(const even_rank_cost *cost, double seconds, int64_t least, int64_t most);

#endif
