/* Keys, the file in which hosts that a launcher has started meet, and addresses and names in its place. */
#include "orchestrator/launched.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "os/calls.h"
#include "os/file.h"
#include "support/fault.h"

#include <dirent.h>
#include <errno.h>
#include <netdb.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static const char KEY[] = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

/* ---- keys ---- */

static char folder[64];
static char path[128];

static int make_folder(void **state) {
  (void)state;
  (void)snprintf(folder, sizeof folder, "evenstep-test-XXXXXX");
  if (mkdtemp(folder) == NULL) {
    return -1;
  }
  (void)snprintf(path, sizeof path, "%s/.evenstep-night", folder);
  return 0;
}

static int remove_folder(void **state) {
  (void)state;
  fault_reset();
  even_os = even_os_real;
  (void)unsetenv("EVENSTEP_JOB_KEY");
  (void)unsetenv("EVENSTEP_JOB_KEY_FILE");
  (void)unlink(path);
  return rmdir(folder);
}

static void write_file(const char *text, mode_t mode) {
  assert_int_equal(even_file_replace_private(path, text, strlen(text)), EVEN_OK);
  assert_int_equal(chmod(path, mode), 0);
}

static uid_t somebody_else(void) {
  return even_os_real.geteuid() + 1;
}

static void a_key_is_taken_from_the_environment_or_a_file_of_ones_own(void **state) {
  char digits[EVEN_KEY_DIGITS + 1];
  char line[EVEN_KEY_DIGITS + 2];
  (void)state;
  assert_int_equal(even_job_key_read(digits), EVEN_OK);
  assert_string_equal(digits, "");
  assert_int_equal(setenv("EVENSTEP_JOB_KEY", KEY, 1), 0);
  assert_int_equal(even_job_key_read(digits), EVEN_OK);
  assert_string_equal(digits, KEY);
  assert_null(getenv("EVENSTEP_JOB_KEY"));
  assert_int_equal(setenv("EVENSTEP_JOB_KEY", "secret", 1), 0);
  assert_int_equal(even_job_key_read(digits), EVEN_ERR_INPUT);
  assert_null(strstr(even_error_last()->what, "secret"));
  assert_non_null(strstr(even_error_last()->fix, "openssl rand -hex 32"));

  (void)snprintf(line, sizeof line, "%s\n", KEY);
  assert_int_equal(setenv("EVENSTEP_JOB_KEY_FILE", path, 1), 0);
  assert_int_equal(even_job_key_read(digits), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->fix, "openssl rand -hex 32"));
  write_file(line, 0600);
  assert_int_equal(even_job_key_read(digits), EVEN_OK);
  assert_string_equal(digits, KEY);
  write_file(line, 0644);
  assert_int_equal(even_job_key_read(digits), EVEN_ERR_PERMISSION);
  assert_non_null(strstr(even_error_last()->what, "is open to others (mode 0644)"));
  write_file(line, 0600);
  char link_to_it[256];
  (void)snprintf(link_to_it, sizeof link_to_it, "%s-link", path);
  assert_int_equal(symlink(path, link_to_it), 0); /* as a secret of Kubernetes is mounted */
  assert_int_equal(setenv("EVENSTEP_JOB_KEY_FILE", link_to_it, 1), 0);
  assert_int_equal(even_job_key_read(digits), EVEN_ERR_INPUT);
  assert_non_null(strstr(even_error_last()->what, "is a symbolic link"));
  assert_non_null(strstr(even_error_last()->fix, "readlink -f"));
  assert_int_equal(unlink(link_to_it), 0);
  assert_int_equal(setenv("EVENSTEP_JOB_KEY_FILE", folder, 1), 0);
  assert_int_equal(even_job_key_read(digits), EVEN_ERR_INPUT);
  assert_non_null(strstr(even_error_last()->what, "is a folder"));
  assert_string_equal(even_error_last()->fix, "name a file in it");
  assert_int_equal(setenv("EVENSTEP_JOB_KEY_FILE", path, 1), 0);
  even_os.geteuid = somebody_else;
  assert_int_equal(even_job_key_read(digits), EVEN_ERR_PERMISSION);
  assert_non_null(strstr(even_error_last()->what, "belongs to another user"));
}

static const even_launched night = {.by = "EVENSTEP_HOST_RANK", .place = 3, .count = 4, .job = "night"};

static void hosts_meet_in_a_file_of_their_user(void **state) {
  even_rendezvous meeting;
  even_text line = EVEN_TEXT_EMPTY;
  json_t *read = NULL;
  (void)state;
  assert_int_equal(even_rendezvous_open(folder, &night, false, &meeting), EVEN_OK);
  assert_int_equal(meeting.path.data[0], '/');
  assert_int_equal(even_rendezvous_read(&meeting, &night, "", &line), EVEN_ERR_NOT_FOUND);
  write_file("{\"port\":7,\"key\":\"abc\",\"host\":0}\n", 0600);
  assert_int_equal(even_rendezvous_check(&meeting, &night), EVEN_OK); /* one that this job left, before it was killed */
  assert_int_equal(even_rendezvous_read(&meeting, &night, "", &line), EVEN_OK);
  assert_int_equal(even_json_parse("line", line.data, line.length, &read), EVEN_OK);
  assert_int_equal(json_integer_value(json_object_get(read, "host")), 3);
  assert_int_equal(json_integer_value(json_object_get(read, "port")), 7);
  assert_string_equal(even_json_text(read, "key"), "abc");
  json_decref(read);
  even_text_clear(&line);
  assert_int_equal(even_rendezvous_read(&meeting, &night, KEY, &line), EVEN_OK);
  assert_non_null(strstr(line.data, KEY));
  even_text_clear(&line);
  write_file("{\"port\":7}\n", 0640);
  assert_int_equal(even_rendezvous_read(&meeting, &night, "", &line), EVEN_ERR_PERMISSION);
  write_file("no words of a leader", 0600);
  assert_int_equal(even_rendezvous_read(&meeting, &night, "", &line), EVEN_ERR_INPUT);
  write_file("[1]", 0600);
  assert_int_equal(even_rendezvous_read(&meeting, &night, "", &line), EVEN_ERR_INPUT);
  even_text_free(&line);
  even_rendezvous_free(&meeting);
}

static void a_job_without_a_name_takes_nobodys_file(void **state) {
  static const even_launched unnamed = {.by = "MPICH", .count = 2};
  even_rendezvous meeting;
  (void)state;
  (void)snprintf(path, sizeof path, "%s/.evenstep-job", folder);
  assert_int_equal(even_rendezvous_open(folder, &unnamed, false, &meeting), EVEN_OK);
  assert_int_equal(even_rendezvous_check(&meeting, &unnamed), EVEN_OK);
  write_file("{}", 0600);
  assert_int_equal(even_rendezvous_check(&meeting, &unnamed), EVEN_ERR_IN_USE);
  even_rendezvous_free(&meeting);
}

static int files_in_folder(void) {
  DIR *all = opendir(folder);
  int count = -2; /* "." and ".." */
  assert_non_null(all);
  while (readdir(all) != NULL) {
    count++;
  }
  assert_int_equal(closedir(all), 0);
  return count;
}

static void expect_in_file(const char *words) {
  even_text found = EVEN_TEXT_EMPTY;
  assert_int_equal(even_file_read_private(path, 4096, &found), EVEN_OK);
  assert_string_equal(found.data, words);
  even_text_free(&found);
}

static even_text words_of(const char *words) {
  even_text text = EVEN_TEXT_EMPTY;
  even_text_add(&text, words);
  assert_int_equal(even_text_status(&text), EVEN_OK);
  return text;
}

static even_text first_words;
static even_text second_words;

/* Between the other's look whether the name is free, and its taking it. */
static int link_after_another(const char *from, const char *to) {
  even_os.link = even_os_real.link;
  assert_int_equal(even_rendezvous_write(path, &first_words, true), EVEN_OK);
  return even_os_real.link(from, to);
}

static int link_is_unknown(const char *from, const char *to) {
  (void)from;
  (void)to;
  errno = EPERM;
  return -1;
}

static int link_is_told_twice(const char *from, const char *to) {
  assert_int_equal(even_os_real.link(from, to), 0);
  errno = EEXIST;
  return -1;
}

static void of_two_jobs_without_a_name_one_meets_in_a_folder(void **state) {
  int (*const others[])(const char *, const char *) = {even_os_real.link, link_is_unknown};
  (void)state;
  first_words = words_of("{\"port\":1}\n");
  second_words = words_of("{\"port\":2}\n");
  even_os.link = link_after_another;
  assert_int_equal(even_rendezvous_write(path, &second_words, true), EVEN_ERR_IN_USE);
  assert_non_null(strstr(even_error_last()->what, "another job meets in it"));
  expect_in_file("{\"port\":1}\n");
  for (size_t i = 0; i < 2; i++) {
    even_os.link = others[i];
    assert_int_equal(even_rendezvous_write(path, &second_words, true), EVEN_ERR_IN_USE);
    expect_in_file("{\"port\":1}\n");
    assert_int_equal(even_rendezvous_remove(path, &second_words), EVEN_OK); /* another job's: it stays */
    assert_int_equal(files_in_folder(), 1);
    assert_int_equal(even_rendezvous_remove(path, &first_words), EVEN_OK);
    assert_int_equal(files_in_folder(), 0);
    assert_int_equal(even_rendezvous_write(path, &first_words, true), EVEN_OK);
    assert_int_equal(files_in_folder(), 1);
  }
  assert_int_equal(even_rendezvous_write(path, &second_words, false), EVEN_OK); /* a job's that has a name is its own */
  expect_in_file("{\"port\":2}\n");
  assert_int_equal(even_rendezvous_remove(path, &second_words), EVEN_OK);
  even_os.link = link_is_told_twice;
  assert_int_equal(even_rendezvous_write(path, &first_words, true), EVEN_OK);
  expect_in_file("{\"port\":1}\n");
  assert_int_equal(files_in_folder(), 1);
  even_text_free(&first_words);
  even_text_free(&second_words);
}

static void an_address_needs_a_key_that_all_have(void **state) {
  even_rendezvous meeting;
  even_text line = EVEN_TEXT_EMPTY;
  (void)state;
  assert_int_equal(even_rendezvous_open("10.0.0.1:7000", &night, true, &meeting), EVEN_OK);
  assert_int_equal(meeting.port, 7000);
  assert_int_equal(even_rendezvous_read(&meeting, &night, KEY, &line), EVEN_OK);
  assert_non_null(strstr(line.data, "10.0.0.1"));
  even_text_free(&line);
  even_rendezvous_free(&meeting);
  assert_int_equal(even_rendezvous_open("10.0.0.1:7000", &night, false, &meeting), EVEN_ERR_USAGE);
  assert_int_equal(even_rendezvous_open("10.0.0.1:0", &night, true, &meeting), EVEN_ERR_USAGE);
  assert_int_equal(even_rendezvous_open("10.0.0.1:70000", &night, true, &meeting), EVEN_ERR_USAGE);
  assert_int_equal(even_rendezvous_open("no such folder", &night, true, &meeting), EVEN_ERR_NOT_FOUND);
}

static const char *asked_for;

/* The name has an address once it was asked for. */
static int known_later(const char *name, const char *service, const struct addrinfo *wanted, struct addrinfo **out) {
  int answer = asked_for == NULL ? EAI_AGAIN : even_os_real.getaddrinfo("10.0.0.7", service, wanted, out);
  asked_for = name;
  return answer;
}

static void a_name_is_looked_up_each_time_until_it_has_an_address(void **state) {
  even_rendezvous meeting;
  even_text line = EVEN_TEXT_EMPTY;
  (void)state;
  assert_int_equal(even_rendezvous_open("trainer-0.jobs:7000", &night, true, &meeting), EVEN_OK);
  assert_int_equal(meeting.port, 7000);
  asked_for = NULL;
  even_os.getaddrinfo = known_later;
  assert_int_equal(even_rendezvous_read(&meeting, &night, KEY, &line), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->what, "trainer-0.jobs has no IPv4 address"));
  assert_int_equal(even_rendezvous_read(&meeting, &night, KEY, &line), EVEN_OK);
  assert_string_equal(asked_for, "trainer-0.jobs");
  assert_non_null(strstr(line.data, "[\"10.0.0.7\"]"));
  even_text_free(&line);
  even_rendezvous_free(&meeting);
  assert_int_equal(even_rendezvous_open("trainer-0.jobs:7000", &night, false, &meeting), EVEN_ERR_USAGE);
}

static void what_could_be_no_address_is_none(void **state) {
  static const char *const wrong[] = {"300.0.0.1:7000", "10.0.0:7000", "10.0.0.256:7000", "7:7000"};
  even_rendezvous meeting;
  (void)state;
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    assert_int_equal(even_rendezvous_open(wrong[i], &night, true, &meeting), EVEN_ERR_USAGE);
    assert_non_null(strstr(even_error_last()->what, "no address"));
  }
  assert_int_equal(even_rendezvous_open("host:", &night, true, &meeting), EVEN_ERR_NOT_FOUND);
  assert_int_equal(even_rendezvous_open("a b:7000", &night, true, &meeting), EVEN_ERR_NOT_FOUND);
}

static even_status read_named(void *context) {
  even_text line = EVEN_TEXT_EMPTY;
  even_status status = even_rendezvous_read(context, &night, KEY, &line);
  even_text_free(&line);
  return status;
}

static even_status read_meeting(void *context) {
  even_text line = EVEN_TEXT_EMPTY;
  even_status status = even_rendezvous_read(context, &night, "", &line);
  even_text_free(&line);
  return status;
}

static void no_call_that_fails_leaks_a_meeting(void **state) {
  even_rendezvous meeting;
  (void)state;
  assert_int_equal(even_rendezvous_open(folder, &night, false, &meeting), EVEN_OK);
  write_file("{\"port\":7}\n", 0600);
  assert_true(fault_each_os(read_meeting, &meeting, 5 /* EIO */) >= 3);
  even_rendezvous_free(&meeting);
  assert_int_equal(even_rendezvous_open("10.0.0.1:7000", &night, true, &meeting), EVEN_OK);
  assert_true(fault_each_os(read_named, &meeting, 5 /* EIO */) >= 1);
  even_rendezvous_free(&meeting);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_key_is_taken_from_the_environment_or_a_file_of_ones_own, make_folder,
                                      remove_folder),
      cmocka_unit_test_setup_teardown(hosts_meet_in_a_file_of_their_user, make_folder, remove_folder),
      cmocka_unit_test_setup_teardown(a_job_without_a_name_takes_nobodys_file, make_folder, remove_folder),
      cmocka_unit_test_setup_teardown(of_two_jobs_without_a_name_one_meets_in_a_folder, make_folder, remove_folder),
      cmocka_unit_test_setup_teardown(an_address_needs_a_key_that_all_have, make_folder, remove_folder),
      cmocka_unit_test_setup_teardown(a_name_is_looked_up_each_time_until_it_has_an_address, make_folder,
                                      remove_folder),
      cmocka_unit_test_setup_teardown(what_could_be_no_address_is_none, make_folder, remove_folder),
      cmocka_unit_test_setup_teardown(no_call_that_fails_leaks_a_meeting, make_folder, remove_folder),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
