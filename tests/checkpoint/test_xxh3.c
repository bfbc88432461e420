/* The sums do not depend on the vectors that they were made with: a checkpoint is read where it was not written. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "checkpoint/xxh3.h"

#define XXH_INLINE_ALL
#include <string.h>
#include <xxhash.h>

enum { MOST = 70001 };
static const char *const names[] = {"portable", "avx2", "avx512"};
static unsigned char data[MOST];

static int fill(void **state) {
  (void)state;
  for (size_t i = 0; i < MOST; i++) {
    data[i] = (unsigned char)(i * 2654435761u >> 13);
  }
  return 0;
}

static void all_give_the_same(void **state) {
  (void)state;
  size_t tried = 0;
  for (size_t n = 0; n < sizeof names / sizeof names[0]; n++) {
    const even_xxh3 *by = even_xxh3_named(names[n]);
    if (by == NULL) {
      continue;
    }
    tried++;
    assert_string_equal(by->name, names[n]);
    for (size_t bytes = 0; bytes <= MOST; bytes = bytes * 3 / 2 + 1) {
      XXH3_state_t sums;
      assert_true(by->whole(data + 1, bytes == MOST ? MOST - 1 : bytes) ==
                  XXH3_64bits(data + 1, bytes == MOST ? MOST - 1 : bytes));
      (void)XXH3_64bits_reset(&sums);
      for (size_t at = 0; at < bytes; at += 1031) { /* pieces that fit no block of the algorithm's */
        by->update(&sums, data + at, bytes - at < 1031 ? bytes - at : 1031);
      }
      assert_true(XXH3_64bits_digest(&sums) == XXH3_64bits(data, bytes));
    }
  }
  assert_true(tried >= 1);
  assert_non_null(even_xxh3_named(even_xxh3_best()->name));
  assert_null(even_xxh3_named("others"));
}

/* As in a save that one thread ends with other vectors than it began with: none does, but the form allows it. */
static void a_state_goes_from_one_to_another(void **state) {
  (void)state;
  XXH3_state_t sums;
  size_t at = 0;
  (void)XXH3_64bits_reset(&sums);
  for (size_t turn = 0; at < MOST; turn++) {
    const even_xxh3 *by = even_xxh3_named(names[turn % 3]);
    size_t bytes = MOST - at < 777 ? MOST - at : 777;
    (by == NULL ? &even_xxh3_portable : by)->update(&sums, data + at, bytes);
    at += bytes;
  }
  assert_true(XXH3_64bits_digest(&sums) == XXH3_64bits(data, MOST));
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(all_give_the_same),
                                     cmocka_unit_test(a_state_goes_from_one_to_another)};
  return cmocka_run_group_tests(tests, fill, NULL);
}
