/* Splits that do not follow the models. */
#include "balancer/fixed.h"

#include "balancer/state.h"
#include "base/alloc.h"
#include "base/fail.h"

#include <math.h>
#include <string.h>

enum { SHOWN = 3 }; /* first steps before they say something */

even_status even_fixed_open(even_fixed fixed[EVEN_FIXED_COUNT], size_t ranks) {
  EVEN_TRY(EVEN_NEW_ARRAY(&fixed[EVEN_FIXED_EQUAL].shares, ranks));
  return EVEN_NEW_ARRAY(&fixed[EVEN_FIXED_PRIOR].shares, ranks);
}

even_status even_fixed_split(even_balancer *b) {
  even_fixed *fixed = b->guard.fixed;
  even_balancer_expect_equal(b);
  EVEN_TRY(even_solve(&b->room, b->costs, b->caps, b->batch, fixed[EVEN_FIXED_EQUAL].shares, NULL));
  even_balancer_expect(b);
  return even_solve(&b->room, b->costs, b->caps, b->batch, fixed[EVEN_FIXED_PRIOR].shares, NULL);
}

void even_fixed_close(even_fixed fixed[EVEN_FIXED_COUNT]) {
  even_free(fixed[EVEN_FIXED_EQUAL].shares);
  even_free(fixed[EVEN_FIXED_PRIOR].shares);
}

void even_fixed_take(even_fixed *fixed, double seconds) {
  fixed->first_seconds += seconds;
  fixed->first_steps++;
}

bool even_fixed_was_faster(const even_fixed *fixed, double mean) {
  return fixed->first_steps >= SHOWN && mean > fixed->first_seconds / fixed->first_steps;
}

bool even_fixed_asked(const even_balancer *b, even_fixed_name name) {
  const even_fixed *fixed = b->guard.fixed;
  size_t bytes = b->ranks * sizeof *b->current;
  if (memcmp(b->current, fixed[name].shares, bytes) == 0) {
    return false;
  }
  return name == EVEN_FIXED_EQUAL ||
         (b->policy == EVEN_POLICY_AUTO &&
          memcmp(fixed[EVEN_FIXED_EQUAL].shares, fixed[EVEN_FIXED_PRIOR].shares, bytes) != 0);
}

double even_fixed_trial_steps(even_balancer *b, even_fixed_name name, double mean) {
  even_balancer_believe(b, b->batch);
  double loss = (even_balancer_step_seconds(b, b->guard.fixed[name].shares) + b->meetings.waited) / mean - 1.0;
  return loss > 0.0 ? fmin(loss * (double)EVEN_TRIAL_CHALLENGE, 4.0 + 4.0 * loss) : 0.0;
}
