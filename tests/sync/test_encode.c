/* Encodings of gradients: every instruction set gives the same bytes and sums; what is known of them exactly. */
#include "comm/kernels.h"
#include "sync/encode.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { COUNT = 5000 };

static float values[COUNT];
static uint32_t payload[2][COUNT * 2];
static float sums[2][COUNT];
static uint32_t scratch[COUNT + 8192];

static void fill(void) {
  uint32_t random = 3;
  for (int i = 0; i < COUNT; i++) {
    random = random * 1664525u + 1013904223u;
    values[i] = ((float)(random >> 8) - 8388608.0f) * (i % 5 == 0 ? 1e-9f : 1e-7f);
  }
}

static const even_encoders *encoders_of(const char *name) {
  const even_kernels *kernels = even_kernels_named(name);
  if (kernels == NULL) {
    return NULL;
  }
  even_kernels_use(kernels);
  const even_encoders *encoders = even_encoders_best();
  even_kernels_use(NULL);
  assert_string_equal(encoders->name, name);
  return encoders;
}

static void one_after_the_other(const even_encoders *encoders, int which, size_t count) {
  memset(payload[which], 0x55, sizeof payload[which]);
  memset(sums[which], 0, sizeof sums[which]);
  encoders->int8_encode(values, count, 77, payload[which]);
  encoders->int8_add(payload[which], sums[which], count, 1);
  uint32_t *after = payload[which] + even_int8_bytes(count) / 4;
  encoders->one_bit_encode(values, count, after);
  encoders->one_bit_add(after, sums[which], count, -1);
}

static void test_every_path_gives_the_same_bits(void **state) {
  static const char *const names[] = {"avx2", "avx512"};
  (void)state;
  fill();
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    const even_encoders *encoders = encoders_of(names[i]);
    if (encoders == NULL) {
      print_message("%s: not on this machine, not tested\n", names[i]);
      continue;
    }
    for (size_t count = COUNT; count > COUNT - 1100; count -= 101) {
      one_after_the_other(&even_encoders_portable, 0, count);
      one_after_the_other(encoders, 1, count);
      assert_memory_equal(payload[0], payload[1], sizeof payload[0]);
      assert_memory_equal(sums[0], sums[1], sizeof sums[0]);
    }
  }
}

static void test_int8_is_near_and_right_on_average(void **state) {
  enum { TIMES = 500 };
  const even_encoders *encoders = even_encoders_best();
  double total[600] = {0};
  (void)state;
  fill();
  for (uint64_t seed = 0; seed < TIMES; seed++) {
    memset(sums[0], 0, sizeof sums[0]);
    encoders->int8_encode(values, 600, seed << 20, payload[0]);
    encoders->int8_add(payload[0], sums[0], 600, 1);
    for (size_t i = 0; i < 600; i++) {
      float scale = ((const float *)payload[0])[i / EVEN_INT8_BLOCK];
      assert_true(fabsf(sums[0][i] - values[i]) <= scale * 1.0001f);
      total[i] += (double)((sums[0][i] - values[i]) / scale) / (double)TIMES;
    }
  }
  for (size_t i = 0; i < 600; i++) {
    assert_true(fabs(total[i]) < 5 * 0.5 / sqrt((double)TIMES)); /* a step's deviation is at most a half */
  }
}

static void test_one_bit_is_the_sign_and_the_mean(void **state) {
  const even_encoders *encoders = even_encoders_best();
  (void)state;
  fill();
  memset(sums[0], 0, sizeof sums[0]);
  encoders->one_bit_encode(values, 1500, payload[0]);
  encoders->one_bit_add(payload[0], sums[0], 1500, 1);
  assert_int_equal(even_one_bit_bytes(1500), 2 * 4 + 2 * 128);
  for (size_t block = 0; block < 2; block++) {
    size_t first = block * EVEN_ONE_BIT_BLOCK;
    size_t end = block == 0 ? EVEN_ONE_BIT_BLOCK : 1500;
    double mean = 0;
    for (size_t i = first; i < end; i++) {
      mean += fabs((double)values[i]) / (double)(end - first);
    }
    for (size_t i = first; i < end; i++) {
      assert_true(fabs((double)sums[0][i] - (values[i] >= 0 ? mean : -mean)) < 1e-6 * mean);
    }
  }
}

static void test_what_is_not_finite_stays_so(void **state) {
  static const float odd[] = {NAN, INFINITY, -INFINITY};
  const even_encoders *encoders = even_encoders_best();
  (void)state;
  for (size_t k = 0; k < 3; k++) {
    fill();
    values[300] = odd[k];
    one_after_the_other(encoders, 0, 600);
    assert_true(!isfinite(sums[0][300]));
    memset(sums[0], 0, sizeof sums[0]);
    even_top_encode(values, 600, 1, payload[0], scratch);
    assert_int_equal(even_top_add(payload[0], 1, sums[0], 600, 1), EVEN_OK);
    assert_true(!isfinite(sums[0][300]) && sums[0][299] == 0);
  }
  memset(values, 0, sizeof values);
  one_after_the_other(encoders, 0, 600);
  assert_true(sums[0][0] == 0 && sums[0][599] == 0);
}

static int by_magnitude(const void *a, const void *b) {
  int left = *(const int *)a;
  int right = *(const int *)b;
  float x = fabsf(values[left]);
  float y = fabsf(values[right]);
  return x != y ? (x < y) - (x > y) : left - right;
}

static void test_top_is_the_largest(void **state) {
  static const size_t some[] = {1, 2, 50, 700, 2600, 3400, COUNT - 1, COUNT};
  int order[COUNT];
  (void)state;
  assert_true(even_top_scratch_bytes(COUNT) <= sizeof scratch);
  fill();
  for (int i = 0; i < COUNT; i++) {
    values[i] = i % 3 == 0 ? truncf(values[i] * 4) : values[i]; /* many alike, zeros among them */
    order[i] = i;
  }
  qsort(order, COUNT, sizeof order[0], by_magnitude);
  for (size_t k = 0; k < sizeof some / sizeof some[0]; k++) {
    size_t kept = some[k];
    memset(sums[0], 0, sizeof sums[0]);
    memset(sums[1], 0, sizeof sums[1]);
    even_top_encode(values, COUNT, kept, payload[0], scratch);
    assert_int_equal(even_top_add(payload[0], kept, sums[0], COUNT, 1), EVEN_OK);
    for (size_t i = 0; i < kept; i++) {
      sums[1][order[i]] += values[order[i]];
    }
    assert_memory_equal(sums[0], sums[1], sizeof sums[0]);
  }
  ((int32_t *)payload[0])[1] = COUNT;
  assert_int_equal(even_top_add(payload[0], 1, sums[0], COUNT, 1), EVEN_ERR_INPUT);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_path_gives_the_same_bits),
      cmocka_unit_test(test_int8_is_near_and_right_on_average),
      cmocka_unit_test(test_one_bit_is_the_sign_and_the_mean),
      cmocka_unit_test(test_what_is_not_finite_stays_so),
      cmocka_unit_test(test_top_is_the_largest),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
