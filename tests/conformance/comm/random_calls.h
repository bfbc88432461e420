/* Random calls with random shapes, compared with the reference to the last bit. */
#ifndef EVEN_TEST_RANDOM_CALLS_H
#define EVEN_TEST_RANDOM_CALLS_H

#include <evenstep/comm.h>
#include <stdint.h>

#define RANDOM_CALLS_ARENA_BYTES ((size_t)4 << 20) /* what the group's arena has to hold */

typedef struct random_calls {
  uint64_t seed;
  int calls;
  size_t largest; /* bytes of one rank's data */
} random_calls;

/* A body of ranks_run; `argument` is a random_calls, the same on all ranks. */
int random_calls_run(even_comm *comm, void *argument);

#endif
