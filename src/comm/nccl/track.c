/* Calls on streams: written down before they are put there, and known to be done by events. Here is what others see of
 * them (the flight record) and what telemetry keeps. */
#include "comm/nccl/device_comm.h"

#include "base/alloc.h"
#include "os/clock.h"
#include "os/ranges.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- events ---- */

static void *event_take(even_device_comm *comm) {
  void *event = NULL;
  if (comm->event_count > 0) {
    return comm->events[--comm->event_count];
  }
  return comm->cuda->event_create(&event, 0) == 0 ? event : NULL;
}

static void event_give(even_device_comm *comm, void *event) {
  if (event == NULL) {
    return;
  }
  if (comm->event_count < comm->event_capacity) {
    comm->events[comm->event_count++] = event;
  } else {
    (void)comm->cuda->event_destroy(event);
  }
}

/* An event behind what is on the stream; NULL: there can be none. */
static void *event_put(even_device_comm *comm, void *stream) {
  void *event = event_take(comm);
  if (event != NULL && comm->cuda->event_record(event, stream) != 0) {
    event_give(comm, event);
    event = NULL;
  }
  return event;
}

/* What a stream captures for a graph is not done then, and nobody may ask for its events. */
static bool is_captured(const even_device_comm *comm, void *stream) {
  int captures = 0;
  return comm->cuda->stream_captures(stream, &captures) != 0 || captures != 0;
}

/* ---- what is written down ---- */

/* FNV-1a over 64-bit words (Fowler, Noll, Vo); never 0. */
static uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x100000001b3u;
  return hash != 0 ? hash : 1;
}

static uint64_t chain_of(const even_device_comm *comm, const even_device_call *call) {
  uint64_t hash = mix(comm->flight.chain == 0 ? 0xcbf29ce484222325u : comm->flight.chain, (uint64_t)call->kind);
  hash = mix(mix(mix(mix(hash, call->dtype), call->op), (uint64_t)(uint32_t)call->peer), call->count);
  for (int rank = 0; call->counts != NULL && rank < comm->ranks; rank++) {
    hash = mix(hash, call->counts[rank]);
  }
  return hash;
}

static even_call_record record_of(const even_device_comm *comm, const even_device_call *call, uint64_t number) {
  bool reduces =
      call->kind == EVEN_CALL_ALL_REDUCE || call->kind == EVEN_CALL_REDUCE_SCATTER || call->kind == EVEN_CALL_REDUCE;
  int row = EVEN_ROW_GPU + comm->device;
  return (even_call_record){.call = (uint8_t)call->recorded,
                            .dtype = reduces ? (uint8_t)call->dtype : EVEN_CALL_NONE,
                            .op = reduces ? (uint8_t)call->op : EVEN_CALL_NONE,
                            .row = (uint8_t)(row < EVEN_ROW_MOST ? row : EVEN_ROW_MOST),
                            .ranks = (uint16_t)comm->ranks,
                            .member = (uint16_t)comm->rank,
                            .peer = (int16_t)call->peer,
                            .group = comm->recording == NULL ? 0 : comm->recording->group,
                            .number = (uint32_t)number,
                            .bytes = call->bytes};
}

static even_status reserve(even_device_comm *comm) {
  size_t capacity = comm->put_capacity == 0 ? 16 : 2 * comm->put_capacity;
  if (comm->put_count < comm->put_capacity) {
    return EVEN_OK;
  }
  if (comm->event_capacity < 2 * capacity) {
    EVEN_TRY(even_realloc((void **)&comm->events, 2 * capacity, sizeof *comm->events));
    comm->event_capacity = 2 * capacity;
  }
  EVEN_TRY(even_realloc((void **)&comm->puts, capacity, sizeof *comm->puts));
  comm->put_capacity = capacity;
  return EVEN_OK;
}

/* Without events for it the call is done as far as anybody can see. */
static void add_put(even_device_comm *comm, const even_device_call *call, const even_comm_call *words,
                    uint64_t number) {
  bool watched = !is_captured(comm, call->stream);
  uint64_t now = even_clock_ns();
  if (watched && comm->times.base == NULL) {
    even_device_times_begin(comm, event_put(comm, call->stream), now);
  }
  void *before = watched ? event_put(comm, call->stream) : NULL;
  if (before == NULL) {
    if (number != 0) {
      even_flight_end_call(&comm->flight, number, EVEN_OK);
    }
    return;
  }
  comm->puts[comm->put_count++] =
      (even_device_put){.call = *words,
                        .number = number,
                        .peer = number == 0 ? call->peer : -1,
                        .stream = call->stream,
                        .before = before,
                        .put_ns = now,
                        .limit = atomic_load(&comm->call_seconds),
                        .record = record_of(comm, call, number != 0 ? number : ++comm->message_count)};
}

/* Whether this thread's call has a range. */
static _Thread_local bool ranged;

static void push_range(const even_device_call *call) {
  char name[64];
  if (even_ranges_on()) {
    (void)snprintf(name, sizeof name, "%s %zu bytes", call->name, call->bytes);
    even_range_push(name);
    ranged = true;
  }
}

void even_device_track_pop(void) {
  if (ranged) {
    even_range_pop();
    ranged = false;
  }
}

even_status even_device_track_begin(even_device_comm *comm, const even_device_call *call) {
  const even_comm_call words = {.kind = call->kind,
                                .dtype = call->dtype,
                                .op = call->op,
                                .root = call->peer < 0 ? 0 : call->peer,
                                .count = call->count};
  even_error why;
  uint64_t number = 0;
  bool differs = false;
  (void)pthread_mutex_lock(&comm->track);
  even_status status = reserve(comm);
  if (status != EVEN_OK) {
    (void)pthread_mutex_unlock(&comm->track);
    return status;
  }
  if (call->kind != 0) {
    number = ++comm->call_count;
    comm->flight.chain = chain_of(comm, call);
    even_flight_begin(&comm->flight, &words, number);
    comm->flight.under_way = false; /* several are, and each ends on its own */
  }
  add_put(comm, call, &words, number);
  differs = number != 0 && even_device_differs_at(comm, number, &why);
  (void)pthread_mutex_unlock(&comm->track);
  if (differs) {
    even_device_end(comm, &why, true);
    return even_device_ended(comm, call);
  }
  push_range(call);
  return EVEN_OK;
}

/* ---- and how it ends ---- */

static void tell_telemetry(even_device_comm *comm, even_device_put *put, bool failed) {
  uint64_t now = even_clock_ns();
  if (comm->recording == NULL) {
    return;
  }
  even_call_record *record = &put->record;
  record->failed = failed;
  if (failed) {
    record->start_ns = put->put_ns;
    record->duration_ns = now - put->put_ns;
  } else {
    record->start_ns = even_device_times_of(comm, put->before, put->put_ns);
    record->duration_ns = even_device_times_passed(comm, put->before, put->behind);
    if (record->start_ns + record->duration_ns > now) { /* what is seen to be over is */
      record->start_ns = now > record->duration_ns ? now - record->duration_ns : 0;
    }
  }
  even_telemetry_call(comm->recording->telemetry, record);
}

static void end_put(even_device_comm *comm, even_device_put *put, even_status status) {
  if (put->number != 0) {
    even_flight_end_call(&comm->flight, put->number, status);
  }
  tell_telemetry(comm, put, status != EVEN_OK);
  if (status == EVEN_OK && even_device_times_are_old(comm, put->put_ns)) {
    event_give(comm, comm->times.base);
    even_device_times_renew(comm, put->before, even_device_times_of(comm, put->before, put->put_ns), put->put_ns);
    put->before = NULL;
  }
  event_give(comm, put->before);
  event_give(comm, put->behind);
}

/* Marks one that is on its stream; false: it cannot be watched there, and is given up as done. */
static bool launch(even_device_comm *comm, even_device_put *put, even_status status) {
  put->launched = true;
  if (status == EVEN_OK) {
    put->behind = event_put(comm, put->stream);
    if (put->behind != NULL) {
      return true;
    }
    put->behind = put->before;
    put->before = NULL;
  }
  if (put->number != 0) {
    even_flight_end_call(&comm->flight, put->number, status);
  }
  if (status != EVEN_OK) {
    tell_telemetry(comm, put, true);
  }
  event_give(comm, put->before);
  event_give(comm, put->behind);
  return false;
}

void even_device_track_launched(even_device_comm *comm, even_status status) {
  size_t kept = 0;
  (void)pthread_mutex_lock(&comm->track);
  for (size_t i = 0; i < comm->put_count; i++) {
    if (comm->puts[i].launched || launch(comm, &comm->puts[i], status)) {
      comm->puts[kept++] = comm->puts[i];
    }
  }
  comm->put_count = kept;
  (void)pthread_mutex_unlock(&comm->track);
}

/* Whether it is done; *code: CUDA's error, if there is one. */
static bool is_done(even_device_comm *comm, even_device_put *put, uint64_t now_ns, int *code) {
  int state = 0;
  if (put->reached_ns == 0) {
    state = comm->cuda->event_query(put->before);
    put->reached_ns = state == 0 ? now_ns : 0;
  }
  if (state == 0 && !put->launched) {
    state = EVEN_CUDA_NOT_READY;
  }
  if (state == 0) {
    state = comm->cuda->event_query(put->behind);
  }
  if (state != 0 && state != EVEN_CUDA_NOT_READY) {
    *code = state;
  }
  return state == 0;
}

int even_device_track_look(even_device_comm *comm) {
  uint64_t now = even_clock_ns();
  size_t kept = 0;
  int code = 0;
  int mode = EVEN_CUDA_CAPTURE_RELAXED; /* another stream of this process may be capturing */
  (void)comm->cuda->capture_mode_exchange(&mode);
  for (size_t i = 0; i < comm->put_count; i++) {
    if (code == 0 && is_done(comm, &comm->puts[i], now, &code)) {
      end_put(comm, &comm->puts[i], EVEN_OK);
    } else {
      comm->puts[kept++] = comm->puts[i];
    }
  }
  comm->put_count = kept;
  (void)comm->cuda->capture_mode_exchange(&mode);
  return code;
}

uint64_t even_device_track_oldest(const even_device_comm *comm) {
  for (size_t i = 0; i < comm->put_count; i++) {
    if (comm->puts[i].number != 0) {
      return comm->puts[i].number;
    }
  }
  return 0;
}

void even_device_put_describe(const even_device_comm *comm, const even_device_put *put, char *text, size_t bytes) {
  if (put->number != 0) {
    even_call_describe(&put->call, text, bytes);
  } else {
    (void)snprintf(text, bytes, "a message of %" PRIu64 " bytes %s rank %d", put->record.bytes,
                   put->record.call == EVEN_RECORDED_SEND ? "to" : "from", even_device_number(comm, put->peer));
  }
}

void even_device_track_describe(const even_device_comm *comm, char *text, size_t bytes) {
  if (comm->put_count > 0) {
    even_device_put_describe(comm, &comm->puts[0], text, bytes);
  } else {
    (void)snprintf(text, bytes, "%s", atomic_load(&comm->meets) ? "opening or closing the communicator" : "no call");
  }
}

void even_device_track_drop(even_device_comm *comm) {
  (void)pthread_mutex_lock(&comm->track);
  for (size_t i = 0; i < comm->put_count; i++) {
    end_put(comm, &comm->puts[i], EVEN_ERR_REVOKED);
  }
  comm->put_count = 0;
  (void)pthread_mutex_unlock(&comm->track);
}

void even_device_track_free(even_device_comm *comm) {
  event_give(comm, comm->times.base);
  comm->times.base = NULL;
  while (comm->event_count > 0) {
    (void)comm->cuda->event_destroy(comm->events[--comm->event_count]);
  }
  even_free(comm->puts);
  even_free(comm->events);
}
