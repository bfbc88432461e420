/* Rows back into the state, table by table, each from where it was left. */
#include "monitor/history.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/stop.h"
#include "monitor/database.h"
#include "monitor/sqlite.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/folder.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LOCK_PATIENCE_MS = 2000, STEPS_BETWEEN_LOOKS = 10000 };

typedef enum table { TABLE_STEPS, TABLE_SPANS, TABLE_EVENTS, TABLE_USAGE, TABLE_COUNT } table;

static const char *const queries[TABLE_COUNT] = {
    ("SELECT rowid,attempt,step,epoch,rank,end_ns,duration_ns,busy_ns,samples,batch,loss,predicted_seconds,steps "
     "FROM steps WHERE rowid>? ORDER BY rowid"),
    "SELECT rowid,step,rank,span,start_ns,duration_ns,bytes FROM spans WHERE rowid>? ORDER BY rowid",
    "SELECT rowid,attempt,at_ns,rank,step,event,value,words FROM events WHERE rowid>? ORDER BY rowid",
    ("SELECT rowid,at_ns,rank,cpu_seconds,rss_bytes,throttled_seconds,collectives,collective_bytes,bus_bytes,"
     "collective_ns,wait_ns,messages,message_bytes,run_wait_seconds,major_faults,swap_bytes,clock FROM usage WHERE "
     "rowid>? ORDER BY rowid")};

/* Of older versions' runs. */
static const char query_without_calls[] =
    "SELECT rowid,at_ns,rank,cpu_seconds,rss_bytes,throttled_seconds FROM usage WHERE rowid>? ORDER BY rowid";

static const char query_without_count[] =
    "SELECT rowid,attempt,step,epoch,rank,end_ns,duration_ns,busy_ns,samples,batch,loss,predicted_seconds FROM steps "
    "WHERE rowid>? ORDER BY rowid";

struct even_history {
  sqlite3 *connection;
  char *path;
  even_state *state;
  int64_t last[TABLE_COUNT];
  bool ended;
  bool merges;          /* steps has the column that counts; runs of before kept every step */
  bool calls;           /* usage has the sums of calls, and what kept a rank from its work */
  uint64_t deadline_ns; /* when reading is given up; 0: never */
};

static even_status fail(even_history *history, int code) {
  return even_sqlite_fail(history->connection, code, history->path, "cannot be read");
}

/* ---- meta and ranks ---- */

static even_status meta(even_history *history, const char *key, even_text *out) {
  sqlite3_stmt *statement = NULL;
  even_text_clear(out);
  int code = sqlite3_prepare_v2(history->connection, "SELECT value FROM meta WHERE key=?", -1, &statement, NULL);
  if (code == SQLITE_OK) {
    (void)sqlite3_bind_text(statement, 1, key, -1, SQLITE_STATIC);
    code = sqlite3_step(statement);
    if (code == SQLITE_ROW && sqlite3_column_text(statement, 0) != NULL) {
      even_text_add(out, (const char *)sqlite3_column_text(statement, 0));
    }
  }
  (void)sqlite3_finalize(statement);
  if (code != SQLITE_ROW && code != SQLITE_DONE) {
    return fail(history, code);
  }
  return even_text_status(out);
}

static even_status meta_number(even_history *history, const char *key, long long fallback, long long *out) {
  even_text value = EVEN_TEXT_EMPTY;
  even_status status = meta(history, key, &value);
  char *end = NULL;
  *out = strtoll(even_text_string(&value), &end, 10);
  if (value.length == 0 || *end != '\0') {
    *out = fallback;
  }
  even_text_free(&value);
  return status;
}

static even_status open_state(even_history *history) {
  even_text format = EVEN_TEXT_EMPTY;
  even_text run = EVEN_TEXT_EMPTY;
  even_text command = EVEN_TEXT_EMPTY;
  even_text policy = EVEN_TEXT_EMPTY;
  long long ranks = 0;
  even_status status = meta(history, "format", &format);
  if (status == EVEN_OK && strcmp(even_text_string(&format), EVEN_DATABASE_FORMAT) != 0) {
    status = even_fail(EVEN_ERR_CORRUPT, "%s is no history of an evenstep run (format \"%s\")", history->path,
                       even_text_string(&format));
  }
  status = status != EVEN_OK ? status : meta(history, "run", &run);
  status = status != EVEN_OK ? status : meta(history, "command", &command);
  status = status != EVEN_OK ? status : meta(history, "policy", &policy);
  status = status != EVEN_OK ? status : meta_number(history, "ranks", 0, &ranks);
  if (status == EVEN_OK && (ranks < 1 || ranks > EVEN_STATE_MOST_RANKS)) {
    status = even_fail(EVEN_ERR_CORRUPT, "%s is damaged: a run of %lld ranks", history->path, ranks);
  }
  if (status == EVEN_OK) {
    status = even_state_open((int)ranks, even_text_string(&run), even_text_string(&command), even_text_string(&policy),
                             &history->state);
  }
  even_text_free(&format);
  even_text_free(&run);
  even_text_free(&command);
  even_text_free(&policy);
  return status;
}

static const char *text_column(sqlite3_stmt *row, int column) {
  const unsigned char *text = sqlite3_column_text(row, column);
  return text == NULL ? "" : (const char *)text;
}

static double number_column(sqlite3_stmt *row, int column) {
  return sqlite3_column_type(row, column) == SQLITE_NULL ? NAN : sqlite3_column_double(row, column);
}

static even_status read_ranks(even_history *history) {
  sqlite3_stmt *row = NULL;
  int code = sqlite3_prepare_v2(history->connection,
                                "SELECT rank,device,model,cores,quota,pid,ended,cause FROM ranks ORDER BY attempt", -1,
                                &row, NULL);
  while (code == SQLITE_OK && (code = sqlite3_step(row)) == SQLITE_ROW) {
    int rank = sqlite3_column_int(row, 0);
    if (rank >= 0 && rank < history->state->room) {
      even_state_rank *at = &history->state->rank[rank];
      even_state_rank_facts(history->state, rank, text_column(row, 1), text_column(row, 2), number_column(row, 3),
                            number_column(row, 4));
      at->pid = sqlite3_column_int(row, 6) != 0 ? 0 : (pid_t)sqlite3_column_int(row, 5);
      (void)snprintf(at->cause, sizeof at->cause, "%s", text_column(row, 7));
    }
    code = SQLITE_OK;
  }
  (void)sqlite3_finalize(row);
  return code == SQLITE_DONE ? EVEN_OK : fail(history, code);
}

/* Hosts of a job may go and come, and ranks with them (orchestrator/elastic.h). */
static even_status follow_ranks(even_history *history) {
  sqlite3_stmt *row = NULL;
  long long ranks = 0;
  long long most = 0;
  EVEN_TRY(meta_number(history, "ranks", history->state->ranks, &ranks));
  int code = sqlite3_prepare_v2(history->connection, "SELECT max(rank) FROM ranks", -1, &row, NULL);
  if (code == SQLITE_OK && (code = sqlite3_step(row)) == SQLITE_ROW) {
    most = sqlite3_column_int64(row, 0) + 1;
    code = SQLITE_DONE;
  }
  (void)sqlite3_finalize(row);
  if (code != SQLITE_DONE) {
    return fail(history, code);
  }
  if (ranks < 1 || ranks > EVEN_STATE_MOST_RANKS || most > EVEN_STATE_MOST_RANKS) {
    return even_fail(EVEN_ERR_CORRUPT, "%s is damaged: a run of %lld ranks, the last of them %lld", history->path,
                     ranks, most - 1);
  }
  if (most > history->state->room) {
    EVEN_TRY(even_state_ranks(history->state, (int)most));
  }
  return (int)ranks == history->state->ranks ? EVEN_OK : even_state_ranks(history->state, (int)ranks);
}

/* ---- the growing tables ---- */

static void take_step(even_history *history, sqlite3_stmt *row) {
  even_state *state = history->state;
  int attempt = sqlite3_column_int(row, 1);
  int rank = sqlite3_column_int(row, 4);
  const even_step_record record = {.step = (uint32_t)sqlite3_column_int64(row, 2),
                                   .epoch = (uint32_t)sqlite3_column_int64(row, 3),
                                   .end_ns = (uint64_t)sqlite3_column_int64(row, 5),
                                   .duration_ns = (uint64_t)sqlite3_column_int64(row, 6),
                                   .busy_ns = (uint64_t)sqlite3_column_int64(row, 7),
                                   .samples = (uint32_t)sqlite3_column_int64(row, 8),
                                   .batch = (uint32_t)sqlite3_column_int64(row, 9),
                                   .loss = (float)number_column(row, 10),
                                   .predicted_seconds = (float)number_column(row, 11)};
  int64_t steps = history->merges ? sqlite3_column_int64(row, 12) : 1;
  if (rank < 0 || rank >= state->room || steps < 1) {
    return;
  }
  if (attempt > state->attempt) {
    even_state_attempt(state, attempt, record.end_ns - record.duration_ns);
  }
  if (steps == 1) {
    even_state_step(state, rank, &record);
    return;
  }
  const even_state_steps merged = {.last = record.step,
                                   .steps = (uint32_t)steps,
                                   .epoch = record.epoch,
                                   .end_ns = record.end_ns,
                                   .duration_ns = record.duration_ns,
                                   .busy_ns = record.busy_ns,
                                   .samples = (uint64_t)sqlite3_column_int64(row, 8),
                                   .batch = (uint64_t)sqlite3_column_int64(row, 9),
                                   .loss = number_column(row, 10),
                                   .predicted_seconds = number_column(row, 11)};
  even_state_merged(state, rank, &merged);
}

static void take_span(even_history *history, sqlite3_stmt *row) {
  int rank = sqlite3_column_int(row, 2);
  int span = even_state_span_number(text_column(row, 3));
  if (rank >= 0 && rank < history->state->room && span >= 0) {
    const even_span_record record = {.step = (uint32_t)sqlite3_column_int64(row, 1),
                                     .span = (uint32_t)span,
                                     .start_ns = (uint64_t)sqlite3_column_int64(row, 4),
                                     .duration_ns = (uint64_t)sqlite3_column_int64(row, 5),
                                     .bytes = (uint64_t)sqlite3_column_int64(row, 6)};
    even_state_span(history->state, rank, &record);
  }
}

static void take_event(even_history *history, sqlite3_stmt *row) {
  even_state_event event = {.attempt = sqlite3_column_int(row, 1),
                            .at_ns = (uint64_t)sqlite3_column_int64(row, 2),
                            .rank = sqlite3_column_int(row, 3),
                            .step = (uint32_t)sqlite3_column_int64(row, 4),
                            .event = even_state_event_number(text_column(row, 5)),
                            .value = sqlite3_column_int64(row, 6),
                            .scalar = number_column(row, 6)};
  (void)snprintf(event.words, sizeof event.words, "%s", text_column(row, 7));
  if (event.event == EVEN_EVENT_ATTEMPT && event.attempt > history->state->attempt) { /* it has made no step yet */
    even_state_attempt(history->state, event.attempt, event.at_ns);
  }
  if (event.event != 0 && event.event != EVEN_EVENT_GROUP) {
    (void)even_state_event_add(history->state, &event);
  }
}

static void take_usage(even_history *history, sqlite3_stmt *row) {
  int rank = sqlite3_column_int(row, 2);
  if (rank >= 0 && rank < history->state->room) {
    even_rank_usage usage = {.at_ns = (uint64_t)sqlite3_column_int64(row, 1),
                             .cpu_seconds = number_column(row, 3),
                             .rss_bytes = number_column(row, 4),
                             .throttled_seconds = number_column(row, 5),
                             .pressure = {NAN, NAN, NAN, NAN}};
    if (history->calls) {
      usage.pressure = (even_pressure){.wait_seconds = number_column(row, 13),
                                       .major_faults = number_column(row, 14),
                                       .swap_bytes = number_column(row, 15),
                                       .clock = number_column(row, 16)};
    }
    if (sqlite3_column_type(row, 3) != SQLITE_NULL) { /* else its process had ended */
      even_state_usage(history->state, rank, &usage);
    }
    if (history->calls) {
      const even_call_totals totals = {.collectives = (uint64_t)sqlite3_column_int64(row, 6),
                                       .bytes = (uint64_t)sqlite3_column_int64(row, 7),
                                       .bus_bytes = (uint64_t)sqlite3_column_int64(row, 8),
                                       .ns = (uint64_t)sqlite3_column_int64(row, 9),
                                       .wait_ns = (uint64_t)sqlite3_column_int64(row, 10),
                                       .messages = (uint64_t)sqlite3_column_int64(row, 11),
                                       .message_bytes = (uint64_t)sqlite3_column_int64(row, 12)};
      even_state_calls_seen(history->state, rank, usage.at_ns, &totals);
    }
  }
}

static even_status read_table(even_history *history, table which) {
  static void (*const takers[TABLE_COUNT])(even_history *, sqlite3_stmt *) = {take_step, take_span, take_event,
                                                                              take_usage};
  sqlite3_stmt *row = NULL;
  const char *query = which == TABLE_STEPS && !history->merges  ? query_without_count
                      : which == TABLE_USAGE && !history->calls ? query_without_calls
                                                                : queries[which];
  int code = sqlite3_prepare_v2(history->connection, query, -1, &row, NULL);
  if (code == SQLITE_OK) {
    (void)sqlite3_bind_int64(row, 1, history->last[which]);
    while ((code = sqlite3_step(row)) == SQLITE_ROW) {
      history->last[which] = sqlite3_column_int64(row, 0);
      takers[which](history, row);
    }
  }
  (void)sqlite3_finalize(row);
  return code == SQLITE_DONE ? EVEN_OK : fail(history, code);
}

/* The last sample of each rank's GPU; runs of before have none. */
static even_status read_gpus(even_history *history) {
  sqlite3_stmt *row = NULL;
  if (!even_history_has(history, "gpus", "slowed")) {
    return EVEN_OK;
  }
  int code = sqlite3_prepare_v2(history->connection,
                                "SELECT rank,at_ns,utilization,clock_mhz,temperature,power_watts,memory_bytes,"
                                "corrected,uncorrected,slowed FROM gpus WHERE rowid IN "
                                "(SELECT max(rowid) FROM gpus GROUP BY rank)",
                                -1, &row, NULL);
  while (code == SQLITE_OK && (code = sqlite3_step(row)) == SQLITE_ROW) {
    int rank = sqlite3_column_int(row, 0);
    if (rank >= 0 && rank < history->state->room) {
      history->state->rank[rank].gpu = (even_gpu_sample){.at_ns = (uint64_t)sqlite3_column_int64(row, 1),
                                                         .utilization_percent = 100 * number_column(row, 2),
                                                         .clock_mhz = number_column(row, 3),
                                                         .temperature_celsius = number_column(row, 4),
                                                         .power_watts = number_column(row, 5),
                                                         .memory_used_bytes = number_column(row, 6),
                                                         .corrected = number_column(row, 7),
                                                         .uncorrected = number_column(row, 8),
                                                         .user_count = -1,
                                                         .slowed = sqlite3_column_int(row, 9) != 0};
    }
    code = SQLITE_OK;
  }
  (void)sqlite3_finalize(row);
  return code == SQLITE_DONE ? EVEN_OK : fail(history, code);
}

static even_status read_stragglers(even_history *history) {
  sqlite3_stmt *row = NULL;
  if (!even_history_has(history, "stragglers", "begin_step")) { /* a run of before */
    return EVEN_OK;
  }
  int code =
      sqlite3_prepare_v2(history->connection,
                         "SELECT attempt,rank,host,device,cause,factor,begin_step,begin_ns,end_step,end_ns,words "
                         "FROM stragglers ORDER BY begin_ns",
                         -1, &row, NULL);
  history->state->straggler_count = 0; /* few rows, of which some are others by now */
  while (code == SQLITE_OK && (code = sqlite3_step(row)) == SQLITE_ROW) {
    even_state_straggler told = {.attempt = sqlite3_column_int(row, 0),
                                 .rank = sqlite3_column_int(row, 1),
                                 .factor = number_column(row, 5),
                                 .begin_step = (uint32_t)sqlite3_column_int64(row, 6),
                                 .begin_ns = (uint64_t)sqlite3_column_int64(row, 7),
                                 .over = sqlite3_column_type(row, 8) != SQLITE_NULL,
                                 .end_step = (uint32_t)sqlite3_column_int64(row, 8),
                                 .end_ns = (uint64_t)sqlite3_column_int64(row, 9)};
    (void)snprintf(told.host, sizeof told.host, "%s", text_column(row, 2));
    (void)snprintf(told.device, sizeof told.device, "%s", text_column(row, 3));
    (void)snprintf(told.cause, sizeof told.cause, "%s", text_column(row, 4));
    (void)snprintf(told.why, sizeof told.why, "%s", text_column(row, 10));
    even_state_straggler_add(history->state, &told);
    code = SQLITE_OK;
  }
  (void)sqlite3_finalize(row);
  return code == SQLITE_DONE ? EVEN_OK : fail(history, code);
}

static even_status read_end(even_history *history) {
  long long value = 0;
  EVEN_TRY(meta_number(history, "lost_records", 0, &value));
  history->state->lost_records = (uint64_t)value;
  EVEN_TRY(meta_number(history, "ended_ns", 0, &value));
  if (value > 0) {
    history->ended = true;
    history->state->ended_ns = (uint64_t)value;
    EVEN_TRY(meta_number(history, "exit_code", -1, &value));
    history->state->exit_code = (int)value;
  }
  return EVEN_OK;
}

/* The state without a row. */
static even_status begin_anew(even_history *history) {
  long long value = 0;
  even_state_close(history->state);
  history->state = NULL;
  memset(history->last, 0, sizeof history->last);
  EVEN_TRY(open_state(history));
  EVEN_TRY(meta_number(history, "started_ns", 0, &value));
  history->state->started_ns = history->state->last_end_ns = (uint64_t)value;
  EVEN_TRY(meta_number(history, "started_wall_ns", 0, &value));
  history->state->started_wall_ns = (uint64_t)value;
  return EVEN_OK;
}

/* Rows that were merged before they were seen (the reader was stopped for long) are not told apart from those that were
 * seen: all is read again. */
static even_status check_merged(even_history *history) {
  long long merged = 0;
  EVEN_TRY(meta_number(history, "merged_rows", 0, &merged));
  return merged > history->last[TABLE_STEPS] && history->last[TABLE_STEPS] > 0 ? begin_anew(history) : EVEN_OK;
}

/* Reads from one snapshot, so that the tables fit each other while a run writes. */
even_status even_history_read(even_history *history) {
  int code = sqlite3_exec(history->connection, "BEGIN", NULL, NULL, NULL);
  if (code != SQLITE_OK) {
    return fail(history, code);
  }
  even_status status = check_merged(history);
  status = status == EVEN_OK ? follow_ranks(history) : status;
  status = status == EVEN_OK ? read_ranks(history) : status;
  for (int which = 0; status == EVEN_OK && which < TABLE_COUNT; which++) {
    status = read_table(history, (table)which);
  }
  status = status == EVEN_OK ? read_gpus(history) : status;
  status = status == EVEN_OK ? read_stragglers(history) : status;
  if (status == EVEN_OK) {
    status = read_end(history);
  }
  (void)sqlite3_exec(history->connection, "COMMIT", NULL, NULL, NULL);
  return status;
}

static int stop(void *context) {
  const even_history *history = context;
  return even_stop_asked() || (history->deadline_ns != 0 && even_clock_ns() > history->deadline_ns);
}

/* A path in a URI: what means something there is written as %XX. */
static void add_escaped(even_text *out, const char *path) {
  for (; *path != '\0'; path++) {
    even_text_format(out, strchr("%?#", *path) != NULL ? "%%%02X" : "%c", (unsigned char)*path);
  }
}

/* A database in a folder that cannot be written needs to be told that nobody changes it. */
static int connect(even_history *history) {
  even_text address = EVEN_TEXT_EMPTY;
  int code = sqlite3_open_v2(history->path, &history->connection, SQLITE_OPEN_READONLY | SQLITE_OPEN_NOMUTEX, NULL);
  (void)sqlite3_busy_timeout(history->connection, LOCK_PATIENCE_MS);
  if (code == SQLITE_OK) {
    code = sqlite3_exec(history->connection, "SELECT count(*) FROM meta", NULL, NULL, NULL);
  }
  if ((code & 0xff) != SQLITE_CANTOPEN && (code & 0xff) != SQLITE_READONLY) {
    return code;
  }
  even_text_add(&address, "file:");
  add_escaped(&address, history->path);
  even_text_add(&address, "?immutable=1");
  if (even_text_status(&address) != EVEN_OK) {
    even_text_free(&address);
    return SQLITE_NOMEM;
  }
  (void)sqlite3_close(history->connection);
  code = sqlite3_open_v2(even_text_string(&address), &history->connection,
                         SQLITE_OPEN_READONLY | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_URI, NULL);
  even_text_free(&address);
  return code == SQLITE_OK ? sqlite3_exec(history->connection, "SELECT count(*) FROM meta", NULL, NULL, NULL) : code;
}

static even_status open_file(even_history *history, const char *folder) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text_format(&path, "%s/run.db", folder);
  even_status status = even_text_status(&path);
  if (status == EVEN_OK) {
    status = even_duplicate(even_text_string(&path), &history->path);
  }
  even_text_free(&path);
  EVEN_TRY(status);
  if (!even_path_exists(history->path)) {
    status = even_fail(EVEN_ERR_NOT_FOUND, "%s is no run: it has no run.db", folder);
    (void)even_error_fix("name the folder of a run, for example runs/demo (`ls runs` lists them)");
    return status;
  }
  int code = connect(history);
  if (code != SQLITE_OK) {
    status = fail(history, code);
    if (code == SQLITE_ERROR) { /* no table meta */
      status = even_fail(EVEN_ERR_CORRUPT, "%s is no history of an evenstep run", history->path);
    }
    return status;
  }
  sqlite3_progress_handler(history->connection, STEPS_BETWEEN_LOOKS, stop, history);
  return EVEN_OK;
}

bool even_history_has(const even_history *history, const char *of, const char *column) {
  return sqlite3_table_column_metadata(history->connection, NULL, of, column, NULL, NULL, NULL, NULL, NULL) ==
         SQLITE_OK;
}

static even_status open_parts(even_history *history, const char *folder) {
  EVEN_TRY(open_file(history, folder));
  EVEN_TRY(begin_anew(history));
  history->merges = even_history_has(history, "steps", "steps");
  history->calls = even_history_has(history, "usage", "run_wait_seconds");
  return even_history_read(history);
}

uint64_t even_history_began(const char *folder) {
  even_history history = {.path = NULL};
  long long when = 0;
  if (open_file(&history, folder) != EVEN_OK || meta_number(&history, "started_wall_ns", 0, &when) != EVEN_OK) {
    even_error_clear();
    when = 0;
  }
  (void)sqlite3_close(history.connection);
  even_free(history.path);
  return (uint64_t)when;
}

even_status even_history_open(const char *folder, even_history **out) {
  return even_history_open_by(folder, 0, out);
}

even_status even_history_open_by(const char *folder, uint64_t deadline_ns, even_history **out) {
  even_history *history = NULL;
  *out = NULL;
  EVEN_TRY(EVEN_NEW(&history));
  history->deadline_ns = deadline_ns;
  even_status status = open_parts(history, folder);
  if (status != EVEN_OK) {
    even_history_close(history);
    return status;
  }
  *out = history;
  return EVEN_OK;
}

void even_history_close(even_history *history) {
  if (history == NULL) {
    return;
  }
  (void)sqlite3_close(history->connection);
  even_state_close(history->state);
  even_free(history->path);
  even_free(history);
}

even_state *even_history_state(even_history *history) {
  return history->state;
}

even_state *even_history_take_state(even_history *history) {
  even_state *state = history->state;
  history->state = NULL;
  return state;
}

bool even_history_merges(const even_history *history) {
  return history->merges;
}

bool even_history_ended(const even_history *history) {
  return history->ended;
}

void even_history_give_up(even_history *history) {
  if (!history->ended) {
    history->state->ended_ns = history->state->last_end_ns;
    history->state->exit_code = -1;
    for (int rank = 0; rank < history->state->room; rank++) {
      history->state->rank[rank].pid = 0;
    }
  }
}

sqlite3 *even_history_connection(even_history *history) {
  return history->connection;
}

const char *even_history_path(const even_history *history) {
  return history->path;
}

/* The job holds the lock of its folder while it lives, however it ends: a process number alone says nothing, for it may
 * be another's by now. Where nothing can be locked, agent.json must do. */
bool even_history_alive(const char *folder) {
  even_text path = EVEN_TEXT_EMPTY;
  bool alive = false;
  even_text_format(&path, "%s/agent.json", folder);
  if (even_text_status(&path) == EVEN_OK && even_path_exists(even_text_string(&path))) {
    alive = even_folder_is_locked(folder, &alive) != EVEN_OK || alive;
  }
  even_text_free(&path);
  even_error_clear();
  return alive;
}
