/* Run folders: locked while their job lives, and what holds where a file system has no locks. */
#include "base/fail.h"
#include "cli/job_setup.h"
#include "os/folder.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static char runs[64];
static even_job_options options;
static even_job_setup setup;

static int make_runs(void **state) {
  (void)state;
  (void)strcpy(runs, "/tmp/evenstep-runs-XXXXXX");
  options = (even_job_options){.runs_folder = runs, .name = "one"};
  setup = (even_job_setup){.lock = -1};
  return mkdtemp(runs) == NULL;
}

static void close_setup(void) {
  even_folder_unlock(setup.lock);
  even_text_free(&setup.run_name);
  even_text_free(&setup.run_folder);
  setup = (even_job_setup){.lock = -1};
}

static int remove_runs(void **state) {
  char command[128];
  (void)state;
  fault_reset();
  close_setup();
  (void)snprintf(command, sizeof command, "rm -rf %s", runs);
  return system(command);
}

static void a_folder_in_use_is_refused(void **state) {
  (void)state;
  char path[96];
  int held = -1;
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_OK);
  assert_true(setup.lock >= 0);
  close_setup();
  (void)snprintf(path, sizeof path, "%s/one", runs);
  assert_int_equal(even_folder_lock(path, &held), EVEN_OK);
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_ERR_IN_USE);
  even_folder_unlock(held);
}

/* Lustre mounted without locks, some file systems of FUSE. */
static void a_job_runs_where_nothing_can_be_locked(void **state) {
  static const int refusals[] = {ENOLCK, ENOSYS, EOPNOTSUPP};
  (void)state;
  for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
    fault_os_from(FAULT_flock, 1, refusals[i]);
    assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_OK); /* new, then one moved away */
    assert_int_equal(setup.lock, -1);
    close_setup();
  }
  options.resume = "auto";
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_OK);
}

static void what_may_be_in_use_there_is_refused(void **state) {
  (void)state;
  char path[96];
  options.resume = "auto";
  fault_os_from(FAULT_flock, 1, ENOLCK);
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_OK);
  close_setup();
  (void)snprintf(path, sizeof path, "%s/one/agent.json", runs);
  int file = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  assert_true(file >= 0);
  assert_int_equal(close(file), 0);
  assert_int_equal(even_job_run_folder(&options, "train.py", &setup), EVEN_ERR_IN_USE);
  assert_non_null(strstr(even_error_last()->what, "no locks"));
  assert_non_null(strstr(even_error_last()->fix, "one/agent.json"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_folder_in_use_is_refused, make_runs, remove_runs),
      cmocka_unit_test_setup_teardown(a_job_runs_where_nothing_can_be_locked, make_runs, remove_runs),
      cmocka_unit_test_setup_teardown(what_may_be_in_use_there_is_refused, make_runs, remove_runs),
  };
  return cmocka_run_group_tests_name("cli_job_folder", tests, NULL, NULL);
}
