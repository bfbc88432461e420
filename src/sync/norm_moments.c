/* What batch normalisation does with all numbers of a layer; see evenstep/norm.h. Channels lie apart: torch's own
 * pass for the moments is not vectorised there. */
#include <evenstep/norm.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"
#include "base/params.h"
#include "sync/norm_values.h"

#include <math.h>
#include <string.h>

enum {
  LANES = 32,  /* sums side by side, */
  CHUNK = 1024 /* of so many numbers at most before they go on in 64 bits */
};

#define NUMBER float
#define NAME(name) name##_f32
#include "sync/norm_loops.h"
#undef NUMBER
#undef NAME
#define NUMBER double
#define NAME(name) name##_f64
#include "sync/norm_loops.h"
#undef NUMBER
#undef NAME

/* `given` as *layout, where it can be. */
static even_status take(even_norm_layout *layout, const even_norm_layout *given) {
  size_t count = 0;
  EVEN_TRY(EVEN_TAKE_PARAMS(even_norm_layout, layout, given));
  EVEN_TRY(even_norm_check(layout->dtype));
  if (!even_multiply_size(layout->channels, 2 * sizeof(double), &count) ||
      !even_multiply_size(layout->outer, layout->channels, &count) ||
      !even_multiply_size(count, layout->inner, &count) ||
      !even_multiply_size(count, even_dtype_bytes(layout->dtype), &count)) {
    return even_fail(EVEN_ERR_ARGUMENT,
                     "batch normalisation: %zu times %zu channels of %zu numbers are more than a size holds",
                     layout->outer, layout->channels, layout->inner);
  }
  return EVEN_OK;
}

even_status even_norm_moments(const even_norm_layout *layout, const void *x, double *mean, double *variance) {
  even_norm_layout own;
  EVEN_TRY(take(&own, layout));
  layout = &own;
  if (layout->channels == 0) {
    return EVEN_OK;
  }
  if (layout->outer == 0 || layout->inner == 0) {
    memset(mean, 0, layout->channels * sizeof *mean);
    memset(variance, 0, layout->channels * sizeof *variance);
  } else if (layout->dtype == EVEN_F32) {
    moments_f32(layout, x, mean, variance);
  } else {
    moments_f64(layout, x, mean, variance);
  }
  return EVEN_OK;
}

even_status even_norm_input(const even_norm_layout *layout, const void *g, const void *x, const void *mean,
                            const void *variance, double eps, const void *weight, const void *slope, const void *shift,
                            void *out) {
  even_norm_layout own;
  EVEN_TRY(take(&own, layout));
  layout = &own;
  even_dtype dtype = layout->dtype;
  size_t bytes = even_dtype_bytes(dtype);
  char *factors = NULL; /* of_g, then of_x */
  EVEN_TRY(even_alloc(layout->channels, 2 * bytes, (void **)&factors));
  char *of_x = factors + layout->channels * bytes;
  for (size_t c = 0; c < layout->channels; c++) {
    double spread = sqrt(even_norm_at(variance, dtype, c) + eps);
    even_norm_put(factors, dtype, c, (weight != NULL ? even_norm_at(weight, dtype, c) : 1.0) / spread);
    even_norm_put(of_x, dtype, c, even_norm_at(slope, dtype, c) / spread);
  }
  if (dtype == EVEN_F32) {
    combine_f32(layout, g, x, mean, (const float *)(void *)factors, (const float *)(void *)of_x, shift, out);
  } else {
    combine_f64(layout, g, x, mean, (const double *)(void *)factors, (const double *)(void *)of_x, shift, out);
  }
  even_free(factors);
  return EVEN_OK;
}
