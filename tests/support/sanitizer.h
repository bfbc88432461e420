/* What watches this build: 1 or 0 each. */
#ifndef EVEN_TEST_SANITIZER_H
#define EVEN_TEST_SANITIZER_H

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
#ifndef EVEN_TEST_THREADS_WATCHED
#define EVEN_TEST_THREADS_WATCHED 0
#endif
#ifndef EVEN_TEST_MEMORY_WATCHED
#define EVEN_TEST_MEMORY_WATCHED 0
#endif

#endif
