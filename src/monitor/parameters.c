/* Two safetensors files, tensor by tensor, in blocks. */
#include "monitor/parameters.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "checkpoint/reader.h"
#include "os/stream.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK_BYTES = 1 << 20, LENGTH_BYTES = 8 };

typedef struct side {
  const char *path;
  even_input input;
  json_t *header;
  uint64_t data; /* where the tensors begin */
  unsigned char *block;
} side;

double even_parameters_half(unsigned short bits) {
  int exponent = (bits >> 10) & 0x1f;
  double fraction = bits & 0x3ff;
  double value = exponent == 31  ? (fraction > 0 ? NAN : INFINITY)
                 : exponent == 0 ? ldexp(fraction, -24)
                                 : ldexp(1024 + fraction, exponent - 25);
  return (bits & 0x8000) != 0 ? -value : value;
}

static size_t element_bytes(const char *dtype) {
  return strcmp(dtype, "F64") == 0                                 ? 8
         : strcmp(dtype, "F32") == 0                               ? 4
         : strcmp(dtype, "F16") == 0 || strcmp(dtype, "BF16") == 0 ? 2
                                                                   : 0;
}

static double element(const char *dtype, const unsigned char *at) {
  uint16_t half = 0;
  float single = 0;
  double value = 0;
  if (dtype[0] == 'F' && dtype[1] == '6') {
    memcpy(&value, at, sizeof value);
    return value;
  }
  if (dtype[0] == 'F' && dtype[1] == '3') {
    memcpy(&single, at, sizeof single);
    return (double)single;
  }
  memcpy(&half, at, sizeof half);
  if (dtype[0] == 'F') {
    return even_parameters_half(half);
  }
  uint32_t bits = (uint32_t)half << 16;
  memcpy(&single, &bits, sizeof single);
  return (double)single;
}

static even_status open_side(const char *path, side *out) {
  unsigned char length[LENGTH_BYTES] = {0};
  out->path = path;
  EVEN_TRY(even_safetensors_read_header(path, &out->header));
  EVEN_TRY(even_alloc(BLOCK_BYTES, 1, (void **)&out->block));
  EVEN_TRY(even_input_open(path, &out->input));
  EVEN_TRY(even_input_read_at(&out->input, 0, length, sizeof length));
  for (int i = LENGTH_BYTES - 1; i >= 0; i--) {
    out->data = out->data << 8 | length[i];
  }
  out->data += LENGTH_BYTES;
  return EVEN_OK;
}

static void close_side(side *at) {
  even_input_close(&at->input);
  json_decref(at->header);
  even_free(at->block);
}

static uint64_t offset_of(const json_t *tensor, size_t which) {
  return (uint64_t)json_integer_value(json_array_get(json_object_get(tensor, "data_offsets"), which));
}

typedef struct sums {
  double difference;
  double norm;
  double elements;
} sums;

static even_status compare_tensor(side *a, side *b, const json_t *in_a, const json_t *in_b, sums *into) {
  const char *type_a = json_string_value(json_object_get(in_a, "dtype"));
  const char *type_b = json_string_value(json_object_get(in_b, "dtype"));
  size_t bytes_a = element_bytes(type_a);
  size_t bytes_b = element_bytes(type_b);
  if (bytes_a == 0 || bytes_b == 0) {
    return EVEN_OK; /* not numbers to compare */
  }
  uint64_t count = (offset_of(in_a, 1) - offset_of(in_a, 0)) / bytes_a;
  const uint64_t at_once = BLOCK_BYTES / 8;
  for (uint64_t done = 0; done < count; done += at_once) {
    size_t now = (size_t)(count - done < at_once ? count - done : at_once);
    EVEN_TRY(even_input_read_at(&a->input, a->data + offset_of(in_a, 0) + done * bytes_a, a->block, now * bytes_a));
    EVEN_TRY(even_input_read_at(&b->input, b->data + offset_of(in_b, 0) + done * bytes_b, b->block, now * bytes_b));
    for (size_t i = 0; i < now; i++) {
      double left = element(type_a, a->block + i * bytes_a);
      double right = element(type_b, b->block + i * bytes_b);
      into->difference += (left - right) * (left - right);
      into->norm += right * right;
    }
  }
  into->elements += (double)count;
  return EVEN_OK;
}

static even_status compare_all(side *a, side *b, even_parameters_difference *out) {
  const char *name = NULL;
  json_t *in_a = NULL;
  sums total = {0, 0, 0};
  json_object_foreach(a->header, name, in_a) {
    const json_t *in_b = json_object_get(b->header, name);
    if (strcmp(name, "__metadata__") == 0) {
      continue;
    }
    if (in_b == NULL || !json_equal(json_object_get(in_a, "shape"), json_object_get(in_b, "shape"))) {
      return even_fail(EVEN_ERR_MISMATCH, "the models differ: tensor %s of %s %s %s", name, a->path,
                       in_b == NULL ? "is not in" : "has another shape in", b->path);
    }
    bool floating = element_bytes(json_string_value(json_object_get(in_a, "dtype"))) > 0;
    if (floating != (element_bytes(json_string_value(json_object_get(in_b, "dtype"))) > 0)) {
      return even_fail(EVEN_ERR_MISMATCH, "the models differ: tensor %s has another type in %s", name, b->path);
    }
    if (floating) {
      EVEN_TRY(compare_tensor(a, b, in_a, in_b, &total));
      out->tensors++;
    }
  }
  if (json_object_size(a->header) - (json_object_get(a->header, "__metadata__") != NULL) !=
      json_object_size(b->header) - (json_object_get(b->header, "__metadata__") != NULL)) {
    return even_fail(EVEN_ERR_MISMATCH, "the models differ: %s has tensors that %s has not", b->path, a->path);
  }
  out->elements = total.elements;
  out->relative_norm = total.difference == 0 ? 0 : sqrt(total.difference) / sqrt(total.norm);
  return EVEN_OK;
}

even_status even_parameters_compare(const char *path_a, const char *path_b, even_parameters_difference *out) {
  side a = {.input = {.fd = -1}};
  side b = {.input = {.fd = -1}};
  *out = (even_parameters_difference){.relative_norm = NAN};
  even_status status = open_side(path_a, &a);
  if (status == EVEN_OK) {
    status = open_side(path_b, &b);
  }
  if (status == EVEN_OK) {
    status = compare_all(&a, &b, out);
  }
  close_side(&a);
  close_side(&b);
  return status;
}
