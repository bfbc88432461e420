/* What the parts of a database that is written share: its opening, and its rows. */
#ifndef EVEN_MONITOR_DATABASE_PARTS_H
#define EVEN_MONITOR_DATABASE_PARTS_H

#include "monitor/database.h"
#include "monitor/thin.h"

#include <sqlite3.h>

/* The agent's loop stands still meanwhile: short while the run lives. */
enum { EVEN_DATABASE_PATIENCE_MS = 250, EVEN_DATABASE_LAST_PATIENCE_MS = 3000 };

typedef enum even_insert {
  INSERT_META,
  INSERT_RANK,
  INSERT_STEP,
  INSERT_SPAN,
  INSERT_EVENT,
  INSERT_USAGE,
  INSERT_GPU,
  INSERT_STRAGGLER,
  INSERT_CALL,
  INSERT_RING,
  INSERT_OPEN_SPAN,
  INSERT_COUNT
} even_insert;

extern const char *const even_database_tables[INSERT_COUNT];

struct even_database {
  sqlite3 *connection;
  sqlite3_stmt *statements[INSERT_COUNT];
  sqlite3_stmt *waiting[INSERT_COUNT]; /* into temporary tables, while somebody else has the database locked */
  long waiting_rows;
  char *path;
  bool in_batch;
  bool full; /* its disk: rows wait until it has room */
  even_thinning thinning;
  int64_t calls;   /* kept of each rank's */
  int64_t *called; /* ever, by rank */
  int ranks;       /* in it */
};

even_status even_database_fail(even_database *database, int code) EVEN_MUST_USE;

#endif
