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

/* What "here" has of these words is there in the second folder, too, or what differs. */
static const char *data_differs(const char *const *words, size_t count, bool whole) {
  json_t *paths = NULL;
  json_t *facts[2] = {NULL, NULL};
  static const char *const folders[2] = {"here", "there"};
  char path[256];
  (void)snprintf(path, sizeof path, "%s", scratch_path("here"));
  assert_int_equal(even_host_data_find(path, words, count, &paths), EVEN_OK);
  for (int i = 0; i < 2; i++) {
    even_text text = EVEN_TEXT_EMPTY;
    (void)snprintf(path, sizeof path, "%s", scratch_path(folders[i]));
    const even_host_needs needs = {.folder = path, .data = paths};
    assert_int_equal(even_host_facts_read(&needs, NULL, &text), EVEN_OK);
    assert_int_equal(even_json_parse("facts", text.data, text.length, &facts[i]), EVEN_OK);
    even_text_free(&text);
  }
  even_status status =
      even_host_data_compare(json_object_get(facts[0], "data"), json_object_get(facts[1], "data"), "b", whole);
  json_decref(paths);
  json_decref(facts[0]);
  json_decref(facts[1]);
  return status == EVEN_OK ? "" : even_error_last()->what;
}

static void what_the_command_names_is_compared(void **state) {
  static const char *const words[] = {"--steps",      "7", "--data=images", "data.path=a.bin", "a.bin", "empty",
                                      "nothing-here", "",  "--out=",        "\xff\xfe"};
  enum { COUNT = sizeof words / sizeof words[0] };
  json_t *paths = NULL;
  (void)state;
  make("mkdir -p here/images here/empty && echo x > here/images/1 && echo abc > here/a.bin && cp -r here there");
  assert_int_equal(even_host_data_find(scratch_path("here"), words, COUNT, &paths), EVEN_OK);
  char *list = json_dumps(paths, JSON_COMPACT);
  assert_string_equal(list, "[\"images\",\"a.bin\",\"empty\"]");
  free(list);
  json_decref(paths);
  assert_string_equal(data_differs(words, COUNT, true), "");
  make("rm there/images/1 && echo abd > there/a.bin && rmdir there/empty");
  const char *said = data_differs(words, COUNT, true);
  assert_non_null(strstr(said, "host b differs from this one in what the command names: folder images holds nothing"));
  assert_non_null(strstr(said, "a.bin has another content there"));
  assert_non_null(strstr(said, "empty is not there"));
  assert_non_null(strstr(even_error_last()->fix, "rsync -a images"));
  make("echo y > there/images/2 && echo abcd > there/a.bin && echo x > there/empty");
  assert_string_equal(data_differs(words, COUNT, true),
                      "host b differs from this one in what the command names: a.bin has 5 bytes there and 4 here; "
                      "empty is a file there and a folder here");
  make("rm there/empty && mkdir there/empty");
  assert_string_equal(data_differs(words, COUNT, false), ""); /* of one that joins: it may have changed by the job */
  assert_int_equal(setenv("EVENSTEP_CHECK_DATA", "off", 1), 0);
  assert_string_equal(data_differs(words, COUNT, true), "");
  assert_int_equal(setenv("EVENSTEP_CHECK_DATA", "strict", 1), 0);
  assert_string_not_equal(data_differs(words, COUNT, true), "");
  assert_int_equal(setenv("EVENSTEP_CHECK_DATA", "maybe", 1), 0);
  assert_int_equal(even_host_data_find("/", words, COUNT, &paths), EVEN_ERR_USAGE);
  json_decref(paths);
  assert_int_equal(unsetenv("EVENSTEP_CHECK_DATA"), 0);
}

/* Of a large file pieces are looked at: its beginning, its end, and some between. */
static void large_files_are_compared_by_pieces(void **state) {
  static const char *const words[] = {"big"};
  (void)state;
  make("mkdir here there && truncate -s 40000000 here/big && cp --sparse=always here/big there/");
  assert_string_equal(data_differs(words, 1, true), "");
  make("printf x | dd of=there/big bs=1 seek=39999999 conv=notrunc status=none");
  assert_non_null(strstr(data_differs(words, 1, true), "big has another content there"));
  make("cp --sparse=always here/big there/ && printf x | dd of=there/big bs=1 seek=0 conv=notrunc status=none");
  assert_non_null(strstr(data_differs(words, 1, true), "big has another content there"));
  make("truncate -s 30000000 there/big");
  assert_non_null(strstr(data_differs(words, 1, true), "big has 30000000 bytes there and 40000000 here"));
  make("rm there/big && mkfifo there/big");
  assert_non_null(strstr(data_differs(words, 1, true), "big is a device or pipe there and a file here"));
}

static void devices_have_their_strength(void **state) {
  (void)state;
  even_device items[3] = {
      {.name = "cpu:0", .strength = 30}, {.name = "cpu:1"}, {.name = "cpu:2", .strength = 4, .strength_in_c = true}};
  const even_device_list devices = {items, 3};
  even_device_list heard;
  even_text text = EVEN_TEXT_EMPTY;
  json_t *facts = NULL;
  const even_host_needs needs = {.folder = scratch, .profile_trouble = "not a profile"};
  assert_int_equal(even_host_facts_read(&needs, &devices, &text), EVEN_OK);
  assert_int_equal(even_json_parse("facts", text.data, text.length, &facts), EVEN_OK);
  assert_string_equal(even_json_text(facts, "profile_trouble"), "not a profile");
  assert_int_equal(even_host_facts_devices(facts, &heard), EVEN_OK);
  assert_int_equal(heard.count, 3);
  for (size_t i = 0; i < 3; i++) {
    assert_float_equal(heard.items[i].strength, items[i].strength, 0);
    assert_true(heard.items[i].strength_in_c == items[i].strength_in_c);
  }
  even_device_list_free(&heard);
  json_decref(facts);
  even_text_free(&text);
}

/* Who talks to the leader may say anything. */
static void what_is_no_strength_counts_as_none(void **state) {
  static const char said[] =
      "{\"devices\": [{\"name\": \"a\", \"strength\": -1}, {\"name\": \"b\", \"strength_in_c\": \"fast\"},"
      " {\"name\": \"c\", \"strength\": null}]}";
  (void)state;
  even_device_list heard;
  json_t *facts = NULL;
  assert_int_equal(even_json_parse("facts", said, sizeof said - 1, &facts), EVEN_OK);
  assert_int_equal(even_host_facts_devices(facts, &heard), EVEN_OK);
  for (size_t i = 0; i < 3; i++) {
    assert_float_equal(heard.items[i].strength, 0, 0);
    assert_false(heard.items[i].strength_in_c);
  }
  even_device_list_free(&heard);
  json_decref(facts);
}

/* Lists that are too long end somewhere; nothing twice. */
static void no_list_is_without_end(void **state) {
  const char *words[300];
  char names[300][8];
  json_t *paths = NULL;
  (void)state;
  make("mkdir here && cd here && for i in $(seq 0 149); do : > f$i; done");
  for (size_t i = 0; i < 300; i++) {
    (void)snprintf(names[i], sizeof names[i], "f%zu", i / 2);
    words[i] = names[i];
  }
  assert_int_equal(even_host_data_find(scratch_path("here"), words, 300, &paths), EVEN_OK);
  assert_int_equal(json_array_size(paths), 64);
  assert_string_equal(json_string_value(json_array_get(paths, 63)), "f63");
  json_decref(paths);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(files_below_the_script_are_compared, scratch_make, scratch_remove),
      cmocka_unit_test_setup_teardown(the_rest_is_passed_over, scratch_make, scratch_remove),
      cmocka_unit_test(modules_are_compared),
      cmocka_unit_test_setup_teardown(what_the_command_names_is_compared, scratch_make, scratch_remove),
      cmocka_unit_test_setup_teardown(large_files_are_compared_by_pieces, scratch_make, scratch_remove),
      cmocka_unit_test_setup_teardown(devices_have_their_strength, scratch_make, scratch_remove),
      cmocka_unit_test(what_is_no_strength_counts_as_none),
      cmocka_unit_test_setup_teardown(no_list_is_without_end, scratch_make, scratch_remove),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
