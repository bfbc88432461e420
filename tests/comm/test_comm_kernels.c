/* Every SIMD path against the compiler's own arithmetic, where it is delicate: all 16-bit floats, NaN, infinities. */
#include "comm/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define HALVES 65536

static const char *const names[] = {"portable", "avx2", "avx512", "neon"};

static void reduce_two(const even_kernels *kernels, even_dtype dtype, even_reduce_op op, void *target, const void *a,
                       const void *b, size_t count) {
  const void *sources[2] = {a, b};
  kernels->reduce[dtype][op](&target, 1, sources, 2, count, 2.0);
}

/* The bits of a half without caring which NaN it is. */
static uint16_t same_nan(_Float16 value) {
  uint16_t bits;
  memcpy(&bits, &value, sizeof bits);
  return value != value ? 0x7e00u : bits;
}

static void check_halves(const even_kernels *kernels) {
  static uint16_t a[HALVES];
  static uint16_t b[HALVES];
  static uint16_t sum[HALVES];
  uint32_t random = 1;
  for (int round = 0; round < 20; round++) {
    for (uint32_t i = 0; i < HALVES; i++) {
      random = random * 1664525u + 1013904223u;
      a[i] = (uint16_t)i;
      b[i] = round == 0 ? 0 : (uint16_t)(random >> 16);
    }
    reduce_two(kernels, EVEN_F16, EVEN_SUM, sum, a, b, HALVES);
    for (uint32_t i = 0; i < HALVES; i++) {
      _Float16 left;
      _Float16 right;
      _Float16 got;
      memcpy(&left, &a[i], 2);
      memcpy(&right, &b[i], 2);
      memcpy(&got, &sum[i], 2);
      assert_int_equal(same_nan(got), same_nan((_Float16)((float)left + (float)right)));
    }
  }
}

static float brain(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

static void check_brains(const even_kernels *kernels) {
  static uint16_t a[HALVES];
  static uint16_t b[HALVES];
  static uint16_t sum[HALVES];
  for (uint32_t i = 0; i < HALVES; i++) {
    a[i] = (uint16_t)i;
    b[i] = (uint16_t)(i * 40503u);
  }
  reduce_two(kernels, EVEN_BF16, EVEN_SUM, sum, a, b, HALVES);
  for (uint32_t i = 0; i < HALVES; i++) {
    float wanted = brain(a[i]) + brain(b[i]);
    float got = brain(sum[i]);
    if (isnan(wanted)) {
      assert_true(isnan(got));
      continue;
    }
    /* the nearest: no other bf16 is nearer */
    double error = fabs((double)got - (double)wanted);
    if (isfinite(got) && isfinite(wanted)) {
      assert_true(error <= fabs((double)brain((uint16_t)(sum[i] + 1)) - (double)wanted) ||
                  isinf(brain((uint16_t)(sum[i] + 1))));
      assert_true(error <= fabs((double)brain((uint16_t)(sum[i] - 1)) - (double)wanted) || (sum[i] & 0x7fffu) == 0);
    }
  }
}

static void check_specials(const even_kernels *kernels) {
  float a[40];
  float b[40];
  float out[40];
  for (int i = 0; i < 40; i++) {
    a[i] = i % 4 == 0 ? NAN : i % 4 == 1 ? INFINITY : (float)i;
    b[i] = i % 4 == 2 ? NAN : i % 4 == 1 ? -INFINITY : -1.0f;
  }
  reduce_two(kernels, EVEN_F32, EVEN_MIN, out, a, b, 40);
  for (int i = 0; i < 40; i++) {
    assert_true(i % 2 == 0 ? isnan(out[i]) : out[i] == b[i]); /* a NaN on either side wins */
  }
  reduce_two(kernels, EVEN_F32, EVEN_MAX, out, a, b, 40);
  for (int i = 0; i < 40; i++) {
    assert_true(i % 2 == 0 ? isnan(out[i]) : out[i] == a[i]);
  }
  int16_t most[3] = {INT16_MAX, INT16_MIN, 300};
  int16_t also[3] = {1, -1, 300};
  int16_t wrapped[3];
  reduce_two(kernels, EVEN_I16, EVEN_SUM, wrapped, most, also, 3);
  assert_int_equal(wrapped[0], INT16_MIN);
  assert_int_equal(wrapped[1], INT16_MAX);
  reduce_two(kernels, EVEN_I16, EVEN_PRODUCT, wrapped, most, also, 3);
  assert_int_equal(wrapped[2], (int16_t)(uint16_t)(300 * 300));
  uint8_t truths[3] = {0, 1, 7}; /* any byte that is not 0 is true */
  uint8_t others[3] = {0, 0, 1};
  uint8_t result[3];
  reduce_two(kernels, EVEN_BOOL, EVEN_SUM, result, truths, others, 3);
  assert_int_equal(result[0], 0);
  assert_int_equal(result[1], 1);
  assert_int_equal(result[2], 1);
  reduce_two(kernels, EVEN_BOOL, EVEN_BXOR, result, truths, others, 3);
  assert_int_equal(result[2], 0);
}

/* Every path gives the same bits as the plain one, whatever the length. */
static void check_conversions(const even_kernels *kernels) {
  static float from[HALVES];
  static float back[2][HALVES];
  static uint16_t to[2][HALVES];
  const even_dtype dtypes[2] = {EVEN_F16, EVEN_BF16};
  uint32_t random = 7;
  for (uint32_t i = 0; i < HALVES; i++) {
    random = random * 1664525u + 1013904223u;
    memcpy(&from[i], &random, sizeof from[i]); /* any magnitude, infinities among them */
    from[i] = isnan(from[i]) ? (float)i : from[i];
  }
  for (int k = 0; k < 2; k++) {
    for (size_t count = HALVES - 21; count <= HALVES; count += 7) {
      even_kernels_named("portable")->narrow[dtypes[k]](to[0], from, count, 0.3f);
      kernels->narrow[dtypes[k]](to[1], from, count, 0.3f);
      assert_memory_equal(to[0], to[1], count * sizeof to[0][0]);
      even_kernels_named("portable")->widen[dtypes[k]](back[0], to[0], count);
      kernels->widen[dtypes[k]](back[1], to[0], count);
      assert_memory_equal(back[0], back[1], count * sizeof back[0][0]);
    }
    assert_null(kernels->narrow[EVEN_F32]);
  }
}

static void check_targets(const even_kernels *kernels) {
  enum { COUNT = 1001 };
  float sources[5][COUNT];
  float extra[COUNT];
  float wanted[COUNT];
  const void *from[5];
  for (int k = 0; k < 5; k++) {
    from[k] = sources[k];
    for (int i = 0; i < COUNT; i++) {
      sources[k][i] = (float)(i * (k + 1)) * 0.37f;
    }
  }
  for (int i = 0; i < COUNT; i++) {
    wanted[i] = (((sources[0][i] + sources[1][i]) + sources[2][i]) + sources[3][i]) + sources[4][i];
  }
  void *targets[3] = {sources[1], extra, sources[4]}; /* some of the sources */
  kernels->reduce[EVEN_F32][EVEN_SUM](targets, 3, from, 5, COUNT, 5.0);
  assert_memory_equal(sources[1], wanted, sizeof wanted);
  assert_memory_equal(extra, wanted, sizeof wanted);
  assert_memory_equal(sources[4], wanted, sizeof wanted);
}

/* As the sum of two after two, whatever the length, of more places than have loops of their own too. */
static void check_in_place(const even_kernels *kernels) {
  enum { COUNT = 3001, PLACES = EVEN_IN_PLACE_RANKS };
  static float memory[2][PLACES][COUNT + 16];
  const even_reduce_op ops[2] = {EVEN_SUM, EVEN_AVG};
  for (size_t places = 2; places <= PLACES; places += places < 6 ? 1 : 5) {
    for (size_t count = COUNT - 17; count <= COUNT; count += 8) {
      void *at[2][PLACES];
      const void *sources[PLACES];
      for (size_t k = 0; k < places; k++) {
        for (size_t i = 0; i < COUNT + 16; i++) {
          memory[0][k][i] = memory[1][k][i] = (float)(i * (k + 1)) * 0.37f;
        }
        at[0][k] = memory[0][k];
        sources[k] = at[1][k] = memory[1][k];
      }
      even_reduce_op op = ops[count % 2];
      kernels->in_place[op](at[0], places, count, (double)places);
      kernels->reduce[EVEN_F32][op](at[1], places, sources, places, count, (double)places);
      assert_memory_equal(memory[0], memory[1], sizeof memory[0]);
    }
  }
  assert_null(kernels->in_place[EVEN_MAX]);
}

static void test_paths(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    const even_kernels *kernels = even_kernels_named(names[i]);
    if (kernels == NULL) {
      print_message("%s: not on this machine, not tested\n", names[i]);
      continue;
    }
    check_halves(kernels);
    check_brains(kernels);
    check_specials(kernels);
    check_targets(kernels);
    check_in_place(kernels);
    check_conversions(kernels);
  }
}

static void test_copy_past_caches(void **state) {
  enum { BYTES = 20000 };
  static unsigned char from[BYTES + 128];
  static unsigned char to[BYTES + 128];
  (void)state;
  for (size_t i = 0; i < sizeof from; i++) {
    from[i] = (unsigned char)(i * 31 + 7);
  }
  for (size_t shift = 0; shift < 70; shift += 3) {
    for (size_t bytes = BYTES - 70; bytes < BYTES; bytes += 23) {
      memset(to, 0, sizeof to);
      even_copy_past_caches(to + shift, from + 5, bytes);
      assert_memory_equal(to + shift, from + 5, bytes);
      assert_int_equal(to[shift + bytes], 0);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_paths), cmocka_unit_test(test_copy_past_caches)};
  return cmocka_run_group_tests_name("reductions", tests, NULL, NULL);
}
