/* Which ranks were stopped in the steps of one trial, as a CPU quota stops them: fast on the whole, now and then far
 * from it. */
#ifndef EVEN_BALANCER_STOPS_H
#define EVEN_BALANCER_STOPS_H

#include <evenstep/balancer.h>
#include <stdbool.h>

typedef struct even_stops {
  size_t ranks;
  int steps;
  double *busy;  /* seconds of each rank in all */
  double *least; /* its fastest step so far */
  int *times;    /* steps that took it more than twice that */
} even_stops;

even_status even_stops_open(even_stops *stops, size_t ranks) EVEN_MUST_USE;
void even_stops_close(even_stops *stops);

void even_stops_begin(even_stops *stops);
void even_stops_take(even_stops *stops, const even_step_timing *timings);
/* Whether `rank` was, and so often that the stalls of any machine are not taken for it. A step took `mean` seconds;
 * `usual` is the part of its steps that were long before the trial. */
bool even_stops_of(const even_stops *stops, size_t rank, double mean, double usual);

#endif
