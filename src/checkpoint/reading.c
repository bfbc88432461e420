/* Reads files of a checkpoint in one pass: each thread takes a chunk, reads it window by window to where it belongs
 * (past the page cache where that has nothing of it), and sums each window while it is in the processor's. */
#include "base/alloc.h"
#include "base/fail.h"
#include "checkpoint/items.h"
#include "checkpoint/summing.h"
#include "os/direct_file.h"
#include "os/pages.h"
#include "os/path.h"
#include "os/stream.h"

#include <evenstep/checkpoint.h>
#include <inttypes.h>
#include <string.h>

/* From the page cache: half of a small second-level cache. From a disk: what keeps that busy, and a huge page. */
enum { WINDOW_BYTES = 256 << 10, DISK_WINDOW_BYTES = 2 << 20 };

/* Files that are open at a time. */
enum { MOST_FILES = 32 };

typedef struct reading_file {
  const even_checkpoint_reading *reading;
  even_input input;
} reading_file;

typedef struct reading_job {
  reading_file files[MOST_FILES];
  size_t count;
  size_t window_bytes; /* the largest that any of them wants */
} reading_job;

static even_status open_memory(void *context, void **own) {
  const reading_job *job = context;
  return even_summing_open(SIZE_MAX, job->window_bytes, own); /* each chunk is ended by who sums it */
}

/* The first place that ends behind byte `at`, or place_count. */
static size_t find_place(const even_checkpoint_reading *reading, uint64_t at) {
  size_t low = 0;
  size_t high = reading->place_count;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    const even_checkpoint_place *place = &reading->places[middle];
    if (place->begin + place->bytes > at) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

static void spread(const even_checkpoint_reading *reading, size_t first, uint64_t at, const char *from, size_t bytes) {
  uint64_t end = at + bytes;
  for (size_t i = first; i < reading->place_count && reading->places[i].begin < end; i++) {
    const even_checkpoint_place *place = &reading->places[i];
    uint64_t begin = place->begin > at ? place->begin : at;
    uint64_t last = place->begin + place->bytes < end ? place->begin + place->bytes : end;
    if (begin < last) {
      memcpy((char *)place->data + (begin - place->begin), from + (begin - at), (size_t)(last - begin));
    }
  }
}

static even_status read_window(reading_file *file, even_summing *memory, uint64_t at, size_t bytes, bool cached) {
  const even_checkpoint_reading *reading = file->reading;
  size_t first = find_place(reading, at);
  const even_checkpoint_place *place = first < reading->place_count ? &reading->places[first] : NULL;
  bool within = place != NULL && place->begin <= at && place->begin + place->bytes >= at + bytes;
  char *there = within ? (char *)place->data + (at - place->begin) : NULL;
  bool straight = within && (cached || (uintptr_t)there % EVEN_DIRECT_ALIGNMENT == 0);
  char *to = straight ? there : memory->window;
  EVEN_TRY(even_input_read_at(&file->input, at, to, bytes));
  EVEN_TRY(even_chunk_sums_update(memory->sums, to, bytes));
  if (!straight) {
    spread(reading, first, at, to, bytes);
  }
  return EVEN_OK;
}

/* Whether any place has bytes from `begin` to `end`. */
static bool is_wanted(const even_checkpoint_reading *reading, uint64_t begin, uint64_t end) {
  size_t first = find_place(reading, begin);
  while (first < reading->place_count && reading->places[first].bytes == 0) {
    first++;
  }
  return first < reading->place_count && reading->places[first].begin < end;
}

static even_status read_chunk(reading_file *file, even_summing *memory, size_t chunk) {
  const even_checkpoint_reading *reading = file->reading;
  uint64_t begin = (uint64_t)chunk * reading->chunk_bytes;
  uint64_t end = reading->bytes - begin > reading->chunk_bytes ? begin + reading->chunk_bytes : reading->bytes;
  if (reading->only_places && !is_wanted(reading, begin, end)) {
    return EVEN_OK;
  }
  bool cached = file->input.direct == 0 || even_input_is_cached(&file->input, begin, (size_t)(end - begin));
  size_t window = cached ? WINDOW_BYTES : DISK_WINDOW_BYTES;
  uint64_t sum = 0;
  for (uint64_t at = begin; at < end;) {
    size_t bytes = end - at > window ? window : (size_t)(end - at);
    EVEN_TRY(read_window(file, memory, at, bytes, cached));
    at += bytes;
  }
  EVEN_TRY(even_chunk_sums_end(memory->sums, &sum));
  return sum == reading->sums[chunk]
             ? EVEN_OK
             : even_fail(EVEN_ERR_CORRUPT, "chunk %zu of %s (bytes %" PRIu64 "\xE2\x80\x93%" PRIu64 ") is altered",
                         chunk, even_path_name(reading->path), begin, end - 1);
}

/* The chunks of all files follow each other. */
static even_status read_item(void *context, void *own, size_t item) {
  reading_job *job = context;
  reading_file *file = job->files;
  while (item >= file->reading->sum_count) {
    item -= file++->reading->sum_count;
  }
  return read_chunk(file, own, item);
}

static even_status check_reading(const even_checkpoint_reading *reading) {
  uint64_t before = 0;
  if (reading == NULL || reading->size != sizeof *reading || reading->path == NULL || reading->chunk_bytes == 0 ||
      reading->bytes > (uint64_t)INT64_MAX ||
      reading->sum_count !=
          reading->bytes / reading->chunk_bytes + (reading->bytes % reading->chunk_bytes != 0 ? 1 : 0)) {
    return even_fail(EVEN_ERR_ARGUMENT,
                     "even_checkpoint_file_read: parameters of another version, or sums that do not "
                     "fit the size");
  }
  for (size_t i = 0; i < reading->place_count; i++) {
    const even_checkpoint_place *place = &reading->places[i];
    if (place->begin < before || place->begin > reading->bytes || place->bytes > reading->bytes - place->begin ||
        (place->data == NULL && place->bytes > 0)) {
      return even_fail(EVEN_ERR_ARGUMENT, "even_checkpoint_file_read: places beyond the file, or out of order");
    }
    before = place->begin + place->bytes;
  }
  return EVEN_OK;
}

/* A disk wants more readers than the memory of a small host; by its first chunk, for where a part of it lies matters
 * little. */
static bool is_on_disk(const reading_file *file) {
  const even_checkpoint_reading *reading = file->reading;
  size_t bytes = reading->bytes < reading->chunk_bytes ? (size_t)reading->bytes : reading->chunk_bytes;
  return file->input.direct > 0 && !even_input_is_cached(&file->input, 0, bytes);
}

static even_status check_size(const even_checkpoint_reading *reading, uint64_t there) {
  if (there == reading->bytes) {
    return EVEN_OK;
  }
  return even_fail(EVEN_ERR_CORRUPT, "%s is %s: %" PRIu64 " of %" PRIu64 " bytes", even_path_name(reading->path),
                   there < reading->bytes ? "truncated" : "too long", there, reading->bytes);
}

static even_status open_file(const even_checkpoint_reading *reading, reading_file *file) {
  *file = (reading_file){.reading = reading, .input = {.fd = -1}};
  EVEN_TRY(even_input_open(reading->path, &file->input));
  EVEN_TRY(check_size(reading, file->input.bytes));
  even_input_go_direct(&file->input);
  for (size_t i = 0; i < reading->place_count; i++) {
    even_pages_prefer_huge(reading->places[i].data, reading->places[i].bytes);
  }
  return EVEN_OK;
}

/* At most MOST_FILES of them. */
static even_status read_some(const even_checkpoint_reading *readings, size_t count) {
  reading_job job = {.window_bytes = WINDOW_BYTES};
  even_items_job items = {.most = EVEN_ITEMS_USUAL_THREADS,
                          .context = &job,
                          .open = open_memory,
                          .close = even_summing_close,
                          .work = read_item,
                          .what = "a checkpoint was read"};
  even_status status = EVEN_OK;
  while (status == EVEN_OK && job.count < count) {
    reading_file *file = &job.files[job.count];
    status = open_file(&readings[job.count++], file);
    job.window_bytes = file->input.direct > 0 ? DISK_WINDOW_BYTES : job.window_bytes;
    items.most = status == EVEN_OK && is_on_disk(file) ? EVEN_ITEMS_MOST_THREADS : items.most;
    items.count += file->reading->sum_count;
  }
  if (status == EVEN_OK) {
    status = even_items_run(&items);
  }
  for (size_t i = 0; i < job.count; i++) {
    even_input_close(&job.files[i].input);
  }
  return status;
}

even_status even_checkpoint_files_read(const even_checkpoint_reading *readings, size_t count) {
  for (size_t i = 0; i < count; i++) {
    EVEN_TRY(check_reading(&readings[i]));
  }
  for (size_t at = 0; at < count; at += MOST_FILES) {
    EVEN_TRY(read_some(readings + at, count - at < MOST_FILES ? count - at : MOST_FILES));
  }
  return EVEN_OK;
}

even_status even_checkpoint_file_read(const even_checkpoint_reading *reading) {
  EVEN_TRY(check_reading(reading)); /* NULL is refused there */
  return even_checkpoint_files_read(reading, 1);
}

even_status even_checkpoint_file_is_cached(const char *path, bool *cached) {
  even_input input;
  *cached = true;
  EVEN_TRY(even_input_open(path, &input));
  even_input_go_direct(&input);
  *cached = input.direct == 0 || even_input_is_cached(&input, 0, (size_t)input.bytes);
  even_input_close(&input);
  return EVEN_OK;
}
