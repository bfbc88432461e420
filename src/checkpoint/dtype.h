/* The element types of safetensors, and the size that a shape of them has. */
#ifndef EVEN_CHECKPOINT_DTYPE_H
#define EVEN_CHECKPOINT_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of one element of "F32" …; 0 for a name that safetensors does not know (or packs below one byte). */
size_t even_safetensors_dtype_bytes(const char *dtype);
/* Bytes of a tensor; false where a dimension is negative or the product does not fit. */
bool even_safetensors_shape_bytes(const int64_t *shape, size_t dimensions, size_t element_bytes, uint64_t *out);

#endif
