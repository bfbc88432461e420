/* Writing the flight record, and reading it: by the ranks, and over a descriptor by anybody. */
#include "comm/flight.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "comm/group.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

#define RELAXED memory_order_relaxed

/* How long one who names both sides of a mismatch waits for the other's words. */
#define PATIENCE_NS ((uint64_t)200 * 1000000u)
#define LOOK_NS ((uint64_t)1000000u)

static even_flight_record *record_of(const even_comm *comm, int rank) {
  return (even_flight_record *)(void *)((unsigned char *)comm->flight.records + (size_t)rank * comm->flight.stride);
}

static even_flight_slot *slot_of(even_flight_record *record, uint64_t number) {
  return &record->slots[number % EVEN_FLIGHT_CALLS];
}

/* ---- writing ---- */

void even_flight_begin(even_comm *comm) {
  if (comm->flight.records == NULL) {
    return;
  }
  even_flight_slot *slot = slot_of(record_of(comm, comm->rank), comm->call_count);
  const even_comm_call *call = &comm->call;
  atomic_store_explicit(&slot->number, 0, RELAXED);
  atomic_thread_fence(memory_order_release);
  atomic_store_explicit(&slot->began_ns, even_clock_coarse_ns(), RELAXED);
  atomic_store_explicit(&slot->ended_ns, 0, RELAXED);
  atomic_store_explicit(&slot->count, call->count, RELAXED);
  atomic_store_explicit(&slot->what,
                        (uint64_t)call->kind | (uint64_t)call->dtype << 16 | (uint64_t)call->op << 32 |
                            (uint64_t)(uint32_t)call->root << 48,
                        RELAXED);
  atomic_store_explicit(&slot->state, EVEN_FLIGHT_BEGUN, RELAXED);
  atomic_store_explicit(&slot->site, comm->flight.site, RELAXED);
  atomic_store_explicit(&slot->number, comm->call_count, memory_order_release);
  comm->flight.under_way = true;
}

void even_flight_end(even_comm *comm, even_status status) {
  if (!comm->flight.under_way) {
    return;
  }
  even_flight_slot *slot = slot_of(record_of(comm, comm->rank), comm->call_count);
  atomic_store_explicit(&slot->ended_ns, even_clock_coarse_ns(), RELAXED);
  atomic_store_explicit(&slot->state, status == EVEN_OK ? EVEN_FLIGHT_DONE : EVEN_FLIGHT_FAILED, memory_order_release);
  comm->flight.under_way = false;
}

/* Returns the site's number. */
static uint64_t keep_site(even_comm *comm, const char *text) {
  uint64_t words[EVEN_FLIGHT_SITE_BYTES / sizeof(uint64_t)] = {0};
  uint64_t number = ++comm->flight.sites;
  even_flight_site *site = &record_of(comm, comm->rank)->sites[number % EVEN_FLIGHT_SITES];
  (void)snprintf((char *)words, sizeof words, "%s", text);
  atomic_store_explicit(&site->number, 0, RELAXED);
  atomic_thread_fence(memory_order_release);
  for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
    atomic_store_explicit(&site->text[i], words[i], RELAXED);
  }
  atomic_store_explicit(&site->number, number, memory_order_release);
  return number;
}

void even_shared_set_site(even_comm *comm, const char *text) {
  if (comm->flight.records != NULL) {
    comm->flight.site = text == NULL ? 0 : keep_site(comm, text);
  }
}

void even_shared_ask_site(even_comm *comm, even_comm_site_call *call, void *context) {
  comm->flight.ask = call;
  comm->flight.context = context;
}

void even_flight_say(even_comm *comm) {
  char text[EVEN_FLIGHT_SITE_BYTES];
  if (!comm->flight.under_way) {
    return;
  }
  even_flight_record *record = record_of(comm, comm->rank);
  if (comm->flight.ask != NULL && comm->flight.ask(comm->flight.context, text, sizeof text)) {
    atomic_store_explicit(&slot_of(record, comm->call_count)->site, keep_site(comm, text), memory_order_release);
  }
  atomic_store_explicit(&record->said, comm->call_count, memory_order_release);
}

/* ---- reading ---- */

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

static bool read_call(even_flight_record *record, uint64_t number, even_flight_call *out) {
  even_flight_slot *slot = slot_of(record, number);
  if (number == 0 || atomic_load_explicit(&slot->number, memory_order_acquire) != number) {
    return false;
  }
  uint64_t what = atomic_load_explicit(&slot->what, RELAXED);
  const even_comm_call call = {.kind = (uint32_t)(what & 0xffffu),
                               .dtype = (uint32_t)(what >> 16 & 0xffffu),
                               .op = (uint32_t)(what >> 32 & 0xffffu),
                               .root = (int32_t)(what >> 48 & 0xffffu),
                               .count = atomic_load_explicit(&slot->count, RELAXED)};
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

static uint64_t last_number(even_flight_record *record) {
  uint64_t last = 0;
  for (size_t i = 0; i < EVEN_FLIGHT_CALLS; i++) {
    uint64_t number = atomic_load_explicit(&record->slots[i].number, memory_order_acquire);
    last = number > last ? number : last;
  }
  return last;
}

static size_t read_calls(even_flight_record *record, even_flight_call *out, size_t limit) {
  uint64_t last = last_number(record);
  uint64_t wanted = limit < EVEN_FLIGHT_CALLS ? limit : EVEN_FLIGHT_CALLS;
  size_t count = 0;
  for (uint64_t number = last > wanted ? last - wanted + 1 : 1; number <= last; number++) {
    count += read_call(record, number, &out[count]);
  }
  return count;
}

size_t even_shared_flight(const even_comm *comm, int rank, even_flight_call *out, size_t limit) {
  return comm->flight.records == NULL ? 0 : read_calls(record_of(comm, rank), out, limit);
}

void even_flight_hear(const even_comm *comm, int rank, char *text, size_t bytes) {
  even_flight_call call;
  text[0] = '\0';
  if (comm->flight.records == NULL) {
    return;
  }
  even_flight_record *record = record_of(comm, rank);
  uint64_t until = even_clock_ns() + PATIENCE_NS;
  while (atomic_load_explicit(&record->said, memory_order_acquire) != comm->call_count && even_clock_ns() < until) {
    even_clock_sleep_ns(LOOK_NS);
  }
  if (read_call(record, comm->call_count, &call) && call.site[0] != '\0') {
    (void)snprintf(text, bytes, " at %s", call.site);
  }
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

static size_t collect_reached(unsigned char *records, size_t stride, int ranks, reached_part *parts) {
  size_t count = 0;
  for (int rank = 0; rank < ranks; rank++) {
    even_flight_call call = {0};
    even_flight_record *record = (even_flight_record *)(void *)(records + (size_t)rank * stride);
    (void)read_call(record, last_number(record), &call);
    call.state = call.state == EVEN_FLIGHT_FAILED ? EVEN_FLIGHT_BEGUN : call.state; /* it has only just noticed */
    size_t at = 0;
    while (at < count && (parts[at].call.number != call.number || parts[at].call.state != call.state ||
                          strcmp(parts[at].call.call, call.call) != 0)) {
      at++;
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

void even_flight_reached(const even_comm *comm, char *text, size_t bytes) {
  static const char lead[] = "; reached: ";
  text[0] = '\0';
  if (comm->flight.records != NULL) {
    memcpy(text, lead, sizeof lead);
    describe_reached((unsigned char *)comm->flight.records, comm->flight.stride, comm->ranks, text + sizeof lead - 1,
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
  if (header->magic == EVEN_COMM_MAGIC) {
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
