/* What a step does to elements, one table of functions for each instruction set; the same bits from all of them. */
#ifndef EVEN_OPTIM_KERNELS_H
#define EVEN_OPTIM_KERNELS_H

#include <evenstep/optim.h>

/* A rule at one parameter's step, worked out in fp64 and then, in the loops, rounded once to the elements' type. */
typedef struct even_optim_factors {
  bool amsgrad, nesterov;
  bool first;          /* SGD: the momentum buffer is to begin as the gradient */
  double scale;        /* what the gradient is multiplied by: -1 where the rule maximizes, else 1, or, clipped, less */
  double decay;        /* SGD, Adam: weight_decay; AdamW: 1 - lr * weight_decay */
  double rate;         /* SGD: lr; Adam, AdamW: lr / (1 - beta1^step) */
  double keep1, take1; /* SGD: momentum, 1 - dampening; else beta1, 1 - beta1 */
  double keep2, take2; /* beta2, 1 - beta2 */
  double root2;        /* sqrt(1 - beta2^step) */
  double eps;
} even_optim_factors;

/* Powers by repeated products, so that they do not depend on the machine's libm. */
void even_optim_factors_of(const even_optim_rule *rule, uint64_t step, even_optim_factors *out);

/* values[i] and states[k][i] (k < the method's states; NULL where there is none) change by gradient[i]. Nothing
 * overlaps. Pointers are aligned to their element. In C's order of evaluation, each operation rounded once:
 *
 *     g = scale * gradient
 *     SGD:   g += decay * v (where decay != 0); with a buffer b: b = first ? g : keep1 * b + take1 * g;
 *            g = nesterov ? g + keep1 * b : b;
 *            v -= rate * g
 *     Adam:  g += decay * v (where decay != 0); AdamW: v *= decay
 *            m += take1 * (g - m);  s = keep2 * s + take2 * (g * g);
 *            amsgrad: x = max(x, s), of which NaN wins
 *            v -= rate * (m / (sqrt(amsgrad ? x : s) / root2 + eps))
 */
typedef void even_optim_f32(const even_optim_factors *factors, float *values, const float *gradient,
                            float *const *states, size_t count);
typedef void even_optim_f64(const even_optim_factors *factors, double *values, const double *gradient,
                            double *const *states, size_t count);

/* The sum of the squares of `count` elements, in fp64 and in one order on every instruction set. */
typedef double even_optim_square_f32(const float *elements, size_t count);
typedef double even_optim_square_f64(const double *elements, size_t count);

#define EVEN_OPTIM_METHODS 3

typedef struct even_optim_kernels {
  const char *name; /* as those of comm/kernels.h: "portable", "avx2", "avx512" */
  even_optim_f32 *f32[EVEN_OPTIM_METHODS];
  even_optim_f64 *f64[EVEN_OPTIM_METHODS];
  even_optim_square_f32 *square_f32;
  even_optim_square_f64 *square_f64;
} even_optim_kernels;

/* Those that go with even_kernels_best() (comm/kernels.h). Any thread. */
const even_optim_kernels *even_optim_kernels_best(void);
/* The table of that name, NULL where this build or machine lacks it (for tests and benches). */
const even_optim_kernels *even_optim_kernels_named(const char *name);

extern const even_optim_kernels even_optim_kernels_portable;
extern const even_optim_kernels even_optim_kernels_avx2;
extern const even_optim_kernels even_optim_kernels_avx512;

#endif
