/* A monitored run of two invented ranks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "monitor/monitored.h"

#include "monitor/parts.h"
#include "monitor/report.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/folder.h"
#include "support/fault.h"
#include "support/folder.h"

#include <math.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *monitored_path(const monitored *made, const char *name) {
  static char path[160];
  (void)snprintf(path, sizeof path, "%s/%s", made->folder, name);
  return path;
}

int monitored_set_up(void **state) {
  monitored *made = calloc(1, sizeof *made);
  (void)snprintf(made->folder, sizeof made->folder, "/tmp/evenstep-test-XXXXXX");
  if (made == NULL || mkdtemp(made->folder) == NULL) {
    return -1;
  }
  feed_open(&made->ranks, 2, 16, even_clock_ns());
  made->ranks.speeds[0] = 4000;
  made->ranks.speeds[1] = 1000;
  *state = made;
  return even_folder_lock(made->folder, &made->lock) == EVEN_OK && made->lock >= 0 ? 0 : -1; /* as a job does */
}

int monitored_tear_down(void **state) {
  static const char *const names[] = {"run.db",         "run.db-wal",          "run.db-shm",         "run-previous.db",
                                      "report.html",    "agent.json",          "plan.json",          "report.html.tmp",
                                      "agent.json.tmp", "run-previous.db-wal", "run-previous.db-shm"};
  monitored *made = *state;
  fault_reset();
  even_folder_unlock(made->lock);
  feed_close(&made->ranks);
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    (void)unlink(monitored_path(made, names[i]));
  }
  int failed = rmdir(made->folder); /* nothing else may be left */
  if (failed != 0) {
    (void)folder_remove(made->folder);
  }
  free(made);
  return failed;
}

even_status monitored_open(monitored *made, int port) {
  static const even_monitor_rank facts[] = {{"cpu:0", "CPU", 1, NAN, NULL}, {"cpu:1", "CPU", 0.25, 0.25, NULL}};
  const even_monitor_params params = {.size = sizeof params,
                                      .run_folder = made->folder,
                                      .run_name = "test",
                                      .command = "evenstep run --name </script><!-- train.py",
                                      .policy = "hybrid",
                                      .ranks = made->ranks.ranks,
                                      .rank_facts = made->ranks.ranks == 2 ? facts : NULL,
                                      .telemetry_fd = made->ranks.fd,
                                      .port = port,
                                      .step_rows = made->step_rows,
                                      .notice = made->notice,
                                      .limits = made->limits,
                                      .gpus = made->gpus,
                                      .continues = made->continues,
                                      .calls = made->calls,
                                      .nvml_library = made->nvml_library};
  return even_monitor_open(&params, &made->monitor);
}

void monitored_start(monitored *made) {
  assert_int_equal(monitored_open(made, -1), EVEN_OK);
  assert_string_equal(even_monitor_url(made->monitor), "");
  even_monitor_attempt(made->monitor, 0);
  made->monitor->begins = false; /* commits are a second apart, or asked for */
  even_monitor_rank_started(made->monitor, 0, getpid());
  even_monitor_rank_started(made->monitor, 1, getpid());
}

void monitored_begin(monitored *made, bool continues, int attempt) {
  made->continues = continues;
  assert_int_equal(monitored_open(made, -1), EVEN_OK);
  even_monitor_attempt(made->monitor, attempt);
  made->monitor->begins = false;
  for (int rank = 0; rank < 2; rank++) {
    even_monitor_rank_started(made->monitor, rank, MONITORED_PID + rank);
  }
}

void monitored_kill(monitored *made) {
  even_monitor_leave(made->monitor);
  made->monitor = NULL;
}

void monitored_steps(monitored *made, int count, uint32_t first_share) {
  const uint32_t shares[2] = {first_share, 16 - first_share};
  for (int i = 0; i < count; i++) {
    feed_step(&made->ranks, shares);
  }
  assert_int_equal(even_monitor_tick(made->monitor), EVEN_OK);
}

even_status monitored_commit(monitored *made) {
  made->monitor->committed_ns = 0;
  return even_monitor_tick(made->monitor);
}

void monitored_committed(monitored *made) {
  assert_int_equal(monitored_commit(made), EVEN_OK);
}

void monitored_put(const monitored *made, const char *name, const char *content) {
  FILE *file = fopen(monitored_path(made, name), "w");
  assert_non_null(file);
  assert_true(fputs(content, file) >= 0);
  assert_int_equal(fclose(file), 0);
}

double monitored_number(const monitored *made, const char *query) {
  sqlite3 *history = NULL;
  sqlite3_stmt *row = NULL;
  assert_int_equal(sqlite3_open(monitored_path(made, "run.db"), &history), SQLITE_OK);
  assert_int_equal(sqlite3_prepare_v2(history, query, -1, &row, NULL), SQLITE_OK);
  assert_int_equal(sqlite3_step(row), SQLITE_ROW);
  double value = sqlite3_column_type(row, 0) == SQLITE_NULL ? (double)NAN : sqlite3_column_double(row, 0);
  assert_int_equal(sqlite3_finalize(row), SQLITE_OK);
  assert_int_equal(sqlite3_close(history), SQLITE_OK);
  return value;
}

/* Whether `words` are in `text`. */
static void expect_in(const char *text, const char *words, bool said) {
  if ((strstr(text, words) != NULL) != said) {
    fail_msg("%s: %s in: %s", words, said ? "not" : "still", text);
  }
}

void monitored_report_says(const monitored *made, const char *words, bool said) {
  even_report *report = NULL;
  even_text text = EVEN_TEXT_EMPTY;
  const even_report_params params = {.folder = made->folder};
  assert_int_equal(even_report_open(&params, &report), EVEN_OK);
  even_report_lines(report, false, &text);
  assert_int_equal(even_text_status(&text), EVEN_OK);
  expect_in(even_text_string(&text), words, said);
  even_text_free(&text);
  even_report_close(report);
}

static char heard[2048];

static void hear(void *context, const char *text) {
  (void)context;
  size_t length = strlen(heard);
  (void)snprintf(heard + length, sizeof heard - length, "%s|", text);
}

void monitored_listen(monitored *made) {
  heard[0] = '\0';
  made->notice = hear;
}

const char *monitored_heard(void) {
  return heard;
}

void monitored_expect_heard(const char *words, bool said) {
  expect_in(heard, words, said);
}

json_t *monitored_page(const monitored *made) {
  even_text page = EVEN_TEXT_EMPTY;
  json_t *parsed = NULL;
  assert_int_equal(even_file_read(monitored_path(made, "report.html"), 64 << 20, &page), EVEN_OK);
  const char *data = strstr(even_text_string(&page), "const EVENSTEP_DATA = ");
  assert_non_null(data);
  data += strlen("const EVENSTEP_DATA = ");
  const char *end = strstr(data, ";</script>");
  assert_non_null(end);
  assert_null(memchr(data, '<', (size_t)(end - data)));
  assert_int_equal(even_json_parse("page", data, (size_t)(end - data), &parsed), EVEN_OK);
  even_text_free(&page);
  return parsed;
}
