/* A rank that a quota stops looks fast while it waits for others. Its floor is what a sample takes it at least, learned
 * by trials: less for it, more again. */
#ifndef EVEN_BALANCER_FLOORS_H
#define EVEN_BALANCER_FLOORS_H

#include <evenstep/status.h>
#include <stdbool.h>

struct even_balancer;

/* Begins a trial of less for the rank that the others wait for, where one mostly waits and is sometimes stopped. */
even_status even_floors_caution(struct even_balancer *balancer, bool *begun) EVEN_MUST_USE;
/* Begins a trial of more for those that have floors. */
even_status even_floors_release(struct even_balancer *balancer, bool *begun) EVEN_MUST_USE;
/* Takes what a slower challenger has told. */
void even_floors_learn(struct even_balancer *balancer);

/* Before shares are decided on: floors of ranks that have become far faster. */
void even_floors_forget(struct even_balancer *balancer);

#endif
