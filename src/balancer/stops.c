/* Which ranks were stopped in the steps of one trial. */
#include "balancer/stops.h"

#include "base/alloc.h"
#include "base/fail.h"

#include <math.h>

enum { OFTEN = 4 }; /* of some thirty: with a stall in every fiftieth step one trial of a thousand has so many */

/* A rank that is busy for more of the step than this is slow, not stopped. */
static const double mostly_waits = 0.95;
/* Where stalls are frequent, stops are only what comes so many times as often as before. */
static const double more = 2.0;

even_status even_stops_open(even_stops *s, size_t ranks) {
  s->ranks = ranks;
  EVEN_TRY(EVEN_NEW_ARRAY(&s->busy, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&s->least, ranks));
  return EVEN_NEW_ARRAY(&s->times, ranks);
}

void even_stops_close(even_stops *s) {
  even_free(s->busy);
  even_free(s->least);
  even_free(s->times);
}

void even_stops_begin(even_stops *s) {
  s->steps = 0;
  for (size_t r = 0; r < s->ranks; r++) {
    s->busy[r] = 0.0;
    s->least[r] = INFINITY;
    s->times[r] = 0;
  }
}

void even_stops_take(even_stops *s, const even_step_timing *timings) {
  s->steps++;
  for (size_t r = 0; r < s->ranks; r++) {
    double seconds = timings[r].busy_seconds;
    s->busy[r] += seconds;
    s->least[r] = fmin(s->least[r], seconds);
    s->times[r] += seconds > 2.0 * s->least[r] ? 1 : 0;
  }
}

bool even_stops_of(const even_stops *s, size_t rank, double mean, double usual) {
  double steps = (double)s->steps;
  return s->times[rank] >= OFTEN && s->times[rank] > more * usual * steps &&
         s->busy[rank] < mostly_waits * mean * steps;
}
