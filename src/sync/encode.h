/* Encodings of flat fp32 gradients that every rank sends to all: int8 with stochastic rounding, one bit, top-k. The
 * loops are compiled once for each instruction set, with one rounding of every operation, so that all give the same
 * bits. */
#ifndef EVEN_SYNC_ENCODE_H
#define EVEN_SYNC_ENCODE_H

#include <evenstep/status.h>
#include <stddef.h>
#include <stdint.h>

enum { EVEN_INT8_BLOCK = 256, EVEN_ONE_BIT_BLOCK = 1024 };

/* Bytes of `count` values. Scales come first, one fp32 a block, then whole blocks of values (the rest of the last one
 * is zeros); of top-k `kept` fp32 values and their places as int32. */
size_t even_int8_bytes(size_t count);
size_t even_one_bit_bytes(size_t count);
size_t even_top_bytes(size_t kept);

/* Decoding adds factor * what was encoded (factor 1 or -1). Payloads are 4-byte aligned. A block with a value that is
 * not finite decodes to none that is. */
typedef struct even_encoders {
  const char *name; /* as the kernels' */
  /* q = floor(x / s + u), s a 127th of the block's largest magnitude, u from a hash of (seed, place): x on average. */
  void (*int8_encode)(const float *values, size_t count, uint64_t seed, void *payload);
  void (*int8_add)(const void *payload, float *into, size_t count, float factor);
  /* The sign, and the block's mean magnitude. */
  void (*one_bit_encode)(const float *values, size_t count, void *payload);
  void (*one_bit_add)(const void *payload, float *into, size_t count, float factor);
} even_encoders;

/* Those that go with even_kernels_best(). Any thread. */
const even_encoders *even_encoders_best(void);

/* The `kept` (1 … count) values of largest magnitude, NaN above all, of equal ones those at lower places; in the order
 * of their places. count up to 2^31 - 1. `scratch`: even_top_scratch_bytes(count), 4-byte aligned. */
void even_top_encode(const float *values, size_t count, size_t kept, void *payload, void *scratch);
size_t even_top_scratch_bytes(size_t count);
/* EVEN_ERR_INPUT where a place lies outside `count`; what came before it was added. */
even_status even_top_add(const void *payload, size_t kept, float *into, size_t count, float factor) EVEN_MUST_USE;

extern const even_encoders even_encoders_portable;
extern const even_encoders even_encoders_avx2;
extern const even_encoders even_encoders_avx512;

#endif
