/* Clocks that are ahead of the kernel's, for tests in which time passes without waiting for it. */
#ifndef EVEN_TESTS_SUPPORT_CLOCK_AHEAD_H
#define EVEN_TESTS_SUPPORT_CLOCK_AHEAD_H

#include <stdbool.h>
#include <stdint.h>

/* From now on all clocks that the code under test reads are so far ahead. Of one thread. Ends with the system calls'
 * own table (even_os = even_os_real). */
void clock_ahead_set(uint64_t ns);
/* So much more. */
void clock_ahead_add(uint64_t ns);

/* From now on the machine may sleep: then the clock that goes on meanwhile (CLOCK_BOOTTIME) is so much further than the
 * others, for all threads and children. Before these are started; false: no memory. */
bool clock_slept_begin(void);
void clock_slept_add(uint64_t ns);
/* When they have ended. */
void clock_slept_end(void);

#endif
