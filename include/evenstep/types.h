/* Element types and reduce operations, shared by the collectives and their users. Nothing here has state: any thread.
 */
#ifndef EVENSTEP_TYPES_H
#define EVENSTEP_TYPES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, number, bytes an element) */
#define EVEN_DTYPE_LIST(X) \
  X(F32, 0, 4)             \
  X(F64, 1, 8)             \
  X(F16, 2, 2)             \
  X(BF16, 3, 2)            \
  X(I8, 4, 1)              \
  X(U8, 5, 1)              \
  X(I16, 6, 2)             \
  X(I32, 7, 4)             \
  X(I64, 8, 8)             \
  X(BOOL, 9, 1)            \
  X(U16, 10, 2)            \
  X(U32, 11, 4)            \
  X(U64, 12, 8)            \
  X(F8E4M3, 13, 1)         \
  X(F8E5M2, 14, 1)

typedef enum even_dtype {
#define EVEN_DTYPE_ENUM(name, number, bytes) EVEN_##name = (number),
  EVEN_DTYPE_LIST(EVEN_DTYPE_ENUM)
#undef EVEN_DTYPE_ENUM
} even_dtype;

/* fp16 and bf16 are reduced in fp32 and rounded once. Integers wrap. Of MIN and MAX a NaN wins. AVG divides the sum by
 * the number of ranks (floating types only; on GPUs integers, too, rounded towards zero). BAND, BOR, BXOR: integers and
 * bool only. SUM of bool is OR, as in torch. F8E4M3 and F8E5M2 (torch's float8_e4m3fn and float8_e5m2) are reduced on
 * GPUs alone, in NCCL's own way. */
typedef enum even_reduce_op {
  EVEN_SUM = 0,
  EVEN_AVG = 1,
  EVEN_PRODUCT = 2,
  EVEN_MIN = 3,
  EVEN_MAX = 4,
  EVEN_BAND = 5,
  EVEN_BOR = 6,
  EVEN_BXOR = 7
} even_reduce_op;

/* Bytes of one element; 0 for a number that is no dtype. */
static inline size_t even_dtype_bytes(even_dtype dtype) {
  switch (dtype) {
#define EVEN_DTYPE_BYTES(name, number, bytes) \
  case EVEN_##name:                           \
    return bytes;
    EVEN_DTYPE_LIST(EVEN_DTYPE_BYTES)
#undef EVEN_DTYPE_BYTES
  }
  return 0;
}

#ifdef __cplusplus
}
#endif

#endif
