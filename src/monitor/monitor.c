/* The monitor of a living run: rings into state and database, the server beside it. */
#include "monitor/monitor.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_writer.h"
#include "monitor/database.h"
#include "monitor/json.h"
#include "monitor/metrics.h"
#include "monitor/page.h"
#include "monitor/report.h"
#include "monitor/server.h"
#include "monitor/usage.h"
#include "monitor/view.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/random.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RECORDS_AT_ONCE = 512, MOST_ROUNDS = 64 };
static const uint64_t COMMIT_EVERY_NS = 1000000000;
static const uint64_t USAGE_EVERY_NS = 1000000000;

/* Spans of one kind and step are summed before they are kept: communication has one for each bucket. */
typedef struct pending_span {
  bool used;
  even_span_record record;
} pending_span;

struct even_monitor {
  pthread_mutex_t lock; /* state: between tick and the server's thread */
  even_state *state;
  even_telemetry_reader *reader;
  even_database *database; /* NULL: history stopped */
  even_error trouble;      /* to be reported by the next tick; status EVEN_OK: none */
  even_server *server;
  pending_span (*pending)[EVEN_SPAN_COUNT];
  even_record *records;
  char *folder;
  char token[EVEN_SERVER_TOKEN_DIGITS + 1];
  char url[160];
  uint64_t committed_ns;
  uint64_t looked_ns;
};

/* History stops at its first failure; the run goes on. */
static void history(even_monitor *monitor, even_status status) {
  if (status == EVEN_OK || monitor->database == NULL) {
    return;
  }
  (void)even_error_prefix("the run goes on without history");
  monitor->trouble = *even_error_last();
  even_database_close(monitor->database);
  monitor->database = NULL;
}

static even_status report_trouble(even_monitor *monitor) {
  if (monitor->trouble.status == EVEN_OK) {
    return EVEN_OK;
  }
  even_error trouble = monitor->trouble;
  monitor->trouble.status = EVEN_OK;
  (void)even_fail(trouble.status, "%s", trouble.what);
  return even_error_fix("%s", trouble.fix);
}

#define HISTORY(call)                \
  do {                               \
    if (monitor->database != NULL) { \
      history(monitor, (call));      \
    }                                \
  } while (0)

/* ---- events ---- */

static void note(even_monitor *monitor, const even_state_event *event) {
  if (even_state_event_add(monitor->state, event)) {
    HISTORY(even_database_event(monitor->database, event));
  }
}

static void note_own(even_monitor *monitor, int event, int rank, int64_t value, const char *words) {
  even_state_event made = {.attempt = monitor->state->attempt,
                           .rank = rank,
                           .step = monitor->state->last_step < 0 ? 0 : (uint32_t)monitor->state->last_step,
                           .at_ns = even_clock_ns(),
                           .event = event,
                           .value = value};
  (void)snprintf(made.words, sizeof made.words, "%s", words);
  note(monitor, &made);
}

/* Words from a rank may be cut in a character or hold anything: what is not printable ASCII or whole UTF-8 becomes "?",
 * so that everything made of them is valid. */
static void clean_words(const char *from, size_t limit, char *out, size_t bytes) {
  size_t at = 0;
  size_t to = 0;
  while (at < limit && from[at] != '\0' && to + 5 < bytes) {
    unsigned char first = (unsigned char)from[at];
    size_t length = first < 0x80 ? 1 : first >= 0xf0 && first < 0xf5 ? 4 : first >= 0xe0 ? 3 : first >= 0xc2 ? 2 : 0;
    bool whole = length > 0 && first < 0xf5 && at + length <= limit && !(first < 0x20 || first == 0x7f);
    for (size_t i = 1; whole && i < length; i++) {
      whole = ((unsigned char)from[at + i] & 0xc0U) == 0x80U;
    }
    if (whole) {
      memcpy(out + to, from + at, length);
      to += length;
      at += length;
    } else {
      out[to++] = '?';
      at++;
    }
  }
  out[to] = '\0';
}

/* ---- records ---- */

static void keep_span(even_monitor *monitor, int rank, pending_span *pending) {
  if (pending->used) {
    HISTORY(even_database_span(monitor->database, monitor->state->attempt, rank, &pending->record));
    pending->used = false;
  }
}

static void take_span(even_monitor *monitor, int rank, const even_span_record *record) {
  pending_span *pending = &monitor->pending[rank][record->span];
  even_state_span(monitor->state, rank, record);
  if (pending->used && pending->record.step == record->step) {
    pending->record.duration_ns += record->duration_ns;
    pending->record.bytes += record->bytes;
    return;
  }
  keep_span(monitor, rank, pending);
  *pending = (pending_span){.used = true, .record = *record};
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
                            .value = record->value};
  clean_words(record->words, sizeof record->words, event.words, sizeof event.words);
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
      HISTORY(even_database_step(monitor->database, monitor->state->attempt, rank, &record->as.step));
      break;
    case EVEN_RECORD_EVENT:
      take_event(monitor, rank, &record->as.event);
      break;
  }
}

/* Bounded: writers faster than this reader must not hold the agent's loop. Whether there may be more. */
static bool drain(even_monitor *monitor) {
  uint64_t lost = 0;
  bool more = true;
  for (int round = 0; more && round < MOST_ROUNDS; round++) {
    size_t count = even_telemetry_reader_drain(monitor->reader, monitor->records, RECORDS_AT_ONCE, &lost);
    for (size_t i = 0; i < count; i++) {
      take(monitor, &monitor->records[i]);
    }
    more = count == RECORDS_AT_ONCE;
  }
  if (lost > 0) {
    char words[96];
    monitor->state->lost_records += lost;
    (void)snprintf(words, sizeof words, "%llu telemetry records were overwritten before they were read",
                   (unsigned long long)lost);
    note_own(monitor, EVEN_EVENT_LOST, -1, (int64_t)lost, words);
  }
  return more;
}

/* All that the ranks wrote before they ended: a record that one had only begun when it was killed holds up nothing. */
static void drain_ended(even_monitor *monitor) {
  even_telemetry_reader_writers(monitor->reader, false);
  while (drain(monitor)) {
  }
  even_telemetry_reader_writers(monitor->reader, true);
}

static void look(even_monitor *monitor, uint64_t now) {
  for (int rank = 0; rank < monitor->state->ranks; rank++) {
    even_rank_usage usage;
    pid_t pid = monitor->state->rank[rank].pid;
    if (pid != 0 && even_usage_look(pid, now, &monitor->state->rank[rank].usage, &usage)) {
      even_state_usage(monitor->state, rank, &usage);
      HISTORY(even_database_usage(monitor->database, rank, &usage));
    }
  }
}

even_status even_monitor_tick(even_monitor *monitor) {
  uint64_t now = even_clock_ns();
  (void)pthread_mutex_lock(&monitor->lock);
  (void)drain(monitor);
  if (now - monitor->looked_ns >= USAGE_EVERY_NS) {
    monitor->looked_ns = now;
    look(monitor, now);
  }
  if (now - monitor->committed_ns >= COMMIT_EVERY_NS) {
    monitor->committed_ns = now;
    HISTORY(even_database_commit(monitor->database));
  }
  even_status status = report_trouble(monitor);
  (void)pthread_mutex_unlock(&monitor->lock);
  return status;
}

/* ---- what the agent tells ---- */

void even_monitor_attempt(even_monitor *monitor, int attempt) {
  (void)pthread_mutex_lock(&monitor->lock);
  drain_ended(monitor); /* what the ranks of the attempt before wrote is still theirs */
  keep_all_spans(monitor);
  even_state_attempt(monitor->state, attempt, even_clock_ns());
  if (attempt > 0) {
    char words[64];
    (void)snprintf(words, sizeof words, "restart %d", attempt);
    note_own(monitor, EVEN_EVENT_ATTEMPT, -1, attempt, words);
  }
  (void)pthread_mutex_unlock(&monitor->lock);
}

void even_monitor_rank_started(even_monitor *monitor, int rank, pid_t pid) {
  (void)pthread_mutex_lock(&monitor->lock);
  if (rank >= 0 && rank < monitor->state->ranks) {
    even_state_rank *at = &monitor->state->rank[rank];
    at->pid = pid;
    at->cause[0] = '\0';
    at->usage = at->usage_before = (even_rank_usage){.throttled_seconds = NAN};
    HISTORY(even_database_rank(monitor->database, rank, at, monitor->state->attempt, false));
    note_own(monitor, EVEN_EVENT_RANK_STARTED, rank, pid, at->device);
  }
  (void)pthread_mutex_unlock(&monitor->lock);
}

void even_monitor_rank_ended(even_monitor *monitor, int rank, const char *cause) {
  (void)pthread_mutex_lock(&monitor->lock);
  (void)drain(monitor);
  if (rank >= 0 && rank < monitor->state->ranks) {
    even_state_rank *at = &monitor->state->rank[rank];
    clean_words(cause == NULL ? "" : cause, sizeof at->cause - 8, at->cause, sizeof at->cause);
    HISTORY(even_database_rank(monitor->database, rank, at, monitor->state->attempt, true));
    at->pid = 0;
    note_own(monitor, EVEN_EVENT_RANK_ENDED, rank, 0, at->cause);
  }
  (void)pthread_mutex_unlock(&monitor->lock);
}

even_status even_monitor_view(even_monitor *monitor, int columns, bool colour, even_text *out) {
  (void)pthread_mutex_lock(&monitor->lock);
  even_view_draw(monitor->state, even_clock_ns(), columns, colour, out);
  (void)pthread_mutex_unlock(&monitor->lock);
  return even_text_status(out);
}

const char *even_monitor_url(const even_monitor *monitor) {
  return monitor->url;
}

/* ---- the server's answers ---- */

static int answer(void *context, const even_server_request *request, even_text *body, const char **content_type) {
  static const char json[] = "application/json; charset=utf-8";
  even_monitor *monitor = context;
  const char *path = even_server_path(request);
  uint64_t now = even_clock_ns();
  even_measure measure;
  int code = 200;
  (void)pthread_mutex_lock(&monitor->lock);
  *content_type = json;
  if (strcmp(path, "/") == 0) {
    *content_type = "text/html; charset=utf-8";
    even_page_live(body);
  } else if (strcmp(path, "/api/v1/summary") == 0) {
    even_state_measure(monitor->state, now, &measure);
    even_monitor_json_summary(monitor->state, &measure, body);
  } else if (strcmp(path, "/api/v1/steps") == 0) {
    long limit = even_server_query(request, "limit", 0);
    even_monitor_json_steps(monitor->state, even_server_query(request, "since", -1), limit < 0 ? 0 : (size_t)limit,
                            body);
  } else if (strcmp(path, "/api/v1/spans") == 0) {
    even_state_measure(monitor->state, now, &measure);
    even_monitor_json_spans(monitor->state, &measure, body);
  } else if (strcmp(path, "/api/v1/events") == 0) {
    long since = even_server_query(request, "since", 0);
    even_monitor_json_events(monitor->state, since < 0 ? 0 : (uint64_t)since, body);
  } else if (strcmp(path, "/metrics") == 0) {
    *content_type = EVEN_METRICS_CONTENT_TYPE;
    even_monitor_metrics(monitor->state, now, body);
  } else {
    code = 404;
    *content_type = "text/plain; charset=utf-8";
    even_text_add(body, "there is /, /api/v1/summary, /api/v1/steps, /api/v1/spans, /api/v1/events and /metrics\n");
  }
  (void)pthread_mutex_unlock(&monitor->lock);
  return code;
}

/* ---- opening ---- */

static even_status path_in(const even_monitor *monitor, const char *name, even_text *out) {
  even_text_clear(out);
  even_text_format(out, "%s/%s", monitor->folder, name);
  return even_text_status(out);
}

static even_status meta_number(even_database *database, const char *key, long long value) {
  char digits[32];
  (void)snprintf(digits, sizeof digits, "%lld", value);
  return even_database_meta(database, key, digits);
}

static even_status write_meta(even_database *database, const even_state *state) {
  EVEN_TRY(even_database_meta(database, "format", "evenstep-run-1"));
  EVEN_TRY(even_database_meta(database, "run", state->run_name));
  EVEN_TRY(even_database_meta(database, "command", state->command));
  EVEN_TRY(even_database_meta(database, "policy", state->policy));
  EVEN_TRY(meta_number(database, "ranks", state->ranks));
  EVEN_TRY(meta_number(database, "started_ns", (long long)state->started_ns));
  EVEN_TRY(meta_number(database, "started_wall_ns", (long long)state->started_wall_ns));
  for (int rank = 0; rank < state->ranks; rank++) {
    EVEN_TRY(even_database_rank(database, rank, &state->rank[rank], 0, false));
  }
  return even_database_commit(database);
}

/* A database that cannot be made is reported by the first tick, like one that breaks later. */
static even_status open_history(even_monitor *monitor) {
  even_text path = EVEN_TEXT_EMPTY;
  even_status status = path_in(monitor, "run.db", &path);
  if (status == EVEN_OK) {
    status = even_database_create(even_text_string(&path), &monitor->database);
    if (status == EVEN_OK) {
      HISTORY(write_meta(monitor->database, monitor->state));
    } else {
      (void)even_error_prefix("the run goes on without history");
      monitor->trouble = *even_error_last();
    }
    status = EVEN_OK;
  }
  even_text_free(&path);
  return status;
}

static even_status open_server(even_monitor *monitor, const even_monitor_params *params) {
  const char *address = params->address == NULL ? "127.0.0.1" : params->address;
  if (params->port < 0) {
    return EVEN_OK;
  }
  const even_server_params server = {
      .address = address, .port = params->port, .token = monitor->token, .answer = answer, .context = monitor};
  EVEN_TRY(even_server_open(&server, &monitor->server));
  (void)snprintf(monitor->url, sizeof monitor->url, "http://%s:%d/?token=%s", address,
                 even_server_port(monitor->server), monitor->token);
  return EVEN_OK;
}

/* runs/NAME/agent.json tells `evenstep top` and scripts where the living run is found. It holds the token: mode 0600.
 */
static even_status write_agent_file(even_monitor *monitor) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text content = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&content, 2);
  even_json_object(&json, NULL);
  even_json_integer(&json, "pid", getpid());
  even_json_string(&json, "url", monitor->server == NULL ? NULL : monitor->url);
  if (monitor->server == NULL) {
    even_json_null(&json, "port");
    even_json_null(&json, "token");
  } else {
    even_json_integer(&json, "port", even_server_port(monitor->server));
    even_json_string(&json, "token", monitor->token);
  }
  even_json_number(&json, "started", (double)monitor->state->started_wall_ns / 1e9);
  even_json_object_end(&json);
  even_text_add(&content, "\n");
  even_status status = even_text_status(&content);
  if (status == EVEN_OK) {
    status = path_in(monitor, "agent.json", &path);
  }
  if (status == EVEN_OK) {
    status = even_file_replace_private(even_text_string(&path), even_text_string(&content), content.length);
  }
  even_text_free(&path);
  even_text_free(&content);
  return status;
}

static even_status open_parts(even_monitor *monitor, const even_monitor_params *params) {
  size_t ranks = (size_t)params->ranks;
  EVEN_TRY(even_duplicate(params->run_folder, &monitor->folder));
  EVEN_TRY(EVEN_NEW_ARRAY(&monitor->records, RECORDS_AT_ONCE));
  EVEN_TRY(even_state_open(params->ranks, params->run_name, params->command, params->policy, &monitor->state));
  EVEN_TRY(even_alloc(ranks, sizeof *monitor->pending, (void **)&monitor->pending));
  EVEN_TRY(even_telemetry_reader_open(params->telemetry_fd, &monitor->reader));
  monitor->state->started_ns = even_clock_ns();
  monitor->state->started_wall_ns = even_clock_wall_ns();
  monitor->state->last_end_ns = monitor->state->started_ns;
  for (int rank = 0; rank < params->ranks && params->rank_facts != NULL; rank++) {
    const even_monitor_rank *facts = &params->rank_facts[rank];
    even_state_rank_facts(monitor->state, rank, facts->device, facts->model, facts->cores, facts->quota);
  }
  EVEN_TRY(even_folder_make(params->run_folder));
  EVEN_TRY(even_random_hex(monitor->token, EVEN_SERVER_TOKEN_DIGITS));
  EVEN_TRY(open_server(monitor, params)); /* before the database: a port in use must not touch the history there */
  EVEN_TRY(open_history(monitor));
  even_status status = write_agent_file(monitor);
  if (status == EVEN_ERR_NO_SPACE) { /* the run goes on; the first tick says it */
    if (monitor->trouble.status == EVEN_OK) {
      monitor->trouble = *even_error_last();
    }
    return EVEN_OK;
  }
  return status;
}

static void release(even_monitor *monitor) {
  even_server_close(monitor->server);
  even_database_close(monitor->database);
  even_telemetry_reader_close(monitor->reader);
  even_state_close(monitor->state);
  even_free(monitor->pending);
  even_free(monitor->records);
  even_free(monitor->folder);
  (void)pthread_mutex_destroy(&monitor->lock);
  even_free(monitor);
}

even_status even_monitor_open(const even_monitor_params *params, even_monitor **out) {
  even_monitor *monitor = NULL;
  *out = NULL;
  if (params->size != sizeof *params || params->ranks < 1 || params->run_folder == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "the monitor of a run of %d ranks", params->ranks);
  }
  EVEN_TRY(EVEN_NEW(&monitor));
  (void)pthread_mutex_init(&monitor->lock, NULL);
  even_status status = open_parts(monitor, params);
  if (status != EVEN_OK) {
    even_error kept = *even_error_last();
    release(monitor);
    (void)even_fail(status, "%s", kept.what);
    return even_error_fix("%s", kept.fix);
  }
  *out = monitor;
  return EVEN_OK;
}

/* ---- closing ---- */

static even_status end_history(even_monitor *monitor, int exit_code) {
  if (monitor->database == NULL) {
    return EVEN_OK;
  }
  EVEN_TRY(meta_number(monitor->database, "ended_ns", (long long)monitor->state->ended_ns));
  EVEN_TRY(meta_number(monitor->database, "exit_code", exit_code));
  EVEN_TRY(meta_number(monitor->database, "lost_records", (long long)monitor->state->lost_records));
  return even_database_finish(monitor->database);
}

even_status even_monitor_close(even_monitor *monitor, int exit_code) {
  even_text path = EVEN_TEXT_EMPTY;
  if (monitor == NULL) {
    return EVEN_OK;
  }
  (void)pthread_mutex_lock(&monitor->lock);
  drain_ended(monitor);
  keep_all_spans(monitor);
  monitor->state->ended_ns = even_clock_ns();
  monitor->state->exit_code = exit_code;
  for (int rank = 0; rank < monitor->state->ranks; rank++) {
    monitor->state->rank[rank].pid = 0;
  }
  HISTORY(end_history(monitor, exit_code));
  bool kept = monitor->database != NULL;
  even_status status = report_trouble(monitor);
  (void)pthread_mutex_unlock(&monitor->lock);
  even_server_close(monitor->server);
  monitor->server = NULL;
  if (path_in(monitor, "agent.json", &path) == EVEN_OK && even_file_remove(even_text_string(&path)) != EVEN_OK) {
    even_error_clear(); /* whoever reads it looks whether the process lives */
  }
  if (status == EVEN_OK && kept) {
    status = even_report_write_page(monitor->folder);
  }
  even_database_close(monitor->database); /* the last to close folds the WAL into the database */
  monitor->database = NULL;
  even_text_free(&path);
  even_error last = *even_error_last();
  release(monitor);
  if (status != EVEN_OK) {
    (void)even_fail(status, "%s", last.what);
    (void)even_error_fix("%s", last.fix);
  }
  return status;
}
