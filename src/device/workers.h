/* The living processes below a rank (its DataLoader workers and what else it started), as one sum. */
#ifndef EVEN_DEVICE_WORKERS_H
#define EVEN_DEVICE_WORKERS_H

#include <stddef.h>
#include <sys/types.h>

typedef struct even_workers {
  size_t count;
  double cpu_seconds;   /* theirs, with that of their own ended children */
  double rss_bytes;     /* the sum of their resident sets: pages that they share are counted each time */
  double private_bytes; /* what each has for itself alone; NAN when it was not asked for */
} even_workers;

/* Looks at all descendants of `pid`, found by /proc/PID/task/TID/children (a kernel without CONFIG_PROC_CHILDREN shows
 * none); orphans whose parent has ended are not among them. with_private: reads their smaps_rollup, which walks their
 * page tables: about 10 ms for each that maps 400 MB. */
void even_workers_look(pid_t pid, int with_private, even_workers *out);

#endif
