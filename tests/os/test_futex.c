/* A futex: returns when the word differs, wakes across threads, ends by its limit. */
#include "os/futex.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static void *wake(void *context) {
  _Atomic uint32_t *word = context;
  atomic_store(word, 1);
  even_futex_wake_all(word);
  return NULL;
}

static void a_change_wakes_the_sleeper(void **state) {
  _Atomic uint32_t word = 0;
  pthread_t thread;
  (void)state;
  assert_int_equal(pthread_create(&thread, NULL, wake, &word), 0);
  while (atomic_load(&word) == 0) {
    even_futex_wait(&word, 0, 3600u * 1000000000ull);
  }
  assert_int_equal(pthread_join(thread, NULL), 0);
}

static void another_value_returns_at_once(void **state) {
  _Atomic uint32_t word = 2;
  (void)state;
  even_futex_wait(&word, 1, 3600u * 1000000000ull);
}

static void the_time_limit_ends_the_wait(void **state) {
  _Atomic uint32_t word = 0;
  (void)state;
  even_futex_wait(&word, 0, 1000);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_change_wakes_the_sleeper),
      cmocka_unit_test(another_value_returns_at_once),
      cmocka_unit_test(the_time_limit_ends_the_wait),
  };
  return cmocka_run_group_tests_name("os_futex", tests, NULL, NULL);
}
