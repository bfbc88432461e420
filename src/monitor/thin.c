/* Merging in SQL: rows of old steps out, rows of groups of steps in, under the lowest rowid of each group: rowids go on
 * telling the order. */
#include "monitor/thin.h"

#include "base/text.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>

enum { MOST_TURNS = 4, WIDEST = 1 << 30 };

/* `whole` is each attempt's extent. The first steps keep a group each, and so do the spans of an attempt that made no
 * step; what was done again after es.load_checkpoint, a later pass, has groups of its own. */
#define GROUPS                                                                                          \
  "WITH whole AS (SELECT attempt AS of, min(step) AS first, max(step) AS last FROM steps GROUP BY of)," \
  " passes AS (SELECT *, %s AS pass FROM (SELECT t.rowid AS id, t.*, %s AS back FROM %s t WHERE %s)),"  \
  " old AS (SELECT p.*, CASE WHEN pass = 0 AND step < first + %d THEN step"                             \
  " ELSE coalesce(min(last, step / %" PRId64 " * %" PRId64 " + %" PRId64                                \
  "), step) END AS ending"                                                                              \
  " FROM passes p LEFT JOIN whole ON of = attempt) "

static const char went_back[] = "t.step <= lag(t.step, 1, -1) OVER (PARTITION BY t.attempt, t.rank ORDER BY t.rowid)";
static const char times_back[] = "sum(back) OVER (PARTITION BY attempt, rank ORDER BY id)";

static const char merged_steps[] =
    "SELECT min(id) AS id, attempt, ending, max(epoch), rank, max(end_ns), sum(duration_ns),"
    " sum(min(busy_ns, duration_ns)), sum(samples), sum(batch),"
    " sum(loss * steps) / sum(CASE WHEN loss IS NOT NULL THEN steps END),"
    " sum(predicted_seconds * steps) / sum(CASE WHEN predicted_seconds IS NOT NULL THEN steps END), sum(steps)"
    " FROM old GROUP BY attempt, pass, ending, rank";
static const char merged_spans[] =
    "SELECT min(id) AS id, attempt, ending, rank, span, min(start_ns), sum(duration_ns), sum(bytes)"
    " FROM old GROUP BY attempt, ending, rank, span";

/* The steps from `from` on and before `to`. */
typedef struct part {
  even_thin_place from;
  even_thin_place to;
} part;

typedef struct source {
  const char *table;
  const char *when; /* the column that says which pass of an attempt a row belongs to */
  const char *columns;
  const char *back; /* whether a row begins a pass */
  const char *pass;
  const char *select;
} source;

static const source steps_source = {.table = "steps",
                                    .when = "end_ns",
                                    .columns =
                                        "attempt, step, epoch, rank, end_ns, duration_ns, busy_ns, samples, "
                                        "batch, loss, predicted_seconds, steps",
                                    .back = went_back,
                                    .pass = times_back,
                                    .select = merged_steps};
static const source spans_source = {.table = "spans",
                                    .when = "start_ns",
                                    .columns = "attempt, step, rank, span, start_ns, duration_ns, bytes",
                                    .back = "0",
                                    .pass = "0",
                                    .select = merged_spans};

static void add_before(even_text *out, const char *when, const even_thin_place *place) {
  even_text_format(out,
                   "(attempt < %" PRId64 " OR (attempt = %" PRId64 " AND (%s <= %" PRId64 " OR (%s <= %" PRId64
                   " AND step < %" PRId64 "))))",
                   place->attempt, place->attempt, when, place->began_ns, when, place->ended_ns, place->step);
}

static void add_part(even_text *out, const char *when, const part *of) {
  add_before(out, when, &of->to);
  even_text_add(out, " AND NOT ");
  add_before(out, when, &of->from);
}

static int numbers(sqlite3 *connection, const char *query, int64_t *const *out, int count) {
  sqlite3_stmt *row = NULL;
  int code = sqlite3_prepare_v2(connection, query, -1, &row, NULL);
  if (code == SQLITE_OK) {
    code = sqlite3_step(row);
  }
  if (code == SQLITE_ROW) {
    for (int i = 0; i < count; i++) {
      *out[i] = sqlite3_column_int64(row, i);
    }
    code = SQLITE_OK;
  }
  (void)sqlite3_finalize(row);
  return code;
}

static int number(sqlite3 *connection, const char *query, int64_t *out) {
  return numbers(connection, query, &out, 1);
}

static int run(sqlite3 *connection, even_text *script) {
  int code = SQLITE_NOMEM;
  if (even_text_status(script) == EVEN_OK) {
    code = sqlite3_exec(connection, even_text_string(script), NULL, NULL, NULL);
  }
  even_text_free(script);
  return code;
}

static int merge(sqlite3 *connection, const source *from, int64_t width, const part *old) {
  even_text where = EVEN_TEXT_EMPTY;
  even_text script = EVEN_TEXT_EMPTY;
  add_part(&where, from->when, old);
  even_text_add(&script, "CREATE TEMP TABLE merging AS ");
  even_text_format(&script, GROUPS, from->pass, from->back, from->table, even_text_string(&where), EVEN_THIN_HEAD_STEPS,
                   width, width, width - 1);
  even_text_format(&script, "%s; DELETE FROM %s WHERE %s;", from->select, from->table, even_text_string(&where));
  even_text_format(&script, "INSERT INTO %s(rowid, %s) SELECT * FROM merging; DROP TABLE merging;", from->table,
                   from->columns);
  int code = even_text_status(&where) == EVEN_OK ? run(connection, &script) : SQLITE_NOMEM;
  even_text_free(&script);
  even_text_free(&where);
  return code;
}

/* Of the middle row: its attempt and step, and between which times its pass lies. A pass ends where the rank's next row
 * is of no later step: es.load_checkpoint went back. The newest pass ends with the newest row. */
static const char middle_query[] =
    "WITH middle AS (SELECT rowid AS id, attempt, rank, step FROM steps ORDER BY rowid LIMIT 1 OFFSET %" PRId64
    "),"
    " rows AS (SELECT t.rowid AS id, t.end_ns, lead(t.step) OVER ranked <= t.step AS back,"
    "  (t.end_ns + lead(t.end_ns) OVER ranked) / 2 AS turn_ns"
    "  FROM steps t JOIN middle m ON m.attempt = t.attempt AND m.rank = t.rank WINDOW ranked AS (ORDER BY t.rowid))"
    "SELECT attempt, step, (SELECT coalesce(max(turn_ns), 0) FROM rows WHERE back AND rows.id < middle.id),"
    " (SELECT coalesce(min(CASE WHEN back AND rows.id >= middle.id THEN turn_ns END), max(end_ns)) FROM rows)"
    " FROM middle";

/* Everything before the middle row, down to a whole group: the ranks' records of a step lie close to one another, and
 * far from the newest. */
static int find_middle(sqlite3 *connection, const even_thinning *thinning, even_thin_place *out) {
  int64_t *const columns[] = {&out->attempt, &out->step, &out->began_ns, &out->ended_ns};
  even_text query = EVEN_TEXT_EMPTY;
  int code = SQLITE_NOMEM;
  even_text_format(&query, middle_query, thinning->rows / 2);
  if (even_text_status(&query) == EVEN_OK) {
    code = numbers(connection, even_text_string(&query), columns, 4);
  }
  even_text_free(&query);
  out->step -= out->step % thinning->width;
  return code == SQLITE_DONE ? SQLITE_OK : code;
}

static int note_merged(sqlite3 *connection, const part *old) {
  even_text script = EVEN_TEXT_EMPTY;
  even_text_add(
      &script,
      "INSERT OR REPLACE INTO meta SELECT 'merged_rows', max((SELECT coalesce(max(rowid), 0) FROM steps WHERE ");
  add_part(&script, steps_source.when, old);
  even_text_add(&script, "), (SELECT coalesce(max(CAST(value AS INTEGER)), 0) FROM meta WHERE key = 'merged_rows'));");
  return run(connection, &script);
}

/* What has that width already stays as it is. */
static int merge_older_half(sqlite3 *connection, even_thinning *thinning) {
  part old = {.from = thinning->merged};
  int code = find_middle(connection, thinning, &old.to);
  code = code == SQLITE_OK ? note_merged(connection, &old) : code;
  if (code == SQLITE_OK) { /* the spans first: the extents of attempts are those of the steps */
    code = merge(connection, &spans_source, thinning->width, &old);
  }
  if (code == SQLITE_OK) {
    code = merge(connection, &steps_source, thinning->width, &old);
  }
  thinning->merged = old.to;
  return code == SQLITE_OK ? number(connection, "SELECT count(*) FROM steps", &thinning->rows) : code;
}

/* Whether groups of twice the width would free an eighth: where the first steps of many attempts take the room, they
 * would not, and only lose what is there. */
static bool worth_doubling(sqlite3 *connection, const even_thinning *thinning, int *code) {
  int64_t merged = 0;
  if (*code == SQLITE_OK && thinning->rows > thinning->most_rows - thinning->most_rows / 8 &&
      thinning->width < WIDEST) {
    *code = number(connection, "SELECT count(*) FROM steps WHERE steps > 1", &merged);
  }
  return *code == SQLITE_OK && merged >= thinning->most_rows / 4;
}

/* For a later writer. */
static int keep(sqlite3 *connection, const even_thinning *thinning) {
  even_text script = EVEN_TEXT_EMPTY;
  const even_thin_place *at = &thinning->merged;
  even_text_format(&script,
                   "INSERT OR REPLACE INTO meta VALUES('thinning', '%" PRId64 " %" PRId64 " %" PRId64 " %" PRId64
                   " %" PRId64 " %" PRId64 "')",
                   thinning->width, thinning->next, at->attempt, at->step, at->began_ns, at->ended_ns);
  return run(connection, &script);
}

int even_thin_go_on(sqlite3 *connection, even_thinning *thinning) {
  sqlite3_stmt *row = NULL;
  even_thin_place *at = &thinning->merged;
  if (thinning->most_rows == INT64_MAX) {
    return SQLITE_OK;
  }
  int code = sqlite3_prepare_v2(connection, "SELECT value FROM meta WHERE key = 'thinning'", -1, &row, NULL);
  code = code == SQLITE_OK ? sqlite3_step(row) : code;
  const char *kept = code == SQLITE_ROW ? (const char *)sqlite3_column_text(row, 0) : NULL;
  even_thinning found = {.width = 0};
  if (kept != NULL &&
      sscanf(kept, "%" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64, &found.width, &found.next,
             &found.merged.attempt, &found.merged.step, &found.merged.began_ns, &found.merged.ended_ns) == 6 &&
      found.width >= 2 && found.width <= WIDEST && (found.width & (found.width - 1)) == 0) {
    *at = found.merged;
    thinning->width = found.width;
    thinning->next = found.next;
  }
  (void)sqlite3_finalize(row);
  return code == SQLITE_ROW || code == SQLITE_DONE ? number(connection, "SELECT count(*) FROM steps", &thinning->rows)
                                                   : code;
}

int even_thin(sqlite3 *connection, even_thinning *thinning) {
  if (thinning->rows <= thinning->most_rows || thinning->rows <= thinning->next) {
    return SQLITE_OK;
  }
  thinning->width = thinning->width == 0 ? 2 : thinning->width;
  int code = merge_older_half(connection, thinning);
  for (int turn = 1; turn < MOST_TURNS && worth_doubling(connection, thinning, &code); turn++) {
    thinning->width *= 2;
    thinning->merged = (even_thin_place){0};
    code = merge_older_half(connection, thinning);
  }
  thinning->next = thinning->rows + thinning->most_rows / 8;
  return code == SQLITE_OK ? keep(connection, thinning) : code;
}
