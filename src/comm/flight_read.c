/* Reading the flight record: by the ranks, and over a descriptor by anybody. */
#include "comm/flight_record.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "comm/group.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

#define RELAXED memory_order_relaxed

/* How long one who names both sides of a mismatch waits for the other's words. */
#define LOOK_NS ((uint64_t)1000000u)

static void read_site(even_flight_record *record, uint64_t number, char *out) {
  uint64_t words[EVEN_FLIGHT_SITE_BYTES / sizeof(uint64_t)];
  even_flight_site *site = &record->sites[number % EVEN_FLIGHT_SITES];
  out[0] = '\0';
  if (number == 0 || atomic_load_explicit(&site->number, memory_order_acquire) != number) {
    return;
  }
  for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
    words[i] = atomic_load_explicit(&site->text[i], RELAXED);
  }
  atomic_thread_fence(memory_order_acquire);
  if (atomic_load_explicit(&site->number, RELAXED) == number) {
    memcpy(out, words, sizeof words);
    out[EVEN_FLIGHT_SITE_BYTES - 1] = '\0'; /* whatever the memory holds */
  }
}

static even_comm_call unpack(uint64_t what, uint64_t count) {
  return (even_comm_call){.kind = (uint32_t)(what & 0xffffu),
                          .dtype = (uint32_t)(what >> 16 & 0xffffu),
                          .op = (uint32_t)(what >> 32 & 0xffffu),
                          .root = (int32_t)(what >> 48 & 0xffffu),
                          .count = count};
}

bool even_flight_read_call(even_flight_record *record, uint64_t number, even_flight_call *out) {
  even_flight_slot *slot = even_flight_slot_of(record, number);
  if (number == 0 || atomic_load_explicit(&slot->number, memory_order_acquire) != number) {
    return false;
  }
  uint64_t what = atomic_load_explicit(&slot->what, RELAXED);
  const even_comm_call call = unpack(what, atomic_load_explicit(&slot->count, RELAXED));
  *out = (even_flight_call){.number = number,
                            .began_ns = atomic_load_explicit(&slot->began_ns, RELAXED),
                            .state = (even_flight_state)atomic_load_explicit(&slot->state, memory_order_acquire)};
  out->ended_ns = atomic_load_explicit(&slot->ended_ns, RELAXED);
  uint64_t site = atomic_load_explicit(&slot->site, RELAXED);
  atomic_thread_fence(memory_order_acquire);
  if (atomic_load_explicit(&slot->number, RELAXED) != number) {
    return false;
  }
  even_call_describe(&call, out->call, sizeof out->call);
  read_site(record, site, out->site);
  return true;
}

uint64_t even_flight_last_number(even_flight_record *record) {
  uint64_t last = 0;
  for (size_t i = 0; i < EVEN_FLIGHT_CALLS; i++) {
    uint64_t number = atomic_load_explicit(&record->slots[i].number, memory_order_acquire);
    last = number > last ? number : last;
  }
  return last;
}

static size_t read_calls(even_flight_record *record, even_flight_call *out, size_t limit) {
  uint64_t last = even_flight_last_number(record);
  uint64_t wanted = limit < EVEN_FLIGHT_CALLS ? limit : EVEN_FLIGHT_CALLS;
  size_t count = 0;
  uint64_t first = last > wanted ? last - wanted + 1 : 1;
  uint64_t numbers = last < first ? 0 : last - first + 1; /* counted: the last one may be any that memory holds */
  for (uint64_t i = 0; i < numbers; i++) {
    count += even_flight_read_call(record, first + i, &out[count]);
  }
  return count;
}

size_t even_flight_calls(const even_flight_writer *flight, int rank, even_flight_call *out, size_t limit) {
  return flight->records == NULL ? 0 : read_calls(even_flight_record_of(flight, rank), out, limit);
}

bool even_flight_call_of(const even_flight_writer *flight, int rank, uint64_t number, even_comm_call *out) {
  if (flight->records == NULL) {
    return false;
  }
  even_flight_slot *slot = even_flight_slot_of(even_flight_record_of(flight, rank), number);
  if (number == 0 || atomic_load_explicit(&slot->number, memory_order_acquire) != number) {
    return false;
  }
  *out = unpack(atomic_load_explicit(&slot->what, RELAXED), atomic_load_explicit(&slot->count, RELAXED));
  atomic_thread_fence(memory_order_acquire);
  return atomic_load_explicit(&slot->number, RELAXED) == number;
}

uint64_t even_flight_last(const even_flight_writer *flight, int rank) {
  return flight->records == NULL ? 0 : even_flight_last_number(even_flight_record_of(flight, rank));
}

/* A word of a call that may be written over meanwhile; 0 where it is not there, or not any more. */
static uint64_t word_of(const even_flight_slot *slot, const _Atomic uint64_t *word, uint64_t number) {
  if (number == 0 || atomic_load_explicit(&slot->number, memory_order_acquire) != number) {
    return 0;
  }
  uint64_t value = atomic_load_explicit(word, memory_order_acquire);
  atomic_thread_fence(memory_order_acquire);
  return atomic_load_explicit(&slot->number, RELAXED) == number ? value : 0;
}

even_flight_state even_flight_state_of(const even_flight_writer *flight, int rank, uint64_t number) {
  if (flight->records == NULL) {
    return (even_flight_state)0;
  }
  const even_flight_slot *slot = even_flight_slot_of(even_flight_record_of(flight, rank), number);
  return (even_flight_state)word_of(slot, &slot->state, number);
}

uint64_t even_flight_chain_of(const even_flight_writer *flight, int rank, uint64_t number) {
  if (flight->records == NULL) {
    return 0;
  }
  const even_flight_slot *slot = even_flight_slot_of(even_flight_record_of(flight, rank), number);
  return word_of(slot, &slot->chain, number);
}

bool even_flight_has_said(const even_flight_writer *flight, int rank, uint64_t number) {
  return flight->records == NULL ||
         atomic_load_explicit(&even_flight_record_of(flight, rank)->said, memory_order_acquire) == number;
}

void even_flight_site_of(const even_flight_writer *flight, int rank, uint64_t number, char *text, size_t bytes) {
  even_flight_call call;
  text[0] = '\0';
  if (flight->records != NULL && even_flight_read_call(even_flight_record_of(flight, rank), number, &call) &&
      call.site[0] != '\0') {
    (void)snprintf(text, bytes, " at %s", call.site);
  }
}

void even_flight_hear(const even_flight_writer *flight, int rank, char *text, size_t bytes) {
  uint64_t until = even_clock_ns() + EVEN_FLIGHT_PATIENCE_NS;
  while (!even_flight_has_said(flight, rank, flight->number) && even_clock_ns() < until) {
    even_clock_sleep_ns(LOOK_NS);
  }
  even_flight_site_of(flight, rank, flight->number, text, bytes);
}

/* ---- what each rank reached ---- */

#define PARTS 4

/* Ranks whose last calls are the same. */
typedef struct reached_part {
  even_flight_call call;
  char ranks[64];
  int first; /* of the run of ranks that is being written */
  int last;
  int count;
} reached_part;

static void end_run(reached_part *part) {
  size_t length = strlen(part->ranks);
  const char *comma = length > 0 ? ", " : "";
  if (length + 24 > sizeof part->ranks) {
    (void)snprintf(part->ranks + length, sizeof part->ranks - length, "…");
  } else if (part->first == part->last) {
    (void)snprintf(part->ranks + length, sizeof part->ranks - length, "%s%d", comma, part->first);
  } else {
    (void)snprintf(part->ranks + length, sizeof part->ranks - length, "%s%d-%d", comma, part->first, part->last);
  }
}

static void add_rank(reached_part *part, int rank) {
  if (part->count > 0 && rank != part->last + 1) {
    end_run(part);
    part->first = rank;
  }
  part->last = rank;
  part->count++;
}

/* Ranks of which the same is to be said; `site`: also where they are. */
static bool is_same(const even_flight_call *a, const even_flight_call *b, bool site) {
  return a->number == b->number && a->state == b->state && strcmp(a->call, b->call) == 0 &&
         (!site || strcmp(a->site, b->site) == 0);
}

static size_t find_part(const reached_part *parts, size_t count, const even_flight_call *call, bool site) {
  size_t at = 0;
  while (at < count && !is_same(&parts[at].call, call, site)) {
    at++;
  }
  return at;
}

static size_t collect_reached(unsigned char *records, size_t stride, int ranks, reached_part *parts) {
  size_t count = 0;
  for (int rank = 0; rank < ranks; rank++) {
    even_flight_call call = {0};
    even_flight_record *record = (even_flight_record *)(void *)(records + (size_t)rank * stride);
    (void)even_flight_read_call(record, even_flight_last_number(record), &call);
    call.state = call.state == EVEN_FLIGHT_FAILED ? EVEN_FLIGHT_BEGUN : call.state; /* it has only just noticed */
    size_t at = find_part(parts, count, &call, true);
    if (at == PARTS) { /* no more of them: who is in the same call, wherever in the script */
      at = find_part(parts, count, &call, false);
      if (at < PARTS) {
        parts[at].call.site[0] = '\0';
      }
    }
    if (at < PARTS) {
      if (at == count) {
        parts[count++] = (reached_part){.call = call, .first = rank, .last = rank};
      }
      add_rank(&parts[at], rank);
    }
  }
  return count;
}

static size_t describe_part(const reached_part *part, char *text, size_t bytes) {
  const char *plural = part->count == 1 ? "" : "s";
  int added = part->call.number == 0 ? snprintf(text, bytes, "rank%s %s nothing", plural, part->ranks)
                                     : snprintf(text, bytes, "rank%s %s %s call %llu (%s)%s%s", plural, part->ranks,
                                                part->call.state == EVEN_FLIGHT_DONE ? "done with" : "in",
                                                (unsigned long long)part->call.number, part->call.call,
                                                part->call.site[0] != '\0' ? " at " : "", part->call.site);
  return added > 0 ? (size_t)added : 0;
}

static void describe_reached(unsigned char *records, size_t stride, int ranks, char *text, size_t bytes) {
  reached_part parts[PARTS];
  size_t length = 0;
  text[0] = '\0';
  size_t count = collect_reached(records, stride, ranks, parts);
  for (size_t i = 0; i < count && length + 2 < bytes; i++) {
    end_run(&parts[i]);
    if (i > 0) {
      memcpy(text + length, ", ", 3);
      length += 2;
    }
    length += describe_part(&parts[i], text + length, bytes - length);
  }
}

void even_flight_reached(const even_flight_writer *flight, char *text, size_t bytes) {
  static const char lead[] = "; reached: ";
  text[0] = '\0';
  if (flight->records != NULL && !flight->lent) {
    memcpy(text, lead, sizeof lead);
    describe_reached((unsigned char *)flight->records, flight->stride, flight->ranks, text + sizeof lead - 1,
                     bytes - sizeof lead + 1);
  }
}

/* ---- over a descriptor ---- */

struct even_flight {
  even_shared_memory memory;
  even_comm_layout layout;
  int ranks;
};

static even_status check_segment(even_flight *flight) {
  const even_comm_header *header = flight->memory.address;
  even_comm_params params = {.size = sizeof params};
  if (flight->memory.bytes < sizeof *header) {
    return even_fail(EVEN_ERR_INPUT, "the descriptor is not a group's shared memory");
  }
  params.ranks = (int)header->ranks;
  params.arena_bytes = header->arena_bytes;
  if (header->magic == EVEN_COMM_MAGIC && header->arena_bytes == EVEN_COMM_RECORD_ONLY) {
    EVEN_TRY(even_comm_layout_of_record(params.ranks, &flight->layout));
  } else if (header->magic == EVEN_COMM_MAGIC) {
    EVEN_TRY(even_comm_layout_of(&params, &flight->layout));
  }
  EVEN_TRY(even_comm_header_check(header, flight->memory.bytes, &params, &flight->layout));
  flight->ranks = params.ranks;
  return EVEN_OK;
}

even_status even_flight_open(int fd, even_flight **out) {
  *out = NULL;
  EVEN_TRY(EVEN_NEW(out));
  even_status status = even_shared_memory_duplicate(fd, &(*out)->memory);
  if (status == EVEN_OK) {
    status = check_segment(*out);
  }
  if (status != EVEN_OK) {
    even_flight_close(*out);
    *out = NULL;
  }
  return status;
}

void even_flight_close(even_flight *flight) {
  if (flight != NULL) {
    even_shared_memory_close(&flight->memory);
    even_free(flight);
  }
}

int even_flight_ranks(const even_flight *flight) {
  return flight->ranks;
}

long even_flight_process(const even_flight *flight, int rank) {
  even_comm_control *controls =
      (even_comm_control *)(void *)((unsigned char *)flight->memory.address + flight->layout.controls);
  return (long)atomic_load(&controls[rank].process);
}

size_t even_flight_read(const even_flight *flight, int rank, even_flight_call *out, size_t limit) {
  unsigned char *records = (unsigned char *)flight->memory.address + flight->layout.flights;
  return read_calls((even_flight_record *)(void *)(records + (size_t)rank * flight->layout.flight_stride), out, limit);
}

void even_flight_summary(const even_flight *flight, char *text, size_t bytes) {
  describe_reached((unsigned char *)flight->memory.address + flight->layout.flights, flight->layout.flight_stride,
                   flight->ranks, text, bytes);
}
