/* A database made anew, or gone on with; closed. */
#include "monitor/database_parts.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "monitor/sqlite.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/folder.h"

#include <inttypes.h>
#include <stdio.h>
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
    " wait_ns INTEGER, ranks INTEGER, member INTEGER, row INTEGER, failed INTEGER);"
    "CREATE TABLE rings(rank INTEGER PRIMARY KEY, place INTEGER, calls INTEGER);"
    "CREATE TABLE open_spans(rank INTEGER, span TEXT, step INTEGER, start_ns INTEGER, duration_ns INTEGER,"
    " bytes INTEGER, PRIMARY KEY(rank, span));";

const char *const even_database_tables[INSERT_COUNT] = {"meta", "ranks",      "steps", "spans", "events",    "usage",
                                                        "gpus", "stragglers", "calls", "rings", "open_spans"};
static const char *const inserts[INSERT_COUNT] = {
    "INSERT OR REPLACE INTO meta VALUES(?,?)",
    "INSERT OR REPLACE INTO ranks VALUES(?,?,?,?,?,?,?,?,?)",
    "INSERT INTO steps VALUES(?,?,?,?,?,?,?,?,?,?,?,1)",
    "INSERT INTO spans VALUES(?,?,?,?,?,?,?)",
    "INSERT INTO events VALUES(?,?,?,?,?,?,?)",
    "INSERT INTO usage VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
    "INSERT INTO gpus VALUES(?,?,?,?,?,?,?,?,?,?)",
    "INSERT OR REPLACE INTO stragglers VALUES(?,?,?,?,?,?,?,?,?,?,?)",
    "INSERT OR REPLACE INTO calls VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
    "INSERT OR REPLACE INTO rings VALUES(?,?,?)",
    "INSERT OR REPLACE INTO open_spans VALUES(?,?,?,?,?,?)"};

even_status even_database_fail(even_database *database, int code) {
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
  even_text_format(&text, "CREATE TEMP TABLE waiting_%s AS SELECT * FROM %s WHERE 0", even_database_tables[table],
                   even_database_tables[table]);
  int code = even_text_status(&text) == EVEN_OK
                 ? sqlite3_exec(database->connection, even_text_string(&text), NULL, NULL, NULL)
                 : SQLITE_NOMEM;
  even_text_clear(&text);
  even_text_format(&text, "INSERT INTO waiting_%s%s", even_database_tables[table], values);
  if (code == SQLITE_OK) {
    code = even_text_status(&text) == EVEN_OK
               ? sqlite3_prepare_v3(database->connection, even_text_string(&text), -1, SQLITE_PREPARE_PERSISTENT,
                                    &database->waiting[table], NULL)
               : SQLITE_NOMEM;
  }
  even_text_free(&text);
  return code;
}

static int prepare_rows(even_database *database) {
  int code = sqlite3_exec(database->connection, "PRAGMA temp_store=MEMORY", NULL, NULL, NULL);
  for (int i = 0; code == SQLITE_OK && i < INSERT_COUNT; i++) {
    code = sqlite3_prepare_v3(database->connection, inserts[i], -1, SQLITE_PREPARE_PERSISTENT, &database->statements[i],
                              NULL);
    code = code == SQLITE_OK ? prepare_waiting(database, i) : code;
  }
  return code;
}

static int connect(even_database *database, int flags, int patience_ms) {
  int code =
      sqlite3_open_v2(database->path, &database->connection, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX | flags, NULL);
  (void)sqlite3_busy_timeout(database->connection, patience_ms);
  return code;
}

static even_status make(even_database *database) {
  int code = connect(database, SQLITE_OPEN_CREATE, EVEN_DATABASE_PATIENCE_MS);
  code = code == SQLITE_OK ? sqlite3_exec(database->connection, schema, NULL, NULL, NULL) : code;
  code = code == SQLITE_OK ? prepare_rows(database) : code;
  return code == SQLITE_OK ? EVEN_OK : even_database_fail(database, code);
}

/* Without a connection; *out is whole enough to be closed, also after a failure. */
static even_status begin(const char *path, const even_database_limits *limits, even_database **out) {
  EVEN_TRY(EVEN_NEW(out));
  even_database *database = *out;
  database->thinning.most_rows = limits->step_rows;
  database->calls = limits->calls;
  database->ranks = limits->ranks;
  EVEN_TRY(EVEN_NEW_ARRAY(&database->called, (size_t)limits->ranks));
  return even_duplicate(path, &database->path);
}

even_status even_database_create(const char *path, const even_database_limits *limits, even_database **out) {
  *out = NULL;
  EVEN_TRY(move_aside(path));
  even_status status = begin(path, limits, out);
  status = status == EVEN_OK ? make(*out) : status;
  if (status != EVEN_OK) {
    even_database_close(*out);
    *out = NULL;
  }
  return status;
}

/* ---- gone on with ---- */

/* A database of hundreds of megabytes is looked at as far as it gets. */
static const uint64_t CHECK_NS = 1000000000;

static int past(void *deadline_ns) {
  return even_clock_ns() > *(uint64_t *)deadline_ns;
}

/* Whether a query's first value is this text. */
static int says(even_database *database, const char *query, const char *words, bool *same) {
  sqlite3_stmt *row = NULL;
  int code = sqlite3_prepare_v2(database->connection, query, -1, &row, NULL);
  code = code == SQLITE_OK ? sqlite3_step(row) : code;
  const char *value = code == SQLITE_ROW ? (const char *)sqlite3_column_text(row, 0) : NULL;
  *same = value != NULL && strcmp(value, words) == 0;
  (void)sqlite3_finalize(row);
  return code == SQLITE_ROW || code == SQLITE_DONE ? SQLITE_OK : code;
}

static even_status check(even_database *database) {
  uint64_t deadline_ns = even_clock_ns() + CHECK_NS;
  bool same = false;
  int code = says(database, "SELECT value FROM meta WHERE key = 'format'", EVEN_DATABASE_FORMAT, &same);
  if (code == SQLITE_ERROR || (code == SQLITE_OK && !same)) { /* no table meta, or another's */
    return even_fail(EVEN_ERR_CORRUPT, "%s is no history of an evenstep run of this version", database->path);
  }
  if (code == SQLITE_OK) {
    sqlite3_progress_handler(database->connection, 1000, past, &deadline_ns);
    code = says(database, "PRAGMA quick_check(1)", "ok", &same);
    sqlite3_progress_handler(database->connection, 0, NULL, NULL);
    same = same || code == SQLITE_INTERRUPT;
    code = code == SQLITE_INTERRUPT ? SQLITE_OK : code;
  }
  if (code == SQLITE_OK && !same) {
    code = SQLITE_CORRUPT;
  }
  return code == SQLITE_OK ? EVEN_OK : even_sqlite_fail(NULL, code, database->path, "cannot be gone on with");
}

static int take_called(even_database *database) {
  sqlite3_stmt *row = NULL;
  int code = sqlite3_prepare_v2(database->connection, "SELECT rank, calls FROM rings", -1, &row, NULL);
  while (code == SQLITE_OK && (code = sqlite3_step(row)) == SQLITE_ROW) {
    int rank = sqlite3_column_int(row, 0);
    if (rank >= 0 && rank < database->ranks && sqlite3_column_int64(row, 1) > 0) {
      database->called[rank] = sqlite3_column_int64(row, 1);
    }
    code = SQLITE_OK;
  }
  (void)sqlite3_finalize(row);
  return code == SQLITE_DONE ? SQLITE_OK : code;
}

/* What an end that was written says is no longer so. Calls have their places by how many are kept. */
static int open_again(even_database *database) {
  char digits[32];
  bool same = false;
  even_text script = EVEN_TEXT_EMPTY;
  (void)snprintf(digits, sizeof digits, "%" PRId64, database->calls);
  int code = says(database, "SELECT value FROM meta WHERE key = 'calls'", digits, &same);
  even_text_add(&script, "BEGIN IMMEDIATE; DELETE FROM meta WHERE key IN ('ended_ns', 'exit_code');");
  if (!same) {
    even_text_format(
        &script, "DELETE FROM calls; UPDATE rings SET calls = 0; INSERT OR REPLACE INTO meta VALUES('calls', '%s');",
        digits);
  }
  even_text_add(&script, "COMMIT");
  if (code == SQLITE_OK) {
    code = even_text_status(&script) == EVEN_OK
               ? sqlite3_exec(database->connection, even_text_string(&script), NULL, NULL, NULL)
               : SQLITE_NOMEM;
  }
  even_text_free(&script);
  return code;
}

static even_status open_again_checked(even_database *database) {
  int code = connect(database, 0, EVEN_DATABASE_LAST_PATIENCE_MS);
  if (code == SQLITE_OK) {
    EVEN_TRY(check(database));
    code = sqlite3_exec(database->connection, "PRAGMA synchronous=NORMAL", NULL, NULL, NULL);
    code = code == SQLITE_OK ? prepare_rows(database) : code;
    if (code == SQLITE_ERROR) {
      return even_fail(EVEN_ERR_CORRUPT, "%s has not the tables of this version: %s", database->path,
                       sqlite3_errmsg(database->connection));
    }
  }
  code = code == SQLITE_OK ? open_again(database) : code;
  code = code == SQLITE_OK ? even_thin_go_on(database->connection, &database->thinning) : code;
  code = code == SQLITE_OK ? take_called(database) : code;
  (void)sqlite3_busy_timeout(database->connection, EVEN_DATABASE_PATIENCE_MS);
  return code == SQLITE_OK ? EVEN_OK : even_database_fail(database, code);
}

even_status even_database_continue(const char *path, const even_database_limits *limits, even_database **out) {
  *out = NULL;
  if (!even_path_exists(path)) {
    return even_fail(EVEN_ERR_NOT_FOUND, "there is no %s", path);
  }
  even_status status = begin(path, limits, out);
  status = status == EVEN_OK ? open_again_checked(*out) : status;
  if (status != EVEN_OK) {
    even_database_leave(*out);
    *out = NULL;
  }
  return status;
}

sqlite3 *even_database_connection(even_database *database) {
  return database->connection;
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
  if (database != NULL && database->connection != NULL) {
    (void)sqlite3_db_config(database->connection, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1, NULL);
  }
  even_database_close(database);
}
