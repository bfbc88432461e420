/* Merging in SQL: rows of old steps out, rows of groups of steps in, under the lowest rowid of each group: rowids go on
 * telling the order. */
#include "monitor/thin.h"

#include "base/text.h"

#include <inttypes.h>
#include <stdbool.h>

enum { MOST_TURNS = 4, WIDEST = 1 << 30 };

/* `whole` is each attempt's extent; the first steps keep a group each. */
#define GROUPS                                                                                          \
  "WITH whole AS (SELECT attempt AS of, min(step) AS first, max(step) AS last FROM steps GROUP BY of)," \
  " old AS (SELECT t.rowid AS id, t.*, CASE WHEN step < first + %d THEN step"                           \
  " ELSE min(last, step / %" PRId64 " * %" PRId64 " + %" PRId64                                         \
  ") END AS ending FROM %s t CROSS JOIN whole ON of = attempt"                                          \
  " WHERE "

static const char merged_steps[] =
    "SELECT min(id) AS id, attempt, ending, max(epoch), rank, max(end_ns), sum(duration_ns),"
    " sum(min(busy_ns, duration_ns)), sum(samples), sum(batch),"
    " sum(loss * steps) / sum(CASE WHEN loss IS NOT NULL THEN steps END),"
    " sum(predicted_seconds * steps) / sum(CASE WHEN predicted_seconds IS NOT NULL THEN steps END), sum(steps)"
    " FROM old GROUP BY attempt, ending, rank";
static const char merged_spans[] =
    "SELECT min(id) AS id, attempt, ending, rank, span, min(start_ns), sum(duration_ns), sum(bytes)"
    " FROM old GROUP BY attempt, ending, rank, span";

/* The steps from `from` on and before `to`, each in its attempt. */
typedef struct place {
  int64_t attempt;
  int64_t step;
} place;

typedef struct part {
  place from;
  place to;
} part;

static void add_part(even_text *out, const part *of) {
  even_text_format(out,
                   "(attempt > %" PRId64 " OR (attempt = %" PRId64 " AND step >= %" PRId64 ")) AND (attempt < %" PRId64
                   " OR (attempt = %" PRId64 " AND step < %" PRId64 "))",
                   of->from.attempt, of->from.attempt, of->from.step, of->to.attempt, of->to.attempt, of->to.step);
}

static int number(sqlite3 *connection, const char *query, int64_t *first, int64_t *second) {
  sqlite3_stmt *row = NULL;
  int code = sqlite3_prepare_v2(connection, query, -1, &row, NULL);
  if (code == SQLITE_OK) {
    code = sqlite3_step(row);
  }
  if (code == SQLITE_ROW) {
    *first = sqlite3_column_int64(row, 0);
    if (second != NULL) {
      *second = sqlite3_column_int64(row, 1);
    }
    code = SQLITE_OK;
  }
  (void)sqlite3_finalize(row);
  return code;
}

static int run(sqlite3 *connection, even_text *script) {
  int code = SQLITE_NOMEM;
  if (even_text_status(script) == EVEN_OK) {
    code = sqlite3_exec(connection, even_text_string(script), NULL, NULL, NULL);
  }
  even_text_free(script);
  return code;
}

static int merge(sqlite3 *connection, const char *table, const char *columns, const char *select, int64_t width,
                 const part *old) {
  even_text script = EVEN_TEXT_EMPTY;
  even_text_add(&script, "CREATE TEMP TABLE merging AS ");
  even_text_format(&script, GROUPS, EVEN_THIN_HEAD_STEPS, width, width, width - 1, table);
  add_part(&script, old);
  even_text_format(&script, ") %s; DELETE FROM %s WHERE ", select, table);
  add_part(&script, old);
  even_text_format(&script, "; INSERT INTO %s(rowid, %s) SELECT * FROM merging; DROP TABLE merging;", table, columns);
  return run(connection, &script);
}

/* Everything before the middle row, down to a whole group: the ranks' records of a step lie close to one another, and
 * far from the newest. */
static int find_middle(sqlite3 *connection, const even_thinning *thinning, place *out) {
  even_text query = EVEN_TEXT_EMPTY;
  int code = SQLITE_NOMEM;
  even_text_format(&query, "SELECT attempt, step FROM steps ORDER BY rowid LIMIT 1 OFFSET %" PRId64,
                   thinning->rows / 2);
  if (even_text_status(&query) == EVEN_OK) {
    code = number(connection, even_text_string(&query), &out->attempt, &out->step);
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
  add_part(&script, old);
  even_text_add(&script, "), (SELECT coalesce(max(CAST(value AS INTEGER)), 0) FROM meta WHERE key = 'merged_rows'));");
  return run(connection, &script);
}

/* What has that width already stays as it is. */
static int merge_older_half(sqlite3 *connection, even_thinning *thinning) {
  part old = {.from = {.attempt = thinning->attempt, .step = thinning->step}};
  int code = find_middle(connection, thinning, &old.to);
  code = code == SQLITE_OK ? note_merged(connection, &old) : code;
  if (code == SQLITE_OK) { /* the spans first: the extents of attempts are those of the steps */
    code = merge(connection, "spans", "attempt, step, rank, span, start_ns, duration_ns, bytes", merged_spans,
                 thinning->width, &old);
  }
  if (code == SQLITE_OK) {
    code = merge(connection, "steps",
                 "attempt, step, epoch, rank, end_ns, duration_ns, busy_ns, samples, batch, loss, predicted_seconds, "
                 "steps",
                 merged_steps, thinning->width, &old);
  }
  thinning->attempt = old.to.attempt;
  thinning->step = old.to.step;
  return code == SQLITE_OK ? number(connection, "SELECT count(*) FROM steps", &thinning->rows, NULL) : code;
}

/* Whether groups of twice the width would free an eighth: where the first steps of many attempts take the room, they
 * would not, and only lose what is there. */
static bool worth_doubling(sqlite3 *connection, const even_thinning *thinning, int *code) {
  int64_t merged = 0;
  if (*code == SQLITE_OK && thinning->rows > thinning->most_rows - thinning->most_rows / 8 &&
      thinning->width < WIDEST) {
    *code = number(connection, "SELECT count(*) FROM steps WHERE steps > 1", &merged, NULL);
  }
  return *code == SQLITE_OK && merged >= thinning->most_rows / 4;
}

int even_thin(sqlite3 *connection, even_thinning *thinning) {
  if (thinning->rows <= thinning->most_rows || thinning->rows <= thinning->next) {
    return SQLITE_OK;
  }
  thinning->width = thinning->width == 0 ? 2 : thinning->width;
  int code = merge_older_half(connection, thinning);
  for (int turn = 1; turn < MOST_TURNS && worth_doubling(connection, thinning, &code); turn++) {
    thinning->width *= 2;
    thinning->attempt = thinning->step = 0;
    code = merge_older_half(connection, thinning);
  }
  thinning->next = thinning->rows + thinning->most_rows / 8;
  return code;
}
