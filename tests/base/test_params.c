/* Parameter structs of callers with older or newer headers. */
#include "base/params.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <evenstep/evenstep.h>

#define NEVER_SHRINKS(type, last)                                                                              \
  _Static_assert(sizeof(type) >= EVEN_LEAST_##type, "programs that were compiled with version 0.1 give more"); \
  _Static_assert(offsetof(type, last) + sizeof(((type *)0)->last) == sizeof(type),                             \
                 "a member that is added later would lie in padding, which callers need not set")
NEVER_SHRINKS(even_balancer_params, choose_context);
NEVER_SHRINKS(even_comm_choosing, measure_seconds);
NEVER_SHRINKS(even_comm_hosts, lane);
NEVER_SHRINKS(even_comm_network, reserved);
NEVER_SHRINKS(even_comm_params, over_context);
NEVER_SHRINKS(even_device_comm_params, reserved);
NEVER_SHRINKS(even_exact_params, part_bytes);
NEVER_SHRINKS(even_norm_backward, part);
NEVER_SHRINKS(even_norm_layout, inner);
NEVER_SHRINKS(even_norm_values, second);
NEVER_SHRINKS(even_optim_job, waits_context);
NEVER_SHRINKS(even_optim_params, reserved);
NEVER_SHRINKS(even_sync_course, arena_bytes);
NEVER_SHRINKS(even_sync_params, telemetry);

/* A struct that was { size, number } first, and has got `later`. */
typedef struct grown {
  size_t size;
  size_t number;
  double later;
} grown;

enum { FIRST = 16, TAIL = 24 };

static even_status take(grown *own, const void *given) {
  return even_params_take("grown", own, sizeof *own, FIRST, given);
}

static void what_a_caller_does_not_know_is_zero(void **state) {
  const size_t older[] = {FIRST, 7, 99};
  grown own;
  (void)state;
  memset(&own, 0xff, sizeof own);
  assert_int_equal(take(&own, older), EVEN_OK);
  assert_int_equal(own.size, sizeof own);
  assert_int_equal(own.number, 7);
  assert_true(own.later == 0);
}

static void what_the_library_does_not_know_must_be_zero(void **state) {
  size_t newer[] = {sizeof(grown) + 8, 7, 0, 0};
  grown own;
  (void)state;
  assert_int_equal(take(&own, newer), EVEN_OK);
  assert_int_equal(own.size, sizeof own);
  newer[3] = 1;
  assert_int_equal(take(&own, newer), EVEN_ERR_ARGUMENT);
  assert_non_null(strstr(even_error_last()->what, "grown asks in those of its 32 bytes that are behind the first 24"));
}

static void what_is_no_size_is_refused(void **state) {
  size_t wrong[] = {0, 7, 0, 0};
  grown own;
  (void)state;
  assert_int_equal(take(&own, NULL), EVEN_ERR_ARGUMENT);
  for (size_t size = 0; size < FIRST; size++) {
    wrong[0] = size;
    assert_int_equal(take(&own, wrong), EVEN_ERR_ARGUMENT);
  }
  for (size_t size = FIRST + 1; size < TAIL; size++) {
    wrong[0] = size;
    assert_int_equal(take(&own, wrong), EVEN_ERR_ARGUMENT);
  }
  wrong[0] = 1032;
  assert_int_equal(take(&own, wrong), EVEN_ERR_ARGUMENT);
  wrong[0] = SIZE_MAX;
  assert_int_equal(take(&own, wrong), EVEN_ERR_ARGUMENT);
  assert_string_equal(even_error_last()->fix, "set it to sizeof(grown)");
}

/* `params` of headers that have three more words, all zero or not. */
#define NEWER(type, params, word)                           \
  union {                                                   \
    type known;                                             \
    size_t words[sizeof(type) / sizeof(size_t) + 3];        \
  } params = {.words = {0}};                                \
  params.words[sizeof(type) / sizeof(size_t) + 2] = (word); \
  params.known.size = sizeof params

static void programs_with_newer_headers_are_served(void **state) {
  const even_sync_parameter gradient = {4, EVEN_F32, 0};
  const even_optim_parameter parameter = {4, EVEN_F32, 1};
  (void)state;
  for (size_t asks = 0; asks <= 1; asks++) {
    even_status expected = asks ? EVEN_ERR_ARGUMENT : EVEN_OK;
    NEWER(even_comm_params, group, asks);
    NEWER(even_balancer_params, balance, asks);
    NEWER(even_sync_params, buckets, asks);
    NEWER(even_exact_params, blocks, asks);
    NEWER(even_norm_layout, layer, asks);
    NEWER(even_optim_params, states, asks);
    int fd = -1;
    size_t bytes = 0;
    even_comm *comm = NULL;
    even_balancer *balancer = NULL;
    even_exact *exact = NULL;
    even_optim *optim = NULL;
    group.known.ranks = 1;
    const even_comm_params plain = {.size = sizeof plain, .ranks = 1};
    assert_int_equal(even_comm_create_segment(&group.known, &fd), expected);
    if (fd < 0) {
      assert_int_equal(even_comm_create_segment(&plain, &fd), EVEN_OK);
    }
    assert_int_equal(even_comm_open(&group.known, fd, &comm), expected);
    assert_int_equal(close(fd), 0);
    even_comm_close(comm);
    balance.known.ranks = 2;
    balance.known.batch = 8;
    assert_int_equal(even_balancer_open(&balance.known, &balancer), expected);
    even_balancer_close(balancer);
    buckets.known.parameters = &gradient;
    buckets.known.parameter_count = 1;
    assert_int_equal(even_sync_arena_bytes(&buckets.known, &bytes), expected);
    blocks.known.parameters = &gradient;
    blocks.known.parameter_count = 1;
    assert_int_equal(even_exact_open(&blocks.known, NULL, &exact), expected);
    even_exact_close(exact);
    layer.known.dtype = EVEN_F64;
    assert_int_equal(even_norm_moments(&layer.known, NULL, NULL, NULL), expected);
    states.known.parameters = &parameter;
    states.known.parameter_count = 1;
    assert_int_equal(even_optim_open(&states.known, NULL, &optim), expected);
    even_optim_close(optim);
  }
}

static void what_is_reserved_must_be_zero(void **state) {
  const even_optim_parameter parameter = {4, EVEN_F32, 1};
  even_optim_params params = {.size = sizeof params, .parameters = &parameter, .parameter_count = 1};
  even_optim *optim = NULL;
  (void)state;
  params.reserved[6] = 1;
  assert_int_equal(even_optim_open(&params, NULL, &optim), EVEN_ERR_ARGUMENT);
  assert_null(optim);
  assert_non_null(strstr(even_error_last()->what, "even_optim_params asks in its last member"));
  params.reserved[6] = 0;
  assert_int_equal(even_optim_open(&params, NULL, &optim), EVEN_OK);
  even_optim_close(optim);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(what_a_caller_does_not_know_is_zero),
      cmocka_unit_test(what_the_library_does_not_know_must_be_zero),
      cmocka_unit_test(what_is_no_size_is_refused),
      cmocka_unit_test(programs_with_newer_headers_are_served),
      cmocka_unit_test(what_is_reserved_must_be_zero),
  };
  return cmocka_run_group_tests_name("base_params", tests, NULL, NULL);
}
