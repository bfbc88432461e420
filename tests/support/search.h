/* How much of a search a build makes. ThreadSanitizer looks for races, and a search over one thread's work has the same
 * threads in each of its cases: every thirteenth is enough there. The other builds make all of them; of those over
 * large data sanitizers, which make each dear, every third. */
#ifndef EVEN_TEST_SEARCH_H
#define EVEN_TEST_SEARCH_H

#include "support/sanitizer.h"

#if EVEN_TEST_THREADS_WATCHED
enum { SEARCH_STRIDE = 13, SEARCH_LARGE_STRIDE = 3 }; /* odd: bits and bytes of all positions come up */
#elif EVEN_TEST_MEMORY_WATCHED
enum { SEARCH_STRIDE = 1, SEARCH_LARGE_STRIDE = 3 };
#else
enum { SEARCH_STRIDE = 1, SEARCH_LARGE_STRIDE = 1 };
#endif

#endif
