/* Decodes the element types of safetensors. */
#include "checkpoint/elements.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef double decode_one(const unsigned char *bytes);

static uint64_t little(const unsigned char *bytes, size_t count) {
  uint64_t value = 0;
  for (size_t i = count; i-- > 0;) {
    value = value << 8 | bytes[i];
  }
  return value;
}

/* A small float of IEEE 754's form: sign, exponent, fraction. */
static double small_float(unsigned bits, unsigned exponent_bits, unsigned fraction_bits) {
  unsigned fraction = bits & ((1u << fraction_bits) - 1u);
  unsigned exponent = (bits >> fraction_bits) & ((1u << exponent_bits) - 1u);
  int bias = (1 << (exponent_bits - 1)) - 1;
  double sign = (bits >> (exponent_bits + fraction_bits)) != 0 ? -1.0 : 1.0;
  if (exponent == 0) {
    return sign * ldexp((double)fraction, 1 - bias - (int)fraction_bits);
  }
  return sign * ldexp((double)(fraction | 1u << fraction_bits), (int)exponent - bias - (int)fraction_bits);
}

/* The same, where the highest exponent stands for infinity and NaN. */
static double ieee_float(unsigned bits, unsigned exponent_bits, unsigned fraction_bits) {
  unsigned highest = (1u << exponent_bits) - 1u;
  if (((bits >> fraction_bits) & highest) != highest) {
    return small_float(bits, exponent_bits, fraction_bits);
  }
  if ((bits & ((1u << fraction_bits) - 1u)) != 0) {
    return (double)NAN;
  }
  return (bits >> (exponent_bits + fraction_bits)) != 0 ? -(double)INFINITY : (double)INFINITY;
}

static double of_f64(const unsigned char *bytes) {
  double value = 0;
  uint64_t bits = little(bytes, 8);
  memcpy(&value, &bits, sizeof value);
  return value;
}

static double of_f32_bits(uint32_t bits) {
  float value = 0;
  memcpy(&value, &bits, sizeof value);
  return (double)value;
}

static double of_f32(const unsigned char *bytes) {
  return of_f32_bits((uint32_t)little(bytes, 4));
}

static double of_bf16(const unsigned char *bytes) {
  return of_f32_bits((uint32_t)little(bytes, 2) << 16);
}

static double of_f16(const unsigned char *bytes) {
  return ieee_float((unsigned)little(bytes, 2), 5, 10);
}

static double of_e5m2(const unsigned char *bytes) {
  return ieee_float(bytes[0], 5, 2);
}

static double of_e4m3(const unsigned char *bytes) {
  return (bytes[0] & 0x7Fu) == 0x7Fu ? (double)NAN : small_float(bytes[0], 4, 3);
}

static double of_e8m0(const unsigned char *bytes) {
  return bytes[0] == 0xFFu ? (double)NAN : ldexp(1.0, (int)bytes[0] - 127);
}

static double of_i64(const unsigned char *bytes) {
  return (double)(int64_t)little(bytes, 8);
}

static double of_i32(const unsigned char *bytes) {
  return (double)(int32_t)little(bytes, 4);
}

static double of_i16(const unsigned char *bytes) {
  return (double)(int16_t)little(bytes, 2);
}

static double of_i8(const unsigned char *bytes) {
  return (double)(int8_t)bytes[0];
}

static double of_u64(const unsigned char *bytes) {
  return (double)little(bytes, 8);
}

static double of_u32(const unsigned char *bytes) {
  return (double)little(bytes, 4);
}

static double of_u16(const unsigned char *bytes) {
  return (double)little(bytes, 2);
}

static double of_u8(const unsigned char *bytes) {
  return (double)bytes[0];
}

static const struct {
  const char *name;
  size_t bytes;
  decode_one *decode;
} kinds[] = {
    {"F32", 4, of_f32}, {"BF16", 2, of_bf16},    {"F16", 2, of_f16},      {"F64", 8, of_f64},
    {"I64", 8, of_i64}, {"I32", 4, of_i32},      {"I16", 2, of_i16},      {"I8", 1, of_i8},
    {"U64", 8, of_u64}, {"U32", 4, of_u32},      {"U16", 2, of_u16},      {"U8", 1, of_u8},
    {"BOOL", 1, of_u8}, {"F8_E4M3", 1, of_e4m3}, {"F8_E5M2", 1, of_e5m2}, {"F8_E8M0", 1, of_e8m0},
};

void even_elements_decode(const char *dtype, const unsigned char *bytes, size_t count, double *out) {
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
    if (strcmp(kinds[i].name, dtype) != 0) {
      continue;
    }
    for (size_t at = 0; at < count; at++) {
      out[at] = kinds[i].decode(bytes + at * kinds[i].bytes);
    }
    return;
  }
}
