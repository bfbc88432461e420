/* SQLite's codes as statuses. */
#include "monitor/sqlite.h"

#include "base/fail.h"

even_status even_sqlite_fail(sqlite3 *connection, int code, const char *path, const char *what) {
  even_status status = EVEN_ERR_SYSTEM;
  const char *fix = NULL;
  switch (code & 0xff) {
    case SQLITE_FULL:
      status = EVEN_ERR_NO_SPACE;
      fix = "free some space on its disk";
      break;
    case SQLITE_NOMEM:
      status = EVEN_ERR_MEMORY;
      break;
    case SQLITE_PERM:
    case SQLITE_READONLY:
    case SQLITE_AUTH:
      status = EVEN_ERR_PERMISSION;
      fix = "make the run's folder writable, or choose another with --runs-dir";
      break;
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
      status = EVEN_ERR_IN_USE;
      fix = "end the program that keeps it locked (`fuser` names it)";
      break;
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      status = EVEN_ERR_CORRUPT;
      fix = "restore it from a copy; `sqlite3 run.db .recover` saves what can be read";
      break;
    case SQLITE_INTERRUPT:
      status = EVEN_ERR_INTERRUPTED;
      fix = "`evenstep report` makes the report of a run at any time";
      break;
    case SQLITE_CANTOPEN:
      status = EVEN_ERR_NOT_FOUND;
      break;
    default:
      break;
  }
  (void)even_fail(status, "%s %s: %s", path, what,
                  connection != NULL ? sqlite3_errmsg(connection) : sqlite3_errstr(code));
  if (fix != NULL) {
    (void)even_error_fix("%s", fix);
  }
  return status;
}
