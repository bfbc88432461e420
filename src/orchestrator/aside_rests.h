/* Which places of a job rest (aside.h): what another agent, started in a killed one's place, must know of them. */
#ifndef EVEN_ORCHESTRATOR_ASIDE_RESTS_H
#define EVEN_ORCHESTRATOR_ASIDE_RESTS_H

#include <stddef.h>
#include <stdint.h>

enum { EVEN_ASIDE_MOST = 64, EVEN_ASIDE_HOST = 128 };

typedef struct even_aside_place {
  char host[EVEN_ASIDE_HOST]; /* "" in a job of one host */
  size_t place;               /* there */
  char device[64];
  unsigned times;    /* that it was set aside */
  uint64_t until_ns; /* 0: it takes part */
} even_aside_place;

typedef struct even_aside_rests {
  even_aside_place items[EVEN_ASIDE_MOST];
  size_t count;
  even_aside_place last; /* of the rank that failed first in the attempt before, */
  int failed;            /* and in how many in a row; 0: nobody's */
} even_aside_rests;

#endif
