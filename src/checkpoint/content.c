/* Content of a checkpoint's file: written front to back by one thread, or chunk by chunk by several. */
#include "checkpoint/content.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/stop.h"
#include "checkpoint/checksums.h"
#include "os/thread.h"

#include <stdatomic.h>
#include <string.h>

/* Summing 4 MiB takes about as long as copying them into the page cache: two threads do both at once. More of them help
 * where the disk is faster than one core copies. */
enum { MOST_THREADS = 4 };

even_status even_content_of_tensors(const even_checkpoint_file *file, const even_safetensors_layout *layout,
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

void even_content_free(even_content *content) {
  even_free(content->pieces);
  *content = (even_content){NULL, 0, 0, NULL, NULL};
}

static even_status data_of(const even_content *content, const even_content_piece *piece, const void **data) {
  *data = piece->data;
  return piece->data != NULL ? EVEN_OK : content->fetch(content->fetch_context, piece->index, data);
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

/* ---- several threads ---- */
typedef struct chunk_job {
  const even_content *content;
  even_output *output;
  uint64_t *sums;
  size_t count;
  atomic_size_t next; /* the chunk that nobody has taken yet */
  atomic_uint_fast64_t written;
  atomic_bool failed;
  even_error error; /* of the thread that failed first */
} chunk_job;

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

static even_status write_chunk(chunk_job *job, size_t chunk, even_chunk_sums *sums) {
  const even_content *content = job->content;
  uint64_t at = (uint64_t)chunk * EVEN_CHECKPOINT_CHUNK_BYTES;
  uint64_t end = content->bytes - at > EVEN_CHECKPOINT_CHUNK_BYTES ? at + EVEN_CHECKPOINT_CHUNK_BYTES : content->bytes;
  for (size_t i = find_piece(content, at); at < end; i++) {
    const even_content_piece *piece = &content->pieces[i];
    size_t skip = (size_t)(at - piece->begin);
    uint64_t left = piece->bytes - skip;
    size_t bytes = (size_t)(left < end - at ? left : end - at);
    EVEN_TRY(even_chunk_sums_update(sums, (const char *)piece->data + skip, bytes));
    EVEN_TRY(even_output_write_at(job->output, at, (const char *)piece->data + skip, bytes));
    at += bytes;
    (void)atomic_fetch_add(&job->written, bytes);
  }
  return even_chunk_sums_end(sums, &job->sums[chunk]);
}

static void fail_job(chunk_job *job) {
  if (!atomic_exchange(&job->failed, true)) {
    job->error = *even_error_last(); /* read when all threads have ended */
  }
}

static void write_chunks(chunk_job *job, bool asks) {
  even_chunk_sums *sums = NULL;
  even_status status = even_chunk_sums_open(EVEN_CHECKPOINT_CHUNK_BYTES, &sums);
  while (status == EVEN_OK && !atomic_load(&job->failed)) {
    size_t chunk = atomic_fetch_add(&job->next, 1);
    if (chunk >= job->count) {
      break;
    }
    status = asks && even_stop_asked()
                 ? even_fail(EVEN_ERR_INTERRUPTED, "interrupted while %s was written", job->output->path)
                 : write_chunk(job, chunk, sums);
  }
  if (status != EVEN_OK) {
    fail_job(job);
  }
  even_chunk_sums_drop(sums);
}

static void *write_chunks_beside(void *context) {
  write_chunks(context, false);
  return NULL;
}

static even_status write_side_by_side(const even_content *content, even_output *output, uint64_t **out, size_t *count) {
  pthread_t threads[MOST_THREADS - 1];
  size_t started = 0;
  chunk_job job = {.content = content, .output = output};
  job.count = (size_t)((content->bytes + EVEN_CHECKPOINT_CHUNK_BYTES - 1) / EVEN_CHECKPOINT_CHUNK_BYTES);
  EVEN_TRY(EVEN_NEW_ARRAY(&job.sums, job.count));
  even_error before = *even_error_last();
  while (started < MOST_THREADS - 1 && started + 1 < job.count &&
         even_thread_start(write_chunks_beside, &job, &threads[started]) == EVEN_OK) {
    started++;
  }
  (void)even_error_restore(&before); /* fewer threads are slower, and that is all */
  write_chunks(&job, true);
  for (size_t i = 0; i < started; i++) {
    even_thread_join(threads[i]);
  }
  output->bytes = atomic_load(&job.written);
  if (atomic_load(&job.failed)) {
    even_free(job.sums);
    return even_error_restore(&job.error);
  }
  *out = job.sums;
  *count = job.count;
  return EVEN_OK;
}

even_status even_content_write(const even_content *content, even_output *output, uint64_t **sums, size_t *sum_count) {
  bool there = content->bytes >= 2 * (uint64_t)EVEN_CHECKPOINT_CHUNK_BYTES;
  for (size_t i = 0; there && i < content->count; i++) {
    there = content->pieces[i].data != NULL;
  }
  return there ? write_side_by_side(content, output, sums, sum_count)
               : write_in_order(content, output, sums, sum_count);
}

even_status even_content_copy(const even_content *content, char *to) {
  for (size_t i = 0; i < content->count; i++) {
    const void *data = NULL;
    EVEN_TRY(data_of(content, &content->pieces[i], &data));
    memcpy(to + content->pieces[i].begin, data, content->pieces[i].bytes);
  }
  return EVEN_OK;
}
