/* Buckets: parameters in reverse order, one dtype a bucket, each up to a cap. */
#include "sync/layout.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"

#include <stdbool.h>

#define ALIGNMENT ((size_t)64)
#define DEFAULT_BUCKET_BYTES ((size_t)4 << 20)
#define DEFAULT_FIRST_BUCKET_BYTES ((size_t)256 << 10)
#define NO_BUCKET SIZE_MAX

enum { DTYPES = 4 }; /* F32, F64, F16, BF16: the first of EVEN_DTYPE_LIST */

static even_status slot_bytes(const even_sync_params *params, size_t index, size_t *out) {
  const even_sync_parameter *parameter = &params->parameters[index];
  if ((int)parameter->dtype < 0 || (int)parameter->dtype >= DTYPES) {
    return even_fail(EVEN_ERR_ARGUMENT, "parameter %zu has dtype number %d, which has no gradient", index,
                     (int)parameter->dtype);
  }
  if (!even_multiply_size(parameter->count, even_dtype_bytes(parameter->dtype), out) ||
      !even_align_size(*out, ALIGNMENT, out)) {
    return even_fail(EVEN_ERR_OVERFLOW, "parameter %zu has %zu elements, too many for memory", index, parameter->count);
  }
  return EVEN_OK;
}

/* What a bucket of this dtype may hold; the first one is that which is reduced first. */
static size_t limit_of(const even_sync_params *params, even_dtype dtype, bool first) {
  size_t cap = params->bucket_bytes > 0 ? params->bucket_bytes : DEFAULT_BUCKET_BYTES;
  size_t first_cap = params->first_bucket_bytes > 0 ? params->first_bucket_bytes : DEFAULT_FIRST_BUCKET_BYTES;
  if (params->bucket_elements > 0) {
    if (!even_multiply_size(params->bucket_elements, even_dtype_bytes(dtype), &cap)) {
      cap = SIZE_MAX;
    }
    first_cap = first_cap < cap ? first_cap : cap;
  }
  return first ? first_cap : cap;
}

/* Puts the parameters that are `late` or not into buckets; a place's offset is still the one inside its bucket. */
static even_status fill(const even_sync_params *params, bool late, even_sync_layout *layout) {
  size_t open[DTYPES] = {NO_BUCKET, NO_BUCKET, NO_BUCKET, NO_BUCKET};
  for (size_t index = params->parameter_count; index-- > 0;) {
    size_t bytes = 0;
    size_t grown = 0;
    if ((params->parameters[index].late != 0) != late) {
      continue;
    }
    EVEN_TRY(slot_bytes(params, index, &bytes));
    size_t *current = &open[params->parameters[index].dtype];
    bool full = *current == NO_BUCKET;
    if (!full) {
      size_t limit = limit_of(params, params->parameters[index].dtype, *current == 0);
      full = !even_add_size(layout->buckets[*current].bytes, bytes, &grown) || grown > limit;
    }
    if (full) {
      *current = layout->bucket_count++;
      layout->buckets[*current].dtype = params->parameters[index].dtype;
    }
    even_sync_span *bucket = &layout->buckets[*current];
    layout->places[index] = (even_sync_place){.bucket = *current, .offset = bucket->bytes};
    bucket->bytes += bytes;
    bucket->members++;
  }
  return EVEN_OK;
}

/* Where a round says whether all gradients were finite. */
static even_status mark(const even_sync_params *params, even_sync_layout *layout) {
  layout->marked = params->static_graph != 0 && layout->bucket_count > 0;
  if (!layout->marked) {
    return EVEN_OK;
  }
  if (params->encoding != EVEN_SYNC_PLAIN || params->unsummed) {
    return even_fail(EVEN_ERR_ARGUMENT, "gradients that are encoded or stay unsummed have no place for a mark");
  }
  even_sync_span *last = &layout->buckets[layout->bucket_count - 1];
  if (!even_add_size(last->bytes, EVEN_SYNC_MARK_BYTES, &last->bytes)) {
    return even_fail(EVEN_ERR_OVERFLOW, "a bucket of %zu bytes", last->bytes);
  }
  return EVEN_OK;
}

static even_status place(const even_sync_params *params, even_sync_layout *layout) {
  for (size_t b = 0; b < layout->bucket_count; b++) {
    layout->buckets[b].offset = layout->bytes;
    if (!even_add_size(layout->bytes, layout->buckets[b].bytes, &layout->bytes)) {
      return even_fail(EVEN_ERR_OVERFLOW, "%zu parameters do not fit in memory", params->parameter_count);
    }
  }
  size_t at = 0;
  for (size_t b = 0; b < layout->bucket_count; b++) {
    for (size_t index = params->parameter_count; index-- > 0;) {
      if (layout->places[index].bucket == b) {
        layout->places[index].offset += layout->buckets[b].offset;
        layout->order[at++] = index;
      }
    }
  }
  return EVEN_OK;
}

/* Room for the largest fp32 bucket in 16 bits. Its half is a multiple of 32, so one place is aligned after it. */
static even_status place_wire(const even_sync_params *params, even_sync_layout *layout) {
  size_t most = 0;
  layout->wire = params->wire;
  layout->wire_offset = layout->bytes;
  if (params->wire == EVEN_F32) {
    return EVEN_OK;
  }
  if (params->wire != EVEN_F16 && params->wire != EVEN_BF16) {
    return even_fail(EVEN_ERR_ARGUMENT, "gradients cannot travel as dtype number %d", (int)params->wire);
  }
  for (size_t b = 0; b < layout->bucket_count; b++) {
    if (layout->buckets[b].dtype == EVEN_F32 && layout->buckets[b].bytes > most) {
      most = layout->buckets[b].bytes;
    }
  }
  if (!even_align_size(most / 2, ALIGNMENT, &most) || !even_add_size(layout->bytes, most, &layout->bytes)) {
    return even_fail(EVEN_ERR_OVERFLOW, "%zu parameters do not fit in memory", params->parameter_count);
  }
  return EVEN_OK;
}

even_status even_sync_layout_make(const even_sync_params *params, even_sync_layout *out) {
  *out = (even_sync_layout){0};
  if (params->parameter_count > 0 && params->parameters == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "%zu parameters and no list of them", params->parameter_count);
  }
  if (params->arena_offset % ALIGNMENT != 0) {
    return even_fail(EVEN_ERR_ARGUMENT, "arena_offset %zu is not a multiple of 64", params->arena_offset);
  }
  even_status status = EVEN_NEW_ARRAY(&out->places, params->parameter_count);
  if (status == EVEN_OK) {
    status = EVEN_NEW_ARRAY(&out->buckets, params->parameter_count);
  }
  if (status == EVEN_OK) {
    status = EVEN_NEW_ARRAY(&out->order, params->parameter_count);
  }
  if (status == EVEN_OK) {
    status = fill(params, false, out);
  }
  if (status == EVEN_OK) {
    status = fill(params, true, out);
  }
  if (status == EVEN_OK) {
    status = mark(params, out);
  }
  if (status == EVEN_OK) {
    status = place(params, out);
  }
  if (status == EVEN_OK) {
    status = place_wire(params, out);
  }
  if (status != EVEN_OK) {
    even_sync_layout_free(out);
  }
  return status;
}

void even_sync_layout_free(even_sync_layout *layout) {
  even_free(layout->places);
  even_free(layout->buckets);
  even_free(layout->order);
  *layout = (even_sync_layout){0};
}
