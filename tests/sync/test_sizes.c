/* Sizes of buckets by measurement: the model of a round's exchange, and what it chooses. */
#include "support/fault.h"

#include <evenstep/sync.h>

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#define MIB ((size_t)1 << 20)
#define SHAPE "two ranks"
#define ENGINE "shm"

enum { MOST = 64 };

static even_sync_parameter parameters[MOST];
static double ready[MOST];

/* The first in the order of the model is the last that backward comes to. */
static even_sync_params params_of(size_t count, size_t bytes) {
  for (size_t i = 0; i < count; i++) {
    parameters[i] = (even_sync_parameter){.count = bytes / 4, .dtype = EVEN_F32};
  }
  return (even_sync_params){.size = sizeof(even_sync_params), .parameters = parameters, .parameter_count = count};
}

static void comes_every(size_t count, double seconds) {
  for (size_t i = 0; i < count; i++) {
    ready[i] = seconds * (double)(count - i);
  }
}

static even_sync_course course_of(even_comm_costs *costs, double end) {
  return (even_sync_course){.size = sizeof(even_sync_course),
                            .ready_seconds = ready,
                            .end_seconds = end,
                            .costs = costs,
                            .shape = SHAPE,
                            .engine = ENGINE};
}

/* A call takes `latency`, and a second for each `speed` bytes. */
static even_comm_costs *costs_of(double latency, double speed) {
  even_comm_costs *costs = NULL;
  assert_int_equal(even_comm_costs_open(&costs), EVEN_OK);
  for (size_t bytes = 1024; bytes <= 64 * MIB; bytes *= 2) {
    const even_comm_cost_key key = {
        .collective = "all_reduce", .shape = SHAPE, .engine = ENGINE, .way = "call", .bytes = bytes};
    assert_int_equal(even_comm_costs_add(costs, &key, latency + (double)bytes / speed), EVEN_OK);
  }
  return costs;
}

static double end_of(const even_sync_params *params, const even_sync_course *course) {
  double end = 0;
  assert_int_equal(even_sync_predict(params, course, &end), EVEN_OK);
  return end;
}

static void test_buckets_go_one_after_the_other(void **state) {
  even_comm_costs *costs = costs_of(0.01, (double)MIB); /* 1.01 s for a MiB */
  even_sync_params params = params_of(4, MIB);
  (void)state;
  params.bucket_bytes = MIB;
  comes_every(4, 2.0);
  even_sync_course course = course_of(costs, 8.0);
  assert_true(fabs(end_of(&params, &course) - (8 + 1.01)) < 1e-9); /* only the last is left after backward */
  comes_every(4, 0.5);
  course.end_seconds = 2.0;
  assert_true(fabs(end_of(&params, &course) - (0.5 + 4 * 1.01)) < 1e-9); /* each waits for the one before */
  params.bucket_bytes = 2 * MIB; /* the first still holds one, being larger than its cap; then two, then the last */
  assert_true(fabs(end_of(&params, &course) - (0.5 + 1.01 + 2.01 + 1.01)) < 1e-9);
  parameters[3].late = 1; /* the first to come, were it not for this */
  assert_true(fabs(end_of(&params, &course) - (1.0 + 1.01 + 2.01 + 1.01)) < 1e-9);
  even_comm_costs_close(costs);
}

static void test_16_bits_cost_half(void **state) {
  even_comm_costs *costs = costs_of(0.0001, (double)MIB);
  even_sync_params params = params_of(1, 4 * MIB);
  (void)state;
  ready[0] = 1.0;
  even_sync_course course = course_of(costs, 1.0);
  assert_true(fabs(end_of(&params, &course) - (1 + 4.0001)) < 1e-9);
  params.wire = EVEN_BF16;
  assert_true(fabs(end_of(&params, &course) - (1 + 2.0001)) < 1e-9);
  even_comm_costs_close(costs);
}

static void test_a_slow_link_behind_a_long_backward_wants_small_buckets(void **state) {
  even_comm_costs *costs = costs_of(0.0001, 100 * (double)MIB);
  even_sync_params params = params_of(MOST, 256 << 10);
  even_sync_sizes sizes;
  (void)state;
  comes_every(MOST, 0.01); /* a bucket of 256 KiB takes 2.6 ms */
  even_sync_course course = course_of(costs, 0.64);
  assert_int_equal(even_sync_choose_sizes(&params, &course, &sizes), EVEN_OK);
  assert_int_equal(sizes.bucket_bytes, 256 << 10);
  assert_true(sizes.before_seconds > 0.66 && sizes.seconds < 0.645);
  even_comm_costs_close(costs);
}

static void test_a_long_way_wants_large_buckets(void **state) {
  even_comm_costs *costs = costs_of(0.1, 1000 * (double)MIB);
  even_sync_params params = params_of(MOST, 256 << 10);
  even_sync_sizes sizes;
  (void)state;
  comes_every(MOST, 0.001);
  even_sync_course course = course_of(costs, 0.064);
  assert_int_equal(even_sync_choose_sizes(&params, &course, &sizes), EVEN_OK);
  assert_int_equal(sizes.bucket_bytes, 16 * MIB);
  params.bucket_bytes = sizes.bucket_bytes;
  params.first_bucket_bytes = sizes.first_bucket_bytes;
  assert_true(fabs(end_of(&params, &course) - sizes.seconds) < 1e-12); /* the model is what chose */
  even_comm_costs_close(costs);
}

static void test_what_makes_no_difference_stays(void **state) {
  even_comm_costs *costs = costs_of(1e-6, 1e9);
  even_sync_params params = params_of(1, 256 << 10);
  even_sync_sizes sizes;
  (void)state;
  ready[0] = 0.1;
  even_sync_course course = course_of(costs, 0.1);
  assert_int_equal(even_sync_choose_sizes(&params, &course, &sizes), EVEN_OK);
  assert_int_equal(sizes.bucket_bytes, 0);
  assert_int_equal(sizes.first_bucket_bytes, 0);
  assert_true(sizes.seconds == sizes.before_seconds);
  even_comm_costs_close(costs);
}

static void test_the_arena_bounds_them(void **state) {
  even_comm_costs *costs = costs_of(0.1, 1000 * (double)MIB);
  even_sync_params params = params_of(MOST, 256 << 10);
  even_sync_sizes sizes;
  (void)state;
  params.wire = EVEN_BF16; /* the largest bucket has a place beside */
  comes_every(MOST, 0.001);
  even_sync_course course = course_of(costs, 0.064);
  assert_int_equal(even_sync_arena_bytes(&params, &course.arena_bytes), EVEN_OK); /* as it is: 4 MiB */
  assert_int_equal(even_sync_choose_sizes(&params, &course, &sizes), EVEN_OK);
  assert_true(sizes.bucket_bytes <= 4 * MIB);
  course.arena_bytes = 0;
  assert_int_equal(even_sync_choose_sizes(&params, &course, &sizes), EVEN_OK);
  assert_int_equal(sizes.bucket_bytes, 16 * MIB);
  even_comm_costs_close(costs);
}

static void test_what_is_not_known_or_no_number(void **state) {
  even_comm_costs *costs = NULL;
  even_sync_params params = params_of(2, MIB);
  even_sync_sizes sizes;
  double end = 0;
  (void)state;
  assert_int_equal(even_comm_costs_open(&costs), EVEN_OK);
  comes_every(2, 1.0);
  even_sync_course course = course_of(costs, 2.0);
  assert_int_equal(even_sync_predict(&params, &course, &end), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->what, SHAPE));
  assert_int_equal(even_sync_choose_sizes(&params, &course, &sizes), EVEN_ERR_NOT_FOUND);
  ready[1] = NAN;
  assert_int_equal(even_sync_predict(&params, &course, &end), EVEN_ERR_ARGUMENT);
  assert_non_null(strstr(even_error_last()->what, "parameter 1"));
  ready[1] = 0.0;
  course.end_seconds = INFINITY;
  assert_int_equal(even_sync_predict(&params, &course, &end), EVEN_ERR_ARGUMENT);
  course.size = 1;
  assert_int_equal(even_sync_predict(&params, &course, &end), EVEN_ERR_ARGUMENT);
  even_comm_costs_close(costs);
}

static void test_no_parameters(void **state) {
  even_comm_costs *costs = costs_of(1e-6, 1e9);
  even_sync_params params = params_of(0, 0);
  even_sync_course course = course_of(costs, 3.0);
  (void)state;
  assert_true(end_of(&params, &course) == 3.0);
  even_comm_costs_close(costs);
}

static void test_lack_of_memory(void **state) {
  even_comm_costs *costs = costs_of(1e-6, 1e9);
  even_sync_params params = params_of(4, MIB);
  even_sync_sizes sizes;
  (void)state;
  comes_every(4, 0.1);
  even_sync_course course = course_of(costs, 0.4);
  fault_allocation(0);
  assert_int_equal(even_sync_choose_sizes(&params, &course, &sizes), EVEN_OK);
  long tried = fault_allocations();
  long live = fault_live_blocks();
  assert_true(tried > 10);
  for (long nth = 1; nth <= tried; nth++) {
    fault_allocation(nth);
    assert_int_equal(even_sync_choose_sizes(&params, &course, &sizes), EVEN_ERR_MEMORY);
    assert_int_equal(fault_live_blocks(), live);
  }
  fault_reset();
  even_comm_costs_close(costs);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_buckets_go_one_after_the_other),
      cmocka_unit_test(test_16_bits_cost_half),
      cmocka_unit_test(test_a_slow_link_behind_a_long_backward_wants_small_buckets),
      cmocka_unit_test(test_a_long_way_wants_large_buckets),
      cmocka_unit_test(test_what_makes_no_difference_stays),
      cmocka_unit_test(test_the_arena_bounds_them),
      cmocka_unit_test(test_what_is_not_known_or_no_number),
      cmocka_unit_test(test_no_parameters),
      cmocka_unit_test(test_lack_of_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
