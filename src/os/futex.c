/* futex(2), shared between processes. */
#include "os/futex.h"

#include "os/calls.h"

#include <limits.h>
#include <linux/futex.h>

void even_futex_wait(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns) {
  struct timespec timeout = {(time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u)};
  (void)even_os.futex((uint32_t *)word, FUTEX_WAIT, expected, &timeout);
}

void even_futex_wake_all(_Atomic uint32_t *word) {
  (void)even_os.futex((uint32_t *)word, FUTEX_WAKE, INT_MAX, NULL);
}

void even_core_yield(void) {
  (void)even_os.sched_yield();
}
