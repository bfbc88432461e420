/* A rank's place where processes may join the members (replace.c), as it is written on the roll, too (outlast.c). */
#ifndef EVEN_ORCHESTRATOR_PLACE_H
#define EVEN_ORCHESTRATOR_PLACE_H

#include <stdbool.h>
#include <stdint.h>

struct even_job_place {
  bool outside;      /* its process is no member */
  bool filled;       /* its process was started in another one's place, or in one that nobody had */
  bool comes;        /* its host has come with it, and no process has joined from there yet */
  bool new_here;     /* it joined, and has not made a step since, as far as is known */
  unsigned endings;  /* of processes that were here in this attempt, but well; the first counts two where the device
                        is at fault */
  uint64_t again_ns; /* when another one may be started; 0: none is wanted */
};

#endif
