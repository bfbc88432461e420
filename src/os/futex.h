/* Sleeping until a word in (shared) memory changes. */
#ifndef EVEN_OS_FUTEX_H
#define EVEN_OS_FUTEX_H

#include <stdatomic.h>
#include <stdint.h>

/* Sleeps while *word == expected, at most timeout_ns; returns at once when it differs.
 * Wakes spuriously: check the word again. Works between processes. */
void even_futex_wait(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns);
/* Wakes all that sleep on the word. */
void even_futex_wake_all(_Atomic uint32_t *word);
/* Lets whoever else waits for this core have it first; returns at once where nobody does. */
void even_core_yield(void);

#endif
