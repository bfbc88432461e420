/* Faults on purpose: the nth allocation fails, the nth call to the operating system fails with an
 * errno, reads and writes come up short. Counters are atomic: any thread may run into a fault. */
#ifndef EVEN_TESTS_SUPPORT_FAULT_H
#define EVEN_TESTS_SUPPORT_FAULT_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>

/* The calls that can be made to fail: FAULT_open, FAULT_read, … one for each line of fault_calls.h. */
#include "support/fault_calls.h"

typedef enum fault_call {
#define FAULT_CALL_ENUM(type, failure, name, parameters, arguments) FAULT_##name,
  FAULT_CALL_LIST(FAULT_CALL_ENUM)
#undef FAULT_CALL_ENUM
      FAULT_CALL_COUNT
} fault_call;

/* Counts from now on; the nth allocation or reallocation (1: the next) fails, later ones succeed. 0: only count. */
void fault_allocation(long nth);
/* Allocations and reallocations tried since fault_allocation. */
long fault_allocations(void);
/* Blocks that were allocated since the last fault_reset and are not freed yet: 0 when nothing leaks. */
long fault_live_blocks(void);

/* The nth call (1: the next) of `call` fails with error_number, later ones succeed. 0: only count. */
void fault_os(fault_call call, long nth, int error_number);
/* From the nth call on, all fail. */
void fault_os_from(fault_call call, long nth, int error_number);
/* The nth call of any kind fails, but for those that undo, advise or only look (close, munmap, unlink, rmdir, clock,
 * futex). */
void fault_os_any(long nth, int error_number);
/* How often `call` was called since it was armed; FAULT_CALL_COUNT: all that fault_os_any counts. */
long fault_os_calls(fault_call call);
/* read, write, pread, pwrite move at most `bytes` a call; 0: no limit. */
void fault_os_short(size_t bytes);

/* Everything real again; call it in each test's teardown. */
void fault_reset(void);

/* Runs `body` (returns an even_status; frees what it made) with its 1st, 2nd, … allocation failing until it runs
 * through without a fault. Fails the test when a fault did not come back as EVEN_ERR_MEMORY, or leaked. Returns how
 * many allocations were made to fail. */
long fault_each_allocation(even_status (*body)(void *), void *context);
/* The same where `body` may do without what it could not have: its status may be EVEN_OK then, too; `holds` is called
 * after each time, with everything real again. */
long fault_each_allocation_borne(even_status (*body)(void *), void (*holds)(void), void *context);
/* The same for calls of any kind to the operating system, each failing with error_number; `body` may survive a fault
 * (an optional call), but must not leak memory. Returns how many calls were made to fail. */
long fault_each_os(even_status (*body)(void *), void *context, int error_number);

#endif
