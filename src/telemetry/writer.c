/* The writer's side: take a ticket, claim its slot, fill it, publish it. */
#include "base/alloc.h"
#include "base/fail.h"
#include "telemetry/copy.h"
#include "telemetry/record.h"

#include <stddef.h>

struct even_telemetry {
  even_shared_memory memory;
  even_ring *ring;
  const _Atomic uint32_t *calls; /* of the segment: whether a record is wanted for each */
  const _Atomic uint32_t *ends;
  uint64_t mask;
  _Atomic bool paused;
  /* through this handle: */
  _Atomic bool stepped;
  _Atomic uint32_t activity; /* entered last, and 1; 0: none */
  _Atomic uint32_t ended;    /* a bit for each */
};

even_status even_telemetry_open(int fd, int rank, even_telemetry **out) {
  even_shared_memory memory;
  even_ring_header facts;
  even_telemetry *telemetry = NULL;
  *out = NULL;
  EVEN_TRY(even_ring_map(fd, &memory, &facts));
  even_status status = EVEN_OK;
  if (rank < 0 || (uint32_t)rank >= facts.ranks) {
    status = even_fail(EVEN_ERR_ARGUMENT, "rank %d has no ring in a telemetry segment of %u ranks", rank, facts.ranks);
  } else {
    status = EVEN_NEW(&telemetry);
  }
  if (status != EVEN_OK) {
    even_shared_memory_close(&memory);
    return status;
  }
  telemetry->memory = memory;
  telemetry->ring = even_ring_of_rank(&memory, &facts, (uint32_t)rank);
  telemetry->mask = facts.records - 1U;
  telemetry->calls = &((const even_ring_header *)memory.address)->calls;
  telemetry->ends = &((const even_ring_header *)memory.address)->ends;
  *out = telemetry;
  return EVEN_OK;
}

void even_telemetry_close(even_telemetry *telemetry) {
  if (telemetry != NULL) {
    even_shared_memory_close(&telemetry->memory);
    even_free(telemetry);
  }
}

/* A slot that another writer still fills (it was overtaken by a whole lap, or died in it) is left alone and the record
 * dropped: to write into it too could mix two records. The reader counts the ticket that never came. The payload's
 * stores are releases, so that whoever sees one of them also sees the odd sequence. */
static void fill(even_telemetry *telemetry, uint64_t ticket, const even_record_slot words) {
  even_ring_slot *slot = &telemetry->ring->slots[ticket & telemetry->mask];
  uint64_t before = atomic_load_explicit(&slot->sequence, memory_order_relaxed);
  if ((before & 1U) != 0 || before > 2 * ticket ||
      !atomic_compare_exchange_strong_explicit(&slot->sequence, &before, 2 * ticket + 1, memory_order_acquire,
                                               memory_order_relaxed)) {
    return;
  }
  for (int i = 0; i < EVEN_RING_PAYLOAD_WORDS; i++) {
    atomic_store_explicit(&slot->payload[i], words[i], memory_order_release);
  }
  atomic_store_explicit(&slot->sequence, 2 * ticket + 2, memory_order_release);
}

/* All tickets of a record are taken at once, so that no other writer's come between them. */
static void publish(even_telemetry *telemetry, even_record_slot slots[], size_t count) {
  if (atomic_load_explicit(&telemetry->paused, memory_order_relaxed)) {
    return;
  }
  uint64_t ticket = atomic_fetch_add_explicit(&telemetry->ring->next_ticket, count, memory_order_relaxed);
  for (size_t i = 0; i < count; i++) {
    fill(telemetry, ticket + i, slots[i]);
  }
}

void even_telemetry_pause(even_telemetry *telemetry, bool paused) {
  if (telemetry != NULL) {
    atomic_store_explicit(&telemetry->paused, paused, memory_order_relaxed);
  }
}

void even_telemetry_span(even_telemetry *telemetry, const even_span_record *record) {
  even_record_slot slots[1] = {{0}};
  if (telemetry != NULL) {
    even_record_pack_span(record, slots[0]);
    publish(telemetry, slots, 1);
  }
}

void even_telemetry_step(even_telemetry *telemetry, const even_step_record *record) {
  even_record_slot slots[1] = {{0}};
  if (telemetry != NULL) {
    even_record_pack_step(record, slots[0]);
    publish(telemetry, slots, 1);
    atomic_store_explicit(&telemetry->ring->steps, (uint64_t)record->step + 1, memory_order_relaxed);
    atomic_store_explicit(&telemetry->stepped, true, memory_order_relaxed);
  }
}

void even_telemetry_event(even_telemetry *telemetry, const even_event_record *record) {
  even_record_slot slots[EVEN_RECORD_MOST_SLOTS] = {{0}};
  if (telemetry != NULL) {
    publish(telemetry, slots, even_record_pack_event(record, slots));
  }
}

void even_telemetry_leg(even_telemetry *telemetry, const even_leg_record *record) {
  even_record_slot slots[1] = {{0}};
  if (telemetry != NULL) {
    even_record_pack_leg(record, slots[0]);
    publish(telemetry, slots, 1);
  }
}

/* ---- calls ---- */

bool even_telemetry_wants_calls(const even_telemetry *telemetry) {
  return telemetry != NULL && atomic_load_explicit(telemetry->calls, memory_order_relaxed) != 0;
}

bool even_telemetry_asks_end(const even_telemetry *telemetry) {
  return telemetry != NULL && atomic_load_explicit(telemetry->ends, memory_order_relaxed) != 0;
}

static void add(even_telemetry *telemetry, size_t offset, uint64_t amount) {
  (void)atomic_fetch_add_explicit(&telemetry->ring->totals[offset / sizeof(uint64_t)], amount, memory_order_relaxed);
}
#define ADD(member, amount) add(telemetry, offsetof(even_call_totals, member), (amount))

static void count_call(even_telemetry *telemetry, const even_call_record *record) {
  if (even_call_is_message(record->call)) {
    ADD(messages, 1);
    ADD(message_bytes, record->bytes);
    return;
  }
  ADD(collectives, 1);
  ADD(bytes, record->bytes);
  ADD(bus_bytes,
      (uint64_t)((double)record->bytes * even_call_bus_factor((even_recorded_call)record->call, (int)record->ranks)));
  ADD(ns, record->duration_ns);
  ADD(wait_ns, record->wait_ns);
}

void even_telemetry_call(even_telemetry *telemetry, const even_call_record *record) {
  if (telemetry == NULL || atomic_load_explicit(&telemetry->paused, memory_order_relaxed)) {
    return;
  }
  if (record->failed == 0) {
    count_call(telemetry, record);
  }
  if (even_telemetry_wants_calls(telemetry)) {
    even_record_slot slots[1] = {{0}};
    even_call_record whole = *record;
    whole.step = (uint32_t)atomic_load_explicit(&telemetry->ring->steps, memory_order_relaxed);
    even_record_pack_call(&whole, slots[0]);
    publish(telemetry, slots, 1);
  }
}

double even_call_bus_factor(even_recorded_call call, int ranks) {
  double n = ranks < 1 ? 1 : ranks;
  switch (call) {
    case EVEN_RECORDED_ALL_REDUCE:
      return 2 * (n - 1) / n;
    case EVEN_RECORDED_REDUCE_SCATTER:
    case EVEN_RECORDED_ALL_GATHER:
    case EVEN_RECORDED_ALL_TO_ALL:
      return (n - 1) / n;
    case EVEN_RECORDED_BROADCAST:
    case EVEN_RECORDED_BARRIER:
    case EVEN_RECORDED_SEND:
    case EVEN_RECORDED_RECEIVE:
    case EVEN_RECORDED_REDUCE:
    case EVEN_RECORDED_GATHER:
    case EVEN_RECORDED_SCATTER:
      break;
  }
  return 1;
}

/* ---- activities ---- */

void even_telemetry_enter(even_telemetry *telemetry, even_activity activity) {
  if (telemetry == NULL) {
    return;
  }
  uint32_t before = atomic_exchange_explicit(&telemetry->activity, (uint32_t)activity + 1, memory_order_relaxed);
  uint64_t ended = before == 0 ? 0 : UINT64_C(1) << (before - 1);
  ended |= atomic_fetch_or_explicit(&telemetry->ended, (uint32_t)ended, memory_order_relaxed);
  _Atomic uint64_t *word = &telemetry->ring->activity;
  uint64_t count = (atomic_load_explicit(word, memory_order_relaxed) >> EVEN_RING_ENTERED_SHIFT) + 1;
  uint64_t stepped = atomic_load_explicit(&telemetry->stepped, memory_order_relaxed) ? 1 : 0;
  uint64_t now = (count << EVEN_RING_ENTERED_SHIFT) | (ended << EVEN_RING_ENDED_SHIFT) |
                 (stepped << EVEN_RING_STEPPED_BIT) | (uint64_t)activity;
  atomic_store_explicit(word, now, memory_order_relaxed);
}

/* ---- rows ---- */

static _Thread_local int own_row;
static _Atomic int next_row = EVEN_ROW_FIRST;

void even_telemetry_set_row(int row) {
  own_row = row;
}

int even_telemetry_row(void) {
  if (own_row == 0) {
    int row = atomic_fetch_add_explicit(&next_row, 1, memory_order_relaxed);
    own_row = row < EVEN_ROW_GPU ? row : EVEN_ROW_GPU - 1;
  }
  return own_row;
}

void even_telemetry_copied(even_telemetry *ring, uint64_t place) {
  if (ring != NULL) {
    atomic_store_explicit(&ring->ring->source, place, memory_order_relaxed);
  }
}

uint64_t even_telemetry_source(const even_telemetry *ring) {
  return ring == NULL ? 0 : atomic_load_explicit(&ring->ring->source, memory_order_relaxed);
}
