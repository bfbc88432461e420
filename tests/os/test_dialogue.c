/* Talking with a child in lines. */
#include "os/dialogue.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/fault.h"

enum { PATIENCE_MS = 150000 };

static int teardown(void **state) {
  (void)state;
  fault_reset();
  return 0;
}

static even_status start(const char *script, even_dialogue *out) {
  char shell[] = "sh";
  char option[] = "-c";
  char text[512];
  char *arguments[] = {shell, option, text, NULL};
  strncpy(text, script, sizeof text - 1);
  text[sizeof text - 1] = '\0';
  return even_dialogue_start(arguments, out);
}

static const char *hear(even_dialogue *dialogue) {
  const char *line = NULL;
  assert_int_equal(even_dialogue_hear(dialogue, PATIENCE_MS, &line), EVEN_OK);
  return line;
}

static void asks_and_answers(void **state) {
  even_dialogue dialogue;
  (void)state;
  assert_int_equal(start("while read x <&$EVENSTEP_REQUESTS_FD; do echo \"you said $x\"; done", &dialogue), EVEN_OK);
  assert_int_equal(even_dialogue_say(&dialogue, "one"), EVEN_OK);
  assert_string_equal(hear(&dialogue), "you said one");
  assert_int_equal(even_dialogue_say(&dialogue, "two"), EVEN_OK);
  assert_string_equal(hear(&dialogue), "you said two");
  even_dialogue_end(&dialogue);
}

/* It reads no descriptor that another host would not have. */
static void what_is_typed_is_its_standard_input(void **state) {
  char shell[] = "sh";
  char option[] = "-c";
  char script[] = "echo \"${EVENSTEP_REQUESTS_FD:-none}\"; while read x; do echo \"you typed $x\"; done; echo end";
  char *arguments[] = {shell, option, script, NULL};
  even_dialogue dialogue;
  (void)state;
  assert_int_equal(even_dialogue_start_typed(arguments, &dialogue), EVEN_OK);
  assert_string_equal(hear(&dialogue), "none");
  assert_int_equal(even_dialogue_say(&dialogue, "one"), EVEN_OK);
  assert_string_equal(hear(&dialogue), "you typed one");
  even_dialogue_finish(&dialogue);
  assert_string_equal(hear(&dialogue), "end");
  assert_null(hear(&dialogue));
  even_dialogue_end(&dialogue);
}

static void several_lines_and_a_rest_without_newline(void **state) {
  even_dialogue dialogue;
  (void)state;
  assert_int_equal(start("printf 'a\\n\\nlast'; echo 'warning' >&2; echo 'it is broken ' >&2", &dialogue), EVEN_OK);
  assert_string_equal(hear(&dialogue), "a");
  assert_string_equal(hear(&dialogue), "");
  assert_string_equal(hear(&dialogue), "last");
  assert_null(hear(&dialogue));
  assert_null(hear(&dialogue));
  even_dialogue_end(&dialogue);
}

/* More in all than is kept at a time is heard line by line; a line beyond that is said to be too long. */
static void much_is_heard_in_lines(void **state) {
  even_dialogue dialogue;
  (void)state;
  assert_int_equal(start("x=$(head -c 1000000 /dev/zero | tr '\\0' x); for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 "
                         "17 18 19 20; do read go <&$EVENSTEP_REQUESTS_FD; echo $x; done",
                         &dialogue),
                   EVEN_OK);
  for (int i = 0; i < 20; i++) {
    assert_int_equal(even_dialogue_say(&dialogue, "go"), EVEN_OK);
    assert_int_equal(strlen(hear(&dialogue)), 1000000);
  }
  even_dialogue_end(&dialogue);
  const char *line = NULL;
  assert_int_equal(start("cat /dev/zero", &dialogue), EVEN_OK);
  assert_int_equal(even_dialogue_hear(&dialogue, PATIENCE_MS, &line), EVEN_ERR_INPUT);
  even_dialogue_end(&dialogue);
}

static void the_complaint_is_its_last_word(void **state) {
  even_dialogue dialogue;
  char words[64];
  (void)state;
  assert_int_equal(start("echo 'warning' >&2; echo 'it is broken: (1).  ' >&2; echo '-----' >&2; echo >&2; exec 2>&-; "
                         "echo done; exit 3",
                         &dialogue),
                   EVEN_OK);
  while (hear(&dialogue) != NULL) {
  }
  even_dialogue_complaint(&dialogue, words, sizeof words);
  assert_string_equal(words, "it is broken: (1).");
  even_dialogue_fix(&dialogue, words, sizeof words);
  assert_string_equal(words, "");
  even_dialogue_end(&dialogue);
}

static void what_to_do_about_it_is_told_apart(void **state) {
  static const struct {
    const char *said, *complaint, *fix;
  } cases[] = {
      {"begins\\nevenstep: no such file\\n  fix: name one that is there\\n", "evenstep: no such file",
       "name one that is there"},
      {"  fix: name one", "  fix: name one", "name one"},
      {"evenstep: no  fix: here", "evenstep: no  fix: here", ""},
      {"evenstep: nothing can be done\\n  fix: ", "  fix:", ""},
      {"", "", ""},
  };
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    even_dialogue dialogue;
    char script[256];
    char words[64];
    (void)snprintf(script, sizeof script, "printf '%s' >&2; exec 2>&-; echo done; exit 3", cases[i].said);
    assert_int_equal(start(script, &dialogue), EVEN_OK);
    while (hear(&dialogue) != NULL) {
    }
    even_dialogue_complaint(&dialogue, words, sizeof words);
    assert_string_equal(words, cases[i].complaint);
    even_dialogue_fix(&dialogue, words, sizeof words);
    assert_string_equal(words, cases[i].fix);
    even_dialogue_end(&dialogue);
  }
}

static void silence_is_a_timeout(void **state) {
  even_dialogue dialogue;
  const char *line = NULL;
  (void)state;
  assert_int_equal(start("read x <&$EVENSTEP_REQUESTS_FD", &dialogue), EVEN_OK);
  assert_int_equal(even_dialogue_hear(&dialogue, 1, &line), EVEN_ERR_TIMEOUT);
  even_dialogue_end(&dialogue); /* ends a child that would wait for ever */
}

static void a_child_that_died_takes_no_one_along(void **state) {
  even_dialogue dialogue;
  (void)state;
  assert_int_equal(start("exit 1", &dialogue), EVEN_OK);
  assert_null(hear(&dialogue));
  even_process_wait(dialogue.process.pid);
  assert_int_not_equal(even_dialogue_say(&dialogue, "are you there"), EVEN_OK); /* not SIGPIPE */
  even_dialogue_end(&dialogue);
}

static void no_such_program(void **state) {
  even_dialogue dialogue;
  char name[] = "/nothing/evenstep-absent";
  char *arguments[] = {name, NULL};
  (void)state;
  assert_int_equal(even_dialogue_start(arguments, &dialogue), EVEN_ERR_NOT_FOUND);
}

static even_status talk(void *context) {
  even_dialogue dialogue;
  const char *line = NULL;
  (void)context;
  even_status status = start("read x <&$EVENSTEP_REQUESTS_FD; echo $x", &dialogue);
  if (status != EVEN_OK) {
    return status;
  }
  status = even_dialogue_say(&dialogue, "word");
  if (status == EVEN_OK) {
    status = even_dialogue_hear(&dialogue, PATIENCE_MS, &line);
  }
  even_dialogue_end(&dialogue);
  return status;
}

static void any_allocation_may_fail(void **state) {
  (void)state;
  assert_true(fault_each_allocation(talk, NULL) >= 2);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(asks_and_answers, teardown),
      cmocka_unit_test_teardown(what_is_typed_is_its_standard_input, teardown),
      cmocka_unit_test_teardown(several_lines_and_a_rest_without_newline, teardown),
      cmocka_unit_test_teardown(much_is_heard_in_lines, teardown),
      cmocka_unit_test_teardown(the_complaint_is_its_last_word, teardown),
      cmocka_unit_test_teardown(what_to_do_about_it_is_told_apart, teardown),
      cmocka_unit_test_teardown(silence_is_a_timeout, teardown),
      cmocka_unit_test_teardown(a_child_that_died_takes_no_one_along, teardown),
      cmocka_unit_test_teardown(no_such_program, teardown),
      cmocka_unit_test_teardown(any_allocation_may_fail, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
