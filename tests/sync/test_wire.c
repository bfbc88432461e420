/* Gradients that travel in 16 bits: what every rank has then is known to the last bit. */
#include "comm/ranks.h"

#include <evenstep/sync.h>

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { PARAMETERS = 5, ROUNDS = 6 };

static const even_sync_parameter parameters[PARAMETERS] = {
    {1000, EVEN_F32, 0}, {3, EVEN_F64, 0}, {70001, EVEN_F32, 0}, {1, EVEN_F32, 0}, {129, EVEN_BF16, 0}};

static even_sync_params sync_params(even_dtype wire) {
  return (even_sync_params){.size = sizeof(even_sync_params),
                            .parameters = parameters,
                            .parameter_count = PARAMETERS,
                            .bucket_bytes = 8192,
                            .first_bucket_bytes = 1024,
                            .wire = wire};
}

/* To the nearest, and back: by the compiler's own conversion, and by comparing with both neighbours. */
static float through_f16(float value) {
  return (float)(_Float16)value;
}
static float through_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  uint32_t below = bits & 0xffff0000u;
  uint32_t above = below + 0x10000u;
  float low;
  float high;
  memcpy(&low, &below, sizeof low);
  memcpy(&high, &above, sizeof high);
  double to_low = fabs((double)value - (double)low);
  double to_high = fabs((double)high - (double)value);
  bool even = (below & 0x10000u) == 0;
  return to_low < to_high || (to_low == to_high && even) ? low : high;
}

static float gradient(int rank, int round, size_t p, size_t i) {
  double x = (double)(rank + 1) * 0.377 + (double)round * 0.11 + (double)p * 0.7 + (double)(i % 1013) * 0.0917;
  return (float)sin(x * x) * (i % 7 == 0 ? 1e-4f : 3.0f);
}

static double weight(int rank, int ranks, int round) {
  int total = 0;
  for (int r = 0; r < ranks; r++) {
    total += (r + round) % ranks;
  }
  return ranks == 1 ? 1 : (double)((rank + round) % ranks) / total; /* of some rank zero */
}

static float wanted(even_dtype wire, int ranks, int round, size_t p, size_t i) {
  float sum = 0;
  for (int r = 0; r < ranks; r++) {
    float part = gradient(r, round, p, i) * (float)weight(r, ranks, round);
    float rounded = wire == EVEN_F16 ? through_f16(part) : through_bf16(part);
    sum = r == 0 ? rounded : sum + rounded;
  }
  return wire == EVEN_F16 ? through_f16(sum) : through_bf16(sum);
}

static int one_round(even_comm *comm, even_sync *sync, even_dtype wire, int round) {
  static _Thread_local float memory[70001];
  static _Thread_local double wide[3];
  uint8_t used[PARAMETERS];
  int rank = even_comm_rank(comm);
  int ranks = even_comm_ranks(comm);
  even_sync_report report;
  float *small = even_sync_slot(sync, 0); /* a gradient that lies in its slot */
  RANKS_EXPECT(comm, even_sync_begin(sync, weight(rank, ranks, round), 0) == EVEN_OK);
  for (size_t i = 0; i < 70001; i++) {
    memory[i] = gradient(rank, round, 2, i);
  }
  for (size_t i = 0; i < 1000; i++) {
    small[i] = gradient(rank, round, 0, i);
  }
  for (size_t i = 0; i < 3; i++) {
    wide[i] = 1.0 + 1e-12;
  }
  RANKS_EXPECT(comm, even_sync_ready(sync, 2, memory) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_ready(sync, 0, small) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_ready(sync, 1, wide) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_finish(sync, used, &report) == EVEN_OK);
  RANKS_EXPECT(comm, used[0] == 1 && used[2] == 1 && used[3] == 0);
  for (size_t i = 0; i < 70001; i++) {
    RANKS_EXPECT(comm, ((const float *)even_sync_slot(sync, 2))[i] == wanted(wire, ranks, round, 2, i));
  }
  for (size_t i = 0; i < 1000; i++) {
    RANKS_EXPECT(comm, small[i] == wanted(wire, ranks, round, 0, i));
  }
  RANKS_EXPECT(comm, fabs(((const double *)even_sync_slot(sync, 1))[0] - 1.0 - 1e-12) < 1e-15); /* not narrowed */
  RANKS_EXPECT(comm, report.full_bytes >= 71002 * 4 + 3 * 8 && report.bytes < report.full_bytes * 51 / 100);
  return 0;
}

static int wire_body(even_comm *comm, void *argument) {
  even_dtype wire = *(const even_dtype *)argument;
  even_sync_params params = sync_params(wire);
  even_sync *sync = NULL;
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  for (int round = 0; round < ROUNDS; round++) {
    if (one_round(comm, sync, wire, round) != 0) {
      return 1;
    }
  }
  even_sync_close(sync);
  return 0;
}

static void run(even_dtype wire) {
  int results[RANKS_MOST];
  even_sync_params params = sync_params(wire);
  size_t bytes = 0;
  assert_int_equal(even_sync_arena_bytes(&params, &bytes), EVEN_OK);
  for (int ranks = 1; ranks <= 3; ranks++) {
    ranks_setup setup = {.ranks = ranks, .arena_bytes = bytes, .timeout_seconds = 60, .spin = -1};
    assert_int_equal(ranks_run(&setup, wire_body, &wire, results), 0);
  }
}

static void test_fp16(void **state) {
  (void)state;
  run(EVEN_F16);
}

static void test_bf16(void **state) {
  (void)state;
  run(EVEN_BF16);
}

static void test_what_cannot_travel(void **state) {
  (void)state;
  size_t bytes = 0;
  even_sync_params params = sync_params(EVEN_I8);
  assert_int_equal(even_sync_arena_bytes(&params, &bytes), EVEN_ERR_ARGUMENT);
  assert_non_null(strstr(even_error_last()->what, "dtype number 4"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_fp16),
      cmocka_unit_test(test_bf16),
      cmocka_unit_test(test_what_cannot_travel),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
