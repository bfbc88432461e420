/* What restarts under `evenstep chaos` cost: which steps were made again, and that none of them was in a checkpoint
 * that was whole when the attempt began. */
#include "base/fail.h"
#include "cli/chaos.h"
#include "monitor/sqlite.h"

#include <stdio.h>

/* An attempt, by the steps that its history has. */
typedef struct attempt {
  int64_t first;
  int64_t last;
  uint64_t began_ns;
} attempt;

/* The last fault before then that ends attempts; where none has come, the last of all. */
static even_chaos_done *cause_of(const even_chaos_job *job, uint64_t began_ns) {
  even_chaos_done *found[2] = {NULL, NULL};
  for (size_t i = 0; i < job->faults; i++) {
    even_chaos_done *done = &job->done[i];
    bool ends = even_chaos_ends_attempt(job->plan[i].kind);
    if (done->injected && done->at_ns <= began_ns && (found[ends] == NULL || found[ends]->at_ns <= done->at_ns)) {
      found[ends] = done;
    }
  }
  return found[1] != NULL ? found[1] : found[0];
}

static void take_attempt(even_chaos_job *job, const attempt *made) {
  int64_t held = even_chaos_held_at(job, made->began_ns);
  int64_t again = job->last_step + 1 - made->first;
  even_chaos_done *done = job->last_step < 0 ? NULL : cause_of(job, made->began_ns);
  if (done != NULL && done->again_from < 0) {
    done->again_from = made->first;
    done->made_again = again > 0 ? again : 0; /* of a killed agent's last ones there may be no record */
    done->held = held;
  }
  if (done != NULL && done->outlasted && job->wrong[0] == '\0') {
    (void)snprintf(job->wrong, sizeof job->wrong,
                   "an attempt began again with step %lld, although the ranks outlasted their agent (%.100s)",
                   (long long)made->first, done->words);
  }
  if (made->first < held && job->wrong[0] == '\0') {
    (void)snprintf(job->wrong, sizeof job->wrong,
                   "an attempt began again with step %lld, although a whole checkpoint held %lld steps",
                   (long long)made->first, (long long)held);
  }
  job->last_step = made->last;
}

even_status even_chaos_judge_again(even_chaos_job *job) {
  static const char query[] =
      "SELECT attempt,min(step-coalesce(steps,1)+1),max(step),"
      "coalesce((SELECT min(at_ns) FROM events WHERE event='attempt' AND events.attempt=steps.attempt),0)"
      " FROM steps WHERE end_ns>? GROUP BY attempt ORDER BY attempt"; /* not what was made before it led */
  sqlite3_stmt *row = NULL;
  if (job->faults == 0 || job->history == NULL || even_history_read(job->history) != EVEN_OK) {
    even_error_clear();
    return EVEN_OK;
  }
  sqlite3 *connection = even_history_connection(job->history);
  int code = sqlite3_prepare_v2(connection, query, -1, &row, NULL);
  code = code == SQLITE_OK ? sqlite3_bind_int64(row, 1, (sqlite3_int64)job->started_ns) : code;
  while (code == SQLITE_OK && (code = sqlite3_step(row)) == SQLITE_ROW) {
    uint64_t told = (uint64_t)sqlite3_column_int64(row, 3); /* of an agent's first one there is no event */
    const attempt made = {.first = sqlite3_column_int64(row, 1),
                          .last = sqlite3_column_int64(row, 2),
                          .began_ns = told != 0 ? told : job->started_ns};
    take_attempt(job, &made);
    code = SQLITE_OK;
  }
  even_status status = code == SQLITE_DONE
                           ? EVEN_OK
                           : even_sqlite_fail(connection, code, even_history_path(job->history), "cannot be read");
  (void)sqlite3_finalize(row);
  return status;
}

void even_chaos_again_sum(const even_chaos_done *done, size_t count, even_text *out) {
  int64_t most = 0;
  int64_t all = 0;
  size_t attempts = 0;
  for (size_t i = 0; i < count; i++) {
    if (done[i].injected && done[i].again_from >= 0) {
      attempts++;
      all += done[i].made_again;
      most = done[i].made_again > most ? done[i].made_again : most;
    }
  }
  if (attempts > 0) {
    even_text_format(out, "began again after %zu fault%s: %lld step%s made again, %lld at most after one", attempts,
                     attempts == 1 ? "" : "s", (long long)all, all == 1 ? "" : "s", (long long)most);
  }
}
