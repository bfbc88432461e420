/* Replaces the tables of base/alloc.h and os/calls.h by ones that count and fail. */
#include "support/fault.h"

#include "base/alloc.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

/* one fault that waits for its call */
typedef struct trap {
  atomic_long seen;
  atomic_long nth;
  atomic_bool onwards;
  atomic_int error_number;
} trap;

static trap allocation_trap;
static trap call_traps[FAULT_CALL_COUNT + 1]; /* the last one: any call */
static atomic_long live_blocks;
static atomic_size_t most_bytes;

static void arm(trap *at, long nth, bool onwards, int error_number) {
  atomic_store(&at->seen, 0);
  atomic_store(&at->error_number, error_number);
  atomic_store(&at->onwards, onwards);
  atomic_store(&at->nth, nth);
}

static bool sprung(trap *at) {
  long nth = atomic_load(&at->nth);
  long seen = atomic_fetch_add(&at->seen, 1) + 1;
  return nth > 0 && (seen == nth || (atomic_load(&at->onwards) && seen > nth));
}

/* ---- allocations ---- */
static void *allocate(size_t bytes) {
  void *block = sprung(&allocation_trap) ? NULL : malloc(bytes);
  if (block != NULL) {
    atomic_fetch_add(&live_blocks, 1);
  }
  return block;
}

static void *reallocate(void *pointer, size_t bytes) {
  void *block = sprung(&allocation_trap) ? NULL : realloc(pointer, bytes);
  if (block != NULL && pointer == NULL) {
    atomic_fetch_add(&live_blocks, 1);
  }
  return block;
}

static void release(void *pointer) {
  atomic_fetch_sub(&live_blocks, 1);
  free(pointer);
}

void fault_allocation(long nth) {
  even_allocator_current = (even_allocator){allocate, reallocate, release};
  arm(&allocation_trap, nth, false, 0);
}

long fault_allocations(void) {
  return atomic_load(&allocation_trap.seen);
}

long fault_live_blocks(void) {
  return atomic_load(&live_blocks);
}

/* ---- calls to the operating system ---- */
static size_t fault_short(size_t bytes) {
  size_t most = atomic_load(&most_bytes);
  return most > 0 && bytes > most ? most : bytes;
}

/* Or wishes: a weight is as good as another. */
static bool undoes_or_looks(fault_call call) {
  switch (call) {
    case FAULT_close:
    case FAULT_munmap:
    case FAULT_madvise:
    case FAULT_mincore:
    case FAULT_unlink:
    case FAULT_unlinkat:
    case FAULT_rmdir:
    case FAULT_futex:
    case FAULT_clock_gettime:
    case FAULT_getpriority:
    case FAULT_setpriority:
    case FAULT_reset_on_fork:
      return true;
    default:
      return false;
  }
}

static bool call_fails(fault_call call) {
  trap *any = &call_traps[FAULT_CALL_COUNT];
  if (sprung(&call_traps[call])) {
    errno = atomic_load(&call_traps[call].error_number);
    return true;
  }
  if (!undoes_or_looks(call) && sprung(any)) {
    errno = atomic_load(&any->error_number);
    return true;
  }
  return false;
}

#define FAULT_WRAPPER(type, failure, name, parameters, arguments) \
  static type fault_##name parameters {                           \
    if (call_fails(FAULT_##name)) {                               \
      return failure;                                             \
    }                                                             \
    return even_os_real.name arguments;                           \
  }
FAULT_CALL_LIST(FAULT_WRAPPER)
#undef FAULT_WRAPPER

static void install(void) {
#define FAULT_INSTALL(type, failure, name, parameters, arguments) even_os.name = fault_##name;
  FAULT_CALL_LIST(FAULT_INSTALL)
#undef FAULT_INSTALL
}

void fault_os(fault_call call, long nth, int error_number) {
  arm(&call_traps[call], nth, false, error_number);
  install();
}

void fault_os_from(fault_call call, long nth, int error_number) {
  arm(&call_traps[call], nth, true, error_number);
  install();
}

void fault_os_any(long nth, int error_number) {
  fault_os(FAULT_CALL_COUNT, nth, error_number);
}

long fault_os_calls(fault_call call) {
  return atomic_load(&call_traps[call].seen);
}

void fault_os_short(size_t bytes) {
  atomic_store(&most_bytes, bytes);
  install();
}

void fault_reset(void) {
  even_allocator_current = (even_allocator){malloc, realloc, free};
  even_os = even_os_real;
  arm(&allocation_trap, 0, false, 0);
  for (size_t i = 0; i <= FAULT_CALL_COUNT; i++) {
    arm(&call_traps[i], 0, false, 0);
  }
  atomic_store(&live_blocks, 0);
  atomic_store(&most_bytes, 0);
}

/* ---- one fault after the other ---- */
enum { MOST_FAULTS = 10000 };

static long each_allocation(even_status (*body)(void *), void (*holds)(void), void *context) {
  for (long nth = 1; nth < MOST_FAULTS; nth++) {
    fault_reset();
    fault_allocation(nth);
    even_status status = body(context);
    bool failed_one = fault_allocations() >= nth;
    long leaked = fault_live_blocks();
    fault_reset();
    if (leaked != 0) {
      fail_msg("with allocation %ld failing, %ld blocks were left", nth, leaked);
    }
    if (holds != NULL) {
      holds();
    }
    if (!failed_one) {
      assert_int_equal(status, EVEN_OK);
      return nth - 1;
    }
    if (status != EVEN_ERR_MEMORY && !(holds != NULL && status == EVEN_OK)) {
      fail_msg("with allocation %ld failing, the status was %s", nth, even_status_name(status));
    }
  }
  fail_msg("more than %d allocations", MOST_FAULTS);
  return -1;
}

long fault_each_allocation(even_status (*body)(void *), void *context) {
  return each_allocation(body, NULL, context);
}

long fault_each_allocation_borne(even_status (*body)(void *), void (*holds)(void), void *context) {
  return each_allocation(body, holds, context);
}

long fault_each_os(even_status (*body)(void *), void *context, int error_number) {
  for (long nth = 1; nth < MOST_FAULTS; nth++) {
    fault_reset();
    fault_allocation(0);
    fault_os_any(nth, error_number);
    even_status status = body(context);
    bool failed_one = fault_os_calls(FAULT_CALL_COUNT) >= nth;
    long leaked = fault_live_blocks();
    fault_reset();
    if (leaked != 0) {
      fail_msg("with call %ld failing, %ld blocks were left", nth, leaked);
    }
    if (!failed_one) {
      assert_int_equal(status, EVEN_OK);
      return nth - 1;
    }
  }
  fail_msg("more than %d calls to the operating system", MOST_FAULTS);
  return -1;
}
