/* How the tensors of two safetensors files differ. Program side only. A file belongs to one thread at a time. */
#ifndef EVEN_CHECKPOINT_COMPARE_H
#define EVEN_CHECKPOINT_COMPARE_H

#include "os/folder.h"
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

/* A tensor of one side: what the header says of it, and the number of the file that has it. NULL: there is none. */
typedef struct even_tensor_side {
  const json_t *tensor;
  size_t file;
} even_tensor_side;

/* Told of each tensor of either side; where one has none of the name, *how says nothing. */
typedef void even_tensor_told(void *context, const char *name, even_tensor_side a, even_tensor_side b,
                              const even_tensor_difference *how);
/* Whether a file of a checkpoint holds tensors, by its name: tables that say where tensors lie do not. */
bool even_safetensors_is_named(const char *name);
/* Compares what lies in some files (a model, an optimizer) with what lies in others, tensor by tensor, in whichever
 * file each is: those of a, then what b alone has. All files are open meanwhile. Errors: those of opening and
 * comparing. */
even_status even_safetensors_compare(const even_names *paths_a, const even_names *paths_b, even_tensor_told *told,
                                     void *context) EVEN_MUST_USE;

#endif
