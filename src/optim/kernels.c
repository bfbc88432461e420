/* Which instruction set the steps use, and what of a rule is the same for all elements. */
#include "optim/kernels.h"

#include "comm/kernels.h"

#include <math.h>
#include <string.h>

static double power(double base, uint64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1) {
    result = exponent & 1 ? result * base : result;
    base = base * base;
  }
  return result;
}

void even_optim_factors_of(const even_optim_rule *rule, uint64_t step, even_optim_factors *out) {
  *out = (even_optim_factors){.nesterov = rule->nesterov,
                              .scale = rule->maximize ? -1 : 1,
                              .first = step == 1,
                              .decay = rule->weight_decay,
                              .rate = rule->lr,
                              .keep1 = rule->momentum,
                              .take1 = 1 - rule->dampening};
  if (rule->method == EVEN_OPTIM_SGD) {
    return;
  }
  out->amsgrad = rule->amsgrad;
  out->decay = rule->method == EVEN_OPTIM_ADAMW ? 1 - rule->lr * rule->weight_decay : rule->weight_decay;
  out->rate = rule->lr / (1 - power(rule->beta1, step));
  out->keep1 = rule->beta1;
  out->take1 = 1 - rule->beta1;
  out->keep2 = rule->beta2;
  out->take2 = 1 - rule->beta2;
  out->root2 = sqrt(1 - power(rule->beta2, step));
  out->eps = rule->eps;
}

const even_optim_kernels *even_optim_kernels_best(void) {
  const even_optim_kernels *found = even_optim_kernels_named(even_kernels_best()->name);
  return found == NULL ? &even_optim_kernels_portable : found;
}

const even_optim_kernels *even_optim_kernels_named(const char *name) {
  if (strcmp(name, even_optim_kernels_portable.name) == 0) {
    return &even_optim_kernels_portable;
  }
#if defined(__x86_64__)
  if (even_kernels_named(name) != NULL) { /* this machine can run it */
    return strcmp(name, even_optim_kernels_avx512.name) == 0 ? &even_optim_kernels_avx512
           : strcmp(name, even_optim_kernels_avx2.name) == 0 ? &even_optim_kernels_avx2
                                                             : NULL;
  }
#endif
  return NULL;
}
