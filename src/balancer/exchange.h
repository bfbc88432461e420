/* What a rank's own part of the exchange takes beyond that of the rank with the least.
 *
 * A step ends when all ranks have met. What a rank does for the exchange after its last meeting with the others (sums
 * go back into its device's memory) keeps it from the next meeting as its optimizer does, and a smaller share makes up
 * for it. What is done between two meetings no split shortens, and is not told here. */
#ifndef EVEN_BALANCER_EXCHANGE_H
#define EVEN_BALANCER_EXCHANGE_H

#include <evenstep/balancer.h>
#include <stdbool.h>

enum { EVEN_EXCHANGE_STEPS = 32 /* remembered */ };

typedef struct even_exchange {
  size_t ranks;
  int64_t taken;                       /* steps, from the first of which any rank told a part of its own */
  int64_t told;                        /* of these, up to the last such one */
  double *seconds;                     /* of EVEN_EXCHANGE_STEPS steps, one after the other, each rank's */
  double longest[EVEN_EXCHANGE_STEPS]; /* the same steps' longest busy time */
  double *counted;                     /* of each rank: what counts as part of its busy time, now */
  even_step_timing *timings;           /* of the last step, with it */
} even_exchange;

struct even_balancer;

even_status even_exchange_open(even_exchange *exchange, size_t ranks) EVEN_MUST_USE;
void even_exchange_close(even_exchange *exchange);
/* Takes one step: seconds[r] is rank r's own part (NULL: all 0). Gives the timings with what counts of it, valid until
 * the next call. Where that becomes another, all that was measured before is moved by the difference, as if it had
 * been so all the time. */
const even_step_timing *even_exchange_take(struct even_balancer *balancer, const even_step_timing *timings,
                                           const double *seconds);

#endif
