/* The layout of a safetensors file. The format allows no gaps: tensors of whole cache lines come first, so that in
 * memory that holds the file as it is each is aligned as kernels like it; the others by their elements, widest first.
 * Then by name, so that the same state gives the same bytes. */
#include "checkpoint/layout.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"
#include "base/json_writer.h"
#include "base/utf8.h"
#include "checkpoint/dtype.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { LENGTH_BYTES = 8, HEADER_ALIGNMENT = 64, MOST_DIMENSIONS = 64 };
static const size_t most_header_bytes = 100000000; /* what readers of the format accept */

typedef struct entry {
  const char *name;
  size_t index;
  size_t element_bytes;
  bool whole_lines;
} entry;

static int by_name(const void *left, const void *right) {
  return strcmp(((const entry *)left)->name, ((const entry *)right)->name);
}

static int by_place(const void *left, const void *right) {
  const entry *a = left;
  const entry *b = right;
  if (a->whole_lines != b->whole_lines) {
    return a->whole_lines ? -1 : 1;
  }
  if (a->element_bytes != b->element_bytes) {
    return a->element_bytes > b->element_bytes ? -1 : 1;
  }
  return strcmp(a->name, b->name);
}

/* RFC 3629: shortest forms only, no surrogates, nothing above U+10FFFF. */

static even_status check_tensor(const char *file, const even_checkpoint_tensor *tensor, bool can_fetch,
                                size_t *element_bytes) {
  uint64_t bytes = 0;
  if (tensor->name == NULL || !even_utf8_valid(tensor->name) || strcmp(tensor->name, "__metadata__") == 0) {
    return even_fail(EVEN_ERR_ARGUMENT, "%s: a tensor's name is %s", file,
                     tensor->name == NULL             ? "missing"
                     : !even_utf8_valid(tensor->name) ? "not UTF-8"
                                                      : "__metadata__, which the format keeps for itself");
  }
  *element_bytes = tensor->dtype == NULL ? 0 : even_safetensors_dtype_bytes(tensor->dtype);
  if (*element_bytes == 0) {
    return even_fail(EVEN_ERR_ARGUMENT, "%s: tensor %s has the type %s, which safetensors does not know", file,
                     tensor->name, tensor->dtype == NULL ? "(none)" : tensor->dtype);
  }
  if (tensor->dimensions > MOST_DIMENSIONS ||
      !even_safetensors_shape_bytes(tensor->shape, tensor->dimensions, *element_bytes, &bytes)) {
    return even_fail(EVEN_ERR_OVERFLOW, "%s: tensor %s has a negative, too large or too deep shape", file,
                     tensor->name);
  }
  if (bytes != tensor->bytes) {
    return even_fail(EVEN_ERR_ARGUMENT, "%s: tensor %s has %zu bytes, but its shape and type %s need %" PRIu64, file,
                     tensor->name, tensor->bytes, tensor->dtype, bytes);
  }
  if (bytes > 0 && tensor->data == NULL && !can_fetch) {
    return even_fail(EVEN_ERR_ARGUMENT, "%s: tensor %s has no data", file, tensor->name);
  }
  return EVEN_OK;
}

static even_status collect(const even_checkpoint_file *file, entry *entries) {
  for (size_t i = 0; i < file->tensor_count; i++) {
    entries[i] = (entry){file->tensors[i].name, i, 0, file->tensors[i].bytes % HEADER_ALIGNMENT == 0};
    EVEN_TRY(check_tensor(file->name, &file->tensors[i], file->fetch != NULL, &entries[i].element_bytes));
  }
  qsort(entries, file->tensor_count, sizeof *entries, by_name);
  for (size_t i = 1; i < file->tensor_count; i++) {
    if (strcmp(entries[i - 1].name, entries[i].name) == 0) {
      return even_fail(EVEN_ERR_ARGUMENT, "%s: two tensors have the name %s", file->name, entries[i].name);
    }
  }
  qsort(entries, file->tensor_count, sizeof *entries, by_place);
  return EVEN_OK;
}

static even_status add_metadata(even_json *json, const even_checkpoint_file *file) {
  if (file->metadata == NULL && file->metadata_count > 0) {
    return even_fail(EVEN_ERR_ARGUMENT, "%s: %zu pairs of metadata, but no address", file->name, file->metadata_count);
  }
  even_json_object(json, "__metadata__");
  if (file->metadata == NULL) {
    even_json_string(json, "format", "pt");
  }
  for (size_t i = 0; i < file->metadata_count; i++) {
    const even_checkpoint_pair *pair = &file->metadata[i];
    if (pair->key == NULL || pair->value == NULL || !even_utf8_valid(pair->key) || !even_utf8_valid(pair->value)) {
      return even_fail(EVEN_ERR_ARGUMENT, "%s: pair %zu of the metadata has no key or value in UTF-8", file->name, i);
    }
    for (size_t j = 0; j < i; j++) {
      if (strcmp(pair->key, file->metadata[j].key) == 0) {
        return even_fail(EVEN_ERR_ARGUMENT, "%s: the metadata have %s twice", file->name, pair->key);
      }
    }
    even_json_string(json, pair->key, pair->value);
  }
  even_json_object_end(json);
  return EVEN_OK;
}

static even_status add_tensor(even_json *json, const even_checkpoint_tensor *tensor, uint64_t *offset) {
  uint64_t end = 0;
  if (__builtin_add_overflow(*offset, (uint64_t)tensor->bytes, &end) || end > (uint64_t)INT64_MAX) {
    return even_fail(EVEN_ERR_OVERFLOW, "tensor %s ends beyond the largest file", tensor->name);
  }
  even_json_object(json, tensor->name);
  even_json_string(json, "dtype", tensor->dtype);
  even_json_array(json, "shape");
  for (size_t i = 0; i < tensor->dimensions; i++) {
    even_json_integer(json, NULL, tensor->shape[i]);
  }
  even_json_array_end(json);
  even_json_array(json, "data_offsets");
  even_json_unsigned(json, NULL, *offset);
  even_json_unsigned(json, NULL, end);
  even_json_array_end(json);
  even_json_object_end(json);
  *offset = end;
  return EVEN_OK;
}

static even_status write_header(const even_checkpoint_file *file, even_safetensors_layout *layout) {
  unsigned char length[LENGTH_BYTES] = {0};
  even_text *text = &layout->header;
  even_text_append(text, (const char *)length, sizeof length);
  even_json json = even_json_begin(text, 0);
  even_json_object(&json, NULL);
  EVEN_TRY(add_metadata(&json, file));
  for (size_t i = 0; i < file->tensor_count; i++) {
    EVEN_TRY(add_tensor(&json, &file->tensors[layout->order[i]], &layout->data_bytes));
  }
  even_json_object_end(&json);
  while (text->length % HEADER_ALIGNMENT != 0 && even_text_status(text) == EVEN_OK) {
    even_text_append(text, " ", 1);
  }
  EVEN_TRY(even_text_status(text));
  uint64_t json_bytes = text->length - LENGTH_BYTES;
  if (json_bytes > most_header_bytes) {
    return even_fail(EVEN_ERR_OVERFLOW, "%s: a header of %" PRIu64 " bytes; readers accept %zu", file->name, json_bytes,
                     most_header_bytes);
  }
  for (size_t i = 0; i < LENGTH_BYTES; i++) {
    text->data[i] = (char)((json_bytes >> (8 * i)) & 0xFF);
  }
  return EVEN_OK;
}

even_status even_safetensors_layout_make(const even_checkpoint_file *file, even_safetensors_layout *out) {
  entry *entries = NULL;
  *out = (even_safetensors_layout){.order = NULL, .header = EVEN_TEXT_EMPTY};
  EVEN_TRY(EVEN_NEW_ARRAY(&out->order, file->tensor_count));
  EVEN_TRY(EVEN_NEW_ARRAY(&entries, file->tensor_count));
  even_status status = collect(file, entries);
  for (size_t i = 0; i < file->tensor_count; i++) {
    out->order[i] = entries[i].index;
  }
  even_free(entries);
  EVEN_TRY(status);
  return write_header(file, out);
}

void even_safetensors_layout_free(even_safetensors_layout *layout) {
  even_free(layout->order);
  even_text_free(&layout->header);
  layout->order = NULL;
}
