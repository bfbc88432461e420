/* A layer's numbers, one a channel, of either type that batch normalisation computes with. */
#ifndef EVEN_SYNC_NORM_VALUES_H
#define EVEN_SYNC_NORM_VALUES_H

#include "base/fail.h"

#include <evenstep/types.h>

static inline even_status even_norm_check(even_dtype dtype) {
  if (dtype != EVEN_F32 && dtype != EVEN_F64) {
    return even_fail(EVEN_ERR_ARGUMENT, "batch normalisation computes with F32 and F64, not with type %d", (int)dtype);
  }
  return EVEN_OK;
}

static inline double even_norm_at(const void *values, even_dtype dtype, size_t at) {
  return dtype == EVEN_F64 ? ((const double *)values)[at] : (double)((const float *)values)[at];
}

static inline void even_norm_put(void *values, even_dtype dtype, size_t at, double value) {
  if (dtype == EVEN_F64) {
    ((double *)values)[at] = value;
  } else {
    ((float *)values)[at] = (float)value;
  }
}

#endif
