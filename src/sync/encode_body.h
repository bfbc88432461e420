/* The encodings as loops that the compiler vectorises. Included once by each encode_*.c, which defines
 * EVEN_ENCODER_TABLE and EVEN_ENCODER_NAME. */
#include "sync/encode.h"

#include <string.h>

enum { LANES = 16 };

static inline float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
static inline uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* The low-bias 32-bit mixer of C. Wellons ("hash-prospector", 2018), keyed. */
static inline uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

/* A copy of the block with zeros behind its end, where it is not whole. */
static const float *whole_block(const float *values, size_t there, size_t block, float *copy) {
  if (there >= block) {
    return values;
  }
  memcpy(copy, values, there * sizeof *copy);
  memset(copy + there, 0, (block - there) * sizeof *copy);
  return copy;
}

static void int8_encode(const float *values, size_t count, uint64_t seed, void *payload) {
  size_t blocks = (count + EVEN_INT8_BLOCK - 1) / EVEN_INT8_BLOCK;
  float *scales = payload;
  int8_t *steps = (int8_t *)(scales + blocks);
  float copy[EVEN_INT8_BLOCK];
  for (size_t b = 0; b < blocks; b++) {
    const float *x = whole_block(values + b * EVEN_INT8_BLOCK, count - b * EVEN_INT8_BLOCK, EVEN_INT8_BLOCK, copy);
    int8_t *q = steps + b * EVEN_INT8_BLOCK;
    uint32_t most = 0; /* magnitudes are ordered as their bits are, NaN above all */
    for (size_t i = 0; i < EVEN_INT8_BLOCK; i++) {
      uint32_t magnitude = as_bits(x[i]) & 0x7fffffffu;
      most = magnitude > most ? magnitude : most;
    }
    if (most == 0 || most >= 0x7f800000u) {
      scales[b] = most == 0 ? 0.0f : as_float(0x7fc00000u);
      memset(q, 0, EVEN_INT8_BLOCK);
      continue;
    }
    scales[b] = as_float(most) / 127.0f;
    float largest = as_float(most);
    uint32_t key = mixed((uint32_t)seed ^ mixed((uint32_t)(seed >> 32) ^ mixed((uint32_t)b)));
    for (size_t i = 0; i < EVEN_INT8_BLOCK; i++) {
      float u = (float)(int32_t)(mixed(key + (uint32_t)i) >> 8) * 0x1p-24f;
      int32_t step = (int32_t)(x[i] / largest * 127.0f + 127.0f + u) - 127; /* from 0 on, truncation is floor */
      q[i] = (int8_t)(step > 127 ? 127 : step);
    }
  }
}

static void int8_add(const void *payload, float *into, size_t count, float factor) {
  size_t blocks = (count + EVEN_INT8_BLOCK - 1) / EVEN_INT8_BLOCK;
  const float *scales = payload;
  const int8_t *steps = (const int8_t *)(scales + blocks);
  for (size_t b = 0; b < blocks; b++) {
    size_t first = b * EVEN_INT8_BLOCK;
    size_t there = count - first < EVEN_INT8_BLOCK ? count - first : EVEN_INT8_BLOCK;
    float scale = scales[b] * factor;
    for (size_t i = 0; i < there; i++) {
      into[first + i] += (float)steps[first + i] * scale;
    }
  }
}

static void one_bit_encode(const float *values, size_t count, void *payload) {
  size_t blocks = (count + EVEN_ONE_BIT_BLOCK - 1) / EVEN_ONE_BIT_BLOCK;
  float *scales = payload;
  uint8_t *bits = (uint8_t *)(scales + blocks);
  float copy[EVEN_ONE_BIT_BLOCK];
  for (size_t b = 0; b < blocks; b++) {
    size_t first = b * EVEN_ONE_BIT_BLOCK;
    size_t there = count - first < EVEN_ONE_BIT_BLOCK ? count - first : EVEN_ONE_BIT_BLOCK;
    const float *x = whole_block(values + first, there, EVEN_ONE_BIT_BLOCK, copy);
    float sums[LANES] = {0};
    for (size_t i = 0; i < EVEN_ONE_BIT_BLOCK; i += LANES) {
      for (size_t k = 0; k < LANES; k++) {
        sums[k] += as_float(as_bits(x[i + k]) & 0x7fffffffu);
      }
    }
    for (size_t half = LANES / 2; half > 0; half /= 2) {
      for (size_t k = 0; k < half; k++) {
        sums[k] += sums[k + half];
      }
    }
    scales[b] = sums[0] / (float)there;
    for (size_t i = 0; i < EVEN_ONE_BIT_BLOCK / 8; i++) {
      unsigned byte = 0;
      for (unsigned k = 0; k < 8; k++) {
        byte |= (unsigned)(x[8 * i + k] >= 0) << k;
      }
      bits[b * (EVEN_ONE_BIT_BLOCK / 8) + i] = (uint8_t)byte;
    }
  }
}

static void one_bit_add(const void *payload, float *into, size_t count, float factor) {
  size_t blocks = (count + EVEN_ONE_BIT_BLOCK - 1) / EVEN_ONE_BIT_BLOCK;
  const float *scales = payload;
  const uint8_t *bits = (const uint8_t *)(scales + blocks);
  for (size_t b = 0; b < blocks; b++) {
    size_t first = b * EVEN_ONE_BIT_BLOCK;
    size_t there = count - first < EVEN_ONE_BIT_BLOCK ? count - first : EVEN_ONE_BIT_BLOCK;
    uint32_t scale = as_bits(scales[b] * factor);
    float signs[8];
    for (size_t i = 0; i < there; i += 8) {
      uint32_t byte = bits[(first + i) / 8];
      for (uint32_t k = 0; k < 8; k++) {
        signs[k] = as_float(scale ^ ((~byte >> k & 1u) << 31));
      }
      size_t end = there - i < 8 ? there - i : 8;
      for (size_t k = 0; k < end; k++) {
        into[first + i + k] += signs[k];
      }
    }
  }
}

const even_encoders EVEN_ENCODER_TABLE = {.name = EVEN_ENCODER_NAME,
                                          .int8_encode = int8_encode,
                                          .int8_add = int8_add,
                                          .one_bit_encode = one_bit_encode,
                                          .one_bit_add = one_bit_add};
