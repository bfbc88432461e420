/* What a checkpoint holds, what is refused, what happens to others beside it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "checkpoint/manifest_writer.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "support/fault.h"
#include "support/locks.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static even_checkpoint_writer *begin(const char *name) {
  even_checkpoint_writer *writer = NULL;
  even_checkpoint_params params = {.size = sizeof params, .folder = scratch_path(name)};
  assert_int_equal(even_checkpoint_writer_open(&params, &writer), EVEN_OK);
  return writer;
}

static even_status add(even_checkpoint_writer *writer, const char *name, const even_checkpoint_tensor *tensors,
                       size_t count) {
  even_checkpoint_file file = {.size = sizeof file, .name = name, .tensors = tensors, .tensor_count = count};
  return even_checkpoint_writer_add(writer, &file);
}

static void file_is_safetensors(void **state) {
  (void)state;
  json_t *header = NULL;
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  assert_int_equal(even_safetensors_read_header(scratch_path("one/model.safetensors"), &header), EVEN_OK);
  json_t *weights = json_object_get(header, "weights");
  assert_string_equal(json_string_value(json_object_get(weights, "dtype")), "F32");
  /* the widest type first: nothing (I64) has no bytes, weights are at 0, flags behind them */
  assert_int_equal(json_integer_value(json_array_get(json_object_get(weights, "data_offsets"), 0)), 0);
  assert_int_equal(
      json_integer_value(json_array_get(json_object_get(json_object_get(header, "flags"), "data_offsets"), 1)), 67);
  assert_string_equal(json_string_value(json_object_get(json_object_get(header, "__metadata__"), "format")), "pt");
  json_decref(header);
  /* the data begin at a multiple of 8, and are what was given */
  unsigned char bytes[4096];
  float first[2];
  int fd = open(scratch_path("one/model.safetensors"), O_RDONLY);
  ssize_t size = read(fd, bytes, sizeof bytes);
  (void)close(fd);
  assert_int_equal((size - 67) % 8, 0);
  memcpy(first, bytes + size - 67, sizeof first);
  assert_true(first[0] == 100.0F && first[1] == 101.0F);
}

static void manifest_tells_state(void **state) {
  (void)state;
  even_checkpoint_info info;
  assert_int_equal(save_sample(scratch_path("one"), false, 42), EVEN_OK);
  assert_int_equal(even_checkpoint_inspect(scratch_path("one"), &info), EVEN_OK);
  assert_int_equal(info.step, 42);
  assert_int_equal(info.world_size, 2);
  assert_int_equal(info.file_count, 2);
  even_checkpoint_info_free(&info);
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_OK);
  assert_int_equal(scratch_entries(), 1);
}

static void large_file_has_a_sum_for_each_chunk(void **state) {
  (void)state;
  size_t bytes = 2 * (size_t)EVEN_CHECKPOINT_CHUNK_BYTES + 5000;
  char *data = calloc(1, bytes);
  int64_t shape = (int64_t)bytes;
  even_checkpoint_tensor tensor = {"data", "U8", &shape, 1, data, bytes};
  even_checkpoint_info info;
  even_checkpoint_writer *writer = begin("one");
  uint64_t *sums = NULL;
  size_t count = 0;
  uint64_t whole = 0;
  assert_int_equal(add(writer, "data.safetensors", &tensor, 1), EVEN_OK);
  assert_int_equal(even_checkpoint_writer_commit(writer, "{}"), EVEN_OK);
  assert_int_equal(even_checkpoint_inspect(scratch_path("one"), &info), EVEN_OK);
  assert_int_equal(info.files[0].sum_count, 3);
  assert_int_equal(even_checkpoint_file_checksums(scratch_path("one/data.safetensors"), EVEN_CHECKPOINT_CHUNK_BYTES,
                                                  &sums, &count, &whole),
                   EVEN_OK);
  assert_int_equal(count, 3);
  assert_int_equal(whole, info.files[0].bytes);
  assert_memory_equal(sums, info.files[0].sums, 3 * sizeof *sums);
  even_checkpoint_free(sums);
  even_checkpoint_info_free(&info);
  free(data);
}

static even_status fetch(void *context, size_t index, const void **data) {
  *data = context;
  return index == 1 ? EVEN_OK : EVEN_ERR_STATE;
}

static void data_is_asked_for_when_it_is_due(void **state) {
  (void)state;
  even_checkpoint_tensor tensors[3];
  sample_tensors(tensors, 1);
  const void *weights = tensors[1].data;
  tensors[1].data = NULL;
  even_checkpoint_file file = {.size = sizeof file,
                               .name = "a",
                               .tensors = tensors,
                               .tensor_count = 3,
                               .fetch = fetch,
                               .fetch_context = (void *)(uintptr_t)weights};
  even_checkpoint_writer *writer = begin("one");
  assert_int_equal(even_checkpoint_writer_add(writer, &file), EVEN_OK);
  file.name = "b";
  tensors[0].data = NULL; /* fetch refuses this one */
  (void)even_fail(EVEN_ERR_STATE, "of long ago");
  assert_int_equal(even_checkpoint_writer_add(writer, &file), EVEN_ERR_STATE);
  assert_null(strstr(even_error_last()->what, "of long ago"));
  assert_int_equal(scratch_entries(), 0);
  even_checkpoint_writer_abandon(writer);
}

static void refuse(const char *file_name, const even_checkpoint_tensor *tensors, size_t count, even_status expected) {
  even_checkpoint_writer *writer = begin("refused");
  assert_int_equal(add(writer, file_name, tensors, count), expected);
  assert_int_equal(scratch_entries(), 0); /* at once, not only when the writer is freed */
  assert_int_equal(add(writer, "fine", NULL, 0), EVEN_ERR_STATE);
  assert_int_equal(even_checkpoint_writer_commit(writer, "{}"), EVEN_ERR_STATE);
  assert_int_equal(scratch_entries(), 0);
}

static void bad_names_are_refused(void **state) {
  (void)state;
  static const char *const names[] = {"", ".", "..", "a/b", "/etc/passwd", "../x", EVEN_CHECKPOINT_MANIFEST};
  static const char *const folders[] = {"", "/", ".", "..", "/tmp/..", ("x" EVEN_CHECKPOINT_PARTIAL)};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    refuse(names[i], NULL, 0, EVEN_ERR_ARGUMENT);
  }
  for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++) {
    even_checkpoint_writer *writer = NULL;
    even_checkpoint_params params = {.size = sizeof params, .folder = folders[i]};
    assert_int_equal(even_checkpoint_writer_open(&params, &writer), EVEN_ERR_ARGUMENT);
    assert_null(writer);
  }
}

static void bad_tensors_are_refused(void **state) {
  (void)state;
  static const int64_t two[] = {2};
  static const int64_t negative[] = {-2};
  static const int64_t huge[] = {INT64_MAX, INT64_MAX};
  static const char data[8] = "";
  even_checkpoint_tensor twice[] = {{"a", "U8", two, 1, data, 2}, {"a", "F32", two, 1, data, 8}};
  even_checkpoint_tensor bad[] = {{"short", "F32", two, 1, data, 7},
                                  {"type", "F33", two, 1, data, 8},
                                  {NULL, "U8", two, 1, data, 2},
                                  {"__metadata__", "U8", two, 1, data, 2},
                                  {"absent", "U8", two, 1, NULL, 2},
                                  {("\xC0\xAF"), "U8", two, 1, data, 2},
                                  {("\xED\xA0\x80"), "U8", two, 1, data, 2}};
  even_checkpoint_tensor overflow[] = {{"negative", "U8", negative, 1, data, 2}, {"huge", "F64", huge, 2, data, 8}};
  refuse("a", twice, 2, EVEN_ERR_ARGUMENT);
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    refuse("a", &bad[i], 1, EVEN_ERR_ARGUMENT);
  }
  refuse("a", &overflow[0], 1, EVEN_ERR_OVERFLOW);
  refuse("a", &overflow[1], 1, EVEN_ERR_OVERFLOW);
}

static void bad_metadata_are_refused(void **state) {
  (void)state;
  static const even_checkpoint_pair bad[] = {{NULL, "v"}, {"k", NULL}, {"\xC0\xAF", "v"}, {"k", "\xFF"}};
  for (size_t i = 0; i <= sizeof bad / sizeof bad[0]; i++) { /* the last: a pair at no address */
    even_checkpoint_writer *writer = begin("metadata");
    even_checkpoint_file file = {.size = sizeof file, .name = "a", .metadata_count = 1};
    file.metadata = i < sizeof bad / sizeof bad[0] ? &bad[i] : NULL;
    assert_int_equal(even_checkpoint_writer_add(writer, &file), EVEN_ERR_ARGUMENT);
    even_checkpoint_writer_abandon(writer);
  }
  assert_int_equal(scratch_entries(), 0);
}

static void a_file_name_comes_once(void **state) {
  (void)state;
  even_checkpoint_writer *writer = begin("one");
  assert_int_equal(add(writer, "a", NULL, 0), EVEN_OK);
  assert_int_equal(add(writer, "a", NULL, 0), EVEN_ERR_ARGUMENT);
  even_checkpoint_writer_abandon(writer);
  assert_int_equal(scratch_entries(), 0);
}

static void state_must_be_an_object(void **state) {
  (void)state;
  static const char *const states[] = {NULL, "", "[]", "1", "{"};
  for (size_t i = 0; i < sizeof states / sizeof states[0]; i++) {
    assert_int_equal(even_checkpoint_writer_commit(begin("one"), states[i]), EVEN_ERR_ARGUMENT);
    assert_int_equal(scratch_entries(), 0);
  }
}

static void state_has_a_largest_size(void **state) {
  (void)state;
  size_t bytes = EVEN_MANIFEST_MOST_BYTES + (size_t)1;
  char *large = malloc(bytes + 1);
  assert_non_null(large);
  memset(large, ' ', bytes);
  large[0] = '{';
  large[bytes - 1] = '}';
  large[bytes] = '\0';
  assert_int_equal(even_checkpoint_writer_commit(begin("one"), large), EVEN_ERR_OVERFLOW);
  assert_non_null(strstr(even_error_last()->fix, "as tensors"));
  assert_int_equal(scratch_entries(), 0);
  free(large);
}

static void replacing_is_explicit(void **state) {
  (void)state;
  even_checkpoint_info info;
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("one"), false, 2), EVEN_ERR_IN_USE);
  assert_int_equal(save_sample(scratch_path("one"), true, 3), EVEN_OK);
  assert_int_equal(even_checkpoint_inspect(scratch_path("one"), &info), EVEN_OK);
  assert_int_equal(info.step, 3);
  even_checkpoint_info_free(&info);
  assert_int_equal(scratch_entries(), 1);
  /* what is no checkpoint is never replaced */
  assert_int_equal(mkdir(scratch_path("mine"), 0777), 0);
  assert_int_equal(save_sample(scratch_path("mine"), true, 4), EVEN_ERR_IN_USE);
  assert_int_equal(scratch_entries(), 2);
}

static void missing_parent_is_named(void **state) {
  (void)state;
  assert_int_equal(save_sample(scratch_path("nowhere/one"), false, 1), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->fix, "nowhere"));
}

static void living_writer_is_left_alone(void **state) {
  (void)state;
  char own[64];
  bool told = locks_are_told(scratch);
  even_checkpoint_writer *writer = begin("one");
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_ERR_IN_USE);
  const char *what = even_error_last()->what;
  assert_non_null(strstr(what, ".partial is being written by another process"));
  assert_null(strstr(what, " (")); /* not its command: this is kept in logs */
  if (told) {
    (void)snprintf(own, sizeof own, ": process %ld, which began at 20", (long)getpid());
    assert_non_null(strstr(what, " process, on host "));
    assert_non_null(strstr(what, own));
  }
  assert_int_equal(save_sample(scratch_path("two"), false, 2), EVEN_OK); /* its sweep passes the first by */
  assert_int_equal(add(writer, "a", NULL, 0), EVEN_OK);
  assert_int_equal(even_checkpoint_writer_commit(writer, "{}"), EVEN_OK);
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_OK);
}

/* A child that dies in the middle, by a signal that nothing can catch. */
static void die_while_writing(const char *name) {
  pid_t child = fork();
  if (child == 0) {
    even_checkpoint_tensor tensors[3];
    sample_tensors(tensors, 1);
    even_checkpoint_writer *writer = begin(name);
    (void)!add(writer, "a", tensors, 3);
    (void)raise(SIGKILL);
  }
  int status = 0;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFSIGNALED(status));
}

static void dead_writers_are_swept_away(void **state) {
  (void)state;
  die_while_writing("one");
  die_while_writing("two");
  assert_true(scratch_has("two" EVEN_CHECKPOINT_PARTIAL));
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  assert_int_equal(scratch_entries(), 1);
  /* folders of others that merely look unfinished stay */
  assert_int_equal(mkdir(scratch_path("download.partial"), 0777), 0);
  assert_int_equal(save_sample(scratch_path("three"), false, 1), EVEN_OK);
  assert_true(scratch_has("download.partial"));
}

/* A colleague's link among the checkpoints of a shared folder: what it points to is not ours to sweep. */
static void link_to_a_folder_is_not_swept(void **state) {
  (void)state;
  assert_int_equal(mkdir(scratch_path("victim"), 0777), 0);
  assert_int_equal(save_sample(scratch_path("victim/file"), false, 1), EVEN_OK);
  assert_int_equal(symlink("victim/file", scratch_path("x" EVEN_CHECKPOINT_PARTIAL)), 0);
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  assert_int_equal(even_checkpoint_verify(scratch_path("victim/file"), NULL), EVEN_OK);
  assert_int_not_equal(save_sample(scratch_path("x"), false, 1), EVEN_OK); /* nor by its name */
  assert_int_equal(even_checkpoint_verify(scratch_path("victim/file"), NULL), EVEN_OK);
}

/* The name may change hands between the look and the removal: files go from the folder that was locked. */
static void files_go_from_the_locked_folder(void **state) {
  int lock = -1;
  (void)state;
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("two"), false, 1), EVEN_OK);
  assert_int_equal(even_folder_lock_itself(scratch_path("one"), &lock), EVEN_OK);
  assert_int_equal(rename(scratch_path("one"), scratch_path("three")), 0);
  assert_int_equal(symlink("two", scratch_path("one")), 0);
  assert_int_not_equal(even_folder_remove_locked(scratch_path("one"), lock), EVEN_OK);
  even_folder_unlock(lock);
  assert_int_equal(even_checkpoint_verify(scratch_path("two"), NULL), EVEN_OK);
}

static uid_t another_user(void) {
  return getuid() + 1;
}

static void leftovers_of_others_stay(void **state) {
  (void)state;
  die_while_writing("one");
  even_os.geteuid = another_user;
  assert_int_equal(save_sample(scratch_path("two"), false, 1), EVEN_OK);
  assert_true(scratch_has("one" EVEN_CHECKPOINT_PARTIAL));
}

static int no_locks(int fd, int operation) {
  (void)fd;
  (void)operation;
  errno = ENOLCK;
  return -1;
}

/* Without locks a leftover goes once nothing in it has changed for long; before, its writer may live, and what has its
 * name is written beside it. */
static void without_locks_old_leftovers_go(void **state) {
  (void)state;
  const struct timespec old[2] = {{1000000000, 0}, {1000000000, 0}};
  static const char partial[] = "one" EVEN_CHECKPOINT_PARTIAL;
  die_while_writing("one");
  even_os.flock = no_locks;
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  assert_true(scratch_has(partial));
  assert_int_equal(utimensat(AT_FDCWD, scratch_path(partial), old, 0), 0);
  assert_int_equal(save_sample(scratch_path("one"), true, 2), EVEN_OK);
  assert_true(scratch_has(partial)); /* its file is new */
  assert_int_equal(utimensat(AT_FDCWD, scratch_path("one" EVEN_CHECKPOINT_PARTIAL "/a"), old, 0), 0);
  assert_int_equal(save_sample(scratch_path("two"), false, 1), EVEN_OK);
  assert_int_equal(scratch_entries(), 2);
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_OK);
}

static int clock_of_2001(clockid_t clock, struct timespec *out) {
  (void)clock;
  *out = (struct timespec){1000000000, 0};
  return 0;
}

static void clock_that_jumps_back_keeps_the_order(void **state) {
  char *path = NULL;
  (void)state;
  assert_int_equal(save_sample(scratch_path("step-10"), false, 10), EVEN_OK);
  even_os.clock_gettime = clock_of_2001;
  for (int step = 20; step <= 40; step += 10) {
    char name[16];
    (void)snprintf(name, sizeof name, "step-%d", step);
    assert_int_equal(save_sample(scratch_path(name), false, step), EVEN_OK);
    assert_int_equal(even_checkpoint_find_newest(scratch, true, &path), EVEN_OK);
    assert_string_equal(path, scratch_path(name));
    even_free(path);
  }
}

static void state_is_whole_json(void **state) {
  (void)state;
  even_checkpoint_writer *writer = begin("one");
  assert_int_equal(even_checkpoint_writer_commit(writer, "{ } junk }"), EVEN_ERR_ARGUMENT);
  assert_int_equal(scratch_entries(), 0);
}

/* The name goes for good before the first file does; a name that cannot go leaves nothing behind. */
static void removing_fails_as_a_whole(void **state) {
  (void)state;
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  fault_os(FAULT_rename, 1, EACCES);
  assert_int_equal(even_checkpoint_remove(scratch_path("one")), EVEN_ERR_PERMISSION);
  fault_reset();
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_OK);
  assert_int_equal(scratch_entries(), 1);
  fault_os(FAULT_fsync, 1, EIO);
  assert_int_not_equal(even_checkpoint_remove(scratch_path("one")), EVEN_OK);
  fault_reset();
  assert_true(scratch_has("one" EVEN_CHECKPOINT_PARTIAL "/" EVEN_CHECKPOINT_MANIFEST));
  assert_false(scratch_has("one"));
}

static void forked_child_does_not_keep_the_lock(void **state) {
  (void)state;
  int pipe_ends[2];
  int lock = -1;
  int again = -1;
  assert_int_equal(even_folder_lock(scratch, &lock), EVEN_OK);
  assert_true(lock >= 0);
  assert_int_equal(even_folder_lock(scratch, &again), EVEN_OK);
  assert_int_equal(again, -1); /* held */
  assert_int_equal(pipe(pipe_ends), 0);
  pid_t child = fork(); /* as a loader's worker, forked while a checkpoint is written */
  if (child == 0) {
    char byte = 0;
    (void)close(pipe_ends[1]);
    (void)!read(pipe_ends[0], &byte, 1);
    _exit(0);
  }
  even_folder_unlock(lock);
  assert_int_equal(even_folder_lock(scratch, &again), EVEN_OK);
  assert_true(again >= 0);
  even_folder_unlock(again);
  (void)close(pipe_ends[1]);
  (void)waitpid(child, NULL, 0);
  (void)close(pipe_ends[0]);
}

static void removing_takes_checkpoints_only(void **state) {
  (void)state;
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  assert_int_equal(even_checkpoint_remove(scratch_path("one/")), EVEN_OK);
  assert_int_equal(scratch_entries(), 0);
  assert_int_equal(mkdir(scratch_path("mine"), 0777), 0);
  assert_int_equal(even_checkpoint_remove(scratch_path("mine")), EVEN_ERR_INPUT);
  assert_true(scratch_has("mine"));
}

static void newest_is_the_last_whole_one(void **state) {
  (void)state;
  char *path = NULL;
  assert_int_equal(even_checkpoint_find_newest(scratch_path("absent"), true, &path), EVEN_OK);
  assert_null(path);
  assert_int_equal(save_sample(scratch_path("step-30"), false, 30), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("step-10"), false, 10), EVEN_OK); /* later, after going back */
  die_while_writing("step-40");
  assert_int_equal(even_checkpoint_find_newest(scratch, true, &path), EVEN_OK);
  assert_string_equal(path, scratch_path("step-10"));
  even_free(path);
  assert_int_equal(truncate(scratch_path("step-10/model.safetensors"), 20), 0);
  assert_int_equal(even_checkpoint_find_newest(scratch, false, &path), EVEN_OK);
  assert_string_equal(path, scratch_path("step-30"));
  even_free(path);
}

static void what_is_passed_over_is_named(void **state) {
  (void)state;
  char *path = NULL;
  even_names damaged;
  assert_int_equal(even_checkpoint_find_whole(scratch_path("absent"), NULL, NULL, &damaged, &path), EVEN_OK);
  assert_int_equal(damaged.count, 0);
  even_names_free(&damaged);
  assert_int_equal(save_sample(scratch_path("step-10"), false, 10), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("step-20"), false, 20), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("step-30"), false, 30), EVEN_OK);
  assert_int_equal(truncate(scratch_path("step-20/model.safetensors"), 20), 0);
  int file = open(scratch_path("step-30/model.safetensors"), O_WRONLY);
  assert_int_equal(pwrite(file, "X", 1, 200), 1); /* same size, other bytes */
  assert_int_equal(close(file), 0);
  assert_int_equal(even_checkpoint_find_whole(scratch, NULL, NULL, &damaged, &path), EVEN_OK);
  assert_string_equal(path, scratch_path("step-10"));
  assert_int_equal(damaged.count, 2);
  assert_non_null(strstr(damaged.items[0], "step-20 is damaged: model.safetensors is truncated"));
  assert_non_null(strstr(damaged.items[1], "step-30 is damaged: chunk 0 of model.safetensors"));
  even_names_free(&damaged);
  even_free(path);
}

int main(void) {
#define CASE(name) cmocka_unit_test_setup_teardown(name, scratch_make, scratch_remove)
  const struct CMUnitTest tests[] = {CASE(file_is_safetensors),
                                     CASE(manifest_tells_state),
                                     CASE(large_file_has_a_sum_for_each_chunk),
                                     CASE(data_is_asked_for_when_it_is_due),
                                     CASE(bad_names_are_refused),
                                     CASE(bad_tensors_are_refused),
                                     CASE(bad_metadata_are_refused),
                                     CASE(a_file_name_comes_once),
                                     CASE(state_must_be_an_object),
                                     CASE(state_has_a_largest_size),
                                     CASE(replacing_is_explicit),
                                     CASE(missing_parent_is_named),
                                     CASE(living_writer_is_left_alone),
                                     CASE(dead_writers_are_swept_away),
                                     CASE(link_to_a_folder_is_not_swept),
                                     CASE(files_go_from_the_locked_folder),
                                     CASE(leftovers_of_others_stay),
                                     CASE(without_locks_old_leftovers_go),
                                     CASE(removing_fails_as_a_whole),
                                     CASE(clock_that_jumps_back_keeps_the_order),
                                     CASE(state_is_whole_json),
                                     CASE(forked_child_does_not_keep_the_lock),
                                     CASE(removing_takes_checkpoints_only),
                                     CASE(newest_is_the_last_whole_one),
                                     CASE(what_is_passed_over_is_named)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
