/* Chrome's Trace Event Format (JSON object form): complete events "X", instants "i", names "M".
 * https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU */
#include "monitor/timeline.h"

#include "base/fail.h"
#include "base/json_writer.h"
#include "monitor/sqlite.h"
#include "telemetry/trace.h"

#include <stdio.h>
#include <string.h>

/* The rows of a rank: its steps, a row for each kind of span, its events. */
enum { ROW_STEPS = 0, ROW_SPANS = 1, ROW_EVENTS = ROW_SPANS + EVEN_SPAN_COUNT };

static const char *const span_names[EVEN_SPAN_COUNT] = {
#define SPAN_NAME(name, number, words) words,
    EVEN_SPAN_LIST(SPAN_NAME)
#undef SPAN_NAME
};

typedef struct timeline {
  even_history *history;
  even_json json;
  int64_t origin_ns;
  bool whole; /* no call was left out since the run began */
} timeline;

static const char *words_of(sqlite3_stmt *row, int column) {
  const unsigned char *text = sqlite3_column_text(row, column);
  return text == NULL ? "" : (const char *)text;
}

/* Calls `take` for each row of a query. */
static even_status each_row(timeline *line, const char *query, void (*take)(timeline *line, sqlite3_stmt *row)) {
  sqlite3 *connection = even_history_connection(line->history);
  sqlite3_stmt *row = NULL;
  int code = sqlite3_prepare_v2(connection, query, -1, &row, NULL);
  while (code == SQLITE_OK && (code = sqlite3_step(row)) == SQLITE_ROW) {
    take(line, row);
    code = SQLITE_OK;
  }
  (void)sqlite3_finalize(row);
  return code == SQLITE_DONE ? EVEN_OK : even_sqlite_fail(connection, code, "run.db", "cannot be read");
}

static double microseconds(const timeline *line, int64_t ns) {
  return (double)(ns - line->origin_ns) / 1e3;
}

static int row_of_span(const char *name) {
  for (int span = 0; span < EVEN_SPAN_COUNT; span++) {
    if (strcmp(span_names[span], name) == 0) {
      return ROW_SPANS + span;
    }
  }
  return ROW_EVENTS;
}

static void begin_event(timeline *line, const char *name, const char *phase, int rank, int row) {
  even_json_object(&line->json, NULL);
  even_json_string(&line->json, "name", name);
  even_json_string(&line->json, "ph", phase);
  even_json_integer(&line->json, "pid", rank);
  even_json_integer(&line->json, "tid", row);
}

static void name_row(timeline *line, const char *what, int rank, int row, const char *name) {
  even_trace_name_write(&line->json, what, rank, row, name);
}

static void take_rank(timeline *line, sqlite3_stmt *row) {
  char name[96];
  int rank = sqlite3_column_int(row, 0);
  (void)snprintf(name, sizeof name, "rank %d on %s", rank, words_of(row, 1));
  name_row(line, "process_name", rank, 0, name);
  name_row(line, "thread_name", rank, ROW_STEPS, "steps");
  for (int span = 0; span < EVEN_SPAN_COUNT; span++) {
    name_row(line, "thread_name", rank, ROW_SPANS + span, span_names[span]);
  }
  name_row(line, "thread_name", rank, ROW_EVENTS, "events");
}

static void take_origin(timeline *line, sqlite3_stmt *row) {
  line->origin_ns = sqlite3_column_int64(row, 0);
}

static void take_span(timeline *line, sqlite3_stmt *row) {
  const char *name = words_of(row, 2);
  begin_event(line, name, "X", sqlite3_column_int(row, 1), row_of_span(name));
  even_json_number(&line->json, "ts", microseconds(line, sqlite3_column_int64(row, 3)));
  even_json_number(&line->json, "dur", (double)sqlite3_column_int64(row, 4) / 1e3);
  even_json_object(&line->json, "args");
  even_json_integer(&line->json, "step", sqlite3_column_int64(row, 0));
  if (sqlite3_column_int64(row, 5) > 0) {
    even_json_integer(&line->json, "bytes", sqlite3_column_int64(row, 5));
  }
  even_json_object_end(&line->json);
  even_json_object_end(&line->json);
}

static void take_step(timeline *line, sqlite3_stmt *row) {
  char name[48];
  int64_t duration_ns = sqlite3_column_int64(row, 3);
  (void)snprintf(name, sizeof name, "step %lld", (long long)sqlite3_column_int64(row, 0));
  begin_event(line, name, "X", sqlite3_column_int(row, 1), ROW_STEPS);
  even_json_number(&line->json, "ts", microseconds(line, sqlite3_column_int64(row, 2) - duration_ns));
  even_json_number(&line->json, "dur", (double)duration_ns / 1e3);
  even_json_object(&line->json, "args");
  even_json_integer(&line->json, "samples", sqlite3_column_int64(row, 4));
  even_json_object_end(&line->json);
  even_json_object_end(&line->json);
}

static void take_event(timeline *line, sqlite3_stmt *row) {
  int rank = sqlite3_column_int(row, 0);
  begin_event(line, words_of(row, 2), "i", rank < 0 ? 0 : rank, ROW_EVENTS);
  even_json_string(&line->json, "s", rank < 0 ? "g" : "p");
  even_json_number(&line->json, "ts", microseconds(line, sqlite3_column_int64(row, 1)));
  even_json_object(&line->json, "args");
  even_json_string(&line->json, "words", words_of(row, 3));
  even_json_object_end(&line->json);
  even_json_object_end(&line->json);
}

/* ---- calls ---- */

static void take_first_call(timeline *line, sqlite3_stmt *row) {
  int64_t first_ns = sqlite3_column_int64(row, 0);
  if (first_ns != 0 && (first_ns < line->origin_ns || line->origin_ns == 0)) {
    line->origin_ns = first_ns;
  }
}

static void take_call_row(timeline *line, sqlite3_stmt *row) {
  even_trace_row_name_write(&line->json, sqlite3_column_int(row, 0), sqlite3_column_int(row, 1));
}

static const char *words_or_null(sqlite3_stmt *row, int column) {
  return (const char *)sqlite3_column_text(row, column);
}

/* Of the columns that CALL_COLUMNS names. */
static even_trace_call call_of(sqlite3_stmt *row) {
  return (even_trace_call){
      .rank = sqlite3_column_int(row, 0),
      .record = {.step = (uint32_t)sqlite3_column_int64(row, 1),
                 .call = (uint8_t)even_call_number(words_of(row, 2)),
                 .peer = sqlite3_column_type(row, 5) == SQLITE_NULL ? -1 : (int16_t)sqlite3_column_int(row, 5),
                 .tag = (uint32_t)sqlite3_column_int64(row, 6),
                 .bytes = (uint64_t)sqlite3_column_int64(row, 7),
                 .start_ns = (uint64_t)sqlite3_column_int64(row, 8),
                 .duration_ns = (uint64_t)sqlite3_column_int64(row, 9),
                 .wait_ns = (uint64_t)sqlite3_column_int64(row, 10),
                 .ranks = (uint16_t)sqlite3_column_int(row, 11),
                 .row = (uint8_t)sqlite3_column_int(row, 12),
                 .failed = (uint8_t)sqlite3_column_int(row, 13),
                 .group = (uint32_t)sqlite3_column_int64(row, 14),
                 .number = (uint32_t)sqlite3_column_int64(row, 15)},
      .dtype = words_or_null(row, 3),
      .op = words_or_null(row, 4),
      .group = words_or_null(row, 16)};
}
#define CALL_COLUMNS                                                                                             \
  "SELECT rank,step,call,dtype,op,peer,tag,bytes,start_ns,duration_ns,wait_ns,ranks,row,failed,in_group,number," \
  "g.words"
#define GROUP_NAMES \
  " LEFT JOIN (SELECT value, words FROM events WHERE event='group' GROUP BY value) g ON g.value=in_group"

static void take_collective(timeline *line, sqlite3_stmt *row) {
  even_trace_call call = call_of(row);
  if (sqlite3_column_int(row, 18) == (int)call.record.ranks) { /* all of them are on this host, and kept */
    call.arrived_ns = (uint64_t)sqlite3_column_int64(row, 17);
    call.last = sqlite3_column_int(row, 19) == 1;
    call.drawn = call.record.ranks > 1;
    call.arrow = (uint64_t)sqlite3_column_int64(row, 20);
  }
  even_trace_call_write(&line->json, (uint64_t)line->origin_ns, &call);
}

/* (attempt, group, number) is one collective. */
static const char collectives[] = CALL_COLUMNS
    ", max(start_ns) OVER same, count(*) OVER same, row_number() OVER (same ORDER BY start_ns DESC, rank),"
    " min(place) OVER same FROM calls" GROUP_NAMES
    " WHERE tag IS NULL WINDOW same AS (PARTITION BY attempt, in_group, number) ORDER BY start_ns";

static void take_message(timeline *line, sqlite3_stmt *row) {
  even_trace_call call = call_of(row);
  call.drawn = sqlite3_column_int(row, 18) == 2 && line->whole;
  call.arrow = (uint64_t)sqlite3_column_int64(row, 17);
  even_trace_call_write(&line->json, (uint64_t)line->origin_ns, &call);
}

/* The n-th message with a tag from one rank to another is what the n-th such receive got: both have the lower of the
 * two rows' numbers. */
static const char messages[] = CALL_COLUMNS
    ", min(id) OVER pair, count(*) OVER pair FROM (SELECT *, row_number() OVER (PARTITION BY attempt, in_group, tag, "
    "call,"
    " sender, receiver ORDER BY number) AS nth FROM (SELECT *, place AS id, iif(call='send', member, peer) AS sender,"
    " iif(call='send', peer, member) AS receiver FROM calls WHERE tag IS NOT NULL))" GROUP_NAMES
    " WINDOW pair AS (PARTITION BY attempt, in_group, tag, sender, receiver, nth) ORDER BY start_ns";

static void take_whole(timeline *line, sqlite3_stmt *row) {
  line->whole = sqlite3_column_int(row, 0) != 0;
}

static even_status write_calls(timeline *line) {
  EVEN_TRY(each_row(line, "SELECT rank, row FROM calls GROUP BY rank, row", take_call_row));
  EVEN_TRY(each_row(line,
                    "SELECT coalesce(max(kept), 0) < (SELECT CAST(value AS INTEGER) FROM meta WHERE key='calls') FROM"
                    " (SELECT count(*) AS kept FROM calls GROUP BY rank)",
                    take_whole));
  EVEN_TRY(each_row(line, collectives, take_collective));
  return each_row(line, messages, take_message);
}

even_status even_timeline_write(even_history *history, even_text *out) {
  timeline line = {.history = history, .json = even_json_begin(out, 0)};
  EVEN_TRY(each_row(&line,
                    "SELECT coalesce(min(at), 0) FROM (SELECT min(start_ns) AS at FROM spans UNION ALL "
                    "SELECT min(end_ns - duration_ns) FROM steps UNION ALL SELECT min(at_ns) FROM events)",
                    take_origin));
  bool calls = even_history_has(history, "calls", "member"); /* not in an older version's run */
  if (calls) {
    EVEN_TRY(each_row(&line, "SELECT coalesce(min(start_ns), 0) FROM calls", take_first_call));
  }
  even_json_object(&line.json, NULL);
  even_json_string(&line.json, "displayTimeUnit", "ms");
  even_json_array(&line.json, "traceEvents");
  EVEN_TRY(each_row(&line, "SELECT rank,device FROM ranks GROUP BY rank", take_rank));
  EVEN_TRY(each_row(&line, "SELECT step,rank,span,start_ns,duration_ns,bytes FROM spans", take_span));
  EVEN_TRY(each_row(&line, "SELECT step,rank,end_ns,duration_ns,samples FROM steps WHERE duration_ns>0", take_step));
  EVEN_TRY(each_row(&line, "SELECT rank,at_ns,event,words FROM events WHERE event<>'group'", take_event));
  EVEN_TRY(calls ? write_calls(&line) : EVEN_OK);
  even_json_array_end(&line.json);
  even_json_object(&line.json, "otherData");
  even_json_unsigned(&line.json, "lost_records", even_history_state(history)->lost_records);
  even_json_object_end(&line.json);
  even_json_object_end(&line.json);
  return even_text_status(out);
}
