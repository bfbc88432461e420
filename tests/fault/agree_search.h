/* The exploration of what ranks do that agree by a given function. */
#ifndef EVEN_TESTS_FAULT_AGREE_SEARCH_H
#define EVEN_TESTS_FAULT_AGREE_SEARCH_H

#include "fault/agree.h"

typedef even_status agree_call(const even_position *positions, size_t count, even_agreement *out);

typedef struct exploration {
  int ranks, steps, deaths; /* at most 4 ranks and 2 passes of the loop */
  int turns;                /* steps of optimizers in a pass, at most 2 */
  int joiner;               /* the rank that joins, once it likes to; -1: none */
  bool calls;               /* after each pass */
  bool call_last;           /* the script ends with one */
  bool asks;                /* what each rank gives to a call is needed there */
  bool forgets_over;        /* wrong: what was committed in a pass is committed again when it comes again */
  bool forgets_failing;     /* wrong: who is not in the call that fails does not know */
  agree_call *agree;
  uint64_t *seen;
  size_t room, count; /* count: of states */
  struct model *stack;
  size_t height, stack_room;
  const char *wrong; /* NULL: nothing was found */
  size_t recovered;  /* times that a rank went on */
  size_t failed;     /* the same of which a call failed */
  size_t joined;     /* the same of one that joined, at its first step */
  size_t moves;      /* of what is looked at now, deaths aside */
} exploration;

/* Goes through every state that can be reached, until one is wrong. */
void explore(exploration *search);

#endif
