/* One number in an element's format, for NCCL's PreMulSum. */
#ifndef EVEN_COMM_NCCL_SCALAR_H
#define EVEN_COMM_NCCL_SCALAR_H

#include <evenstep/types.h>

typedef union even_device_scalar {
  double f64;
  float f32;
  uint16_t f16; /* and bf16 */
} even_device_scalar;

/* `value` rounded once to the dtype (a floating one), to nearest, ties to even; what is too large becomes infinite. */
void even_device_scalar_write(even_dtype dtype, double value, even_device_scalar *out);

#endif
