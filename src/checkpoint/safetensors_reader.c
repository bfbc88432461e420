/* Reads and checks the header of a safetensors file. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "checkpoint/compare.h"
#include "checkpoint/dtype.h"
#include "checkpoint/reader.h"
#include "os/stream.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { LENGTH_BYTES = 8, MOST_DIMENSIONS = 64 };
static const uint64_t most_header_bytes = 100000000;

typedef struct range {
  uint64_t begin;
  uint64_t end;
  const char *name;
} range;

static int by_begin(const void *left, const void *right) {
  const range *a = left;
  const range *b = right;
  if (a->begin != b->begin) {
    return a->begin < b->begin ? -1 : 1;
  }
  return a->end < b->end ? -1 : a->end > b->end;
}

static even_status corrupt_tensor(const char *origin, const char *name, const char *what) {
  return even_fail(EVEN_ERR_CORRUPT, "%s: tensor %s %s", origin, name, what);
}

static even_status check_tensor(const char *origin, const char *name, const json_t *tensor, uint64_t data_bytes,
                                range *out) {
  int64_t shape[MOST_DIMENSIONS];
  const char *dtype = json_string_value(json_object_get(tensor, "dtype"));
  const json_t *dimensions = json_object_get(tensor, "shape");
  const json_t *offsets = json_object_get(tensor, "data_offsets");
  size_t element_bytes = dtype == NULL ? 0 : even_safetensors_dtype_bytes(dtype);
  uint64_t bytes = 0;
  if (element_bytes == 0) {
    return corrupt_tensor(origin, name, "has no known type");
  }
  if (!json_is_array(dimensions) || json_array_size(dimensions) > MOST_DIMENSIONS) {
    return corrupt_tensor(origin, name, "has no shape");
  }
  for (size_t i = 0; i < json_array_size(dimensions); i++) {
    const json_t *dimension = json_array_get(dimensions, i);
    shape[i] = json_is_integer(dimension) ? (int64_t)json_integer_value(dimension) : -1;
  }
  if (!even_safetensors_shape_bytes(shape, json_array_size(dimensions), element_bytes, &bytes)) {
    return corrupt_tensor(origin, name, "has an impossible shape");
  }
  const json_t *begin = json_array_get(offsets, 0);
  const json_t *end = json_array_get(offsets, 1);
  if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end) ||
      json_integer_value(begin) < 0 || json_integer_value(end) < json_integer_value(begin)) {
    return corrupt_tensor(origin, name, "has no data_offsets");
  }
  *out = (range){(uint64_t)json_integer_value(begin), (uint64_t)json_integer_value(end), name};
  if (out->end > data_bytes) {
    return corrupt_tensor(origin, name, "lies beyond the end of the file");
  }
  return out->end - out->begin == bytes ? EVEN_OK
                                        : corrupt_tensor(origin, name, "has a size that its shape does not have");
}

/* The format allows neither overlap nor gap: sorted by place, each range begins where the one before it ends. */
static even_status check_ranges(const char *origin, range *ranges, size_t count, uint64_t data_bytes) {
  uint64_t at = 0;
  if (count > 1) {
    qsort(ranges, count, sizeof *ranges, by_begin);
  }
  for (size_t i = 0; i < count; i++) {
    if (ranges[i].begin != at) {
      return corrupt_tensor(origin, ranges[i].name, ranges[i].begin < at ? "overlaps another" : "begins behind a gap");
    }
    at = ranges[i].end;
  }
  if (at != data_bytes) {
    return even_fail(EVEN_ERR_CORRUPT, "%s: %" PRIu64 " bytes of data, of which tensors use %" PRIu64, origin,
                     data_bytes, at);
  }
  return EVEN_OK;
}

static even_status check_header(const char *origin, json_t *root, uint64_t data_bytes) {
  range *ranges = NULL;
  size_t count = 0;
  const char *name = NULL;
  json_t *tensor = NULL;
  even_status status = EVEN_OK;
  if (!json_is_object(root)) {
    return even_fail(EVEN_ERR_CORRUPT, "%s: its header is not a JSON object", origin);
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&ranges, json_object_size(root)));
  json_object_foreach(root, name, tensor) {
    if (strcmp(name, "__metadata__") == 0) {
      continue;
    }
    status = check_tensor(origin, name, tensor, data_bytes, &ranges[count]);
    if (status != EVEN_OK) {
      break;
    }
    count++;
  }
  if (status == EVEN_OK) {
    status = check_ranges(origin, ranges, count, data_bytes);
  }
  even_free(ranges);
  return status;
}

even_status even_safetensors_parse(const char *origin, const char *header, size_t header_bytes, uint64_t data_bytes,
                                   json_t **out) {
  *out = NULL;
  if (even_json_parse(origin, header, header_bytes, out) != EVEN_OK) {
    char what[256];
    (void)snprintf(what, sizeof what, "%.255s", even_error_last()->what);
    return even_fail(EVEN_ERR_CORRUPT, "%s (safetensors header)", what);
  }
  even_status status = check_header(origin, *out, data_bytes);
  if (status != EVEN_OK) {
    json_decref(*out);
    *out = NULL;
  }
  return status;
}

static even_status read_header(even_input *input, char **text, uint64_t *header_bytes) {
  unsigned char length[LENGTH_BYTES];
  size_t got = 0;
  EVEN_TRY(even_input_read(input, length, sizeof length, &got));
  *header_bytes = 0;
  for (size_t i = got; i-- > 0;) {
    *header_bytes = *header_bytes << 8 | length[i];
  }
  if (got < sizeof length || *header_bytes > most_header_bytes || *header_bytes > input->bytes - sizeof length) {
    return even_fail(EVEN_ERR_CORRUPT, "%s: no safetensors header in its %" PRIu64 " bytes", input->path, input->bytes);
  }
  EVEN_TRY(even_alloc((size_t)*header_bytes, 1, (void **)text));
  EVEN_TRY(even_input_read(input, *text, (size_t)*header_bytes, &got));
  return got == *header_bytes ? EVEN_OK : even_fail(EVEN_ERR_CORRUPT, "%s: its header is truncated", input->path);
}

even_status even_safetensors_open(const char *path, even_safetensors_file *out) {
  char *text = NULL;
  uint64_t header_bytes = 0;
  *out = (even_safetensors_file){.input = {.fd = -1}};
  EVEN_TRY(even_input_open(path, &out->input));
  even_status status = read_header(&out->input, &text, &header_bytes);
  if (status == EVEN_OK) {
    out->data = LENGTH_BYTES + header_bytes;
    status = even_safetensors_parse(path, text, (size_t)header_bytes, out->input.bytes - out->data, &out->header);
  }
  even_free(text);
  return status;
}

void even_safetensors_close(even_safetensors_file *file) {
  even_input_close(&file->input);
  json_decref(file->header);
  file->header = NULL;
}

even_status even_safetensors_read_header(const char *path, json_t **out) {
  even_safetensors_file file;
  even_status status = even_safetensors_open(path, &file);
  *out = json_incref(file.header);
  even_safetensors_close(&file);
  return status;
}
