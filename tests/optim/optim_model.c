#include "optim/optim_model.h"

#include "comm/kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const even_optim_parameter model_parameters[PARAMETERS] = {
    {7, EVEN_F32, 3},     {40000, EVEN_F32, 2},  {11, EVEN_F32, 2},  {0, EVEN_F32, 3},
    {20001, EVEN_F64, 3}, {18000, EVEN_BF16, 2}, {300, EVEN_F16, 3}, {5, EVEN_F32, 1}};

const even_optim_params model_all = {
    .size = sizeof model_all, .parameters = model_parameters, .parameter_count = PARAMETERS};

const even_optim_rule model_rules[MOST_RULES] = {
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

static bool is_short(even_dtype dtype) {
  return dtype == EVEN_F16 || dtype == EVEN_BF16;
}

void model_store(void *to, even_dtype dtype, size_t i, double x) {
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
  for (size_t i = 0; i < model_parameters[p].count; i++) {
    model_store(to, model_parameters[p].dtype, i,
                sin((double)i * 0.37 + (double)p * 5.1 + step * 1.7) * (i % 5 == 0 ? 100 : 1));
  }
}

model *model_make(void) {
  model *one = calloc(1, sizeof *one);
  for (size_t p = 0; p < PARAMETERS; p++) {
    size_t count = model_parameters[p].count + 1; /* never nothing */
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

void model_drop(model *one) {
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

static void turn(model *one, int step, bool *has) {
  for (size_t p = 0; p < PARAMETERS; p++) {
    has[p] = p != 2 && (p != 4 || step > 1);
    fill(one->gradients[p], p, step);
    one->steps[p] += has[p];
  }
}

static double squares(const void *gradient, even_dtype dtype, size_t first, size_t count) {
  float widened[2048];
  const void *from = (const char *)gradient + first * even_dtype_bytes(dtype);
  if (dtype == EVEN_F64) {
    return even_optim_kernels_best()->square_f64(from, count);
  }
  if (is_short(dtype)) {
    even_kernels_best()->widen[dtype](widened, from, count);
    from = widened;
  }
  return even_optim_kernels_best()->square_f32(from, count);
}

double model_norm(const model *one, const bool *has) {
  double whole = 0;
  double piece = 0;
  size_t left = 16384;
  for (size_t p = 0; p < PARAMETERS; p++) {
    size_t block = 0;
    for (size_t first = 0; first < model_parameters[p].count; first += block) {
      block = model_parameters[p].count - first;
      block = block < left ? block : left;
      block = block < 2048 ? block : 2048;
      piece += has[p] ? squares(one->gradients[p], model_parameters[p].dtype, first, block) : 0;
      left -= block;
      if (left == 0) {
        whole += piece;
        piece = 0;
        left = 16384;
      }
    }
  }
  return sqrt(whole + piece);
}

void model_loop(model *one, int step) {
  bool has[PARAMETERS];
  turn(one, step, has);
  double part = one->max_norm == 0 ? 1 : one->max_norm / (model_norm(one, has) + 1e-6);
  for (size_t p = 0; p < PARAMETERS; p++) {
    const even_optim_rule *rule = &model_rules[rule_of[p]];
    size_t count = model_parameters[p].count;
    even_dtype dtype = model_parameters[p].dtype;
    even_optim_factors factors;
    if (!has[p]) {
      continue;
    }
    even_optim_factors_of(rule, one->steps[p], &factors);
    factors.scale *= part >= 1 ? 1 : part;
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

void model_turn(model *one, int step, even_optim_input *inputs) {
  bool has[PARAMETERS];
  turn(one, step, has);
  for (size_t p = 0; p < PARAMETERS; p++) {
    inputs[p] = (even_optim_input){.values = one->values[p],
                                   .gradient = has[p] ? one->gradients[p] : NULL,
                                   .rule = rule_of[p],
                                   .step = one->steps[p]};
  }
}

even_status model_step(even_optim *optim, model *one, int step, even_optim_report *report) {
  even_optim_input inputs[PARAMETERS];
  model_turn(one, step, inputs);
  even_optim_job job = {.size = sizeof job,
                        .rules = model_rules,
                        .rule_count = MOST_RULES,
                        .inputs = inputs,
                        .max_norm = one->max_norm,
                        .waits = one->waits,
                        .waits_context = one->waits_context};
  return even_optim_step(optim, &job, report);
}

bool model_is_same(even_optim *optim, const model *mine, const model *theirs) {
  for (size_t p = 0; p < PARAMETERS; p++) {
    size_t count = model_parameters[p].count;
    const void *values = optim == NULL ? NULL : even_optim_state(optim, p, model_parameters[p].states);
    if (optim != NULL && (values != NULL) != is_short(model_parameters[p].dtype)) {
      (void)fprintf(stderr, "parameter %zu has values in fp32, or lacks them\n", p);
      return false;
    }
    if (values != NULL && memcmp(values, theirs->wide[p], count * sizeof(float)) != 0) {
      (void)fprintf(stderr, "values in fp32 of parameter %zu\n", p);
      return false;
    }
    size_t wide = model_parameters[p].dtype == EVEN_F64 ? sizeof(double) : sizeof(float);
    if (memcmp(mine->values[p], theirs->values[p], count * even_dtype_bytes(model_parameters[p].dtype)) != 0) {
      (void)fprintf(stderr, "values of parameter %zu\n", p);
      return false;
    }
    for (int k = 0; k < model_parameters[p].states && optim != NULL; k++) {
      if (memcmp(even_optim_state(optim, p, k), theirs->states[p][k], count * wide) != 0) {
        (void)fprintf(stderr, "state %d of parameter %zu\n", k, p);
        return false;
      }
    }
  }
  return true;
}
