/* Engines whose gradients travel encoded: which way is taken, what is refused, what no memory and a lost rank come to.
 */
#include "comm/ranks.h"
#include "os/clock.h"
#include "support/fault.h"
#include "sync/encode.h"
#include "sync/encoded_model.h"
#include "sync/engine.h"

#include <evenstep/flight.h>
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static int run_with(int ranks, size_t arena_bytes, ranks_body *body, void *argument) {
  int results[RANKS_MOST];
  ranks_setup setup = {.ranks = ranks, .arena_bytes = arena_bytes, .timeout_seconds = 120, .spin = -1};
  return ranks_run(&setup, body, argument, results);
}

static size_t arena_of(const even_sync_params *params) {
  size_t bytes = 0;
  assert_int_equal(even_sync_arena_bytes(params, &bytes), EVEN_OK);
  return bytes;
}

/* ---- the cheaper way ---- */

enum { SMALL = 20000, LARGE = 40000 }; /* values; in int8 some 1 byte each: under and over EVEN_SYNC_PARTS_BYTES */

static even_sync_params two_buckets(void) {
  static const even_sync_parameter parameters[] = {{LARGE, EVEN_F32, 0}, {SMALL, EVEN_F32, 0}};
  return (even_sync_params){.size = sizeof(even_sync_params),
                            .parameters = parameters,
                            .parameter_count = 2,
                            .first_bucket_bytes = 4,
                            .bucket_bytes = 4,
                            .encoding = EVEN_SYNC_INT8};
}

static int cheaper_body(even_comm *comm, void *argument) {
  static float gradients[LARGE];
  even_sync_params params = two_buckets();
  even_sync *sync = NULL;
  even_sync_report report;
  size_t ranks = (size_t)even_comm_ranks(comm);
  size_t large = 0;
  (void)argument;
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  for (size_t p = 0; p < 2; p++) {
    RANKS_EXPECT(comm, even_sync_begin(sync, 1.0, 0) == EVEN_OK);
    RANKS_EXPECT(comm, even_sync_ready(sync, p, gradients) == EVEN_OK);
    RANKS_EXPECT(comm, even_sync_finish(sync, NULL, &report) == EVEN_OK);
    size_t bytes = even_int8_bytes(p == 0 ? LARGE : SMALL);
    large += bytes >= EVEN_SYNC_PARTS_BYTES;
    bool parts = ranks >= EVEN_SYNC_PARTS_RANKS && bytes >= EVEN_SYNC_PARTS_BYTES;
    RANKS_EXPECT(comm, report.bytes == (parts ? bytes : bytes * ranks / 2));
  }
  RANKS_EXPECT(comm, large == 1); /* so both were seen */
  even_sync_close(sync);
  return 0;
}

static void test_the_cheaper_way(void **state) {
  even_sync_params params = two_buckets();
  (void)state;
  for (int ranks = EVEN_SYNC_PARTS_RANKS - 1; ranks <= EVEN_SYNC_PARTS_RANKS; ranks++) {
    assert_int_equal(run_with(ranks, arena_of(&params), cheaper_body, NULL), 0);
  }
}

/* ---- during backward ---- */

/* Whether this rank is done with an all-gather, which nothing but an encoded bucket asks for; waits for it. */
static bool has_gathered(const even_comm *comm) {
  const uint64_t limit = even_clock_ns() + 60000000000u;
  even_flight_call calls[EVEN_FLIGHT_CALLS];
  while (even_clock_ns() < limit) {
    size_t count = even_comm_flight(comm, even_comm_rank(comm), calls, EVEN_FLIGHT_CALLS);
    for (size_t i = 0; i < count; i++) {
      if (calls[i].state == EVEN_FLIGHT_DONE && strncmp(calls[i].call, "all_gather", strlen("all_gather")) == 0) {
        return true;
      }
    }
    (void)sched_yield();
  }
  return false;
}

/* The first bucket is full and the second is not: it goes while the caller still makes gradients. */
static int during_body(even_comm *comm, void *argument) {
  static float gradients[LARGE];
  even_sync_params params = two_buckets();
  even_sync *sync = NULL;
  (void)argument;
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_begin(sync, 1.0, 0) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_ready(sync, 1, gradients) == EVEN_OK);
  RANKS_EXPECT(comm, has_gathered(comm));
  RANKS_EXPECT(comm, even_sync_ready(sync, 0, gradients) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_finish(sync, NULL, NULL) == EVEN_OK);
  even_sync_close(sync);
  return 0;
}

/* The second bucket is encoded while the first has not gone; what the first has no gradient for is taken back. */
static int ahead_body(even_comm *comm, void *argument) {
  static float gradients[2][LARGE];
  const uint64_t limit = even_clock_ns() + 60000000000u;
  even_sync_params params = two_buckets();
  even_sync *sync = NULL;
  (void)argument;
  for (size_t i = 0; i < LARGE; i++) {
    gradients[0][i] = (float)(i % 251) - 125.0f; /* of whole steps: int8 loses nothing where 127 comes */
    gradients[0][i] = i % 256 == 0 ? 127.0f : gradients[0][i];
    gradients[1][i] = -gradients[0][i];
  }
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  RANKS_EXPECT(comm, sync->layout.places[1].bucket == 0 && sync->layout.places[0].bucket == 1);
  RANKS_EXPECT(comm, even_sync_begin(sync, 1.0, 0) == EVEN_OK);
  even_sync_ahead_ask(sync, 1);
  const uint32_t earlier = atomic_load(&sync->ahead.state);
  RANKS_EXPECT(comm, !even_sync_ahead_take(sync, 1)); /* not complete */
  even_sync_ahead_ask(sync, 1);
  RANKS_EXPECT(comm, !even_sync_ahead_claim(sync, earlier)); /* as who had looked at the request before */
  RANKS_EXPECT(comm, !even_sync_ahead_take(sync, 1));
  RANKS_EXPECT(comm, even_sync_ready(sync, 0, gradients[0]) == EVEN_OK);
  even_sync_ahead_ask(sync, 1);
  while (atomic_load(&sync->ahead.state) != EVEN_SYNC_AHEAD_DONE && even_clock_ns() < limit) {
    (void)sched_yield();
  }
  RANKS_EXPECT(comm, atomic_load(&sync->ahead.state) == EVEN_SYNC_AHEAD_DONE);
  RANKS_EXPECT(comm, even_sync_ahead_take(sync, 1));
  even_sync_ahead_ask(sync, 1);
  RANKS_EXPECT(comm, even_sync_ready(sync, 1, gradients[1]) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_finish(sync, NULL, NULL) == EVEN_OK);
  const float ranks = (float)even_comm_ranks(comm);
  for (size_t p = 0; p < 2; p++) {
    const float *sum = even_sync_slot(sync, p);
    for (size_t i = 0; i < (p == 0 ? LARGE : SMALL); i++) {
      RANKS_EXPECT(comm, sum[i] == ranks * gradients[p][i]);
    }
  }
  even_sync_close(sync);
  return 0;
}

static void test_the_next_bucket_is_encoded_meanwhile(void **state) {
  even_sync_params params = two_buckets();
  (void)state;
  assert_int_equal(run_with(2, arena_of(&params), ahead_body, NULL), 0);
}

static void test_a_full_bucket_goes_at_once(void **state) {
  even_sync_params params = two_buckets();
  (void)state;
  assert_int_equal(run_with(2, arena_of(&params), during_body, NULL), 0);
}

/* ---- refused ---- */

/* Of two parameters that travel together; NULL: it is not refused. */
static const char *fix_of_too_many(even_comm *comm, size_t count, size_t cap) {
  const even_sync_parameter parameters[] = {{count, EVEN_F32, 0}, {3, EVEN_F32, 0}};
  even_sync_params params = two_buckets();
  even_sync_layout layout;
  even_encoded *encoded = NULL;
  params.parameters = parameters;
  params.bucket_bytes = params.first_bucket_bytes = cap;
  if (even_sync_layout_make(&params, &layout) != EVEN_OK) {
    return NULL;
  }
  even_status status = even_encoded_open(&params, &layout, comm, &encoded);
  even_encoded_close(encoded);
  even_sync_layout_free(&layout);
  return status == EVEN_ERR_ARGUMENT ? even_error_last()->fix : NULL;
}

static int misuse_body(even_comm *comm, void *argument) {
  even_sync_params right = model_params(EVEN_SYNC_TOP, EVEN_SYNC_PARTS);
  even_sync_params wrong = right;
  even_sync *sync = NULL;
  even_sync_left left;
  (void)argument;
  wrong.encoding = (even_sync_encoding)77;
  RANKS_EXPECT(comm, even_sync_open(&wrong, comm, &sync) == EVEN_ERR_ARGUMENT && sync == NULL);
  wrong = right;
  wrong.way = (even_sync_way)-1;
  RANKS_EXPECT(comm, even_sync_open(&wrong, comm, &sync) == EVEN_ERR_ARGUMENT);
  const double ratios[] = {0.0, -1.0, 1.5, NAN};
  for (size_t i = 0; i < sizeof ratios / sizeof ratios[0]; i++) {
    wrong = right;
    wrong.ratio = ratios[i];
    RANKS_EXPECT(comm, even_sync_open(&wrong, comm, &sync) == EVEN_ERR_ARGUMENT);
  }
  wrong = right;
  wrong.wire = EVEN_BF16;
  RANKS_EXPECT(comm, even_sync_open(&wrong, comm, &sync) == EVEN_ERR_ARGUMENT);
  const char *fix = fix_of_too_many(comm, INT32_MAX, SIZE_MAX);
  RANKS_EXPECT(comm, fix != NULL && strstr(fix, "bucket_cap_mb") != NULL);
  fix = fix_of_too_many(comm, (size_t)INT32_MAX + 1, 64); /* alone in its bucket */
  RANKS_EXPECT(comm, fix != NULL && strstr(fix, "without compression") != NULL);
  RANKS_EXPECT(comm, even_sync_open(&right, comm, &sync) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_discard(sync) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, even_sync_keep(sync, MODEL_PARAMETERS) == EVEN_ERR_ARGUMENT);
  RANKS_EXPECT(comm, even_sync_left_out(sync, MODEL_PARAMETERS, 0, &left) == EVEN_ERR_ARGUMENT);
  RANKS_EXPECT(comm, even_sync_begin(sync, 1.0, 0) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_left_out(sync, 0, 0, &left) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, even_sync_keep(sync, 0) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, even_sync_forget(sync) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, even_sync_finish(sync, NULL, NULL) == EVEN_OK);
  even_sync_close(sync);
  right.encoding = EVEN_SYNC_PLAIN;
  RANKS_EXPECT(comm, even_sync_open(&right, comm, &sync) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_left_out(sync, 0, 0, &left) == EVEN_OK && left.count == 0);
  RANKS_EXPECT(comm, even_sync_begin(sync, 1.0, 0) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_discard(sync) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_finish(sync, NULL, NULL) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_forget(sync) == EVEN_OK);
  even_sync_close(sync);
  return 0;
}

static void test_misuse(void **state) {
  even_sync_params params = model_params(EVEN_SYNC_TOP, EVEN_SYNC_PARTS);
  (void)state;
  assert_int_equal(run_with(2, arena_of(&params), misuse_body, NULL), 0);
}

/* ---- forgetting ---- */

static int a_round(even_comm *comm, even_sync *sync, float *gradient, float *sum) {
  RANKS_EXPECT(comm, even_sync_begin(sync, 0.5, 3) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_ready(sync, 0, gradient) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_finish(sync, NULL, NULL) == EVEN_OK);
  memcpy(sum, even_sync_slot(sync, 0), 1000 * sizeof *sum);
  return 0;
}

/* Of rounds that count nothing what was left out before is as it was. */
static int discard_body(even_comm *comm, void *argument) {
  even_sync_params params = model_params(*(const even_sync_encoding *)argument, EVEN_SYNC_PARTS);
  float gradient[2][1000];
  float sums[2][3][1000];
  even_sync *sync = NULL;
  for (size_t i = 0; i < 1000; i++) {
    gradient[0][i] = (float)(i % 37) - 11.3f;
    gradient[1][i] = (float)(i % 5) * 1e4f;
  }
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  for (int discards = 0; discards < 2; discards++) {
    for (int round = 0; round < 3; round++) {
      for (int count = 0; count < 2 * discards; count++) { /* two, so that both memories are written */
        RANKS_EXPECT(comm, even_sync_begin(sync, 0.5, 3) == EVEN_OK);
        RANKS_EXPECT(comm, even_sync_ready(sync, 0, gradient[1]) == EVEN_OK);
        RANKS_EXPECT(comm, even_sync_discard(sync) == EVEN_OK);
        RANKS_EXPECT(comm, even_sync_finish(sync, NULL, NULL) == EVEN_OK);
      }
      if (a_round(comm, sync, gradient[0], sums[discards][round]) != 0) {
        return 1;
      }
    }
    RANKS_EXPECT(comm, even_sync_forget(sync) == EVEN_OK);
  }
  const unsigned char *bytes[2] = {(const unsigned char *)sums[0], (const unsigned char *)sums[1]};
  RANKS_EXPECT(comm, memcmp(bytes[0], bytes[0] + sizeof sums[0][0], sizeof sums[0][0]) != 0);
  RANKS_EXPECT(comm, memcmp(bytes[0], bytes[1], sizeof sums[0]) == 0);
  even_sync_close(sync);
  return 0;
}

static void test_discarding(void **state) {
  (void)state;
  for (int number = EVEN_SYNC_ONE_BIT; number <= EVEN_SYNC_TOP; number++) {
    even_sync_encoding encoding = (even_sync_encoding)number;
    even_sync_params params = model_params(encoding, EVEN_SYNC_PARTS);
    assert_int_equal(run_with(2, arena_of(&params), discard_body, &encoding), 0);
  }
}

/* What waits of parameter 0, first of this rank's own gradients and then of its sums. */
static int left_of(even_comm *comm, even_sync *sync, float waiting[2][1000]) {
  for (int of_sums = 0; of_sums < 2; of_sums++) {
    even_sync_left left;
    memset(waiting[of_sums], 0, sizeof waiting[of_sums]);
    RANKS_EXPECT(comm, even_sync_left_out(sync, 0, of_sums, &left) == EVEN_OK);
    RANKS_EXPECT(comm, of_sums != 0 || left.count == 1000);
    if (left.count > 0) {
      memcpy(waiting[of_sums] + left.first, left.values, left.count * sizeof *left.values);
    }
  }
  return 0;
}

/* Of a discarded round whose sum is used, what it left out waits as after any other. */
static int keep_body(even_comm *comm, void *argument) {
  even_sync_params params = model_params(*(const even_sync_encoding *)argument, EVEN_SYNC_PARTS);
  float gradient[1000];
  float sum[1000];
  float left[3][2][1000];
  even_sync *sync = NULL;
  for (size_t i = 0; i < 1000; i++) {
    gradient[i] = (float)(i % 37) - 11.3f;
  }
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  if (a_round(comm, sync, gradient, sum) != 0 || left_of(comm, sync, left[0]) != 0) {
    return 1;
  }
  RANKS_EXPECT(comm, even_sync_keep(sync, 0) == EVEN_OK); /* it was not discarded */
  if (left_of(comm, sync, left[1]) != 0) {
    return 1;
  }
  const unsigned char *bytes[3] = {(const unsigned char *)left[0], (const unsigned char *)left[1],
                                   (const unsigned char *)left[2]};
  RANKS_EXPECT(comm, memcmp(bytes[0], bytes[1], sizeof left[0]) == 0);
  RANKS_EXPECT(comm, even_sync_forget(sync) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_begin(sync, 0.5, 3) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_ready(sync, 0, gradient) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_discard(sync) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_finish(sync, NULL, NULL) == EVEN_OK);
  if (left_of(comm, sync, left[1]) != 0) {
    return 1;
  }
  RANKS_EXPECT(comm, even_sync_keep(sync, 0) == EVEN_OK);
  if (left_of(comm, sync, left[2]) != 0) {
    return 1;
  }
  RANKS_EXPECT(comm, memcmp(bytes[0], bytes[1], sizeof left[0]) != 0);
  RANKS_EXPECT(comm, memcmp(bytes[0], bytes[2], sizeof left[0]) == 0);
  even_sync_close(sync);
  return 0;
}

static void test_keeping(void **state) {
  (void)state;
  for (int number = EVEN_SYNC_ONE_BIT; number <= EVEN_SYNC_TOP; number++) {
    even_sync_encoding encoding = (even_sync_encoding)number;
    even_sync_params params = model_params(encoding, EVEN_SYNC_PARTS);
    assert_int_equal(run_with(2, arena_of(&params), keep_body, &encoding), 0);
  }
}

/* What was forgotten does not come back, nor the number of the step's round, by which int8 is rounded. */
static int forget_body(even_comm *comm, void *argument) {
  even_sync_params params = model_params(*(const even_sync_encoding *)argument, EVEN_SYNC_PARTS);
  float gradient[1000];
  float sums[3][1000];
  even_sync *sync = NULL;
  for (size_t i = 0; i < 1000; i++) {
    gradient[i] = (float)(i % 37) - 11.3f;
  }
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  if (a_round(comm, sync, gradient, sums[0]) != 0 || a_round(comm, sync, gradient, sums[1]) != 0) {
    return 1;
  }
  RANKS_EXPECT(comm, even_sync_forget(sync) == EVEN_OK);
  if (a_round(comm, sync, gradient, sums[2]) != 0) {
    return 1;
  }
  const unsigned char *bytes[3] = {(const unsigned char *)sums[0], (const unsigned char *)sums[1],
                                   (const unsigned char *)sums[2]};
  RANKS_EXPECT(comm, memcmp(bytes[0], bytes[1], sizeof sums[0]) != 0);
  RANKS_EXPECT(comm, memcmp(bytes[0], bytes[2], sizeof sums[0]) == 0);
  even_sync_close(sync);
  return 0;
}

static void test_forgetting(void **state) {
  (void)state;
  for (int number = EVEN_SYNC_INT8; number <= EVEN_SYNC_TOP; number++) {
    even_sync_encoding encoding = (even_sync_encoding)number;
    even_sync_params params = model_params(encoding, EVEN_SYNC_PARTS);
    assert_int_equal(run_with(2, arena_of(&params), forget_body, &encoding), 0);
  }
}

/* ---- faults ---- */

static even_status open_and_close(void *context) {
  even_sync_params params = model_params(EVEN_SYNC_TOP, EVEN_SYNC_PARTS);
  even_sync *sync = NULL;
  even_status status = even_sync_open(&params, context, &sync);
  even_sync_close(sync);
  return status;
}

static int fault_body(even_comm *comm, void *argument) {
  static float gradient[7001];
  even_sync_params params = model_params(EVEN_SYNC_TOP, EVEN_SYNC_PARTS);
  even_sync *sync = NULL;
  (void)argument;
  RANKS_EXPECT(comm, fault_each_allocation(open_and_close, comm) >= 24);
  fault_allocation(0);
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  long before = fault_allocations();
  for (uint32_t round = 0; round < 3; round++) { /* none of which could find no memory */
    RANKS_EXPECT(comm, even_sync_begin(sync, 1.0, round) == EVEN_OK);
    RANKS_EXPECT(comm, even_sync_ready(sync, 2, gradient) == EVEN_OK);
    RANKS_EXPECT(comm, even_sync_finish(sync, NULL, NULL) == EVEN_OK);
  }
  RANKS_EXPECT(comm, fault_allocations() == before);
  even_sync_close(sync);
  fault_reset(); /* not before: the engine's thread reads what it writes */
  return 0;
}

static void test_faults(void **state) {
  even_sync_params params = model_params(EVEN_SYNC_TOP, EVEN_SYNC_PARTS);
  (void)state;
  assert_int_equal(run_with(1, arena_of(&params), fault_body, NULL), 0);
}

/* A rank that dies in a round ends it on the others, by either way. */
static int death_body(even_comm *comm, void *argument) {
  even_sync_params params = model_params(EVEN_SYNC_ONE_BIT, *(const even_sync_way *)argument);
  even_sync *sync = NULL;
  float gradient[300] = {0};
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_begin(sync, 0.5, 0) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_ready(sync, 5, gradient) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_ready(sync, 6, gradient) == EVEN_OK);
  if (even_comm_rank(comm) == 1) {
    (void)raise(SIGKILL);
  }
  RANKS_EXPECT(comm, even_sync_finish(sync, NULL, NULL) == EVEN_ERR_PEER_LOST);
  RANKS_EXPECT(comm, strstr(even_error_last()->what, "rank 1") != NULL);
  RANKS_EXPECT(comm, even_sync_begin(sync, 0.5, 1) == EVEN_ERR_PEER_LOST);
  even_sync_close(sync);
  return 0;
}

static void test_death(void **state) {
  (void)state;
  for (int number = EVEN_SYNC_GATHER; number <= EVEN_SYNC_PARTS; number++) {
    even_sync_way way = (even_sync_way)number;
    even_sync_params params = model_params(EVEN_SYNC_ONE_BIT, way);
    assert_int_equal(run_with(3, arena_of(&params), death_body, &way), 1); /* the one that was killed */
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_the_cheaper_way),
      cmocka_unit_test(test_a_full_bucket_goes_at_once),
      cmocka_unit_test(test_the_next_bucket_is_encoded_meanwhile),
      cmocka_unit_test(test_misuse),
      cmocka_unit_test(test_discarding),
      cmocka_unit_test(test_keeping),
      cmocka_unit_test(test_forgetting),
      cmocka_unit_test(test_faults),
      cmocka_unit_test(test_death),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
