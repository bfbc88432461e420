/* The reader's side: takes whole records in order, and counts what it cannot have. */
#include "base/alloc.h"
#include "base/fail.h"
#include "os/clock.h"
#include "telemetry/record.h"

#include <stdbool.h>
#include <string.h>

/* How long a slot may stay half-written before its writer is taken for dead. A writer needs nanoseconds, but one under
 * a CPU quota may be stopped in between for a tenth of a second. */
static const uint64_t PATIENCE_NS = 1000000000;

typedef struct cursor {
  even_ring *ring;
  uint64_t next;          /* ticket */
  uint64_t waiting_since; /* for `next`, 0: not waiting */
  even_record begun;      /* of several slots, `have` of which were read and `want` are still to come */
  unsigned have;
  unsigned want;
} cursor;

struct even_telemetry_reader {
  even_shared_memory memory;
  uint32_t ranks;
  uint64_t records;
  bool writers_ended;
  uint32_t first; /* whose turn it is: rings are served round robin */
  cursor cursors[];
};

even_status even_telemetry_reader_open(int fd, even_telemetry_reader **out) {
  even_shared_memory memory;
  even_ring_header facts;
  even_telemetry_reader *reader = NULL;
  *out = NULL;
  EVEN_TRY(even_ring_map(fd, &memory, &facts));
  even_status status = even_alloc(1, sizeof *reader + facts.ranks * sizeof(cursor), (void **)&reader);
  if (status != EVEN_OK) {
    even_shared_memory_close(&memory);
    return status;
  }
  reader->memory = memory;
  reader->ranks = facts.ranks;
  reader->records = facts.records;
  for (uint32_t rank = 0; rank < facts.ranks; rank++) {
    reader->cursors[rank].ring = even_ring_of_rank(&memory, &facts, rank);
  }
  *out = reader;
  return EVEN_OK;
}

void even_telemetry_reader_close(even_telemetry_reader *reader) {
  if (reader != NULL) {
    even_shared_memory_close(&reader->memory);
    even_free(reader);
  }
}

int even_telemetry_reader_ranks(const even_telemetry_reader *reader) {
  return (int)reader->ranks;
}

typedef enum slot_state { SLOT_WHOLE, SLOT_NOT_YET, SLOT_LOST } slot_state;

static slot_state read_slot(even_ring_slot *slot, uint64_t ticket, even_record_slot words) {
  const uint64_t whole = 2 * ticket + 2;
  uint64_t sequence = atomic_load_explicit(&slot->sequence, memory_order_acquire);
  if (sequence != whole) {
    return sequence < whole ? SLOT_NOT_YET : SLOT_LOST;
  }
  for (int i = 0; i < EVEN_RING_PAYLOAD_WORDS; i++) {
    words[i] = atomic_load_explicit(&slot->payload[i], memory_order_acquire);
  }
  return atomic_load_explicit(&slot->sequence, memory_order_relaxed) == whole ? SLOT_WHOLE : SLOT_LOST;
}

/* Whether to go on waiting for the record at the cursor. */
static bool still_patient(cursor *at) {
  uint64_t now = even_clock_ns();
  if (at->waiting_since == 0) {
    at->waiting_since = now;
  }
  return now - at->waiting_since < PATIENCE_NS;
}

/* Slots of a record that cannot be had whole any more. */
static void drop_begun(cursor *at, uint64_t *lost) {
  *lost += at->have;
  at->have = at->want = 0;
}

/* One whole slot: the next of the record begun before, or the first of another. Whether *out is a whole record. */
static bool take_slot(cursor *at, const even_record_slot words, even_record *out, uint64_t *lost) {
  if (at->want > 0 && even_record_unpack_more(words, at->have, &at->begun)) {
    at->have++;
    at->want--;
  } else {
    drop_begun(at, lost);
    if (!even_record_unpack(words, &at->begun, &at->want)) {
      at->want = 0;
      (*lost)++;
      return false;
    }
    at->have = 1;
  }
  if (at->want > 0) {
    return false;
  }
  *out = at->begun;
  at->have = 0;
  return true;
}

static size_t drain_ring(even_telemetry_reader *reader, uint32_t rank, even_record *records, size_t limit,
                         uint64_t *lost) {
  cursor *at = &reader->cursors[rank];
  size_t count = 0;
  uint64_t head = atomic_load_explicit(&at->ring->next_ticket, memory_order_relaxed);
  if (head < at->next) { /* only a wild write sets a ticket back */
    at->next = head;
  }
  if (head - at->next > reader->records) {
    *lost += head - reader->records - at->next;
    at->next = head - reader->records;
    at->waiting_since = 0;
    drop_begun(at, lost);
  }
  while (at->next < head && count < limit) {
    even_record_slot words;
    slot_state state = read_slot(&at->ring->slots[at->next & (reader->records - 1)], at->next, words);
    if (state == SLOT_NOT_YET && !reader->writers_ended && still_patient(at)) {
      break;
    }
    at->waiting_since = 0;
    at->next++;
    if (state != SLOT_WHOLE) {
      drop_begun(at, lost);
      (*lost)++;
    } else if (take_slot(at, words, &records[count], lost)) {
      records[count++].rank = rank;
    }
  }
  return count;
}

size_t even_telemetry_reader_drain(even_telemetry_reader *reader, even_record *records, size_t limit, uint64_t *lost) {
  uint64_t missed = 0;
  size_t count = 0;
  if (reader->ranks == 0) {
    return 0;
  }
  for (uint32_t turn = 0; turn < reader->ranks && count < limit; turn++) {
    uint32_t rank = (reader->first + turn) % reader->ranks;
    count += drain_ring(reader, rank, records + count, limit - count, &missed);
  }
  reader->first = (reader->first + 1) % reader->ranks;
  if (lost != NULL) {
    *lost += missed;
  }
  return count;
}

/* The slots of a record that was read in part are read again. */
uint64_t even_telemetry_reader_place(const even_telemetry_reader *reader, int rank) {
  if (rank < 0 || (uint32_t)rank >= reader->ranks) {
    return 0;
  }
  return reader->cursors[rank].next - reader->cursors[rank].have;
}

void even_telemetry_reader_go_on(even_telemetry_reader *reader, int rank, uint64_t place) {
  if (rank < 0 || (uint32_t)rank >= reader->ranks) {
    return;
  }
  cursor *at = &reader->cursors[rank];
  if (place <= atomic_load_explicit(&at->ring->next_ticket, memory_order_relaxed)) {
    at->next = place;
    at->waiting_since = 0;
    at->have = at->want = 0;
  }
}

void even_telemetry_reader_writers(even_telemetry_reader *reader, bool alive) {
  reader->writers_ended = !alive;
}

void even_telemetry_reader_want_calls(even_telemetry_reader *reader, bool wanted) {
  even_ring_header *header = reader->memory.address;
  atomic_store_explicit(&header->calls, wanted ? 1U : 0U, memory_order_relaxed);
}

void even_telemetry_reader_ask_end(even_telemetry_reader *reader, bool asked) {
  even_ring_header *header = reader->memory.address;
  atomic_store_explicit(&header->ends, asked ? 1U : 0U, memory_order_relaxed);
}

void even_telemetry_reader_totals(const even_telemetry_reader *reader, int rank, even_call_totals *out) {
  uint64_t totals[EVEN_RING_TOTALS] = {0};
  if (rank >= 0 && (uint32_t)rank < reader->ranks) {
    for (size_t i = 0; i < EVEN_RING_TOTALS; i++) {
      totals[i] = atomic_load_explicit(&reader->cursors[rank].ring->totals[i], memory_order_relaxed);
    }
  }
  memcpy(out, totals, sizeof *out);
}

void even_telemetry_reader_activity(const even_telemetry_reader *reader, int rank, even_rank_activity *out) {
  *out = (even_rank_activity){.activity = EVEN_ACTIVITY_SCRIPT};
  if (rank < 0 || (uint32_t)rank >= reader->ranks) {
    return;
  }
  uint64_t word = atomic_load_explicit(&reader->cursors[rank].ring->activity, memory_order_relaxed);
  unsigned activity = (unsigned)(word & 0xffU);
  out->activity = activity < EVEN_ACTIVITY_COUNT ? (even_activity)activity : EVEN_ACTIVITY_SCRIPT;
  out->stepped = (word >> EVEN_RING_STEPPED_BIT & 1U) != 0;
  out->ended = (word >> EVEN_RING_ENDED_SHIFT >> activity & 1U) != 0;
  out->count = (uint32_t)(word >> EVEN_RING_ENTERED_SHIFT);
}
