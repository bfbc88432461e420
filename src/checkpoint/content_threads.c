/* Content of a checkpoint's file, chunk by chunk by several threads: written, copied, compared. */
#include "base/alloc.h"
#include "base/fail.h"
#include "checkpoint/checksums.h"
#include "checkpoint/content.h"
#include "checkpoint/items.h"
#include "checkpoint/parts.h"
#include "checkpoint/stream_copy.h"
#include "checkpoint/summing.h"
#include "os/direct_file.h"

#include <stdatomic.h>
#include <string.h>

/* What is summed and then written is in the caches meanwhile, and a disk takes it in few pieces. */
enum { WINDOW_BYTES = 1 << 20, FEW_BYTES = 4 << 20 };

static even_status open_own(void *context, void **own) {
  (void)context;
  return even_summing_open(EVEN_CHECKPOINT_CHUNK_BYTES, WINDOW_BYTES, own);
}

/* ---- pieces ---- */
/* The piece in which byte `at` lies. */
static size_t find_piece(const even_content *content, uint64_t at) {
  size_t low = 0;
  size_t high = content->count;
  while (high - low > 1) {
    size_t middle = low + (high - low) / 2;
    if (content->pieces[middle].begin <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/* Where `bytes` from `at` on lie in memory without a gap: in their piece and those that follow it there, or gathered in
 * `window`. aligned: the address must suit a direct write. */
static const char *look_at(const even_content *content, uint64_t at, size_t bytes, bool aligned, char *window) {
  size_t i = find_piece(content, at);
  const even_content_piece *piece = &content->pieces[i];
  const char *data = (const char *)piece->data + (at - piece->begin);
  if (!aligned || (uintptr_t)data % EVEN_DIRECT_ALIGNMENT == 0) {
    uint64_t there = piece->begin + piece->bytes - at;
    for (size_t next = i + 1; there < bytes && content->pieces[next].data == data + there; next++) {
      there += content->pieces[next].bytes;
    }
    if (there >= bytes) {
      return data;
    }
  }
  for (size_t done = 0; done < bytes; i++) {
    piece = &content->pieces[i];
    size_t skip = (size_t)(at + done - piece->begin);
    size_t left = piece->bytes - skip;
    size_t part = left < bytes - done ? left : bytes - done;
    memcpy(window + done, (const char *)piece->data + skip, part);
    done += part;
  }
  return window;
}

static size_t chunks_of(const even_content *content) {
  return (size_t)((content->bytes + EVEN_CHECKPOINT_CHUNK_BYTES - 1) / EVEN_CHECKPOINT_CHUNK_BYTES);
}

static uint64_t end_of(const even_content *content, uint64_t begin) {
  return content->bytes - begin > EVEN_CHECKPOINT_CHUNK_BYTES ? begin + EVEN_CHECKPOINT_CHUNK_BYTES : content->bytes;
}

/* ---- summing and writing ---- */
typedef struct write_job {
  const even_content *content;
  even_output *output;
  uint64_t *sums;
  atomic_uint_fast64_t written;
} write_job;

/* Sums a chunk window by window; where there is a job to write it, each window goes there, and its parts are summed. */
static even_status sum_chunk(const even_content *content, size_t chunk, even_summing *mine, write_job *job,
                             uint64_t *sum) {
  uint64_t at = (uint64_t)chunk * EVEN_CHECKPOINT_CHUNK_BYTES;
  uint64_t end = end_of(content, at);
  size_t piece = find_piece(content, at);
  while (at < end) {
    size_t bytes = end - at > WINDOW_BYTES ? WINDOW_BYTES : (size_t)(end - at);
    bool aligned = job != NULL && even_output_is_direct(job->output) && bytes % EVEN_DIRECT_ALIGNMENT == 0;
    const char *data = look_at(content, at, bytes, aligned, mine->window);
    EVEN_TRY(even_chunk_sums_update(mine->sums, data, bytes));
    if (job != NULL) {
      if (content->parts != NULL) {
        EVEN_TRY(even_parts_sum_next(content, mine->parts, at, data, bytes, &piece));
      }
      EVEN_TRY(even_output_write_at(job->output, at, data, bytes));
      (void)atomic_fetch_add(&job->written, bytes);
    }
    at += bytes;
  }
  return even_chunk_sums_end(mine->sums, sum);
}

static even_status write_chunk(void *context, void *own, size_t chunk) {
  write_job *job = context;
  return sum_chunk(job->content, chunk, own, job, &job->sums[chunk]);
}

/* Who writes sums the parts, too. */
static even_status open_writer(void *context, void **own) {
  const write_job *job = context;
  EVEN_TRY(open_own(NULL, own));
  return job->content->parts == NULL ? EVEN_OK : even_chunk_sums_open(SIZE_MAX, &((even_summing *)*own)->parts);
}

even_status even_content_write_side_by_side(const even_content *content, even_output *output, uint64_t **sums,
                                            size_t *count) {
  write_job job = {.content = content, .output = output};
  *count = chunks_of(content);
  EVEN_TRY(even_output_go_direct(output, content->bytes));
  EVEN_TRY(EVEN_NEW_ARRAY(&job.sums, *count));
  const even_items_job items = {.count = *count,
                                .most = EVEN_ITEMS_USUAL_THREADS,
                                .context = &job,
                                .open = open_writer,
                                .close = even_summing_close,
                                .work = write_chunk,
                                .what = "a checkpoint was written"};
  even_status status = even_items_run(&items);
  output->bytes = atomic_load(&job.written);
  if (status != EVEN_OK) {
    even_free(job.sums);
    return status;
  }
  *sums = job.sums;
  return EVEN_OK;
}

/* ---- copying ---- */
typedef struct copy_job {
  const even_content_copy *copies;
  size_t count;
} copy_job;

/* Item i is a chunk of one of the contents, whose chunks follow each other. */
static even_status copy_chunk(void *context, void *own, size_t item) {
  const copy_job *job = context;
  size_t i = 0;
  (void)own;
  while (item >= chunks_of(job->copies[i].content)) {
    item -= chunks_of(job->copies[i++].content);
  }
  const even_content *content = job->copies[i].content;
  uint64_t at = (uint64_t)item * EVEN_CHECKPOINT_CHUNK_BYTES;
  uint64_t end = end_of(content, at);
  for (size_t p = find_piece(content, at); at < end; p++) {
    const even_content_piece *piece = &content->pieces[p];
    size_t skip = (size_t)(at - piece->begin);
    uint64_t left = piece->bytes - skip;
    size_t bytes = (size_t)(left < end - at ? left : end - at);
    if (piece->data != NULL) {
      even_stream_copy(job->copies[i].to + at, (const char *)piece->data + skip, bytes);
    }
    at += bytes;
  }
  return EVEN_OK;
}

even_status even_contents_copy(const even_content_copy *copies, size_t count) {
  copy_job job = {.copies = copies, .count = count};
  even_items_job items = {.most = EVEN_ITEMS_USUAL_THREADS,
                          .context = &job,
                          .work = copy_chunk,
                          .what = "the state of training was copied"};
  uint64_t bytes = 0;
  for (size_t i = 0; i < count; i++) {
    EVEN_TRY(even_content_fetch(copies[i].content, copies[i].to));
    items.count += chunks_of(copies[i].content);
    bytes += copies[i].content->bytes;
  }
  items.most = bytes < FEW_BYTES ? 1 : items.most; /* to start threads takes longer than this */
  return even_items_run(&items);
}

/* ---- comparing ---- */
typedef struct compare_job {
  const even_content *content;
  const uint64_t *sums;
  atomic_bool differs;
} compare_job;

static even_status compare_chunk(void *context, void *own, size_t chunk) {
  compare_job *job = context;
  uint64_t sum = 0;
  if (atomic_load(&job->differs)) {
    return EVEN_OK;
  }
  EVEN_TRY(sum_chunk(job->content, chunk, own, NULL, &sum));
  if (sum != job->sums[chunk]) {
    atomic_store(&job->differs, true);
  }
  return EVEN_OK;
}

even_status even_content_compare(const even_content *content, const uint64_t *sums, size_t count, bool *same) {
  compare_job job = {.content = content, .sums = sums};
  *same = false;
  if (count != chunks_of(content)) {
    return EVEN_OK;
  }
  for (size_t i = 0; i < content->count; i++) {
    if (content->pieces[i].data == NULL) {
      return EVEN_OK; /* it would have to be asked for twice */
    }
  }
  const even_items_job items = {.count = count,
                                .most = EVEN_ITEMS_USUAL_THREADS,
                                .context = &job,
                                .open = open_own,
                                .close = even_summing_close,
                                .work = compare_chunk,
                                .what = "a checkpoint was written"};
  EVEN_TRY(even_items_run(&items));
  *same = !atomic_load(&job.differs);
  return EVEN_OK;
}
