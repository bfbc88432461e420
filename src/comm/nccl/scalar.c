/* Rounding a double to a floating type of fewer bits. */
#include "comm/nccl/scalar.h"

#include <math.h>
#include <string.h>

/* IEEE 754 with `digits` bits of fraction, exponents from `least` on: bits of exponent and fraction, without the sign.
 * A fraction that is rounded up to the next power of two carries into the exponent, as it should. */
static uint16_t narrow(double magnitude, int digits, int least, uint32_t infinite) {
  int exponent = 0;
  double fraction = frexp(magnitude, &exponent); /* in [0.5, 1) */
  if (magnitude == 0.0) {
    return 0;
  }
  if (exponent - 1 < least) { /* subnormal: multiples of the least */
    return (uint16_t)nearbyint(ldexp(magnitude, digits - least));
  }
  double whole = nearbyint(ldexp(fraction, digits + 1)) - ldexp(1.0, digits);
  double bits = (double)(exponent - least) * ldexp(1.0, digits) + whole;
  return (uint16_t)(bits >= (double)infinite ? infinite : (uint32_t)bits);
}

static uint16_t narrowed(double value, int digits, int least, uint32_t infinite) {
  uint32_t sign = signbit(value) ? 0x8000u : 0u;
  if (isnan(value)) {
    return (uint16_t)(sign | infinite | (1u << (digits - 1)));
  }
  if (isinf(value)) {
    return (uint16_t)(sign | infinite);
  }
  return (uint16_t)(sign | narrow(fabs(value), digits, least, infinite));
}

void even_device_scalar_write(even_dtype dtype, double value, even_device_scalar *out) {
  memset(out, 0, sizeof *out);
  if (dtype == EVEN_F64) {
    out->f64 = value;
  } else if (dtype == EVEN_F32) {
    out->f32 = (float)value;
  } else if (dtype == EVEN_F16) {
    out->f16 = narrowed(value, 10, -14, 0x7c00u);
  } else {
    out->f16 = narrowed(value, 7, -126, 0x7f80u);
  }
}
