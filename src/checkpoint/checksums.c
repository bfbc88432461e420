/* Chunk checksums, while writing and of a file that is there. */
#include "checkpoint/checksums.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/stop.h"
#include "checkpoint/xxh3.h"
#include "os/stream.h"

#include <evenstep/checkpoint.h>
#include <stdlib.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

struct even_chunk_sums {
  const even_xxh3 *by;
  XXH3_state_t *state; /* wants 64-byte alignment, which even_alloc does not promise */
  void *memory;
  size_t chunk_bytes;
  size_t filled; /* of the chunk in hand */
  uint64_t *sums;
  size_t count;
  size_t capacity;
};

enum { STATE_ALIGNMENT = 64, READ_BYTES = 1 << 20 };

even_status even_chunk_sums_open(size_t chunk_bytes, even_chunk_sums **out) {
  even_chunk_sums *sums = NULL;
  *out = NULL;
  if (chunk_bytes == 0) {
    return even_fail(EVEN_ERR_ARGUMENT, "checksums of chunks of 0 bytes");
  }
  EVEN_TRY(EVEN_NEW(&sums));
  even_status status = even_alloc(1, sizeof(XXH3_state_t) + STATE_ALIGNMENT, &sums->memory);
  if (status != EVEN_OK) {
    even_free(sums);
    return status;
  }
  uintptr_t address = ((uintptr_t)sums->memory + STATE_ALIGNMENT - 1) & ~(uintptr_t)(STATE_ALIGNMENT - 1);
  sums->state = (XXH3_state_t *)address;
  sums->chunk_bytes = chunk_bytes;
  sums->by = even_xxh3_best();
  (void)XXH3_64bits_reset(sums->state);
  *out = sums;
  return EVEN_OK;
}

static even_status end_chunk(even_chunk_sums *sums) {
  if (sums->count == sums->capacity) {
    size_t wanted = sums->capacity == 0 ? 16 : sums->capacity * 2;
    EVEN_TRY(even_realloc((void **)&sums->sums, wanted, sizeof *sums->sums));
    sums->capacity = wanted;
  }
  sums->sums[sums->count++] = XXH3_64bits_digest(sums->state);
  (void)XXH3_64bits_reset(sums->state);
  sums->filled = 0;
  return EVEN_OK;
}

size_t even_chunk_sums_room(const even_chunk_sums *sums) {
  return sums->chunk_bytes - sums->filled;
}

even_status even_chunk_sums_update(even_chunk_sums *sums, const void *data, size_t bytes) {
  const char *at = data;
  while (bytes > 0) {
    size_t room = even_chunk_sums_room(sums);
    size_t piece = bytes < room ? bytes : room;
    sums->by->update(sums->state, at, piece);
    at += piece;
    bytes -= piece;
    sums->filled += piece;
    if (sums->filled == sums->chunk_bytes) {
      EVEN_TRY(end_chunk(sums));
    }
  }
  return EVEN_OK;
}

even_status even_chunk_sums_end(even_chunk_sums *sums, uint64_t *out) {
  if (sums->filled > 0) {
    EVEN_TRY(end_chunk(sums));
  }
  *out = sums->sums[sums->count - 1];
  sums->count = 0;
  return EVEN_OK;
}

even_status even_chunk_sums_finish(even_chunk_sums *sums, uint64_t **out, size_t *count) {
  even_status status = EVEN_OK;
  *out = NULL;
  *count = 0;
  if (sums->filled > 0) {
    status = end_chunk(sums);
  }
  if (status == EVEN_OK && sums->sums == NULL) { /* an empty file: a valid pointer to no sums */
    status = even_alloc(0, sizeof *sums->sums, (void **)&sums->sums);
  }
  if (status == EVEN_OK) {
    *out = sums->sums;
    *count = sums->count;
    sums->sums = NULL;
  }
  even_chunk_sums_drop(sums);
  return status;
}

void even_chunk_sums_drop(even_chunk_sums *sums) {
  if (sums != NULL) {
    even_free(sums->sums);
    even_free(sums->memory);
    even_free(sums);
  }
}

/* Hundreds of gigabytes take minutes: the user may have thought better of it. */
static even_status sum_input(even_input *input, char *buffer, size_t room, even_chunk_sums *sums,
                             uint64_t *file_bytes) {
  size_t got = 0;
  *file_bytes = 0;
  do {
    if (even_stop_asked()) {
      return even_fail(EVEN_ERR_INTERRUPTED, "interrupted while %s was read", input->path);
    }
    EVEN_TRY(even_input_read(input, buffer, room, &got));
    EVEN_TRY(even_chunk_sums_update(sums, buffer, got));
    *file_bytes += got;
  } while (got == room);
  return EVEN_OK;
}

even_status even_checkpoint_file_checksums(const char *path, size_t chunk_bytes, uint64_t **sums, size_t *count,
                                           uint64_t *file_bytes) {
  even_input input = {.fd = -1};
  even_chunk_sums *chunks = NULL;
  char *buffer = NULL;
  size_t room = READ_BYTES;
  *sums = NULL;
  *count = 0;
  *file_bytes = 0;
  even_status status = even_chunk_sums_open(chunk_bytes, &chunks);
  if (status == EVEN_OK) {
    status = even_input_open(path, &input);
  }
  if (status == EVEN_OK) { /* a byte more than a small file has tells its end */
    room = input.bytes < READ_BYTES ? (size_t)input.bytes + 1 : READ_BYTES;
    status = EVEN_NEW_ARRAY(&buffer, room);
  }
  if (status == EVEN_OK) {
    status = sum_input(&input, buffer, room, chunks, file_bytes);
  }
  even_free(buffer);
  even_input_close(&input);
  if (status == EVEN_OK) {
    return even_chunk_sums_finish(chunks, sums, count);
  }
  even_chunk_sums_drop(chunks);
  return status;
}

uint64_t even_checkpoint_checksum(const void *data, size_t bytes) {
  return even_xxh3_best()->whole(data, bytes);
}

void even_checkpoint_free(void *pointer) {
  even_free(pointer);
}
