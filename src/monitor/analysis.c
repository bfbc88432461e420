/* One pass over the steps in order; medians where one odd step must not count. */
#include "monitor/analysis.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "monitor/sqlite.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct counted_value {
  double value;
  long count; /* steps that have it */
} counted_value;

typedef struct series {
  counted_value *values;
  size_t count;
  size_t capacity;
} series;

typedef struct work {
  even_analysis *out;
  series durations;
  series throughputs;
  series bests;
  series *speeds; /* one a rank */
  double *busy;
  double *samples;
  double *duration;
  double *counted;
  double batch_sum;
  /* the step being gathered */
  int attempt;
  long step;
  int seen;
  double step_seconds;
  double step_batch;
  double step_best;
  long step_count; /* more than one where old steps were merged: the numbers are their means */
  bool step_steady;
} work;

static even_status add(series *to, double value, long count) {
  if (to->count == to->capacity) {
    size_t capacity = to->capacity == 0 ? 256 : to->capacity * 2;
    EVEN_TRY(even_realloc((void **)&to->values, capacity, sizeof *to->values));
    to->capacity = capacity;
  }
  to->values[to->count++] = (counted_value){.value = value, .count = count};
  return EVEN_OK;
}

static int ascending(const void *a, const void *b) {
  double left = ((const counted_value *)a)->value;
  double right = ((const counted_value *)b)->value;
  return left < right ? -1 : left > right;
}

/* The value of step number `number` of a sorted series. */
static double value_at(const series *of, long number) {
  size_t i = 0;
  for (long before = 0; before + of->values[i].count <= number; i++) {
    before += of->values[i].count;
  }
  return of->values[i].value;
}

static double median(series *of) {
  long steps = 0;
  if (of->count == 0) {
    return NAN;
  }
  qsort(of->values, of->count, sizeof *of->values, ascending);
  for (size_t i = 0; i < of->count; i++) {
    steps += of->values[i].count;
  }
  return (value_at(of, (steps - 1) / 2) + value_at(of, steps / 2)) / 2;
}

static even_status end_step(work *at) {
  if (at->seen == 0) {
    return EVEN_OK;
  }
  long count = at->step_count;
  at->out->steps += count;
  if (at->step_steady && at->step_seconds > 0) {
    at->out->steady_steps += count;
    at->batch_sum += at->step_batch * (double)count;
    EVEN_TRY(add(&at->durations, at->step_seconds, count));
    EVEN_TRY(add(&at->throughputs, at->step_batch / at->step_seconds, count));
    if (at->seen == at->out->ranks) { /* a step that some rank's record is lost of says nothing of the sum */
      EVEN_TRY(add(&at->bests, at->step_best, count));
    }
  }
  at->seen = 0;
  return EVEN_OK;
}

/* columns: attempt, step, rank, duration_ns, busy_ns, samples, batch, loss, steady, the row's steps, those of them that
 * no later attempt did again */
static even_status take(work *at, sqlite3_stmt *row) {
  int attempt = sqlite3_column_int(row, 0);
  long step = (long)sqlite3_column_int64(row, 1);
  int rank = sqlite3_column_int(row, 2);
  double steps = (double)sqlite3_column_int64(row, 9);
  long kept = (long)sqlite3_column_int64(row, 10);
  double duration = (double)sqlite3_column_int64(row, 3) / 1e9 / steps;
  double busy = (double)sqlite3_column_int64(row, 4) / 1e9 / steps;
  double samples = (double)sqlite3_column_int64(row, 5) / steps;
  if (rank < 0 || rank >= at->out->ranks || kept < 1) {
    return EVEN_OK;
  }
  if (attempt != at->attempt || step != at->step) {
    EVEN_TRY(end_step(at));
    at->attempt = attempt;
    at->step = step;
    at->step_seconds = at->step_best = 0;
  }
  at->seen++;
  at->step_steady = sqlite3_column_int(row, 8) != 0;
  at->step_batch = (double)sqlite3_column_int64(row, 6) / steps;
  at->step_seconds = at->seen == 1 ? duration : at->step_seconds;
  at->step_count = at->seen == 1 || kept > at->step_count ? kept : at->step_count; /* a record of one may be lost */
  if (sqlite3_column_type(row, 7) != SQLITE_NULL) {
    at->out->last_loss = sqlite3_column_double(row, 7);
    at->out->first_loss = isnan(at->out->first_loss) ? at->out->last_loss : at->out->first_loss;
  }
  if (at->step_steady) {
    double count = (double)kept;
    at->busy[rank] += fmin(busy, duration) * count;
    at->duration[rank] += duration * count;
    at->samples[rank] += samples * count;
    at->counted[rank] += count;
    if (busy > 0) {
      at->step_best += samples / busy;
      EVEN_TRY(add(&at->speeds[rank], samples / busy, kept));
    }
  }
  return EVEN_OK;
}

/* A step that a later attempt did again is left out; so are the first steps of each attempt: a fifth, at most ten. They
 * pay for what is done once (compiling, filling caches, the balancer's first looks). */
#define QUERY(steps)                                                                                      \
  "WITH spans_of AS (SELECT attempt, min(step) AS first, max(step) AS last FROM steps GROUP BY attempt)," \
  " kept AS (SELECT a.attempt, a.first, a.last,"                                                          \
  "  (SELECT min(b.first) FROM spans_of b WHERE b.attempt > a.attempt) AS undone FROM spans_of a) "       \
  "SELECT s.attempt, s.step, s.rank, s.duration_ns, s.busy_ns, s.samples, s.batch, s.loss,"               \
  " s.step >= k.first + min(10, (k.last - k.first + 1) / 5), " steps                                      \
  ","                                                                                                     \
  " CASE WHEN k.undone IS NULL OR s.step < k.undone THEN " steps " ELSE k.undone - 1 - s.step + " steps   \
  " END "                                                                                                 \
  "FROM steps s JOIN kept k ON k.attempt = s.attempt WHERE k.undone IS NULL OR s.step - " steps           \
  " + 1 < k.undone "                                                                                      \
  "ORDER BY s.attempt, s.step, s.rank"

static even_status run(even_history *history, work *at) {
  sqlite3 *connection = even_history_connection(history);
  sqlite3_stmt *row = NULL;
  even_status status = EVEN_OK;
  const char *query = even_history_merges(history) ? QUERY("s.steps") : QUERY("1");
  int code = sqlite3_prepare_v2(connection, query, -1, &row, NULL);
  if (code == SQLITE_OK) {
    while (status == EVEN_OK && (code = sqlite3_step(row)) == SQLITE_ROW) {
      status = take(at, row);
    }
  }
  (void)sqlite3_finalize(row);
  EVEN_TRY(status);
  if (code != SQLITE_DONE) {
    return even_sqlite_fail(connection, code, even_history_path(history), "cannot be read");
  }
  return end_step(at);
}

static even_status given_loss(even_history *history, const char *order, double *out) {
  sqlite3_stmt *row = NULL;
  even_text text = EVEN_TEXT_EMPTY;
  even_text_format(
      &text, "SELECT value FROM events WHERE event='scalar' AND words='loss' AND rank=0 ORDER BY rowid %s LIMIT 1",
      order);
  even_status status = even_text_status(&text);
  int code = SQLITE_NOMEM;
  if (status == EVEN_OK) {
    code = sqlite3_prepare_v2(even_history_connection(history), even_text_string(&text), -1, &row, NULL);
    code = code == SQLITE_OK ? sqlite3_step(row) : code;
    *out = code == SQLITE_ROW && sqlite3_column_type(row, 0) != SQLITE_NULL ? sqlite3_column_double(row, 0) : NAN;
  }
  if (status == EVEN_OK && code != SQLITE_ROW && code != SQLITE_DONE) {
    status = even_sqlite_fail(even_history_connection(history), code, even_history_path(history), "cannot be read");
  }
  (void)sqlite3_finalize(row);
  even_text_free(&text);
  return status;
}

/* The losses that the script gave count, where it gave some. */
static even_status losses(even_history *history, even_analysis *out) {
  if (!even_history_state(history)->loss_given) {
    return EVEN_OK;
  }
  EVEN_TRY(given_loss(history, "ASC", &out->first_loss));
  return given_loss(history, "DESC", &out->last_loss);
}

static void conclude(work *at) {
  even_analysis *out = at->out;
  double sum = 0;
  for (size_t i = 0; i < at->durations.count; i++) {
    sum += at->durations.values[i].value * (double)at->durations.values[i].count;
  }
  out->mean_step_seconds = out->steady_steps > 0 ? sum / (double)out->steady_steps : NAN;
  out->step_seconds = median(&at->durations);
  out->samples_per_second = median(&at->throughputs);
  out->best_samples_per_second = median(&at->bests);
  out->efficiency = out->samples_per_second / out->best_samples_per_second;
  out->batch = out->steady_steps > 0 ? at->batch_sum / (double)out->steady_steps : NAN;
  for (int r = 0; r < out->ranks; r++) {
    even_analysis_rank *rank = &out->rank[r];
    bool any = at->counted[r] > 0;
    rank->share_samples = any ? at->samples[r] / at->counted[r] : NAN;
    rank->busy_seconds = any ? at->busy[r] / at->counted[r] : NAN;
    rank->wait_fraction = at->duration[r] > 0 ? 1 - at->busy[r] / at->duration[r] : NAN;
    rank->samples_per_busy_second = median(&at->speeds[r]);
  }
}

static even_status allocate(work *at, even_analysis *out) {
  size_t ranks = (size_t)out->ranks;
  EVEN_TRY(EVEN_NEW_ARRAY(&out->rank, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&at->speeds, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&at->busy, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&at->samples, ranks));
  EVEN_TRY(EVEN_NEW_ARRAY(&at->duration, ranks));
  return EVEN_NEW_ARRAY(&at->counted, ranks);
}

even_status even_analysis_make(even_history *history, even_analysis *out) {
  work at = {.out = out, .attempt = -1, .step = -1};
  const even_state *state = even_history_state(history);
  *out = (even_analysis){.ranks = state->ranks, .first_loss = NAN, .last_loss = NAN};
  even_status status = allocate(&at, out);
  if (status == EVEN_OK) {
    status = run(history, &at);
  }
  if (status == EVEN_OK) {
    conclude(&at);
    status = losses(history, out);
  }
  for (int r = 0; at.speeds != NULL && r < out->ranks; r++) {
    even_free(at.speeds[r].values);
  }
  even_free(at.speeds);
  even_free(at.busy);
  even_free(at.samples);
  even_free(at.duration);
  even_free(at.counted);
  even_free(at.durations.values);
  even_free(at.throughputs.values);
  even_free(at.bests.values);
  return status;
}

void even_analysis_free(even_analysis *analysis) {
  even_free(analysis->rank);
  analysis->rank = NULL;
}
