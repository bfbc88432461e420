/* The reductions as loops that the compiler vectorises. Included once by each
 * kernels_*.c, which defines EVEN_KERNEL_TABLE, EVEN_KERNEL_NAME and the two
 * conversions of 16-bit floats in whole groups of eight. */
#include "comm/kernels.h"

#include <string.h>

/* Elements reduced at a time: what is summed up stays in the first-level cache. */
#define BLOCK ((size_t)256)

/* A target may be a source, but only at the same index: no dependence between iterations. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

static inline float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
static inline uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float bf16_float(uint16_t half) {
  return bits_float((uint32_t)half << 16);
}
static inline uint16_t float_bf16(float value) {
  uint32_t bits = float_bits(value);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)(value != value ? ((bits >> 16) | 0x40u) : rounded);
}

/* fp16 (IEEE 754 binary16) without hardware: after F. Giesen, "Float->half variants" (2016), round to nearest even. */
static inline float f16_float(uint16_t half) {
  uint32_t magnitude = (uint32_t)(half & 0x7fffu) << 13;
  uint32_t exponent = magnitude & 0x0f800000u;
  uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
  float subnormal = bits_float(magnitude + 0x38800000u) - bits_float(0x38800000u);
  uint32_t normal = magnitude + (exponent == 0x0f800000u ? 0x70000000u : 0x38000000u);
  return bits_float(sign | (exponent == 0 ? float_bits(subnormal) : normal));
}
static inline uint16_t float_f16(float value) {
  uint32_t bits = float_bits(value);
  uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  uint32_t infinite = bits > 0x7f800000u ? 0x7e00u | ((bits >> 13) & 0x3ffu) : 0x7c00u;
  uint32_t subnormal = float_bits(bits_float(bits) + 0.5f) - 0x3f000000u;
  uint32_t normal = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  uint32_t half = bits >= 0x47800000u ? infinite : bits < 0x38800000u ? subnormal : normal;
  return (uint16_t)(sign | half);
}

static inline void load_BF16(float *to, const uint16_t *from, size_t count) {
  for (size_t i = 0; i < count; i++) {
    to[i] = bf16_float(from[i]);
  }
}
static inline void store_BF16(uint16_t *to, const float *from, size_t count) {
  for (size_t i = 0; i < count; i++) {
    to[i] = float_bf16(from[i]);
  }
}
static inline void load_F16(float *to, const uint16_t *from, size_t count) {
  size_t i = 0;
#ifdef EVEN_KERNEL_LOAD_F16
  for (; i + 8 <= count; i += 8) {
    EVEN_KERNEL_LOAD_F16(to + i, from + i);
  }
#endif
  for (; i < count; i++) {
    to[i] = f16_float(from[i]);
  }
}
static inline void store_F16(uint16_t *to, const float *from, size_t count) {
  size_t i = 0;
#ifdef EVEN_KERNEL_STORE_F16
  for (; i + 8 <= count; i += 8) {
    EVEN_KERNEL_STORE_F16(to + i, from + i);
  }
#endif
  for (; i < count; i++) {
    to[i] = float_f16(from[i]);
  }
}

#define CONVERSIONS(dtype)                                                                 \
  static void narrow_##dtype(uint16_t *to, const float *from, size_t count, float scale) { \
    for (size_t first = 0; first < count; first += BLOCK) {                                \
      float scaled[BLOCK];                                                                 \
      size_t block = count - first < BLOCK ? count - first : BLOCK;                        \
      for (size_t i = 0; i < block; i++) {                                                 \
        scaled[i] = from[first + i] * scale;                                               \
      }                                                                                    \
      store_##dtype(to + first, scaled, block);                                            \
    }                                                                                      \
  }                                                                                        \
  static void widen_##dtype(float *to, const uint16_t *from, size_t count) {               \
    load_##dtype(to, from, count);                                                         \
  }
CONVERSIONS(F16)
CONVERSIONS(BF16)

/* The operations. `wide` is an unsigned type in which integers wrap without promotion to int; floats keep theirs. */
#define OP_SUM(type, wide, a, b) (type)((wide)(a) + (wide)(b))
#define OP_PRODUCT(type, wide, a, b) (type)((wide)(a) * (wide)(b))
/* A NaN wins on either side. */
#define OP_MIN(type, wide, a, b) (((a) < (b) || (a) != (a)) ? (a) : (b))
#define OP_MAX(type, wide, a, b) (((a) > (b) || (a) != (a)) ? (a) : (b))
#define OP_BAND(type, wide, a, b) (type)((a) & (b))
#define OP_BOR(type, wide, a, b) (type)((a) | (b))
#define OP_BXOR(type, wide, a, b) (type)((a) ^ (b))
#define OP_AND(type, wide, a, b) (type)((a) != 0 && (b) != 0)
#define OP_OR(type, wide, a, b) (type)((a) != 0 || (b) != 0)
#define OP_XOR(type, wide, a, b) (type)(((a) != 0) != ((b) != 0))
#define KEEP(type, value) (value)
#define DIVIDE(type, value) ((value) / (type)divisor)

#define SIGNATURE(name)                                                                                        \
  static void name(void *const *targets, size_t target_count, const void *const *sources, size_t source_count, \
                   size_t count, double divisor)

/* Elements that are reduced in their own type. Two sources, the usual case, need no block; three or four are read at
 * once: to go through the block for each takes twice as long. */
#define DIRECT(dtype, op, type, wide, OP, FINISH)                             \
  SIGNATURE(reduce_##dtype##_##op) {                                          \
    (void)divisor;                                                            \
    if (source_count == 2 && target_count <= 2) {                             \
      const type *a = sources[0];                                             \
      const type *b = sources[1];                                             \
      type *x = targets[0];                                                   \
      type *y = targets[target_count - 1];                                    \
      if (x == y) {                                                           \
        INDEPENDENT for (size_t i = 0; i < count; i++) {                      \
          x[i] = FINISH(type, OP(type, wide, a[i], b[i]));                    \
        }                                                                     \
        return;                                                               \
      }                                                                       \
      INDEPENDENT for (size_t i = 0; i < count; i++) {                        \
        type result = FINISH(type, OP(type, wide, a[i], b[i]));               \
        x[i] = result;                                                        \
        y[i] = result;                                                        \
      }                                                                       \
      return;                                                                 \
    }                                                                         \
    for (size_t first = 0; first < count; first += BLOCK) {                   \
      type sum[BLOCK];                                                        \
      size_t block = count - first < BLOCK ? count - first : BLOCK;           \
      size_t k = 1;                                                           \
      if (source_count >= 4) {                                                \
        const type *a = (const type *)sources[0] + first;                     \
        const type *b = (const type *)sources[1] + first;                     \
        const type *c = (const type *)sources[2] + first;                     \
        const type *d = (const type *)sources[3] + first;                     \
        for (size_t i = 0; i < block; i++) {                                  \
          type two = OP(type, wide, a[i], b[i]);                              \
          type three = OP(type, wide, two, c[i]);                             \
          sum[i] = OP(type, wide, three, d[i]);                               \
        }                                                                     \
        k = 4;                                                                \
      } else if (source_count == 3) {                                         \
        const type *a = (const type *)sources[0] + first;                     \
        const type *b = (const type *)sources[1] + first;                     \
        const type *c = (const type *)sources[2] + first;                     \
        for (size_t i = 0; i < block; i++) {                                  \
          type two = OP(type, wide, a[i], b[i]);                              \
          sum[i] = OP(type, wide, two, c[i]);                                 \
        }                                                                     \
        k = 3;                                                                \
      } else {                                                                \
        memcpy(sum, (const type *)sources[0] + first, block * sizeof sum[0]); \
      }                                                                       \
      for (; k < source_count; k++) {                                         \
        const type *source = (const type *)sources[k] + first;                \
        for (size_t i = 0; i < block; i++) {                                  \
          sum[i] = OP(type, wide, sum[i], source[i]);                         \
        }                                                                     \
      }                                                                       \
      for (size_t i = 0; i < block; i++) {                                    \
        sum[i] = FINISH(type, sum[i]);                                        \
      }                                                                       \
      for (size_t t = 0; t < target_count; t++) {                             \
        memcpy((type *)targets[t] + first, sum, block * sizeof sum[0]);       \
      }                                                                       \
    }                                                                         \
  }

/* 16-bit floats: reduced in fp32, rounded once. */
#define HALF(dtype, op, OP, FINISH)                                      \
  SIGNATURE(reduce_##dtype##_##op) {                                     \
    (void)divisor;                                                       \
    for (size_t first = 0; first < count; first += BLOCK) {              \
      float sum[BLOCK];                                                  \
      float term[BLOCK];                                                 \
      size_t block = count - first < BLOCK ? count - first : BLOCK;      \
      load_##dtype(sum, (const uint16_t *)sources[0] + first, block);    \
      for (size_t k = 1; k < source_count; k++) {                        \
        load_##dtype(term, (const uint16_t *)sources[k] + first, block); \
        for (size_t i = 0; i < block; i++) {                             \
          sum[i] = OP(float, float, sum[i], term[i]);                    \
        }                                                                \
      }                                                                  \
      for (size_t i = 0; i < block; i++) {                               \
        sum[i] = FINISH(float, sum[i]);                                  \
      }                                                                  \
      for (size_t t = 0; t < target_count; t++) {                        \
        store_##dtype((uint16_t *)targets[t] + first, sum, block);       \
      }                                                                  \
    }                                                                    \
  }

/* Own data are asked for so many elements ahead: the processor's own prefetching ends with each page. */
#define AHEAD ((size_t)1024)
#define OF_LINE ((size_t)16)

#define STAGED(op, FINISH)                                                             \
  static void staged_F32_##op(const even_staged *work, size_t count, double divisor) { \
    (void)divisor;                                                                     \
    for (size_t first = 0; first < count; first += OF_LINE) {                          \
      const float *result = (const float *)work->result + first;                       \
      const float *a = (const float *)work->sources[0] + first;                        \
      const float *b = (const float *)work->sources[1] + first;                        \
      const float *in = (const float *)work->in + first;                               \
      float *out = (float *)work->out + first;                                         \
      float *x = (float *)work->targets[0] + first;                                    \
      float *y = (float *)work->targets[1] + first;                                    \
      float *staging = (float *)work->staging + first;                                 \
      __builtin_prefetch((const char *)x + AHEAD * sizeof *x);                         \
      __builtin_prefetch((const char *)in + AHEAD * sizeof *in);                       \
      INDEPENDENT for (size_t i = 0; i < OF_LINE; i++) {                               \
        float sum = FINISH(float, OP_SUM(float, float, a[i], b[i]));                   \
        out[i] = result[i];                                                            \
        x[i] = sum;                                                                    \
        y[i] = sum;                                                                    \
        staging[i] = in[i];                                                            \
      }                                                                                \
    }                                                                                  \
  }
STAGED(SUM, KEEP)
STAGED(AVG, DIVIDE)

/* What one core adds up of so many ranks: with their number known, the compiler keeps the sum in registers. */
#define IN_PLACE_LINES(RANKS, FINISH)                             \
  for (; first + OF_LINE <= count; first += OF_LINE) {            \
    float sum[OF_LINE];                                           \
    size_t ahead = first + AHEAD < count ? first + AHEAD : first; \
    memcpy(sum, at[0] + first, sizeof sum);                       \
    __builtin_prefetch((const char *)(at[0] + ahead));            \
    for (size_t k = 1; k < (RANKS); k++) {                        \
      __builtin_prefetch((const char *)(at[k] + ahead));          \
      for (size_t i = 0; i < OF_LINE; i++) {                      \
        sum[i] = OP_SUM(float, float, sum[i], at[k][first + i]);  \
      }                                                           \
    }                                                             \
    for (size_t i = 0; i < OF_LINE; i++) {                        \
      sum[i] = FINISH(float, sum[i]);                             \
    }                                                             \
    for (size_t k = 0; k < (RANKS); k++) {                        \
      memcpy(at[k] + first, sum, sizeof sum);                     \
    }                                                             \
  }

#define IN_PLACE(op, FINISH)                                                                       \
  static void in_place_F32_##op(void *const *places, size_t ranks, size_t count, double divisor) { \
    float *at[EVEN_IN_PLACE_RANKS];                                                                \
    const void *sources[EVEN_IN_PLACE_RANKS];                                                      \
    void *targets[EVEN_IN_PLACE_RANKS];                                                            \
    size_t first = 0;                                                                              \
    for (size_t k = 0; k < ranks; k++) {                                                           \
      at[k] = places[k];                                                                           \
    }                                                                                              \
    switch (ranks) {                                                                               \
      case 2:                                                                                      \
        IN_PLACE_LINES(2, FINISH)                                                                  \
        break;                                                                                     \
      case 3:                                                                                      \
        IN_PLACE_LINES(3, FINISH)                                                                  \
        break;                                                                                     \
      case 4:                                                                                      \
        IN_PLACE_LINES(4, FINISH)                                                                  \
        break;                                                                                     \
      default:                                                                                     \
        IN_PLACE_LINES(ranks, FINISH)                                                              \
        break;                                                                                     \
    }                                                                                              \
    for (size_t k = 0; k < ranks; k++) {                                                           \
      sources[k] = targets[k] = at[k] + first;                                                     \
    }                                                                                              \
    reduce_F32_##op(targets, ranks, sources, ranks, count - first, divisor);                       \
  }

#define FLOATING(dtype, type)                          \
  DIRECT(dtype, SUM, type, type, OP_SUM, KEEP)         \
  DIRECT(dtype, AVG, type, type, OP_SUM, DIVIDE)       \
  DIRECT(dtype, PRODUCT, type, type, OP_PRODUCT, KEEP) \
  DIRECT(dtype, MIN, type, type, OP_MIN, KEEP)         \
  DIRECT(dtype, MAX, type, type, OP_MAX, KEEP)
#define SHORT_FLOATING(dtype)            \
  HALF(dtype, SUM, OP_SUM, KEEP)         \
  HALF(dtype, AVG, OP_SUM, DIVIDE)       \
  HALF(dtype, PRODUCT, OP_PRODUCT, KEEP) \
  HALF(dtype, MIN, OP_MIN, KEEP)         \
  HALF(dtype, MAX, OP_MAX, KEEP)
#define INTEGER(dtype, type, wide)                     \
  DIRECT(dtype, SUM, type, wide, OP_SUM, KEEP)         \
  DIRECT(dtype, PRODUCT, type, wide, OP_PRODUCT, KEEP) \
  DIRECT(dtype, MIN, type, wide, OP_MIN, KEEP)         \
  DIRECT(dtype, MAX, type, wide, OP_MAX, KEEP)         \
  DIRECT(dtype, BAND, type, wide, OP_BAND, KEEP)       \
  DIRECT(dtype, BOR, type, wide, OP_BOR, KEEP)         \
  DIRECT(dtype, BXOR, type, wide, OP_BXOR, KEEP)

FLOATING(F32, float)
FLOATING(F64, double)
IN_PLACE(SUM, KEEP)
IN_PLACE(AVG, DIVIDE)
SHORT_FLOATING(F16)
SHORT_FLOATING(BF16)
INTEGER(I8, int8_t, uint32_t)
INTEGER(U8, uint8_t, uint32_t)
INTEGER(I16, int16_t, uint32_t)
INTEGER(I32, int32_t, uint32_t)
INTEGER(I64, int64_t, uint64_t)
INTEGER(U16, uint16_t, uint32_t)
INTEGER(U32, uint32_t, uint32_t)
INTEGER(U64, uint64_t, uint64_t)
DIRECT(BOOL, AND, uint8_t, uint8_t, OP_AND, KEEP)
DIRECT(BOOL, OR, uint8_t, uint8_t, OP_OR, KEEP)
DIRECT(BOOL, XOR, uint8_t, uint8_t, OP_XOR, KEEP)

#define FLOATING_ROW(dtype)                                    \
  [EVEN_##dtype] = {[EVEN_SUM] = reduce_##dtype##_SUM,         \
                    [EVEN_AVG] = reduce_##dtype##_AVG,         \
                    [EVEN_PRODUCT] = reduce_##dtype##_PRODUCT, \
                    [EVEN_MIN] = reduce_##dtype##_MIN,         \
                    [EVEN_MAX] = reduce_##dtype##_MAX}
#define INTEGER_ROW(dtype)                                                                          \
  [EVEN_##dtype] = {[EVEN_SUM] = reduce_##dtype##_SUM,   [EVEN_PRODUCT] = reduce_##dtype##_PRODUCT, \
                    [EVEN_MIN] = reduce_##dtype##_MIN,   [EVEN_MAX] = reduce_##dtype##_MAX,         \
                    [EVEN_BAND] = reduce_##dtype##_BAND, [EVEN_BOR] = reduce_##dtype##_BOR,         \
                    [EVEN_BXOR] = reduce_##dtype##_BXOR}

const even_kernels EVEN_KERNEL_TABLE = {
    .name = EVEN_KERNEL_NAME,
    .staged = {[EVEN_SUM] = staged_F32_SUM, [EVEN_AVG] = staged_F32_AVG},
    .in_place = {[EVEN_SUM] = in_place_F32_SUM, [EVEN_AVG] = in_place_F32_AVG},
    .narrow = {[EVEN_F16] = narrow_F16, [EVEN_BF16] = narrow_BF16},
    .widen = {[EVEN_F16] = widen_F16, [EVEN_BF16] = widen_BF16},
    .reduce = {FLOATING_ROW(F32), FLOATING_ROW(F64), FLOATING_ROW(F16), FLOATING_ROW(BF16), INTEGER_ROW(I8),
               INTEGER_ROW(U8), INTEGER_ROW(I16), INTEGER_ROW(I32), INTEGER_ROW(I64), INTEGER_ROW(U16),
               INTEGER_ROW(U32), INTEGER_ROW(U64),
               [EVEN_BOOL] = {[EVEN_SUM] = reduce_BOOL_OR,
                              [EVEN_PRODUCT] = reduce_BOOL_AND,
                              [EVEN_MIN] = reduce_BOOL_AND,
                              [EVEN_MAX] = reduce_BOOL_OR,
                              [EVEN_BAND] = reduce_BOOL_AND,
                              [EVEN_BOR] = reduce_BOOL_OR,
                              [EVEN_BXOR] = reduce_BOOL_XOR}},
};
