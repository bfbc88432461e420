/* Exact sums: to the last bit those of the tree over the blocks, whoever had which block. */
#include "base/fail.h"
#include "comm/kernels.h"
#include "comm/ranks.h"
#include "support/fault.h"
#include "sync/tree.h"

#include <evenstep/exact.h>

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { PARAMETERS = 8, MOST_BLOCKS = 13, MOST_ELEMENTS = 5003 };

/* The sixth is used by block 2 alone, the last never. */
static const even_sync_parameter parameters[PARAMETERS] = {
    {1000, EVEN_F32, 0}, {3, EVEN_F64, 0}, {5003, EVEN_F32, 0}, {0, EVEN_F32, 0},
    {129, EVEN_BF16, 0}, {9, EVEN_F32, 0}, {17, EVEN_F16, 0},   {5, EVEN_F32, 0}};

static even_exact_params exact_params(size_t part_bytes) {
  return (even_exact_params){.size = sizeof(even_exact_params),
                             .parameters = parameters,
                             .parameter_count = PARAMETERS,
                             .part_bytes = part_bytes};
}

static bool has(size_t block, size_t p) {
  return p != 7 && (p != 5 || block == 2);
}

/* Of very different magnitudes, so that the order of additions is seen; some zeros of either sign. */
static double value(size_t block, size_t p, size_t i) {
  double x = sin((double)(block + 1) * 12.9898 + (double)(p + 1) * 78.233 + (double)i * 0.7193);
  return i % 31 == 0 ? (block % 2 == 0 ? -0.0 : 0.0) : x * pow(10.0, (double)((block * 7 + i) % 5) - 2.0);
}

static double weight_of(size_t block) {
  return block % 3 == 1 ? 3.0 : 4.0;
}

static uint16_t short_of(even_dtype dtype, float x) {
  uint16_t out;
  even_kernels_named("portable")->narrow[dtype](&out, &x, 1, 1.0f);
  return out;
}
static float of_short(even_dtype dtype, uint16_t x) {
  float out;
  even_kernels_named("portable")->widen[dtype](&out, &x, 1);
  return out;
}

static void store(void *to, even_dtype dtype, size_t i, double x) {
  if (dtype == EVEN_F64) {
    ((double *)to)[i] = x;
  } else if (dtype == EVEN_F32) {
    ((float *)to)[i] = (float)x;
  } else {
    ((uint16_t *)to)[i] = short_of(dtype, (float)x);
  }
}

/* What the tree is, said once more: the left half of n blocks is the largest power of two below n. */
static double wide_sum(size_t first, size_t end, size_t p, size_t i) {
  if (end - first == 1) {
    return has(first, p) ? weight_of(first) * value(first, p, i) : 0.0;
  }
  size_t half = 1;
  while (half * 2 < end - first) {
    half *= 2;
  }
  return wide_sum(first, first + half, p, i) + wide_sum(first + half, end, p, i);
}

static float narrow_sum(size_t first, size_t end, size_t p, size_t i) {
  even_dtype dtype = parameters[p].dtype;
  if (end - first == 1) {
    float x = (float)value(first, p, i);
    volatile float product = (float)weight_of(first) * (dtype == EVEN_F32 ? x : of_short(dtype, short_of(dtype, x)));
    return has(first, p) ? product : 0.0f;
  }
  size_t half = 1;
  while (half * 2 < end - first) {
    half *= 2;
  }
  return narrow_sum(first, first + half, p, i) + narrow_sum(first + half, end, p, i);
}

typedef struct wanted {
  size_t blocks;
  double weight;
  double loss;
  unsigned char values[PARAMETERS][MOST_ELEMENTS * 8];
} wanted;

static double loss_of(size_t block) {
  return 0.1 + (double)block / 7.0;
}

static double loss_sum(size_t first, size_t end) {
  if (end - first == 1) {
    return weight_of(first) * loss_of(first);
  }
  size_t half = 1;
  while (half * 2 < end - first) {
    half *= 2;
  }
  return loss_sum(first, first + half) + loss_sum(first + half, end);
}

static void want(wanted *out, size_t blocks) {
  memset(out, 0, sizeof *out);
  out->blocks = blocks;
  for (size_t b = 0; b < blocks; b++) {
    out->weight += weight_of(b);
  }
  out->loss = loss_sum(0, blocks) / out->weight;
  for (size_t p = 0; p < PARAMETERS; p++) {
    for (size_t i = 0; i < parameters[p].count; i++) {
      if (parameters[p].dtype == EVEN_F64) {
        store(out->values[p], EVEN_F64, i, wide_sum(0, blocks, p, i) / out->weight);
      } else {
        float mean = narrow_sum(0, blocks, p, i) / (float)out->weight;
        store(out->values[p], parameters[p].dtype, i, (double)mean);
      }
    }
  }
}

static size_t bytes_of(size_t p) {
  return parameters[p].count * even_dtype_bytes(parameters[p].dtype);
}

/* How `blocks` are split among `ranks` in a round: some have none. */
static void split(size_t blocks, int ranks, int round, size_t *counts) {
  uint32_t state = ((uint32_t)round * 2654435761u + (uint32_t)ranks * 97u + (uint32_t)blocks);
  memset(counts, 0, (size_t)ranks * sizeof *counts);
  size_t cuts[RANKS_MOST + 1] = {0};
  for (int r = 1; r < ranks; r++) {
    state = state * 1664525u + 1013904223u;
    cuts[r] = (state >> 8) % (blocks + 1);
    for (int k = r; k > 1 && cuts[k] < cuts[k - 1]; k--) {
      size_t larger = cuts[k - 1];
      cuts[k - 1] = cuts[k];
      cuts[k] = larger;
    }
  }
  for (int r = 0; r < ranks; r++) {
    counts[r] = (r + 1 < ranks ? cuts[r + 1] : blocks) - cuts[r];
  }
}

typedef struct memory {
  void *gradients[PARAMETERS]; /* of exactly the bytes that there are, for AddressSanitizer */
  void *targets[PARAMETERS];
} memory;

static void take_memory(memory *own) {
  for (size_t p = 0; p < PARAMETERS; p++) {
    own->gradients[p] = malloc(bytes_of(p) + (bytes_of(p) == 0));
    own->targets[p] = malloc(bytes_of(p) + (bytes_of(p) == 0));
  }
}

static void free_memory(memory *own) {
  for (size_t p = 0; p < PARAMETERS; p++) {
    free(own->gradients[p]);
    free(own->targets[p]);
  }
}

static even_status add_block(even_exact *exact, memory *own, size_t block) {
  const void *given[PARAMETERS];
  for (size_t p = 0; p < PARAMETERS; p++) {
    given[p] = has(block, p) ? own->gradients[p] : NULL;
    for (size_t i = 0; given[p] != NULL && i < parameters[p].count; i++) {
      store(own->gradients[p], parameters[p].dtype, i, value(block, p, i));
    }
  }
  return even_exact_add(exact, weight_of(block), loss_of(block), given);
}

static bool is_wanted(const wanted *expected, const memory *own, const uint8_t *used, const even_exact_report *report) {
  for (size_t p = 0; p < PARAMETERS; p++) {
    bool somewhere = p != 7 && (p != 5 || expected->blocks > 2);
    if (used[p] != somewhere || (somewhere && memcmp(own->targets[p], expected->values[p], bytes_of(p)) != 0)) {
      return false;
    }
  }
  return memcmp(&report->weight, &expected->weight, sizeof(double)) == 0 &&
         memcmp(&report->loss, &expected->loss, sizeof(double)) == 0;
}

static const wanted *expectations; /* [MOST_BLOCKS + 1] */

static int one_round(even_comm *comm, even_exact *exact, memory *own, size_t blocks, int round) {
  size_t counts[RANKS_MOST];
  uint8_t used[PARAMETERS];
  even_exact_report report;
  int rank = even_comm_rank(comm);
  size_t first = 0;
  split(blocks, even_comm_ranks(comm), round, counts);
  for (int r = 0; r < rank; r++) {
    first += counts[r];
  }
  RANKS_EXPECT(comm, even_exact_begin(exact, counts) == EVEN_OK);
  for (size_t b = first; b < first + counts[rank]; b++) {
    RANKS_EXPECT(comm, add_block(exact, own, b) == EVEN_OK);
  }
  RANKS_EXPECT(comm, even_exact_finish(exact, own->targets, used, &report) == EVEN_OK);
  RANKS_EXPECT(comm, is_wanted(&expectations[blocks], own, used, &report));
  return 0;
}

static int rounds_body(even_comm *comm, void *argument) {
  even_exact_params params = exact_params(*(const size_t *)argument);
  even_exact *exact = NULL;
  memory own;
  int failed = 0;
  take_memory(&own);
  RANKS_EXPECT(comm, even_exact_open(&params, comm, &exact) == EVEN_OK);
  for (size_t blocks = 1; blocks <= MOST_BLOCKS && !failed; blocks++) {
    for (int round = 0; round < 4 && !failed; round++) {
      failed = one_round(comm, exact, &own, blocks, round);
    }
  }
  even_exact_close(exact);
  free_memory(&own);
  return failed;
}

static int set_up(void **state) {
  wanted *all = calloc(MOST_BLOCKS + 1, sizeof *all);
  (void)state;
  for (size_t blocks = 1; all != NULL && blocks <= MOST_BLOCKS; blocks++) {
    want(&all[blocks], blocks);
  }
  expectations = all;
  return all == NULL ? -1 : 0;
}

static int tear_down(void **state) {
  (void)state;
  free((void *)expectations);
  return 0;
}

static void run(int ranks, bool threads, size_t part_bytes, ranks_engine engine) {
  int results[RANKS_MOST];
  ranks_setup setup = {.ranks = ranks, .timeout_seconds = 60, .spin = -1, .threads = threads, .engine = engine};
  assert_int_equal(ranks_run(&setup, rounds_body, &part_bytes, results), 0);
}

static void test_any_split_on_any_ranks(void **state) {
  (void)state;
  for (int ranks = 1; ranks <= 4; ranks++) {
    run(ranks, false, 0, RANKS_SHM);
  }
  run(7, false, 1, RANKS_SHM); /* of 64 bytes */
}

static void test_between_threads(void **state) {
  (void)state;
  run(3, true, 4096, RANKS_SHM);
}

static void test_over_the_network(void **state) {
  (void)state;
  if (!ranks_have_ucx()) {
    skip();
  }
  run(3, false, 4096, RANKS_NETWORK);
}

static void test_every_instruction_set(void **state) {
  static const char *const names[] = {"avx512", "avx2", "neon", "portable"};
  (void)state;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    if (even_kernels_named(names[i]) != NULL) {
      even_kernels_use(even_kernels_named(names[i]));
      run(2, false, 0, RANKS_SHM);
    }
  }
  even_kernels_use(NULL);
}

static even_status alone(void *context) {
  even_exact_params params = exact_params(0);
  even_exact *exact = NULL;
  memory *own = context;
  uint8_t used[PARAMETERS];
  size_t blocks = 7;
  even_exact_report report = {0};
  EVEN_TRY(even_exact_open(&params, NULL, &exact));
  even_status status = even_exact_begin(exact, &blocks);
  for (size_t b = 0; b < blocks && status == EVEN_OK; b++) {
    status = add_block(exact, own, b);
  }
  status = status == EVEN_OK ? even_exact_finish(exact, own->targets, used, &report) : status;
  even_exact_close(exact);
  if (status == EVEN_OK) {
    assert_true(is_wanted(&expectations[blocks], own, used, &report));
  }
  return status;
}

static void test_alone_and_without_memory(void **state) {
  memory own;
  (void)state;
  take_memory(&own);
  assert_int_equal(alone(&own), EVEN_OK);
  assert_true(fault_each_allocation(alone, &own) >= 12);
  fault_reset();
  free_memory(&own);
}

static even_status one_of_two(void *context) {
  even_exact_params params = exact_params(0);
  even_exact *exact = NULL;
  size_t counts[2] = {3, 2};
  EVEN_TRY(even_exact_open(&params, context, &exact));
  even_status status = even_exact_begin(exact, counts);
  even_exact_close(exact);
  return status;
}

static int fault_body(even_comm *comm, void *argument) {
  (void)argument;
  RANKS_EXPECT(comm, fault_each_allocation(one_of_two, comm) >= 16);
  fault_reset();
  return 0;
}

static void test_plans_without_memory(void **state) {
  int results[RANKS_MOST];
  ranks_setup setup = {.ranks = 2, .timeout_seconds = 60, .spin = -1};
  (void)state;
  assert_int_equal(ranks_run(&setup, fault_body, NULL, results), 0);
}

/* A rank that lacks a block ends the group: the others wait for it. */
static int missing_body(even_comm *comm, void *argument) {
  even_exact_params params = exact_params(0);
  even_exact *exact = NULL;
  memory own;
  uint8_t used[PARAMETERS];
  const size_t counts[2] = {1, 1};
  (void)argument;
  take_memory(&own);
  RANKS_EXPECT(comm, even_exact_open(&params, comm, &exact) == EVEN_OK);
  RANKS_EXPECT(comm, even_exact_begin(exact, counts) == EVEN_OK);
  if (even_comm_rank(comm) == 0) {
    RANKS_EXPECT(comm, add_block(exact, &own, 0) == EVEN_OK);
    RANKS_EXPECT(comm, even_exact_finish(exact, own.targets, used, NULL) == EVEN_ERR_REVOKED);
  } else {
    RANKS_EXPECT(comm, even_exact_finish(exact, own.targets, used, NULL) == EVEN_ERR_STATE);
  }
  even_exact_close(exact);
  free_memory(&own);
  return 0;
}

static void test_a_missing_block(void **state) {
  int results[RANKS_MOST];
  ranks_setup setup = {.ranks = 2, .timeout_seconds = 60, .spin = -1};
  (void)state;
  assert_int_equal(ranks_run(&setup, missing_body, NULL, results), 0);
}

static void test_misuse(void **state) {
  even_exact_params params = exact_params(0);
  even_exact *exact = NULL;
  memory own;
  uint8_t used[PARAMETERS];
  const void *none[PARAMETERS] = {0};
  size_t blocks = 0;
  even_exact_report report;
  (void)state;
  take_memory(&own);
  assert_int_equal(even_exact_open(&params, NULL, &exact), EVEN_OK);
  assert_int_equal(add_block(exact, &own, 0), EVEN_ERR_STATE);
  assert_int_equal(even_exact_finish(exact, own.targets, used, NULL), EVEN_ERR_STATE);
  assert_int_equal(even_exact_begin(exact, &blocks), EVEN_ERR_ARGUMENT);
  blocks = 2;
  assert_int_equal(even_exact_begin(exact, &blocks), EVEN_OK);
  assert_int_equal(even_exact_add(exact, NAN, 0.0, none), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_exact_add(exact, -1.0, 0.0, none), EVEN_ERR_ARGUMENT);
  assert_int_equal(add_block(exact, &own, 0), EVEN_OK);
  assert_int_equal(even_exact_finish(exact, own.targets, used, NULL), EVEN_ERR_STATE);
  assert_int_equal(even_exact_begin(exact, &blocks), EVEN_OK); /* ends what was left */
  for (size_t b = 0; b < blocks; b++) {
    assert_int_equal(even_exact_add(exact, 0.0, 1.0, (const void *const *)own.gradients), EVEN_OK);
  }
  assert_int_equal(add_block(exact, &own, 2), EVEN_ERR_STATE);
  assert_int_equal(even_exact_finish(exact, own.targets, used, &report), EVEN_OK);
  assert_true(report.weight == 0.0 && isnan(report.loss) && used[0] == 0); /* weights of zero: no gradient anywhere */
  even_exact_close(exact);
  even_exact_close(NULL);
  free_memory(&own);
  params.size = 1;
  assert_int_equal(even_exact_open(&params, NULL, &exact), EVEN_ERR_ARGUMENT);
  even_sync_parameter wrong = {4, EVEN_I32, 0};
  params = (even_exact_params){.size = sizeof params, .parameters = &wrong, .parameter_count = 1};
  assert_int_equal(even_exact_open(&params, NULL, &exact), EVEN_ERR_ARGUMENT);
  wrong = (even_sync_parameter){SIZE_MAX / 2, EVEN_F32, 0};
  assert_int_equal(even_exact_open(&params, NULL, &exact), EVEN_ERR_OVERFLOW);
}

/* Seven blocks, of which some have `weights` of zero: with what is no number in them, or with nothing at all. */
static even_exact_report with_weights(const double *weights, bool bare, memory *own, uint8_t *used) {
  even_exact_params params = exact_params(0);
  even_exact *exact = NULL;
  size_t blocks = 7;
  even_exact_report report = {0};
  const void *none[PARAMETERS] = {0};
  assert_int_equal(even_exact_open(&params, NULL, &exact), EVEN_OK);
  assert_int_equal(even_exact_begin(exact, &blocks), EVEN_OK);
  for (size_t b = 0; b < blocks; b++) {
    bool counts = weights[b] > 0.0;
    for (size_t p = 0; p < PARAMETERS; p++) {
      for (size_t i = 0; i < parameters[p].count; i++) {
        store(own->gradients[p], parameters[p].dtype, i, counts ? value(b, p, i) : (double)NAN);
      }
    }
    assert_int_equal(even_exact_add(exact, weights[b], counts ? loss_of(b) : (double)NAN,
                                    counts || !bare ? (const void *const *)own->gradients : none),
                     EVEN_OK);
  }
  assert_int_equal(even_exact_finish(exact, own->targets, used, &report), EVEN_OK);
  even_exact_close(exact);
  return report;
}

/* The mean over no tokens is not a number, and one device that takes the whole batch never sees it. */
static void test_blocks_that_count_nothing(void **state) {
  static const double weights[7] = {0.0, 3.0, 4.0, 0.0, 0.0, 0.0, 2.0}; /* first, second and both halves of a node */
  memory own;
  memory bare;
  uint8_t used[PARAMETERS];
  uint8_t used_bare[PARAMETERS];
  (void)state;
  take_memory(&own);
  take_memory(&bare);
  even_exact_report report = with_weights(weights, false, &own, used);
  even_exact_report wanted_report = with_weights(weights, true, &bare, used_bare);
  assert_memory_equal(used, used_bare, sizeof used);
  assert_true(report.weight == 9.0 && isfinite(report.loss) && report.loss == wanted_report.loss);
  for (size_t p = 0; p < PARAMETERS; p++) {
    if (bytes_of(p) > 0) {
      assert_memory_equal(own.targets[p], bare.targets[p], bytes_of(p));
    }
  }
  assert_true(isfinite(((const float *)own.targets[0])[1]) && isfinite(((const double *)own.targets[1])[1]));
  free_memory(&own);
  free_memory(&bare);
}

/* A range is cut into the fewest nodes: no two neighbours are halves of one. */
static void test_cuts(void **state) {
  even_tree_node nodes[EVEN_TREE_MOST];
  (void)state;
  for (size_t blocks = 1; blocks <= 40; blocks++) {
    for (size_t first = 0; first <= blocks; first++) {
      for (size_t end = first; end <= blocks; end++) {
        size_t count = even_tree_cut(first, end, blocks, nodes);
        size_t at = first;
        for (size_t i = 0; i < count; i++) {
          assert_true(nodes[i].first == at && nodes[i].end > at);
          assert_true(i == 0 || !even_tree_are_halves(nodes[i - 1], nodes[i], blocks));
          at = nodes[i].end;
        }
        assert_int_equal(at, end);
        assert_true(count <= 12);
      }
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_cuts),
      cmocka_unit_test(test_any_split_on_any_ranks),
      cmocka_unit_test(test_between_threads),
      cmocka_unit_test(test_over_the_network),
      cmocka_unit_test(test_every_instruction_set),
      cmocka_unit_test(test_alone_and_without_memory),
      cmocka_unit_test(test_plans_without_memory),
      cmocka_unit_test(test_a_missing_block),
      cmocka_unit_test(test_misuse),
      cmocka_unit_test(test_blocks_that_count_nothing),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
