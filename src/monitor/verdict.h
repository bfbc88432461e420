/* One sentence: what limits the run now, and what to do. A pure function of a measurement. */
#ifndef EVEN_MONITOR_VERDICT_H
#define EVEN_MONITOR_VERDICT_H

#include "monitor/measure.h"
#include "monitor/straggler.h"

typedef enum even_verdict_kind {
  EVEN_VERDICT_STARTING,
  EVEN_VERDICT_WARMING,
  EVEN_VERDICT_STALLED,
  EVEN_VERDICT_IMBALANCE,     /* a rank waits for a slower one */
  EVEN_VERDICT_DATA,          /* the loader of the rank that sets the pace */
  EVEN_VERDICT_COMMUNICATION, /* time in which every rank waits */
  EVEN_VERDICT_CHECKPOINT,
  EVEN_VERDICT_BALANCED, /* the devices themselves */
  EVEN_VERDICT_ENDED     /* ended before anything could be said */
} even_verdict_kind;

typedef struct even_verdict {
  even_verdict_kind kind;
  int rank;                   /* that is slow, -1: none is */
  even_straggler_cause cause; /* why it is */
  char limit[400];            /* what limits, with the numbers */
  char advice[280];           /* what to do; "" where nothing is to be done */
} even_verdict;

const char *even_verdict_name(even_verdict_kind kind);
void even_verdict_find(const even_measure *measure, even_verdict *out);

#endif
