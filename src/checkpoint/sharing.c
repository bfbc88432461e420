/* Shares the chunks of a file that have not changed. */
#include "checkpoint/sharing.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/stop.h"

/* What a file system is tried by: as much as the largest block of any, and less than a chunk. */
enum { TRIED_BYTES = 64 << 10 };

void even_sharing_free(even_sharing *sharing) {
  even_free(sharing->chunks.there);
  even_free(sharing->chunks.sums);
  *sharing = (even_sharing){.bytes = 0};
}

/* Those that may be the same, by their place and length, and their sums. False: none may. */
static bool begin_chunks(const even_manifest_file *file, const even_content *content, even_content_chunks *chunks) {
  const even_content earlier = {.bytes = file->bytes};
  bool any = false;
  if (file->sum_count != even_content_chunk_count(&earlier)) {
    return false;
  }
  for (size_t i = 0; i < chunks->count && i < file->sum_count; i++) {
    chunks->there[i] = even_content_chunk_bytes(&earlier, i) == even_content_chunk_bytes(content, i);
    chunks->sums[i] = file->sums[i];
    any = any || chunks->there[i];
  }
  return any;
}

/* Neighbours at once. After one that cannot be had no more are tried. */
static even_status share_runs(const even_content *content, const even_input *input, even_output *output,
                              even_sharing *out) {
  const even_content_chunks *chunks = &out->chunks;
  bool can = true;
  for (size_t i = 0; i < chunks->count; i++) {
    size_t first = i;
    uint64_t bytes = 0;
    for (; i < chunks->count && chunks->there[i]; i++) {
      bytes += even_content_chunk_bytes(content, i);
    }
    if (bytes == 0) {
      continue;
    }
    if (even_stop_asked()) {
      return even_fail(EVEN_ERR_INTERRUPTED, "interrupted while %s was written", output->path);
    }
    can = can && even_output_share(output, input, (uint64_t)first * EVEN_CHECKPOINT_CHUNK_BYTES, bytes);
    out->bytes += can ? bytes : 0;
    for (size_t j = first; j < i; j++) {
      chunks->there[j] = can;
    }
  }
  return EVEN_OK;
}

static even_status share(const even_manifest_file *file, const even_content *content, const even_input *input,
                         even_output *output, even_sharing *out) {
  out->chunks.count = even_content_chunk_count(content);
  EVEN_TRY(EVEN_NEW_ARRAY(&out->chunks.there, out->chunks.count));
  EVEN_TRY(EVEN_NEW_ARRAY(&out->chunks.sums, out->chunks.count));
  if (!begin_chunks(file, content, &out->chunks)) {
    return EVEN_OK;
  }
  EVEN_TRY(even_content_find_same(content, &out->chunks));
  return share_runs(content, input, output, out);
}

even_status even_sharing_make(const even_earlier *earlier, const char *name, const even_content *content,
                              even_output *output, even_sharing *out) {
  even_text path = EVEN_TEXT_EMPTY;
  even_input input = {.fd = -1};
  bool opened = false;
  *out = (even_sharing){.bytes = 0};
  const even_manifest_file *file = even_earlier_find(earlier, name);
  if (file == NULL || file->bytes < EVEN_CHECKPOINT_CHUNK_BYTES || content->bytes <= EVEN_CHECKPOINT_CHUNK_BYTES ||
      !even_content_is_here(content)) {
    return EVEN_OK;
  }
  even_status status = even_earlier_open(earlier, file, &path, &input, &opened);
  /* tried with bytes that are shared or written over below: summing all is in vain on most file systems */
  if (status == EVEN_OK && opened && even_output_share(output, &input, 0, TRIED_BYTES)) {
    status = share(file, content, &input, output, out);
  }
  even_input_close(&input);
  even_text_free(&path);
  if (status != EVEN_OK || out->bytes == 0) {
    even_sharing_free(out);
  }
  return status;
}
