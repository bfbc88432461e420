/* Of a job's options those that `evenstep chaos` passes on to both runs, and those that it refuses, with the reason. */
#include "base/alloc.h"
#include "base/fail.h"
#include "cli/chaos_command.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 24 };

static even_chaos_command *on;
static char storage[MOST][64];

static int open_one(void **state) {
  (void)state;
  return EVEN_NEW(&on) == EVEN_OK ? 0 : -1;
}

static int close_one(void **state) {
  (void)state;
  even_text_free(&on->program);
  even_free(on);
  return 0;
}

/* The words as on a command line; those of both runs are in on->words. */
static even_status take(const char *line) {
  const even_usage usage = {.command = "chaos", .stop_at_operand = true};
  even_option table[EVEN_CHAOS_OPTION_ROOM];
  char *words[MOST];
  char text[256];
  char *rest = NULL;
  int count = 0;
  int operand = 0;
  bool helped = false;
  even_text_free(&on->program);
  *on = (even_chaos_command){.kinds = "all"};
  even_job_options_defaults(&on->job);
  size_t known = even_chaos_declare(on, table);
  (void)snprintf(text, sizeof text, "%s train.py --ranks-of-its-own", line);
  for (char *word = strtok_r(text, " ", &rest); word != NULL; word = strtok_r(NULL, " ", &rest)) {
    (void)snprintf(storage[count], sizeof storage[0], "%s", word);
    words[count] = storage[count];
    count++;
  }
  EVEN_TRY(even_options_parse(&usage, table, known, count, words, &operand, &helped));
  EVEN_TRY(even_chaos_check_options(on));
  return even_chaos_make_words(on, (size_t)(count - operand), words + operand);
}

/* Of what goes before the script. */
static bool passes(const char *option, const char *value) {
  for (size_t i = 0; i + 1 < on->script; i++) {
    if (strcmp(on->words[i], option) == 0) {
      return value != NULL && strcmp(on->words[i + 1], value) == 0;
    }
  }
  return false;
}

static bool has(const char *option) {
  for (size_t i = 0; i < on->script; i++) {
    if (strcmp(on->words[i], option) == 0) {
      return true;
    }
  }
  return false;
}

static void what_a_job_has_is_passed_on(void **state) {
  (void)state;
  assert_int_equal(take("-n 3 --checkpoint-memory 5 --max-ranks 4"), EVEN_OK);
  assert_true(passes("--ranks", "3"));
  assert_true(passes("--checkpoint-memory", "5"));
  assert_true(passes("--max-ranks", "4"));
  assert_string_equal(on->words[on->script], "train.py");
  assert_string_equal(on->words[on->script + 1], "--ranks-of-its-own");
  assert_int_equal(take("-n 2 --set-aside"), EVEN_OK);
  assert_true(has("--set-aside"));
  assert_int_equal(take("--namespaces --checkpoint-memory 5 --memory-copies 0"), EVEN_OK);
  assert_true(passes("--memory-copies", "0"));
}

static void hosts_of_the_users_own_are_passed_on(void **state) {
  (void)state;
  assert_int_equal(take("--hosts here:2,there --ssh rsh --address 10.0.0.1 --checkpoint-copies 1"), EVEN_OK);
  assert_true(passes("--hosts", "here:2,there"));
  assert_true(passes("--ssh", "rsh"));
  assert_true(passes("--address", "10.0.0.1"));
  assert_true(passes("--checkpoint-copies", "1"));
  assert_true(has("--no-replace-leader"));
  assert_false(has("--no-pin"));
  assert_int_equal(take("--hosts here,there --witness yonder"), EVEN_OK);
  assert_true(passes("--witness", "yonder"));
  assert_false(has("--no-replace-leader")); /* it is what a witness is for */
}

static void what_was_not_given_is_not_passed_on(void **state) {
  static const char *const options[] = {
      "--checkpoint-memory", "--memory-copies", "--max-ranks",        "--set-aside", "--hosts",
      "--witness",           "--ssh",           "--checkpoint-copies"};
  (void)state;
  assert_int_equal(take("-n 2"), EVEN_OK);
  for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
    for (size_t k = 0; k < on->word_count; k++) {
      assert_string_not_equal(on->words[k], options[i]);
    }
  }
}

static void what_cannot_be_is_refused_with_the_reason(void **state) {
  static const char *const lines[][3] = {
      {"--checkpoint-copies 1", "share this machine's disk", "--checkpoint-memory"},
      {"--witness yonder", "--witness yonder: none of the hosts", "--replace-leader"},
      {"--namespaces --hosts 3 --witness yonder", "--witness yonder: none of the hosts", "--hosts here,there"},
      {"--checkpoint-memory 5 --memory-copies 1", "--memory-copies is of several hosts", "--namespaces"},
      {"--hosts 3", "a number of hosts is of --namespaces", "--hosts here,there"},
      {"--hosts auto", "a number of hosts is of --namespaces", "--hosts here,there"},
      {"--namespaces --hosts 4", "--namespaces makes 2 or 3 hosts", "give 2 or 3"},
      {"--namespaces --hosts here,there", "--namespaces makes 2 or 3 hosts", "leave --namespaces out"},
      {"--hosts here,there --replace-leader", "could not be seen from here", "started again from here"},
      {"--hosts here,there --devices cpu:0", "--devices is of this host", "leave out one"},
      {"--ssh rsh", "--ssh is of hosts of your own", "--hosts here,there"},
  };
  (void)state;
  for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
    assert_int_equal(take(lines[i][0]), EVEN_ERR_USAGE);
    assert_non_null(strstr(even_error_last()->what, lines[i][1]));
    assert_non_null(strstr(even_error_last()->fix, lines[i][2]));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(what_a_job_has_is_passed_on, open_one, close_one),
      cmocka_unit_test_setup_teardown(hosts_of_the_users_own_are_passed_on, open_one, close_one),
      cmocka_unit_test_setup_teardown(what_was_not_given_is_not_passed_on, open_one, close_one),
      cmocka_unit_test_setup_teardown(what_cannot_be_is_refused_with_the_reason, open_one, close_one),
  };
  return cmocka_run_group_tests_name("cli_chaos_options", tests, NULL, NULL);
}
