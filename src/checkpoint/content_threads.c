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

/* ---- summing and writing ---- */
typedef struct write_job {
  const even_content *content;
  even_output *output;
  uint64_t *sums;
  const bool *there; /* chunks that the file has, and whose sums are known; NULL: none */
  atomic_uint_fast64_t written;
} write_job;

/* Sums a chunk window by window; where there is a job, its parts are summed, and each window is written, if it is to
 * be. */
static even_status sum_chunk(const even_content *content, size_t chunk, even_summing *mine, write_job *job,
                             uint64_t *sum) {
  uint64_t at = (uint64_t)chunk * EVEN_CHECKPOINT_CHUNK_BYTES;
  uint64_t end = at + even_content_chunk_bytes(content, chunk);
  size_t piece = find_piece(content, at);
  bool written = job != NULL && (job->there == NULL || !job->there[chunk]);
  while (at < end) {
    size_t bytes = end - at > WINDOW_BYTES ? WINDOW_BYTES : (size_t)(end - at);
    bool aligned = written && even_output_is_direct(job->output) && bytes % EVEN_DIRECT_ALIGNMENT == 0;
    const char *data = look_at(content, at, bytes, aligned, mine->window);
    if (sum != NULL) {
      EVEN_TRY(even_chunk_sums_update(mine->sums, data, bytes));
    }
    if (job != NULL && content->parts != NULL) {
      EVEN_TRY(even_parts_sum_next(content, mine->parts, at, data, bytes, &piece));
    }
    if (written) {
      EVEN_TRY(even_output_write_at(job->output, at, data, bytes));
    }
    if (job != NULL) {
      (void)atomic_fetch_add(&job->written, bytes);
    }
    at += bytes;
  }
  return sum == NULL ? EVEN_OK : even_chunk_sums_end(mine->sums, sum);
}

static even_status write_chunk(void *context, void *own, size_t chunk) {
  write_job *job = context;
  bool there = job->there != NULL && job->there[chunk];
  return sum_chunk(job->content, chunk, own, job, there ? NULL : &job->sums[chunk]);
}

/* Who writes sums the parts, too. */
static even_status open_writer(void *context, void **own) {
  const write_job *job = context;
  EVEN_TRY(open_own(NULL, own));
  return job->content->parts == NULL ? EVEN_OK : even_chunk_sums_open(SIZE_MAX, &((even_summing *)*own)->parts);
}

/* Room for all that will be written, and no more: what is shared may fit where a whole file does not. */
static even_status make_room(const write_job *job, size_t count) {
  even_output_go_direct(job->output);
  for (size_t i = 0; i < count; i++) {
    size_t first = i;
    uint64_t bytes = 0;
    for (; i < count && (job->there == NULL || !job->there[i]); i++) {
      bytes += even_content_chunk_bytes(job->content, i);
    }
    if (bytes > 0) {
      EVEN_TRY(even_output_make_room(job->output, (uint64_t)first * EVEN_CHECKPOINT_CHUNK_BYTES, bytes));
    }
  }
  return EVEN_OK;
}

static even_status write_all(write_job *job) {
  const even_items_job items = {.count = even_content_chunk_count(job->content),
                                .most = EVEN_ITEMS_USUAL_THREADS,
                                .context = job,
                                .open = open_writer,
                                .close = even_summing_close,
                                .work = write_chunk,
                                .what = "a checkpoint was written"};
  EVEN_TRY(make_room(job, items.count));
  even_status status = even_items_run(&items);
  job->output->bytes = atomic_load(&job->written);
  return status;
}

even_status even_content_write_side_by_side(const even_content *content, even_output *output, uint64_t **sums,
                                            size_t *count) {
  write_job job = {.content = content, .output = output};
  *count = even_content_chunk_count(content);
  EVEN_TRY(EVEN_NEW_ARRAY(&job.sums, *count));
  even_status status = write_all(&job);
  if (status != EVEN_OK) {
    even_free(job.sums);
    return status;
  }
  *sums = job.sums;
  return EVEN_OK;
}

even_status even_content_write_rest(const even_content *content, even_output *output, even_content_chunks *chunks) {
  write_job job = {.content = content, .output = output, .sums = chunks->sums, .there = chunks->there};
  return write_all(&job);
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
  while (item >= even_content_chunk_count(job->copies[i].content)) {
    item -= even_content_chunk_count(job->copies[i++].content);
  }
  const even_content *content = job->copies[i].content;
  uint64_t at = (uint64_t)item * EVEN_CHECKPOINT_CHUNK_BYTES;
  uint64_t end = at + even_content_chunk_bytes(content, item);
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
    items.count += even_content_chunk_count(copies[i].content);
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

static even_status run_compare(const even_content *content, even_status (*work)(void *, void *, size_t), void *job) {
  const even_items_job items = {.count = even_content_chunk_count(content),
                                .most = EVEN_ITEMS_USUAL_THREADS,
                                .context = job,
                                .open = open_own,
                                .close = even_summing_close,
                                .work = work,
                                .what = "a checkpoint was written"};
  return even_items_run(&items);
}

even_status even_content_compare(const even_content *content, const uint64_t *sums, size_t count, bool *same) {
  compare_job job = {.content = content, .sums = sums};
  *same = false;
  if (count != even_content_chunk_count(content) || !even_content_is_here(content)) {
    return EVEN_OK; /* it would have to be asked for twice */
  }
  EVEN_TRY(run_compare(content, compare_chunk, &job));
  *same = !atomic_load(&job.differs);
  return EVEN_OK;
}

typedef struct find_job {
  const even_content *content;
  even_content_chunks *chunks;
} find_job;

static even_status find_same(void *context, void *own, size_t chunk) {
  const find_job *job = context;
  uint64_t sum = 0;
  if (job->chunks->there[chunk]) {
    EVEN_TRY(sum_chunk(job->content, chunk, own, NULL, &sum));
    job->chunks->there[chunk] = sum == job->chunks->sums[chunk];
  }
  return EVEN_OK;
}

even_status even_content_find_same(const even_content *content, even_content_chunks *chunks) {
  find_job job = {.content = content, .chunks = chunks};
  return run_compare(content, find_same, &job);
}
