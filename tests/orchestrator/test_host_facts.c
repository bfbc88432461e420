/* What two hosts have of what a script needs, and how that differs. */
#include "base/fail.h"
#include "base/json_reader.h"
#include "checkpoint/scratch.h"
#include "orchestrator/host_agent.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void make(const char *command) {
  char text[1024];
  (void)snprintf(text, sizeof text, "cd %s && %s", scratch, command);
  assert_int_equal(system(text), 0);
}

static json_t *facts_of(const char *folder, const char *script) {
  even_text text = EVEN_TEXT_EMPTY;
  json_t *facts = NULL;
  char path[256];
  (void)snprintf(path, sizeof path, "%s", scratch_path(folder));
  const even_host_needs needs = {.folder = path, .script = script};
  assert_int_equal(even_host_facts_read(&needs, NULL, &text), EVEN_OK);
  assert_int_equal(even_json_parse("facts", text.data, text.length, &facts), EVEN_OK);
  even_text_free(&text);
  return facts;
}

/* "" where they are the same. */
static const char *difference(void) {
  json_t *ours = facts_of("here", "train.py");
  json_t *theirs = facts_of("there", "train.py");
  even_status status = even_host_facts_compare(ours, theirs, "b", "/x");
  json_decref(ours);
  json_decref(theirs);
  return status == EVEN_OK ? "" : even_error_last()->what;
}

static void files_below_the_script_are_compared(void **state) {
  (void)state;
  make(
      "mkdir -p here/layers/deep here/.hidden here/venv here/data && echo a > here/train.py && "
      "echo b > here/layers/deep/block.py && echo c > here/layers/__init__.py && cp -r here there");
  assert_string_equal(difference(), "");
  make("echo other > there/layers/deep/block.py");
  const char *words = difference();
  const char *at = strstr(words, "host b differs from this one: layers/deep/block.py is another one there (");
  assert_non_null(at);
  assert_int_equal(strspn(strchr(at, '(') + 1, "0123456789abcdef"), 16);
  assert_non_null(strstr(at, ", here "));
  make("cp here/layers/deep/block.py there/layers/deep/block.py && rm there/layers/__init__.py");
  assert_non_null(strstr(difference(), "layers/__init__.py is not there"));
  make("echo c > there/layers/__init__.py && echo d > there/layers/new.py");
  assert_non_null(strstr(difference(), "layers/new.py is there alone"));
}

/* What Python imports nothing from. */
static void the_rest_is_passed_over(void **state) {
  (void)state;
  make(
      "mkdir -p here/runs-1 there/runs-1 there/.hidden there/venv there/node_modules && touch there/venv/pyvenv.cfg && "
      "echo a > here/train.py && cp here/train.py there/ && echo x > there/runs-1/x.py && echo x > there/.hidden/x.py "
      "&& "
      "echo x > there/venv/x.py && echo x > there/node_modules/x.py && ln -s .. there/itself && ln -s .. here/itself "
      "&& "
      "mkdir there/data && echo x > there/data/readme.txt");
  assert_string_equal(difference(), "");
}

static void modules_are_compared(void **state) {
  static const char form[] =
      "{\"folder\":true,\"machine\":\"m\",\"files\":{},\"packages\":{\"modules\":{\"numpy\":\"%s\",\"pandas\":\"%s\","
      "\"rare\":\"%s\"}}}";
  char ours[256];
  char theirs[256];
  json_t *here = NULL;
  json_t *there = NULL;
  (void)state;
  (void)snprintf(ours, sizeof ours, form, "2.0", "2.1", "missing");
  (void)snprintf(theirs, sizeof theirs, form, "1.9", "missing", "1.0");
  assert_int_equal(even_json_parse("ours", ours, strlen(ours), &here), EVEN_OK);
  assert_int_equal(even_json_parse("theirs", theirs, strlen(theirs), &there), EVEN_OK);
  assert_int_equal(even_host_facts_compare(here, here, "b", "/x"), EVEN_OK);
  assert_int_equal(even_host_facts_compare(here, there, "b", "/x"), EVEN_ERR_MISMATCH);
  const char *words = even_error_last()->what;
  assert_non_null(strstr(words, "module numpy is 1.9 there and 2.0 here"));
  assert_non_null(strstr(words, "module pandas, which the script imports, is missing there (2.1 here)"));
  assert_null(strstr(words, "rare"));
  json_decref(here);
  json_decref(there);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(files_below_the_script_are_compared, scratch_make, scratch_remove),
      cmocka_unit_test_setup_teardown(the_rest_is_passed_over, scratch_make, scratch_remove),
      cmocka_unit_test(modules_are_compared),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
