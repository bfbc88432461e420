/* Compares two tensors piece by piece. */
#include "checkpoint/compare.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/stop.h"
#include "checkpoint/dtype.h"
#include "checkpoint/elements.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { PIECE = 32 * 1024 }; /* elements */

typedef struct side {
  even_safetensors_file *file;
  const char *dtype;
  size_t element_bytes;
  uint64_t at; /* in the file */
  uint64_t elements;
  unsigned char *raw; /* PIECE elements of 8 bytes */
  double *values;     /* PIECE */
} side;

typedef struct sums {
  long double difference; /* of squares: a double's square may be too large for a double */
  long double of_a;
} sums;

static even_status find(even_safetensors_file *file, const char *name, side *out, const json_t **shape) {
  const json_t *tensor = json_object_get(file->header, name);
  const json_t *offsets = json_object_get(tensor, "data_offsets");
  if (tensor == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "%s has no tensor %s", file->input.path, name);
  }
  *shape = json_object_get(tensor, "shape");
  out->file = file;
  out->dtype = json_string_value(json_object_get(tensor, "dtype"));
  out->element_bytes = out->dtype == NULL ? 0 : even_safetensors_dtype_bytes(out->dtype);
  if (out->element_bytes == 0) {
    return even_fail(EVEN_ERR_CORRUPT, "%s: tensor %s has no known type", file->input.path, name);
  }
  uint64_t begin = (uint64_t)json_integer_value(json_array_get(offsets, 0));
  uint64_t bytes = (uint64_t)json_integer_value(json_array_get(offsets, 1)) - begin;
  out->at = file->data + begin;
  if (strcmp(out->dtype, "C64") == 0) { /* pairs of F32 */
    out->dtype = "F32";
    out->element_bytes = sizeof(float);
  }
  out->elements = bytes / out->element_bytes;
  return EVEN_OK;
}

static even_status read_piece(const side *of, uint64_t element, size_t count) {
  if (even_stop_asked()) {
    return even_fail(EVEN_ERR_INTERRUPTED, "%s: interrupted", of->file->input.path);
  }
  return even_input_read_at(&of->file->input, of->at + element * of->element_bytes, of->raw, count * of->element_bytes);
}

static size_t piece_of(uint64_t elements, uint64_t at) {
  return elements - at < PIECE ? (size_t)(elements - at) : (size_t)PIECE;
}

/* Most of two checkpoints is the same bytes, which needs no arithmetic. */
static even_status same_bytes(const side *a, const side *b, uint64_t elements, bool *same) {
  *same = strcmp(a->dtype, b->dtype) == 0;
  for (uint64_t at = 0; at < elements && *same; at += PIECE) {
    size_t count = piece_of(elements, at);
    EVEN_TRY(read_piece(a, at, count));
    EVEN_TRY(read_piece(b, at, count));
    *same = memcmp(a->raw, b->raw, count * a->element_bytes) == 0;
  }
  return EVEN_OK;
}

/* |a - b| of 64-bit integers, which doubles do not hold. */
static double integer_distance(const unsigned char *a, const unsigned char *b, bool is_signed) {
  uint64_t left = 0;
  uint64_t right = 0;
  memcpy(&left, a, sizeof left);
  memcpy(&right, b, sizeof right);
  bool less = is_signed ? (int64_t)left < (int64_t)right : left < right;
  return (double)(less ? right - left : left - right);
}

static void add_pair(double a, double b, double distance, even_tensor_difference *out, sums *total) {
  double larger = fmax(fabs(a), fabs(b));
  out->largest = fmax(out->largest, distance);
  out->largest_relative = fmax(out->largest_relative, larger > 0 ? distance / larger : 0);
  total->difference += (long double)distance * (long double)distance;
}

static void measure_piece(const side *a, const side *b, size_t count, even_tensor_difference *out, sums *total) {
  bool wide = out->same_type && (strcmp(a->dtype, "I64") == 0 || strcmp(a->dtype, "U64") == 0);
  even_elements_decode(a->dtype, a->raw, count, a->values);
  even_elements_decode(b->dtype, b->raw, count, b->values);
  for (size_t i = 0; i < count; i++) {
    double left = a->values[i];
    double right = b->values[i];
    const unsigned char *left_raw = a->raw + i * a->element_bytes;
    const unsigned char *right_raw = b->raw + i * b->element_bytes;
    bool finite = isfinite(left) && isfinite(right);
    bool equal = out->same_type ? memcmp(left_raw, right_raw, a->element_bytes) == 0
                                : left == right || (isnan(left) && isnan(right));
    if (isfinite(left)) {
      total->of_a += (long double)left * (long double)left;
    }
    if (equal) {
      continue;
    }
    out->different++;
    if (!finite) {
      out->not_finite++;
      continue;
    }
    add_pair(left, right, wide ? integer_distance(left_raw, right_raw, a->dtype[0] == 'I') : fabs(left - right), out,
             total);
  }
}

static even_status measure(const side *a, const side *b, even_tensor_difference *out) {
  sums total = {0, 0};
  for (uint64_t at = 0; at < out->elements; at += PIECE) {
    size_t count = piece_of(out->elements, at);
    EVEN_TRY(read_piece(a, at, count));
    EVEN_TRY(read_piece(b, at, count));
    measure_piece(a, b, count, out, &total);
  }
  if (total.difference > 0) {
    out->relative_norm = total.of_a > 0 ? (double)sqrtl(total.difference / total.of_a) : (double)INFINITY;
  }
  return EVEN_OK;
}

even_status even_tensors_compare(even_safetensors_file *a, const char *name_a, even_safetensors_file *b,
                                 const char *name_b, even_tensor_difference *out) {
  side left = {.raw = NULL};
  side right = {.raw = NULL};
  const json_t *shape_left = NULL;
  const json_t *shape_right = NULL;
  bool same = false;
  *out = (even_tensor_difference){.compared = false};
  EVEN_TRY(find(a, name_a, &left, &shape_left));
  EVEN_TRY(find(b, name_b, &right, &shape_right));
  out->same_shape = json_equal(shape_left, shape_right) == 1;
  out->same_type = json_equal(json_object_get(json_object_get(a->header, name_a), "dtype"),
                              json_object_get(json_object_get(b->header, name_b), "dtype")) == 1;
  out->elements = left.elements;
  /* a complex and a real tensor of one shape have not as many numbers */
  out->compared = out->same_shape && right.elements == left.elements;
  if (!out->compared) {
    return EVEN_OK;
  }
  void *memory = NULL;
  const size_t raw_bytes = (size_t)PIECE * sizeof(uint64_t);
  const size_t value_bytes = (size_t)PIECE * sizeof(double);
  EVEN_TRY(even_alloc(2, raw_bytes + value_bytes, &memory));
  left.values = memory;
  right.values = left.values + PIECE;
  left.raw = (unsigned char *)memory + 2 * value_bytes;
  right.raw = left.raw + raw_bytes;
  even_status status = same_bytes(&left, &right, out->elements, &same);
  if (status == EVEN_OK && !same) {
    status = measure(&left, &right, out);
  }
  even_free(memory);
  return status;
}

/* ---- whole files ---- */

typedef struct file_set {
  even_safetensors_file *files;
  size_t count; /* that are open, the last one perhaps in part */
} file_set;

static even_status open_all(const even_names *paths, file_set *out) {
  *out = (file_set){.files = NULL};
  EVEN_TRY(EVEN_NEW_ARRAY(&out->files, paths->count));
  for (size_t i = 0; i < paths->count; i++) {
    EVEN_TRY(even_safetensors_open(paths->items[i], &out->files[out->count++]));
  }
  return EVEN_OK;
}

static void close_all(file_set *set) {
  for (size_t i = 0; i < set->count; i++) {
    even_safetensors_close(&set->files[i]);
  }
  even_free(set->files);
}

static even_tensor_side find_in(const file_set *set, const char *name) {
  for (size_t i = 0; i < set->count; i++) {
    const json_t *tensor = json_object_get(set->files[i].header, name);
    if (tensor != NULL) {
      return (even_tensor_side){tensor, i};
    }
  }
  return (even_tensor_side){NULL, 0};
}

static even_status compare_of(file_set *a, size_t file, file_set *b, even_tensor_told *told, void *context) {
  const char *name = NULL;
  json_t *tensor = NULL;
  json_object_foreach(a->files[file].header, name, tensor) {
    even_tensor_difference how = {.compared = false};
    if (strcmp(name, "__metadata__") == 0) {
      continue;
    }
    even_tensor_side other = find_in(b, name);
    if (other.tensor != NULL) {
      EVEN_TRY(even_tensors_compare(&a->files[file], name, &b->files[other.file], name, &how));
    }
    told(context, name, (even_tensor_side){tensor, file}, other, &how);
  }
  return EVEN_OK;
}

static void tell_further(const file_set *a, const file_set *b, even_tensor_told *told, void *context) {
  static const even_tensor_difference none = {.compared = false};
  const char *name = NULL;
  json_t *tensor = NULL;
  for (size_t i = 0; i < b->count; i++) {
    json_object_foreach(b->files[i].header, name, tensor) {
      even_tensor_side other = find_in(a, name);
      if (strcmp(name, "__metadata__") != 0 && other.tensor == NULL) {
        told(context, name, other, (even_tensor_side){tensor, i}, &none);
      }
    }
  }
}

even_status even_safetensors_compare(const even_names *paths_a, const even_names *paths_b, even_tensor_told *told,
                                     void *context) {
  file_set a;
  file_set b = {.files = NULL};
  even_status status = open_all(paths_a, &a);
  if (status == EVEN_OK) {
    status = open_all(paths_b, &b);
  }
  for (size_t i = 0; status == EVEN_OK && i < a.count; i++) {
    status = compare_of(&a, i, &b, told, context);
  }
  if (status == EVEN_OK) {
    tell_further(&a, &b, told, context);
  }
  close_all(&a);
  close_all(&b);
  return status;
}

bool even_safetensors_is_named(const char *name) {
  const char *ending = strrchr(name, '.');
  return ending != NULL && strcmp(ending, ".safetensors") == 0;
}
