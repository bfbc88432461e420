/* Every allocation that fails is reported and leaks nothing; wrong numbers teach nothing. */
#include "base/alloc.h"

#include <evenstep/balancer.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static int allowed;
static int held;

static void *allocate(size_t bytes) {
  if (allowed-- <= 0) {
    return NULL;
  }
  void *memory = malloc(bytes);
  held += memory != NULL;
  return memory;
}

static void release(void *pointer) {
  held--;
  free(pointer);
}

static const even_allocator failing = {allocate, realloc, release};

static int restore(void **context) {
  (void)context;
  even_allocator_current = (even_allocator){malloc, realloc, free};
  return 0;
}

static void every_allocation_may_fail(void **context) {
  (void)context;
  const double speeds[3] = {1.0, 2.0, 3.0};
  even_balancer_params params = {
      .size = sizeof params, .policy = EVEN_POLICY_HYBRID, .ranks = 3, .batch = 30, .speeds = speeds};
  even_allocator_current = failing;
  int failures = 0;
  for (;; failures++) {
    even_balancer *balancer = NULL;
    allowed = failures;
    held = 0;
    even_status status = even_balancer_open(&params, &balancer);
    if (status == EVEN_OK) {
      even_balancer_close(balancer);
      assert_int_equal(held, 0);
      break;
    }
    assert_int_equal(status, EVEN_ERR_MEMORY);
    assert_null(balancer);
    assert_int_equal(held, 0);
  }
  assert_true(failures >= 10);
  const int64_t at = 1;
  const double seconds = 1.0;
  even_time_table tables[2] = {{&at, &seconds, 1}, {&at, &seconds, 1}};
  int64_t shares[2];
  for (failures = 0;; failures++) {
    allowed = failures;
    held = 0;
    even_status status = even_balancer_solve(tables, NULL, 2, 9, shares, NULL);
    assert_int_equal(held, 0);
    if (status == EVEN_OK) {
      break;
    }
    assert_int_equal(status, EVEN_ERR_MEMORY);
  }
  assert_true(failures >= 5);
}

static void training_allocates_nothing(void **context) {
  (void)context;
  even_balancer_params params = {.size = sizeof params, .policy = EVEN_POLICY_HYBRID, .ranks = 2, .batch = 30};
  even_balancer *balancer = NULL;
  assert_int_equal(even_balancer_open(&params, &balancer), EVEN_OK);
  even_allocator_current = (even_allocator){allocate, realloc, free};
  allowed = 0;
  int64_t shares[2];
  for (int step = 0; step < 50; step++) {
    assert_int_equal(even_balancer_shares(balancer, step % 7 == 6 ? 11 : 30, shares), EVEN_OK);
    even_step_timing timings[2] = {{shares[0], (double)shares[0]}, {shares[1], 4.0 * (double)shares[1]}};
    assert_int_equal(even_balancer_observe(balancer, timings), EVEN_OK);
  }
  (void)restore(NULL);
  even_balancer_close(balancer);
}

static void wrong_timings_teach_nothing(void **context) {
  (void)context;
  even_balancer_params params = {.size = sizeof params, .policy = EVEN_POLICY_DYNAMIC, .ranks = 2, .batch = 30};
  even_balancer *balancer = NULL;
  assert_int_equal(even_balancer_open(&params, &balancer), EVEN_OK);
  assert_true(isnan(even_balancer_predict(balancer, 0, 1)));
  const even_step_timing wrong[][2] = {
      {{15, 1.0}, {15, NAN}}, {{15, INFINITY}, {15, 1.0}}, {{15, 1.0}, {15, -1.0}}, {{-1, 1.0}, {15, 1.0}}};
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    assert_int_equal(even_balancer_observe(balancer, wrong[i]), EVEN_ERR_ARGUMENT);
  }
  assert_non_null(strstr(even_error_last()->what, "rank 0"));
  assert_true(isnan(even_balancer_predict(balancer, 0, 1)));
  assert_true(isnan(even_balancer_predict(balancer, 2, 1)));
  int64_t shares[2];
  assert_int_equal(even_balancer_shares(balancer, 0, shares), EVEN_ERR_ARGUMENT);
  even_balancer_close(balancer);
}

/* Legal but absurd numbers (found by the fuzzer): shares stay a split of the batch. */
static void absurd_numbers_do_no_harm(void **context) {
  (void)context;
  const double speeds[2] = {5e-324, 1e308};
  const double times[] = {1e308, 0.0, 5e-324, 1e-300, 1e308};
  even_balancer_params params = {
      .size = sizeof params, .policy = EVEN_POLICY_HYBRID, .ranks = 2, .batch = 255, .speeds = speeds};
  even_balancer *balancer = NULL;
  assert_int_equal(even_balancer_open(&params, &balancer), EVEN_OK);
  for (int step = 0; step < 60; step++) {
    int64_t shares[2];
    assert_int_equal(even_balancer_shares(balancer, 255, shares), EVEN_OK);
    assert_true(shares[0] >= 0 && shares[1] >= 0);
    assert_int_equal(shares[0] + shares[1], 255);
    const even_step_timing timings[2] = {{INT64_MAX, times[step % 5]}, {shares[1], times[(step / 2) % 5]}};
    assert_int_equal(even_balancer_observe(balancer, timings), EVEN_OK);
    assert_true(isfinite(even_balancer_predict(balancer, 0, 7)));
  }
  even_balancer_close(balancer);
}

static void wrong_parameters_are_refused(void **context) {
  (void)context;
  const double good[2] = {1.0, 2.0};
  const double zero[2] = {1.0, 0.0};
  const double nan_[2] = {NAN, 1.0};
  const double infinite[2] = {1.0, INFINITY};
  const int64_t caps[2] = {3, 3};
  const even_balancer_params base = {
      .size = sizeof base, .policy = EVEN_POLICY_HYBRID, .ranks = 2, .batch = 10, .speeds = good};
  even_balancer_params wrong[8];
  for (size_t i = 0; i < 8; i++) {
    wrong[i] = base;
  }
  wrong[0].size = 1;
  wrong[1].ranks = 0;
  wrong[2].batch = 0;
  wrong[3].speeds = zero;
  wrong[4].speeds = nan_;
  wrong[5].speeds = infinite;
  wrong[6].caps = caps;
  wrong[7].policy = (even_policy)9;
  for (size_t i = 0; i < 8; i++) {
    even_balancer *balancer = NULL;
    assert_int_equal(even_balancer_open(&wrong[i], &balancer), EVEN_ERR_ARGUMENT);
    assert_null(balancer);
  }
  even_balancer_close(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(every_allocation_may_fail, restore),
      cmocka_unit_test_teardown(training_allocates_nothing, restore),
      cmocka_unit_test(wrong_timings_teach_nothing),
      cmocka_unit_test(absurd_numbers_do_no_harm),
      cmocka_unit_test(wrong_parameters_are_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
