/* What differs between two tensors: by how much, and in how many values, of every type. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "checkpoint/compare.h"
#include "checkpoint/elements.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "support/fault.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MANY = 100000 }; /* several pieces */

static void save(const char *folder, const even_checkpoint_tensor *tensors, size_t count) {
  even_checkpoint_writer *writer = NULL;
  even_checkpoint_params params = {.size = sizeof params, .folder = scratch_path(folder)};
  even_checkpoint_file file = {.size = sizeof file, .name = "m.safetensors", .tensors = tensors, .tensor_count = count};
  assert_int_equal(even_checkpoint_writer_open(&params, &writer), EVEN_OK);
  assert_int_equal(even_checkpoint_writer_add(writer, &file), EVEN_OK);
  assert_int_equal(even_checkpoint_writer_commit(writer, "{}"), EVEN_OK);
}

static even_tensor_difference difference(const char *name_a, const char *name_b) {
  even_safetensors_file a;
  even_safetensors_file b;
  even_tensor_difference how;
  assert_int_equal(even_safetensors_open(scratch_path("a/m.safetensors"), &a), EVEN_OK);
  assert_int_equal(even_safetensors_open(scratch_path("b/m.safetensors"), &b), EVEN_OK);
  assert_int_equal(even_tensors_compare(&a, name_a, &b, name_b, &how), EVEN_OK);
  even_safetensors_close(&a);
  even_safetensors_close(&b);
  return how;
}

static void values_of_every_type(void **state) {
  (void)state;
  static const struct {
    const char *dtype;
    unsigned char bytes[8];
    double value;
  } cases[] = {
      {"F64", {0, 0, 0, 0, 0, 0, 0xF8, 0x3F}, 1.5},
      {"F32", {0, 0, 0xC0, 0xBF}, -1.5},
      {"BF16", {0xC0, 0x3F}, 1.5},
      {"F16", {0x00, 0x3E}, 1.5},
      {"F16", {0x01, 0x80}, -0x1p-24},
      {"F16", {0x00, 0xFC}, -(double)INFINITY},
      {"F16", {0xFF, 0x7B}, 65504},
      {"F8_E4M3", {0x7E}, 448},
      {"F8_E4M3", {0x81}, -0x1p-9},
      {"F8_E5M2", {0x7B}, 57344},
      {"F8_E5M2", {0x7C}, (double)INFINITY},
      {"F8_E8M0", {0x80}, 2},
      {"I64", {0xFE, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF}, -2},
      {"I32", {0xFE, 0xFF, 0xFF, 0xFF}, -2},
      {"I16", {0xFE, 0xFF}, -2},
      {"I8", {0xFE}, -2},
      {"U64", {0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF}, 0x1p64},
      {"U32", {0xFE, 0xFF, 0xFF, 0xFF}, 4294967294.0},
      {"U16", {0xFE, 0xFF}, 65534},
      {"U8", {0xFE}, 254},
      {"BOOL", {1}, 1},
  };
  double value = 0;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    even_elements_decode(cases[i].dtype, cases[i].bytes, 1, &value);
    if (value != cases[i].value) {
      fail_msg("case %zu, %s: %g is not %g", i, cases[i].dtype, value, cases[i].value);
    }
  }
  even_elements_decode("F8_E4M3", (const unsigned char *)"\xFF", 1, &value);
  assert_true(isnan(value));
  even_elements_decode("F8_E8M0", (const unsigned char *)"\xFF", 1, &value);
  assert_true(isnan(value));
  even_elements_decode("F16", (const unsigned char *)"\x01\x7C", 1, &value);
  assert_true(isnan(value));
}

static void the_largest_difference_is_found_wherever_it_is(void **state) {
  (void)state;
  int64_t shape = MANY;
  float *a = calloc(MANY, sizeof *a);
  float *b = calloc(MANY, sizeof *b);
  for (int i = 0; i < MANY; i++) {
    a[i] = 2;
    b[i] = 2;
  }
  b[7] = -14;      /* 16 of 14 */
  b[MANY - 1] = 3; /* 1 of 3 */
  even_checkpoint_tensor left = {"w", "F32", &shape, 1, a, MANY * sizeof *a};
  even_checkpoint_tensor right = {"w", "F32", &shape, 1, b, MANY * sizeof *b};
  save("a", &left, 1);
  save("b", &right, 1);
  free(a);
  free(b);
  even_tensor_difference how = difference("w", "w");
  assert_true(how.compared && how.same_shape && how.same_type);
  assert_int_equal(how.elements, MANY);
  assert_int_equal(how.different, 2);
  assert_int_equal(how.not_finite, 0);
  assert_true(how.largest == 16);
  assert_true(how.largest_relative == 16.0 / 14);
  assert_true(fabs(how.relative_norm - sqrt(257.0 / (4.0 * (double)MANY))) < 1e-12);
}

static void what_no_subtraction_tells(void **state) {
  (void)state;
  int64_t four = 4;
  int64_t two = 2;
  const float a[] = {NAN, 1, 0.0F, 4};
  const float b[] = {NAN, INFINITY, -0.0F, 4};
  const int64_t large_a[] = {INT64_C(1) << 60, -5};
  const int64_t large_b[] = {(INT64_C(1) << 60) + 1, -5};
  const float pair[] = {1, 2, 3, 4};
  const double doubles[] = {1, 2, 3, 4.5};
  const even_checkpoint_tensor left[] = {{"odd", "F32", &four, 1, a, sizeof a},
                                         {"large", "I64", &two, 1, large_a, sizeof large_a},
                                         {"mixed", "F32", &four, 1, pair, sizeof pair},
                                         {"zero", "F32", &two, 1, &a[2], 0}};
  even_checkpoint_tensor right[] = {{"odd", "F32", &four, 1, b, sizeof b},
                                    {"large", "I64", &two, 1, large_b, sizeof large_b},
                                    {"mixed", "F64", &four, 1, doubles, sizeof doubles}};
  save("a", left, 3);
  save("b", right, 3);
  even_tensor_difference how = difference("odd", "odd"); /* the same NaN is the same; the two zeros are not */
  assert_int_equal(how.different, 2);
  assert_int_equal(how.not_finite, 1);
  assert_true(how.largest == 0 && how.relative_norm == 0);
  how = difference("large", "large");
  assert_int_equal(how.different, 1);
  assert_true(how.largest == 1);
  how = difference("mixed", "mixed");
  assert_true(how.compared && !how.same_type);
  assert_int_equal(how.different, 1);
  assert_true(how.largest == 0.5);
  how = difference("odd", "large");
  assert_true(!how.compared && !how.same_shape);
}

static void a_zero_side_has_no_relative_norm(void **state) {
  (void)state;
  int64_t two = 2;
  const float a[] = {0, 0};
  const float b[] = {0, 1};
  const even_checkpoint_tensor left = {"w", "F32", &two, 1, a, sizeof a};
  const even_checkpoint_tensor right = {"w", "F32", &two, 1, b, sizeof b};
  save("a", &left, 1);
  save("b", &right, 1);
  even_tensor_difference how = difference("w", "w");
  assert_true(isinf(how.relative_norm) && how.largest == 1 && how.largest_relative == 1);
}

static void failures_are_told(void **state) {
  (void)state;
  even_safetensors_file a;
  even_tensor_difference how;
  int64_t two = 2;
  const float data[] = {0, 1};
  const even_checkpoint_tensor tensor = {"w", "F32", &two, 1, data, sizeof data};
  save("a", &tensor, 1);
  assert_int_equal(even_safetensors_open(scratch_path("a/m.safetensors"), &a), EVEN_OK);
  assert_int_equal(even_tensors_compare(&a, "v", &a, "w", &how), EVEN_ERR_ARGUMENT);
  fault_allocation(1);
  assert_int_equal(even_tensors_compare(&a, "w", &a, "w", &how), EVEN_ERR_MEMORY);
  fault_reset();
  assert_int_equal(truncate(scratch_path("a/m.safetensors"), (off_t)a.input.bytes - 1), 0);
  assert_int_equal(even_tensors_compare(&a, "w", &a, "w", &how), EVEN_ERR_CORRUPT);
  even_safetensors_close(&a);
  assert_int_equal(even_safetensors_open(scratch_path("a/m.safetensors"), &a), EVEN_ERR_CORRUPT);
  even_safetensors_close(&a);
}

static void a_link_is_no_file_of_a_checkpoint(void **state) {
  (void)state;
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  assert_int_equal(rename(scratch_path("one/model.safetensors"), scratch_path("away")), 0);
  assert_int_equal(symlink("../away", scratch_path("one/model.safetensors")), 0);
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_ERR_CORRUPT);
  assert_non_null(strstr(even_error_last()->what, "model.safetensors is a symbolic link"));
  even_checkpoint_info info;
  assert_int_equal(even_checkpoint_inspect(scratch_path("one"), &info), EVEN_ERR_CORRUPT);
  even_checkpoint_info_free(&info);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(values_of_every_type),
      cmocka_unit_test_setup_teardown(the_largest_difference_is_found_wherever_it_is, scratch_make, scratch_remove),
      cmocka_unit_test_setup_teardown(what_no_subtraction_tells, scratch_make, scratch_remove),
      cmocka_unit_test_setup_teardown(a_zero_side_has_no_relative_norm, scratch_make, scratch_remove),
      cmocka_unit_test_setup_teardown(failures_are_told, scratch_make, scratch_remove),
      cmocka_unit_test_setup_teardown(a_link_is_no_file_of_a_checkpoint, scratch_make, scratch_remove),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
