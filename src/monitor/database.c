/* Rows through prepared statements, a transaction a batch. */
#include "monitor/database.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "monitor/sqlite.h"
#include "monitor/thin.h"
#include "os/file.h"
#include "os/folder.h"
#include "telemetry/trace.h"

#include <math.h>
#include <string.h>

static const char schema[] =
    "PRAGMA journal_mode=WAL;"
    "PRAGMA synchronous=NORMAL;"
    "CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT);"
    "CREATE TABLE ranks(rank INTEGER, device TEXT, model TEXT, cores REAL, quota REAL, pid INTEGER, attempt INTEGER,"
    " ended INTEGER, cause TEXT, PRIMARY KEY(rank, attempt));"
    "CREATE TABLE steps(attempt INTEGER, step INTEGER, epoch INTEGER, rank INTEGER, end_ns INTEGER,"
    " duration_ns INTEGER, busy_ns INTEGER, samples INTEGER, batch INTEGER, loss REAL, predicted_seconds REAL,"
    " steps INTEGER);"
    "CREATE TABLE spans(attempt INTEGER, step INTEGER, rank INTEGER, span TEXT, start_ns INTEGER,"
    " duration_ns INTEGER, bytes INTEGER);"
    "CREATE TABLE events(attempt INTEGER, at_ns INTEGER, rank INTEGER, step INTEGER, event TEXT, value INTEGER,"
    " words TEXT);"
    "CREATE TABLE usage(at_ns INTEGER, rank INTEGER, cpu_seconds REAL, rss_bytes INTEGER, throttled_seconds REAL,"
    " collectives INTEGER, collective_bytes INTEGER, bus_bytes INTEGER, collective_ns INTEGER, wait_ns INTEGER,"
    " messages INTEGER, message_bytes INTEGER, run_wait_seconds REAL, major_faults INTEGER, swap_bytes INTEGER,"
    " clock REAL);"
    "CREATE TABLE gpus(at_ns INTEGER, rank INTEGER, utilization REAL, clock_mhz REAL, temperature REAL,"
    " power_watts REAL, memory_bytes INTEGER, corrected INTEGER, uncorrected INTEGER, slowed INTEGER);"
    "CREATE TABLE stragglers(attempt INTEGER, rank INTEGER, host TEXT, device TEXT, cause TEXT, factor REAL,"
    " begin_step INTEGER, begin_ns INTEGER, end_step INTEGER, end_ns INTEGER, words TEXT,"
    " PRIMARY KEY(attempt, rank, begin_step));"
    "CREATE TABLE calls(place INTEGER PRIMARY KEY, attempt INTEGER, step INTEGER, rank INTEGER, in_group INTEGER, "
    "number INTEGER, call TEXT,"
    " dtype TEXT, op TEXT, peer INTEGER, tag INTEGER, bytes INTEGER, start_ns INTEGER, duration_ns INTEGER,"
    " wait_ns INTEGER, ranks INTEGER, member INTEGER, row INTEGER, failed INTEGER);";

/* The agent's loop stands still meanwhile: short while the run lives. */
enum { LOCK_PATIENCE_MS = 250, LAST_PATIENCE_MS = 3000, MOST_WAITING_ROWS = 1 << 20 };

typedef enum insert {
  INSERT_META,
  INSERT_RANK,
  INSERT_STEP,
  INSERT_SPAN,
  INSERT_EVENT,
  INSERT_USAGE,
  INSERT_GPU,
  INSERT_STRAGGLER,
  INSERT_CALL,
  INSERT_COUNT
} insert;

static const char *const tables[INSERT_COUNT] = {"meta",  "ranks", "steps",      "spans", "events",
                                                 "usage", "gpus",  "stragglers", "calls"};
static const char *const inserts[INSERT_COUNT] = {
    "INSERT OR REPLACE INTO meta VALUES(?,?)",
    "INSERT OR REPLACE INTO ranks VALUES(?,?,?,?,?,?,?,?,?)",
    "INSERT INTO steps VALUES(?,?,?,?,?,?,?,?,?,?,?,1)",
    "INSERT INTO spans VALUES(?,?,?,?,?,?,?)",
    "INSERT INTO events VALUES(?,?,?,?,?,?,?)",
    "INSERT INTO usage VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
    "INSERT INTO gpus VALUES(?,?,?,?,?,?,?,?,?,?)",
    "INSERT OR REPLACE INTO stragglers VALUES(?,?,?,?,?,?,?,?,?,?,?)",
    "INSERT OR REPLACE INTO calls VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"};

struct even_database {
  sqlite3 *connection;
  sqlite3_stmt *statements[INSERT_COUNT];
  sqlite3_stmt *waiting[INSERT_COUNT]; /* into temporary tables, while somebody else has the database locked */
  long waiting_rows;
  char *path;
  bool in_batch;
  bool full; /* its disk: rows wait until it has room */
  even_thinning thinning;
  int64_t calls;   /* kept of each rank's */
  int64_t *called; /* ever, by rank */
  int ranks;       /* in it */
};

static even_status fail(even_database *database, int code) {
  return even_sqlite_fail(database->connection, code, database->path, "cannot be written");
}

static even_status move_aside(const char *path) {
  static const char *const endings[] = {"", "-wal", "-shm"};
  even_text kept = EVEN_TEXT_EMPTY;
  even_text old = EVEN_TEXT_EMPTY;
  even_status status = EVEN_OK;
  size_t stem = strlen(path);
  if (stem > 3 && strcmp(path + stem - 3, ".db") == 0) {
    stem -= 3;
  }
  for (int i = 0; status == EVEN_OK && i < 3; i++) {
    even_text_clear(&kept);
    even_text_clear(&old);
    even_text_append(&kept, path, stem);
    even_text_format(&kept, "-previous.db%s", endings[i]);
    even_text_format(&old, "%s%s", path, endings[i]);
    status = even_text_status(&kept) != EVEN_OK ? even_text_status(&kept) : even_text_status(&old);
    if (status == EVEN_OK && even_path_exists(even_text_string(&old))) {
      status = even_file_rename(even_text_string(&old), even_text_string(&kept));
    } else if (status == EVEN_OK) {
      status = even_file_remove(even_text_string(&kept));
    }
  }
  if (status != EVEN_OK) {
    (void)even_error_prefix("the history of the run before cannot be moved aside");
  }
  even_text_free(&kept);
  even_text_free(&old);
  return status;
}

/* A temporary table of the same columns, in memory. */
static int prepare_waiting(even_database *database, int table) {
  even_text text = EVEN_TEXT_EMPTY;
  const char *values = strstr(inserts[table], " VALUES");
  even_text_format(&text, "CREATE TEMP TABLE waiting_%s AS SELECT * FROM %s WHERE 0", tables[table], tables[table]);
  int code = even_text_status(&text) == EVEN_OK
                 ? sqlite3_exec(database->connection, even_text_string(&text), NULL, NULL, NULL)
                 : SQLITE_NOMEM;
  even_text_clear(&text);
  even_text_format(&text, "INSERT INTO waiting_%s%s", tables[table], values);
  if (code == SQLITE_OK) {
    code = even_text_status(&text) == EVEN_OK
               ? sqlite3_prepare_v3(database->connection, even_text_string(&text), -1, SQLITE_PREPARE_PERSISTENT,
                                    &database->waiting[table], NULL)
               : SQLITE_NOMEM;
  }
  even_text_free(&text);
  return code;
}

static even_status prepare(even_database *database, const char *path) {
  EVEN_TRY(even_duplicate(path, &database->path));
  int code = sqlite3_open_v2(path, &database->connection,
                             SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX, NULL);
  if (code != SQLITE_OK) {
    return fail(database, code);
  }
  (void)sqlite3_busy_timeout(database->connection, LOCK_PATIENCE_MS);
  code = sqlite3_exec(database->connection, schema, NULL, NULL, NULL);
  code = code == SQLITE_OK ? sqlite3_exec(database->connection, "PRAGMA temp_store=MEMORY", NULL, NULL, NULL) : code;
  for (int i = 0; code == SQLITE_OK && i < INSERT_COUNT; i++) {
    code = sqlite3_prepare_v3(database->connection, inserts[i], -1, SQLITE_PREPARE_PERSISTENT, &database->statements[i],
                              NULL);
    code = code == SQLITE_OK ? prepare_waiting(database, i) : code;
  }
  return code == SQLITE_OK ? EVEN_OK : fail(database, code);
}

even_status even_database_create(const char *path, const even_database_limits *limits, even_database **out) {
  even_database *database = NULL;
  *out = NULL;
  EVEN_TRY(move_aside(path));
  EVEN_TRY(EVEN_NEW(&database));
  database->thinning.most_rows = limits->step_rows;
  database->calls = limits->calls;
  database->ranks = limits->ranks;
  even_status status = EVEN_NEW_ARRAY(&database->called, (size_t)limits->ranks);
  status = status == EVEN_OK ? prepare(database, path) : status;
  if (status != EVEN_OK) {
    even_database_close(database);
    return status;
  }
  *out = database;
  return EVEN_OK;
}

even_status even_database_ranks(even_database *database, int ranks) {
  if (ranks > database->ranks) {
    EVEN_TRY(even_realloc((void **)&database->called, (size_t)ranks, sizeof *database->called));
    memset(&database->called[database->ranks], 0, (size_t)(ranks - database->ranks) * sizeof *database->called);
    database->ranks = ranks;
  }
  return EVEN_OK;
}

void even_database_close(even_database *database) {
  if (database == NULL) {
    return;
  }
  for (int i = 0; i < INSERT_COUNT; i++) {
    (void)sqlite3_finalize(database->statements[i]);
    (void)sqlite3_finalize(database->waiting[i]);
  }
  (void)sqlite3_close(database->connection);
  even_free(database->path);
  even_free(database->called);
  even_free(database);
}

void even_database_leave(even_database *database) {
  if (database != NULL) {
    (void)sqlite3_db_config(database->connection, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1, NULL);
  }
  even_database_close(database);
}

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
  even_status status = fail(database, SQLITE_FULL);
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

static even_status begin(even_database *database, insert which, row *out) {
  *out = (row){.database = database, .statement = database->statements[which]};
  if (!database->in_batch && !database->full && database->waiting_rows == 0) {
    int code = sqlite3_exec(database->connection, "BEGIN IMMEDIATE", NULL, NULL, NULL);
    if (code != SQLITE_OK && !is_locked(code)) {
      return fail(database, code);
    }
    database->in_batch = code == SQLITE_OK;
  }
  if (!database->in_batch) { /* somebody reads or copies it at leisure, or the disk is full: they wait for a commit */
    if (++database->waiting_rows > MOST_WAITING_ROWS) {
      int code = database->full ? SQLITE_FULL : SQLITE_BUSY;
      database->full = false; /* no longer waited for */
      return fail(database, code);
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
  return code == SQLITE_DONE ? EVEN_OK : fail(at->database, code);
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

even_status even_database_span(even_database *database, int attempt, int rank, const even_span_record *record) {
  static const char *const names[EVEN_SPAN_COUNT] = {
#define SPAN_NAME(name, number, words) words,
      EVEN_SPAN_LIST(SPAN_NAME)
#undef SPAN_NAME
  };
  row at;
  EVEN_TRY(begin(database, INSERT_SPAN, &at));
  integer(&at, attempt);
  integer(&at, record->step);
  integer(&at, rank);
  text(&at, names[record->span]);
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

/* In a batch of their own, behind which nothing of them waits any more. */
static int move_waiting(even_database *database) {
  even_text text = EVEN_TEXT_EMPTY;
  for (int i = 0; i < INSERT_COUNT; i++) {
    even_text_format(&text,
                     "INSERT OR REPLACE INTO %s SELECT * FROM waiting_%s ORDER BY rowid; DELETE FROM waiting_%s;",
                     tables[i], tables[i], tables[i]);
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
    (void)sqlite3_busy_timeout(database->connection, LOCK_PATIENCE_MS);
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
    return fail(database, code);
  }
  database->in_batch = database->full = false;
  database->waiting_rows = 0;
  return EVEN_OK;
}

even_status even_database_commit(even_database *database) {
  return commit(database, 0, false);
}

even_status even_database_finish(even_database *database) {
  return commit(database, LAST_PATIENCE_MS, true);
}
