/* Linked into the tests of code that makes no thread (even_one_thread): one that does make one belongs before
 * ThreadSanitizer, and fails. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
  (void)thread;
  (void)attributes;
  (void)run;
  (void)argument;
  (void)fputs("a test that is listed by even_one_thread (tests/CMakeLists.txt) makes a thread: take it off the list\n",
              stderr);
  abort();
}
