/* Files that have not changed since the checkpoint before are shared with it: never one that has, never at its cost. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/fail.h"
#include "checkpoint/disk_model.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "support/fault.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BYTES = (2 << 20) + 12345 };

static char frozen[BYTES];
static char trained[BYTES];

static int make(void **state) {
  memset(frozen, 7, sizeof frozen);
  memset(trained, 1, sizeof trained);
  return scratch_make(state);
}

typedef even_status take(void *context, const even_checkpoint_params *params, const even_checkpoint_file *files,
                         size_t count);

static even_status take_at_once(void *context, const even_checkpoint_params *params, const even_checkpoint_file *files,
                                size_t count) {
  even_checkpoint_writer *writer = NULL;
  (void)context;
  EVEN_TRY(even_checkpoint_writer_open(params, &writer));
  for (size_t i = 0; i < count; i++) {
    even_status status = even_checkpoint_writer_add(writer, &files[i]);
    if (status != EVEN_OK) {
      even_checkpoint_writer_abandon(writer);
      return status;
    }
  }
  return even_checkpoint_writer_commit(writer, "{\"step\": 1}");
}

static even_status take_later(void *context, const even_checkpoint_params *params, const even_checkpoint_file *files,
                              size_t count) {
  even_checkpoint_snapshot *snapshot = NULL;
  (void)context;
  EVEN_TRY(even_checkpoint_snapshot_open(-1, &snapshot));
  even_status status = even_checkpoint_snapshot_take(snapshot, params, files, count, "{\"step\": 1}");
  if (status == EVEN_OK) {
    status = even_checkpoint_snapshot_write(snapshot);
  }
  even_checkpoint_snapshot_close(snapshot);
  return status;
}

static even_status save_by(take *by, const char *name, const char *previous, bool replace) {
  static const int64_t shape[] = {BYTES};
  const even_checkpoint_tensor tensors[] = {{"a", "U8", shape, 1, frozen, BYTES},
                                            {"b", "U8", shape, 1, trained, BYTES}};
  const even_checkpoint_params params = {.size = sizeof params,
                                         .folder = scratch_path(name),
                                         .replace = replace,
                                         .previous = previous == NULL ? NULL : scratch_path(previous)};
  const even_checkpoint_file files[] = {
      {.size = sizeof files[0], .name = "frozen.safetensors", .tensors = &tensors[0], .tensor_count = 1},
      {.size = sizeof files[0], .name = "trained.safetensors", .tensors = &tensors[1], .tensor_count = 1},
      {.size = sizeof files[0], .name = "small.json", .raw = "{}\n", .raw_bytes = 3}};
  return by(NULL, &params, files, 3);
}

static even_status save(const char *name, const char *previous) {
  return save_by(take_at_once, name, previous, false);
}

static ino_t inode_of(const char *folder, const char *file) {
  char path[256];
  struct stat facts;
  (void)snprintf(path, sizeof path, "%s/%s", scratch_path(folder), file);
  assert_int_equal(stat(path, &facts), 0);
  return facts.st_ino;
}

static bool shared(const char *file, const char *a, const char *b) {
  return inode_of(a, file) == inode_of(b, file);
}

static void whole(const char *name) {
  assert_int_equal(even_checkpoint_verify(scratch_path(name), NULL), EVEN_OK);
}

static void what_is_the_same_is_shared(void **state) {
  static take *const ways[] = {take_at_once, take_later};
  (void)state;
  for (size_t i = 0; i < 2; i++) {
    assert_int_equal(save_by(ways[i], "one", NULL, true), EVEN_OK);
    trained[BYTES / 2]++;
    assert_int_equal(save_by(ways[i], "two", "one", true), EVEN_OK);
    assert_true(shared("frozen.safetensors", "one", "two"));
    assert_false(shared("trained.safetensors", "one", "two"));
    assert_false(shared("small.json", "one", "two")); /* not worth losing two for one */
    whole("one");
    whole("two");
    assert_int_equal(save_by(ways[i], "three", "two", true), EVEN_OK); /* nothing changed at all */
    assert_true(shared("trained.safetensors", "two", "three"));
    assert_int_equal(even_checkpoint_remove(scratch_path("one")), EVEN_OK);
    assert_int_equal(even_checkpoint_remove(scratch_path("two")), EVEN_OK);
    whole("three");
    frozen[3]++;
    assert_int_equal(save_by(ways[i], "three", "three", true), EVEN_OK); /* it replaces the one that it shares with */
    whole("three");
    assert_int_equal(scratch_entries(), 1);
  }
}

static void replace_text(const char *folder, const char *file, const char *from, const char *to) {
  static char text[65536];
  char path[256];
  (void)snprintf(path, sizeof path, "%s/%s", scratch_path(folder), file);
  FILE *stream = fopen(path, "rb");
  assert_non_null(stream);
  size_t length = fread(text, 1, sizeof text - 1, stream);
  (void)fclose(stream);
  text[length] = '\0';
  char *at = strstr(text, from);
  assert_non_null(at);
  memcpy(at, to, strlen(to));
  stream = fopen(path, "wb");
  assert_int_equal(fwrite(text, 1, length, stream), length);
  (void)fclose(stream);
}

/* Whatever is wrong with the earlier one, the new one is whole and shares nothing. */
static void what_cannot_be_shared_is_written(void **state) {
  (void)state;
  char path[256];
  assert_int_equal(save("one", NULL), EVEN_OK);
  assert_int_equal(save("none", "not there"), EVEN_OK);
  whole("none");
  for (int error = 0; error < 3; error++) { /* file systems without links, other file systems, too many of them */
    static const int errors[] = {EPERM, EXDEV, EMLINK};
    fault_os_from(FAULT_link, 1, errors[error]);
    assert_int_equal(save_by(take_at_once, "two", "one", true), EVEN_OK);
    assert_int_equal(fault_os_calls(FAULT_link), 2);
    fault_reset();
    whole("two");
    assert_false(shared("frozen.safetensors", "one", "two"));
  }
  (void)snprintf(path, sizeof path, "%s/frozen.safetensors", scratch_path("one"));
  assert_int_equal(truncate(path, 1000), 0); /* it lost a part of a file since */
  assert_int_equal(save_by(take_at_once, "two", "one", true), EVEN_OK);
  whole("two");
  assert_int_equal(unlink(path), 0);
  assert_int_equal(save_by(take_at_once, "two", "one", true), EVEN_OK);
  whole("two");
  (void)snprintf(path, sizeof path, "%s/manifest.json", scratch_path("linked"));
  assert_int_equal(save("linked", NULL), EVEN_OK);
  assert_int_equal(rename(path, scratch_path("away")), 0);
  assert_int_equal(symlink("../away", path), 0); /* its manifest lies elsewhere */
  assert_int_equal(save_by(take_at_once, "three", "linked", true), EVEN_OK);
  whole("three");
  assert_false(shared("frozen.safetensors", "linked", "three"));
  (void)snprintf(path, sizeof path, "%s/frozen.safetensors", scratch_path("one"));
  assert_int_equal(symlink(scratch_path("two/frozen.safetensors"), path), 0);
  assert_int_equal(save_by(take_at_once, "three", "one", true), EVEN_OK);
  whole("three");
  replace_text("two", "manifest.json", "\"frozen.safetensors\"", "\"../zen.safetensors\"");
  assert_int_equal(save_by(take_at_once, "three", "two", true), EVEN_OK); /* its own checksum is wrong */
  whole("three");
  assert_false(shared("trained.safetensors", "two", "three"));
}

static even_status save_again(void *context) {
  (void)context;
  return save_by(take_at_once, "two", "one", true);
}

static void both_are_whole(void) {
  whole("one");
  whole("two");
}

static void every_call_may_fail(void **state) {
  (void)state;
  assert_int_equal(save("one", NULL), EVEN_OK);
  assert_true(fault_each_os(save_again, NULL, EIO) > 20);
  whole("one");
  whole("two");
  assert_true(fault_each_allocation_borne(save_again, both_are_whole, NULL) >= 20);
}

/* ---- the power is cut ---- */
static void look_after_a_cut(long call) {
  for (unsigned i = 0; i < 3; i++) {
    char folder[128];
    char path[256];
    (void)snprintf(folder, sizeof folder, "%s-cut", scratch);
    disk_model_cut(folder, i == 0 ? DISK_SAFE_ONLY : i == 1 ? DISK_ALL : DISK_MIXED, (unsigned)call * 3 + i);
    for (size_t name = 0; name < 2; name++) {
      (void)snprintf(path, sizeof path, "%s/%s", folder, name == 0 ? "one" : "two");
      if (even_path_exists(path) && even_checkpoint_verify(path, NULL) != EVEN_OK) {
        fail_msg("power cut at call %ld, disk %u: %s", call, i, even_error_last()->what);
      }
    }
    (void)snprintf(path, sizeof path, "%s/one", folder);
    bool one = even_path_exists(path);
    (void)snprintf(path, sizeof path, "%s/two", folder);
    assert_true(one || even_path_exists(path));
    assert_int_equal(scratch_remove_tree(folder), 0);
  }
}

static void a_cut_leaves_both_whole(void **state) {
  (void)state;
  assert_int_equal(save("one", NULL), EVEN_OK);
  trained[5]++;
  disk_model_before = look_after_a_cut;
  disk_model_begin(scratch, DISK_USUAL);
  assert_int_equal(save("two", "one"), EVEN_OK);
  assert_int_equal(even_checkpoint_remove(scratch_path("one")), EVEN_OK);
  disk_model_end();
  disk_model_before = NULL;
  whole("two");
}

int main(void) {
#define CASE(name) cmocka_unit_test_setup_teardown(name, make, scratch_remove)
  const struct CMUnitTest tests[] = {
      CASE(what_is_the_same_is_shared),
      CASE(what_cannot_be_shared_is_written),
      CASE(every_call_may_fail),
      CASE(a_cut_leaves_both_whole),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
