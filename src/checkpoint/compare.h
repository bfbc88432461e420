/* How the tensors of two safetensors files differ. Program side only. A file belongs to one thread at a time. */
#ifndef EVEN_CHECKPOINT_COMPARE_H
#define EVEN_CHECKPOINT_COMPARE_H

#include "os/stream.h"

#include <jansson.h>
#include <stdbool.h>

typedef struct even_safetensors_file {
  even_input input; /* its path is the caller's and outlives the file */
  json_t *header;   /* checked: every tensor lies in the file, with the size that its shape has */
  uint64_t data;    /* where the data begin */
} even_safetensors_file;

/* Opens a file and checks its header. Errors: EVEN_ERR_CORRUPT, those of opening and reading. Close it also after a
 * failure. */
even_status even_safetensors_open(const char *path, even_safetensors_file *out) EVEN_MUST_USE;
void even_safetensors_close(even_safetensors_file *file);

typedef struct even_tensor_difference {
  bool same_type, same_shape;
  bool compared;           /* element by element: their shapes are the same */
  uint64_t elements;       /* numbers in one of them; a complex one counts as two */
  uint64_t different;      /* of these: other bits, or, between types, another value */
  uint64_t not_finite;     /* of those: a NaN or an infinity on one side; they count in none of the following */
  double largest;          /* |a - b| */
  double largest_relative; /* |a - b| / max(|a|, |b|) */
  double relative_norm;    /* Euclidean norms, ‖a - b‖ / ‖a‖; infinity where a is zero and b is not */
} even_tensor_difference;

/* Compares tensor `name_a` of a with `name_b` of b, which must both be there, with 1 MiB of memory whatever their size.
 * 64-bit integers are subtracted as such. Errors: EVEN_ERR_MEMORY, those of reading, EVEN_ERR_INTERRUPTED
 * (base/stop.h). */
even_status even_tensors_compare(even_safetensors_file *a, const char *name_a, even_safetensors_file *b,
                                 const char *name_b, even_tensor_difference *out) EVEN_MUST_USE;

/* Told of each tensor of two files; NULL: that side has none of the name, and *how says nothing. */
typedef void even_tensor_told(void *context, const char *name, const json_t *a, const json_t *b,
                              const even_tensor_difference *how);
/* Whether a file of a checkpoint holds tensors, by its name: tables that say where tensors lie do not. */
bool even_safetensors_is_named(const char *name);
/* Compares the files, tensor by tensor: those of a, then what b alone has. A path that is NULL is a file without
 * tensors. Errors: those of opening and comparing. */
even_status even_safetensors_compare(const char *path_a, const char *path_b, even_tensor_told *told,
                                     void *context) EVEN_MUST_USE;

#endif
