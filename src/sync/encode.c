/* Which instruction set the encodings use, and top-k, which no instruction set has a loop for. */
#include "sync/encode.h"

#include "base/fail.h"
#include "comm/kernels.h"

#include <string.h>

const even_encoders *even_encoders_best(void) {
#if defined(__x86_64__)
  const char *name = even_kernels_best()->name;
  if (strcmp(name, even_encoders_avx512.name) == 0) {
    return &even_encoders_avx512;
  }
  if (strcmp(name, even_encoders_avx2.name) == 0) {
    return &even_encoders_avx2;
  }
#endif
  return &even_encoders_portable;
}

static size_t blocks_of(size_t count, size_t block) {
  return count / block + (count % block != 0);
}

size_t even_int8_bytes(size_t count) {
  return blocks_of(count, EVEN_INT8_BLOCK) * (sizeof(float) + EVEN_INT8_BLOCK);
}

size_t even_one_bit_bytes(size_t count) {
  return blocks_of(count, EVEN_ONE_BIT_BLOCK) * (sizeof(float) + EVEN_ONE_BIT_BLOCK / 8);
}

size_t even_top_bytes(size_t kept) {
  return kept * (sizeof(float) + sizeof(int32_t));
}

/* Magnitudes are ordered as their bits are, NaN above all. */
static uint32_t magnitude(const float *value) {
  uint32_t bits;
  memcpy(&bits, value, sizeof bits);
  return bits & 0x7fffffffu;
}

enum { DIGITS = 1 << 11, LANES = 4, GROUP = 16 };

/* How many magnitudes have each of the DIGITS highest digits (11 of their 31 bits). Neighbours are often alike, so they
 * count in lanes of their own: no increment waits for the one before. */
static void count_digits(const float *values, size_t count, uint32_t counts[LANES][DIGITS]) {
  for (size_t i = 0; i < count; i++) {
    counts[i % LANES][magnitude(&values[i]) >> 20]++;
  }
  for (size_t digit = 0; digit < DIGITS; digit++) {
    counts[0][digit] += counts[1][digit] + counts[2][digit] + counts[3][digit];
  }
}

/* The places of all magnitudes of at least `least`, of which there are as many as `places` has room for. */
static void find_places(const float *values, size_t count, uint32_t least, int32_t *places) {
  size_t at = 0;
  for (size_t first = 0; first < count; first += GROUP) {
    size_t end = count - first < GROUP ? count : first + GROUP;
    uint32_t any = 0;
    for (size_t i = first; i < end; i++) {
      any |= magnitude(&values[i]) >= least;
    }
    for (size_t i = first; any != 0 && i < end; i++) {
      if (magnitude(&values[i]) >= least) {
        places[at++] = (int32_t)i;
      }
    }
  }
}

/* The kept-th largest of the magnitudes at `places`, bit by bit from the top. */
static uint32_t threshold(const float *values, const int32_t *places, size_t count, size_t kept) {
  uint32_t found = 0;
  for (uint32_t bit = 1u << 30; bit != 0; bit >>= 1) {
    size_t larger = 0;
    for (size_t i = 0; i < count; i++) {
      larger += magnitude(&values[places[i]]) >= (found | bit);
    }
    found |= larger >= kept ? bit : 0;
  }
  return found;
}

static void keep(const float *values, const int32_t *candidates, size_t count, size_t kept, void *payload) {
  float *out = payload;
  int32_t *places = (int32_t *)(out + kept);
  uint32_t least = threshold(values, candidates, count, kept);
  size_t ties = kept; /* of that magnitude itself */
  for (size_t i = 0; i < count; i++) {
    ties -= magnitude(&values[candidates[i]]) > least;
  }
  for (size_t i = 0, at = 0; i < count; i++) {
    uint32_t bits = magnitude(&values[candidates[i]]);
    if (bits > least || (bits == least && ties > 0)) {
      ties -= bits == least;
      out[at] = values[candidates[i]];
      places[at++] = candidates[i];
    }
  }
}

size_t even_top_scratch_bytes(size_t count) {
  return LANES * DIGITS * sizeof(uint32_t) + count * sizeof(int32_t);
}

void even_top_encode(const float *values, size_t count, size_t kept, void *payload, void *scratch) {
  uint32_t(*counts)[DIGITS] = scratch;
  int32_t *candidates = (int32_t *)(void *)(counts + LANES);
  size_t digit = DIGITS - 1;
  memset(counts, 0, LANES * sizeof *counts);
  count_digits(values, count, counts);
  size_t found = counts[0][digit];
  while (found < kept) {
    found += counts[0][--digit];
  }
  find_places(values, count, (uint32_t)digit << 20, candidates);
  keep(values, candidates, found, kept, payload);
}

even_status even_top_add(const void *payload, size_t kept, float *into, size_t count, float factor) {
  const float *values = payload;
  const int32_t *places = (const int32_t *)(values + kept);
  for (size_t i = 0; i < kept; i++) {
    if (places[i] < 0 || (size_t)places[i] >= count) {
      return even_fail(EVEN_ERR_INPUT, "a peer sent a gradient for place %d of %zu", (int)places[i], count);
    }
    into[places[i]] += factor * values[i];
  }
  return EVEN_OK;
}
