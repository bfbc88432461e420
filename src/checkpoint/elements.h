/* The numbers that the bytes of a tensor stand for. Program side only; any thread. */
#ifndef EVEN_CHECKPOINT_ELEMENTS_H
#define EVEN_CHECKPOINT_ELEMENTS_H

#include <stddef.h>

/* Decodes `count` elements of type "F32" … (little-endian, at any alignment) into out[count]. Exact for all types but
 * the 64-bit integers, which are rounded to the nearest double. Formats of the 8-bit floats: OCP OFP8 (E4M3 without
 * infinities, E5M2) and OCP MX (E8M0). `dtype` is one that even_safetensors_dtype_bytes knows, and is not C64: that is
 * twice as many F32. */
void even_elements_decode(const char *dtype, const unsigned char *bytes, size_t count, double *out);

#endif
