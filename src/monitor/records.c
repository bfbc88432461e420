/* The rings into the state and the history. */
#include "base/fail.h"
#include "base/utf8.h"
#include "monitor/parts.h"
#include "os/clock.h"

#include <stdio.h>

enum { MOST_ROUNDS = 64 };

void even_monitor_history(even_monitor *monitor, even_status status) {
  if (status == EVEN_OK || monitor->database == NULL) {
    return;
  }
  (void)even_error_prefix("the run goes on without history");
  monitor->trouble = *even_error_last();
  even_database_close(monitor->database);
  monitor->database = NULL;
}

static void note(even_monitor *monitor, const even_state_event *event) {
  if (even_state_event_add(monitor->state, event)) {
    EVEN_HISTORY(even_database_event(monitor->database, event));
  }
}

void even_monitor_note(even_monitor *monitor, int event, int rank, int64_t value, const char *words) {
  even_state_event made = {.attempt = monitor->state->attempt,
                           .rank = rank,
                           .step = monitor->state->last_step < 0 ? 0 : (uint32_t)monitor->state->last_step,
                           .at_ns = even_clock_ns(),
                           .event = event,
                           .value = value};
  (void)snprintf(made.words, sizeof made.words, "%s", words);
  note(monitor, &made);
}

static void keep_span(even_monitor *monitor, int rank, even_pending_span *pending) {
  if (pending->used) {
    EVEN_HISTORY(even_database_span(monitor->database, monitor->state->attempt, rank, &pending->record));
    pending->used = false;
  }
}

static void take_span(even_monitor *monitor, int rank, const even_span_record *record) {
  even_pending_span *pending = &monitor->pending[rank][record->span];
  even_state_span(monitor->state, rank, record);
  if (pending->used && pending->record.step == record->step) {
    pending->record.duration_ns += record->duration_ns;
    pending->record.bytes += record->bytes;
    return;
  }
  keep_span(monitor, rank, pending);
  *pending = (even_pending_span){.used = true, .record = *record};
}

static void keep_all_spans(even_monitor *monitor) {
  for (int rank = 0; rank < monitor->state->ranks; rank++) {
    for (int span = 0; span < EVEN_SPAN_COUNT; span++) {
      keep_span(monitor, rank, &monitor->pending[rank][span]);
    }
  }
}

static void take_event(even_monitor *monitor, int rank, const even_event_record *record) {
  even_state_event event = {.attempt = monitor->state->attempt,
                            .rank = rank,
                            .step = record->step,
                            .at_ns = record->at_ns,
                            .event = (int)record->event,
                            .value = record->value,
                            .scalar = record->number};
  (void)even_utf8_clean(record->words, event.words, sizeof event.words);
  note(monitor, &event);
}

static void take(even_monitor *monitor, const even_record *record) {
  int rank = (int)record->rank;
  if (rank >= monitor->state->ranks) {
    return;
  }
  switch ((even_record_kind)record->kind) {
    case EVEN_RECORD_SPAN:
      take_span(monitor, rank, &record->as.span);
      break;
    case EVEN_RECORD_STEP:
      even_state_step(monitor->state, rank, &record->as.step);
      EVEN_HISTORY(even_database_step(monitor->database, monitor->state->attempt, rank, &record->as.step));
      break;
    case EVEN_RECORD_EVENT:
      take_event(monitor, rank, &record->as.event);
      break;
  }
}

bool even_monitor_drain(even_monitor *monitor) {
  uint64_t lost = 0;
  bool more = true;
  for (int round = 0; more && round < MOST_ROUNDS; round++) {
    size_t count = even_telemetry_reader_drain(monitor->reader, monitor->records, EVEN_MONITOR_RECORDS_AT_ONCE, &lost);
    for (size_t i = 0; i < count; i++) {
      take(monitor, &monitor->records[i]);
    }
    more = count == EVEN_MONITOR_RECORDS_AT_ONCE;
  }
  if (lost > 0) {
    char words[96];
    monitor->state->lost_records += lost;
    (void)snprintf(words, sizeof words, "%llu telemetry records were overwritten before they were read",
                   (unsigned long long)lost);
    even_monitor_note(monitor, EVEN_EVENT_LOST, -1, (int64_t)lost, words);
  }
  return more;
}

void even_monitor_drain_ended(even_monitor *monitor) {
  even_telemetry_reader_writers(monitor->reader, false);
  while (even_monitor_drain(monitor)) {
  }
  even_telemetry_reader_writers(monitor->reader, true);
  keep_all_spans(monitor);
}
