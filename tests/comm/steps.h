/* Ranks of a test that wait for one another outside of any group: in processes or threads. */
#ifndef EVEN_TEST_STEPS_H
#define EVEN_TEST_STEPS_H

#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

typedef atomic_int steps;

/* Before the ranks start. NULL without memory. */
static inline steps *steps_make(void) {
  void *memory = mmap(NULL, sizeof(steps), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return memory == MAP_FAILED ? NULL : memory;
}

static inline void steps_free(steps *of) {
  (void)munmap((void *)of, sizeof *of);
}

/* At least that one: another may be further already. */
static inline void steps_reach(steps *of, int step) {
  int reached = atomic_load(of);
  while (reached < step && !atomic_compare_exchange_weak(of, &reached, step)) {
  }
}

/* Ends the process where the others do not come to it for minutes: the test has failed there. */
static inline void steps_await(steps *of, int step) {
  const time_t began = time(NULL);
  while (atomic_load(of) < step) {
    (void)sched_yield();
    if (time(NULL) - began > 200) {
      abort();
    }
  }
}

#endif
