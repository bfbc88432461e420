/* Telemetry's records of a group's calls. */
#include "comm/recording.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "comm/engine.h"
#include "os/clock.h"
#include "os/ranges.h"
#include "telemetry/trace.h"

#include <inttypes.h>
#include <stdio.h>

/* FNV-1a (Fowler, Noll, Vo): 32 bits of a group's name, the same on all ranks. */
static uint32_t mark_of(const char *name) {
  uint32_t hash = 2166136261U;
  for (const unsigned char *at = (const unsigned char *)name; *at != 0; at++) {
    hash = (hash ^ *at) * 16777619U;
  }
  return hash;
}

static void announce(const even_recording *recording, const char *engine, int ranks, const char *name) {
  char words[EVEN_EVENT_WORDS_BYTES * 2];
  even_event_record record = {.event = EVEN_EVENT_GROUP, .at_ns = even_clock_ns(), .value = recording->group};
  (void)snprintf(words, sizeof words, "%s %d %s", engine, ranks, name);
  even_event_record_words(&record, words);
  even_telemetry_event(recording->telemetry, &record);
}

even_status even_recording_begin_as(even_recording **recording, even_telemetry *telemetry, const char *engine,
                                    int ranks, const char *name) {
  if (telemetry == NULL) {
    even_free(*recording);
    *recording = NULL;
    return EVEN_OK;
  }
  if (name == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "a group is recorded under a name, the same on all ranks");
  }
  if (*recording == NULL) {
    EVEN_TRY(EVEN_NEW(recording));
    (*recording)->number = 1; /* its opening, as in the flight record */
  }
  (*recording)->telemetry = telemetry;
  (*recording)->group = mark_of(name);
  if (even_telemetry_wants_calls(telemetry)) {
    announce(*recording, engine, ranks, name);
  }
  return EVEN_OK;
}

/* So are the groups that it is made of: waits are theirs. */
static void set_name(even_comm *comm, const char *name) {
  even_comm_base *base = even_comm_base_of_mutable(comm);
  even_comm *part = NULL;
  (void)snprintf(base->name, sizeof base->name, "%s", name);
  for (int at = 0; base->engine->part != NULL && (part = base->engine->part(comm, &at)) != NULL; at++) {
    (void)snprintf(even_comm_base_of_mutable(part)->name, sizeof base->name, "%s", name);
  }
}

even_status even_comm_record(even_comm *comm, even_telemetry *telemetry, const char *name) {
  even_comm_base *base = even_comm_base_of_mutable(comm);
  if (name != NULL) {
    set_name(comm, name);
  }
  if (base->engine->tell_legs != NULL) {
    EVEN_TRY(base->engine->tell_legs(comm, telemetry));
  }
  return even_recording_begin_as(&base->recording, telemetry, base->engine->name, base->ranks, name);
}

/* Of a collective, where nothing else needs the word: a range was pushed. */
enum { RANGED = 1 };

static void push_range(even_call_record *call) {
  char name[64];
  (void)snprintf(name, sizeof name, "%s %" PRIu64 " bytes", even_call_name(call->call), call->bytes);
  even_range_push(name);
  call->tag = RANGED;
}

static void pop_range(even_call_record *call) {
  if (call->tag == RANGED) {
    even_range_pop();
    call->tag = 0;
  }
}

void even_recording_begin(even_comm *comm, even_call_record *call) {
  const even_comm_base *base = even_comm_base_of(comm);
  if (even_ranges_on()) {
    push_range(call);
  }
  if (base->recording != NULL) {
    call->wait_ns = base->engine->wait_ns(comm);
    call->start_ns = even_clock_ns();
  }
}

/* A call that was refused before it was announced is none: other ranks do not count it. */
static bool was_made(even_status status) {
  return status != EVEN_ERR_ARGUMENT && status != EVEN_ERR_OVERFLOW && status != EVEN_ERR_STATE;
}

even_status even_recording_end(even_comm *comm, even_call_record *call, even_status status) {
  const even_comm_base *base = even_comm_base_of(comm);
  even_recording *recording = base->recording;
  pop_range(call);
  if (recording == NULL || call->start_ns == 0 || !was_made(status)) {
    return status;
  }
  call->duration_ns = even_clock_ns() - call->start_ns;
  call->wait_ns = base->engine->wait_ns(comm) - call->wait_ns;
  call->row = (uint8_t)even_telemetry_row();
  call->failed = status != EVEN_OK;
  call->ranks = (uint16_t)base->ranks;
  call->member = (uint16_t)base->rank;
  call->group = recording->group;
  call->number = ++recording->number;
  even_telemetry_call(recording->telemetry, call);
  return status;
}

/* ---- messages ---- */

static even_recorded_message *message_of(even_comm_request *request) {
  return &((even_comm_request_base *)(void *)request)->recorded;
}

void even_recording_message(even_comm *comm, even_comm_request *request, even_call_record call) {
  even_recording *recording = even_comm_base_of(comm)->recording;
  even_recorded_message *message = message_of(request);
  if (recording == NULL) {
    return;
  }
  message->record = call;
  message->record.start_ns = even_clock_ns();
  message->record.ranks = (uint16_t)even_comm_base_of(comm)->ranks;
  message->record.member = (uint16_t)even_comm_base_of(comm)->rank;
  message->record.group = recording->group;
  message->record.number = atomic_fetch_add_explicit(&recording->messages, 1, memory_order_relaxed) + 1;
  atomic_store_explicit(&message->by, recording, memory_order_release);
}

bool even_recording_has_message(even_comm_request *request) {
  return atomic_load_explicit(&message_of(request)->by, memory_order_relaxed) != NULL;
}

void even_recording_message_done(even_comm_request *request, even_status status, int peer, uint64_t since_ns) {
  even_recorded_message *message = message_of(request);
  even_recording *by = atomic_exchange_explicit(&message->by, NULL, memory_order_acq_rel);
  if (by == NULL) {
    return;
  }
  even_call_record record = message->record;
  uint64_t now = even_clock_ns();
  record.duration_ns = now - record.start_ns;
  record.wait_ns = since_ns == 0 ? 0 : now - since_ns;
  record.failed = status != EVEN_OK;
  record.peer = (int16_t)(status == EVEN_OK ? peer : record.peer);
  record.row = (uint8_t)even_telemetry_row();
  even_telemetry_call(by->telemetry, &record);
}
