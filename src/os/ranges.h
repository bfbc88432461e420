/* Named ranges on a profiler's timeline: NVTX (https://nvidia.github.io/NVTX/), opened at run time where somebody asks
 * for it. Two kinds: those of a thread nest, each push with its pop on the same thread; others begin and end anywhere.
 */
#ifndef EVEN_OS_RANGES_H
#define EVEN_OS_RANGES_H

#include <evenstep/status.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Opens `library`, or, where it is NULL, the first of NVTX's own that the loader finds; once a process. From then on
 * even_ranges_on. EVEN_ERR_NOT_FOUND where there is none, or where it lacks the functions. Any thread. */
even_status even_ranges_open(const char *library) EVEN_MUST_USE;
/* For tests: as before even_ranges_open. */
void even_ranges_close(void);

extern _Atomic bool even_ranges_open_flag;

static inline bool even_ranges_on(void) {
  return atomic_load_explicit(&even_ranges_open_flag, memory_order_acquire);
}
/* Where ranges are on; the name is copied. */
void even_range_push(const char *name);
void even_range_pop(void);
/* Returns what ends it. */
uint64_t even_range_start(const char *name);
void even_range_end(uint64_t range);

#endif
