/* Every reduction of every SIMD path gives the bits of the portable one: each dtype and operation, two to six sources,
 * one to three targets, lengths that fill no vector, and places that are aligned to an element alone. */
#include "comm/kernels.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 700, SOURCES = 6, TARGETS = 3, WORD = 8, LINE = 16 };

static const char *const names[] = {"avx2", "avx512", "neon"};
static const size_t lengths[] = {1, 3, 7, 8, 15, 16, 17, 33, 255, 256, 257, 699};

/* One element more than is reduced, so that a place may begin at any of its first ones; the last must stay as it is. */
typedef union place {
  unsigned char bytes[(MOST + 8) * WORD];
  uint64_t aligned;
} place;

static place sources[SOURCES];
static place results[2][TARGETS];

/* Finite, of any magnitude, or infinite; never NaN, whose other bits the processors choose: infinities of both signs
 * make some. */
static void put(unsigned char *to, even_dtype dtype, uint64_t random) {
  static const uint64_t exponents[EVEN_DTYPES] = {
      [EVEN_F32] = 0x7f800000u, [EVEN_F64] = UINT64_C(0x7ff0000000000000), [EVEN_F16] = 0x7c00u, [EVEN_BF16] = 0x7f80u};
  static const uint64_t fractions[EVEN_DTYPES] = {
      [EVEN_F32] = 0x7fffffu, [EVEN_F64] = UINT64_C(0xfffffffffffff), [EVEN_F16] = 0x3ffu, [EVEN_BF16] = 0x7fu};
  if (exponents[dtype] != 0 && (random & exponents[dtype]) == exponents[dtype]) {
    random &= ~fractions[dtype];
  }
  memcpy(to, &random, even_dtype_bytes(dtype)); /* little-endian, as both processors are */
}

static bool is_nan(const unsigned char *at, even_dtype dtype) {
  uint64_t bits = 0;
  memcpy(&bits, at, even_dtype_bytes(dtype));
  switch (dtype) {
    case EVEN_F32:
      return (bits & 0x7fffffffu) > 0x7f800000u;
    case EVEN_F64:
      return (bits & UINT64_C(0x7fffffffffffffff)) > UINT64_C(0x7ff0000000000000);
    case EVEN_F16:
      return (bits & 0x7fffu) > 0x7c00u;
    case EVEN_BF16:
      return (bits & 0x7fffu) > 0x7f80u;
    default:
      return false;
  }
}

static uint64_t next(uint64_t *random) { /* the next number of a repeatable sequence (Knuth's MMIX) */
  *random = *random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return *random ^ *random >> 29;
}

static void fill(even_dtype dtype, uint64_t seed) {
  uint64_t random = seed;
  size_t bytes = even_dtype_bytes(dtype);
  for (size_t k = 0; k < SOURCES; k++) {
    for (size_t i = 0; i < sizeof sources[k].bytes / bytes; i++) {
      put(sources[k].bytes + i * bytes, dtype, next(&random));
    }
  }
}

typedef struct reduction {
  const even_kernels *kernels;
  even_dtype dtype;
  even_reduce_op op;
  size_t sources, targets, count;
} reduction;

static void run(const reduction *on, const even_kernels *kernels, place *into) {
  void *to[TARGETS];
  const void *from[SOURCES];
  size_t bytes = even_dtype_bytes(on->dtype);
  for (size_t k = 0; k < on->sources; k++) {
    from[k] = sources[k].bytes + k % 3 * bytes;
  }
  for (size_t t = 0; t < TARGETS; t++) {
    memset(into[t].bytes, 0x5a, sizeof into[t].bytes);
    to[t] = into[t].bytes + (t + 1) % 3 * bytes;
  }
  kernels->reduce[on->dtype][on->op](to, on->targets, from, on->sources, on->count, (double)on->sources);
}

static void compare(const reduction *on) {
  run(on, even_kernels_named("portable"), results[0]);
  run(on, on->kernels, results[1]);
  size_t bytes = even_dtype_bytes(on->dtype);
  for (size_t t = 0; t < TARGETS; t++) {
    for (size_t at = 0; at < sizeof results[0][t].bytes; at += bytes) {
      const unsigned char *wanted = results[0][t].bytes + at;
      const unsigned char *got = results[1][t].bytes + at;
      if (memcmp(wanted, got, bytes) != 0 && !(is_nan(wanted, on->dtype) && is_nan(got, on->dtype))) {
        fail_msg("%s: dtype %d, op %d, %zu sources, %zu targets, %zu elements: target %zu differs at byte %zu",
                 on->kernels->name, (int)on->dtype, (int)on->op, on->sources, on->targets, on->count, t, at);
      }
    }
  }
}

static void check_reductions(const even_kernels *kernels) {
  for (int dtype = 0; dtype < EVEN_DTYPES; dtype++) {
    fill((even_dtype)dtype, (uint64_t)dtype + 1);
    for (int op = 0; op < EVEN_REDUCE_OPS; op++) {
      bool there = kernels->reduce[dtype][op] != NULL;
      assert_int_equal(there, even_kernels_named("portable")->reduce[dtype][op] != NULL);
      for (size_t i = 0; there && i < sizeof lengths / sizeof lengths[0] * (SOURCES - 1) * TARGETS; i++) {
        compare(&(reduction){.kernels = kernels,
                             .dtype = (even_dtype)dtype,
                             .op = (even_reduce_op)op,
                             .sources = 2 + i % (SOURCES - 1),
                             .targets = 1 + i / (SOURCES - 1) % TARGETS,
                             .count = lengths[i / ((SOURCES - 1) * TARGETS)]});
      }
    }
  }
}

/* What two ranks' data go through: the other's result, the sums, what is staged next over that result. */
static void check_staged(const even_kernels *kernels) {
  enum { COUNT = 10 * LINE };
  static float memory[2][5][COUNT + 1];
  const even_kernels *both[2] = {even_kernels_named("portable"), kernels};
  const even_reduce_op ops[2] = {EVEN_SUM, EVEN_AVG};
  for (size_t op = 0; op < 2; op++) {
    for (size_t which = 0; which < 2; which++) {
      float(*rows)[COUNT + 1] = memory[which];
      for (size_t k = 0; k < 5; k++) {
        for (size_t i = 0; i <= COUNT; i++) {
          rows[k][i] = (float)(i * (k + 1)) * 0.37f;
        }
      }
      even_staged work = {.out = rows[0] + 1,
                          .result = rows[1] + 1,
                          .sources = {rows[2] + 1, rows[3]},
                          .targets = {rows[2] + 1, rows[3]},
                          .in = rows[4],
                          .staging = rows[1] + 1};
      both[which]->staged[ops[op]](&work, COUNT, 2.0);
    }
    assert_memory_equal(memory[0], memory[1], sizeof memory[0]);
    assert_true(memory[1][3][1] == (6.0f * 0.37f + 4.0f * 0.37f) / (op == 0 ? 1.0f : 2.0f));
    assert_true(memory[1][1][COUNT] == (float)((COUNT - 1) * 5) * 0.37f);
  }
  assert_null(kernels->staged[EVEN_MAX]);
}

static void test_paths(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    const even_kernels *kernels = even_kernels_named(names[i]);
    if (kernels == NULL) {
      print_message("%s: not on this machine, not tested\n", names[i]);
      continue;
    }
    check_reductions(kernels);
    check_staged(kernels);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_paths)};
  return cmocka_run_group_tests_name("paths of the reductions", tests, NULL, NULL);
}
