/* Whole files and durable replacement: short writes, interrupts, a full disk, any call failing. */
#include "os/file.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/folder.h"
#include "os/stream.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cmocka.h>

static char folder[64];
static char path[128];
static char temporary[160];

static int make_folder(void **state) {
  (void)state;
  (void)snprintf(folder, sizeof folder, "evenstep-test-XXXXXX");
  if (mkdtemp(folder) == NULL) {
    return -1;
  }
  (void)snprintf(path, sizeof path, "%s/file", folder);
  (void)snprintf(temporary, sizeof temporary, "%s.tmp", path);
  return 0;
}

static int remove_folder(void **state) {
  (void)state;
  fault_reset();
  (void)unlink(path);
  (void)unlink(temporary);
  return rmdir(folder);
}

static void assert_content(const char *expected) {
  even_text text = EVEN_TEXT_EMPTY;
  assert_int_equal(even_file_read(path, 1 << 20, &text), EVEN_OK);
  assert_string_equal(even_text_string(&text), expected);
  even_text_free(&text);
}

static void what_was_written_is_read(void **state) {
  (void)state;
  assert_int_equal(even_file_replace(path, "first", 5), EVEN_OK);
  assert_content("first");
  assert_int_equal(even_file_replace(path, "", 0), EVEN_OK);
  assert_content("");
  assert_int_equal(access(temporary, F_OK), -1);
}

static void a_missing_file_is_named(void **state) {
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  assert_int_equal(even_file_read(path, 10, &text), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->what, path));
  assert_int_equal(even_file_read(folder, 10, &text), EVEN_ERR_INPUT);
  assert_non_null(strstr(even_error_last()->what, "is a folder"));
  even_text_free(&text);
}

static void a_file_above_the_limit_is_refused(void **state) {
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  assert_int_equal(even_file_replace(path, "12345", 5), EVEN_OK);
  assert_int_equal(even_file_read(path, 4, &text), EVEN_ERR_INPUT);
  even_text_free(&text);
  assert_int_equal(even_file_read(path, 5, &text), EVEN_OK);
  even_text_free(&text);
}

static void a_pipe_is_refused_at_once(void **state) {
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  assert_int_equal(mkfifo(path, 0600), 0);
  assert_int_equal(even_file_read(path, 10, &text), EVEN_ERR_INPUT);
  assert_int_equal(even_file_start(path, 10, &text), EVEN_ERR_INPUT);
  assert_int_equal(even_file_read("/dev/zero", 10, &text), EVEN_ERR_INPUT);
  even_text_free(&text);
}

static void short_and_interrupted_calls_are_continued(void **state) {
  (void)state;
  fault_os_short(3);
  fault_os(FAULT_write, 2, EINTR);
  fault_os(FAULT_read, 2, EINTR);
  assert_int_equal(even_file_replace(path, "a longer text", 13), EVEN_OK);
  assert_content("a longer text");
  assert_true(fault_os_calls(FAULT_write) >= 5);
}

static ssize_t write_nothing(int fd, const void *buffer, size_t bytes) {
  (void)fd;
  (void)buffer;
  (void)bytes;
  return 0;
}

static void a_write_that_never_advances_is_an_error(void **state) {
  (void)state;
  even_os.write = write_nothing;
  assert_int_equal(even_file_write_all(1, "x", 1), EVEN_ERR_SYSTEM);
}

static even_status replace(void *context) {
  return even_file_replace(path, context, strlen(context));
}

static void a_failed_replacement_keeps_the_old_file(void **state) {
  static const fault_call BEFORE_RENAME[] = {FAULT_open, FAULT_write, FAULT_fsync, FAULT_close, FAULT_rename};
  (void)state;
  assert_int_equal(even_file_replace(path, "old", 3), EVEN_OK);
  for (size_t i = 0; i < sizeof BEFORE_RENAME / sizeof BEFORE_RENAME[0]; i++) {
    fault_os(BEFORE_RENAME[i], 1, ENOSPC);
    assert_int_equal(even_file_replace(path, "new", 3), EVEN_ERR_NO_SPACE);
    fault_reset();
    assert_content("old");
    assert_int_equal(access(temporary, F_OK), -1);
  }
}

static void each_call_and_allocation_may_fail(void **state) {
  (void)state;
  assert_true(fault_each_os(replace, "text", EIO) >= 6);
  assert_true(fault_each_allocation(replace, "text") >= 2);
  assert_content("text");
}

/* Somebody who may write to the folder plants a link, or a file of his own, under the name that is written to first. */
static void what_was_planted_is_not_written_to(void **state) {
  char victim[160];
  struct stat facts;
  (void)state;
  (void)snprintf(victim, sizeof victim, "%s/victim", folder);
  assert_int_equal(even_file_replace(victim, "mine", 4), EVEN_OK);
  assert_int_equal(symlink("victim", temporary), 0);
  assert_int_equal(even_file_replace_private(path, "secret", 6), EVEN_OK);
  assert_int_equal(lstat(path, &facts), 0);
  assert_true(S_ISREG(facts.st_mode));
  assert_int_equal(facts.st_mode & 0777, 0600);
  assert_int_equal(stat(victim, &facts), 0);
  assert_int_equal(facts.st_size, 4);
  assert_content("secret");
  int open_to_all = open(temporary, O_RDWR | O_CREAT | O_EXCL, 0666);
  assert_true(open_to_all >= 0);
  assert_int_equal(even_file_replace_private(path, "token", 5), EVEN_OK);
  assert_int_equal(stat(path, &facts), 0);
  assert_int_equal(facts.st_mode & 0777, 0600);
  assert_int_equal(fstat(open_to_all, &facts), 0);
  assert_int_equal(facts.st_size, 0);
  assert_int_equal(close(open_to_all), 0);
  assert_int_equal(unlink(victim), 0);
}

static int plant_again(const char *name) {
  int result = unlink(name);
  (void)symlink("victim", name);
  return result;
}

/* Planted between the two calls: refused, not followed. */
static void a_link_planted_meanwhile_is_refused(void **state) {
  char victim[160];
  (void)state;
  (void)snprintf(victim, sizeof victim, "%s/victim", folder);
  even_os.unlink = plant_again;
  assert_int_equal(even_file_replace_private(path, "secret", 6), EVEN_ERR_IN_USE);
  assert_int_equal(access(victim, F_OK), -1);
}

static void folders_are_made_with_those_above(void **state) {
  char deep[128];
  char middle[128];
  (void)state;
  (void)snprintf(middle, sizeof middle, "%s/a", folder);
  (void)snprintf(deep, sizeof deep, "%s/a//b/", folder);
  assert_int_equal(even_folder_make(deep), EVEN_OK);
  assert_int_equal(even_folder_make(deep), EVEN_OK);
  assert_int_equal(access(deep, X_OK), 0);
  assert_int_equal(rmdir(deep), 0);
  assert_int_equal(rmdir(middle), 0);
  fault_os(FAULT_mkdir, 2, EACCES);
  assert_int_equal(even_folder_make(deep), EVEN_ERR_PERMISSION);
  fault_reset();
  (void)rmdir(middle);
  assert_int_equal(even_folder_make("/"), EVEN_OK);
  assert_int_equal(even_folder_make(""), EVEN_ERR_NOT_FOUND);
}

static void a_file_in_the_way_of_a_folder_is_an_error(void **state) {
  (void)state;
  assert_int_equal(even_file_replace(path, "x", 1), EVEN_OK);
  assert_int_equal(even_folder_make(path), EVEN_ERR_IN_USE);
}

/* Said where the folder is asked for, not by the first file that is to go there. */
static void a_link_that_leads_nowhere_is_no_folder(void **state) {
  (void)state;
  assert_int_equal(symlink("no-such-folder", path), 0);
  assert_int_equal(even_folder_make(path), EVEN_ERR_IN_USE);
  assert_non_null(strstr(even_error_last()->what, "a link of that name leads nowhere"));
  assert_int_equal(unlink(path), 0);
  assert_int_equal(symlink(".", path), 0);
  assert_int_equal(even_folder_make(path), EVEN_OK);
  fault_os(FAULT_open, 1, EACCES); /* a link to a folder below one that may not be searched */
  assert_int_equal(even_folder_make(path), EVEN_ERR_PERMISSION);
  fault_reset();
  assert_int_equal(unlink(path), 0);
}

static void what_a_file_may_not_take_the_place_of_is_special(void **state) {
  (void)state;
  assert_false(even_path_is_special(path));
  assert_int_equal(symlink("/dev/null", path), 0);
  assert_true(even_path_is_special(path));
  fault_os(FAULT_fstat, 1, EIO);
  assert_false(even_path_is_special(path)); /* cannot be told */
  fault_reset();
  assert_int_equal(unlink(path), 0);
  assert_int_equal(even_file_replace(path, "x", 1), EVEN_OK);
  assert_false(even_path_is_special(path) || even_path_is_special(folder));
  assert_int_equal(unlink(path), 0);
  assert_int_equal(mkfifo(path, 0600), 0);
  assert_true(even_path_is_special(path));
}

static int says_xfs(int fd, struct statfs *out) {
  (void)fd;
  *out = (struct statfs){.f_type = 0x58465342};
  return 0;
}

/* Whatever file system the tests are on. */
static int open_not_direct(const char *name, int flags, mode_t mode) {
  return even_os_real.open(name, flags & ~O_DIRECT, mode);
}

static void a_signal_does_not_end_taking_a_files_room(void **state) {
  even_output output;
  struct stat facts;
  (void)state;
  assert_int_equal(even_output_create(path, &output), EVEN_OK);
  fault_os(FAULT_fallocate, 1, EINTR);
  even_os.fstatfs = says_xfs;
  even_os.open = open_not_direct;
  even_output_go_direct(&output);
  assert_int_equal(even_output_make_room(&output, 0, 4096), EVEN_OK);
  assert_int_equal(fault_os_calls(FAULT_fallocate), 2);
  assert_int_equal(stat(path, &facts), 0);
  assert_int_equal(facts.st_size, 4096);
  fault_os(FAULT_fallocate, 1, ENOSPC);
  even_os.fstatfs = says_xfs;
  even_os.open = open_not_direct;
  assert_int_equal(even_output_make_room(&output, 0, 4096), EVEN_ERR_NO_SPACE);
  even_output_drop(&output);
}

int main(void) {
#define FILE_TEST(test) cmocka_unit_test_setup_teardown(test, make_folder, remove_folder)
  const struct CMUnitTest tests[] = {
      FILE_TEST(a_signal_does_not_end_taking_a_files_room),
      FILE_TEST(what_was_written_is_read),
      FILE_TEST(a_missing_file_is_named),
      FILE_TEST(a_file_above_the_limit_is_refused),
      FILE_TEST(a_pipe_is_refused_at_once),
      FILE_TEST(short_and_interrupted_calls_are_continued),
      FILE_TEST(a_write_that_never_advances_is_an_error),
      FILE_TEST(a_failed_replacement_keeps_the_old_file),
      FILE_TEST(each_call_and_allocation_may_fail),
      FILE_TEST(what_was_planted_is_not_written_to),
      FILE_TEST(a_link_planted_meanwhile_is_refused),
      FILE_TEST(folders_are_made_with_those_above),
      FILE_TEST(a_file_in_the_way_of_a_folder_is_an_error),
      FILE_TEST(a_link_that_leads_nowhere_is_no_folder),
      FILE_TEST(what_a_file_may_not_take_the_place_of_is_special),
  };
  return cmocka_run_group_tests_name("os_file", tests, NULL, NULL);
}
