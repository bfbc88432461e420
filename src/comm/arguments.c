/* Checks of what a caller passes to a collective. */
#include "comm/arguments.h"

#include <stdint.h>

static even_status check_dtype(even_dtype dtype) {
  if (even_dtype_bytes(dtype) == 0) {
    return even_fail(EVEN_ERR_ARGUMENT, "%d is no element type", (int)dtype);
  }
  return EVEN_OK;
}

even_status even_check_reduction(const even_kernels *kernels, even_dtype dtype, even_reduce_op op,
                                 even_reduce_function **out) {
  EVEN_TRY(check_dtype(dtype));
  if ((unsigned)op >= EVEN_REDUCE_OPS) {
    return even_fail(EVEN_ERR_ARGUMENT, "%d is no reduce operation", (int)op);
  }
  if ((unsigned)dtype >= EVEN_DTYPES) {
    (void)even_fail(EVEN_ERR_ARGUMENT, "floats of 8 bits are reduced on GPUs alone");
    return even_error_fix("convert to float32 or bfloat16");
  }
  *out = kernels->reduce[dtype][op];
  if (*out == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, op == EVEN_AVG ? "AVG is for floating types only"
                                                       : "BAND, BOR and BXOR are for integers and bool only");
  }
  return EVEN_OK;
}

even_status even_check_data(const void *data, size_t count, even_dtype dtype, size_t *bytes) {
  EVEN_TRY(check_dtype(dtype));
  size_t element = even_dtype_bytes(dtype);
  if (!even_multiply_size(count, element, bytes) || *bytes > (size_t)INT64_MAX) {
    return even_fail(EVEN_ERR_OVERFLOW, "%zu elements of %zu bytes are more than memory can hold", count, element);
  }
  if (count > 0 && data == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "no data for %zu elements", count);
  }
  if (count > 0 && (uintptr_t)data % element != 0) {
    return even_fail(EVEN_ERR_ARGUMENT, "the data at %p are not aligned to their elements of %zu bytes", data, element);
  }
  return EVEN_OK;
}

even_status even_check_counts(const size_t *counts, int ranks, even_dtype dtype, size_t *total, size_t *largest) {
  size_t bytes = 0;
  EVEN_TRY(check_dtype(dtype));
  *total = 0;
  *largest = 0;
  if (counts == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "no counts for %d ranks", ranks);
  }
  for (int rank = 0; rank < ranks; rank++) {
    if (!even_add_size(*total, counts[rank], total)) {
      return even_fail(EVEN_ERR_OVERFLOW, "the ranks' counts add up to more than a size can hold");
    }
    *largest = counts[rank] > *largest ? counts[rank] : *largest;
  }
  if (!even_multiply_size(*total, even_dtype_bytes(dtype), &bytes) || bytes > (size_t)INT64_MAX) {
    return even_fail(EVEN_ERR_OVERFLOW, "%zu elements are more than memory can hold", *total);
  }
  return EVEN_OK;
}
