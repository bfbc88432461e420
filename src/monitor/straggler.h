/* Why a rank is slower than another: the cause on its host that explains most of it. A pure function of a measurement.
 */
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
/* Of `rank`; `beside`: the rank that waits for it, or itself where no other is looked at. A cause counts by the seconds
 * of a step that the rank loses by it beyond what `beside` loses of as much work, so that what both have is none; that
 * which explains most of what the rank is behind is told, if 0.3 of it, and of those within 0.1 of that the surest: a
 * GPU's clock, its other users, a quota, loading, pages, a CPU taken, its clock. Of a rank alone the first of these
 * that it shows, without loading. */
void even_straggler_find(const even_measure *measure, int rank, int beside, even_straggler *out);

#endif
