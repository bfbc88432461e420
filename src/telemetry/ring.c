/* Segments of rings: made, mapped, checked. */
#include "telemetry/ring.h"

#include "base/checked.h"
#include "base/fail.h"

#include <string.h>

enum { FEWEST_RECORDS = 16, MOST_RECORDS = 1 << 24 };

static size_t ring_bytes(size_t records) {
  return sizeof(even_ring) + records * sizeof(even_ring_slot);
}

/* Bytes of a segment; 0 where ranks or records are out of range. */
static size_t segment_bytes(int ranks, size_t records) {
  size_t bytes = 0;
  if (ranks < 1 || ranks > EVEN_TELEMETRY_MOST_RANKS || records < FEWEST_RECORDS || records > MOST_RECORDS ||
      (records & (records - 1)) != 0 || !even_multiply_size((size_t)ranks, ring_bytes(records), &bytes) ||
      !even_add_size(bytes, sizeof(even_ring_header), &bytes)) {
    return 0;
  }
  return bytes;
}

even_status even_telemetry_create_segment(int ranks, size_t records, int *fd) {
  even_shared_memory memory;
  size_t rounded = FEWEST_RECORDS;
  *fd = -1;
  if (records == 0) {
    records = EVEN_RING_DEFAULT_RECORDS;
  }
  while (rounded < records && rounded < MOST_RECORDS) {
    rounded *= 2;
  }
  size_t bytes = segment_bytes(ranks, rounded);
  if (bytes == 0 || records > MOST_RECORDS) {
    return even_fail(EVEN_ERR_ARGUMENT, "telemetry for %d ranks of %zu records (1 to %d ranks, at most %d records)",
                     ranks, records, EVEN_TELEMETRY_MOST_RANKS, MOST_RECORDS);
  }
  EVEN_TRY(even_shared_memory_create("evenstep-telemetry", bytes, &memory));
  const even_ring_header header = {.magic = EVEN_RING_MAGIC,
                                   .version = EVEN_RING_VERSION,
                                   .slot_bytes = sizeof(even_ring_slot),
                                   .ranks = (uint32_t)ranks,
                                   .records = (uint32_t)rounded};
  memcpy(memory.address, &header, sizeof header);
  *fd = memory.fd;
  memory.fd = -1;
  even_shared_memory_close(&memory);
  return EVEN_OK;
}

static even_status check(const even_shared_memory *memory, const even_ring_header *facts) {
  even_status status = EVEN_OK;
  if (memory->bytes < sizeof *facts || facts->magic != EVEN_RING_MAGIC) {
    status = even_fail(EVEN_ERR_INPUT, "the descriptor given for telemetry is no telemetry segment");
  } else if (facts->version != EVEN_RING_VERSION || facts->slot_bytes != sizeof(even_ring_slot)) {
    status = even_fail(EVEN_ERR_INPUT, "the telemetry segment is of version %u, this build reads version %d",
                       facts->version, EVEN_RING_VERSION);
  } else if (facts->ranks > EVEN_TELEMETRY_MOST_RANKS ||
             segment_bytes((int)facts->ranks, facts->records) != memory->bytes) {
    status = even_fail(EVEN_ERR_INPUT, "the telemetry segment is damaged: %u ranks of %u records in %zu bytes",
                       facts->ranks, facts->records, memory->bytes);
  }
  if (status != EVEN_OK) {
    (void)even_error_fix(
        "start the ranks with the `evenstep run` of the same installation, or unset "
        "EVENSTEP_TELEMETRY_FD");
  }
  return status;
}

even_status even_ring_map(int fd, even_shared_memory *memory, even_ring_header *facts) {
  memset(facts, 0, sizeof *facts);
  EVEN_TRY(even_shared_memory_duplicate(fd, memory));
  if (memory->bytes >= sizeof *facts) {
    const even_ring_header *header = memory->address;
    *facts = (even_ring_header){.magic = header->magic,
                                .version = header->version,
                                .slot_bytes = header->slot_bytes,
                                .ranks = header->ranks,
                                .records = header->records};
  }
  even_status status = check(memory, facts);
  if (status != EVEN_OK) {
    even_shared_memory_close(memory);
  }
  return status;
}

even_ring *even_ring_of_rank(const even_shared_memory *memory, const even_ring_header *facts, uint32_t rank) {
  char *first = (char *)memory->address + sizeof(even_ring_header);
  return (even_ring *)(void *)(first + rank * ring_bytes(facts->records));
}
