/* Gradients that are not finite: seen on every rank in the same round, and on whose they are. */
#include "comm/ranks.h"

#include <evenstep/sync.h>

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { PARAMETERS = 5, LARGE = 70001 };

static const even_sync_parameter parameters[PARAMETERS] = {
    {1000, EVEN_F32, 0}, {3, EVEN_F64, 0}, {LARGE, EVEN_F32, 0}, {129, EVEN_F16, 0}, {129, EVEN_BF16, 0}};

static const uint8_t all_used[PARAMETERS] = {1, 1, 1, 1, 1};

typedef struct kind {
  even_dtype wire;
  even_sync_encoding encoding;
  bool known; /* from the second round on */
} kind;

static even_sync_params sync_params(const kind *of) {
  return (even_sync_params){.size = sizeof(even_sync_params),
                            .parameters = parameters,
                            .parameter_count = PARAMETERS,
                            .bucket_bytes = 8192,
                            .first_bucket_bytes = 1024,
                            .wire = of->wire,
                            .encoding = of->encoding,
                            .static_graph = of->known,
                            .way = EVEN_SYNC_GATHER};
}

typedef struct gradients {
  float small[1000];
  double wide[3];
  float large[LARGE];
  uint16_t half[129];
  uint16_t brain[129];
} gradients;

static void *memory_of(gradients *all, size_t p) {
  void *const places[PARAMETERS] = {all->small, all->wide, all->large, all->half, all->brain};
  return places[p];
}

static void put(gradients *all, size_t p, size_t i, bool infinite) {
  float single = infinite ? -INFINITY : NAN;
  double wide = (double)single;
  uint16_t half = infinite ? 0xfc00 : 0x7e01;
  uint16_t brain = infinite ? 0xff80 : 0x7fc1;
  const void *const values[PARAMETERS] = {&single, &wide, &single, &half, &brain};
  const size_t sizes[PARAMETERS] = {4, 8, 4, 2, 2};
  memcpy((char *)memory_of(all, p) + i * sizes[p], values[p], sizes[p]);
}

/* One round to its end, of all parameters but `left` (PARAMETERS: none is): `p` alone then has these bits, 0: none. */
static int end_round(even_comm *comm, even_sync *sync, gradients *all, double weight, size_t left, size_t p, int bits) {
  even_sync_report report;
  RANKS_EXPECT(comm, even_sync_begin(sync, weight, 0) == EVEN_OK);
  for (size_t q = 0; q < PARAMETERS; q++) {
    RANKS_EXPECT(comm, q == left || even_sync_ready(sync, q, memory_of(all, q)) == EVEN_OK);
  }
  RANKS_EXPECT(comm, even_sync_finish(sync, NULL, &report) == EVEN_OK);
  RANKS_EXPECT(comm, report.nonfinite == (bits == 0 ? 0 : 1));
  for (size_t q = 0; q < PARAMETERS; q++) {
    RANKS_EXPECT(comm, even_sync_nonfinite(sync, q) == (q == p ? bits : 0));
  }
  return 0;
}

/* One round in which rank 1's parameter `p` has one at `i` (p == PARAMETERS: nobody); then the bits. */
static int one_round(even_comm *comm, even_sync *sync, gradients *all, size_t p, size_t i, bool infinite,
                     double weight) {
  bool has = even_comm_rank(comm) == 1;
  bool mine = has && p < PARAMETERS;
  bool counts = p < PARAMETERS && weight > 0;
  memset(all, 0, sizeof *all);
  all->large[7] = 3.0e38f; /* large, and finite */
  if (mine) {
    put(all, p, i, infinite);
  }
  return end_round(comm, sync, all, has ? weight : 0.125, PARAMETERS, p,
                   counts ? EVEN_SYNC_NONFINITE_ANYWHERE | (mine ? EVEN_SYNC_NONFINITE_HERE : 0) : 0);
}

static int body(even_comm *comm, void *argument) {
  static gradients all;
  const kind *of = argument;
  even_sync_params params = sync_params(of);
  even_sync *sync = NULL;
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  int failed = one_round(comm, sync, &all, PARAMETERS, 0, false, 0.75);
  RANKS_EXPECT(comm, !of->known || even_sync_know(sync, all_used) == EVEN_OK);
  for (size_t p = 0; p < PARAMETERS && failed == 0; p++) {
    size_t last = parameters[p].count - 1;
    failed = one_round(comm, sync, &all, p, last, false, 0.75) || one_round(comm, sync, &all, p, 0, true, 0.75) ||
             one_round(comm, sync, &all, p, last / 2, true, 0.0) || /* counts as zeros, whatever it holds */
             one_round(comm, sync, &all, PARAMETERS, 0, false, 0.75);
  }
  RANKS_EXPECT(comm, even_sync_nonfinite(sync, PARAMETERS) == 0);
  even_sync_close(sync);
  return failed;
}

static void run_ranks(const kind *of, ranks_body *what) {
  int results[RANKS_MOST];
  size_t bytes = 0;
  even_sync_params params = sync_params(of);
  kind copy = *of;
  assert_int_equal(even_sync_arena_bytes(&params, &bytes), EVEN_OK);
  ranks_setup setup = {.ranks = 3, .arena_bytes = bytes, .timeout_seconds = 60, .spin = -1};
  assert_int_equal(ranks_run(&setup, what, &copy, results), 0);
}

static void run(const kind *of) {
  run_ranks(of, body);
}

static void gradients_as_they_are(void **state) {
  (void)state;
  run(&(kind){EVEN_F32, EVEN_SYNC_PLAIN, false});
  run(&(kind){EVEN_F32, EVEN_SYNC_PLAIN, true});
}

static void gradients_in_bf16(void **state) {
  (void)state;
  run(&(kind){EVEN_BF16, EVEN_SYNC_PLAIN, false});
  run(&(kind){EVEN_BF16, EVEN_SYNC_PLAIN, true});
}

static void gradients_that_are_encoded(void **state) {
  (void)state;
  run(&(kind){EVEN_F32, EVEN_SYNC_INT8, false});
}

/* What is finite in fp32 need not be so on its way. */
static int overflow_body(even_comm *comm, void *argument) {
  static float large[LARGE];
  even_sync_params params = sync_params(argument);
  even_sync *sync = NULL;
  even_sync_report report;
  large[LARGE - 1] = even_comm_rank(comm) == 2 ? 1e6f : 1.0f;
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_begin(sync, 0.25, 0) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_ready(sync, 2, large) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_finish(sync, NULL, &report) == EVEN_OK);
  bool here = even_comm_rank(comm) == 2;
  RANKS_EXPECT(comm, report.nonfinite == 1);
  RANKS_EXPECT(comm,
               even_sync_nonfinite(sync, 2) == (EVEN_SYNC_NONFINITE_ANYWHERE | (here ? EVEN_SYNC_NONFINITE_HERE : 0)));
  even_sync_close(sync);
  return 0;
}

static void too_large_for_fp16(void **state) {
  (void)state;
  run_ranks(&(kind){EVEN_F16, EVEN_SYNC_PLAIN, false}, overflow_body);
}

/* One round in which ranks 0 and 2 have gradients of one parameter that are finite, and in fp16, too, while their sum
 * is not in that: on all ranks alike, and no rank's own. Then one of finite sums. */
static int sum_round(even_comm *comm, even_sync *sync, gradients *all, size_t p, double weight) {
  for (int overflows = 1; overflows >= 0; overflows--) {
    memset(all, 0, sizeof *all);
    if (p == 3) { /* in fp16 itself: 60000, or 1 */
      all->half[5] = overflows ? 0x7b53 : 0x3c00;
    } else {
      float *values = memory_of(all, p);
      values[parameters[p].count - 1] = (overflows ? 60000.0f : 1.0f) / (float)weight;
    }
    if (end_round(comm, sync, all, weight, even_comm_rank(comm) == 1 ? p : PARAMETERS, p,
                  overflows ? EVEN_SYNC_NONFINITE_ANYWHERE : 0) != 0) {
      return 1;
    }
  }
  return 0;
}

static int sum_body(even_comm *comm, void *argument) {
  static gradients all;
  const kind *of = argument;
  even_sync_params params = sync_params(of);
  even_sync *sync = NULL;
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  for (int turn = 0; turn < (of->known ? 2 : 1); turn++) {
    for (size_t p = 0; p < 4; p++) {
      bool in_fp16 = p == 3 || (p != 1 && of->wire == EVEN_F16);
      if (in_fp16 && sum_round(comm, sync, &all, p, p == 3 ? 1.0 : 0.5) != 0) {
        return 1;
      }
    }
    RANKS_EXPECT(comm, !of->known || even_sync_know(sync, all_used) == EVEN_OK);
  }
  even_sync_close(sync);
  return 0;
}

static void sums_too_large_for_fp16(void **state) {
  (void)state;
  run_ranks(&(kind){EVEN_F16, EVEN_SYNC_PLAIN, false}, sum_body);
  run_ranks(&(kind){EVEN_F16, EVEN_SYNC_PLAIN, true}, sum_body);
  run_ranks(&(kind){EVEN_F32, EVEN_SYNC_PLAIN, true}, sum_body);
  run_ranks(&(kind){EVEN_F32, EVEN_SYNC_INT8, false}, sum_body);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(gradients_as_they_are),      cmocka_unit_test(gradients_in_bf16),
      cmocka_unit_test(gradients_that_are_encoded), cmocka_unit_test(too_large_for_fp16),
      cmocka_unit_test(sums_too_large_for_fp16),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
