/* Parts by the speeds of links: what is made of speeds, and that the results stay what they were. */
#include "comm/ranks.h"
#include "comm/ucx/reduce.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define RANKS 3
#define COUNT 1100003 /* above EVEN_UCX_FIT_BYTES */

/* What the slowest link takes where a whole has 1, by its own time for that. */
static double time_of(const uint64_t *times, const uint32_t *ends, int ranks) {
  double most = 0;
  uint32_t begin = 0;
  for (int rank = 0; rank < ranks; rank++) {
    double part = (double)(ends[rank] - begin) / EVEN_UCX_FIT_WHOLE;
    double time = (1 + (ranks - 2) * part) * (double)times[rank];
    assert_true(ends[rank] >= begin);
    most = time > most ? time : most;
    begin = ends[rank];
  }
  assert_int_equal(begin, EVEN_UCX_FIT_WHOLE);
  return most;
}

static void equal_links_keep_equal_parts(void **state) {
  static const uint64_t equal[] = {1000, 1010, 990, 1000};
  static const uint64_t two[] = {1000, 4000};
  uint32_t ends[4] = {0};
  (void)state;
  assert_false(even_ucx_fit_parts(equal, 4, ends));
  assert_false(even_ucx_fit_parts(two, 2, ends)); /* all of the data pass both, however they are cut */
  assert_int_equal(ends[0], 0);
}

static void a_slow_link_gets_a_small_part(void **state) {
  static const uint64_t quarter[] = {1000, 1000, 4000};
  static const uint64_t half[] = {1000, 1000, 1600};
  static const uint64_t one_fast[] = {4000, 1000, 4000};
  static const uint64_t many[] = {1000, 1000, 1000, 1000, 1000, 1000, 1000, 3000};
  uint32_t ends[8];
  (void)state;
  assert_true(even_ucx_fit_parts(quarter, 3, ends));
  assert_float_equal(time_of(quarter, ends, 3), 4000, 5); /* equal parts: 5333 */
  assert_true(even_ucx_fit_parts(half, 3, ends));
  assert_float_equal(time_of(half, ends, 3), 1600, 5); /* 2133 */
  assert_true(even_ucx_fit_parts(one_fast, 3, ends));
  assert_float_equal(time_of(one_fast, ends, 3), 4000, 5);
  assert_int_equal(ends[0], 0);
  assert_true(even_ucx_fit_parts(many, 8, ends));
  assert_float_equal(time_of(many, ends, 8), 3000, 5); /* 5250 */
  assert_int_equal(ends[7] - ends[6], 0);
}

static void fill(float *values, int rank) {
  uint32_t seed = 31u + (uint32_t)rank;
  for (int i = 0; i < COUNT; i++) {
    seed = seed * 1664525u + 1013904223u;
    values[i] = (float)(seed >> 8) / 1e3f - 8000.0f;
  }
}

static int reduce_in(even_comm *comm, const char *way, float *values) {
  const even_comm_choosing choosing = {.size = sizeof choosing, .way = way};
  RANKS_EXPECT(comm, even_comm_choose(comm, &choosing) == EVEN_OK);
  fill(values, even_comm_rank(comm));
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, values, COUNT, EVEN_F32, EVEN_AVG) == EVEN_OK);
  return 0;
}

/* Whatever the links are said to be. */
static int same_bits(even_comm *comm, void *argument) {
  static const uint32_t divisions[][RANKS] = {
      {30000, 60000, 65536}, {0, 65536, 65536}, {32768, 32768, 65536}, {7, 9, 65536}};
  static float equal[COUNT];
  static float fitted[COUNT];
  even_ucx_fit *fit = &even_ucx_of(comm)->fit;
  (void)argument;
  RANKS_EXPECT(comm, reduce_in(comm, "parts", equal) == 0 && !fit->unequal && fit->calls == 1);
  for (size_t i = 0; i < sizeof divisions / sizeof divisions[0]; i++) {
    memcpy(fit->ends, divisions[i], sizeof divisions[i]);
    fit->unequal = true;
    RANKS_EXPECT(comm, reduce_in(comm, "fitted", fitted) == 0);
    RANKS_EXPECT(comm, memcmp(equal, fitted, sizeof equal) == 0);
  }
  return 0;
}

static int measure_when_asked(even_comm *comm, void *argument) {
  static float values[COUNT];
  const even_ucx_fit *fit = &even_ucx_of(comm)->fit;
  char text[4096];
  (void)argument;
  RANKS_EXPECT(comm, reduce_in(comm, "fitted", values) == 0);
  RANKS_EXPECT(comm, fit->unequal && fit->ends[RANKS - 1] == EVEN_UCX_FIT_WHOLE);
  even_comm_describe(comm, text, sizeof text);
  RANKS_EXPECT(comm, strstr(text, "parts by the links' speeds: ") != NULL);
  RANKS_EXPECT(comm, reduce_in(comm, NULL, values) == 0); /* by what the calls cost */
  return 0;
}

static void parts_do_not_change_bits(void **state) {
  ranks_setup setup = {.ranks = RANKS, .timeout_seconds = 100, .spin = -1, .engine = RANKS_NETWORK};
  (void)state;
  if (!ranks_have_ucx()) {
    skip();
  }
  assert_int_equal(ranks_run(&setup, same_bits, NULL, NULL), 0);
  assert_int_equal(ranks_run(&setup, measure_when_asked, NULL, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(equal_links_keep_equal_parts),
      cmocka_unit_test(a_slow_link_gets_a_small_part),
      cmocka_unit_test(parts_do_not_change_bits),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
