/* The segment's layout, and the checks before anybody trusts it. */
#include "comm/segment.h"

#include "base/checked.h"
#include "base/fail.h"
#include "base/params.h"
#include "comm/flight.h"
#include "comm/waits.h"
#include "os/shared_memory.h"

#include <stdio.h>

#define PAGE ((size_t)4096)

/* The least staged piece: small enough that a core's second-level cache keeps what passes through. Every rank's part of
 * a piece should still be a few lines long, so that more ranks have larger pieces. */
static size_t least_piece(size_t ranks) {
  size_t bytes = (size_t)256 * 1024;
  if (ranks > 64) {
    bytes = ranks * 4096 < ((size_t)1 << 20) ? ranks * 4096 : (size_t)1 << 20;
  }
  return bytes;
}

/* The largest: a group's staging takes 256 MB at most, and that only once it was written to. */
static size_t most_piece(size_t ranks) {
  size_t bytes = (size_t)16 << 20;
  while (bytes > least_piece(ranks) && 4 * ranks * bytes > ((size_t)256 << 20)) {
    bytes /= 4;
  }
  return bytes > least_piece(ranks) ? bytes : least_piece(ranks);
}

/* Longer rings let senders run ahead. Their memory is taken when it is first written. */
static size_t ring_bytes(size_t ranks) {
  size_t bytes = (size_t)256 * 1024;
  while (ranks * ranks * bytes > ((size_t)256 << 20) && bytes > PAGE) {
    bytes /= 2;
  }
  return ranks <= EVEN_COMM_MESSAGE_RANKS ? bytes : 0;
}

/* Appends `ranks` parts of `bytes` each to the layout. */
static bool place(even_comm_layout *layout, size_t ranks, size_t bytes, size_t *offset, size_t *stride) {
  size_t all = 0;
  *offset = layout->total;
  return even_align_size(bytes, PAGE, stride) && even_multiply_size(ranks, *stride, &all) &&
         even_add_size(layout->total, all, &layout->total) && layout->total <= (size_t)INT64_MAX;
}

even_status even_comm_layout_of(const even_comm_params *params, even_comm_layout *out) {
  size_t stride = 0;
  *out = (even_comm_layout){0};
  if (params->ranks < 1 || params->ranks > EVEN_COMM_MAX_RANKS) {
    return even_fail(EVEN_ERR_ARGUMENT, "a group of %d ranks: 1 … %d are possible", params->ranks, EVEN_COMM_MAX_RANKS);
  }
  size_t ranks = (size_t)params->ranks;
  out->least_piece = least_piece(ranks);
  out->most_piece = most_piece(ranks);
  out->ring_bytes = ring_bytes(ranks);
  size_t channels = out->ring_bytes == 0 ? 0 : ranks * ranks;
  if (!place(out, 1, sizeof(even_comm_header), &out->controls, &stride) ||
      !place(out, ranks, sizeof(even_comm_control), &out->controls, &stride) ||
      !place(out, ranks, sizeof(even_flight_record), &out->flights, &out->flight_stride) ||
      !place(out, out->ring_bytes == 0 ? 0 : ranks, sizeof(even_comm_mail), &out->mails, &out->mail_stride) ||
      !place(out, ranks, sizeof(even_wait_pad), &out->pads, &out->pad_stride) ||
      !place(out, ranks, 2 * EVEN_COMM_SLOT_BYTES, &out->slots, &out->slot_stride) ||
      !place(out, ranks, 4 * out->most_piece, &out->stagings, &out->staging_stride) ||
      !place(out, channels, sizeof(even_comm_channel) + out->ring_bytes, &out->channels, &out->channel_stride) ||
      !place(out, ranks, params->arena_bytes, &out->arenas, &out->arena_stride)) {
    return even_fail(EVEN_ERR_OVERFLOW, "an arena of %zu bytes for each of %d ranks is larger than memory can be",
                     params->arena_bytes, params->ranks);
  }
  return EVEN_OK;
}

even_status even_comm_layout_of_record(int ranks, even_comm_layout *out) {
  size_t stride = 0;
  *out = (even_comm_layout){0};
  if (ranks < 1 || ranks > EVEN_COMM_MAX_RANKS || !place(out, 1, sizeof(even_comm_header), &out->controls, &stride) ||
      !place(out, (size_t)ranks, sizeof(even_comm_control), &out->controls, &stride) ||
      !place(out, (size_t)ranks, sizeof(even_flight_record), &out->flights, &out->flight_stride)) {
    return even_fail(EVEN_ERR_ARGUMENT, "a group of %d ranks: 1 … %d are possible", ranks, EVEN_COMM_MAX_RANKS);
  }
  return EVEN_OK;
}

void even_comm_header_write(even_comm_header *header, const even_comm_params *params, const even_comm_layout *layout) {
  header->magic = EVEN_COMM_MAGIC;
  header->version = EVEN_COMM_VERSION;
  header->ranks = (uint32_t)params->ranks;
  header->arena_bytes = params->arena_bytes;
  header->segment_bytes = layout->total;
}

even_status even_comm_header_check(const even_comm_header *header, size_t mapped_bytes, const even_comm_params *params,
                                   const even_comm_layout *layout) {
  if (mapped_bytes < sizeof *header || header->magic != EVEN_COMM_MAGIC) {
    return even_fail(EVEN_ERR_INPUT, "the descriptor is not a group's shared memory");
  }
  if (header->version != EVEN_COMM_VERSION) {
    (void)even_fail(EVEN_ERR_UNSUPPORTED, "the group's shared memory has layout %u, this library's is %u",
                    header->version, EVEN_COMM_VERSION);
    return even_error_fix("run all ranks with the same version of evenstep");
  }
  if (header->ranks != (uint32_t)params->ranks || header->arena_bytes != params->arena_bytes) {
    return even_fail(EVEN_ERR_MISMATCH,
                     "rank %d opens a group of %d ranks with arenas of %zu bytes, but it was made for %u ranks with "
                     "arenas of %llu bytes",
                     params->rank, params->ranks, params->arena_bytes, header->ranks,
                     (unsigned long long)header->arena_bytes);
  }
  if (header->segment_bytes != layout->total || mapped_bytes < layout->total) {
    return even_fail(EVEN_ERR_INPUT, "the group's shared memory is cut short: %zu of %zu bytes", mapped_bytes,
                     layout->total);
  }
  return EVEN_OK;
}

even_status even_comm_create_segment(const even_comm_params *params, int *fd) {
  return even_comm_create_segment_for(params, NULL, fd);
}

static void expect(unsigned char *segment, const even_comm_layout *layout, const long *processes, int ranks) {
  even_comm_control *controls = (even_comm_control *)(void *)(segment + layout->controls);
  for (int rank = 0; rank < ranks; rank++) {
    atomic_store(&controls[rank].expected, processes[rank] > 0 ? (uint32_t)processes[rank] : 0);
  }
}

even_status even_comm_create_segment_for(const even_comm_params *params, const long *processes, int *fd) {
  even_comm_params own;
  even_comm_layout layout;
  even_shared_memory memory;
  *fd = -1;
  EVEN_TRY(EVEN_TAKE_PARAMS(even_comm_params, &own, params));
  params = &own;
  EVEN_TRY(even_comm_layout_of(params, &layout));
  EVEN_TRY(even_shared_memory_create("evenstep-group", layout.total, &memory));
  even_comm_header_write(memory.address, params, &layout);
  if (processes != NULL) {
    expect(memory.address, &layout, processes, params->ranks);
  }
  *fd = memory.fd;
  memory.fd = -1;
  even_shared_memory_close(&memory);
  return EVEN_OK;
}

void even_comm_end_words_write(even_comm_end_words *words, const even_error *why) {
  words->status = (int32_t)why->status;
  words->rank = why->rank;
  (void)snprintf(words->what, sizeof words->what, "%.*s", (int)sizeof words->what - 1, why->what);
  (void)snprintf(words->fix, sizeof words->fix, "%.*s", (int)sizeof words->fix - 1, why->fix);
}

void even_comm_end_words_read(const even_comm_end_words *words, even_error *out) {
  *out = (even_error){.status = (even_status)words->status, .rank = words->rank};
  (void)snprintf(out->what, sizeof out->what, "%.*s", (int)sizeof words->what - 1, words->what);
  (void)snprintf(out->fix, sizeof out->fix, "%.*s", (int)sizeof words->fix - 1, words->fix);
}
