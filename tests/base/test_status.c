/* The error record: what is recorded, kept, cut, and for whom. */
#include "base/fail.h"

#include <errno.h>
#include <evenstep/version.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static int forget(void **state) {
  (void)state;
  even_error_clear();
  return 0;
}

static void every_status_has_words_and_a_code(void **state) {
  (void)state;
  for (int number = 0; number <= EVEN_ERR_INTERRUPTED; number++) {
    even_status status = (even_status)number;
    assert_non_null(strstr(even_status_name(status), "EVEN_"));
    assert_true(strlen(even_status_text(status)) > 3);
    assert_true(number == 0 ? even_status_exit_code(status) == 0 : even_status_exit_code(status) > 1);
  }
  assert_string_equal(even_status_name((even_status)999), "EVEN_ERR_UNKNOWN");
  assert_int_equal(even_status_exit_code((even_status)999), 1);
}

static void a_failure_is_recorded_with_its_place(void **state) {
  (void)state;
  assert_int_equal(even_fail(EVEN_ERR_INPUT, "line %d", 7), EVEN_ERR_INPUT);
  const even_error *error = even_error_last();
  assert_string_equal(error->what, "line 7");
  assert_string_equal(error->fix, "");
  assert_non_null(strstr(error->file, "test_status.c"));
  assert_true(error->line > 0);
  assert_int_equal(error->rank, -1);
  assert_int_equal(even_error_place(3, "cuda:1"), EVEN_ERR_INPUT);
  assert_int_equal(error->rank, 3);
  assert_string_equal(error->device, "cuda:1");
  (void)even_error_place(-1, NULL);
  assert_int_equal(error->rank, 3);
}

static void the_first_fix_is_kept(void **state) {
  (void)state;
  (void)even_fail(EVEN_ERR_INPUT, "first");
  (void)even_error_fix("near the cause");
  (void)even_error_fix("further away");
  assert_string_equal(even_error_last()->fix, "near the cause");
  (void)even_fail(EVEN_ERR_INPUT, "second");
  assert_string_equal(even_error_last()->fix, "");
}

static void errno_gives_the_status_and_the_reason(void **state) {
  (void)state;
  assert_int_equal(even_fail_errno(ENOSPC, "disk %s", "a"), EVEN_ERR_NO_SPACE);
  assert_non_null(strstr(even_error_last()->what, "disk a: No space left"));
  assert_int_equal(even_error_last()->system_error, ENOSPC);
  assert_int_equal(even_fail_errno(ENOMEM, "x"), EVEN_ERR_MEMORY);
  assert_int_equal(even_fail_errno(EACCES, "x"), EVEN_ERR_PERMISSION);
  assert_int_equal(even_fail_errno(EADDRINUSE, "x"), EVEN_ERR_IN_USE);
  assert_int_equal(even_fail_errno(ENOENT, "x"), EVEN_ERR_NOT_FOUND);
  assert_int_equal(even_fail_errno(EIO, "x"), EVEN_ERR_SYSTEM);
}

static void own_text_may_be_an_argument(void **state) {
  (void)state;
  (void)even_fail(EVEN_ERR_INPUT, "inner");
  (void)even_fail(EVEN_ERR_INPUT, "outer: %s", even_error_last()->what);
  assert_string_equal(even_error_last()->what, "outer: inner");
  (void)even_error_prefix("%s", even_error_last()->what);
  assert_string_equal(even_error_last()->what, "outer: inner: outer: inner");
}

static void long_texts_are_cut_not_overrun(void **state) {
  char word[2000];
  (void)state;
  memset(word, 'w', sizeof word - 1);
  word[sizeof word - 1] = '\0';
  (void)even_fail(EVEN_ERR_INPUT, "%s", word);
  (void)even_error_prefix("%s", word);
  (void)even_error_fix("%s", word);
  (void)even_error_place(1, word);
  const even_error *error = even_error_last();
  assert_true(strlen(error->what) < sizeof error->what);
  assert_true(strlen(error->fix) < sizeof error->fix);
  assert_true(strlen(error->device) < sizeof error->device);
  (void)even_fail_errno(EIO, "%s", word);
  assert_non_null(strstr(error->what, "Input/output error"));
}

static void words_of_another_status_are_not_taken(void **state) {
  (void)state;
  (void)even_fail(EVEN_ERR_NOT_FOUND, "a folder is gone");
  (void)even_error_fix("make it");
  assert_string_equal(even_error_of(EVEN_ERR_NOT_FOUND)->what, "a folder is gone");
  assert_string_equal(even_error_of(EVEN_ERR_NOT_FOUND)->fix, "make it");
  const even_error *error = even_error_of(EVEN_ERR_STATE);
  assert_int_equal(error->status, EVEN_ERR_STATE);
  assert_string_equal(error->what, even_status_text(EVEN_ERR_STATE));
  assert_string_equal(error->fix, "");
  even_error_clear();
  assert_string_equal(even_error_of(EVEN_ERR_STATE)->what, even_status_text(EVEN_ERR_STATE));
}

static void *fail_elsewhere(void *unused) {
  (void)unused;
  (void)even_fail(EVEN_ERR_DEVICE, "theirs");
  return NULL;
}

static void each_thread_has_its_own(void **state) {
  pthread_t thread;
  (void)state;
  (void)even_fail(EVEN_ERR_INPUT, "mine");
  assert_int_equal(pthread_create(&thread, NULL, fail_elsewhere, NULL), 0);
  assert_int_equal(pthread_join(thread, NULL), 0);
  assert_string_equal(even_error_last()->what, "mine");
}

static void the_version_is_the_same_in_words_and_numbers(void **state) {
  char words[32];
  (void)state;
  (void)snprintf(words, sizeof words, "%d.%d.%d", EVEN_VERSION_MAJOR, EVEN_VERSION_MINOR, EVEN_VERSION_PATCH);
  assert_string_equal(words, EVEN_VERSION);
  assert_string_equal(even_version(), EVEN_VERSION);
  const char *commit = even_commit();
  size_t digits = strspn(commit, "0123456789abcdef");
  assert_true(commit[digits] == '\0' || (digits > 0 && strcmp(commit + digits, "+") == 0));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(every_status_has_words_and_a_code, forget),
      cmocka_unit_test_teardown(a_failure_is_recorded_with_its_place, forget),
      cmocka_unit_test_teardown(the_first_fix_is_kept, forget),
      cmocka_unit_test_teardown(errno_gives_the_status_and_the_reason, forget),
      cmocka_unit_test_teardown(own_text_may_be_an_argument, forget),
      cmocka_unit_test_teardown(long_texts_are_cut_not_overrun, forget),
      cmocka_unit_test_teardown(words_of_another_status_are_not_taken, forget),
      cmocka_unit_test_teardown(each_thread_has_its_own, forget),
      cmocka_unit_test(the_version_is_the_same_in_words_and_numbers),
  };
  return cmocka_run_group_tests_name("base_status", tests, NULL, NULL);
}
