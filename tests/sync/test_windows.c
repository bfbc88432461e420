/* The engine with its windows widened: every atomic step may pause, so that interleavings that need a preemption
 * at the worst instruction come about in each run. No pause decides a result: right code passes with any of them. */
#include "comm/ranks.h"
#include "support/fault.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

/* One step in four pauses for up to 100 us, by a generator of the thread's own. */
static void window(void) {
  static _Atomic uint32_t threads;
  static _Thread_local uint32_t state;
  if (state == 0) {
    state = (atomic_fetch_add_explicit(&threads, 1u, memory_order_relaxed) + 1u) * 2654435761u;
  }
  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  if ((state >> 8) % 4 == 0) {
    (void)nanosleep(&(struct timespec){0, (long)((state >> 12) % 100000)}, NULL);
  }
}

#undef atomic_load
#undef atomic_store
#define atomic_load(word) (window(), atomic_load_explicit((word), memory_order_seq_cst))
#define atomic_store(word, value) (window(), atomic_store_explicit((word), (value), memory_order_seq_cst), window())

#include "../../src/sync/engine.c" /* NOLINT(bugprone-suspicious-include) */
#include "../../src/sync/sync.c"   /* NOLINT(bugprone-suspicious-include) */

enum { PARAMETERS = 4, ELEMENTS = 64, ROUNDS = 400 };

static const even_sync_parameter parameters[PARAMETERS] = {
    {ELEMENTS, EVEN_F32, 0}, {ELEMENTS, EVEN_F32, 0}, {ELEMENTS, EVEN_F32, 0}, {ELEMENTS, EVEN_F32, 0}};

static const even_sync_params params = {.size = sizeof(even_sync_params),
                                        .parameters = parameters,
                                        .parameter_count = PARAMETERS,
                                        .bucket_bytes = ELEMENTS * sizeof(float), /* one bucket a parameter */
                                        .first_bucket_bytes = ELEMENTS * sizeof(float)};

static void run(int ranks, ranks_body *body) {
  int results[RANKS_MOST];
  size_t bytes = 0;
  assert_int_equal(even_sync_arena_bytes(&params, &bytes), EVEN_OK);
  ranks_setup setup = {.ranks = ranks, .arena_bytes = bytes, .timeout_seconds = 60, .spin = -1, .threads = true};
  assert_int_equal(ranks_run(&setup, body, NULL, results), 0);
}

/* No bucket goes before its parameter has come: each round's sums are those of its own gradients. */
static int rounds_body(even_comm *comm, void *argument) {
  even_sync *sync = NULL;
  float gradient[ELEMENTS];
  (void)argument;
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  for (int round = 1; round <= ROUNDS; round++) {
    uint8_t used[PARAMETERS] = {0};
    for (size_t i = 0; i < ELEMENTS; i++) {
      gradient[i] = (float)(round * (even_comm_rank(comm) + 1));
    }
    RANKS_EXPECT(comm, even_sync_begin(sync, 1.0, (uint32_t)round) == EVEN_OK);
    for (size_t p = PARAMETERS; p > 0; p--) {
      RANKS_EXPECT(comm, even_sync_ready(sync, p - 1, gradient) == EVEN_OK);
    }
    RANKS_EXPECT(comm, even_sync_finish(sync, used, NULL) == EVEN_OK);
    int ranks = even_comm_ranks(comm);
    float wanted = (float)(round * ranks * (ranks + 1) / 2);
    for (size_t p = 0; p < PARAMETERS; p++) {
      const float *slot = even_sync_slot(sync, p);
      RANKS_EXPECT(comm, used[p] == 1 && slot[0] == wanted && slot[ELEMENTS - 1] == wanted);
    }
  }
  even_sync_close(sync);
  return 0;
}

static void test_each_round_has_its_own_gradients(void **state) {
  (void)state;
  run(1, rounds_body);
  run(2, rounds_body);
}

typedef struct ready_call {
  even_sync *sync;
  const float *gradient;
  int taken; /* how many of this thread's calls were */
} ready_call;

static void *call_ready(void *argument) {
  ready_call *call = argument;
  for (size_t p = PARAMETERS; p > 0; p--) {
    call->taken += even_sync_ready(call->sync, p - 1, call->gradient) == EVEN_OK;
  }
  return NULL;
}

/* Two threads with the same gradients: each is taken once, and the sums are right. */
static int two_threads_body(even_comm *comm, void *argument) {
  even_sync *sync = NULL;
  float gradient[ELEMENTS] = {0};
  (void)argument;
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  for (int round = 0; round < ROUNDS / 8; round++) {
    pthread_t thread;
    ready_call mine = {sync, gradient, 0};
    ready_call other = {sync, gradient, 0};
    gradient[0] = (float)round;
    RANKS_EXPECT(comm, even_sync_begin(sync, 1.0, 0) == EVEN_OK);
    RANKS_EXPECT(comm, pthread_create(&thread, NULL, call_ready, &other) == 0);
    (void)call_ready(&mine);
    (void)pthread_join(thread, NULL);
    RANKS_EXPECT(comm, mine.taken + other.taken == PARAMETERS);
    RANKS_EXPECT(comm, even_sync_finish(sync, NULL, NULL) == EVEN_OK);
    RANKS_EXPECT(comm, *(const float *)even_sync_slot(sync, 0) == (float)round);
  }
  even_sync_close(sync);
  return 0;
}

static void test_ready_from_two_threads(void **state) {
  (void)state;
  run(1, two_threads_body);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_each_round_has_its_own_gradients),
      cmocka_unit_test(test_ready_from_two_threads),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
