/* A monitor whose disk is full, whose history is locked, whose folder is another's, and whose calls and allocations
 * fail: the run goes on, what fails is said once, and nothing of the history is lost that could be kept. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/stop.h"
#include "monitor/history.h"
#include "monitor/monitored.h"
#include "monitor/parts.h"
#include "monitor/view.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/folder.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <sqlite3.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* SQLite over a disk that is full while disk_full is set. The main file and the WAL have different method tables. */
enum { METHOD_TABLES = 4 };
static struct {
  const sqlite3_io_methods *real;
  sqlite3_io_methods full;
} tables[METHOD_TABLES];
static int (*real_open)(sqlite3_vfs *, const char *, sqlite3_file *, int, int *);
static int (*real_write)(sqlite3_file *, const void *, int, sqlite3_int64);
static bool disk_full;

static int full_write(sqlite3_file *file, const void *data, int bytes, sqlite3_int64 offset) {
  return disk_full ? SQLITE_FULL : real_write(file, data, bytes, offset);
}

static int full_open(sqlite3_vfs *vfs, const char *name, sqlite3_file *file, int flags, int *out) {
  int code = real_open(vfs, name, file, flags, out);
  if (code != SQLITE_OK || file->pMethods == NULL) {
    return code;
  }
  int i = 0;
  while (tables[i].real != NULL && tables[i].real != file->pMethods) {
    i++;
    assert_true(i < METHOD_TABLES);
  }
  tables[i].real = file->pMethods;
  tables[i].full = *file->pMethods;
  real_write = file->pMethods->xWrite;
  tables[i].full.xWrite = full_write;
  file->pMethods = &tables[i].full;
  return SQLITE_OK;
}

/* A folder that cannot be written has no place for a WAL. */
static int no_side_file_open(sqlite3_vfs *vfs, const char *name, sqlite3_file *file, int flags, int *out_flags) {
  return (flags & SQLITE_OPEN_WAL) != 0 ? SQLITE_CANTOPEN : real_open(vfs, name, file, flags, out_flags);
}

/* The history has each step from `first` to `end` - 1 of rank 1. */
static void expect_steps(const char *path, uint32_t first, uint32_t end) {
  sqlite3 *connection = NULL;
  sqlite3_stmt *row = NULL;
  assert_int_equal(sqlite3_open(path, &connection), SQLITE_OK);
  assert_int_equal(sqlite3_prepare_v2(connection, "SELECT count(*), max(step) FROM steps WHERE rank = 1 AND step >= ?1",
                                      -1, &row, NULL),
                   SQLITE_OK);
  assert_int_equal(sqlite3_bind_int64(row, 1, first), SQLITE_OK);
  assert_int_equal(sqlite3_step(row), SQLITE_ROW);
  assert_int_equal(sqlite3_column_int64(row, 0), end - first);
  assert_int_equal(sqlite3_column_int64(row, 1), end - 1);
  assert_int_equal(sqlite3_finalize(row), SQLITE_OK);
  assert_int_equal(sqlite3_close(connection), SQLITE_OK);
}

static void report_has_event(const monitored *made, const char *words) {
  even_history *history = NULL;
  bool found = false;
  assert_int_equal(even_history_open(made->folder, &history), EVEN_OK);
  const even_state *state = even_history_state(history);
  for (uint64_t i = 0; i < state->event_count && i < EVEN_STATE_EVENTS; i++) {
    found = found || strcmp(state->events[i].words, words) == 0;
  }
  even_history_close(history);
  assert_true(found);
}

/* A monitor that has written its first steps, and then finds the disk full. */
static void start_and_fill_the_disk(monitored *made) {
  sqlite3_vfs *vfs = sqlite3_vfs_find(NULL);
  real_open = vfs->xOpen;
  vfs->xOpen = full_open;
  monitored_start(made);
  monitored_steps(made, 5, 8);
  monitored_committed(made);
  feed_event(&made->ranks, 0, EVEN_EVENT_MEMORY, 1, "of the second before");
  disk_full = true;
}

/* What comes meanwhile is in it afterwards, and so is that it waited. */
static void a_full_disk_is_told_once_and_waited_for(void **state) {
  monitored *made = *state;
  start_and_fill_the_disk(made);
  const uint32_t shares[2] = {8, 8};
  even_status status = EVEN_OK;
  uint64_t deadline = even_clock_ns() + UINT64_C(20000000000);
  while (status == EVEN_OK && even_clock_ns() < deadline) {
    feed_step(&made->ranks, shares);
    status = monitored_commit(made);
  }
  assert_int_equal(status, EVEN_ERR_NO_SPACE);
  assert_non_null(strstr(even_error_last()->what, "the history waits in memory, the run goes on"));
  assert_non_null(strstr(even_error_last()->what, "full"));
  assert_non_null(strstr(even_error_last()->fix, "free some space"));
  even_text view = EVEN_TEXT_EMPTY;
  monitored_steps(made, 5, 8); /* told once; the live view goes on */
  assert_int_equal(even_monitor_view(made->monitor, 80, false, &view), EVEN_OK);
  assert_non_null(strstr(even_text_string(&view), "samples/s"));
  even_text_free(&view);
  monitored_committed(made);
  uint32_t waited_from = made->ranks.step - 5;
  disk_full = false;
  monitored_committed(made);
  monitored_steps(made, 5, 8);
  uint32_t steps = made->ranks.step;
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  expect_steps(monitored_path(made, "run.db"), waited_from, steps);
  report_has_event(made, "of the second before");
}

/* Full at the end, too: the last rows are lost, and that is said. */
static void a_disk_that_stays_full_is_told_at_the_end(void **state) {
  monitored *made = *state;
  start_and_fill_the_disk(made);
  monitored_steps(made, 5, 8);
  assert_int_equal(monitored_commit(made), EVEN_ERR_NO_SPACE);
  monitored_steps(made, 5, 8);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_ERR_NO_SPACE);
  disk_full = false;
  expect_steps(monitored_path(made, "run.db"), 0, 5);
}

/* The agent is killed meanwhile: the next one waits as it did, and loses nothing that the rings hold. */
static void a_disk_that_is_full_for_the_next_agent_is_waited_for(void **state) {
  monitored *made = *state;
  start_and_fill_the_disk(made);
  monitored_steps(made, 5, 8);
  assert_int_equal(monitored_commit(made), EVEN_ERR_NO_SPACE);
  even_monitor_leave(made->monitor);
  made->continues = true;
  assert_int_equal(monitored_open(made, -1), EVEN_OK);
  even_monitor_attempt(made->monitor, 0);
  assert_int_equal(monitored_commit(made), EVEN_ERR_NO_SPACE);
  assert_non_null(strstr(even_error_last()->what, "the history waits in memory, the run goes on"));
  monitored_steps(made, 5, 8);
  disk_full = false;
  monitored_committed(made);
  uint32_t steps = made->ranks.step;
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  expect_steps(monitored_path(made, "run.db"), 0, steps);
  assert_int_equal(access(monitored_path(made, "run-previous.db"), F_OK), -1);
  report_has_event(made, "of the second before");
  report_has_event(made, "the agent of this run was killed; another one goes on with the ranks that ran");
}

/* What the lost batch said of a span that is still summed is said again: the agent is killed after that. */
static void a_span_begun_before_the_disk_was_full_is_known_to_the_next_agent(void **state) {
  monitored *made = *state;
  const even_span_record saved = {.step = 5, .span = EVEN_SPAN_CHECKPOINT, .start_ns = 7, .duration_ns = 11};
  start_and_fill_the_disk(made);
  even_telemetry_span(made->ranks.writers[0], &saved);
  monitored_steps(made, 5, 8);
  assert_int_equal(monitored_commit(made), EVEN_ERR_NO_SPACE);
  disk_full = false;
  monitored_steps(made, 5, 8);
  monitored_committed(made);
  monitored_kill(made);
  monitored_begin(made, true, 0);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  assert_true(monitored_number(made, "SELECT sum(duration_ns) FROM spans WHERE span = 'checkpoint'") == 11);
}

static int tear_down_disk(void **state) {
  disk_full = false;
  sqlite3_vfs_find(NULL)->xOpen = real_open;
  return monitored_tear_down(state);
}

/* Between two batches. */
static void take_lock(monitored *made, sqlite3 *other) {
  uint64_t deadline = even_clock_ns() + UINT64_C(20000000000);
  int code = SQLITE_BUSY;
  while (code != SQLITE_OK && even_clock_ns() < deadline) {
    monitored_committed(made);
    code = sqlite3_exec(other, "BEGIN IMMEDIATE", NULL, NULL, NULL);
  }
  assert_int_equal(code, SQLITE_OK);
}

static void locked_history(void **state, bool unlocked) {
  monitored *made = *state;
  sqlite3 *other = NULL;
  monitored_start(made);
  assert_int_equal(sqlite3_open(monitored_path(made, "run.db"), &other), SQLITE_OK);
  monitored_steps(made, 1, 8);
  even_monitor_attempt(made->monitor, 0); /* no row is open now or one is: take the lock between two */
  take_lock(made, other);
  monitored_steps(made, 30, 8); /* kept, not written, and not an error */
  even_monitor_attempt(made->monitor, 0);
  monitored_committed(made);
  assert_int_equal(sqlite3_exec(other, "ROLLBACK", NULL, NULL, NULL), SQLITE_OK);
  monitored_committed(made);
  monitored_steps(made, 5, 8);
  if (unlocked) {
    assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
    even_history *history = NULL;
    assert_int_equal(even_history_open(made->folder, &history), EVEN_OK);
    assert_true(even_history_ended(history));
    assert_int_equal(even_history_state(history)->rank[1].steps, 36);
    assert_true(even_history_state(history)->rank[1].span_ns[EVEN_SPAN_FORWARD] > 0);
    even_history_close(history);
  } else { /* until the end: told then */
    take_lock(made, other);
    monitored_steps(made, 5, 8);
    /* also where agent.json cannot be removed */
    assert_int_equal(unlink(monitored_path(made, "agent.json")), 0);
    assert_int_equal(mkdir(monitored_path(made, "agent.json"), 0700), 0);
    assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_ERR_IN_USE);
    assert_int_equal(rmdir(monitored_path(made, "agent.json")), 0);
    assert_non_null(strstr(even_error_last()->what, "locked"));
  }
  assert_int_equal(sqlite3_close(other), SQLITE_OK);
}

static void a_locked_history_goes_on_when_it_can(void **state) {
  locked_history(state, true);
}

static void a_history_that_stays_locked_is_told_at_the_end(void **state) {
  locked_history(state, false);
}

static int asker = -1;

/* flock; whoever asked goes away when somebody else could not have the lock. */
static int asker_leaves(int fd, int operation) {
  int result = flock(fd, operation);
  int reason = errno;
  if (result != 0) {
    (void)flock(asker, LOCK_UN);
  }
  errno = reason;
  return result;
}

static void a_job_lives_as_long_as_it_holds_its_folder(void **state) {
  monitored *made = *state;
  monitored_start(made); /* agent.json names this process, which lives on */
  assert_true(even_history_alive(made->folder));
  even_folder_unlock(made->lock);
  made->lock = -1;
  assert_false(even_history_alive(made->folder)); /* killed, and its number is another's now */
  assert_int_equal(even_folder_lock(made->folder, &made->lock), EVEN_OK);
  assert_true(made->lock >= 0); /* who asked holds nothing */
  assert_true(even_history_alive(made->folder));
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  assert_false(even_history_alive(made->folder));
}

/* `evenstep top` in another terminal asks at the same moment: it stands there with the lock shared. */
static void who_asks_meets_neither_another_nor_a_job(void **state) {
  monitored *made = *state;
  monitored_start(made);
  even_folder_unlock(made->lock);
  made->lock = -1;
  asker = open(made->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  assert_true(asker >= 0);
  assert_int_equal(flock(asker, LOCK_SH | LOCK_NB), 0);
  assert_false(even_history_alive(made->folder)); /* its agent was killed: nobody may call it alive */
  even_os.flock = asker_leaves;
  assert_int_equal(even_folder_lock(made->folder, &made->lock), EVEN_OK); /* a new job of that name */
  even_os = even_os_real;
  assert_true(made->lock >= 0);
  assert_int_equal(flock(asker, LOCK_SH | LOCK_NB), -1);
  assert_true(even_history_alive(made->folder));
  assert_int_equal(close(asker), 0);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
}

static bool at_once(void) {
  return true;
}

static void the_report_ends_when_it_is_asked_to(void **state) {
  monitored *made = *state;
  even_history *history = NULL;
  monitored_start(made);
  monitored_steps(made, 3000, 8);
  even_stop_when(at_once);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_ERR_INTERRUPTED);
  even_stop_when(NULL);
  assert_int_equal(access(monitored_path(made, "report.html"), F_OK), -1);
  assert_int_equal(even_history_open(made->folder, &history), EVEN_OK); /* nothing of the history is missing */
  assert_true(even_history_ended(history));
  even_history_close(history);
}

static void a_folder_of_any_name_is_read_where_nothing_can_be_written(void **state) {
  monitored *made = *state;
  static const char odd[] = "run.db?mode=memory#100%25";
  even_history *history = NULL;
  char parent[200];
  (void)snprintf(parent, sizeof parent, "%s/%s", made->folder, odd);
  monitored_start(made);
  monitored_steps(made, 5, 8);
  assert_int_equal(even_monitor_close(made->monitor, 0), EVEN_OK);
  assert_int_equal(mkdir(parent, 0700), 0);
  char from[400];
  char to[400];
  (void)snprintf(from, sizeof from, "%s/run.db", made->folder);
  (void)snprintf(to, sizeof to, "%s/run.db", parent);
  assert_int_equal(rename(from, to), 0);
  sqlite3_vfs *vfs = sqlite3_vfs_find(NULL);
  real_open = vfs->xOpen;
  vfs->xOpen = no_side_file_open;
  even_status status = even_history_open(parent, &history);
  vfs->xOpen = real_open;
  assert_int_equal(status, EVEN_OK);
  assert_int_equal(even_history_state(history)->last_step, 4);
  even_history_close(history);
  assert_int_equal(unlink(to), 0);
  assert_int_equal(rmdir(parent), 0);
}

static void a_folder_that_cannot_be_had_is_an_error(void **state) {
  monitored *made = *state;
  monitored_put(made, "report.html", "");
  monitored under = *made;
  (void)snprintf(under.folder, sizeof under.folder, "%.40s/report.html", made->folder);
  assert_int_not_equal(monitored_open(&under, -1), EVEN_OK);
  assert_null(under.monitor);
}

static void a_foreign_ring_is_refused(void **state) {
  monitored *made = *state;
  int kept = made->ranks.fd;
  made->ranks.fd = STDIN_FILENO;
  assert_int_not_equal(monitored_open(made, -1), EVEN_OK);
  made->ranks.fd = kept;
}

static even_status whole_life(void *context) {
  monitored *made = context;
  even_status status = monitored_open(made, -1);
  if (status != EVEN_OK) {
    return status;
  }
  even_monitor_attempt(made->monitor, 0);
  even_monitor_rank_started(made->monitor, 0, getpid());
  status = even_monitor_tick(made->monitor);
  even_status closed = even_monitor_close(made->monitor, 0);
  return status != EVEN_OK ? status : closed;
}

static void every_failing_allocation_is_survived(void **state) {
  monitored *made = *state;
  const uint32_t shares[2] = {8, 8};
  feed_step(&made->ranks, shares);
  long nth = 0;
  do { /* a monitor goes on without what it can do without: most faults are no failure, none may leak */
    fault_reset();
    fault_allocation(++nth);
    even_status status = whole_life(made);
    assert_true(status == EVEN_OK || status == EVEN_ERR_MEMORY);
    assert_int_equal(fault_live_blocks(), 0);
  } while (fault_allocations() >= nth);
  assert_true(nth > 40);
}

static void every_failing_call_is_survived(void **state) {
  monitored *made = *state;
  assert_true(fault_each_os(whole_life, made, EIO) > 10);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, monitored_set_up, monitored_tear_down)
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_full_disk_is_told_once_and_waited_for, monitored_set_up, tear_down_disk),
      cmocka_unit_test_setup_teardown(a_disk_that_stays_full_is_told_at_the_end, monitored_set_up, tear_down_disk),
      cmocka_unit_test_setup_teardown(a_disk_that_is_full_for_the_next_agent_is_waited_for, monitored_set_up,
                                      tear_down_disk),
      cmocka_unit_test_setup_teardown(a_span_begun_before_the_disk_was_full_is_known_to_the_next_agent,
                                      monitored_set_up, tear_down_disk),
      TEST(a_locked_history_goes_on_when_it_can),
      TEST(a_history_that_stays_locked_is_told_at_the_end),
      TEST(who_asks_meets_neither_another_nor_a_job),
      TEST(a_job_lives_as_long_as_it_holds_its_folder),
      TEST(the_report_ends_when_it_is_asked_to),
      TEST(a_folder_of_any_name_is_read_where_nothing_can_be_written),
      TEST(a_folder_that_cannot_be_had_is_an_error),
      TEST(a_foreign_ring_is_refused),
      TEST(every_failing_allocation_is_survived),
      TEST(every_failing_call_is_survived),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
