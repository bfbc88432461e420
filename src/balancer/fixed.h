/* Splits that do not follow the models, and may be faster all the same: equal shares, and the profile's. */
#ifndef EVEN_BALANCER_FIXED_H
#define EVEN_BALANCER_FIXED_H

#include <evenstep/balancer.h>
#include <stdbool.h>

typedef enum even_fixed_name {
  EVEN_FIXED_NONE = -1, /* the models' split */
  EVEN_FIXED_EQUAL,
  EVEN_FIXED_PRIOR,
  EVEN_FIXED_COUNT
} even_fixed_name;

typedef struct even_fixed {
  int64_t *shares;         /* of a whole batch */
  double first_seconds;    /* of the steps with them as the run began, and their number … */
  int first_steps;         /* … 0 once a trial has told more */
  double seconds;          /* a step, as the last trial against the models' split measured it, */
  double balanced_seconds; /* and one of that; 0 before */
} even_fixed;

struct even_balancer;

even_status even_fixed_open(even_fixed fixed[EVEN_FIXED_COUNT], size_t ranks) EVEN_MUST_USE;
/* Both splits, within the caps of now. */
even_status even_fixed_split(struct even_balancer *balancer) EVEN_MUST_USE;
void even_fixed_close(even_fixed fixed[EVEN_FIXED_COUNT]);
/* Takes note of a step of the beginning. */
void even_fixed_take(even_fixed *fixed, double seconds);
/* Whether its first steps were faster than `mean`. */
bool even_fixed_was_faster(const even_fixed *fixed, double mean);
/* Whether the policy may run it instead of the models' split, and it is a split of its own. */
bool even_fixed_asked(const struct even_balancer *balancer, even_fixed_name name);
/* What a trial of it costs, by what is believed of the ranks: in steps of `mean` seconds. */
double even_fixed_trial_steps(struct even_balancer *balancer, even_fixed_name name, double mean);

#endif
