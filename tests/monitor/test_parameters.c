/* The difference of two models, over files written byte by byte here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "monitor/parameters.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char folder[64] = "/tmp/evenstep-test-XXXXXX";

static int set_up(void **state) {
  (void)state;
  return mkdtemp(folder) == NULL;
}

static int tear_down(void **state) {
  char path[128];
  (void)state;
  for (const char *name = "ab"; *name != '\0'; name++) {
    (void)snprintf(path, sizeof path, "%s/%c", folder, *name);
    (void)unlink(path);
  }
  return rmdir(folder);
}

static const char *put(char name, const char *header, const void *data, size_t bytes) {
  static char paths[2][128];
  char *path = paths[name - 'a'];
  (void)snprintf(path, sizeof paths[0], "%s/%c", folder, name);
  uint64_t length = strlen(header);
  FILE *file = fopen(path, "w");
  assert_non_null(file);
  assert_int_equal(fwrite(&length, 1, sizeof length, file), sizeof length);
  assert_int_equal(fwrite(header, 1, length, file), length);
  assert_int_equal(fwrite(data, 1, bytes, file), bytes);
  assert_int_equal(fclose(file), 0);
  return path;
}

static void near(double value, double expected) {
  assert_true(fabs(value - expected) <= 1e-12 * fabs(expected));
}

static const char two_floats[] =
    "{\"__metadata__\":{\"format\":\"pt\"},\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}";

static void the_norm_is_over_everything(void **state) {
  (void)state;
  even_parameters_difference difference;
  const float a[2] = {3, 4.5F};
  const float b[2] = {3, 4};
  const char *path = put('a', two_floats, a, sizeof a);
  const char *other = put('b', two_floats, b, sizeof b);
  assert_int_equal(even_parameters_compare(path, other, &difference), EVEN_OK);
  near(difference.relative_norm, 0.5 / 5);
  assert_int_equal(difference.tensors, 1);
  assert_int_equal(even_parameters_compare(other, other, &difference), EVEN_OK);
  assert_true(difference.relative_norm == 0);
}

static void types_may_differ_and_counters_do_not_count(void **state) {
  (void)state;
  even_parameters_difference difference;
  const uint16_t brain[2] = {0x4040, 0x4080}; /* 3, 4 */
  const uint16_t half[2] = {0x4200, 0x4400};
  const double wide[2] = {3, 4};
  struct {
    float values[2];
    int64_t counter;
  } mixed = {{3, 4}, 7};
  const char *path = put('a', "{\"w\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]}}", brain, sizeof brain);
  const char *other = put('b', two_floats, mixed.values, sizeof mixed.values);
  assert_int_equal(even_parameters_compare(path, other, &difference), EVEN_OK);
  assert_true(difference.relative_norm == 0);
  path = put('a', "{\"w\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,4]}}", half, sizeof half);
  assert_int_equal(even_parameters_compare(path, other, &difference), EVEN_OK);
  assert_true(difference.relative_norm == 0);
  path = put('a', "{\"w\":{\"dtype\":\"F64\",\"shape\":[2],\"data_offsets\":[0,16]}}", wide, sizeof wide);
  assert_int_equal(even_parameters_compare(path, other, &difference), EVEN_OK);
  assert_true(difference.relative_norm == 0);
  const char both[] =
      "{\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"n\":{\"dtype\":\"I64\",\"shape\":[],\"data_"
      "offsets\":[8,16]}}";
  path = put('a', both, &mixed, sizeof mixed);
  mixed.counter = 8;
  other = put('b', both, &mixed, sizeof mixed);
  assert_int_equal(even_parameters_compare(path, other, &difference), EVEN_OK);
  assert_true(difference.relative_norm == 0);
  near(even_parameters_half(0x3c00), 1);
  near(even_parameters_half(0xc000), -2);
  near(even_parameters_half(0x0001), ldexp(1, -24));
  assert_true(isinf(even_parameters_half(0x7c00)));
  assert_true(isnan(even_parameters_half(0x7e00)));
}

static void large_tensors_go_in_blocks(void **state) {
  (void)state;
  enum { COUNT = 300001 };
  even_parameters_difference difference;
  float *values = malloc(COUNT * sizeof *values);
  char header[128];
  assert_non_null(values);
  for (int i = 0; i < COUNT; i++) {
    values[i] = 1;
  }
  (void)snprintf(header, sizeof header, "{\"w\":{\"dtype\":\"F32\",\"shape\":[%d],\"data_offsets\":[0,%d]}}", COUNT,
                 4 * COUNT);
  const char *path = put('a', header, values, COUNT * sizeof *values);
  values[COUNT - 1] = 2;
  const char *other = put('b', header, values, COUNT * sizeof *values);
  free(values);
  assert_int_equal(even_parameters_compare(other, path, &difference), EVEN_OK);
  near(difference.relative_norm, 1 / sqrt(COUNT));
}

static void other_models_and_damage_are_refused(void **state) {
  (void)state;
  even_parameters_difference difference;
  const float a[2] = {3, 4};
  const char *path = put('a', two_floats, a, sizeof a);
  const char *other = put('b', "{\"v\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", a, sizeof a);
  assert_int_equal(even_parameters_compare(path, other, &difference), EVEN_ERR_MISMATCH);
  assert_non_null(strstr(even_error_last()->what, "tensor w"));
  other = put('b', "{\"w\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]}}", a, sizeof a);
  assert_int_equal(even_parameters_compare(path, other, &difference), EVEN_ERR_MISMATCH);
  other = put('b', two_floats, a, 4);
  assert_int_equal(even_parameters_compare(path, other, &difference), EVEN_ERR_CORRUPT);
  other = put('b', "{}", a, 0);
  assert_int_equal(even_parameters_compare(other, path, &difference), EVEN_ERR_MISMATCH);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_norm_is_over_everything),
      cmocka_unit_test(types_may_differ_and_counters_do_not_count),
      cmocka_unit_test(large_tensors_go_in_blocks),
      cmocka_unit_test(other_models_and_damage_are_refused),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
