/* Pseudo-random numbers that are the same everywhere. */
#include "balancer/pseudo_random.h"

static uint64_t random_bits(uint64_t *state) {
  uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return z ^ (z >> 31);
}

int64_t even_pseudo_random_between(uint64_t *state, int64_t least, int64_t most) {
  return least + (int64_t)(random_bits(state) % (uint64_t)(most - least + 1));
}

double even_pseudo_random_unit(uint64_t *state) {
  return (double)(random_bits(state) >> 11) * 0x1.0p-53;
}
