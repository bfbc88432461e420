/* The steps as loops that the compiler vectorises. Included once by each kernels_*.c, which defines EVEN_OPTIM_TABLE
 * and EVEN_OPTIM_NAME. */
#include "optim/kernels.h"

#include <math.h>

/* Nothing overlaps (kernels.h). */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

/* What is the same for all elements is decided outside of the loops: each combination is a loop of its own. */
#define ALWAYS static inline __attribute__((always_inline)) void

#define LOOPS(suffix, type, root)                                                                                  \
  ALWAYS sgd_plain_##suffix(const even_optim_factors *f, type *values, const type *gradient, size_t count,         \
                            bool decays) {                                                                         \
    const type scale = (type)f->scale;                                                                             \
    const type decay = (type)f->decay;                                                                             \
    const type rate = (type)f->rate;                                                                               \
    INDEPENDENT for (size_t i = 0; i < count; i++) {                                                               \
      type v = values[i];                                                                                          \
      type g = scale * gradient[i];                                                                                \
      g = decays ? g + decay * v : g;                                                                              \
      values[i] = v - rate * g;                                                                                    \
    }                                                                                                              \
  }                                                                                                                \
  ALWAYS sgd_momentum_##suffix(const even_optim_factors *f, type *values, const type *gradient, type *buffer,      \
                               size_t count, bool decays, bool first, bool nesterov) {                             \
    const type scale = (type)f->scale;                                                                             \
    const type decay = (type)f->decay;                                                                             \
    const type rate = (type)f->rate;                                                                               \
    const type keep = (type)f->keep1;                                                                              \
    const type take = (type)f->take1;                                                                              \
    INDEPENDENT for (size_t i = 0; i < count; i++) {                                                               \
      type v = values[i];                                                                                          \
      type g = scale * gradient[i];                                                                                \
      g = decays ? g + decay * v : g;                                                                              \
      type b = first ? g : keep * buffer[i] + take * g;                                                            \
      buffer[i] = b;                                                                                               \
      g = nesterov ? g + keep * b : b;                                                                             \
      values[i] = v - rate * g;                                                                                    \
    }                                                                                                              \
  }                                                                                                                \
  static void sgd_##suffix(const even_optim_factors *f, type *values, const type *gradient, type *const *states,   \
                           size_t count) {                                                                         \
    bool decays = f->decay != 0;                                                                                   \
    if (states[0] == NULL) {                                                                                       \
      if (decays) {                                                                                                \
        sgd_plain_##suffix(f, values, gradient, count, true);                                                      \
      } else {                                                                                                     \
        sgd_plain_##suffix(f, values, gradient, count, false);                                                     \
      }                                                                                                            \
      return;                                                                                                      \
    }                                                                                                              \
    switch ((decays ? 4 : 0) + (f->first ? 2 : 0) + (f->nesterov ? 1 : 0)) {                                       \
      case 0:                                                                                                      \
        sgd_momentum_##suffix(f, values, gradient, states[0], count, false, false, false);                         \
        break;                                                                                                     \
      case 1:                                                                                                      \
        sgd_momentum_##suffix(f, values, gradient, states[0], count, false, false, true);                          \
        break;                                                                                                     \
      case 2:                                                                                                      \
        sgd_momentum_##suffix(f, values, gradient, states[0], count, false, true, false);                          \
        break;                                                                                                     \
      case 3:                                                                                                      \
        sgd_momentum_##suffix(f, values, gradient, states[0], count, false, true, true);                           \
        break;                                                                                                     \
      case 4:                                                                                                      \
        sgd_momentum_##suffix(f, values, gradient, states[0], count, true, false, false);                          \
        break;                                                                                                     \
      case 5:                                                                                                      \
        sgd_momentum_##suffix(f, values, gradient, states[0], count, true, false, true);                           \
        break;                                                                                                     \
      case 6:                                                                                                      \
        sgd_momentum_##suffix(f, values, gradient, states[0], count, true, true, false);                           \
        break;                                                                                                     \
      default:                                                                                                     \
        sgd_momentum_##suffix(f, values, gradient, states[0], count, true, true, true);                            \
        break;                                                                                                     \
    }                                                                                                              \
  }                                                                                                                \
  /* decays: by the gradient (Adam); else v is multiplied, which is nothing where the factor is 1. */              \
  ALWAYS moments_##suffix(const even_optim_factors *f, type *values, const type *gradient, type *const *states,    \
                          size_t count, bool decoupled, bool decays, bool amsgrad) {                               \
    type *first = states[0];                                                                                       \
    type *second = states[1];                                                                                      \
    type *most = states[2];                                                                                        \
    const type scale = (type)f->scale;                                                                             \
    const type decay = (type)f->decay;                                                                             \
    const type rate = (type)f->rate;                                                                               \
    const type take1 = (type)f->take1;                                                                             \
    const type keep2 = (type)f->keep2;                                                                             \
    const type take2 = (type)f->take2;                                                                             \
    const type root2 = (type)f->root2;                                                                             \
    const type eps = (type)f->eps;                                                                                 \
    INDEPENDENT for (size_t i = 0; i < count; i++) {                                                               \
      type v = values[i];                                                                                          \
      type g = scale * gradient[i];                                                                                \
      g = decays ? g + decay * v : g;                                                                              \
      v = decoupled ? v * decay : v;                                                                               \
      type m = first[i] + take1 * (g - first[i]);                                                                  \
      type s = keep2 * second[i] + take2 * (g * g);                                                                \
      first[i] = m;                                                                                                \
      second[i] = s;                                                                                               \
      if (amsgrad) {                                                                                               \
        type x = most[i];                                                                                          \
        x = x > s || x != x ? x : s; /* NaN wins, of either */                                                     \
        most[i] = x;                                                                                               \
        s = x;                                                                                                     \
      }                                                                                                            \
      values[i] = v - rate * (m / (root(s) / root2 + eps));                                                        \
    }                                                                                                              \
  }                                                                                                                \
  static void adam_##suffix(const even_optim_factors *f, type *values, const type *gradient, type *const *states,  \
                            size_t count) {                                                                        \
    if (f->decay != 0 && f->amsgrad) {                                                                             \
      moments_##suffix(f, values, gradient, states, count, false, true, true);                                     \
    } else if (f->decay != 0) {                                                                                    \
      moments_##suffix(f, values, gradient, states, count, false, true, false);                                    \
    } else if (f->amsgrad) {                                                                                       \
      moments_##suffix(f, values, gradient, states, count, false, false, true);                                    \
    } else {                                                                                                       \
      moments_##suffix(f, values, gradient, states, count, false, false, false);                                   \
    }                                                                                                              \
  }                                                                                                                \
  static void adamw_##suffix(const even_optim_factors *f, type *values, const type *gradient, type *const *states, \
                             size_t count) {                                                                       \
    if (f->amsgrad) {                                                                                              \
      moments_##suffix(f, values, gradient, states, count, true, false, true);                                     \
    } else {                                                                                                       \
      moments_##suffix(f, values, gradient, states, count, true, false, false);                                    \
    }                                                                                                              \
  }
/* Element i is added to sum i % LANES; then the sums, two by two. */
#define LANES 16
#define SQUARE(suffix, type)                                          \
  static double square_##suffix(const type *elements, size_t count) { \
    double sums[LANES] = {0};                                         \
    size_t whole = count - count % LANES;                             \
    for (size_t i = 0; i < whole; i += LANES) {                       \
      for (size_t k = 0; k < LANES; k++) {                            \
        sums[k] += (double)elements[i + k] * (double)elements[i + k]; \
      }                                                               \
    }                                                                 \
    for (size_t i = whole; i < count; i++) {                          \
      sums[i - whole] += (double)elements[i] * (double)elements[i];   \
    }                                                                 \
    for (size_t width = LANES / 2; width > 0; width /= 2) {           \
      for (size_t k = 0; k < width; k++) {                            \
        sums[k] += sums[k + width];                                   \
      }                                                               \
    }                                                                 \
    return sums[0];                                                   \
  }
SQUARE(f32, float)
SQUARE(f64, double)

LOOPS(f32, float, sqrtf)
LOOPS(f64, double, sqrt)

const even_optim_kernels EVEN_OPTIM_TABLE = {.name = EVEN_OPTIM_NAME,
                                             .f32 = {sgd_f32, adam_f32, adamw_f32},
                                             .f64 = {sgd_f64, adam_f64, adamw_f64},
                                             .square_f32 = square_f32,
                                             .square_f64 = square_f64};
