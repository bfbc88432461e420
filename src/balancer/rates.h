/* Ranks that take unequal times although their split is said to be the best one: models that are wrong in a way that
 * steps of one split cannot show, as where ranks once disturbed one another, and no longer do. */
#ifndef EVEN_BALANCER_RATES_H
#define EVEN_BALANCER_RATES_H

#include <evenstep/status.h>
#include <stdbool.h>

struct even_balancer;

/* Shares by what each rank does in a second with those it has, as if no part of its time were fixed: whether that
 * promises enough over what the slowest rank takes; then they are balancer->candidate. Where ranks take equal times
 * these are the shares that run. */
even_status even_rates_hope(struct even_balancer *balancer, bool *any) EVEN_MUST_USE;

#endif
