/* Optimizers' steps: to the last bit what one loop over each parameter gives, whoever did which piece. */
#include "base/fail.h"
#include "comm/kernels.h"
#include "comm/ranks.h"
#include "optim/optim_model.h"
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

static void give_what_a_loop_gives(void **state) {
  (void)state;
  even_optim *optim = NULL;
  even_optim_report report;
  model *mine = model_make();
  model *theirs = model_make();
  assert_int_equal(even_optim_open(&model_all, NULL, &optim), EVEN_OK);
  for (int step = 1; step <= STEPS; step++) {
    model_loop(theirs, step);
    assert_int_equal(model_step(optim, mine, step, &report), EVEN_OK);
    assert_true(model_is_same(optim, mine, theirs));
    assert_true(report.elements == report.all && report.copy_ns < UINT64_MAX);
    assert_int_equal(report.all, 7 + 40000 + (step > 1 ? 20001 : 0) + 18000 + 300 + 5);
  }
  assert_null(even_optim_state(optim, 7, 1));
  assert_null(even_optim_state(optim, PARAMETERS, 0));
  assert_null(even_optim_state(optim, 0, -1));
  even_optim_close(optim);
  model_drop(mine);
  model_drop(theirs);
}

/* Values that were changed between two steps count, also those of 16-bit floats. */
static void go_on_from_other_values(void **state) {
  (void)state;
  even_optim *optim = NULL;
  model *mine = model_make();
  model *theirs = model_make();
  assert_int_equal(even_optim_open(&model_all, NULL, &optim), EVEN_OK);
  model_loop(theirs, 1);
  assert_int_equal(model_step(optim, mine, 1, NULL), EVEN_OK);
  for (size_t p = 0; p < PARAMETERS; p++) {
    for (size_t i = 0; i < model_parameters[p].count; i += 3) {
      model_store(mine->values[p], model_parameters[p].dtype, i, 1000);
      model_store(theirs->values[p], model_parameters[p].dtype, i, 1000);
      if (even_dtype_bytes(model_parameters[p].dtype) == 2) {
        theirs->wide[p][i] = 1000;
      }
    }
  }
  model_loop(theirs, 2);
  assert_int_equal(model_step(optim, mine, 2, NULL), EVEN_OK);
  assert_true(model_is_same(optim, mine, theirs));
  even_optim_close(optim);
  model_drop(mine);
  model_drop(theirs);
}

/* On each rank. */
static int step_together(even_comm *comm, void *argument) {
  even_optim *optim = NULL;
  model *mine = model_make();
  model *theirs = model_make();
  (void)argument;
  RANKS_EXPECT(comm, even_optim_open(&model_all, comm, &optim) == EVEN_OK);
  for (int step = 1; step <= STEPS; step++) {
    even_optim_report report;
    uint64_t sum = 0;
    model_loop(theirs, step);
    RANKS_EXPECT(comm, model_step(optim, mine, step, &report) == EVEN_OK);
    RANKS_EXPECT(comm, model_is_same(optim, mine, theirs));
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
  model_drop(mine);
  model_drop(theirs);
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
  even_optim_job job = {.size = sizeof job, .rules = &rule, .rule_count = 1, .inputs = inputs};
  assert_int_equal(even_optim_step(optim, &job, NULL), EVEN_OK);
  rule.lr = NAN;
  assert_int_equal(even_optim_step(optim, &job, NULL), EVEN_ERR_ARGUMENT);
  rule = (even_optim_rule){.method = EVEN_OPTIM_ADAM, .beta1 = 0.9, .beta2 = 0.9};
  assert_int_equal(even_optim_step(optim, &job, NULL), EVEN_ERR_ARGUMENT); /* two states */
  assert_non_null(strstr(even_error_last()->what, "has 1 states, rule 0 wants 2"));
  rule.beta2 = 1;
  assert_int_equal(even_optim_step(optim, &job, NULL), EVEN_ERR_ARGUMENT);
  rule = (even_optim_rule){.method = (even_optim_method)3};
  assert_int_equal(even_optim_step(optim, &job, NULL), EVEN_ERR_ARGUMENT);
  rule = (even_optim_rule){.method = EVEN_OPTIM_SGD, .lr = 1};
  inputs[0].rule = 1;
  assert_int_equal(even_optim_step(optim, &job, NULL), EVEN_ERR_ARGUMENT);
  inputs[0].rule = 0;
  inputs[0].step = 0;
  assert_int_equal(even_optim_step(optim, &job, NULL), EVEN_ERR_ARGUMENT);
  inputs[0].step = 1;
  inputs[0].values = NULL;
  assert_int_equal(even_optim_step(optim, &job, NULL), EVEN_ERR_ARGUMENT);
  inputs[0].values = (char *)values + 1;
  assert_int_equal(even_optim_step(optim, &job, NULL), EVEN_ERR_ARGUMENT);
  inputs[0].gradient = NULL; /* then nothing of it is looked at */
  assert_int_equal(even_optim_step(optim, &job, NULL), EVEN_OK);
  even_optim_close(optim);
  even_optim_close(NULL);
}

static int give_others(even_comm *comm, void *argument) {
  even_optim *optim = NULL;
  even_optim_parameter own[PARAMETERS];
  even_optim_params mine = model_all;
  int *what = argument;
  memcpy(own, model_parameters, sizeof own);
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
  EVEN_TRY(even_optim_open(&model_all, NULL, &optim));
  model *mine = model_make();
  even_status status = model_step(optim, mine, 1, NULL);
  model_drop(mine);
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
  even_status status = even_optim_open(&model_all, comm, &optim);
  fault_reset();
  RANKS_EXPECT(comm, status == EVEN_ERR_MEMORY && optim == NULL);
  RANKS_EXPECT(comm, own == *which || even_error_last()->rank == *which);
  RANKS_EXPECT(comm, even_optim_open(&model_all, comm, &optim) == EVEN_OK); /* the next time it has */
  even_optim_close(optim);
  if (own == *which) { /* without so much it leaves the group */
    fault_allocation(1);
  }
  status = even_optim_open(&model_all, comm, &optim);
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
  model *mine = model_make();
  (void)argument;
  RANKS_EXPECT(comm, even_optim_open(&model_all, comm, &optim) == EVEN_OK);
  RANKS_EXPECT(comm, model_step(optim, mine, 1, NULL) == EVEN_OK);
  if (even_comm_rank(comm) == 1) {
    (void)raise(SIGKILL);
  }
  RANKS_EXPECT(comm, model_step(optim, mine, 2, NULL) == EVEN_ERR_PEER_LOST && even_error_last()->rank == 1);
  even_optim_close(optim);
  model_drop(mine);
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
