/* Which interpreter is taken: the wished one, that of `python -m evenstep`, the one beside the program,
 * $EVENSTEP_PYTHON. */
#include "base/fail.h"
#include "cli/python.h"
#include "os/path.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static even_text beside = EVEN_TEXT_EMPTY;
static even_text found = EVEN_TEXT_EMPTY;

/* An installation: this program has an interpreter beside it. */
static int install(void **state) {
  even_text program = EVEN_TEXT_EMPTY;
  (void)state;
  if (even_program_path(&program) != EVEN_OK) {
    return -1;
  }
  even_text_append(&beside, program.data, (size_t)(strrchr(program.data, '/') + 1 - program.data));
  even_text_add(&beside, "python3");
  even_text_free(&program);
  if (even_text_status(&beside) != EVEN_OK) {
    return -1;
  }
  (void)unlink(beside.data);
  return symlink("/bin/sh", beside.data);
}

static int remove_all(void **state) {
  (void)state;
  (void)unlink(beside.data);
  even_text_free(&beside);
  even_text_free(&found);
  return 0;
}

static void assert_taken(const char *wish, const char *expected) {
  assert_int_equal(even_cli_python(wish, &found), EVEN_OK);
  assert_string_equal(found.data, expected);
}

static void whoever_says_it_closest_is_taken(void **state) {
  (void)state;
  assert_int_equal(setenv("EVENSTEP_PYTHON", "of-the-variable", 1), 0);
  assert_int_equal(setenv("EVENSTEP_MAIN_PYTHON", "/of/python-m", 1), 0);
  assert_taken("wished", "wished");
  assert_taken(NULL, "/of/python-m");
  assert_int_equal(setenv("EVENSTEP_MAIN_PYTHON", "", 1), 0);
  assert_taken(NULL, beside.data);
  assert_int_equal(unsetenv("EVENSTEP_MAIN_PYTHON"), 0);
  assert_taken(NULL, beside.data);
  assert_int_equal(unlink(beside.data), 0);
  assert_taken(NULL, "of-the-variable");
  assert_int_equal(unsetenv("EVENSTEP_PYTHON"), 0);
  assert_taken(NULL, "python3");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(whoever_says_it_closest_is_taken),
  };
  return cmocka_run_group_tests_name("cli_python", tests, install, remove_all);
}
