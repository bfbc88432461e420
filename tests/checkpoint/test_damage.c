/* Whatever byte of a checkpoint is altered, cut off or added, verify says so and where. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/stop.h"
#include "checkpoint/manifest_writer.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "support/fault.h"
#include "support/search.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void flip(const char *name, off_t offset) {
  scratch_flip(name, offset, (unsigned)(offset % 8));
}

/* Of the sample: 15 floats, then 7 flags, behind the header. */
static void expect_tensor(const char *problem, off_t byte, off_t size) {
  bool header = byte < size - 67;
  bool weights = !header && byte < size - 7;
  const char *named = header ? "(header)" : weights ? "(weights)" : "(flags)";
  if (strstr(problem, named) == NULL) {
    fail_msg("byte %lld of %lld: %s", (long long)byte, (long long)size, problem);
  }
}

/* All bits of a small checkpoint, one after the other; the problem says in which file, and in which tensor. */
static void every_altered_bit_is_found(void **state) {
  (void)state;
  static const char *const files[] = {"one/model.safetensors", "one/optimizer.safetensors", "one/manifest.json"};
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  for (size_t i = 0; i < 3; i++) {
    off_t size = scratch_size(files[i]);
    for (off_t at = 0; at < 8 * size; at += SEARCH_STRIDE) {
      even_names problems = {NULL, 0};
      scratch_flip(files[i], at / 8, (unsigned)(at % 8));
      assert_int_equal(even_checkpoint_verify(scratch_path("one"), &problems), EVEN_ERR_CORRUPT);
      assert_int_equal(problems.count, 1);
      assert_non_null(strstr(problems.items[0], strchr(files[i], '/') + 1));
      if (i < 2) {
        expect_tensor(problems.items[0], at / 8, size);
      }
      even_names_free(&problems);
      scratch_flip(files[i], at / 8, (unsigned)(at % 8));
    }
  }
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_OK);
}

static void every_truncation_is_found(void **state) {
  (void)state;
  static const char *const files[] = {"one/model.safetensors", "one/manifest.json"};
  for (size_t i = 0; i < 2; i++) {
    assert_int_equal(save_sample(scratch_path("one"), true, 1), EVEN_OK);
    for (off_t size = scratch_size(files[i]) - 1; size >= 0; size -= SEARCH_STRIDE) {
      assert_int_equal(truncate(scratch_path(files[i]), size), 0);
      assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_ERR_CORRUPT);
    }
  }
}

static void expect_problem(const char *text) {
  even_names problems = {NULL, 0};
  bool found = false;
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), &problems), EVEN_ERR_CORRUPT);
  assert_non_null(strstr(even_error_last()->what, scratch_path("one")));
  assert_true(even_error_last()->fix[0] != '\0');
  for (size_t i = 0; i < problems.count; i++) {
    found = found || strcmp(problems.items[i], text) == 0;
  }
  if (!found) {
    fail_msg("not among %zu problems: %s (the first: %s)", problems.count, text, problems.items[0]);
  }
  even_names_free(&problems);
}

static void damage_is_told_precisely(void **state) {
  (void)state;
  even_checkpoint_writer *writer = NULL;
  even_checkpoint_params params = {.size = sizeof params, .folder = scratch_path("one")};
  size_t bytes = 3 * (size_t)EVEN_CHECKPOINT_CHUNK_BYTES + 4096;
  char *data = calloc(1, bytes);
  int64_t shape = (int64_t)bytes;
  even_checkpoint_tensor tensor = {"data", "U8", &shape, 1, data, bytes};
  even_checkpoint_file file = {.size = sizeof file, .name = "o.safetensors", .tensors = &tensor, .tensor_count = 1};
  assert_int_equal(even_checkpoint_writer_open(&params, &writer), EVEN_OK);
  assert_int_equal(even_checkpoint_writer_add(writer, &file), EVEN_OK);
  assert_int_equal(even_checkpoint_writer_commit(writer, "{}"), EVEN_OK);
  free(data);
  flip("one/o.safetensors", 3 * (off_t)EVEN_CHECKPOINT_CHUNK_BYTES + 17);
  flip("one/o.safetensors", (off_t)EVEN_CHECKPOINT_CHUNK_BYTES);
  char last[128];
  (void)snprintf(last, sizeof last, "chunk 3 of o.safetensors (bytes 12582912\xE2\x80\x93%ld) is altered (data)",
                 (long)scratch_size("one/o.safetensors") - 1);
  expect_problem(last);
  expect_problem(
      "chunk 1 of o.safetensors (bytes 4194304\xE2\x80\x93"
      "8388607) is altered (data)");
  (void)snprintf(last, sizeof last, "o.safetensors is truncated: 100 of %ld bytes",
                 (long)scratch_size("one/o.safetensors"));
  assert_int_equal(truncate(scratch_path("one/o.safetensors"), 100), 0);
  expect_problem(last);
  assert_int_equal(unlink(scratch_path("one/o.safetensors")), 0);
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_ERR_CORRUPT);
  assert_non_null(strstr(even_error_last()->what, "o.safetensors cannot be opened: No such file"));
}

static even_status verify_with_state(const char *state_json) {
  static int number = 0;
  char name[32];
  even_checkpoint_writer *writer = NULL;
  (void)snprintf(name, sizeof name, "named-%d", number++);
  const even_checkpoint_params params = {.size = sizeof params, .folder = scratch_path(name)};
  const int64_t shape = 4;
  const even_checkpoint_tensor tensor = {"data", "U8", &shape, 1, "abc", 4};
  const even_checkpoint_file file = {
      .size = sizeof file, .name = "o.safetensors", .tensors = &tensor, .tensor_count = 1};
  assert_int_equal(even_checkpoint_writer_open(&params, &writer), EVEN_OK);
  assert_int_equal(even_checkpoint_writer_add(writer, &file), EVEN_OK);
  assert_int_equal(even_checkpoint_writer_commit(writer, state_json), EVEN_OK);
  return even_checkpoint_verify(scratch_path(name), NULL);
}

static void the_state_names_files_that_are_there(void **state) {
  (void)state;
  static const char *const right[] = {
      "{\"models\": {\"m\": {\"file\": \"o.safetensors\"}}, \"optimizers\": {}}",
      "{\"models\": {\"m\": {\"files\": [\"o.safetensors\"], \"index\": \"no matter\"}}}",
      "{\"optimizers\": {\"o\": {\"files\": null, \"file\": \"o.safetensors\"}}}"};
  static const struct {
    const char *state, *told;
  } wrong[] = {{"{\"models\": {\"m\": {\"file\": \"../o.safetensors\"}}}", "\"../o.safetensors\" in models for \"m\""},
               {"{\"models\": {\"m\": {\"files\": [\"o.safetensors\", \"p.safetensors\", \"o.safetensors\"]}}}",
                "\"p.safetensors\" in models for \"m\""},
               {"{\"models\": {\"m\": {\"files\": {}, \"file\": \"o.safetensors\"}}}", "\"\" in models for \"m\""},
               {"{\"models\": {\"m\": 3}}", "\"\" in models for \"m\""},
               {"{\"optimizers\": {\"o\": {\"file\": 3}}}", "\"\" in optimizers for \"o\""},
               {"{\"optimizers\": {\"o\": {\"files\": []}}}", "\"\" in optimizers for \"o\""}};
  for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
    assert_int_equal(verify_with_state(right[i]), EVEN_OK);
  }
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    assert_int_equal(verify_with_state(wrong[i].state), EVEN_ERR_CORRUPT);
    assert_non_null(strstr(even_error_last()->what, wrong[i].told));
  }
}

static void a_manifest_that_is_a_link_is_refused(void **state) {
  (void)state;
  char *path = NULL;
  even_names damaged = {NULL, 0};
  even_checkpoint_info info;
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("two"), false, 1), EVEN_OK);
  assert_int_equal(unlink(scratch_path("two/manifest.json")), 0);
  assert_int_equal(symlink("../one/manifest.json", scratch_path("two/manifest.json")), 0);
  assert_int_equal(even_checkpoint_verify(scratch_path("two"), &damaged), EVEN_ERR_CORRUPT);
  assert_non_null(strstr(damaged.items[0], "two/manifest.json is a symbolic link"));
  even_names_free(&damaged);
  assert_int_equal(even_checkpoint_inspect(scratch_path("two"), &info), EVEN_ERR_CORRUPT);
  even_checkpoint_info_free(&info);
  assert_int_equal(even_checkpoint_find_whole(scratch, NULL, NULL, &damaged, &path), EVEN_OK);
  assert_string_equal(path, scratch_path("one"));
  even_free(path);
  even_names_free(&damaged);
}

static void what_is_no_checkpoint_is_no_damage(void **state) {
  (void)state;
  assert_int_equal(even_checkpoint_verify(scratch_path("absent"), NULL), EVEN_ERR_NOT_FOUND);
  assert_int_equal(even_checkpoint_verify(scratch, NULL), EVEN_ERR_INPUT);
}

static even_status parse(const char *header, uint64_t data_bytes) {
  json_t *root = NULL;
  even_status status = even_safetensors_parse("x", header, strlen(header), data_bytes, &root);
  json_decref(root);
  return status;
}

#define TENSOR(name, offsets) "\"" name "\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":" offsets "}"

static void headers_are_checked(void **state) {
  (void)state;
  static const struct {
    const char *header;
    uint64_t data_bytes;
  } bad[] = {
      {"", 0},
      {"[]", 0},
      {"{", 0},
      {"{}", 1},                                                     /* data of no tensor */
      {"{" TENSOR("a", "[0,8]") "}", 7},                             /* beyond the end */
      {"{" TENSOR("a", "[0,8]") "}", 9},                             /* bytes of nobody */
      {"{" TENSOR("a", "[0,4]") "}", 4},                             /* not the size of its shape */
      {"{" TENSOR("a", "[0,8]") "," TENSOR("b", "[4,12]") "}", 12},  /* overlap */
      {"{" TENSOR("a", "[0,8]") "," TENSOR("b", "[12,20]") "}", 20}, /* gap */
      {"{" TENSOR("a", "[0,8]") "," TENSOR("a", "[8,16]") "}", 16},  /* twice */
      {"{" TENSOR("a", "[8,0]") "}", 8},                             /* backwards */
      {"{" TENSOR("a", "[-8,0]") "}", 8},                            /* negative */
      {"{" TENSOR("a", "[0.0,8.0]") "}", 8},                         /* no integers */
      {"{" TENSOR("a", "[0]") "}", 8},                               /* one offset */
      {"{" TENSOR("a", "[0,99999999999999999999]") "}", 8},          /* no 64-bit number */
      {"{\"a\":{\"dtype\":\"X9\",\"shape\":[],\"data_offsets\":[0,1]}}", 1},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}", 1},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}}", 1},
      {"{\"a\":{\"dtype\":\"F64\",\"shape\":[4611686018427387904,8],\"data_offsets\":[0,0]}}", 0},
      {"{\"a\":7}", 0},
  };
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    if (parse(bad[i].header, bad[i].data_bytes) != EVEN_ERR_CORRUPT) {
      fail_msg("accepted: %s", bad[i].header);
    }
  }
  assert_int_equal(parse("{}", 0), EVEN_OK);
  assert_int_equal(parse("{\"__metadata__\":{\"a\":\"b\"}," TENSOR("b", "[8,16]") "," TENSOR("a", "[0,8]") "}  ", 16),
                   EVEN_OK);
}

static even_status verify_one(void *context) {
  (void)context;
  return even_checkpoint_verify(scratch_path("one"), NULL);
}

static void reading_may_fail(void **state) {
  (void)state;
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  for (long nth = 1;; nth++) {
    fault_allocation(0);
    fault_os_any(nth, EIO);
    even_status status = even_checkpoint_verify(scratch_path("one"), NULL);
    bool failed_one = fault_os_calls(FAULT_CALL_COUNT) >= nth;
    long leaked = fault_live_blocks();
    fault_reset();
    assert_int_equal(leaked, 0);
    assert_int_equal(status, failed_one ? EVEN_ERR_SYSTEM : EVEN_OK); /* a failing disk is not a damaged file */
    if (!failed_one) {
      break;
    }
  }
  (void)fault_each_allocation(verify_one, NULL);
  fault_os_short(5);
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_OK);
}

/* Opens the folder, then the manifest, to see whether it is a link, and to read it. */
static void what_cannot_be_read_is_told(void **state) {
  (void)state;
  static const struct {
    int error;
    const char *words;
  } failures[] = {{EACCES, "Permission denied"}, {EIO, "Input/output error"}, {EMFILE, "Too many open files"}};
  char *path = NULL;
  even_names unread;
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  assert_int_equal(mkdir(scratch_path("lost+found"), 0700), 0);
  for (size_t i = 0; i < sizeof failures / sizeof failures[0]; i++) {
    fault_os_from(FAULT_open, 3, failures[i].error);
    even_status status = even_checkpoint_find_whole(scratch, NULL, NULL, &unread, &path);
    fault_reset();
    assert_int_equal(status, EVEN_OK);
    assert_null(path);
    assert_int_equal(unread.count, 1);
    assert_non_null(strstr(unread.items[0], "one/manifest.json cannot be opened: "));
    assert_non_null(strstr(unread.items[0], failures[i].words));
    even_names_free(&unread);
  }
}

static void expect_newer(void) {
  char *path = NULL;
  even_names unread;
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_ERR_UNSUPPORTED);
  assert_int_equal(even_checkpoint_find_whole(scratch, NULL, NULL, &unread, &path), EVEN_OK);
  assert_null(path);
  assert_int_equal(unread.count, 1);
  assert_non_null(strstr(unread.items[0], "has the format \"evenstep-checkpoint-9\""));
  even_names_free(&unread);
}

static void write_manifest(const char *text, size_t bytes) {
  FILE *file = fopen(scratch_path("one/manifest.json"), "w");
  assert_int_equal(fwrite(text, 1, bytes, file), bytes);
  assert_int_equal(fclose(file), 0);
}

static void a_newer_format_is_told(void **state) {
  (void)state;
  char text[4096];
  char sum[17];
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  FILE *file = fopen(scratch_path("one/manifest.json"), "r");
  size_t bytes = fread(text, 1, sizeof text - 1, file);
  assert_int_equal(fclose(file), 0);
  text[bytes] = '\0';
  char *number = strstr(text, EVEN_CHECKPOINT_FORMAT) + strlen(EVEN_CHECKPOINT_FORMAT) - 1;
  char *end = text + bytes - strlen(EVEN_MANIFEST_END) - 16;
  char *tail = end - strlen(EVEN_MANIFEST_TAIL);
  *number = '9';
  write_manifest(text, bytes); /* its end is ours, and is not right: a bit of ours may have changed */
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_ERR_CORRUPT);
  (void)snprintf(sum, sizeof sum, "%016" PRIx64, even_checkpoint_checksum(text, (size_t)(tail - text)));
  memcpy(end, sum, 16);
  write_manifest(text, bytes);
  expect_newer();
  memcpy(tail + strlen("\n  \""), "signature", strlen("signature")); /* it ends otherwise */
  write_manifest(text, bytes);
  expect_newer();
  write_manifest(text, (size_t)(number - text) + 2); /* as no other version's need be read to its end */
  expect_newer();
  write_manifest(text, (size_t)(number - text) + 1); /* what is left does not tell the whole number */
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_ERR_CORRUPT);
  *number = '1';
  write_manifest(text, bytes); /* ours, whose end is damaged */
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_ERR_CORRUPT);
}

static void a_failing_disk_leads_to_the_older_one(void **state) {
  (void)state;
  bool went_on = false;
  char *path = NULL;
  even_names unread;
  assert_int_equal(save_sample(scratch_path("old"), false, 1), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("new"), false, 2), EVEN_OK);
  assert_int_equal(even_checkpoint_verify(scratch_path("old"), NULL), EVEN_OK);
  for (long nth = 1;; nth++) {
    fault_os_any(nth, EIO);
    even_status status = even_checkpoint_find_whole(scratch, NULL, NULL, &unread, &path);
    bool failed_one = fault_os_calls(FAULT_CALL_COUNT) >= nth;
    fault_reset();
    if (status == EVEN_OK) {
      assert_non_null(path);
      bool older = strcmp(path, scratch_path("old")) == 0;
      assert_true(unread.count == 1 || (unread.count == 0 && !older));
      went_on = went_on || older;
    } else {
      assert_int_equal(status, EVEN_ERR_SYSTEM); /* the folder itself */
    }
    even_names_free(&unread);
    even_free(path);
    if (!failed_one) {
      break;
    }
  }
  assert_true(went_on);
}

static bool is_of_step(const void *step, const even_checkpoint_info *info) {
  return info->step == *(const int64_t *)step;
}

static void only_what_is_accepted_is_taken(void **state) {
  (void)state;
  char *path = NULL;
  even_names damaged;
  int64_t step = 1;
  assert_int_equal(save_sample(scratch_path("mine"), false, 1), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("another"), false, 2), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("short"), false, 3), EVEN_OK);
  assert_int_equal(truncate(scratch_path("short/model.safetensors"), 20), 0);
  assert_int_equal(even_checkpoint_find_whole(scratch, is_of_step, &step, &damaged, &path), EVEN_OK);
  assert_string_equal(path, scratch_path("mine"));
  assert_int_equal(damaged.count, 0); /* nor is another's damage told */
  even_names_free(&damaged);
  even_free(path);
  step = 9;
  assert_int_equal(even_checkpoint_find_whole(scratch, is_of_step, &step, &damaged, &path), EVEN_OK);
  assert_null(path);
  even_names_free(&damaged);
}

static int looks_left;
static bool stop_after_some(void) {
  return looks_left-- <= 0;
}

static void reading_ends_when_it_is_asked_to(void **state) {
  (void)state;
  char *path = NULL;
  even_names damaged = {NULL, 0};
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  even_stop_when(stop_after_some);
  for (int looks = 0; looks < 2; looks++) { /* in the first file, in the second */
    looks_left = looks;
    assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_ERR_INTERRUPTED);
    looks_left = looks;
    assert_int_equal(even_checkpoint_find_whole(scratch, NULL, NULL, &damaged, &path), EVEN_ERR_INTERRUPTED);
    assert_int_equal(damaged.count, 0); /* what was not read is not damaged */
    even_names_free(&damaged);
    assert_null(path);
  }
  even_stop_when(NULL);
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_OK);
}

int main(void) {
#define CASE(name) cmocka_unit_test_setup_teardown(name, scratch_make, scratch_remove)
  const struct CMUnitTest tests[] = {CASE(every_altered_bit_is_found),
                                     CASE(a_manifest_that_is_a_link_is_refused),
                                     CASE(reading_ends_when_it_is_asked_to),
                                     CASE(every_truncation_is_found),
                                     CASE(damage_is_told_precisely),
                                     CASE(the_state_names_files_that_are_there),
                                     CASE(what_is_no_checkpoint_is_no_damage),
                                     CASE(headers_are_checked),
                                     CASE(what_cannot_be_read_is_told),
                                     CASE(a_newer_format_is_told),
                                     CASE(a_failing_disk_leads_to_the_older_one),
                                     CASE(only_what_is_accepted_is_taken),
                                     CASE(reading_may_fail)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
