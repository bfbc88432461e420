/* Ranks that meet within a step, for statistics of all their samples or by the script's own collectives, wait for one
 * another there: such a step is longer than the longest of their busy times, and no rank's model knows by how much.
 * What less for one of them would make of it is asked of trials. */
#ifndef EVEN_BALANCER_MEETINGS_H
#define EVEN_BALANCER_MEETINGS_H

#include <evenstep/balancer.h>
#include <stdbool.h>

enum { EVEN_MEETINGS_KINDS = 4 }; /* of questions about each rank */

typedef struct even_meetings {
  double longest; /* seconds of the last step: of all its ranks' busy times and passes */
  double waits;   /* of them, what goes beyond the longest busy time; 0: nobody waited */
  double waited;  /* their mean, of late */
  int64_t alone;  /* steps, the last ones, in which no rank waited for another */
  size_t turn;    /* what is asked next, of a round of questions */
  bool round;     /* all of them were asked, or passed over, since the last trial that won or pause that doubled */
} even_meetings;

struct even_balancer;

/* Takes one step: `told` are the timings as they were told, `timings` as they count, pass_seconds (NULL: all 0) how
 * long each rank's work lasted with its waits. */
void even_meetings_take(struct even_balancer *balancer, const even_step_timing *told, const even_step_timing *timings,
                        const double *pass_seconds);
/* The last step ran with the split in force, and counts as this part of what is remembered. */
void even_meetings_remember(even_meetings *meetings, double part);
/* Whether waits are a good part of the steps. */
bool even_meetings_are_long(const struct even_balancer *balancer);
/* Begins a trial of less for one rank, where steps last longer than all are busy; where none has waited for another for
 * long, what came of such trials is forgotten. */
even_status even_meetings_ask(struct even_balancer *balancer, bool *begun) EVEN_MUST_USE;
/* The trial has ended; whether all that may be asked was answered with no. */
bool even_meetings_answer(struct even_balancer *balancer, bool won);

#endif
