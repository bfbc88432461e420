/* Pseudo-random numbers that are the same everywhere (splitmix64: Steele, Lea and Flood 2014). */
#ifndef EVEN_TESTS_BALANCER_RANDOM_H
#define EVEN_TESTS_BALANCER_RANDOM_H

#include <stdint.h>

uint64_t random_bits(uint64_t *state);
/* least … most, both included */
int64_t random_between(uint64_t *state, int64_t least, int64_t most);
/* 0 <= x < 1 */
double random_unit(uint64_t *state);

#endif
