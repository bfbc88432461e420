/* Gradients of which each rank has a part, and the norm of gradients: the same bits as with sums that are whole. */
#include "base/fail.h"
#include "comm/kernels.h"
#include "comm/ranks.h"
#include "optim/optim_model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { ARENA = 1 << 20, ALIGNMENT = 64 };

/* A norm that some steps have less than, and others more. */
#define MOST_NORM 12000.0

static void clip_by_the_norm(void **state) {
  (void)state;
  static const double most[] = {1e-3, MOST_NORM, 1e9, INFINITY};
  for (size_t m = 0; m < sizeof most / sizeof *most; m++) {
    even_optim *optim = NULL;
    model *mine = model_make();
    model *theirs = model_make();
    mine->max_norm = theirs->max_norm = most[m];
    assert_int_equal(even_optim_open(&model_all, NULL, &optim), EVEN_OK);
    for (int step = 1; step <= STEPS; step++) {
      even_optim_report report;
      long double squares = 0;
      model_loop(theirs, step);
      assert_int_equal(model_step(optim, mine, step, &report), EVEN_OK);
      assert_true(model_is_same(optim, mine, theirs));
      for (size_t p = 0; p < PARAMETERS; p++) {
        for (size_t i = 0; i < model_parameters[p].count && p != 2 && (p != 4 || step > 1); i++) {
          double x = 0;
          float narrow = 0;
          even_dtype dtype = model_parameters[p].dtype;
          if (dtype == EVEN_F64) {
            x = ((double *)mine->gradients[p])[i];
          } else if (dtype == EVEN_F32) {
            x = (double)((float *)mine->gradients[p])[i];
          } else {
            even_kernels_best()->widen[dtype](&narrow, (uint16_t *)mine->gradients[p] + i, 1);
            x = (double)narrow;
          }
          squares += (long double)x * x;
        }
      }
      double wanted = (double)sqrtl(squares);
      assert_true(fabs(report.norm - wanted) <= 1e-13 * wanted);
    }
    even_optim_close(optim);
    model_drop(mine);
    model_drop(theirs);
  }
}

/* As torch does: all values are NaN then, those without a gradient stay. */
static void give_nan_where_the_norm_is_none(void **state) {
  (void)state;
  const even_optim_parameter parameter = {3, EVEN_F32, 0};
  const even_optim_params params = {.size = sizeof params, .parameters = &parameter, .parameter_count = 1};
  const even_optim_rule rule = {.method = EVEN_OPTIM_SGD, .lr = 1};
  float values[3] = {1, 2, 3};
  float gradient[3] = {1, NAN, 1};
  even_optim *optim = NULL;
  even_optim_report report;
  even_optim_input input = {.values = values, .gradient = gradient, .step = 1};
  even_optim_job job = {.size = sizeof job, .rules = &rule, .rule_count = 1, .inputs = &input, .max_norm = 1};
  assert_int_equal(even_optim_open(&params, NULL, &optim), EVEN_OK);
  assert_int_equal(even_optim_step(optim, &job, &report), EVEN_OK);
  assert_true(isnan(report.norm) && isnan(values[0]) && isnan(values[1]) && isnan(values[2]));
  even_optim_close(optim);
}

/* This rank's part of a step's gradients into its arena, and their sums into `sums`. */
static even_status lay_parts(even_comm *comm, model *one, int step, even_optim_input *inputs) {
  int rank = even_comm_rank(comm);
  unsigned char *at = even_comm_arena(comm);
  model_turn(one, step, inputs);
  for (size_t p = 0; p < PARAMETERS; p++) {
    size_t count = model_parameters[p].count;
    even_dtype dtype = model_parameters[p].dtype;
    for (size_t i = 0; i < count; i++) {
      model_store(one->gradients[p], dtype, i, cos((double)(i * 3 + p) + step + rank * 0.7) * (i % 5 == 0 ? 100 : 1));
    }
    memcpy(at, one->gradients[p], count * even_dtype_bytes(dtype));
    EVEN_TRY(even_comm_all_reduce(comm, one->gradients[p], count, dtype, EVEN_SUM));
    inputs[p].gradient = inputs[p].gradient == NULL ? NULL : at;
    at += (count * even_dtype_bytes(dtype) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  }
  return EVEN_OK;
}

static int step_on_parts(even_comm *comm, void *argument) {
  const double *max_norm = argument;
  even_optim *in_parts = NULL;
  even_optim *whole = NULL;
  model *mine = model_make();
  model *theirs = model_make();
  RANKS_EXPECT(comm, even_optim_open(&model_all, comm, &in_parts) == EVEN_OK);
  RANKS_EXPECT(comm, even_optim_open(&model_all, NULL, &whole) == EVEN_OK);
  for (int step = 1; step <= STEPS; step++) {
    even_optim_report report;
    even_optim_report alone;
    even_optim_input parts[PARAMETERS];
    even_optim_input sums[PARAMETERS];
    even_optim_job job = {.size = sizeof job,
                          .rules = model_rules,
                          .rule_count = MOST_RULES,
                          .inputs = parts,
                          .parts = comm,
                          .max_norm = *max_norm};
    RANKS_EXPECT(comm, lay_parts(comm, mine, step, parts) == EVEN_OK);
    for (size_t p = 0; p < PARAMETERS; p++) {
      sums[p] = parts[p];
      sums[p].values = theirs->values[p];
      sums[p].gradient = parts[p].gradient == NULL ? NULL : mine->gradients[p];
    }
    RANKS_EXPECT(comm, even_optim_step(in_parts, &job, &report) == EVEN_OK);
    job.parts = NULL;
    job.inputs = sums;
    RANKS_EXPECT(comm, even_optim_step(whole, &job, &alone) == EVEN_OK);
    RANKS_EXPECT(comm, memcmp(&report.norm, &alone.norm, sizeof alone.norm) == 0);
    RANKS_EXPECT(comm, (alone.norm > 0) == (*max_norm > 0) && report.all == alone.all);
    for (size_t p = 0; p < PARAMETERS; p++) {
      size_t bytes = model_parameters[p].count * even_dtype_bytes(model_parameters[p].dtype);
      RANKS_EXPECT(comm, memcmp(mine->values[p], theirs->values[p], bytes) == 0);
    }
    uint64_t sum = report.elements;
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, &sum, 1, EVEN_U64, EVEN_SUM) == EVEN_OK && sum == report.all);
  }
  even_optim_close(in_parts);
  even_optim_close(whole);
  model_drop(mine);
  model_drop(theirs);
  return 0;
}

static void give_what_whole_sums_give(void **state) {
  (void)state;
  double norms[] = {0, 100, 1e9};
  for (size_t n = 0; n < sizeof norms / sizeof *norms; n++) {
    for (int ranks = 1; ranks <= 4; ranks++) {
      ranks_setup setup = {.ranks = ranks, .arena_bytes = ARENA, .timeout_seconds = 200, .threads = n == 1};
      assert_int_equal(ranks_run(&setup, step_on_parts, &norms[n], NULL), 0);
    }
  }
}

static bool refuses(even_optim *optim, const even_optim_job *job, const char *words) {
  return even_optim_step(optim, job, NULL) == EVEN_ERR_ARGUMENT && strstr(even_error_last()->what, words) != NULL;
}

static int ask_wrong(even_comm *comm, void *argument) {
  const even_optim_parameter parameter = {100, EVEN_F32, 0};
  even_optim_params params = {.size = sizeof params, .parameters = &parameter, .parameter_count = 1};
  const even_optim_rule rule = {.method = EVEN_OPTIM_SGD, .lr = 1};
  float values[100] = {0};
  float *arena = even_comm_arena(comm);
  even_optim_input input = {.values = values, .gradient = arena, .step = 1};
  even_optim_job job = {.size = sizeof job, .rules = &rule, .rule_count = 1, .inputs = &input, .parts = comm};
  even_optim *alone = NULL;
  even_optim *surviving = NULL;
  even_optim *shared = NULL;
  (void)argument;
  RANKS_EXPECT(comm, even_optim_open(&params, NULL, &alone) == EVEN_OK);
  RANKS_EXPECT(comm, even_optim_open(&params, comm, &shared) == EVEN_OK);
  params.survives = true;
  RANKS_EXPECT(comm, even_optim_open(&params, comm, &surviving) == EVEN_OK);
  RANKS_EXPECT(comm, refuses(alone, &job, "the same ranks"));
  RANKS_EXPECT(comm, refuses(surviving, &job, "a rank that ends"));
  input.gradient = values;
  RANKS_EXPECT(comm, refuses(shared, &job, "not in the group's arena"));
  input.gradient = (char *)arena + even_comm_arena_bytes(comm) - 99 * sizeof(float);
  RANKS_EXPECT(comm, refuses(shared, &job, "not in the group's arena"));
  input.gradient = arena - 1;
  RANKS_EXPECT(comm, refuses(shared, &job, "not in the group's arena"));
  input.gradient = arena;
  job.max_norm = -1;
  RANKS_EXPECT(comm, refuses(shared, &job, "max_norm -1"));
  job.max_norm = NAN;
  RANKS_EXPECT(comm, refuses(shared, &job, "max_norm"));
  job.max_norm = 0;
  job.size = 8;
  RANKS_EXPECT(comm, refuses(shared, &job, "even_optim_job.size is 8"));
  job.size = sizeof job;
  memset(arena, 0, 100 * sizeof(float));
  RANKS_EXPECT(comm, even_optim_step(shared, &job, NULL) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_peer_arena(comm, 2) == NULL && even_comm_peer_arena(comm, -1) == NULL);
  RANKS_EXPECT(comm, even_comm_peer_arena(comm, even_comm_rank(comm)) == arena);
  even_optim_close(alone);
  even_optim_close(shared);
  even_optim_close(surviving);
  return 0;
}

static void refuse_parts_that_cannot_be_added(void **state) {
  (void)state;
  ranks_setup setup = {.ranks = 2, .arena_bytes = 4096, .timeout_seconds = 200};
  assert_int_equal(ranks_run(&setup, ask_wrong, NULL, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(clip_by_the_norm),
      cmocka_unit_test(give_nan_where_the_norm_is_none),
      cmocka_unit_test(give_what_whole_sums_give),
      cmocka_unit_test(refuse_parts_that_cannot_be_added),
  };
  return cmocka_run_group_tests_name("optim_parts", tests, NULL, NULL);
}
