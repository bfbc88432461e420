/* The rings into the state and the history. */
#include "base/fail.h"
#include "base/utf8.h"
#include "monitor/lagging.h"
#include "monitor/links.h"
#include "monitor/parts.h"
#include "monitor/takeover.h"
#include "os/clock.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

enum { MOST_ROUNDS = 64 };
static const uint64_t SAY_LOST_EVERY_NS = 1000000000;

/* What the batch that the disk had no room for said of events and of ranks comes again; steps of that second are lost.
 */
static void say_again(even_monitor *monitor) {
  const even_state *state = monitor->state;
  uint64_t kept = state->event_count < EVEN_STATE_EVENTS ? state->event_count : EVEN_STATE_EVENTS;
  uint64_t first = state->event_count - kept;
  first = first > monitor->committed_events ? first : monitor->committed_events;
  for (uint64_t at = first; at < state->event_count; at++) {
    (void)!even_database_event(monitor->database, &state->events[at % EVEN_STATE_EVENTS]);
  }
  for (int rank = 0; rank < state->ranks; rank++) {
    (void)!even_database_rank(monitor->database, rank, &state->rank[rank], state->attempt, state->rank[rank].pid == 0);
  }
  for (size_t i = 0; even_state_straggler_at(state, i) != NULL; i++) {
    (void)!even_database_straggler(monitor->database, even_state_straggler_at(state, i));
  }
  monitor->committed_events = state->event_count;
  even_takeover_note_again(monitor);
}

void even_monitor_history(even_monitor *monitor, even_status status) {
  if (status == EVEN_OK || monitor->database == NULL) {
    return;
  }
  if (even_database_waits(monitor->database)) {
    (void)even_error_prefix("the history waits in memory, the run goes on");
    monitor->trouble = *even_error_last();
    say_again(monitor);
    return;
  }
  (void)even_error_prefix("the run goes on without history");
  monitor->trouble = *even_error_last();
  even_database_close(monitor->database);
  monitor->database = NULL;
}

void even_monitor_note_event(even_monitor *monitor, const even_state_event *event) {
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
  even_monitor_note_event(monitor, &made);
}

void even_monitor_commit(even_monitor *monitor) {
  bool waited = monitor->database != NULL && even_database_waits(monitor->database);
  even_takeover_note(monitor);
  EVEN_HISTORY(even_database_commit(monitor->database));
  if (monitor->database != NULL && !even_database_waits(monitor->database)) {
    monitor->committed_events = monitor->state->event_count;
  }
  if (waited && monitor->database != NULL && !even_database_waits(monitor->database)) {
    even_monitor_note(
        monitor, EVEN_EVENT_MESSAGE, -1, 0,
        "the disk has room again: run.db goes on; of the second before it was full, steps may be missing");
  }
}

static void keep_span(even_monitor *monitor, int rank, even_pending_span *pending) {
  if (pending->used) {
    EVEN_HISTORY(even_database_span(monitor->database, monitor->state->attempt, rank, &pending->record));
    pending->used = false;
    pending->changed = true;
  }
}

static void take_span(even_monitor *monitor, int rank, const even_span_record *record) {
  even_pending_span *pending = &monitor->pending[rank][record->span];
  even_state_span(monitor->state, rank, record);
  if (pending->used && pending->record.step == record->step) {
    pending->record.duration_ns += record->duration_ns;
    pending->record.bytes += record->bytes;
    pending->changed = true;
    return;
  }
  keep_span(monitor, rank, pending);
  *pending = (even_pending_span){.used = true, .changed = true, .record = *record};
}

static void keep_all_spans(even_monitor *monitor) {
  for (int rank = 0; rank < monitor->state->ranks; rank++) {
    for (int span = 0; span < EVEN_SPAN_COUNT; span++) {
      keep_span(monitor, rank, &monitor->pending[rank][span]);
    }
  }
}

static void take_loss(even_monitor *monitor, uint32_t step, double loss) {
  even_spikes *spikes = &monitor->spikes;
  char words[160];
  if (!even_spikes_take(spikes, step, loss)) {
    return;
  }
  if (spikes->inside) {
    (void)snprintf(words, sizeof words,
                   "the loss has jumped to %.4g; the median of the steps before is %.4g, its limit %.4g", loss,
                   spikes->median, spikes->limit);
  } else {
    (void)snprintf(words, sizeof words, "the loss is at %.4g, within %.4g again, %u step%s after it jumped", loss,
                   spikes->limit, (unsigned)(step - spikes->since), step - spikes->since == 1 ? "" : "s");
  }
  even_state_event event = {.attempt = monitor->state->attempt,
                            .rank = -1,
                            .step = step,
                            .at_ns = even_clock_ns(),
                            .event = EVEN_EVENT_SPIKE,
                            .value = spikes->inside ? 1 : 0};
  (void)snprintf(event.words, sizeof event.words, "%s", words);
  even_monitor_note_event(monitor, &event);
  if (monitor->notice != NULL) {
    char line[200];
    (void)snprintf(line, sizeof line, "step %u: %s", (unsigned)step, words);
    monitor->notice(monitor->notice_context, line);
  }
}

/* What the script gave counts, and where it gives any, nothing else. */
static void take_given_loss(even_monitor *monitor, int rank, const even_state_event *event) {
  if (event->event == EVEN_EVENT_SCALAR && rank == even_state_first(monitor->state) &&
      strcmp(event->words, "loss") == 0) {
    take_loss(monitor, event->step, event->scalar);
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
  if (record->event == EVEN_EVENT_GROUP) { /* for the timeline alone */
    EVEN_HISTORY(even_database_event(monitor->database, &event));
    return;
  }
  bool first = !monitor->state->loss_given;
  even_monitor_note_event(monitor, &event);
  if (first && monitor->state->loss_given) {
    even_spikes_forget(&monitor->spikes);
  }
  take_given_loss(monitor, rank, &event);
}

/* A row takes some microseconds: the agent's loop is not to be filled with them. */
static void take_call(even_monitor *monitor, int rank, const even_call_record *record) {
  if (monitor->calls_taken >= monitor->calls_a_tick) {
    monitor->calls_left_out++;
    return;
  }
  monitor->calls_taken++;
  EVEN_HISTORY(even_database_call(monitor->database, monitor->state->attempt, rank, record));
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
      even_lagging_step(monitor, rank, &record->as.step);
      if (!monitor->state->loss_given && rank == even_state_first(monitor->state)) {
        take_loss(monitor, record->as.step.step, (double)record->as.step.loss);
      }
      break;
    case EVEN_RECORD_EVENT:
      take_event(monitor, rank, &record->as.event);
      break;
    case EVEN_RECORD_CALL:
      take_call(monitor, rank, &record->as.call);
      break;
    case EVEN_RECORD_LEG:
      even_links_take(monitor->links, rank, &record->as.leg);
      break;
  }
}

static void say_lost(even_monitor *monitor, uint64_t *count, const char *what) {
  char words[120];
  if (*count > 0) {
    (void)snprintf(words, sizeof words, "%llu %s", (unsigned long long)*count, what);
    even_monitor_note(monitor, EVEN_EVENT_LOST, -1, (int64_t)*count, words);
    *count = 0;
  }
}

/* Once a second at most: ranks that are too fast are so for long. */
static void say_all_lost(even_monitor *monitor) {
  monitor->told_lost_ns = even_clock_ns();
  say_lost(monitor, &monitor->lost, "telemetry records were overwritten before they were read");
  say_lost(monitor, &monitor->calls_left_out, "calls are not in the timeline: there were too many at a time");
}

bool even_monitor_drain(even_monitor *monitor) {
  uint64_t lost = 0;
  bool more = true;
  uint64_t left_out = monitor->calls_left_out;
  monitor->calls_taken = 0;
  for (int round = 0; more && round < MOST_ROUNDS; round++) {
    size_t count = even_telemetry_reader_drain(monitor->reader, monitor->records, EVEN_MONITOR_RECORDS_AT_ONCE, &lost);
    for (size_t i = 0; i < count; i++) {
      take(monitor, &monitor->records[i]);
    }
    more = count == EVEN_MONITOR_RECORDS_AT_ONCE;
  }
  monitor->lost += lost;
  monitor->state->lost_records += lost + monitor->calls_left_out - left_out;
  if (even_clock_ns() - monitor->told_lost_ns >= SAY_LOST_EVERY_NS) {
    say_all_lost(monitor);
  }
  return more;
}

void even_monitor_drain_ended(even_monitor *monitor) {
  even_telemetry_reader_writers(monitor->reader, false);
  monitor->calls_a_tick = LONG_MAX;
  while (even_monitor_drain(monitor)) {
  }
  monitor->calls_a_tick = EVEN_MONITOR_CALLS_A_TICK;
  even_telemetry_reader_writers(monitor->reader, true);
  say_all_lost(monitor);
  keep_all_spans(monitor);
}
