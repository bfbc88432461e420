/* The reference: one element at a time, 16-bit floats through the compiler's own type. */
#include "conformance/comm/reference.h"

#include <stdbool.h>
#include <string.h>

uint64_t reference_random(uint64_t *state) {
  *state ^= *state >> 12;
  *state ^= *state << 25;
  *state ^= *state >> 27;
  return *state * 0x2545f4914f6cdd1du;
}

static uint64_t number_of(uint64_t call, int rank, size_t index) {
  uint64_t state = (call + 1) * 0x9e3779b97f4a7c15u + (uint64_t)rank * 0xd1b54a32d192ed03u + index * 0x2545f491u + 1;
  state = state == 0 ? 1 : state;
  (void)reference_random(&state);
  return reference_random(&state);
}

/* Round to nearest even by comparing with the neighbours' distance: slow, and unlike the kernel's way. */
static uint16_t bf16_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  uint32_t low = bits & 0xffffu;
  uint32_t high = bits >> 16;
  if (low > 0x8000u || (low == 0x8000u && (high & 1u) == 1u)) {
    high++;
  }
  return (uint16_t)high;
}
static float of_bf16(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static double floating(uint64_t number) {
  return (double)(int64_t)(number >> 11) * 0x1p-53 * 4.0 - 2.0;
}

void reference_fill(void *out, even_dtype dtype, uint64_t call, int rank, size_t index) {
  uint64_t number = number_of(call, rank, index);
  float single = 0;
  double twice = 0;
  _Float16 half;
  uint16_t brain = 0;
  uint8_t truth = 0;
  switch (dtype) {
    case EVEN_F32:
      single = (float)floating(number);
      memcpy(out, &single, 4);
      break;
    case EVEN_F64:
      twice = floating(number);
      memcpy(out, &twice, 8);
      break;
    case EVEN_F16:
      half = (_Float16)(float)floating(number);
      memcpy(out, &half, 2);
      break;
    case EVEN_BF16:
      brain = bf16_of((float)floating(number));
      memcpy(out, &brain, 2);
      break;
    case EVEN_BOOL:
      truth = (uint8_t)((number >> 20) & 1u);
      memcpy(out, &truth, 1);
      break;
    default:
      memcpy(out, &number, even_dtype_bytes(dtype));
      break;
  }
}

int reference_has(even_dtype dtype, even_reduce_op op) {
  int is_float = dtype == EVEN_F32 || dtype == EVEN_F64 || dtype == EVEN_F16 || dtype == EVEN_BF16;
  return op == EVEN_AVG ? is_float : op >= EVEN_BAND ? !is_float : 1;
}

#define FLOAT_STEP(a, b)                        \
  (op == EVEN_PRODUCT ? (a) * (b)               \
   : op == EVEN_MIN   ? ((a) < (b) ? (a) : (b)) \
   : op == EVEN_MAX   ? ((a) > (b) ? (a) : (b)) \
                      : (a) + (b))

static const int *host_of;

void reference_set_hosts(const int *hosts) {
  host_of = hosts;
}

static bool is_of(int rank, int host) {
  return host_of == NULL ? host == 0 : host_of[rank] == host;
}

static float rounded(even_dtype dtype, float value) {
  return dtype == EVEN_F16 ? (float)(_Float16)value : dtype == EVEN_BF16 ? of_bf16(bf16_of(value)) : value;
}

static float reduce_single(even_dtype dtype, even_reduce_op op, uint64_t call, int ranks, size_t index) {
  float all = 0;
  for (int host = 0; host < ranks; host++) {
    float sum = 0;
    int terms = 0;
    for (int rank = 0; rank < ranks; rank++) {
      uint32_t raw = 0;
      float term;
      if (!is_of(rank, host)) {
        continue;
      }
      reference_fill(&raw, dtype, call, rank, index);
      if (dtype == EVEN_F16) {
        _Float16 half;
        memcpy(&half, &raw, 2);
        term = (float)half;
      } else if (dtype == EVEN_BF16) {
        term = of_bf16((uint16_t)raw);
      } else {
        memcpy(&term, &raw, 4);
      }
      sum = terms++ == 0 ? term : FLOAT_STEP(sum, term);
    }
    sum = host_of == NULL ? sum : rounded(dtype, sum);
    all = host == 0 ? sum : terms == 0 ? all : FLOAT_STEP(all, sum);
  }
  return op == EVEN_AVG ? all / (float)ranks : all;
}

static double reduce_double(even_reduce_op op, uint64_t call, int ranks, size_t index) {
  double all = 0;
  for (int host = 0; host < ranks; host++) {
    double sum = 0;
    int terms = 0;
    for (int rank = 0; rank < ranks; rank++) {
      double term;
      if (is_of(rank, host)) {
        reference_fill(&term, EVEN_F64, call, rank, index);
        sum = terms++ == 0 ? term : FLOAT_STEP(sum, term);
      }
    }
    all = host == 0 ? sum : terms == 0 ? all : FLOAT_STEP(all, sum);
  }
  return op == EVEN_AVG ? all / (double)ranks : all;
}

/* Sign-extended (or not, for unsigned types), so that MIN and MAX compare as the type does. */
static int64_t integer_of(even_dtype dtype, uint64_t call, int rank, size_t index) {
  int8_t one;
  int16_t two;
  int32_t four;
  int64_t eight = 0;
  reference_fill(&eight, dtype, call, rank, index);
  memcpy(&one, &eight, 1);
  memcpy(&two, &eight, 2);
  memcpy(&four, &eight, 4);
  return dtype == EVEN_I8 ? one : dtype == EVEN_I16 ? two : dtype == EVEN_I32 ? four : eight;
}

static int64_t reduce_integer(even_dtype dtype, even_reduce_op op, uint64_t call, int ranks, size_t index) {
  int64_t sum = integer_of(dtype, call, 0, index);
  for (int rank = 1; rank < ranks; rank++) {
    int64_t term = integer_of(dtype, call, rank, index);
    uint64_t a = (uint64_t)sum;
    uint64_t b = (uint64_t)term;
    bool less = dtype == EVEN_U64 ? a < b : sum < term;
    sum = op == EVEN_PRODUCT   ? (int64_t)(a * b)
          : op == EVEN_MIN     ? (less ? sum : term)
          : op == EVEN_MAX     ? (less ? term : sum)
          : op == EVEN_BAND    ? (sum & term)
          : op == EVEN_BOR     ? (sum | term)
          : op == EVEN_BXOR    ? (sum ^ term)
          : dtype == EVEN_BOOL ? (sum | term)
                               : (int64_t)(a + b);
  }
  return sum;
}

void reference_reduce(void *out, even_dtype dtype, even_reduce_op op, uint64_t call, int ranks, size_t index) {
  float single = 0;
  double twice = 0;
  int64_t integer = 0;
  _Float16 half;
  uint16_t brain;
  switch (dtype) {
    case EVEN_F32:
      single = reduce_single(dtype, op, call, ranks, index);
      memcpy(out, &single, 4);
      break;
    case EVEN_F64:
      twice = reduce_double(op, call, ranks, index);
      memcpy(out, &twice, 8);
      break;
    case EVEN_F16:
      half = (_Float16)reduce_single(dtype, op, call, ranks, index);
      memcpy(out, &half, 2);
      break;
    case EVEN_BF16:
      brain = bf16_of(reduce_single(dtype, op, call, ranks, index));
      memcpy(out, &brain, 2);
      break;
    default:
      integer = reduce_integer(dtype, op, call, ranks, index);
      memcpy(out, &integer, even_dtype_bytes(dtype));
      break;
  }
}
