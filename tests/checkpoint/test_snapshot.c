/* Snapshots: what was copied is written as it was at that moment, also by another process when the one that copied it
 * is dead; and large files, which several threads write. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/fail.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "checkpoint/snapshot.h"
#include "os/shared_memory.h"
#include "support/fault.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const char sample_state[] = "{\"step\": 7, \"epoch\": 1, \"world_size\": 2}";

static even_status take_sample(even_checkpoint_snapshot *snapshot, const char *folder, bool replace, int seed) {
  even_checkpoint_tensor tensors[3];
  even_checkpoint_file files[2];
  even_checkpoint_params params = {.size = sizeof params, .folder = folder, .replace = replace};
  sample_tensors(tensors, seed);
  for (size_t i = 0; i < 2; i++) {
    files[i] = (even_checkpoint_file){.size = sizeof files[i],
                                      .name = i == 0 ? "model.safetensors" : "optimizer.safetensors",
                                      .tensors = tensors,
                                      .tensor_count = 3};
  }
  return even_checkpoint_snapshot_take(snapshot, &params, files, 2, sample_state);
}

static size_t read_whole(const char *name, char *out, size_t limit) {
  FILE *file = fopen(scratch_path(name), "rb");
  assert_non_null(file);
  size_t bytes = fread(out, 1, limit, file);
  (void)fclose(file);
  return bytes;
}

static void is_written_as_it_was_taken(void **state) {
  (void)state;
  char taken[4096];
  char direct[4096];
  even_checkpoint_snapshot *snapshot = NULL;
  assert_int_equal(even_checkpoint_snapshot_open(-1, &snapshot), EVEN_OK);
  for (int seed = 1; seed <= 3; seed++) {
    even_checkpoint_tensor tensors[3];
    char name[64];
    (void)snprintf(name, sizeof name, "taken-%d", seed);
    assert_int_equal(take_sample(snapshot, scratch_path(name), false, seed), EVEN_OK);
    sample_tensors(tensors, 9); /* training goes on, in the same memory */
    assert_int_equal(even_checkpoint_snapshot_write(snapshot), EVEN_OK);
    assert_int_equal(even_checkpoint_verify(scratch_path(name), NULL), EVEN_OK);
    assert_int_equal(save_sample(scratch_path("direct"), true, seed), EVEN_OK);
    (void)snprintf(name, sizeof name, "taken-%d/model.safetensors", seed);
    size_t bytes = read_whole(name, taken, sizeof taken);
    assert_int_equal(read_whole("direct/model.safetensors", direct, sizeof direct), bytes);
    assert_memory_equal(taken, direct, bytes);
  }
  even_checkpoint_snapshot_close(snapshot);
}

static void one_at_a_time(void **state) {
  (void)state;
  even_checkpoint_snapshot *snapshot = NULL;
  assert_int_equal(even_checkpoint_snapshot_open(-1, &snapshot), EVEN_OK);
  assert_int_equal(even_checkpoint_snapshot_write(snapshot), EVEN_ERR_STATE);
  assert_int_equal(take_sample(snapshot, scratch_path("a"), false, 1), EVEN_OK);
  assert_int_equal(take_sample(snapshot, scratch_path("b"), false, 2), EVEN_ERR_STATE);
  assert_int_equal(even_checkpoint_snapshot_write(snapshot), EVEN_OK);
  assert_int_equal(take_sample(snapshot, scratch_path("a"), false, 2), EVEN_OK);
  assert_int_equal(even_checkpoint_snapshot_write(snapshot), EVEN_ERR_IN_USE); /* and the memory is free again */
  assert_int_equal(take_sample(snapshot, scratch_path("b"), false, 2), EVEN_OK);
  assert_int_equal(even_checkpoint_snapshot_write(snapshot), EVEN_OK);
  even_checkpoint_snapshot_close(snapshot);
}

static even_status die(void *context, size_t index, const void **data) {
  (void)context;
  (void)index;
  (void)data;
  _exit(0);
}

typedef enum child_end { DIES_AFTER_TAKING, DIES_WHILE_TAKING, DIES_AFTER_WRITING } child_end;

/* A process that has the memory file, too, takes a snapshot and dies. */
static void in_a_child(int fd, child_end end) {
  pid_t pid = fork();
  assert_true(pid >= 0);
  if (pid == 0) {
    even_checkpoint_snapshot *snapshot = NULL;
    even_checkpoint_tensor tensors[3];
    even_checkpoint_params params = {.size = sizeof params, .folder = scratch_path("left")};
    even_checkpoint_file file = {
        .size = sizeof file, .name = "m.safetensors", .tensors = tensors, .tensor_count = 3, .fetch = die};
    if (even_checkpoint_snapshot_open(fd, &snapshot) != EVEN_OK) {
      _exit(1);
    }
    if (end == DIES_WHILE_TAKING) {
      sample_tensors(tensors, 1);
      tensors[0].data = NULL;
      _exit(even_checkpoint_snapshot_take(snapshot, &params, &file, 1, sample_state) == EVEN_OK ? 1 : 2);
    }
    int code = take_sample(snapshot, scratch_path("left"), false, 1) == EVEN_OK ? 0 : 1;
    if (end == DIES_AFTER_WRITING && even_checkpoint_snapshot_write(snapshot) != EVEN_OK) {
      code = 1;
    }
    _exit(code);
  }
  int status = 0;
  assert_int_equal(waitpid(pid, &status, 0), pid);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void survives_who_took_it(void **state) {
  (void)state;
  static const struct {
    child_end end;
    bool is_left;
  } cases[] = {{DIES_WHILE_TAKING, false}, {DIES_AFTER_WRITING, false}, {DIES_AFTER_TAKING, true}};
  even_shared_memory memory;
  even_text folder = EVEN_TEXT_EMPTY;
  assert_int_equal(even_shared_memory_begin(EVEN_SNAPSHOT_LABEL, &memory), EVEN_OK);
  assert_int_equal(even_snapshot_finish(memory.fd, &folder), EVEN_OK); /* nobody took any */
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    in_a_child(memory.fd, cases[i].end);
    assert_int_equal(even_snapshot_finish(memory.fd, &folder), EVEN_OK);
    assert_int_equal(folder.length > 0, cases[i].is_left);
    if (scratch_has("left") && !cases[i].is_left) {
      assert_int_equal(even_checkpoint_remove(scratch_path("left")), EVEN_OK);
    }
  }
  assert_string_equal(even_text_string(&folder), scratch_path("left"));
  assert_int_equal(even_checkpoint_verify(scratch_path("left"), NULL), EVEN_OK);
  assert_int_equal(even_snapshot_finish(memory.fd, &folder), EVEN_OK); /* once */
  assert_int_equal(folder.length, 0);
  even_text_free(&folder);
  even_shared_memory_close(&memory);
}

/* It was renamed, and its process died before it could say so. */
static void what_is_in_place_is_left_there(void **state) {
  (void)state;
  even_shared_memory memory;
  even_text folder = EVEN_TEXT_EMPTY;
  assert_int_equal(even_shared_memory_begin(EVEN_SNAPSHOT_LABEL, &memory), EVEN_OK);
  in_a_child(memory.fd, DIES_AFTER_TAKING);
  assert_int_equal(save_sample(scratch_path("left"), false, 1), EVEN_OK);
  assert_int_equal(even_snapshot_finish(memory.fd, &folder), EVEN_OK);
  assert_int_equal(folder.length, 0);
  even_text_free(&folder);
  even_shared_memory_close(&memory);
}

/* Another process filled the memory: whatever byte of its head and tables is not what it was, nothing is read beyond.
 */
static void what_is_no_snapshot_is_refused(void **state) {
  (void)state;
  even_text folder = EVEN_TEXT_EMPTY;
  even_shared_memory memory;
  assert_int_equal(even_shared_memory_begin(EVEN_SNAPSHOT_LABEL, &memory), EVEN_OK);
  in_a_child(memory.fd, DIES_AFTER_TAKING);
  int fd = dup(memory.fd);
  even_shared_memory_close(&memory);
  assert_int_equal(even_shared_memory_adopt(fd, &memory), EVEN_OK);
  unsigned char *bytes = memory.address;
  static const size_t figures[] = {0, 32, 40, 48, 56}; /* magic, entries, their number, the state, its length */
  for (size_t i = 0; i < sizeof figures / sizeof figures[0]; i++) {
    unsigned char kept = bytes[figures[i] + 7];
    bytes[figures[i] + 7] ^= 0x7f;
    assert_int_equal(even_snapshot_finish(memory.fd, &folder), EVEN_ERR_CORRUPT);
    bytes[figures[i] + 7] = kept;
  }
  assert_false(scratch_has("left"));
  assert_int_equal(even_snapshot_finish(memory.fd, &folder), EVEN_OK);
  even_text_free(&folder);
  even_shared_memory_close(&memory);
}

enum { LARGE_CHUNKS = 5 };

static even_status save_large(const char *folder, const char *data, bool several) {
  even_checkpoint_writer *writer = NULL;
  int64_t shapes[2] = {LARGE_CHUNKS * (int64_t)EVEN_CHECKPOINT_CHUNK_BYTES / 2 + 12345, 100};
  even_checkpoint_tensor tensors[3] = {{"a", "U8", &shapes[0], 1, data, (size_t)shapes[0]},
                                       {"b", "U8", &shapes[1], 1, data + 7, (size_t)shapes[1]},
                                       {"c", "U8", &shapes[0], 1, data + 3, (size_t)shapes[0]}};
  even_checkpoint_params params = {.size = sizeof params, .folder = folder};
  even_checkpoint_file file = {.size = sizeof file, .name = "m.safetensors", .tensors = tensors, .tensor_count = 3};
  EVEN_TRY(even_checkpoint_writer_open(&params, &writer));
  fault_os(FAULT_thread_create, several ? 0 : 1, EAGAIN);
  even_status status = even_checkpoint_writer_add(writer, &file);
  if (status != EVEN_OK) {
    even_checkpoint_writer_abandon(writer);
    return status;
  }
  return even_checkpoint_writer_commit(writer, "{}");
}

static void several_threads_write_a_large_file(void **state) {
  (void)state;
  size_t bytes = LARGE_CHUNKS * (size_t)EVEN_CHECKPOINT_CHUNK_BYTES;
  char *data = malloc(bytes);
  for (size_t i = 0; i < bytes; i++) {
    data[i] = (char)(i * 2654435761u >> 13);
  }
  assert_int_equal(save_large(scratch_path("several"), data, true), EVEN_OK);
  assert_true(fault_os_calls(FAULT_thread_create) >= 1);
  assert_int_equal(save_large(scratch_path("alone"), data, false), EVEN_OK); /* no thread is to be had */
  fault_reset();
  assert_int_equal(even_checkpoint_verify(scratch_path("several"), NULL), EVEN_OK);
  assert_int_equal(even_checkpoint_verify(scratch_path("alone"), NULL), EVEN_OK);
  uint64_t *sums[2];
  size_t counts[2];
  uint64_t sizes[2];
  for (size_t i = 0; i < 2; i++) {
    assert_int_equal(
        even_checkpoint_file_checksums(scratch_path(i == 0 ? "several/m.safetensors" : "alone/m.safetensors"), 4096,
                                       &sums[i], &counts[i], &sizes[i]),
        EVEN_OK);
  }
  assert_int_equal(sizes[0], sizes[1]);
  assert_memory_equal(sums[0], sums[1], counts[0] * sizeof *sums[0]);
  even_checkpoint_free(sums[0]);
  even_checkpoint_free(sums[1]);
  for (long nth = 1; nth <= 4; nth++) { /* a failure in any thread is the save's */
    fault_os(FAULT_pwrite, nth, ENOSPC);
    assert_int_equal(save_large(scratch_path("full"), data, true), EVEN_ERR_NO_SPACE);
    assert_non_null(strstr(even_error_last()->what, "m.safetensors"));
    assert_non_null(strstr(even_error_last()->fix, "free at least"));
    fault_reset();
    assert_int_equal(scratch_entries(), 2);
  }
  fault_os_short(70001);
  assert_int_equal(save_large(scratch_path("short"), data, true), EVEN_OK);
  fault_reset();
  assert_int_equal(even_checkpoint_verify(scratch_path("short"), NULL), EVEN_OK);
  free(data);
}

static even_status take_and_write(void *context) {
  even_checkpoint_snapshot *snapshot = NULL;
  (void)context;
  EVEN_TRY(even_checkpoint_snapshot_open(-1, &snapshot));
  even_status status = take_sample(snapshot, scratch_path("one"), true, 1);
  if (status == EVEN_OK) {
    status = even_checkpoint_snapshot_write(snapshot);
  }
  even_checkpoint_snapshot_close(snapshot);
  return status;
}

static void every_call_may_fail(void **state) {
  (void)state;
  assert_true(fault_each_os(take_and_write, NULL, EIO) > 10);
}

int main(void) {
#define CASE(name) cmocka_unit_test_setup_teardown(name, scratch_make, scratch_remove)
  const struct CMUnitTest tests[] = {
      CASE(is_written_as_it_was_taken),
      CASE(one_at_a_time),
      CASE(survives_who_took_it),
      CASE(what_is_in_place_is_left_there),
      CASE(what_is_no_snapshot_is_refused),
      CASE(several_threads_write_a_large_file),
      CASE(every_call_may_fail),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
