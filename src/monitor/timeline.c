/* Chrome's Trace Event Format (JSON object form): complete events "X", instants "i", names "M".
 * https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU */
#include "monitor/timeline.h"

#include "base/fail.h"
#include "base/json_writer.h"
#include "monitor/sqlite.h"

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
  begin_event(line, what, "M", rank, row);
  even_json_object(&line->json, "args");
  even_json_string(&line->json, "name", name);
  even_json_object_end(&line->json);
  even_json_object_end(&line->json);
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

even_status even_timeline_write(even_history *history, even_text *out) {
  timeline line = {.history = history, .json = even_json_begin(out, 0)};
  EVEN_TRY(each_row(&line,
                    "SELECT coalesce(min(at), 0) FROM (SELECT min(start_ns) AS at FROM spans UNION ALL "
                    "SELECT min(end_ns - duration_ns) FROM steps UNION ALL SELECT min(at_ns) FROM events)",
                    take_origin));
  even_json_object(&line.json, NULL);
  even_json_string(&line.json, "displayTimeUnit", "ms");
  even_json_array(&line.json, "traceEvents");
  EVEN_TRY(each_row(&line, "SELECT rank,device FROM ranks GROUP BY rank", take_rank));
  EVEN_TRY(each_row(&line, "SELECT step,rank,span,start_ns,duration_ns,bytes FROM spans", take_span));
  EVEN_TRY(each_row(&line, "SELECT step,rank,end_ns,duration_ns,samples FROM steps WHERE duration_ns>0", take_step));
  EVEN_TRY(each_row(&line, "SELECT rank,at_ns,event,words FROM events", take_event));
  even_json_array_end(&line.json);
  even_json_object_end(&line.json);
  return even_text_status(out);
}
