/* Gradient rounds between ranks: weighted sums, absent parameters, zero weights, errors that end a round. */
#include "comm/ranks.h"
#include "support/fault.h"

#include <evenstep/sync.h>

#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

enum { PARAMETERS = 7, ROUNDS = 20 };

static const even_sync_parameter parameters[PARAMETERS] = {{1000, EVEN_F32, 1}, {3, EVEN_F64, 0}, {70000, EVEN_F32, 0},
                                                           {1, EVEN_F32, 0},    {0, EVEN_F32, 0}, {513, EVEN_F64, 0},
                                                           {129, EVEN_F32, 0}};

static even_sync_params sync_params(size_t bucket_bytes) {
  return (even_sync_params){.size = sizeof(even_sync_params),
                            .parameters = parameters,
                            .parameter_count = PARAMETERS,
                            .bucket_bytes = bucket_bytes,
                            .first_bucket_bytes = 1024};
}

static size_t arena_bytes(size_t bucket_bytes) {
  even_sync_params params = sync_params(bucket_bytes);
  size_t bytes = 0;
  assert_int_equal(even_sync_arena_bytes(&params, &bytes), EVEN_OK);
  return bytes;
}

/* What rank holds in element i of parameter p in a round. */
static double value(int rank, int round, size_t p, size_t i) {
  return (double)((rank + 1) * 7 + round * 3 + (int)p * 5 + (int)(i % 11)) / 8.0;
}

static double weight(int rank, int ranks, int round) {
  int total = 0;
  for (int r = 0; r < ranks; r++) {
    total += 1 + (r + round) % ranks;
  }
  return (double)(1 + (rank + round) % ranks) / total;
}

static double get(const void *data, even_dtype dtype, size_t i) {
  return dtype == EVEN_F32 ? (double)((const float *)data)[i] : ((const double *)data)[i];
}

static void set(void *data, even_dtype dtype, size_t i, double to) {
  if (dtype == EVEN_F32) {
    ((float *)data)[i] = (float)to;
  } else {
    ((double *)data)[i] = to;
  }
}

/* Parameter 3 is used by rank 0 alone, parameter 0 by nobody. */
static bool uses(int rank, size_t p) {
  return p != 0 && (p != 3 || rank == 0);
}

static int check_round(even_comm *comm, even_sync *sync, int round, const uint8_t *used) {
  int ranks = even_comm_ranks(comm);
  for (size_t p = 0; p < PARAMETERS; p++) {
    RANKS_EXPECT(comm, used[p] == (p != 0));
    for (size_t i = 0; p != 0 && i < parameters[p].count; i++) {
      double wanted = 0;
      for (int r = 0; r < ranks; r++) {
        wanted += uses(r, p) ? value(r, round, p, i) * weight(r, ranks, round) : 0;
      }
      double got = get(even_sync_slot(sync, p), parameters[p].dtype, i);
      double tolerance = parameters[p].dtype == EVEN_F32 ? 1e-6 : 1e-15;
      RANKS_EXPECT(comm, fabs(got - wanted) <= tolerance * fabs(wanted));
    }
  }
  return 0;
}

static int run_rounds(even_comm *comm, even_sync *sync, bool in_slot) {
  int rank = even_comm_rank(comm);
  void *memory[PARAMETERS];
  uint8_t used[PARAMETERS];
  even_sync_report report;
  for (size_t p = 0; p < PARAMETERS; p++) {
    memory[p] = in_slot ? even_sync_slot(sync, p) : malloc(parameters[p].count * 8 + 1);
  }
  for (int round = 0; round < ROUNDS; round++) {
    RANKS_EXPECT(comm, even_sync_begin(sync, weight(rank, even_comm_ranks(comm), round), (uint32_t)round) == EVEN_OK);
    for (size_t k = 0; k < PARAMETERS; k++) {
      size_t p = (PARAMETERS - 1 - k + (size_t)round * 3) % PARAMETERS; /* any order */
      if (!uses(rank, p)) {
        continue;
      }
      for (size_t i = 0; i < parameters[p].count; i++) {
        set(memory[p], parameters[p].dtype, i, value(rank, round, p, i));
      }
      RANKS_EXPECT(comm, even_sync_ready(sync, p, memory[p]) == EVEN_OK);
      RANKS_EXPECT(comm, even_sync_ready(sync, p, memory[p]) == EVEN_ERR_STATE);
    }
    RANKS_EXPECT(comm, even_sync_finish(sync, used, &report) == EVEN_OK);
    RANKS_EXPECT(comm, report.buckets >= 2 && report.bytes >= 70000 * 4);
    if (check_round(comm, sync, round, used) != 0) {
      return 1;
    }
  }
  for (size_t p = 0; p < PARAMETERS && !in_slot; p++) {
    free(memory[p]);
  }
  return 0;
}

static int rounds_body(even_comm *comm, void *argument) {
  size_t bucket_bytes = *(const size_t *)argument;
  for (int in_slot = 0; in_slot < 2; in_slot++) {
    even_sync_params params = sync_params(bucket_bytes);
    even_sync *sync = NULL;
    RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
    int failed = run_rounds(comm, sync, in_slot != 0);
    even_sync_close(sync);
    if (failed != 0) {
      return failed;
    }
  }
  return 0;
}

static void run(int ranks, bool threads, size_t bucket_bytes, ranks_body *body) {
  int results[RANKS_MOST];
  ranks_setup setup = {
      .ranks = ranks, .arena_bytes = arena_bytes(bucket_bytes), .timeout_seconds = 60, .spin = -1, .threads = threads};
  assert_int_equal(ranks_run(&setup, body, &bucket_bytes, results), 0);
}

static void test_weighted_sums(void **state) {
  (void)state;
  for (int ranks = 1; ranks <= 4; ranks++) {
    run(ranks, false, 4096, rounds_body);
  }
  run(2, false, 0, rounds_body);
}

static void test_weighted_sums_between_threads(void **state) {
  (void)state;
  run(3, true, 4096, rounds_body);
}

/* A rank of weight zero may hold anything: its NaNs do not reach the others. */
static int zero_weight_body(even_comm *comm, void *argument) {
  even_sync_params params = sync_params(*(const size_t *)argument);
  even_sync *sync = NULL;
  float gradient[1000];
  bool zero = even_comm_rank(comm) == 1;
  for (size_t i = 0; i < 1000; i++) {
    gradient[i] = zero ? (float)NAN : 2.0f;
  }
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_begin(sync, zero ? 0.0 : 1.0, 0) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_ready(sync, 0, gradient) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_finish(sync, NULL, NULL) == EVEN_OK);
  const float *sum = even_sync_slot(sync, 0);
  for (size_t i = 0; i < 1000; i++) {
    RANKS_EXPECT(comm, sum[i] == 2.0f);
  }
  even_sync_close(sync);
  return 0;
}

static void test_zero_weight(void **state) {
  (void)state;
  run(2, false, 4096, zero_weight_body);
}

static int misuse_body(even_comm *comm, void *argument) {
  even_sync_params params = sync_params(*(const size_t *)argument);
  even_sync *sync = NULL;
  float gradient = 1;
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_finish(sync, NULL, NULL) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, even_sync_ready(sync, 3, &gradient) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, even_sync_begin(sync, NAN, 0) == EVEN_ERR_ARGUMENT);
  RANKS_EXPECT(comm, even_sync_begin(sync, -1.0, 0) == EVEN_ERR_ARGUMENT);
  RANKS_EXPECT(comm, even_sync_begin(sync, 1.0, 0) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_begin(sync, 1.0, 0) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, even_sync_ready(sync, PARAMETERS, &gradient) == EVEN_ERR_ARGUMENT);
  RANKS_EXPECT(comm, even_sync_slot(sync, PARAMETERS) == NULL);
  RANKS_EXPECT(comm, even_sync_finish(sync, NULL, NULL) == EVEN_OK);
  even_sync_close(sync);
  params.arena_offset = 64; /* beyond the arena now */
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_ERR_ARGUMENT);
  params.arena_offset = 3;
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_ERR_ARGUMENT);
  return 0;
}

/* A rank that has completed its round is waited for no more: rank 1 has its sums while rank 0 is not in finish. */
typedef struct complete_plan {
  size_t bucket_bytes;
  _Atomic int *finished; /* by rank 1, rounds */
} complete_plan;

static int complete_body(even_comm *comm, void *argument) {
  const complete_plan *plan = argument;
  even_sync_params params = sync_params(plan->bucket_bytes);
  even_sync *sync = NULL;
  uint8_t used[PARAMETERS];
  float gradient[129] = {0};
  bool first = even_comm_rank(comm) == 0;
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_complete(sync) == EVEN_ERR_STATE);
  for (int round = 1; round <= 3; round++) {
    gradient[128] = (float)(first ? round : 2 * round);
    RANKS_EXPECT(comm, even_sync_begin(sync, 1.0, 0) == EVEN_OK);
    RANKS_EXPECT(comm, even_sync_ready(sync, 6, gradient) == EVEN_OK);
    if (first) {
      RANKS_EXPECT(comm, even_sync_complete(sync) == EVEN_OK);
      RANKS_EXPECT(comm, even_sync_complete(sync) == EVEN_ERR_STATE);
      RANKS_EXPECT(comm, even_sync_ready(sync, 5, gradient) == EVEN_ERR_STATE);
      RANKS_EXPECT(comm, even_sync_begin(sync, 1.0, 0) == EVEN_ERR_STATE);
      while (atomic_load(plan->finished) < round) {
        (void)sched_yield();
      }
    }
    RANKS_EXPECT(comm, even_sync_finish(sync, used, NULL) == EVEN_OK);
    RANKS_EXPECT(comm, ((const float *)even_sync_slot(sync, 6))[128] == (float)(3 * round));
    RANKS_EXPECT(comm, used[6] == 1 && used[5] == 0 && used[0] == 0);
    if (!first) {
      atomic_store(plan->finished, round);
    }
  }
  even_sync_close(sync);
  return 0;
}

static void test_a_complete_round_waits_for_no_finish(void **state) {
  (void)state;
  int results[RANKS_MOST];
  complete_plan plan = {.bucket_bytes = 4096};
  plan.finished =
      mmap(NULL, sizeof *plan.finished, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0); /* zero */
  assert_ptr_not_equal(plan.finished, MAP_FAILED);
  ranks_setup setup = {.ranks = 2, .arena_bytes = arena_bytes(plan.bucket_bytes), .timeout_seconds = 60, .spin = -1};
  assert_int_equal(ranks_run(&setup, complete_body, &plan, results), 0);
  (void)munmap(plan.finished, sizeof *plan.finished);
}

static void test_misuse(void **state) {
  (void)state;
  run(2, false, 4096, misuse_body);
}

/* Parameters 6, 4 and 3 are the bucket that is reduced first. */
static int hand_over_first(even_sync *sync, even_comm *comm, const float *gradient) {
  static const size_t first[] = {6, 4, 3};
  for (size_t k = 0; k < sizeof first / sizeof first[0]; k++) {
    RANKS_EXPECT(comm, even_sync_ready(sync, first[k], gradient) == EVEN_OK);
  }
  return 0;
}

/* A sum is there while gradients of later buckets are still to come, and stays until the next round begins. */
static int await_body(even_comm *comm, void *argument) {
  even_sync_params params = sync_params(*(const size_t *)argument);
  even_sync *sync = NULL;
  float gradient[129];
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_await(sync, 6) == EVEN_ERR_STATE);
  for (int round = 1; round <= 3; round++) {
    for (size_t i = 0; i < 129; i++) {
      gradient[i] = (float)(round * (even_comm_rank(comm) + 1));
    }
    RANKS_EXPECT(comm, even_sync_begin(sync, 0.5, (uint32_t)round) == EVEN_OK);
    RANKS_EXPECT(comm, hand_over_first(sync, comm, gradient) == 0);
    RANKS_EXPECT(comm, even_sync_await(sync, PARAMETERS) == EVEN_ERR_ARGUMENT);
    RANKS_EXPECT(comm, even_sync_await(sync, 6) == EVEN_OK);
    int ranks = even_comm_ranks(comm);
    const float *sum = even_sync_slot(sync, 6);
    for (size_t i = 0; i < 129; i++) {
      RANKS_EXPECT(comm, sum[i] == (float)(round * ranks * (ranks + 1)) / 4.0f);
    }
    RANKS_EXPECT(comm, even_sync_ready(sync, 5, even_sync_slot(sync, 5)) == EVEN_OK);
    RANKS_EXPECT(comm, even_sync_await(sync, 3) == EVEN_OK);
    RANKS_EXPECT(comm, even_sync_finish(sync, NULL, NULL) == EVEN_OK);
    RANKS_EXPECT(comm, even_sync_await(sync, 5) == EVEN_OK);
  }
  even_sync_close(sync);
  return 0;
}

static void test_sums_one_by_one(void **state) {
  (void)state;
  run(3, false, 4096, await_body);
  run(2, true, 4096, await_body);
}

/* Who waits for a sum that will not come is told why. */
static int await_death_body(even_comm *comm, void *argument) {
  even_sync_params params = sync_params(*(const size_t *)argument);
  even_sync *sync = NULL;
  float gradient[129] = {0};
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_begin(sync, 0.5, 0) == EVEN_OK);
  if (even_comm_rank(comm) == 1) {
    (void)raise(SIGKILL);
  }
  RANKS_EXPECT(comm, hand_over_first(sync, comm, gradient) == 0);
  RANKS_EXPECT(comm, even_sync_await(sync, 6) == EVEN_ERR_PEER_LOST);
  RANKS_EXPECT(comm, strstr(even_error_last()->what, "rank 1") != NULL);
  RANKS_EXPECT(comm, even_sync_finish(sync, NULL, NULL) == EVEN_ERR_PEER_LOST);
  RANKS_EXPECT(comm, even_sync_await(sync, 6) == EVEN_ERR_PEER_LOST);
  even_sync_close(sync);
  return 0;
}

/* A rank that dies in a round ends it on the others, and the engine refuses the next one with the same error. */
static int death_body(even_comm *comm, void *argument) {
  even_sync_params params = sync_params(*(const size_t *)argument);
  even_sync *sync = NULL;
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_begin(sync, 0.5, 0) == EVEN_OK);
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
  int results[RANKS_MOST];
  size_t bucket_bytes = 4096;
  ranks_setup setup = {.ranks = 3, .arena_bytes = arena_bytes(bucket_bytes), .timeout_seconds = 60, .spin = -1};
  assert_int_equal(ranks_run(&setup, death_body, &bucket_bytes, results), 1);
  assert_int_equal(results[1], RANKS_KILLED);
  assert_int_equal(ranks_run(&setup, await_death_body, &bucket_bytes, results), 1);
  assert_int_equal(results[1], RANKS_KILLED);
}

/* Closing in the middle of a round does not hang. */
static int close_body(even_comm *comm, void *argument) {
  even_sync_params params = sync_params(*(const size_t *)argument);
  even_sync *sync = NULL;
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_begin(sync, 1.0, 0) == EVEN_OK);
  even_sync_close(sync);
  return 0;
}

static void test_close_in_a_round(void **state) {
  (void)state;
  run(2, false, 4096, close_body);
}

static even_status open_and_close(void *context) {
  even_sync_params params = sync_params(4096);
  even_sync *sync = NULL;
  even_status status = even_sync_open(&params, context, &sync);
  even_sync_close(sync);
  return status;
}

static int fault_body(even_comm *comm, void *argument) {
  (void)argument;
  RANKS_EXPECT(comm, fault_each_allocation(open_and_close, comm) >= 8);
  fault_reset();
  fault_os(FAULT_thread_create, 1, 11 /* EAGAIN */);
  even_status status = open_and_close(comm);
  fault_reset();
  RANKS_EXPECT(comm, status == EVEN_ERR_SYSTEM);
  return 0;
}

static void test_faults(void **state) {
  (void)state;
  run(1, false, 4096, fault_body);
}

static void test_layout(void **state) {
  (void)state;
  even_sync_params params = sync_params(4096);
  size_t bytes = 0;
  even_sync_parameter wrong = {4, EVEN_I32, 0};
  params.parameters = &wrong;
  params.parameter_count = 1;
  assert_int_equal(even_sync_arena_bytes(&params, &bytes), EVEN_ERR_ARGUMENT);
  wrong = (even_sync_parameter){SIZE_MAX / 2, EVEN_F32, 0};
  assert_int_equal(even_sync_arena_bytes(&params, &bytes), EVEN_ERR_OVERFLOW);
  params.size = 1;
  assert_int_equal(even_sync_arena_bytes(&params, &bytes), EVEN_ERR_ARGUMENT);
  assert_int_equal(arena_bytes(4096) % 64, 0);
  assert_true(arena_bytes(4096) >= (1000 + 70000 + 1 + 129) * 4 + (3 + 513) * 8);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_layout),
      cmocka_unit_test(test_weighted_sums),
      cmocka_unit_test(test_weighted_sums_between_threads),
      cmocka_unit_test(test_zero_weight),
      cmocka_unit_test(test_a_complete_round_waits_for_no_finish),
      cmocka_unit_test(test_misuse),
      cmocka_unit_test(test_sums_one_by_one),
      cmocka_unit_test(test_death),
      cmocka_unit_test(test_close_in_a_round),
      cmocka_unit_test(test_faults),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
