/* Pseudo-random numbers that are the same everywhere (splitmix64: Steele, Lea and Flood 2014). */
#ifndef EVEN_BALANCER_PSEUDO_RANDOM_H
#define EVEN_BALANCER_PSEUDO_RANDOM_H

#include <stdint.h>

/* least … most, both included */
int64_t even_pseudo_random_between(uint64_t *state, int64_t least, int64_t most);
/* 0 <= x < 1 */
double even_pseudo_random_unit(uint64_t *state);

#endif
