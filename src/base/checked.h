/* Arithmetic on sizes; what could overflow says so: true and *out, or false. */
#ifndef EVEN_BASE_CHECKED_H
#define EVEN_BASE_CHECKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline bool even_add_size(size_t a, size_t b, size_t *out) {
  return !__builtin_add_overflow(a, b, out);
}
static inline bool even_multiply_size(size_t a, size_t b, size_t *out) {
  return !__builtin_mul_overflow(a, b, out);
}
static inline size_t even_least_size(size_t a, size_t b) {
  return a < b ? a : b;
}
/* `value` rounded up to a multiple of `alignment` (a power of two). */
static inline bool even_align_size(size_t value, size_t alignment, size_t *out) {
  size_t sum = 0;
  if (!even_add_size(value, alignment - 1, &sum)) {
    return false;
  }
  *out = sum & ~(alignment - 1);
  return true;
}

#endif
