/* Optimizers' steps: to the last bit what one loop over each parameter gives, whoever did which piece. */
#include "base/fail.h"
#include "comm/kernels.h"
#include "comm/ranks.h"
#include "optim/kernels.h"
#include "optim/pieces.h"
#include "support/fault.h"

#include <evenstep/optim.h>

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { PARAMETERS = 8, STEPS = 5, MOST_RULES = 3 };

/* The third never has a gradient, the fifth from the second step on. */
static const even_optim_parameter parameters[PARAMETERS] = {
    {7, EVEN_F32, 3},     {40000, EVEN_F32, 2},  {11, EVEN_F32, 2},  {0, EVEN_F32, 3},
    {20001, EVEN_F64, 3}, {18000, EVEN_BF16, 2}, {300, EVEN_F16, 3}, {5, EVEN_F32, 1}};

static const even_optim_params params = {
    .size = sizeof params, .parameters = parameters, .parameter_count = PARAMETERS};

static const even_optim_rule rules[MOST_RULES] = {
    {.method = EVEN_OPTIM_ADAMW, .lr = 0.01, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8},
    {.method = EVEN_OPTIM_ADAM,
     .amsgrad = true,
     .lr = 0.02,
     .weight_decay = 0.01,
     .beta1 = 0.8,
     .beta2 = 0.9,
     .eps = 1e-6},
    {.method = EVEN_OPTIM_SGD, .nesterov = true, .lr = 0.1, .momentum = 0.9, .maximize = true}};
static const uint32_t rule_of[PARAMETERS] = {1, 0, 0, 1, 1, 0, 1, 2};

/* A rank's parameters and gradients, or those of the loop that is compared with. */
typedef struct model {
  void *values[PARAMETERS];
  void *gradients[PARAMETERS];
  uint64_t steps[PARAMETERS];
  void *states[PARAMETERS][EVEN_OPTIM_STATES]; /* of the loop */
  float *wide[PARAMETERS];
} model;

static bool is_short(even_dtype dtype) {
  return dtype == EVEN_F16 || dtype == EVEN_BF16;
}

static void store(void *to, even_dtype dtype, size_t i, double x) {
  float single = (float)x;
  if (dtype == EVEN_F64) {
    ((double *)to)[i] = x;
  } else if (dtype == EVEN_F32) {
    ((float *)to)[i] = single;
  } else {
    even_kernels_named("portable")->narrow[dtype]((uint16_t *)to + i, &single, 1, 1.0f);
  }
}

static void fill(void *to, size_t p, int step) {
  for (size_t i = 0; i < parameters[p].count; i++) {
    store(to, parameters[p].dtype, i, sin((double)i * 0.37 + (double)p * 5.1 + step * 1.7) * (i % 5 == 0 ? 100 : 1));
  }
}

static model *make(void) {
  model *one = calloc(1, sizeof *one);
  for (size_t p = 0; p < PARAMETERS; p++) {
    size_t count = parameters[p].count + 1; /* never nothing */
    one->values[p] = calloc(count, sizeof(double));
    one->gradients[p] = calloc(count, sizeof(double));
    one->wide[p] = calloc(count, sizeof(float));
    for (int k = 0; k < EVEN_OPTIM_STATES; k++) {
      one->states[p][k] = calloc(count, sizeof(double));
    }
    fill(one->values[p], p, 0);
  }
  return one;
}

static void drop(model *one) {
  for (size_t p = 0; p < PARAMETERS; p++) {
    free(one->values[p]);
    free(one->gradients[p]);
    free(one->wide[p]);
    for (int k = 0; k < EVEN_OPTIM_STATES; k++) {
      free(one->states[p][k]);
    }
  }
  free(one);
}

/* The gradients of a step; whether each parameter has one. */
static void turn(model *one, int step, bool *has) {
  for (size_t p = 0; p < PARAMETERS; p++) {
    has[p] = p != 2 && (p != 4 || step > 1);
    fill(one->gradients[p], p, step);
    one->steps[p] += has[p];
  }
}

/* One step in one loop a parameter. */
static void loop(model *one, int step) {
  bool has[PARAMETERS];
  turn(one, step, has);
  for (size_t p = 0; p < PARAMETERS; p++) {
    const even_optim_rule *rule = &rules[rule_of[p]];
    size_t count = parameters[p].count;
    even_dtype dtype = parameters[p].dtype;
    even_optim_factors factors;
    if (!has[p]) {
      continue;
    }
    even_optim_factors_of(rule, one->steps[p], &factors);
    const even_optim_kernels *kernels = even_optim_kernels_best();
    if (dtype == EVEN_F64) {
      double *const states[] = {one->states[p][0], one->states[p][1], rule->amsgrad ? one->states[p][2] : NULL};
      kernels->f64[rule->method](&factors, one->values[p], one->gradients[p], states, count);
      continue;
    }
    bool adam = rule->method != EVEN_OPTIM_SGD;
    float *const states[] = {one->states[p][0], adam ? one->states[p][1] : NULL,
                             rule->amsgrad ? one->states[p][2] : NULL};
    if (!is_short(dtype)) {
      kernels->f32[rule->method](&factors, one->values[p], one->gradients[p], states, count);
      continue;
    }
    float *gradient = calloc(count, sizeof *gradient);
    if (step == 1) {
      even_kernels_best()->widen[dtype](one->wide[p], one->values[p], count);
    }
    even_kernels_best()->widen[dtype](gradient, one->gradients[p], count);
    kernels->f32[rule->method](&factors, one->wide[p], gradient, states, count);
    even_kernels_best()->narrow[dtype](one->values[p], one->wide[p], count, 1.0f);
    free(gradient);
  }
}

static even_status step_once(even_optim *optim, model *one, int step, even_optim_report *report) {
  bool has[PARAMETERS];
  even_optim_input inputs[PARAMETERS];
  turn(one, step, has);
  for (size_t p = 0; p < PARAMETERS; p++) {
    inputs[p] = (even_optim_input){.values = one->values[p],
                                   .gradient = has[p] ? one->gradients[p] : NULL,
                                   .rule = rule_of[p],
                                   .step = one->steps[p]};
  }
  return even_optim_step(optim, rules, MOST_RULES, inputs, report);
}

static bool same(even_optim *optim, const model *mine, const model *theirs) {
  for (size_t p = 0; p < PARAMETERS; p++) {
    size_t count = parameters[p].count;
    const void *values = even_optim_state(optim, p, parameters[p].states);
    if ((values != NULL) != is_short(parameters[p].dtype) ||
        (values != NULL && memcmp(values, theirs->wide[p], count * sizeof(float)) != 0)) {
      print_error("values in fp32 of parameter %zu\n", p);
      return false;
    }
    size_t wide = parameters[p].dtype == EVEN_F64 ? sizeof(double) : sizeof(float);
    if (memcmp(mine->values[p], theirs->values[p], count * even_dtype_bytes(parameters[p].dtype)) != 0) {
      print_error("values of parameter %zu\n", p);
      return false;
    }
    for (int k = 0; k < parameters[p].states; k++) {
      if (memcmp(even_optim_state(optim, p, k), theirs->states[p][k], count * wide) != 0) {
        print_error("state %d of parameter %zu\n", k, p);
        return false;
      }
    }
  }
  return true;
}

static void give_what_a_loop_gives(void **state) {
  (void)state;
  even_optim *optim = NULL;
  even_optim_report report;
  model *mine = make();
  model *theirs = make();
  assert_int_equal(even_optim_open(&params, NULL, &optim), EVEN_OK);
  for (int step = 1; step <= STEPS; step++) {
    loop(theirs, step);
    assert_int_equal(step_once(optim, mine, step, &report), EVEN_OK);
    assert_true(same(optim, mine, theirs));
    assert_true(report.elements == report.all && report.copy_ns < UINT64_MAX);
    assert_int_equal(report.all, 7 + 40000 + (step > 1 ? 20001 : 0) + 18000 + 300 + 5);
  }
  assert_null(even_optim_state(optim, 7, 1));
  assert_null(even_optim_state(optim, PARAMETERS, 0));
  assert_null(even_optim_state(optim, 0, -1));
  even_optim_close(optim);
  drop(mine);
  drop(theirs);
}

/* Values that were changed between two steps count, also those of 16-bit floats. */
static void go_on_from_other_values(void **state) {
  (void)state;
  even_optim *optim = NULL;
  model *mine = make();
  model *theirs = make();
  assert_int_equal(even_optim_open(&params, NULL, &optim), EVEN_OK);
  loop(theirs, 1);
  assert_int_equal(step_once(optim, mine, 1, NULL), EVEN_OK);
  for (size_t p = 0; p < PARAMETERS; p++) {
    for (size_t i = 0; i < parameters[p].count; i += 3) {
      store(mine->values[p], parameters[p].dtype, i, 1000);
      store(theirs->values[p], parameters[p].dtype, i, 1000);
      if (is_short(parameters[p].dtype)) {
        theirs->wide[p][i] = 1000;
      }
    }
  }
  loop(theirs, 2);
  assert_int_equal(step_once(optim, mine, 2, NULL), EVEN_OK);
  assert_true(same(optim, mine, theirs));
  even_optim_close(optim);
  drop(mine);
  drop(theirs);
}

/* On each rank. */
static int step_together(even_comm *comm, void *argument) {
  even_optim *optim = NULL;
  model *mine = make();
  model *theirs = make();
  (void)argument;
  RANKS_EXPECT(comm, even_optim_open(&params, comm, &optim) == EVEN_OK);
  for (int step = 1; step <= STEPS; step++) {
    even_optim_report report;
    uint64_t sum = 0;
    loop(theirs, step);
    RANKS_EXPECT(comm, step_once(optim, mine, step, &report) == EVEN_OK);
    RANKS_EXPECT(comm, same(optim, mine, theirs));
    sum = report.elements;
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, &sum, 1, EVEN_U64, EVEN_SUM) == EVEN_OK);
    RANKS_EXPECT(comm, sum == report.all);
  }
  /* One memory for all. */
  float *shared = even_optim_state(optim, 1, 0);
  if (even_comm_rank(comm) == even_comm_ranks(comm) - 1) {
    shared[17] = 4711.0f;
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  RANKS_EXPECT(comm, shared[17] == 4711.0f);
  even_optim_close(optim);
  drop(mine);
  drop(theirs);
  return 0;
}

static void give_the_same_on_all_ranks(void **state) {
  (void)state;
  for (int ranks = 1; ranks <= 4; ranks++) {
    assert_int_equal(ranks_run(&(ranks_setup){.ranks = ranks, .timeout_seconds = 200}, step_together, NULL, NULL), 0);
  }
  const ranks_setup threads = {.ranks = 3, .timeout_seconds = 200, .threads = true};
  assert_int_equal(ranks_run(&threads, step_together, NULL, NULL), 0);
}

static void refuse_what_is_wrong(void **state) {
  (void)state;
  even_optim *optim = NULL;
  float values[4] = {0};
  even_optim_parameter one[2] = {{2, EVEN_F32, 1}, {0, EVEN_F32, 0}};
  even_optim_params wrong = {.size = sizeof wrong, .parameters = one, .parameter_count = 2};
  wrong.size = 1;
  assert_int_equal(even_optim_open(&wrong, NULL, &optim), EVEN_ERR_ARGUMENT);
  wrong.size = sizeof wrong;
  one[0].dtype = EVEN_I32;
  assert_int_equal(even_optim_open(&wrong, NULL, &optim), EVEN_ERR_ARGUMENT);
  one[0] = (even_optim_parameter){2, EVEN_F32, 4};
  assert_int_equal(even_optim_open(&wrong, NULL, &optim), EVEN_ERR_ARGUMENT);
  one[0] = (even_optim_parameter){SIZE_MAX / 8, EVEN_F32, 3};
  assert_int_equal(even_optim_open(&wrong, NULL, &optim), EVEN_ERR_OVERFLOW);
  one[1].count = SIZE_MAX;
  assert_int_equal(even_optim_open(&wrong, NULL, &optim), EVEN_ERR_OVERFLOW);
  assert_null(optim);
  one[0] = (even_optim_parameter){2, EVEN_F32, 1};
  one[1].count = 0;
  assert_int_equal(even_optim_open(&wrong, NULL, &optim), EVEN_OK);

  even_optim_rule rule = {.method = EVEN_OPTIM_SGD, .lr = 1, .momentum = 0.5};
  even_optim_input inputs[2] = {{.values = values, .gradient = values + 2, .step = 1}, {0}};
  assert_int_equal(even_optim_step(optim, &rule, 1, inputs, NULL), EVEN_OK);
  rule.lr = NAN;
  assert_int_equal(even_optim_step(optim, &rule, 1, inputs, NULL), EVEN_ERR_ARGUMENT);
  rule = (even_optim_rule){.method = EVEN_OPTIM_ADAM, .beta1 = 0.9, .beta2 = 0.9};
  assert_int_equal(even_optim_step(optim, &rule, 1, inputs, NULL), EVEN_ERR_ARGUMENT); /* two states */
  assert_non_null(strstr(even_error_last()->what, "has 1 states, rule 0 wants 2"));
  rule.beta2 = 1;
  assert_int_equal(even_optim_step(optim, &rule, 1, inputs, NULL), EVEN_ERR_ARGUMENT);
  rule = (even_optim_rule){.method = (even_optim_method)3};
  assert_int_equal(even_optim_step(optim, &rule, 1, inputs, NULL), EVEN_ERR_ARGUMENT);
  rule = (even_optim_rule){.method = EVEN_OPTIM_SGD, .lr = 1};
  inputs[0].rule = 1;
  assert_int_equal(even_optim_step(optim, &rule, 1, inputs, NULL), EVEN_ERR_ARGUMENT);
  inputs[0].rule = 0;
  inputs[0].step = 0;
  assert_int_equal(even_optim_step(optim, &rule, 1, inputs, NULL), EVEN_ERR_ARGUMENT);
  inputs[0].step = 1;
  inputs[0].values = NULL;
  assert_int_equal(even_optim_step(optim, &rule, 1, inputs, NULL), EVEN_ERR_ARGUMENT);
  inputs[0].values = (char *)values + 1;
  assert_int_equal(even_optim_step(optim, &rule, 1, inputs, NULL), EVEN_ERR_ARGUMENT);
  inputs[0].gradient = NULL; /* then nothing of it is looked at */
  assert_int_equal(even_optim_step(optim, &rule, 1, inputs, NULL), EVEN_OK);
  even_optim_close(optim);
  even_optim_close(NULL);
}

static int give_others(even_comm *comm, void *argument) {
  even_optim *optim = NULL;
  even_optim_parameter own[PARAMETERS];
  even_optim_params mine = params;
  int *what = argument;
  memcpy(own, parameters, sizeof own);
  mine.parameters = own;
  own[1].states -= even_comm_rank(comm) == 1 ? *what : 0;
  own[1].dtype = even_comm_rank(comm) == 1 && *what == 0 ? EVEN_I32 : EVEN_F32;
  even_status expected = *what > 0 ? EVEN_ERR_MISMATCH : EVEN_ERR_ARGUMENT;
  RANKS_EXPECT(comm, even_optim_open(&mine, comm, &optim) == expected && optim == NULL);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK); /* all have come so far */
  return 0;
}

static void refuse_other_parameters_on_all_ranks(void **state) {
  (void)state;
  for (int what = 0; what <= 1; what++) {
    assert_int_equal(ranks_run(&(ranks_setup){.ranks = 3, .timeout_seconds = 200}, give_others, &what, NULL), 0);
  }
}

static even_status open_and_step(void *context) {
  even_optim *optim = NULL;
  (void)context;
  EVEN_TRY(even_optim_open(&params, NULL, &optim));
  model *mine = make();
  even_status status = step_once(optim, mine, 1, NULL);
  drop(mine);
  even_optim_close(optim);
  return status;
}

static void survive_faults(void **state) {
  (void)state;
  assert_true(fault_each_allocation(open_and_step, NULL) >= 4);
  assert_true(fault_each_os(open_and_step, NULL, ENOMEM) >= 2);
  fault_reset();
}

/* One rank cannot have the memory: all hear of it. */
static int fail_on_one(even_comm *comm, void *argument) {
  even_optim *optim = NULL;
  int *which = argument;
  int own = even_comm_rank(comm);
  if (own == *which) {
    fault_os(FAULT_mmap, 1, ENOMEM);
  }
  even_status status = even_optim_open(&params, comm, &optim);
  fault_reset();
  RANKS_EXPECT(comm, status == EVEN_ERR_MEMORY && optim == NULL);
  RANKS_EXPECT(comm, own == *which || even_error_last()->rank == *which);
  RANKS_EXPECT(comm, even_optim_open(&params, comm, &optim) == EVEN_OK); /* the next time it has */
  even_optim_close(optim);
  if (own == *which) { /* without so much it leaves the group */
    fault_allocation(1);
  }
  status = even_optim_open(&params, comm, &optim);
  fault_reset();
  RANKS_EXPECT(comm, status == (own == *which ? EVEN_ERR_MEMORY : EVEN_ERR_REVOKED));
  return 0;
}

static void fail_together(void **state) {
  (void)state;
  for (int which = 0; which <= 1; which++) {
    assert_int_equal(ranks_run(&(ranks_setup){.ranks = 3, .timeout_seconds = 200}, fail_on_one, &which, NULL), 0);
  }
}

static int die_before_a_step(even_comm *comm, void *argument) {
  even_optim *optim = NULL;
  model *mine = make();
  (void)argument;
  RANKS_EXPECT(comm, even_optim_open(&params, comm, &optim) == EVEN_OK);
  RANKS_EXPECT(comm, step_once(optim, mine, 1, NULL) == EVEN_OK);
  if (even_comm_rank(comm) == 1) {
    (void)raise(SIGKILL);
  }
  RANKS_EXPECT(comm, step_once(optim, mine, 2, NULL) == EVEN_ERR_PEER_LOST && even_error_last()->rank == 1);
  even_optim_close(optim);
  drop(mine);
  return 0;
}

static void end_where_a_rank_is_lost(void **state) {
  (void)state;
  int results[3];
  const ranks_setup setup = {.ranks = 3, .timeout_seconds = 200};
  assert_int_equal(ranks_run(&setup, die_before_a_step, NULL, results), 1);
  assert_int_equal(results[1], RANKS_KILLED);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(give_what_a_loop_gives),
      cmocka_unit_test(go_on_from_other_values),
      cmocka_unit_test(give_the_same_on_all_ranks),
      cmocka_unit_test(refuse_what_is_wrong),
      cmocka_unit_test(refuse_other_parameters_on_all_ranks),
      cmocka_unit_test(survive_faults),
      cmocka_unit_test(fail_together),
      cmocka_unit_test(end_where_a_rank_is_lost),
  };
  return cmocka_run_group_tests_name("optim", tests, NULL, NULL);
}
