/* Element types of safetensors. */
#include "checkpoint/dtype.h"

#include <string.h>

static const struct {
  const char *name;
  size_t bytes;
} dtypes[] = {
    {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1},
    {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
    {"F32", 4},  {"C64", 8}, {"I64", 8}, {"U64", 8},     {"F64", 8},
};

size_t even_safetensors_dtype_bytes(const char *dtype) {
  for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
    if (strcmp(dtypes[i].name, dtype) == 0) {
      return dtypes[i].bytes;
    }
  }
  return 0;
}

bool even_safetensors_shape_bytes(const int64_t *shape, size_t dimensions, size_t element_bytes, uint64_t *out) {
  uint64_t bytes = element_bytes;
  bool empty = false;
  for (size_t i = 0; i < dimensions; i++) {
    if (shape[i] < 0) {
      return false;
    }
    /* a dimension of 0 makes the tensor empty, however large the others are */
    empty = empty || shape[i] == 0;
    if (shape[i] != 0 && __builtin_mul_overflow(bytes, (uint64_t)shape[i], &bytes)) {
      return false;
    }
  }
  *out = empty ? 0 : bytes;
  return true;
}
