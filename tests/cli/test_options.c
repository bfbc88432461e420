/* Options as a user types them: forms, operands, limits, and what is said of a slip. */
#include "base/fail.h"
#include "cli/command.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static bool quiet;
static bool hushed; /* of an earlier version */
static const char *name;
static int64_t ranks;
static double rate;

static const even_option OPTIONS[] = {
    {'q', "quiet", EVEN_OPTION_FLAG, &quiet, NULL, "says less", 0, 0},
    {0, "name", EVEN_OPTION_TEXT, &name, "NAME", "of the run", 0, 0},
    {'n', "ranks", EVEN_OPTION_INTEGER, &ranks, "N", "how many", 1, 4096},
    {0, "rate", EVEN_OPTION_NUMBER, &rate, "R,…", "a number", 0, 0},
    {0, "hushed", EVEN_OPTION_FLAG, &hushed, NULL, NULL, 0, 0},
};
enum { OPTION_COUNT = sizeof OPTIONS / sizeof OPTIONS[0], MOST_WORDS = 16 };

static char storage[MOST_WORDS][64];
static char *words[MOST_WORDS];
static int word_count;
static int operand;
static bool helped;

static even_status parse(bool stop, const char *line) {
  const even_usage usage = {"test", "evenstep test [options] …", NULL, NULL, stop};
  char text[256];
  char *rest = NULL;
  quiet = false;
  hushed = false;
  name = "default";
  ranks = 2;
  rate = 0.5;
  word_count = 0;
  (void)snprintf(text, sizeof text, "%s", line);
  for (char *word = strtok_r(text, " ", &rest); word != NULL; word = strtok_r(NULL, " ", &rest)) {
    (void)snprintf(storage[word_count], sizeof storage[0], "%s", word);
    words[word_count] = storage[word_count];
    word_count++;
  }
  return even_options_parse(&usage, OPTIONS, OPTION_COUNT, word_count, words, &operand, &helped);
}

static void assert_operands(const char *expected) {
  char joined[256] = "";
  for (int i = operand; i < word_count; i++) {
    size_t length = strlen(joined);
    (void)snprintf(joined + length, sizeof joined - length, "%s%s", length == 0 ? "" : " ", words[i]);
  }
  assert_string_equal(joined, expected);
}

static void nothing_keeps_the_defaults(void **state) {
  (void)state;
  assert_int_equal(parse(false, ""), EVEN_OK);
  assert_false(quiet);
  assert_string_equal(name, "default");
  assert_int_equal(ranks, 2);
  assert_operands("");
}

static void all_forms_are_understood(void **state) {
  (void)state;
  assert_int_equal(parse(false, "--quiet --name=a=b -n 4 --rate -1e-3"), EVEN_OK);
  assert_true(quiet);
  assert_string_equal(name, "a=b");
  assert_int_equal(ranks, 4);
  assert_true(rate == -1e-3);
  assert_int_equal(parse(false, "-n8 -q --name --odd"), EVEN_OK);
  assert_int_equal(ranks, 8);
  assert_string_equal(name, "--odd");
}

static void operands_may_stand_anywhere(void **state) {
  (void)state;
  assert_int_equal(parse(false, "one --name x two -q three -n 3"), EVEN_OK);
  assert_string_equal(name, "x");
  assert_true(quiet);
  assert_int_equal(ranks, 3);
  assert_operands("one two three");
  assert_int_equal(parse(false, "- one"), EVEN_OK);
  assert_operands("- one");
}

static void after_the_script_all_is_the_scripts(void **state) {
  (void)state;
  assert_int_equal(parse(true, "-n 3 script.py -n 9 --unknown"), EVEN_OK);
  assert_int_equal(ranks, 3);
  assert_operands("script.py -n 9 --unknown");
}

static void two_dashes_end_the_options(void **state) {
  (void)state;
  assert_int_equal(parse(false, "a -q -- --name b"), EVEN_OK);
  assert_true(quiet);
  assert_string_equal(name, "default");
  assert_operands("a --name b");
  assert_int_equal(parse(true, "-q -- -n"), EVEN_OK);
  assert_operands("-n");
}

static void assert_refused(const char *line, const char *what, const char *fix) {
  assert_int_equal(parse(false, line), EVEN_ERR_USAGE);
  if (strstr(even_error_last()->what, what) == NULL || strstr(even_error_last()->fix, fix) == NULL) {
    fail_msg("\"%s\" was answered with \"%s\", fix \"%s\"", line, even_error_last()->what, even_error_last()->fix);
  }
}

static void slips_are_named_with_the_nearest(void **state) {
  (void)state;
  assert_refused("--nmae x", "unknown option --nmae", "--name");
  assert_refused("--rnaks=3", "--rnaks=3", "did you mean --ranks");
  assert_refused("--hlep", "--hlep", "--help");
  assert_refused("-x", "unknown option -x", "evenstep test --help");
  assert_refused("--zzzzzzzzzzz", "unknown option", "evenstep test --help");
}

static void options_before_the_script_are_told_where_they_belong(void **state) {
  (void)state;
  assert_int_equal(parse(true, "--zzzzzzzzzzz 3 train.py"), EVEN_ERR_USAGE);
  assert_non_null(strstr(even_error_last()->fix, "options of the script come behind its name"));
  assert_int_equal(parse(true, "--rnaks 3 train.py"), EVEN_ERR_USAGE);
  assert_non_null(strstr(even_error_last()->fix, "did you mean --ranks"));
}

static void wrong_values_are_refused(void **state) {
  (void)state;
  assert_refused("-n 0", "out of range", "from 1 to 4096");
  assert_refused("-n 99999999999999999999", "--ranks", "");
  assert_refused("-n 3x", "whole number", "");
  assert_refused("-n", "wants N", "");
  assert_refused("--name", "wants NAME", "");
  assert_refused("--rate fast", "wants a number", "");
  assert_refused("--rate nan", "wants a number", "");
  assert_refused("--rate 1e999", "wants a number", "");
  assert_refused("--quiet=yes", "takes no value", "");
}

static void help_is_printed_and_ends_it(void **state) {
  char *text = NULL;
  size_t bytes = 0;
  const even_usage usage = {"test", "evenstep test [options]", "What it does.", "exit codes: 0", false};
  (void)state;
  FILE *stream = open_memstream(&text, &bytes);
  assert_non_null(stream);
  even_options_help(&usage, OPTIONS, OPTION_COUNT, stream);
  assert_int_equal(fclose(stream), 0);
  assert_non_null(strstr(text, "usage: evenstep test [options]"));
  assert_non_null(strstr(text, "-n, --ranks N"));
  assert_non_null(strstr(text, "-h, --help                       this text"));
  assert_non_null(strstr(text, "    --rate R,…                   a number")); /* … is one column */
  assert_non_null(strstr(text, "exit codes: 0"));
  free(text);
}

static void an_option_of_an_earlier_version_is_taken_and_not_told_of(void **state) {
  char *text = NULL;
  size_t bytes = 0;
  const even_usage usage = {"test", "evenstep test [options]", NULL, NULL, false};
  (void)state;
  assert_int_equal(parse(false, "--hushed one"), EVEN_OK);
  assert_true(hushed);
  assert_operands("one");
  FILE *stream = open_memstream(&text, &bytes);
  assert_non_null(stream);
  even_options_help(&usage, OPTIONS, OPTION_COUNT, stream);
  assert_int_equal(fclose(stream), 0);
  assert_null(strstr(text, "hushed"));
  free(text);
  assert_refused("--hushde", "unknown option", "see `evenstep test --help`");
}

/* Cleaning up may have cleared the record of the error: what was returned decides, and a failure is never a success. */
static void a_failure_without_a_record_is_a_failure(void **state) {
  (void)state;
  even_error_clear();
  assert_int_equal(even_cli_fail_of(EVEN_ERR_SYSTEM), 5);
  (void)even_fail(EVEN_ERR_INPUT, "something else since");
  assert_int_equal(even_cli_fail_of(EVEN_ERR_CORRUPT), 6);
  even_error_clear();
  assert_int_not_equal(even_cli_fail(), 0);
  (void)even_fail(EVEN_ERR_INPUT, "the cause");
  assert_int_equal(even_cli_fail(), 3);
}

static int silent(void **state) {
  (void)state;
  even_error_clear();
  return 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(nothing_keeps_the_defaults, silent),
      cmocka_unit_test_teardown(all_forms_are_understood, silent),
      cmocka_unit_test_teardown(operands_may_stand_anywhere, silent),
      cmocka_unit_test_teardown(after_the_script_all_is_the_scripts, silent),
      cmocka_unit_test_teardown(two_dashes_end_the_options, silent),
      cmocka_unit_test_teardown(slips_are_named_with_the_nearest, silent),
      cmocka_unit_test_teardown(options_before_the_script_are_told_where_they_belong, silent),
      cmocka_unit_test_teardown(wrong_values_are_refused, silent),
      cmocka_unit_test_teardown(help_is_printed_and_ends_it, silent),
      cmocka_unit_test_teardown(an_option_of_an_earlier_version_is_taken_and_not_told_of, silent),
      cmocka_unit_test_teardown(a_failure_without_a_record_is_a_failure, silent),
  };
  return cmocka_run_group_tests_name("cli_options", tests, NULL, NULL);
}
