/* Reads run.db back, of a living run as well as of one that ended, however it ended. */
#ifndef EVEN_MONITOR_HISTORY_H
#define EVEN_MONITOR_HISTORY_H

#include "monitor/state.h"

#include <sqlite3.h>

typedef struct even_history even_history;

/* Opens FOLDER/run.db and reads what is in it. Errors: EVEN_ERR_NOT_FOUND (no such run), EVEN_ERR_CORRUPT (no database
 * of a run, or a damaged one), EVEN_ERR_IN_USE. */
even_status even_history_open(const char *folder, even_history **out) EVEN_MUST_USE;
/* The same, given up with EVEN_ERR_INTERRUPTED once even_clock_ns is past that. */
even_status even_history_open_by(const char *folder, uint64_t deadline_ns, even_history **out) EVEN_MUST_USE;
/* Reads what came since. */
even_status even_history_read(even_history *history) EVEN_MUST_USE;
void even_history_close(even_history *history);

/* Owned by the history. A run whose agent died before it could say how it ended counts as living until
 * even_history_give_up. */
even_state *even_history_state(even_history *history);
/* The state, for whoever goes on with it: even_state_close is the caller's, and the history can only be closed. */
even_state *even_history_take_state(even_history *history);
/* Whether the database has that: older versions' have not all of today's. */
bool even_history_has(const even_history *history, const char *table, const char *column);
/* Whether steps has the column "steps": old rows may be of several steps. */
bool even_history_merges(const even_history *history);
/* Whether the run wrote its end. */
bool even_history_ended(const even_history *history);
/* Nobody writes any more: the run ended at its last record, with an exit code of -1 (unknown). */
void even_history_give_up(even_history *history);
sqlite3 *even_history_connection(even_history *history);
const char *even_history_path(const even_history *history);

/* When the run began (ns since 1970), without reading its rows; 0 where that cannot be read. */
uint64_t even_history_began(const char *folder);
/* Whether the job of this run folder lives: it has written agent.json and holds the folder's lock. */
bool even_history_alive(const char *folder);

#endif
