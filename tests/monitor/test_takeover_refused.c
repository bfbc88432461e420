/* A history that cannot be gone on with begins anew, and the run never fails of it; nor of any call or allocation. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "monitor/monitored.h"
#include "monitor/parts.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <sqlite3.h>
#include <string.h>
#include <unistd.h>

static void run_sql(const monitored *made, const char *script) {
  sqlite3 *connection = NULL;
  assert_int_equal(sqlite3_open(monitored_path(made, "run.db"), &connection), SQLITE_OK);
  assert_int_equal(sqlite3_exec(connection, script, NULL, NULL, NULL), SQLITE_OK);
  assert_int_equal(sqlite3_close(connection), SQLITE_OK);
}

static void prepare(monitored *run) {
  monitored_begin(run, false, 0);
  monitored_steps(run, 200, 8);
  monitored_committed(run);
  monitored_kill(run);
  monitored_listen(run);
}

/* The run goes on with a history of its own from here, in the same attempt. */
static void expect_anew(monitored *run, const char *why) {
  monitored_begin(run, true, 2);
  monitored_steps(run, 1, 8);
  monitored_expect_heard("begins anew", true);
  monitored_expect_heard(why, true);
  monitored_steps(run, 1, 8);
  assert_int_equal(run->monitor->state->attempt, 2);
  assert_int_equal(even_monitor_close(run->monitor, 0), EVEN_OK);
  assert_true(monitored_number(run, "SELECT count(*) FROM events WHERE event = 'attempt'") == 0);
  assert_true(monitored_number(run, "SELECT count(*) FROM events WHERE words LIKE '%could not be gone on with%'") == 1);
  assert_true(monitored_number(run, "SELECT max(step) FROM steps") == 201);
}

static void damage(const monitored *made, long from, long bytes) {
  char junk[512];
  memset(junk, 0xa5, sizeof junk);
  int fd = open(monitored_path(made, "run.db"), O_WRONLY | O_CLOEXEC);
  assert_true(fd >= 0);
  for (long at = from; at < from + bytes; at += (long)sizeof junk) {
    assert_int_equal(pwrite(fd, junk, sizeof junk, at), sizeof junk);
  }
  assert_int_equal(close(fd), 0);
}

static void a_damaged_history_begins_anew(void **state) {
  monitored *made = *state;
  prepare(made);
  run_sql(made, "PRAGMA wal_checkpoint(TRUNCATE)");
  damage(made, 3L * 4096, 40L * 4096);
  expect_anew(made, "malformed");
  assert_int_equal(access(monitored_path(made, "run-previous.db"), F_OK), 0);
}

/* In a table that is written alone while the run lives. */
static void damage_that_no_reader_meets_is_seen(void **state) {
  monitored *made = *state;
  prepare(made);
  run_sql(made, "PRAGMA wal_checkpoint(TRUNCATE)");
  long page = (long)monitored_number(made, "SELECT rootpage FROM sqlite_master WHERE name = 'calls'");
  damage(made, (page - 1) * 4096, 4096);
  expect_anew(made, "malformed");
}

static void a_file_that_is_no_database_begins_anew(void **state) {
  monitored *made = *state;
  prepare(made);
  run_sql(made, "PRAGMA wal_checkpoint(TRUNCATE)");
  damage(made, 0, 4096);
  expect_anew(made, "not a database");
}

static void a_history_of_another_version_begins_anew(void **state) {
  monitored *made = *state;
  prepare(made);
  run_sql(made, "DROP TABLE rings");
  expect_anew(made, "has not the tables of this version");
}

static void a_history_of_another_format_begins_anew(void **state) {
  monitored *made = *state;
  prepare(made);
  run_sql(made, "UPDATE meta SET value = 'evenstep-run-0' WHERE key = 'format'");
  expect_anew(made, "of this version");
}

static void without_a_history_one_is_begun(void **state) {
  monitored *made = *state;
  prepare(made);
  assert_int_equal(unlink(monitored_path(made, "run.db")), 0);
  expect_anew(made, "there is no");
}

static void a_locked_history_begins_anew(void **state) {
  monitored *made = *state;
  sqlite3 *other = NULL;
  prepare(made);
  assert_int_equal(sqlite3_open(monitored_path(made, "run.db"), &other), SQLITE_OK);
  assert_int_equal(sqlite3_exec(other, "BEGIN IMMEDIATE", NULL, NULL, NULL), SQLITE_OK);
  expect_anew(made, "locked");
  assert_int_equal(sqlite3_close(other), SQLITE_OK);
}

/* A page that was of another segment. */
static void a_place_beyond_the_ring_is_not_believed(void **state) {
  monitored *run = *state;
  prepare(run);
  run_sql(run,
          "UPDATE rings SET place = 9999999; INSERT INTO rings VALUES(77, 5, -3);"
          "INSERT INTO open_spans VALUES(-1, 'data', 1, 1, 1, 1), (0, 'dance', 1, 1, 1, 1)");
  monitored_begin(run, true, 0);
  monitored_steps(run, 1, 8);
  monitored_committed(run);
  assert_true(monitored_number(run, "SELECT max(step) FROM steps") == 200);
  assert_int_equal(even_monitor_close(run->monitor, 0), EVEN_OK);
}

/* ---- faults ---- */

static even_status next_life(void *context) {
  monitored *made = context;
  made->continues = true;
  even_status status = monitored_open(made, -1);
  if (status != EVEN_OK) {
    return status;
  }
  even_monitor_attempt(made->monitor, 0);
  even_monitor_rank_started(made->monitor, 0, MONITORED_PID);
  status = even_monitor_tick(made->monitor);
  monitored_kill(made);
  return status;
}

static void every_failing_allocation_is_survived(void **state) {
  monitored *run = *state;
  long nth = 0;
  prepare(run);
  do {
    fault_reset();
    fault_allocation(++nth);
    even_status status = next_life(run);
    assert_true(status == EVEN_OK || status == EVEN_ERR_MEMORY);
    assert_int_equal(fault_live_blocks(), 0);
  } while (fault_allocations() >= nth);
  assert_true(nth > 40);
  fault_reset();
  monitored_begin(run, true, 0);
  assert_int_equal(even_monitor_close(run->monitor, 0), EVEN_OK);
}

static void every_failing_call_is_survived(void **state) {
  monitored *made = *state;
  prepare(made);
  assert_true(fault_each_os(next_life, made, EIO) > 5);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, monitored_set_up, monitored_tear_down)
  const struct CMUnitTest tests[] = {
      TEST(a_damaged_history_begins_anew),
      TEST(damage_that_no_reader_meets_is_seen),
      TEST(a_file_that_is_no_database_begins_anew),
      TEST(a_history_of_another_version_begins_anew),
      TEST(a_history_of_another_format_begins_anew),
      TEST(without_a_history_one_is_begun),
      TEST(a_locked_history_begins_anew),
      TEST(a_place_beyond_the_ring_is_not_believed),
      TEST(every_failing_allocation_is_survived),
      TEST(every_failing_call_is_survived),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
