/* Rows through prepared statements, a transaction a batch. */
#include "monitor/database_parts.h"

#include "base/fail.h"
#include "telemetry/trace.h"

#include <math.h>
#include <string.h>

enum { MOST_WAITING_ROWS = 1 << 20 };

/* ---- rows: begin, bind column after column, end ---- */

typedef struct row {
  even_database *database;
  sqlite3_stmt *statement;
  int column;
} row;

static bool is_locked(int code) {
  return (code & 0xff) == SQLITE_BUSY || (code & 0xff) == SQLITE_LOCKED;
}

/* The batch under way is rolled back, a second at most; what comes waits in memory. */
static even_status disk_is_full(even_database *database) {
  even_status status = even_database_fail(database, SQLITE_FULL);
  if (sqlite3_get_autocommit(database->connection) == 0) {
    (void)sqlite3_exec(database->connection, "ROLLBACK", NULL, NULL, NULL);
  }
  database->in_batch = false;
  database->full = true;
  return status;
}

bool even_database_waits(const even_database *database) {
  return database->full;
}

static even_status begin(even_database *database, even_insert which, row *out) {
  *out = (row){.database = database, .statement = database->statements[which]};
  if (!database->in_batch && !database->full && database->waiting_rows == 0) {
    int code = sqlite3_exec(database->connection, "BEGIN IMMEDIATE", NULL, NULL, NULL);
    if (code != SQLITE_OK && !is_locked(code)) {
      return even_database_fail(database, code);
    }
    database->in_batch = code == SQLITE_OK;
  }
  if (!database->in_batch) { /* somebody reads or copies it at leisure, or the disk is full: they wait for a commit */
    if (++database->waiting_rows > MOST_WAITING_ROWS) {
      int code = database->full ? SQLITE_FULL : SQLITE_BUSY;
      database->full = false; /* no longer waited for */
      return even_database_fail(database, code);
    }
    out->statement = database->waiting[which];
  }
  return EVEN_OK;
}

/* Binding fails only for want of memory; the column is NULL then, and the step says so. */
static void integer(row *at, int64_t value) {
  (void)sqlite3_bind_int64(at->statement, ++at->column, value);
}

static void number(row *at, double value) {
  at->column++;
  if (isfinite(value)) {
    (void)sqlite3_bind_double(at->statement, at->column, value);
  } else {
    (void)sqlite3_bind_null(at->statement, at->column);
  }
}

static void optional(row *at, bool known, int64_t value) {
  if (known) {
    integer(at, value);
  } else {
    (void)sqlite3_bind_null(at->statement, ++at->column);
  }
}

/* NULL: NULL. */
static void text(row *at, const char *value) {
  (void)sqlite3_bind_text(at->statement, ++at->column, value, -1, SQLITE_STATIC);
}

static even_status end(row *at) {
  int code = sqlite3_step(at->statement);
  (void)sqlite3_reset(at->statement);
  if ((code & 0xff) == SQLITE_FULL) {
    return disk_is_full(at->database);
  }
  return code == SQLITE_DONE ? EVEN_OK : even_database_fail(at->database, code);
}

even_status even_database_meta(even_database *database, const char *key, const char *value) {
  row at;
  EVEN_TRY(begin(database, INSERT_META, &at));
  text(&at, key);
  text(&at, value);
  return end(&at);
}

even_status even_database_rank(even_database *database, int rank, const even_state_rank *facts, int attempt,
                               bool ended) {
  row at;
  EVEN_TRY(begin(database, INSERT_RANK, &at));
  integer(&at, rank);
  text(&at, facts->device);
  text(&at, facts->model);
  number(&at, facts->cores);
  number(&at, facts->quota);
  integer(&at, facts->last_pid);
  integer(&at, attempt);
  integer(&at, ended ? 1 : 0);
  text(&at, facts->cause);
  return end(&at);
}

even_status even_database_step(even_database *database, int attempt, int rank, const even_step_record *record) {
  row at;
  EVEN_TRY(begin(database, INSERT_STEP, &at));
  database->thinning.rows++;
  integer(&at, attempt);
  integer(&at, record->step);
  integer(&at, record->epoch);
  integer(&at, rank);
  integer(&at, (int64_t)record->end_ns);
  integer(&at, (int64_t)record->duration_ns);
  integer(&at, (int64_t)record->busy_ns);
  integer(&at, record->samples);
  integer(&at, record->batch);
  number(&at, (double)record->loss);
  number(&at, (double)record->predicted_seconds);
  return end(&at);
}

static const char *const span_names[EVEN_SPAN_COUNT] = {
#define SPAN_NAME(name, number, words) words,
    EVEN_SPAN_LIST(SPAN_NAME)
#undef SPAN_NAME
};

even_status even_database_span(even_database *database, int attempt, int rank, const even_span_record *record) {
  row at;
  EVEN_TRY(begin(database, INSERT_SPAN, &at));
  integer(&at, attempt);
  integer(&at, record->step);
  integer(&at, rank);
  text(&at, span_names[record->span]);
  integer(&at, (int64_t)record->start_ns);
  integer(&at, (int64_t)record->duration_ns);
  integer(&at, (int64_t)record->bytes);
  return end(&at);
}

even_status even_database_event(even_database *database, const even_state_event *event) {
  row at;
  EVEN_TRY(begin(database, INSERT_EVENT, &at));
  integer(&at, event->attempt);
  integer(&at, (int64_t)event->at_ns);
  integer(&at, event->rank);
  integer(&at, event->step);
  text(&at, even_state_event_name(event->event));
  if (event->event == EVEN_EVENT_SCALAR) {
    (void)sqlite3_bind_double(at.statement, ++at.column, event->scalar); /* infinities too; NULL for NaN */
  } else {
    integer(&at, event->value);
  }
  text(&at, event->words);
  return end(&at);
}

even_status even_database_usage(even_database *database, int rank, uint64_t at_ns, const even_rank_usage *usage,
                                const even_call_totals *calls) {
  row at;
  EVEN_TRY(begin(database, INSERT_USAGE, &at));
  integer(&at, (int64_t)at_ns);
  integer(&at, rank);
  number(&at, usage == NULL ? NAN : usage->cpu_seconds);
  number(&at, usage == NULL ? NAN : usage->rss_bytes);
  number(&at, usage == NULL ? NAN : usage->throttled_seconds);
  integer(&at, (int64_t)calls->collectives);
  integer(&at, (int64_t)calls->bytes);
  integer(&at, (int64_t)calls->bus_bytes);
  integer(&at, (int64_t)calls->ns);
  integer(&at, (int64_t)calls->wait_ns);
  integer(&at, (int64_t)calls->messages);
  integer(&at, (int64_t)calls->message_bytes);
  number(&at, usage == NULL ? NAN : usage->pressure.wait_seconds);
  number(&at, usage == NULL ? NAN : usage->pressure.major_faults);
  number(&at, usage == NULL ? NAN : usage->pressure.swap_bytes);
  number(&at, usage == NULL ? NAN : usage->pressure.clock);
  return end(&at);
}

even_status even_database_gpu(even_database *database, int rank, const even_gpu_sample *sample) {
  row at;
  EVEN_TRY(begin(database, INSERT_GPU, &at));
  integer(&at, (int64_t)sample->at_ns);
  integer(&at, rank);
  number(&at, sample->utilization_percent / 100);
  number(&at, sample->clock_mhz);
  number(&at, sample->temperature_celsius);
  number(&at, sample->power_watts);
  number(&at, sample->memory_used_bytes);
  number(&at, sample->corrected);
  number(&at, sample->uncorrected);
  integer(&at, sample->slowed ? 1 : 0);
  return end(&at);
}

even_status even_database_straggler(even_database *database, const even_state_straggler *told) {
  row at;
  EVEN_TRY(begin(database, INSERT_STRAGGLER, &at));
  integer(&at, told->attempt);
  integer(&at, told->rank);
  text(&at, told->host);
  text(&at, told->device);
  text(&at, told->cause);
  number(&at, told->factor);
  integer(&at, told->begin_step);
  integer(&at, (int64_t)told->begin_ns);
  optional(&at, told->over, told->end_step);
  optional(&at, told->over, (int64_t)told->end_ns);
  text(&at, told->why);
  return end(&at);
}

even_status even_database_call(even_database *database, int attempt, int rank, const even_call_record *record) {
  row at;
  bool message = even_call_is_message(record->call);
  if (database->calls == 0) {
    return EVEN_OK;
  }
  EVEN_TRY(begin(database, INSERT_CALL, &at));
  integer(&at, (int64_t)rank * database->calls + database->called[rank]++ % database->calls);
  integer(&at, attempt);
  integer(&at, record->step);
  integer(&at, rank);
  integer(&at, record->group);
  integer(&at, record->number);
  text(&at, even_call_name(record->call));
  text(&at, even_dtype_name(record->dtype));
  text(&at, even_op_name(record->op));
  optional(&at, record->peer >= 0, record->peer);
  optional(&at, message, record->tag);
  integer(&at, (int64_t)record->bytes);
  integer(&at, (int64_t)record->start_ns);
  integer(&at, (int64_t)record->duration_ns);
  integer(&at, (int64_t)record->wait_ns);
  integer(&at, record->ranks);
  integer(&at, record->member);
  integer(&at, record->row);
  integer(&at, record->failed);
  return end(&at);
}

even_status even_database_ring(even_database *database, int rank, uint64_t place) {
  row at;
  EVEN_TRY(begin(database, INSERT_RING, &at));
  integer(&at, rank);
  integer(&at, (int64_t)place);
  integer(&at, database->called[rank]);
  return end(&at);
}

even_status even_database_open_span(even_database *database, int rank, int span, const even_span_record *record) {
  row at;
  EVEN_TRY(begin(database, INSERT_OPEN_SPAN, &at));
  integer(&at, rank);
  text(&at, span_names[span]);
  optional(&at, record != NULL, record == NULL ? 0 : record->step);
  optional(&at, record != NULL, record == NULL ? 0 : (int64_t)record->start_ns);
  optional(&at, record != NULL, record == NULL ? 0 : (int64_t)record->duration_ns);
  optional(&at, record != NULL, record == NULL ? 0 : (int64_t)record->bytes);
  return end(&at);
}

/* In a batch of their own, behind which nothing of them waits any more. */
static int move_waiting(even_database *database) {
  even_text text = EVEN_TEXT_EMPTY;
  for (int i = 0; i < INSERT_COUNT; i++) {
    even_text_format(&text,
                     "INSERT OR REPLACE INTO %s SELECT * FROM waiting_%s ORDER BY rowid; DELETE FROM waiting_%s;",
                     even_database_tables[i], even_database_tables[i], even_database_tables[i]);
  }
  int code = even_text_status(&text) == EVEN_OK
                 ? sqlite3_exec(database->connection, even_text_string(&text), NULL, NULL, NULL)
                 : SQLITE_NOMEM;
  even_text_free(&text);
  return code;
}

/* `patience_ms`: 0 while the run lives, for the lock was waited for already. */
static even_status commit(even_database *database, int patience_ms, bool last) {
  int code = SQLITE_OK;
  if (!database->in_batch && database->waiting_rows == 0) {
    return EVEN_OK;
  }
  if (!database->in_batch) {
    (void)sqlite3_busy_timeout(database->connection, patience_ms);
    code = sqlite3_exec(database->connection, "BEGIN IMMEDIATE", NULL, NULL, NULL);
    (void)sqlite3_busy_timeout(database->connection, EVEN_DATABASE_PATIENCE_MS);
    if (is_locked(code) && !last) {
      return EVEN_OK;
    }
    database->in_batch = code == SQLITE_OK;
    code = code == SQLITE_OK ? move_waiting(database) : code;
  }
  code = code == SQLITE_OK ? even_thin(database->connection, &database->thinning) : code;
  code = code == SQLITE_OK ? sqlite3_exec(database->connection, "COMMIT", NULL, NULL, NULL) : code;
  if ((code & 0xff) == SQLITE_FULL) {
    bool told = database->full && !last;
    even_status status = disk_is_full(database);
    if (told) {
      even_error_clear();
    }
    return told ? EVEN_OK : status;
  }
  if (code != SQLITE_OK) {
    return even_database_fail(database, code);
  }
  database->in_batch = database->full = false;
  database->waiting_rows = 0;
  return EVEN_OK;
}

even_status even_database_commit(even_database *database) {
  return commit(database, 0, false);
}

even_status even_database_finish(even_database *database) {
  return commit(database, EVEN_DATABASE_LAST_PATIENCE_MS, true);
}
