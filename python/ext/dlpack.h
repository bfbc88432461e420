/* What the extension reads of DLPack's ABI, major version 1 (and the unversioned capsule before it). The layouts are
 * the standard's; the names of its enumeration values too. */
#ifndef EVEN_EXT_DLPACK_H
#define EVEN_EXT_DLPACK_H

#include <stdint.h>

enum { DLPACK_CPU = 1, DLPACK_CUDA_HOST = 3, DLPACK_ROCM_HOST = 11 };
enum { DLPACK_INT, DLPACK_UINT, DLPACK_FLOAT, DLPACK_OPAQUE, DLPACK_BFLOAT, DLPACK_COMPLEX, DLPACK_BOOL };
#define DLPACK_MAJOR 1u
#define DLPACK_READ_ONLY ((uint64_t)1)

typedef struct dlpack_tensor {
  void *data;
  int32_t device_type;
  int32_t device_id;
  int32_t dimensions;
  uint8_t code; /* of the elements' type */
  uint8_t bits;
  uint16_t lanes;
  int64_t *shape;
  int64_t *strides; /* in elements; NULL: contiguous */
  uint64_t byte_offset;
} dlpack_tensor;

/* In the capsule "dltensor". */
typedef struct dlpack_managed {
  dlpack_tensor tensor;
  void *context;
  void (*deleter)(struct dlpack_managed *self);
} dlpack_managed;

/* In the capsule "dltensor_versioned". */
typedef struct dlpack_managed_versioned {
  uint32_t major;
  uint32_t minor;
  void *context;
  void (*deleter)(struct dlpack_managed_versioned *self);
  uint64_t flags;
  dlpack_tensor tensor;
} dlpack_managed_versioned;

/* In the capsule "dlpack_exchange_api", an attribute of the type: functions that spare the capsule of each tensor. */
typedef struct dlpack_exchange {
  uint32_t major;
  uint32_t minor;
  struct dlpack_exchange *previous;
  void (*allocate)(void);
  void (*managed_from_object)(void);
  void (*managed_to_object)(void);
  int (*tensor_from_object)(void *object, dlpack_tensor *out); /* borrows; may be NULL */
  void (*current_stream)(void);
} dlpack_exchange;

#endif
