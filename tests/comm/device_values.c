/* Numbers that every type of a GPU's holds exactly. */
#include "comm/device_values.h"

#include <string.h>

double device_value(int rank, size_t i) {
  return (double)((i + (size_t)rank) % 3 + 1);
}

static uint16_t half_of(double value, even_dtype dtype) {
  float narrow = (float)value;
  uint32_t bits = 0;
  memcpy(&bits, &narrow, sizeof bits);
  if (dtype == EVEN_BF16) {
    return (uint16_t)(bits >> 16);
  }
  return (uint16_t)(((bits >> 16) & 0x8000u) | ((((bits >> 23) & 0xffu) - 112u) << 10) | ((bits >> 13) & 0x3ffu));
}

/* As half_of: of the bits that are too many none counts. */
static uint8_t e4m3_of(double value) {
  float narrow = (float)value;
  uint32_t bits = 0;
  memcpy(&bits, &narrow, sizeof bits);
  return (uint8_t)(((bits >> 24) & 0x80u) | ((((bits >> 23) & 0xffu) - 120u) << 3) | ((bits >> 20) & 7u));
}

void device_value_put(void *data, size_t i, even_dtype dtype, double value) {
  float f32 = (float)value;
  uint16_t half = value == 0 ? 0 : half_of(value, dtype);
  int8_t i8 = (int8_t)value;
  int32_t i32 = (int32_t)value;
  int64_t i64 = (int64_t)value;
  char *at = (char *)data + i * even_dtype_bytes(dtype);
  switch (dtype) {
    case EVEN_F32:
      memcpy(at, &f32, 4);
      return;
    case EVEN_F64:
      memcpy(at, &value, 8);
      return;
    case EVEN_F16:
    case EVEN_BF16:
      memcpy(at, &half, 2);
      return;
    case EVEN_I32:
    case EVEN_U32:
      memcpy(at, &i32, 4);
      return;
    case EVEN_I64:
    case EVEN_U64:
      memcpy(at, &i64, 8);
      return;
    case EVEN_F8E4M3:
      *at = (char)(value == 0 ? 0 : e4m3_of(value));
      return;
    case EVEN_F8E5M2:
      *at = (char)((value == 0 ? 0 : half_of(value, EVEN_F16)) >> 8);
      return;
    default:
      memcpy(at, &i8, 1);
  }
}

double device_reduced(even_reduce_op op, even_dtype dtype, int ranks, size_t i) {
  double sum = 0;
  double product = 1;
  double least = device_value(0, i);
  double most = least;
  for (int rank = 0; rank < ranks; rank++) {
    double value = device_value(rank, i);
    sum += value;
    product *= value;
    least = value < least ? value : least;
    most = value > most ? value : most;
  }
  if (dtype == EVEN_BOOL) {
    return op == EVEN_SUM || op == EVEN_MAX ? most : least;
  }
  switch (op) {
    case EVEN_SUM:
      return sum;
    case EVEN_AVG:
      return sum / ranks;
    case EVEN_PRODUCT:
      return product;
    case EVEN_MIN:
      return least;
    default:
      return most;
  }
}

void device_values_fill(void *data, size_t count, even_dtype dtype, int rank) {
  for (size_t i = 0; i < count; i++) {
    device_value_put(data, i, dtype, device_value(rank, i));
  }
}
