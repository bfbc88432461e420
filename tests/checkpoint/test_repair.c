/* What is damaged in a checkpoint is put right by a copy of it, and by nothing else. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "checkpoint/manifest_writer.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "support/fault.h"
#include "support/search.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void flip(const char *name, off_t offset) {
  scratch_flip(name, offset, (unsigned)(offset % 8));
}

static even_status repair(const char *name, const char *copy, size_t *repaired, size_t *left) {
  even_names done = {NULL, 0};
  even_names not_done = {NULL, 0};
  even_status status = even_checkpoint_repair(scratch_path(name), scratch_path(copy), &done, &not_done);
  *repaired = done.count;
  *left = not_done.count;
  even_names_free(&done);
  even_names_free(&not_done);
  return status;
}

static void copy_file(const char *from, const char *to) {
  char data[65536];
  FILE *in = fopen(scratch_path(from), "rb");
  FILE *out = fopen(scratch_path(to), "wb");
  assert_true(in != NULL && out != NULL);
  size_t bytes = fread(data, 1, sizeof data, in);
  assert_int_equal(fwrite(data, 1, bytes, out), bytes);
  (void)fclose(in);
  (void)fclose(out);
}

static void save_twice(void) {
  static const char *const names[] = {"model.safetensors", "optimizer.safetensors", "manifest.json"};
  assert_int_equal(save_sample(scratch_path("one"), true, 1), EVEN_OK);
  (void)mkdir(scratch_path("copy"), 0755);
  for (size_t i = 0; i < 3; i++) {
    char from[64];
    char to[64];
    (void)snprintf(from, sizeof from, "one/%s", names[i]);
    (void)snprintf(to, sizeof to, "copy/%s", names[i]);
    copy_file(from, to);
  }
}

static void every_altered_bit_is_repaired(void **state) {
  (void)state;
  static const char *const files[] = {"one/model.safetensors", "one/optimizer.safetensors", "one/manifest.json"};
  size_t repaired = 0;
  size_t left = 0;
  save_twice();
  assert_int_equal(repair("one", "copy", &repaired, &left), EVEN_OK);
  assert_int_equal(repaired, 0);
  for (size_t i = 0; i < 3; i++) {
    for (off_t at = 0; at < 8 * scratch_size(files[i]); at += SEARCH_STRIDE) {
      scratch_flip(files[i], at / 8, (unsigned)(at % 8));
      assert_int_equal(repair("one", "copy", &repaired, &left), EVEN_OK);
      assert_int_equal(repaired, 1);
      assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_OK);
    }
  }
  assert_int_equal(unlink(scratch_path("one/optimizer.safetensors")), 0);
  assert_int_equal(truncate(scratch_path("one/model.safetensors"), scratch_size("one/model.safetensors") + 5), 0);
  assert_int_equal(repair("one", "copy", &repaired, &left), EVEN_OK);
  assert_int_equal(repaired, 2);
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_OK);
}

static void both_copies_may_be_damaged(void **state) {
  (void)state;
  size_t repaired = 0;
  size_t left = 0;
  save_twice();
  flip("one/model.safetensors", 9);
  flip("copy/optimizer.safetensors", 9); /* elsewhere */
  flip("copy/manifest.json", 40);
  assert_int_equal(repair("one", "copy", &repaired, &left), EVEN_OK);
  assert_int_equal(repaired, 1);
  assert_int_equal(repair("copy", "one", &repaired, &left), EVEN_OK);
  assert_int_equal(repaired, 2);
  assert_int_equal(even_checkpoint_verify(scratch_path("copy"), NULL), EVEN_OK);
  flip("one/model.safetensors", 9);
  flip("one/optimizer.safetensors", 9);
  flip("copy/model.safetensors", 20); /* the same chunk */
  assert_int_equal(repair("one", "copy", &repaired, &left), EVEN_ERR_CORRUPT);
  assert_int_equal(repaired, 1);
  assert_int_equal(left, 1);
  assert_non_null(strstr(even_error_last()->what, "chunk 0 of model.safetensors"));
}

static void another_checkpoint_is_no_copy(void **state) {
  (void)state;
  size_t repaired = 0;
  size_t left = 0;
  save_twice();
  assert_int_equal(save_sample(scratch_path("other"), false, 2), EVEN_OK);
  assert_int_equal(repair("one", "other", &repaired, &left), EVEN_ERR_INPUT);
  assert_non_null(strstr(even_error_last()->what, "is not a copy of"));
  assert_int_equal(repair("absent", "copy", &repaired, &left), EVEN_ERR_NOT_FOUND);
}

static void write_zeros(const char *name, off_t bytes) {
  assert_int_equal(truncate(scratch_path(name), 0), 0);
  assert_int_equal(truncate(scratch_path(name), bytes), 0);
}

/* The files tell that the copy's manifest is theirs, as a cut of the power leaves them. */
static void a_manifest_of_which_little_is_left_is_the_copys(void **state) {
  (void)state;
  size_t repaired = 0;
  size_t left = 0;
  save_twice();
  off_t whole = scratch_size("one/manifest.json");
  for (off_t bytes = 0; bytes < whole; bytes += 7) {
    assert_int_equal(truncate(scratch_path("one/manifest.json"), bytes), 0);
    assert_int_equal(repair("one", "copy", &repaired, &left), EVEN_OK);
    assert_int_equal(repaired, 1);
    assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_OK);
    assert_int_equal(scratch_size("one/manifest.json"), whole);
  }
  write_zeros("one/manifest.json", whole);
  flip("one/optimizer.safetensors", 9);
  assert_int_equal(unlink(scratch_path("one/model.safetensors")), 0);
  assert_int_equal(repair("one", "copy", &repaired, &left), EVEN_ERR_INPUT); /* nothing whole is left */
  assert_non_null(strstr(even_error_last()->what, "no file of"));
  copy_file("copy/model.safetensors", "one/model.safetensors");
  assert_int_equal(repair("one", "copy", &repaired, &left), EVEN_OK);
  assert_int_equal(repaired, 2);
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_OK);
  write_zeros("one/manifest.json", 0);
  assert_int_equal(unlink(scratch_path("one/optimizer.safetensors")), 0);
  assert_int_equal(repair("one", "copy", &repaired, &left), EVEN_OK);
  assert_int_equal(repaired, 2);
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_OK);
  write_zeros("copy/manifest.json", 0); /* nor is the copy's needed */
  flip("one/model.safetensors", 9);
  assert_int_equal(repair("one", "copy", &repaired, &left), EVEN_OK);
  assert_int_equal(repaired, 1);
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_OK);
}

static void the_manifest_of_another_checkpoint_is_not_taken(void **state) {
  (void)state;
  size_t repaired = 0;
  size_t left = 0;
  char text[4096];
  save_twice();
  assert_int_equal(save_two(scratch_path("other"), 1, 2), EVEN_OK); /* the same sizes */
  assert_int_equal(save_two(scratch_path("next"), 1, 3), EVEN_OK);  /* one file is the same */
  write_zeros("other/manifest.json", 0);
  assert_int_equal(repair("other", "next", &repaired, &left), EVEN_ERR_INPUT);
  assert_non_null(strstr(even_error_last()->what, "optimizer.safetensors"));
  assert_non_null(strstr(even_error_last()->fix, scratch_path("other/optimizer.safetensors")));
  assert_int_equal(repaired, 0);
  assert_int_equal(scratch_size("other/manifest.json"), 0);
  /* What is left of a manifest says which time it was of. */
  FILE *file = fopen(scratch_path("one/manifest.json"), "r+");
  size_t bytes = fread(text, 1, 200, file);
  for (size_t i = 60; i < bytes; i++) {
    text[i] = (char)(text[i] == 'x' ? 'y' : 'x');
  }
  rewind(file);
  assert_int_equal(fwrite(text, 1, bytes, file), bytes);
  assert_int_equal(fclose(file), 0);
  assert_int_equal(truncate(scratch_path("one/manifest.json"), 200), 0);
  assert_int_equal(repair("one", "copy", &repaired, &left), EVEN_ERR_INPUT);
  assert_int_equal(repaired, 0);
}

enum { TRAINED_BYTES = 9 << 20, CHUNK = 4 << 20 }; /* three chunks */

static void add_bytes(even_checkpoint_writer *writer, const char *name, const char *data, int64_t bytes) {
  const even_checkpoint_tensor tensor = {"t", "U8", &bytes, 1, data, (size_t)bytes};
  const even_checkpoint_file file = {.size = sizeof file, .name = name, .tensors = &tensor, .tensor_count = 1};
  assert_int_equal(even_checkpoint_writer_add(writer, &file), EVEN_OK);
}

/* A model that never changes, one of which each `every`th byte from `from` on is the step's, and an optimizer. */
static void save_step(const char *folder, char step, size_t from, size_t every) {
  static char data[TRAINED_BYTES];
  even_checkpoint_writer *writer = NULL;
  const even_checkpoint_params params = {.size = sizeof params, .folder = scratch_path(folder)};
  memset(data, 'a', sizeof data);
  assert_int_equal(even_checkpoint_writer_open(&params, &writer), EVEN_OK);
  add_bytes(writer, "frozen.safetensors", data, 1000);
  for (size_t i = from; i < sizeof data; i += every) {
    data[i] = step;
  }
  add_bytes(writer, "model.safetensors", data, TRAINED_BYTES);
  memset(data, step, 1000);
  add_bytes(writer, "optimizer.safetensors", data, 1000);
  assert_int_equal(even_checkpoint_writer_commit(writer,
                                                 "{\"models\": {\"f\": {\"file\": \"frozen.safetensors\"},"
                                                 "\"m\": {\"files\": [\"model.safetensors\"]}},"
                                                 "\"optimizers\": {\"o\": {\"file\": \"optimizer.safetensors\"}}}"),
                   EVEN_OK);
}

static void expect_refusal(const char *words) {
  size_t repaired = 0;
  size_t left = 0;
  assert_int_equal(repair("one", "next", &repaired, &left), EVEN_ERR_INPUT);
  if (strstr(even_error_last()->what, words) == NULL) {
    fail_msg("%s", even_error_last()->what);
  }
  assert_int_equal(repaired, 0);
  assert_int_equal(scratch_size("one/manifest.json"), 0);
}

/* Weights in BF16: a byte in twenty. */
static void that_of_the_next_checkpoint_is_not_taken_for_weights_that_hardly_change(void **state) {
  (void)state;
  save_step("one", 1, 0, 20);
  save_step("next", 2, 0, 20);
  write_zeros("one/manifest.json", 0);
  expect_refusal("model.safetensors has other bytes there");
  write_zeros("one/optimizer.safetensors", 0);
  expect_refusal("model.safetensors has other bytes there");
  write_zeros("one/model.safetensors", 0);
  expect_refusal("may be the same in checkpoints before and after");
}

/* Adapters behind a base that stays as it is, in one file. */
static void nor_for_what_training_leaves_alone(void **state) {
  (void)state;
  size_t repaired = 0;
  size_t left = 0;
  save_step("one", 1, 2 * CHUNK + CHUNK / 8, 1);
  save_step("next", 2, 2 * CHUNK + CHUNK / 8, 1);
  write_zeros("one/manifest.json", 0);
  expect_refusal("optimizer.safetensors has other bytes there");
  write_zeros("one/optimizer.safetensors", 0);
  expect_refusal("may be the same in checkpoints before and after");
  assert_int_equal(unlink(scratch_path("one/optimizer.safetensors")), 0);
  expect_refusal("may be the same in checkpoints before and after");
  /* that of the same one is, by all of its models */
  save_step("copy", 1, 2 * CHUNK + CHUNK / 8, 1);
  assert_int_equal(repair("one", "copy", &repaired, &left), EVEN_OK);
  assert_int_equal(repaired, 2);
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_OK);
  /* or by its optimizer, where a chunk of a model is left */
  write_zeros("one/manifest.json", 0);
  flip("one/model.safetensors", CHUNK);
  assert_int_equal(repair("one", "copy", &repaired, &left), EVEN_OK);
  assert_int_equal(repaired, 2);
  write_zeros("one/manifest.json", 0);
  for (off_t chunk = 0; chunk < 3; chunk++) {
    flip("one/model.safetensors", chunk * CHUNK + 1000);
  }
  assert_int_equal(repair("one", "copy", &repaired, &left), EVEN_ERR_INPUT);
  assert_non_null(strstr(even_error_last()->what, "model.safetensors has other bytes there"));
}

static void a_manifest_that_is_a_link_becomes_a_file(void **state) {
  (void)state;
  struct stat facts;
  size_t repaired = 0;
  size_t left = 0;
  save_twice();
  assert_int_equal(unlink(scratch_path("one/manifest.json")), 0);
  assert_int_equal(symlink("../copy/manifest.json", scratch_path("one/manifest.json")), 0);
  assert_int_equal(repair("one", "copy", &repaired, &left), EVEN_OK);
  assert_int_equal(repaired, 1);
  assert_int_equal(lstat(scratch_path("one/manifest.json"), &facts), 0);
  assert_true(S_ISREG(facts.st_mode));
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_OK);
  assert_int_equal(even_checkpoint_verify(scratch_path("copy"), NULL), EVEN_OK);
}

/* Whatever fails, nothing is worse than before, and the next repair ends it. */
static void repair_failing(void (*break_manifest)(void)) {
  size_t repaired = 0;
  size_t left = 0;
  for (long nth = 1;; nth++) {
    save_twice();
    flip("one/model.safetensors", 9);
    break_manifest();
    fault_allocation(0);
    fault_os_any(nth, EIO);
    even_status status = repair("one", "copy", &repaired, &left);
    bool failed_one = fault_os_calls(FAULT_CALL_COUNT) >= nth;
    assert_int_equal(fault_live_blocks(), 0);
    fault_reset();
    if (status != EVEN_OK) {
      assert_int_equal(repair("one", "copy", &repaired, &left), EVEN_OK);
    }
    assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_OK);
    if (!failed_one) {
      assert_int_equal(status, EVEN_OK);
      assert_true(nth > 10);
      break;
    }
  }
}

static void flip_manifest(void) {
  flip("one/manifest.json", 9);
}

static void empty_manifest(void) {
  write_zeros("one/manifest.json", 0);
}

static void a_repair_may_fail_anywhere(void **state) {
  (void)state;
  repair_failing(flip_manifest);
  repair_failing(empty_manifest);
}

static even_allocator usual;
static size_t most_allocated;

static void *allocate(size_t bytes) {
  most_allocated = bytes > most_allocated ? bytes : most_allocated;
  return usual.allocate(bytes);
}

/* A manifest with a right checksum that speaks of one chunk of a gigabyte; the files have a few bytes. */
static void no_memory_is_taken_by_a_manifests_word(void **state) {
  (void)state;
  static const char *const folders[] = {"one", "copy"};
  char text[1024];
  size_t repaired = 0;
  size_t left = 0;
  save_twice();
  int length = snprintf(text, sizeof text,
                        "{\n  \"format\": \"%s\",\n  \"created\": \"2026-11-22T10:00:01.000000Z\",\n  \"files\": "
                        "[{\"name\": \"model.safetensors\", \"bytes\": 1073741824, \"chunk_bytes\": 1073741824, "
                        "\"checksums\": [\"0123456789abcdef\"]}],\n  \"state\": {},",
                        EVEN_CHECKPOINT_FORMAT);
  uint64_t sum = even_checkpoint_checksum(text, (size_t)length);
  (void)snprintf(text + length, sizeof text - (size_t)length, "%s%016" PRIx64 "%s", EVEN_MANIFEST_TAIL, sum,
                 EVEN_MANIFEST_END);
  for (size_t i = 0; i < 2; i++) {
    char name[64];
    (void)snprintf(name, sizeof name, "%s/%s", folders[i], EVEN_CHECKPOINT_MANIFEST);
    FILE *file = fopen(scratch_path(name), "wb");
    assert_true(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
  }
  usual = even_allocator_current;
  even_allocator_current.allocate = allocate;
  most_allocated = 0;
  even_status status = repair("one", "copy", &repaired, &left);
  even_allocator_current = usual;
  assert_int_equal(status, EVEN_ERR_CORRUPT);
  assert_int_equal(left, 1);
  assert_true(most_allocated > 0 && most_allocated < 1 << 20);
}

int main(void) {
#define CASE(name) cmocka_unit_test_setup_teardown(name, scratch_make, scratch_remove)
  const struct CMUnitTest tests[] = {CASE(every_altered_bit_is_repaired),
                                     CASE(both_copies_may_be_damaged),
                                     CASE(another_checkpoint_is_no_copy),
                                     CASE(a_repair_may_fail_anywhere),
                                     CASE(a_manifest_of_which_little_is_left_is_the_copys),
                                     CASE(the_manifest_of_another_checkpoint_is_not_taken),
                                     CASE(that_of_the_next_checkpoint_is_not_taken_for_weights_that_hardly_change),
                                     CASE(nor_for_what_training_leaves_alone),
                                     CASE(no_memory_is_taken_by_a_manifests_word),
                                     CASE(a_manifest_that_is_a_link_becomes_a_file)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
