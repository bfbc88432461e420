/* How far the ranks' times scatter apart from step to step, and the headroom that slow ranks get for it.
 *
 * A step ends with its last rank. Where times scatter, a sample moved from a rank to another makes the step's expected
 * time longer or shorter by what it takes there and here, each times the chance that this very rank is the last. The
 * best split is where the product is the same for all: a rank should be the last in proportion to its speed. For
 * extreme-value scatter (Gumbel 1958, "Statistics of Extremes", of scale s) the chances are as exp(mean / s), so that a
 * rank's mean time has to lie s ln(fastest / own) below that of the fastest rank. */
#ifndef EVEN_BALANCER_SCATTER_H
#define EVEN_BALANCER_SCATTER_H

#include "balancer/model.h"

#include <evenstep/balancer.h>

typedef struct even_scatter {
  double square; /* mean square of what a rank's time is off by, beside the others', as part of the time */
  int steps;     /* that it was learned from, up to a limit */
} even_scatter;

/* Learns from one step, which the models may know already. What all ranks share (a slow phase of the machine) is none.
 */
void even_scatter_take(even_scatter *scatter, const even_rank_model *models, const even_step_timing *timings,
                       size_t ranks);
/* The variance that was learned, as part of a step; 0 while little is known. */
double even_scatter_square(const even_scatter *scatter);
/* The scale of scatter of this variance among `ranks` in steps of `step_seconds`; 0 where ranks do not scatter but are
 * stopped. */
double even_scatter_seconds(double square, size_t ranks, double step_seconds);
/* Seconds by which a rank should be done before the fastest one, of which a sample takes `times` as long. */
double even_scatter_headroom(double scatter_seconds, double times);
/* The most of it that any scatter gives among `ranks` in steps of `step_seconds`: for whoever judges from outside
 * whether a rank waits on purpose. */
double even_scatter_most_headroom(size_t ranks, double step_seconds, double times);

#endif
