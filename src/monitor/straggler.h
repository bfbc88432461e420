/* Why a rank is slower than another: the first cause that its host shows. A pure function of a measurement. */
#ifndef EVEN_MONITOR_STRAGGLER_H
#define EVEN_MONITOR_STRAGGLER_H

#include "monitor/measure.h"

/* X(NAME, text, label) */
#define EVEN_STRAGGLER_LIST(X)                                                                              \
  X(UNKNOWN, "unknown", "cause unknown")                                                                    \
  X(QUOTA, "quota", "CPU quota")                   /* its CPU quota stops it */                             \
  X(SWAP, "swap", "memory on swap")                /* and it is waited for */                               \
  X(PAGE_FAULTS, "faults", "pages from disk")      /* are waited for, without swap */                       \
  X(CPU_TAKEN, "cpu_taken", "CPU taken by others") /* other programs, or more threads than CPUs */          \
  X(CLOCK, "clock", "low CPU clock")               /* far below its highest, and the other rank's is not */ \
  X(DATA, "data", "slow data loading")             /* its loader takes the time that it is behind */        \
  X(LINK, "link", "slow link")                     /* between hosts; of all ranks (monitor/links.h) */      \
  X(GPU_CLOCK, "gpu_clock", "low GPU clock")       /* held down by heat or power, or below its like's */    \
  X(GPU_TAKEN, "gpu_taken", "GPU taken by others") /* other processes' kernels run on it */                 \
  X(GPU_IDLE, "gpu_idle", "GPU kept waiting")      /* its CPU does not keep its GPU busy, and the other rank's does */

typedef enum even_straggler_cause {
#define EVEN_STRAGGLER_ENUM(name, text, label) EVEN_STRAGGLER_##name,
  EVEN_STRAGGLER_LIST(EVEN_STRAGGLER_ENUM)
#undef EVEN_STRAGGLER_ENUM
      EVEN_STRAGGLER_COUNT
} even_straggler_cause;

typedef struct even_straggler {
  even_straggler_cause cause;
  char words[128];  /* ", stopped by its CPU quota 75% of the time": goes on after the rank's name; "" for unknown */
  char advice[200]; /* "" for unknown */
} even_straggler;

const char *even_straggler_name(even_straggler_cause cause);
/* The words for a name: "CPU quota". */
const char *even_straggler_label(const char *name);
/* Of `rank`; `beside`: the rank that waits for it, or itself where no other is looked at. */
void even_straggler_find(const even_measure *measure, int rank, int beside, even_straggler *out);

#endif
