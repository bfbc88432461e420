/* The loops over elements of exact sums. */
#include "sync/exact_loops.h"

#include "base/checked.h"
#include "comm/kernels.h"

#include <string.h>

enum { BLOCK = 256 }; /* 16-bit floats are widened and narrowed so many at a time */

/* `sum` and what is added never overlap but in whole. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define LOOPS(name, type)                                                                       \
  static void take_##name(type *sum, const type *gradient, size_t count, type weight) {         \
    INDEPENDENT for (size_t i = 0; i < count; i++) {                                            \
      sum[i] = weight * gradient[i];                                                            \
    }                                                                                           \
  }                                                                                             \
  static void take_and_add_##name(type *sum, const type *gradient, size_t count, type weight) { \
    INDEPENDENT for (size_t i = 0; i < count; i++) {                                            \
      type product = weight * gradient[i];                                                      \
      sum[i] = sum[i] + product;                                                                \
    }                                                                                           \
  }                                                                                             \
  static void add_zero_##name(type *sum, size_t count) {                                        \
    for (size_t i = 0; i < count; i++) {                                                        \
      sum[i] = sum[i] + (type)0; /* -0 becomes +0, as in every other place of the tree */       \
    }                                                                                           \
  }                                                                                             \
  static void join_##name(type *left, const type *right, size_t count) {                        \
    INDEPENDENT for (size_t i = 0; i < count; i++) {                                            \
      left[i] = left[i] + right[i];                                                             \
    }                                                                                           \
  }                                                                                             \
  static void give_##name(type *target, const type *sum, size_t count, type weight) {           \
    INDEPENDENT for (size_t i = 0; i < count; i++) {                                            \
      target[i] = sum[i] / weight;                                                              \
    }                                                                                           \
  }
LOOPS(F32, float)
LOOPS(F64, double)

even_dtype even_exact_wide(even_dtype dtype) {
  return dtype == EVEN_F64 ? EVEN_F64 : EVEN_F32;
}

static void take_short(float *sum, const uint16_t *gradient, even_dtype dtype, size_t count, float weight, bool add) {
  float wide[BLOCK];
  for (size_t first = 0; first < count; first += BLOCK) {
    size_t some = even_least_size(count - first, BLOCK);
    even_kernels_best()->widen[dtype](wide, gradient + first, some);
    (add ? take_and_add_F32 : take_F32)(sum + first, wide, some, weight);
  }
}

static void take_nothing(void *sum, even_dtype wide, size_t count, bool add) {
  if (!add) {
    memset(sum, 0, count * even_dtype_bytes(wide));
  } else if (wide == EVEN_F64) {
    add_zero_F64(sum, count);
  } else {
    add_zero_F32(sum, count);
  }
}

void even_exact_take(void *sum, const void *gradient, even_dtype dtype, size_t count, double weight, bool add) {
  if (gradient == NULL) {
    take_nothing(sum, even_exact_wide(dtype), count, add);
  } else if (dtype == EVEN_F64) {
    (add ? take_and_add_F64 : take_F64)(sum, gradient, count, weight);
  } else if (dtype == EVEN_F32) {
    (add ? take_and_add_F32 : take_F32)(sum, gradient, count, (float)weight);
  } else {
    take_short(sum, gradient, dtype, count, (float)weight, add);
  }
}

void even_exact_join(void *left, const void *right, even_dtype wide, size_t count) {
  if (wide == EVEN_F64) {
    join_F64(left, right, count);
  } else {
    join_F32(left, right, count);
  }
}

static void give_short(uint16_t *target, const float *sum, even_dtype dtype, size_t count, float weight) {
  float mean[BLOCK];
  for (size_t first = 0; first < count; first += BLOCK) {
    size_t some = even_least_size(count - first, BLOCK);
    give_F32(mean, sum + first, some, weight);
    even_kernels_best()->narrow[dtype](target + first, mean, some, 1.0f);
  }
}

void even_exact_give(void *target, const void *sum, even_dtype dtype, size_t count, double weight) {
  if (dtype == EVEN_F64) {
    give_F64(target, sum, count, weight);
  } else if (dtype == EVEN_F32) {
    give_F32(target, sum, count, (float)weight);
  } else {
    give_short(target, sum, dtype, count, (float)weight);
  }
}
