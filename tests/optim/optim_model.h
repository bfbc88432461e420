/* A model whose parameters are stepped on by an optimizer, and beside it by one loop a parameter: what they have after
 * each step has to be the same to the last bit. */
#ifndef EVEN_TEST_OPTIM_MODEL_H
#define EVEN_TEST_OPTIM_MODEL_H

#include "optim/kernels.h"

#include <evenstep/optim.h>

enum { PARAMETERS = 8, STEPS = 5, MOST_RULES = 3 };

/* The third never has a gradient, the fifth from the second step on. */
extern const even_optim_parameter model_parameters[PARAMETERS];
extern const even_optim_params model_all;
extern const even_optim_rule model_rules[MOST_RULES];

/* A rank's parameters and gradients, or those of the loop that is compared with. */
typedef struct model {
  void *values[PARAMETERS];
  void *gradients[PARAMETERS];
  uint64_t steps[PARAMETERS];
  void *states[PARAMETERS][EVEN_OPTIM_STATES]; /* of the loop */
  float *wide[PARAMETERS];
  double max_norm;              /* of the steps to come, as in even_optim_job, */
  void (*waits)(void *context); /* and these */
  void *waits_context;
} model;

model *model_make(void);
void model_drop(model *one);
/* Element i of memory of that type. */
void model_store(void *to, even_dtype dtype, size_t i, double x);
/* The gradients of a step (1, …), and what a step on them is given, one a parameter. */
void model_turn(model *one, int step, even_optim_input *inputs);
/* The norm of the gradients, those of which `has` says that they are there, in the order in which squares are added. */
double model_norm(const model *one, const bool *has);
/* One step in one loop a parameter. */
void model_loop(model *one, int step);
/* The same by an optimizer. */
even_status model_step(even_optim *optim, model *one, int step, even_optim_report *report);
/* Whether `mine` and the states (NULL: these are not looked at) are what `theirs` has, which a loop stepped on; says
 * where not. */
bool model_is_same(even_optim *optim, const model *mine, const model *theirs);

#endif
