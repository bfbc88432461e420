/* What one rank's steps took at the sizes that it ran: for ranks whose time is no straight line (a device that is not
 * filled, caches that end, kernels for whole tiles).
 *
 * A size whose time changes while it runs says that the rank's speed is another: all sizes are taken along. A size that
 * takes another time than what the line says says something of the sizes: of itself alone. So the sizes stay comparable
 * while speeds come and go. They are believed instead of the line where they differ from it by far more than the steps
 * of one size do among one another (a test for lack of fit; Draper and Smith, Applied Regression Analysis, 2.1): as the
 * stairs of a tile, where one's multiples explain them, which tells of edges that no size came near; else as a table
 * that never falls (pooled neighbours; Ayer et al. 1955). */
#ifndef EVEN_BALANCER_SHAPE_H
#define EVEN_BALANCER_SHAPE_H

#include <stdbool.h>
#include <stdint.h>

enum { EVEN_SHAPE_SIZES = 24, EVEN_SHAPE_HOPES = 2 * EVEN_SHAPE_SIZES };

typedef struct even_size {
  double samples;
  double seconds;
  double steps;  /* that this is the mean of, up to a limit */
  int64_t seen;  /* the last step with it, … */
  int64_t stays; /* … and the stay with one size in which that was */
  double off;    /* > 0: that step took so many seconds, far from the others: a stall, unless the next agrees */
  bool doubtful; /* measured before the rank may have become slower or faster: not used */
} even_size;

typedef struct even_shape {
  int count;
  even_size size[EVEN_SHAPE_SIZES]; /* by samples, rising */
  int64_t taken;                    /* steps */
  int64_t stay;                     /* steps in a row with the last size, … */
  double last;                      /* which is this, … */
  int64_t stays;                    /* … and so many such stays */
  double scatter;                   /* mean square of what steps are off their size's time, as part of it */
  double scatter_steps;
  double stalls;  /* how often they are far off */
  double changes; /* of the rank's speed while a size ran, of late */
  bool bent;      /* the line does not explain it: what follows is believed … */
  double tile;    /* … which is stairs, > 1: whole multiples of so many samples explain the sizes */
  int points;
  double samples[EVEN_SHAPE_SIZES];
  double seconds[EVEN_SHAPE_SIZES]; /* never falling */
  double slope;                     /* beyond the last point, and before the first */
} even_shape;

/* Takes one step. By what factor the rank's speed changed in its last two steps; 1 where it did not, or that is not
 * known. */
double even_shape_take(even_shape *shape, double samples, double seconds);
/* Whether the last size ran for so few steps that what is known of it is new. */
bool even_shape_arrives(const even_shape *shape);
/* The last `steps` steps were unlike those before: unless they had one size all along, nobody knows whether that is the
 * rank or its sizes. */
void even_shape_doubt(even_shape *shape, int64_t steps);
/* All that was measured took `factor` times as long, then `seconds` more. */
void even_shape_move(even_shape *shape, double factor, double seconds);
/* Whether the sizes or the line (seconds = fixed + slope * samples) are to be believed, and what by the sizes. */
void even_shape_judge(even_shape *shape, double fixed, double slope);
/* The most that may be hoped for: each size that never ran takes no longer than the next smaller one that did. How many
 * points of a table that never falls, EVEN_SHAPE_HOPES at most. */
int even_shape_hopes(const even_shape *shape, double *samples, double *seconds);
/* Seconds of a bent shape. */
double even_shape_at(const even_shape *shape, double samples);

#endif
