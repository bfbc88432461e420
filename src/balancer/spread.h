/* Values without their outermost ones: mean and deviation of what stalls leave. */
#ifndef EVEN_BALANCER_SPREAD_H
#define EVEN_BALANCER_SPREAD_H

enum { EVEN_SPREAD_MOST = 128 }; /* values */

typedef struct even_spread {
  double low; /* everything outside of low … high is cut to it */
  double high;
  double mean;
  double deviation;
} even_spread;

/* Of 1 to EVEN_SPREAD_MOST values, a tenth of which is cut at each end, one at the least of three and more. Not a
 * median: under a CPU quota a step takes either nothing extra or a whole period, and only their mean tells the speed.
 * Of two both count as the lesser one: the first steps of a training are slow (warm-up), never fast. */
even_spread even_spread_of(const double *values, int count);
double even_spread_cut(const even_spread *limits, double value);
/* The value that `before` of them lie below; with `times` -1, above. */
double even_spread_at(const double *values, int count, int before, double times);

#endif
