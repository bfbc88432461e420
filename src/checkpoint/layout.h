/* Where each tensor lies in a safetensors file, and the header that says so. */
#ifndef EVEN_CHECKPOINT_LAYOUT_H
#define EVEN_CHECKPOINT_LAYOUT_H

#include "base/text.h"

#include <evenstep/checkpoint.h>

typedef struct even_safetensors_layout {
  size_t *order;       /* tensors in the order in which their data follow the header */
  even_text header;    /* the first bytes of the file: length, JSON, padding */
  uint64_t data_bytes; /* behind the header */
} even_safetensors_layout;

/* Checks names, types and sizes and lays the file out. Free with even_safetensors_layout_free, also after a failure. */
even_status even_safetensors_layout_make(const even_checkpoint_file *file, even_safetensors_layout *out) EVEN_MUST_USE;
void even_safetensors_layout_free(even_safetensors_layout *layout);

#endif
