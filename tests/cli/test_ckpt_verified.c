/* What `evenstep ckpt verify` reads and tells of, also where a job replaces and removes checkpoints meanwhile. */
#include "base/fail.h"
#include "checkpoint/scratch.h"
#include "cli/ckpt.h"
#include "os/calls.h"

#include <fcntl.h>
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static even_text told; /* "one 0, two 11, ": names and statuses */
static char what[sizeof((even_error *)NULL)->what];
static int meanwhile; /* how often files were opened that make something happen */

static void tell(void *context, const char *path, even_status status, const even_names *problems) {
  const char *slash = strrchr(path, '/');
  (void)context;
  even_text_format(&told, "%s %d, ", slash == NULL ? path : slash + 1, (int)status);
  (void)strcpy(what, status == EVEN_OK ? "" : even_error_last()->what);
  assert_int_equal(problems->count > 0, status == EVEN_ERR_CORRUPT);
}

static const char *verify(const char *name) {
  even_text_clear(&told);
  even_ckpt_verify(name, tell, NULL);
  assert_int_equal(even_text_status(&told), EVEN_OK);
  return even_text_string(&told);
}

static int make(void **state) {
  meanwhile = 0;
  return scratch_make(state);
}

static int end(void **state) {
  even_text_free(&told);
  return scratch_remove(state);
}

static void a_lost_manifest_is_told(void **state) {
  (void)state;
  static const char *const others[] = {
      "step-", "step-x", "step-2-", "step-2-xyz", "step-2-abg", "logs", "step-00000004.evenstep.partial"};
  assert_int_equal(save_sample(scratch_path("step-00000001"), false, 1), EVEN_OK);
  for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
    assert_int_equal(mkdir(scratch_path(others[i]), 0777), 0);
  }
  assert_string_equal(verify(scratch), "step-00000001 0, ");
  assert_int_equal(save_sample(scratch_path("step-00000002"), false, 2), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("step-00000003-0a1b2c3d"), false, 3), EVEN_OK);
  assert_int_equal(unlink(scratch_path("step-00000002/manifest.json")), 0);
  assert_int_equal(unlink(scratch_path("step-00000003-0a1b2c3d/manifest.json")), 0);
  assert_string_equal(verify(scratch), "step-00000001 0, step-00000002 3, step-00000003-0a1b2c3d 3, ");
  assert_non_null(strstr(what, "has no manifest.json"));
}

static void a_path_is_no_run(void **state) {
  (void)state;
  char before[PATH_MAX];
  even_text folder = EVEN_TEXT_EMPTY;
  assert_non_null(getcwd(before, sizeof before));
  assert_int_equal(mkdir(scratch_path("runs"), 0777), 0);
  assert_int_equal(mkdir(scratch_path("runs/gpt"), 0777), 0);
  assert_int_equal(mkdir(scratch_path("runs/gpt/a"), 0777), 0);
  assert_int_equal(chdir(scratch), 0);
  assert_int_equal(even_ckpt_folder("gpt", &folder), EVEN_OK);
  assert_string_equal(even_text_string(&folder), "runs/gpt");
  assert_int_equal(even_ckpt_folder("gpt/a", &folder), EVEN_ERR_NOT_FOUND);
  assert_string_equal(even_error_last()->what, "folder gpt/a does not exist");
  assert_int_equal(even_ckpt_folder("", &folder), EVEN_ERR_NOT_FOUND);
  assert_int_equal(even_ckpt_folder("none", &folder), EVEN_ERR_NOT_FOUND);
  assert_string_equal(even_error_last()->what, "neither folder none nor run runs/none exists");
  assert_int_equal(chdir(before), 0);
  even_text_free(&folder);
}

/* The manifest of the older one is read, files of the newer one, as even_placing_replace gives it the name. */
static int open_and_exchange(const char *path, int flags, mode_t mode) {
  int fd = even_os_real.open(path, flags, mode);
  if (even_ends_with(path, "one/manifest.json") && (flags & O_PATH) == 0 && meanwhile > 0) {
    meanwhile--;
    assert_int_equal(even_os_real.exchange(scratch_path("one"), scratch_path("one.evenstep.partial")), 0);
  }
  return fd;
}

/* As above where folders cannot be swapped: there is none of that name for a moment. */
static int open_before_it_is_there(const char *path, int flags, mode_t mode) {
  int fd = even_os_real.open(path, flags, mode);
  if (even_ends_with(path, "one/manifest.json") && meanwhile > 0) {
    meanwhile--;
    assert_int_equal(rename(scratch_path("one.evenstep.partial"), scratch_path("one")), 0);
  }
  return fd;
}

static void what_is_replaced_meanwhile_is_read_again(void **state) {
  (void)state;
  assert_int_equal(save_sample(scratch_path("newer"), false, 2), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  assert_int_equal(rename(scratch_path("newer"), scratch_path("one.evenstep.partial")), 0);
  even_os.open = open_and_exchange;
  for (int readings = 1; readings <= 2; readings++) {
    meanwhile = readings;
    assert_string_equal(verify(scratch_path("one")), "one 0, ");
  }
  meanwhile = 99;
  assert_string_equal(verify(scratch_path("one")), "one 9, ");
  assert_non_null(strstr(what, "again and again"));
  meanwhile = 0;
  scratch_flip("one/model.safetensors", scratch_size("one/model.safetensors") - 1, 0);
  assert_string_equal(verify(scratch_path("one")), "one 11, "); /* not read again: it is the same folder */
  assert_int_equal(rename(scratch_path("one"), scratch_path("two")), 0);
  even_os.open = open_before_it_is_there;
  meanwhile = 1;
  assert_string_equal(verify(scratch_path("one")), "one 0, ");
}

/* A job's with --keep 1: the one that is about to be read goes, the other one comes. */
static int open_and_remove(const char *path, int flags, mode_t mode) {
  if (even_ends_with(path, "/model.safetensors") && (flags & O_PATH) == 0 && meanwhile > 0) {
    bool first = even_ends_with(path, "/first/model.safetensors");
    meanwhile--;
    assert_int_equal(rename(scratch_path(first ? "first" : "second"),
                            scratch_path(first ? "first.evenstep.partial" : "second.evenstep.partial")),
                     0);
    assert_int_equal(rename(scratch_path(first ? "second.evenstep.partial" : "first.evenstep.partial"),
                            scratch_path(first ? "second" : "first")),
                     0);
  }
  return even_os_real.open(path, flags, mode);
}

static void where_none_stayed_others_are_read(void **state) {
  (void)state;
  char none[96];
  assert_int_equal(save_sample(scratch_path("first"), false, 1), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("new"), false, 2), EVEN_OK);
  assert_int_equal(rename(scratch_path("new"), scratch_path("second.evenstep.partial")), 0);
  even_os.open = open_and_remove;
  meanwhile = 1;
  assert_string_equal(verify(scratch), "second 0, ");
  meanwhile = 99;
  (void)snprintf(none, sizeof none, "%s %d, ", strrchr(scratch, '/') + 1, (int)EVEN_ERR_NOT_FOUND);
  assert_string_equal(verify(scratch), none);
  assert_non_null(strstr(what, "no checkpoint stayed"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_lost_manifest_is_told, make, end),
      cmocka_unit_test_setup_teardown(a_path_is_no_run, make, end),
      cmocka_unit_test_setup_teardown(what_is_replaced_meanwhile_is_read_again, make, end),
      cmocka_unit_test_setup_teardown(where_none_stayed_others_are_read, make, end),
  };
  return cmocka_run_group_tests_name("cli_ckpt_verified", tests, NULL, NULL);
}
