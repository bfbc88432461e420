/* Content of a checkpoint's file, and writing it front to back. */
#include "checkpoint/content.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/stop.h"
#include "checkpoint/checksums.h"
#include "checkpoint/parts.h"

#include <string.h>

static even_status content_of_tensors(const even_checkpoint_file *file, const even_safetensors_layout *layout,
                                      even_content *out) {
  *out = (even_content){.fetch = file->fetch, .fetch_context = file->fetch_context};
  EVEN_TRY(EVEN_NEW_ARRAY(&out->pieces, file->tensor_count + 1));
  out->pieces[out->count++] =
      (even_content_piece){.data = layout->header.data, .begin = 0, .bytes = layout->header.length};
  out->bytes = layout->header.length;
  for (size_t i = 0; i < file->tensor_count; i++) {
    const even_checkpoint_tensor *tensor = &file->tensors[layout->order[i]];
    if (tensor->bytes > 0) {
      out->pieces[out->count++] = (even_content_piece){
          .data = tensor->data, .begin = out->bytes, .bytes = tensor->bytes, .index = layout->order[i]};
      out->bytes += tensor->bytes;
    }
  }
  return EVEN_OK;
}

static even_status content_of_bytes(const even_checkpoint_file *file, even_content *out) {
  *out = (even_content){.bytes = file->raw_bytes};
  EVEN_TRY(EVEN_NEW_ARRAY(&out->pieces, 1));
  out->pieces[0] = (even_content_piece){.data = file->raw, .bytes = file->raw_bytes};
  out->count = 1;
  return EVEN_OK;
}

even_status even_content_of_file(const even_checkpoint_file *file, even_safetensors_layout *layout, even_content *out) {
  if (file->raw != NULL) {
    return content_of_bytes(file, out);
  }
  EVEN_TRY(even_safetensors_layout_make(file, layout));
  return content_of_tensors(file, layout, out);
}

void even_content_free(even_content *content) {
  even_free(content->pieces);
  *content = (even_content){.pieces = NULL};
}

static even_status data_of(const even_content *content, const even_content_piece *piece, const void **data) {
  *data = piece->data;
  if (piece->data != NULL) {
    return EVEN_OK;
  }
  const even_error aside = even_error_aside();
  return even_error_told(content->fetch(content->fetch_context, piece->index, data), &aside);
}

/* ---- one thread ---- */
/* Chunk by chunk, so that what is summed is written while it is in the cache. */
static even_status put(even_output *output, even_chunk_sums *sums, const void *data, size_t bytes) {
  const char *at = data;
  while (bytes > 0) {
    size_t room = even_chunk_sums_room(sums);
    size_t piece = bytes < room ? bytes : room;
    if (even_stop_asked()) {
      return even_fail(EVEN_ERR_INTERRUPTED, "interrupted while %s was written", output->path);
    }
    EVEN_TRY(even_chunk_sums_update(sums, at, piece));
    EVEN_TRY(even_output_write(output, at, piece));
    at += piece;
    bytes -= piece;
  }
  return EVEN_OK;
}

static even_status write_in_order(const even_content *content, even_output *output, uint64_t **out, size_t *count) {
  even_chunk_sums *sums = NULL;
  EVEN_TRY(even_chunk_sums_open(EVEN_CHECKPOINT_CHUNK_BYTES, &sums));
  even_status status = EVEN_OK;
  for (size_t i = 0; status == EVEN_OK && i < content->count; i++) {
    const void *data = NULL;
    status = data_of(content, &content->pieces[i], &data);
    if (status == EVEN_OK && content->parts != NULL) {
      even_parts_sum(content, i, data);
    }
    if (status == EVEN_OK) {
      status = put(output, sums, data, content->pieces[i].bytes);
    }
  }
  if (status == EVEN_OK) {
    return even_chunk_sums_finish(sums, out, count);
  }
  even_chunk_sums_drop(sums);
  return status;
}

bool even_content_is_here(const even_content *content) {
  bool here = true;
  for (size_t i = 0; here && i < content->count; i++) {
    here = content->pieces[i].data != NULL;
  }
  return here;
}

size_t even_content_chunk_count(const even_content *content) {
  return (size_t)((content->bytes + EVEN_CHECKPOINT_CHUNK_BYTES - 1) / EVEN_CHECKPOINT_CHUNK_BYTES);
}

uint64_t even_content_chunk_bytes(const even_content *content, size_t chunk) {
  uint64_t left = content->bytes - (uint64_t)chunk * EVEN_CHECKPOINT_CHUNK_BYTES;
  return left < EVEN_CHECKPOINT_CHUNK_BYTES ? left : EVEN_CHECKPOINT_CHUNK_BYTES;
}

even_status even_content_write(const even_content *content, even_output *output, uint64_t **sums, size_t *sum_count) {
  return content->bytes >= 2 * (uint64_t)EVEN_CHECKPOINT_CHUNK_BYTES && even_content_is_here(content)
             ? even_content_write_side_by_side(content, output, sums, sum_count)
             : write_in_order(content, output, sums, sum_count);
}

even_status even_content_fetch(const even_content *content, char *to) {
  for (size_t i = 0; i < content->count; i++) {
    const even_content_piece *piece = &content->pieces[i];
    const void *data = NULL;
    if (piece->data == NULL) {
      EVEN_TRY(data_of(content, piece, &data));
      memcpy(to + piece->begin, data, piece->bytes);
    }
  }
  return EVEN_OK;
}
