/* Where the next agent would begin, kept batch by batch; and one that begins there. */
#include "monitor/takeover.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "monitor/history.h"
#include "monitor/lagging.h"
#include "monitor/sqlite.h"
#include "os/clock.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The ranks' rings fill meanwhile: they hold some thousand steps. */
static const uint64_t LONGEST_READ_NS = 4000000000;

/* ---- what is kept ---- */

static void note_rank(even_monitor *monitor, int rank) {
  uint64_t place = even_telemetry_reader_place(monitor->reader, rank);
  if (place != monitor->places[rank]) {
    monitor->places[rank] = place;
    EVEN_HISTORY(even_database_ring(monitor->database, rank, place));
  }
  for (int span = 0; span < EVEN_SPAN_COUNT; span++) {
    even_pending_span *pending = &monitor->pending[rank][span];
    if (pending->changed) {
      pending->changed = false;
      EVEN_HISTORY(even_database_open_span(monitor->database, rank, span, pending->used ? &pending->record : NULL));
    }
  }
}

static void note_all(even_monitor *monitor) {
  char digits[32];
  for (int rank = 0; rank < monitor->state->ranks; rank++) {
    note_rank(monitor, rank);
  }
  if (monitor->noted_lost != monitor->state->lost_records) {
    monitor->noted_lost = monitor->state->lost_records;
    (void)snprintf(digits, sizeof digits, "%" PRIu64, monitor->noted_lost);
    EVEN_HISTORY(even_database_meta(monitor->database, "lost_records", digits));
  }
}

void even_takeover_note(even_monitor *monitor) {
  bool waited = monitor->database != NULL && even_database_waits(monitor->database);
  note_all(monitor);
  if (!waited && monitor->database != NULL && even_database_waits(monitor->database)) {
    note_all(monitor); /* the disk is full since just now: what was noted is rolled back */
  }
}

void even_takeover_note_again(even_monitor *monitor) {
  for (int rank = 0; rank < monitor->state->ranks; rank++) {
    monitor->places[rank] = UINT64_MAX;
    for (int span = 0; span < EVEN_SPAN_COUNT; span++) {
      monitor->pending[rank][span].changed = true;
    }
  }
  monitor->noted_lost = UINT64_MAX;
}

/* ---- what is found ---- */

typedef struct found {
  even_state *state; /* NULL: it would take too long to read */
  even_pending_span (*pending)[EVEN_SPAN_COUNT];
  uint64_t *places;
  int room;                /* ranks in both */
  int64_t started_ns;      /* these four of meta and ranks, */
  int64_t started_wall_ns; /* where the state was not read */
  int64_t lost_records;
  int64_t attempt;
} found;

static void release(found *made) {
  even_state_close(made->state);
  even_free(made->pending);
  even_free(made->places);
}

static void take_ring(found *made, sqlite3_stmt *row) {
  int rank = sqlite3_column_int(row, 0);
  if (rank >= 0 && rank < made->room) {
    made->places[rank] = (uint64_t)sqlite3_column_int64(row, 1);
  }
}

static void take_open_span(found *made, sqlite3_stmt *row) {
  int rank = sqlite3_column_int(row, 0);
  int span = even_state_span_number((const char *)sqlite3_column_text(row, 1));
  if (rank >= 0 && rank < made->room && span >= 0) {
    made->pending[rank][span] = (even_pending_span){.used = true,
                                                    .record = {.step = (uint32_t)sqlite3_column_int64(row, 2),
                                                               .span = (uint32_t)span,
                                                               .start_ns = (uint64_t)sqlite3_column_int64(row, 3),
                                                               .duration_ns = (uint64_t)sqlite3_column_int64(row, 4),
                                                               .bytes = (uint64_t)sqlite3_column_int64(row, 5)}};
  }
}

static void take_beginning(found *made, sqlite3_stmt *row) {
  made->started_ns = sqlite3_column_int64(row, 0);
  made->started_wall_ns = sqlite3_column_int64(row, 1);
  made->lost_records = sqlite3_column_int64(row, 2);
  made->attempt = sqlite3_column_int64(row, 3);
}

static even_status each_row(even_database *database, const char *path, const char *query, found *made,
                            void (*take)(found *made, sqlite3_stmt *row)) {
  sqlite3 *connection = even_database_connection(database);
  sqlite3_stmt *row = NULL;
  int code = sqlite3_prepare_v2(connection, query, -1, &row, NULL);
  while (code == SQLITE_OK && (code = sqlite3_step(row)) == SQLITE_ROW) {
    take(made, row);
    code = SQLITE_OK;
  }
  (void)sqlite3_finalize(row);
  return code == SQLITE_DONE ? EVEN_OK : even_sqlite_fail(connection, code, path, "cannot be read");
}

static even_status read_state(const char *folder, int ranks, even_state **out) {
  even_history *history = NULL;
  even_status status = even_history_open_by(folder, even_clock_ns() + LONGEST_READ_NS, &history);
  if (status == EVEN_ERR_INTERRUPTED) {
    even_error_clear();
    return EVEN_OK;
  }
  EVEN_TRY(status);
  *out = even_history_take_state(history);
  even_history_close(history);
  return (*out)->ranks == ranks ? EVEN_OK : even_state_ranks(*out, ranks);
}

static even_status find(even_database *database, const char *folder, const char *path, int ranks, found *out) {
  EVEN_TRY(read_state(folder, ranks, &out->state));
  out->room = out->state != NULL ? out->state->room : ranks;
  EVEN_TRY(even_alloc((size_t)out->room, sizeof *out->pending, (void **)&out->pending));
  EVEN_TRY(EVEN_NEW_ARRAY(&out->places, (size_t)out->room));
  EVEN_TRY(each_row(database, path, "SELECT rank, place FROM rings", out, take_ring));
  EVEN_TRY(each_row(database, path,
                    "SELECT rank, span, step, start_ns, duration_ns, bytes FROM open_spans WHERE step IS NOT NULL", out,
                    take_open_span));
  EVEN_TRY(even_database_ranks(database, out->room));
  return each_row(database, path,
                  "SELECT (SELECT value FROM meta WHERE key='started_ns'), (SELECT value FROM meta WHERE "
                  "key='started_wall_ns'), (SELECT value FROM meta WHERE key='lost_records'), max(attempt) FROM ranks",
                  out, take_beginning);
}

/* ---- what is gone on with ---- */

/* What is in the rows is in the state already. */
static void take_state(even_monitor *monitor, found *made) {
  if (made->state == NULL) {
    monitor->state->started_ns = (uint64_t)made->started_ns;
    monitor->state->started_wall_ns = (uint64_t)made->started_wall_ns;
    monitor->state->lost_records = (uint64_t)made->lost_records;
    monitor->state->attempt = (int)made->attempt;
    return;
  }
  even_state_close(monitor->state);
  monitor->state = made->state;
  made->state = NULL;
  for (int rank = 0; rank < monitor->state->room; rank++) {
    even_state_rank *at = &monitor->state->rank[rank];
    at->untold = at->pid != 0;
    at->last_pid = at->pid;
    at->pid = 0;
    for (int span = 0; span < EVEN_SPAN_COUNT; span++) {
      if (made->pending[rank][span].used) {
        even_state_span(monitor->state, rank, &made->pending[rank][span].record);
      }
    }
  }
}

/* The losses of the last steps say again which ones jump. */
static void learn_losses(even_monitor *monitor) {
  const even_state *state = monitor->state;
  const even_state_rank *first = &state->rank[even_state_first(state)];
  uint64_t kept = state->event_count < EVEN_STATE_EVENTS ? state->event_count : EVEN_STATE_EVENTS;
  for (uint64_t at = state->event_count - kept; state->loss_given && at < state->event_count; at++) {
    const even_state_event *event = &state->events[at % EVEN_STATE_EVENTS];
    if (event->event == EVEN_EVENT_SCALAR && event->attempt == state->attempt &&
        event->rank == even_state_first(state) && strcmp(event->words, "loss") == 0) {
      (void)even_spikes_take(&monitor->spikes, event->step, event->scalar);
    }
  }
  for (long step = first->last_step - EVEN_STATE_WINDOW + 1; !state->loss_given && step <= first->last_step; step++) {
    size_t slot = (size_t)(step < 0 ? 0 : step) % EVEN_STATE_WINDOW;
    if (step >= 0 && first->window_attempt[slot] == (uint32_t)state->attempt + 1 &&
        first->window[slot].step == (uint32_t)step) {
      (void)even_spikes_take(&monitor->spikes, (uint32_t)step, (double)first->window[slot].loss);
    }
  }
}

/* Whether it still lasts nobody has seen; what does is told once more. */
static void end_faults(even_monitor *monitor, int kind, int event, int go_on) {
  even_state_fault *fault = &monitor->state->faults[kind];
  for (int left = fault->lasting; left > go_on; left--) {
    even_monitor_note(monitor, event, fault->rank, 0,
                      "not seen to the end: the agent was killed meanwhile, and the next one watches anew");
  }
}

static void watch_on(even_monitor *monitor) {
  learn_losses(monitor);
  end_faults(monitor, EVEN_FAULT_SPIKE, EVEN_EVENT_SPIKE, monitor->spikes.inside ? 1 : 0);
  end_faults(monitor, EVEN_FAULT_STRAGGLER, EVEN_EVENT_STRAGGLER, even_lagging_go_on(monitor));
  end_faults(monitor, EVEN_FAULT_HANG, EVEN_EVENT_HANG, 0);
  end_faults(monitor, EVEN_FAULT_GPU, EVEN_EVENT_GPU, 0);
  end_faults(monitor, EVEN_FAULT_LINK, EVEN_EVENT_LINK, 0);
}

static void go_on(even_monitor *monitor, even_database *database, found *made) {
  bool whole = made->state != NULL;
  monitor->database = database;
  take_state(monitor, made);
  even_free(monitor->pending);
  even_free(monitor->places);
  monitor->pending = made->pending;
  monitor->places = made->places;
  made->pending = NULL;
  made->places = NULL;
  for (int rank = 0; rank < made->room; rank++) {
    even_telemetry_reader_go_on(monitor->reader, rank, monitor->places[rank]);
  }
  monitor->noted_lost = monitor->state->lost_records;
  monitor->committed_events = monitor->state->event_count;
  even_monitor_note(monitor, EVEN_EVENT_MESSAGE, -1, 0,
                    whole ? "the agent of this run was killed; another one goes on with the ranks that ran"
                          : "the agent of this run was killed; another one goes on with the ranks that ran, and with a "
                            "page that begins here: the history takes too long to be read");
  watch_on(monitor);
  even_monitor_commit(monitor);
}

even_status even_takeover_open(even_monitor *monitor, const char *path, const even_database_limits *limits,
                               const even_monitor_params *params) {
  even_database *database = NULL;
  found made = {.state = NULL};
  EVEN_TRY(even_database_continue(path, limits, &database));
  even_status status = find(database, monitor->folder, path, params->ranks, &made);
  if (status == EVEN_OK) {
    (void)pthread_mutex_lock(&monitor->lock); /* the server reads the state */
    go_on(monitor, database, &made);
    (void)pthread_mutex_unlock(&monitor->lock);
  } else {
    even_error kept = *even_error_last();
    even_database_leave(database);
    (void)even_error_restore(&kept);
  }
  release(&made);
  return status;
}
