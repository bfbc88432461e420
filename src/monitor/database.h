/* runs/NAME/run.db: the history of one run, written in batches. SQLite in WAL mode, so that `evenstep top` and
 * `evenstep report` read it while the run writes. Its schema is in docs/monitoring.md. */
#ifndef EVEN_MONITOR_DATABASE_H
#define EVEN_MONITOR_DATABASE_H

#include "monitor/state.h"

#include <sqlite3.h>

#define EVEN_DATABASE_FORMAT "evenstep-run-1" /* meta "format" */

typedef struct even_database even_database;

typedef struct even_database_limits {
  int64_t step_rows; /* kept of steps, the older ones merged (monitor/thin.h); INT64_MAX: all */
  int64_t calls;     /* kept of each rank's, the newer ones in the older ones' place; 0: none are to come */
  int ranks;
} even_database_limits;

/* Makes the database; one that lies there already is kept beside it as run-previous.db. Errors: EVEN_ERR_NO_SPACE,
 * EVEN_ERR_PERMISSION, EVEN_ERR_IN_USE (locked), EVEN_ERR_SYSTEM. */
even_status even_database_create(const char *path, const even_database_limits *limits,
                                 even_database **out) EVEN_MUST_USE;
/* Goes on with the one that lies there, whose writer was killed: all that this had committed is in it. How it merges
 * and where calls go goes on, too; an end that was written is taken back. It is closed again, and as it was, after an
 * error: EVEN_ERR_NOT_FOUND, EVEN_ERR_CORRUPT (damaged, another version's, or no history), EVEN_ERR_IN_USE (locked for
 * seconds), and those above. */
even_status even_database_continue(const char *path, const even_database_limits *limits,
                                   even_database **out) EVEN_MUST_USE;
/* To read with, on the thread that writes. */
sqlite3 *even_database_connection(even_database *database);
void even_database_close(even_database *database);
/* The same without a word more in the file: another process may have it. */
void even_database_leave(even_database *database);
/* Rows of so many ranks may come from now on. */
even_status even_database_ranks(even_database *database, int ranks) EVEN_MUST_USE;

/* Each adds one row to the open batch; the first row opens one. */
even_status even_database_meta(even_database *database, const char *key, const char *value) EVEN_MUST_USE;
even_status even_database_rank(even_database *database, int rank, const even_state_rank *facts, int attempt,
                               bool ended) EVEN_MUST_USE;
even_status even_database_step(even_database *database, int attempt, int rank,
                               const even_step_record *record) EVEN_MUST_USE;
even_status even_database_span(even_database *database, int attempt, int rank,
                               const even_span_record *record) EVEN_MUST_USE;
even_status even_database_event(even_database *database, const even_state_event *event) EVEN_MUST_USE;
even_status even_database_call(even_database *database, int attempt, int rank,
                               const even_call_record *record) EVEN_MUST_USE;
/* `usage` NULL: the rank has no process. */
even_status even_database_usage(even_database *database, int rank, uint64_t at_ns, const even_rank_usage *usage,
                                const even_call_totals *calls) EVEN_MUST_USE;
even_status even_database_gpu(even_database *database, int rank, const even_gpu_sample *sample) EVEN_MUST_USE;
/* How far a rank's ring was read (even_telemetry_reader_place), with how many of its calls have come: by the rows of
 * the same batch. */
even_status even_database_ring(even_database *database, int rank, uint64_t place) EVEN_MUST_USE;
/* A span that is still being summed: it has no row in spans yet. NULL: there is none of that kind. */
even_status even_database_open_span(even_database *database, int rank, int span,
                                    const even_span_record *record) EVEN_MUST_USE;
/* A row each straggler: that of one that has caught up replaces the one of its beginning. */
even_status even_database_straggler(even_database *database, const even_state_straggler *told) EVEN_MUST_USE;
/* Makes the rows since the last commit visible to readers and safe from a crash of this process. While another program
 * has the database locked, rows are kept for a later commit: EVEN_OK (EVEN_ERR_IN_USE after a million of them). */
even_status even_database_commit(even_database *database) EVEN_MUST_USE;
/* Whether its disk is full: EVEN_ERR_NO_SPACE said so once, and rows wait in memory until a commit finds room. */
bool even_database_waits(const even_database *database);
/* The last commit: waits for a lock, up to seconds. EVEN_ERR_IN_USE: rows are lost. */
even_status even_database_finish(even_database *database) EVEN_MUST_USE;

#endif
