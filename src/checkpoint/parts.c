/* Sums the ends of tensors that share a chunk with others. */
#include "checkpoint/parts.h"

#include "base/fail.h"
#include "checkpoint/items.h"

static void sum_in_chunk(const even_content *content, const even_content_piece *piece, const char *data, uint64_t chunk,
                         even_part *out) {
  uint64_t first = chunk * EVEN_CHECKPOINT_CHUNK_BYTES;
  uint64_t end =
      content->bytes - first > EVEN_CHECKPOINT_CHUNK_BYTES ? first + EVEN_CHECKPOINT_CHUNK_BYTES : content->bytes;
  uint64_t own_end = piece->begin + piece->bytes;
  uint64_t begin = piece->begin > first ? piece->begin : first;
  uint64_t last = own_end < end ? own_end : end;
  if (begin > first || last < end) {
    size_t bytes = (size_t)(last - begin);
    *out = (even_part){
        .begin = begin, .bytes = bytes, .sum = even_checkpoint_checksum(data + (begin - piece->begin), bytes)};
  }
}

void even_parts_sum(const even_content *content, size_t piece, const void *data) {
  const even_content_piece *one = &content->pieces[piece];
  even_part *out = &content->parts[EVEN_PARTS_OF_A_PIECE * piece];
  if (one->bytes == 0) {
    return;
  }
  uint64_t first = one->begin / EVEN_CHECKPOINT_CHUNK_BYTES;
  uint64_t last = (one->begin + one->bytes - 1) / EVEN_CHECKPOINT_CHUNK_BYTES;
  sum_in_chunk(content, one, data, first, &out[0]);
  if (last > first) {
    sum_in_chunk(content, one, data, last, &out[1]);
  }
}

even_status even_parts_sum_next(const even_content *content, even_chunk_sums *sums, uint64_t at, const void *data,
                                size_t bytes, size_t *piece) {
  const char *next = data;
  uint64_t first = at - at % EVEN_CHECKPOINT_CHUNK_BYTES;
  uint64_t end =
      content->bytes - first > EVEN_CHECKPOINT_CHUNK_BYTES ? first + EVEN_CHECKPOINT_CHUNK_BYTES : content->bytes;
  for (uint64_t stop = at + bytes; at < stop; ++*piece) {
    const even_content_piece *one = &content->pieces[*piece];
    uint64_t own_end = one->begin + one->bytes;
    uint64_t begin = one->begin > first ? one->begin : first;
    uint64_t last = own_end < end ? own_end : end;
    size_t here = (size_t)((last < stop ? last : stop) - at);
    if (here > 0 && (begin > first || last < end)) {
      EVEN_TRY(even_chunk_sums_update(sums, next, here));
      if (at + here == last) {
        even_part *out = &content->parts[EVEN_PARTS_OF_A_PIECE * *piece + (one->begin < first)];
        *out = (even_part){.begin = begin, .bytes = last - begin};
        EVEN_TRY(even_chunk_sums_end(sums, &out->sum));
      }
    }
    at += here;
    next += here;
    if (at < own_end) { /* there is more of it behind these bytes */
      break;
    }
  }
  return EVEN_OK;
}

static even_status sum_piece(void *context, void *own, size_t item) {
  const even_content *content = context;
  (void)own;
  if (content->pieces[item].data != NULL) {
    even_parts_sum(content, item, content->pieces[item].data);
  }
  return EVEN_OK;
}

even_status even_parts_sum_all(const even_content *content) {
  even_content whole = *content;
  const even_items_job items = {.count = content->count,
                                .most = EVEN_ITEMS_USUAL_THREADS,
                                .context = &whole,
                                .work = sum_piece,
                                .what = "a checkpoint was written"};
  return even_items_run(&items);
}

size_t even_parts_pack(even_part *parts, size_t places) {
  size_t count = 0;
  for (size_t i = 0; i < places; i++) {
    if (parts[i].bytes > 0) {
      parts[count++] = parts[i];
    }
  }
  return count;
}
