/* The chosen encoding, and the loops around it. */
#include "sync/encoding.h"

#include "comm/kernels.h"
#include "sync/encode.h"

#include <math.h>
#include <string.h>

size_t even_encoding_block(const even_encoding *encoding) {
  switch (encoding->kind) {
    case EVEN_SYNC_INT8:
      return EVEN_INT8_BLOCK;
    case EVEN_SYNC_ONE_BIT:
      return EVEN_ONE_BIT_BLOCK;
    case EVEN_SYNC_TOP:
    case EVEN_SYNC_PLAIN:
      break;
  }
  return 1;
}

bool even_encoding_leaves_out(const even_encoding *encoding) {
  return encoding->kind == EVEN_SYNC_ONE_BIT || encoding->kind == EVEN_SYNC_TOP;
}

static size_t kept_of(const even_encoding *encoding, size_t count) {
  size_t kept = (size_t)ceil(encoding->ratio * (double)count);
  return kept < 1 ? 1 : kept;
}

size_t even_encoding_bytes(const even_encoding *encoding, size_t count) {
  if (count == 0) {
    return 0;
  }
  switch (encoding->kind) {
    case EVEN_SYNC_INT8:
      return even_int8_bytes(count);
    case EVEN_SYNC_ONE_BIT:
      return even_one_bit_bytes(count);
    case EVEN_SYNC_TOP:
      return even_top_bytes(kept_of(encoding, count));
    case EVEN_SYNC_PLAIN:
      break;
  }
  return 0;
}

size_t even_encoding_scratch_bytes(const even_encoding *encoding, size_t count) {
  return encoding->kind == EVEN_SYNC_TOP ? even_top_scratch_bytes(count) : 0;
}

void even_encoding_encode(const even_encoding *encoding, const float *values, size_t count, uint64_t seed,
                          void *payload, void *scratch) {
  if (count == 0) {
    return;
  }
  switch (encoding->kind) {
    case EVEN_SYNC_INT8:
      even_encoders_best()->int8_encode(values, count, seed, payload);
      break;
    case EVEN_SYNC_ONE_BIT:
      even_encoders_best()->one_bit_encode(values, count, payload);
      break;
    case EVEN_SYNC_TOP:
      even_top_encode(values, count, kept_of(encoding, count), payload, scratch);
      break;
    case EVEN_SYNC_PLAIN:
      break;
  }
}

even_status even_encoding_add(const even_encoding *encoding, const void *payload, float *into, size_t count,
                              float factor) {
  if (count == 0) {
    return EVEN_OK;
  }
  switch (encoding->kind) {
    case EVEN_SYNC_INT8:
      even_encoders_best()->int8_add(payload, into, count, factor);
      break;
    case EVEN_SYNC_ONE_BIT:
      even_encoders_best()->one_bit_add(payload, into, count, factor);
      break;
    case EVEN_SYNC_TOP:
      return even_top_add(payload, kept_of(encoding, count), into, count, factor);
    case EVEN_SYNC_PLAIN:
      break;
  }
  return EVEN_OK;
}

/* ---- around it ---- */

enum { BLOCK = 256 };

/* As torch multiplies 16-bit floats by a number: in fp32, rounded back. */
static void weigh_short(float *to, const uint16_t *from, even_dtype dtype, size_t count, float weight) {
  const even_kernels *kernels = even_kernels_best();
  uint16_t rounded[BLOCK];
  for (size_t first = 0; first < count; first += BLOCK) {
    size_t block = count - first < BLOCK ? count - first : BLOCK;
    kernels->widen[dtype](to + first, from + first, block);
    kernels->narrow[dtype](rounded, to + first, block, weight);
    kernels->widen[dtype](to + first, rounded, block);
  }
}

void even_encoding_weigh(float *to, const void *from, even_dtype dtype, size_t count, float weight) {
  if (weight == 0.0f) {
    memset(to, 0, count * sizeof *to);
  } else if (dtype == EVEN_F32) {
    const float *values = from;
    for (size_t i = 0; i < count; i++) {
      to[i] = values[i] * weight;
    }
  } else {
    weigh_short(to, from, dtype, count, weight);
  }
}

void even_encoding_add_values(float *to, const float *from, size_t count) {
  for (size_t i = 0; i < count; i++) {
    to[i] += from[i];
  }
}

/* What is not finite has all bits of the exponent. */
static bool finite_short(const uint16_t *bits, size_t count, uint16_t exponent) {
  unsigned any = 0;
  for (size_t i = 0; i < count; i++) {
    any |= (bits[i] & exponent) == exponent;
  }
  return any == 0;
}

static bool finite_single(const uint32_t *bits, size_t count) {
  uint32_t any = 0;
  for (size_t i = 0; i < count; i++) {
    any |= (bits[i] & 0x7f800000u) == 0x7f800000u;
  }
  return any == 0;
}

static bool finite_double(const uint64_t *bits, size_t count) {
  const uint64_t exponent = (uint64_t)0x7ff << 52;
  uint64_t any = 0;
  for (size_t i = 0; i < count; i++) {
    any |= (bits[i] & exponent) == exponent;
  }
  return any == 0;
}

bool even_encoding_finite(const void *values, even_dtype dtype, size_t count) {
  switch ((int)dtype) {
    case EVEN_F32:
      return finite_single(values, count);
    case EVEN_F64:
      return finite_double(values, count);
    case EVEN_F16:
      return finite_short(values, count, 0x7c00);
    case EVEN_BF16:
      return finite_short(values, count, 0x7f80);
    default:
      return true;
  }
}
