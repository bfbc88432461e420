/* SQLite with Evenstep's errors. */
#ifndef EVEN_MONITOR_SQLITE_H
#define EVEN_MONITOR_SQLITE_H

#include <evenstep/status.h>
#include <sqlite3.h>
#include <stddef.h>

/* Records the connection's last error: "run.db cannot be written: disk is full". `what` is the sentence's beginning. */
even_status even_sqlite_fail(sqlite3 *connection, int code, const char *path, const char *what);

#endif
