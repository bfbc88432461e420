/* How much of a search a build makes. ThreadSanitizer looks for races, and a search over one thread's work has the same
 * threads in each of its cases: every thirteenth is enough there. The other builds make all of them; of those over
 * large data sanitizers, which make each dear, every third. */
#ifndef EVEN_TEST_SEARCH_H
#define EVEN_TEST_SEARCH_H

#if defined(__SANITIZE_THREAD__)
#define EVEN_TEST_THREADS_WATCHED 1
#elif defined(__SANITIZE_ADDRESS__)
#define EVEN_TEST_MEMORY_WATCHED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define EVEN_TEST_THREADS_WATCHED 1
#elif __has_feature(address_sanitizer)
#define EVEN_TEST_MEMORY_WATCHED 1
#endif
#endif

#if defined(EVEN_TEST_THREADS_WATCHED)
enum { SEARCH_STRIDE = 13, SEARCH_LARGE_STRIDE = 3 }; /* odd: bits and bytes of all positions come up */
#elif defined(EVEN_TEST_MEMORY_WATCHED)
enum { SEARCH_STRIDE = 1, SEARCH_LARGE_STRIDE = 3 };
#else
enum { SEARCH_STRIDE = 1, SEARCH_LARGE_STRIDE = 1 };
#endif

#endif
