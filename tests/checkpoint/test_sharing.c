/* Chunks that have not changed since the checkpoint before are shared with it where the file system can: never one that
 * has, never at its cost, and whatever fails they are written. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/fail.h"
#include "checkpoint/disk_model.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "os/calls.h"
#include "support/clones.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

enum { CHUNK = EVEN_CHECKPOINT_CHUNK_BYTES, BYTES = 3 * CHUNK + 12345, CHUNKS = 4, TRIED = 64 << 10 };

static char state_bytes[BYTES + CHUNK];

static int make(void **state) {
  for (size_t i = 0; i < sizeof state_bytes; i++) {
    state_bytes[i] = (char)(i * 2654435761u >> 16);
  }
  return scratch_make(state);
}

typedef even_status save_by(const even_checkpoint_params *params, const even_checkpoint_file *file,
                            even_checkpoint_saved *saved);

static even_status save_at_once(const even_checkpoint_params *params, const even_checkpoint_file *file,
                                even_checkpoint_saved *saved) {
  even_checkpoint_writer *writer = NULL;
  EVEN_TRY(even_checkpoint_writer_open(params, &writer));
  even_status status = even_checkpoint_writer_add(writer, file);
  if (status != EVEN_OK) {
    even_checkpoint_writer_abandon(writer);
    return status;
  }
  even_checkpoint_writer_saved(writer, saved);
  return even_checkpoint_writer_commit(writer, "{\"step\": 1}");
}

static even_status save_later(const even_checkpoint_params *params, const even_checkpoint_file *file,
                              even_checkpoint_saved *saved) {
  even_checkpoint_snapshot *snapshot = NULL;
  EVEN_TRY(even_checkpoint_snapshot_open(-1, &snapshot));
  even_status status = even_checkpoint_snapshot_take(snapshot, params, file, 1, "{\"step\": 1}");
  if (status == EVEN_OK) {
    status = even_checkpoint_snapshot_write(snapshot);
  }
  even_checkpoint_snapshot_saved(snapshot, saved);
  even_checkpoint_snapshot_close(snapshot);
  return status;
}

/* One file of the first `bytes` of the state, as they are: its chunks are the state's. */
static even_status save_of(save_by *by, const char *name, const char *previous, size_t bytes,
                           even_checkpoint_saved *saved) {
  const even_checkpoint_params params = {.size = sizeof params,
                                         .folder = scratch_path(name),
                                         .replace = true,
                                         .previous = previous == NULL ? NULL : scratch_path(previous)};
  const even_checkpoint_file file = {.size = sizeof file, .name = "state", .raw = state_bytes, .raw_bytes = bytes};
  return by(&params, &file, saved);
}

static uint64_t shared_by(save_by *by, const char *name, const char *previous, size_t bytes) {
  even_checkpoint_saved saved;
  if (save_of(by, name, previous, bytes, &saved) != EVEN_OK) {
    fail_msg("%s", even_error_last()->what);
  }
  assert_int_equal(saved.bytes, bytes);
  assert_int_equal(saved.linked_bytes, 0);
  return saved.shared_bytes;
}

static uint64_t shared(const char *name, const char *previous) {
  return shared_by(save_at_once, name, previous, BYTES);
}

/* By the checksums of what was in memory. */
static void whole(const char *name) {
  if (even_checkpoint_verify(scratch_path(name), NULL) != EVEN_OK) {
    fail_msg("%s", even_error_last()->what);
  }
}

static void change(size_t chunk) {
  state_bytes[chunk * CHUNK + 77]++;
}

static void assert_asked(size_t which, uint64_t offset, uint64_t bytes) {
  assert_true(which < clones_count);
  assert_int_equal(clones_asked[which].offset, offset);
  assert_int_equal(clones_asked[which].bytes, bytes);
}

static void what_has_not_changed_is_shared(void **state) {
  static save_by *const ways[] = {save_at_once, save_later};
  (void)state;
  for (size_t i = 0; i < 2; i++) {
    (void)shared_by(ways[i], "one", NULL, BYTES);
    change(1);
    clones_begin(0, 0);
    assert_int_equal(shared_by(ways[i], "two", "one", BYTES), BYTES - CHUNK);
    assert_int_equal(clones_count, 3);
    assert_asked(0, 0, TRIED);
    assert_asked(1, 0, CHUNK);
    assert_asked(2, 2 * CHUNK, BYTES - 2 * CHUNK); /* neighbours at once, with the end of the file */
    whole("one");
    whole("two");
    change(0);
    change(3);
    assert_int_equal(shared_by(ways[i], "two", "two", BYTES), 2 * CHUNK); /* it replaces the one that it shares with */
    whole("two");
    assert_int_equal(even_checkpoint_remove(scratch_path("one")), EVEN_OK);
    whole("two");
    for (size_t chunk = 0; chunk < CHUNKS; chunk++) {
      change(chunk);
    }
    assert_int_equal(shared_by(ways[i], "three", "two", BYTES), 0);
    whole("three");
    even_os = even_os_real;
  }
}

/* Of the same number in both, that are as long in both. */
static void files_that_grow_or_shrink_share_their_chunks(void **state) {
  (void)state;
  (void)shared("one", NULL);
  clones_begin(0, 0);
  assert_int_equal(shared_by(save_at_once, "longer", "one", BYTES + CHUNK), 3 * CHUNK);
  whole("longer");
  assert_int_equal(shared_by(save_at_once, "shorter", "longer", 2 * CHUNK), 2 * CHUNK);
  whole("shorter");
  assert_int_equal(shared_by(save_at_once, "short", "longer", CHUNK), 0); /* one chunk is written */
  whole("short");
}

/* Where writes go past the page cache room is made for what is written alone: what is shared fits on a full disk. */
static clones_range rooms[CHUNKS];
static size_t room_count;

static int note_room(int fd, int mode, off_t offset, off_t bytes) {
  assert_true(room_count < CHUNKS);
  rooms[room_count++] = (clones_range){(uint64_t)offset, (uint64_t)bytes};
  return even_os_real.fallocate(fd, mode, offset, bytes);
}

static int says_xfs(int fd, struct statfs *out) {
  int failed = even_os_real.fstatfs(fd, out);
  out->f_type = 0x58465342;
  return failed;
}

static int open_not_direct(const char *path, int flags, mode_t mode) {
  return even_os_real.open(path, flags & ~O_DIRECT, mode);
}

static void room_is_made_for_what_is_written(void **state) {
  (void)state;
  (void)shared("one", NULL);
  change(1);
  change(3);
  clones_begin(0, 0);
  even_os.fstatfs = says_xfs;
  even_os.open = open_not_direct;
  even_os.fallocate = note_room;
  room_count = 0;
  assert_int_equal(shared("two", "one"), 2 * CHUNK);
  assert_int_equal(room_count, 2);
  assert_int_equal(rooms[0].offset, CHUNK);
  assert_int_equal(rooms[0].bytes, CHUNK);
  assert_int_equal(rooms[1].offset, 3 * CHUNK);
  assert_int_equal(rooms[1].bytes, BYTES - 3 * CHUNK);
  even_os = even_os_real;
  whole("two");
}

static int no_room(int fd, int mode, off_t offset, off_t bytes) {
  (void)fd, (void)mode, (void)offset, (void)bytes;
  errno = ENOSPC;
  return -1;
}

/* Of a full disk what is shared is not asked for. */
static void what_is_missing_is_what_was_to_be_written(void **state) {
  even_checkpoint_saved saved;
  char missing[64];
  (void)state;
  (void)shared("one", NULL);
  change(1);
  change(3);
  (void)snprintf(missing, sizeof missing, "free at least %d bytes", BYTES - 2 * CHUNK);
  clones_begin(0, 0);
  even_os.fstatfs = says_xfs;
  even_os.open = open_not_direct;
  even_os.fallocate = no_room;
  assert_int_equal(save_of(save_at_once, "two", "one", BYTES, &saved), EVEN_ERR_NO_SPACE);
  even_os = even_os_real;
  if (strstr(even_error_last()->fix, missing) == NULL) {
    fail_msg("%s, not: %s", missing, even_error_last()->fix);
  }
  whole("one");
}

/* ---- what cannot be shared is written ---- */
static void a_call_that_fails_is_made_up_for(void **state) {
  static const int errors[] = {EOPNOTSUPP, ENOTTY, EXDEV, EINVAL, ENOSPC, EDQUOT, EPERM, EIO, ETXTBSY};
  static const uint64_t left[] = {0, 0, CHUNK}; /* shared with the nth call failing, having spoilt its range */
  (void)state;
  (void)shared("one", NULL);
  change(1);
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
    for (size_t nth = 1; nth <= 3; nth++) {
      clones_begin((long)nth, errors[i]);
      assert_int_equal(shared("two", "one"), left[nth - 1]);
      assert_int_equal(clones_count, nth); /* after one that failed, none */
      even_os = even_os_real;
      whole("two");
      whole("one");
    }
  }
  fault_os(FAULT_ioctl, 1, EINTR);
  assert_int_equal(shared("two", "one"), 0); /* the scratch folder's own file system shares nothing */
  assert_int_equal(fault_os_calls(FAULT_ioctl), 2);
  whole("two");
}

static void earlier_file(char *path, size_t bytes) {
  (void)snprintf(path, bytes, "%s/state", scratch_path("one"));
}

static void what_is_wrong_shares_nothing(void **state) {
  (void)state;
  char path[256];
  earlier_file(path, sizeof path);
  (void)shared("one", NULL);
  change(1);
  clones_begin(0, 0);
  assert_int_equal(shared("two", "not there"), 0);
  whole("two");
  assert_int_equal(truncate(path, BYTES - 1), 0); /* torn */
  assert_int_equal(shared("two", "one"), 0);
  whole("two");
  assert_int_equal(unlink(path), 0);
  assert_int_equal(shared("two", "one"), 0);
  assert_int_equal(rename(scratch_path("two/state"), scratch_path("away")), 0);
  assert_int_equal(symlink("../away", path), 0);
  assert_int_equal(shared("two", "one"), 0);
  assert_int_equal(unlink(path), 0);
  assert_int_equal(mkdir(path, 0755), 0);
  assert_int_equal(shared("two", "one"), 0);
  whole("two");
  scratch_flip("two/manifest.json", 40, 1); /* its own checksum is wrong */
  assert_int_equal(shared("three", "two"), 0);
  whole("three");
  assert_int_equal(clones_count, 0);
}

/* What is open stays. */
static void remove_the_earlier_one(void) {
  if (scratch_has("one")) {
    assert_int_equal(even_checkpoint_remove(scratch_path("one")), EVEN_OK);
  }
}

static void the_earlier_one_may_go_meanwhile(void **state) {
  (void)state;
  (void)shared("one", NULL);
  change(1);
  clones_begin(0, 0);
  clones_before = remove_the_earlier_one;
  assert_int_equal(shared("two", "one"), BYTES - CHUNK);
  assert_false(scratch_has("one"));
  whole("two");
}

/* ---- damage ---- */
/* The disk has lost a bit of what is shared: both checkpoints say so, as with a link. One that is lost later is lost in
 * one of them: blocks that are written to are not shared any more. */
static void damage_is_not_inherited_in_silence(void **state) {
  (void)state;
  (void)shared("one", NULL);
  change(1);
  clones_begin(0, 0);
  scratch_flip("one/state", 2 * CHUNK + 9, 3);
  assert_int_equal(shared("two", "one"), BYTES - CHUNK);
  assert_int_equal(even_checkpoint_verify(scratch_path("two"), NULL), EVEN_ERR_CORRUPT);
  assert_non_null(strstr(even_error_last()->what, "state"));
  assert_int_equal(even_checkpoint_verify(scratch_path("one"), NULL), EVEN_ERR_CORRUPT);
  scratch_flip("one/state", 2 * CHUNK + 9, 3);
  scratch_flip("one/state", CHUNK + 9, 3); /* of what has changed since nothing is inherited */
  assert_int_equal(shared("two", "one"), BYTES - CHUNK);
  whole("two");
}

static void each_bit_of_what_is_shared_is_watched(void **state) {
  (void)state;
  (void)shared("one", NULL);
  change(1);
  clones_begin(0, 0);
  (void)shared("two", "one");
  for (off_t at = 5; at < BYTES; at += BYTES / 16) {
    for (unsigned bit = 0; bit < 8; bit += 7) {
      scratch_flip("two/state", at, bit);
      assert_int_equal(even_checkpoint_verify(scratch_path("two"), NULL), EVEN_ERR_CORRUPT);
      scratch_flip("two/state", at, bit);
    }
  }
  whole("two");
}

/* The checksums of what tensors have in a chunk that they share are written also where the chunk is not. */
static void tensors_in_a_shared_chunk_are_told_apart(void **state) {
  static const int64_t shapes[] = {CHUNK / 2, CHUNK};
  const even_checkpoint_tensor tensors[] = {{"first", "U8", &shapes[0], 1, state_bytes, CHUNK / 2},
                                            {"second", "U8", &shapes[1], 1, state_bytes + CHUNK, CHUNK}};
  const even_checkpoint_file file = {
      .size = sizeof file, .name = "model.safetensors", .tensors = tensors, .tensor_count = 2};
  even_checkpoint_params params = {.size = sizeof params, .folder = scratch_path("one")};
  even_checkpoint_saved saved;
  (void)state;
  assert_int_equal(save_at_once(&params, &file, &saved), EVEN_OK);
  state_bytes[2 * CHUNK - 1]++;
  clones_begin(0, 0);
  params.previous = scratch_path("one");
  params.folder = scratch_path("two");
  assert_int_equal(save_at_once(&params, &file, &saved), EVEN_OK);
  assert_int_equal(saved.shared_bytes, CHUNK);
  whole("two");
  scratch_flip("two/model.safetensors", CHUNK - 5, 2);
  assert_int_equal(even_checkpoint_verify(scratch_path("two"), NULL), EVEN_ERR_CORRUPT);
  assert_non_null(strstr(even_error_last()->what, "second"));
  assert_null(strstr(even_error_last()->what, "first"));
}

/* ---- whatever fails ---- */
enum { FEW_BYTES = CHUNK + 100000 };

static even_status save_again(void *context) {
  even_checkpoint_saved saved;
  (void)context;
  clones_begin(0, 0);
  return save_of(save_at_once, "two", "one", FEW_BYTES, &saved);
}

static void both_are_whole(void) {
  whole("one");
  whole("two");
}

static void every_call_may_fail(void **state) {
  (void)state;
  (void)shared_by(save_at_once, "one", NULL, FEW_BYTES);
  change(1);
  assert_true(fault_each_os(save_again, NULL, EIO) > 20);
  whole("one");
  whole("two");
  assert_true(fault_each_allocation_borne(save_again, both_are_whole, NULL) >= 20);
}

static void look_after_a_cut(long call) {
  for (unsigned i = 0; i < 4; i++) {
    char folder[128];
    char path[256];
    bool there[2];
    (void)snprintf(folder, sizeof folder, "%s-cut", scratch);
    disk_model_cut(folder, i == 0 ? DISK_SAFE_ONLY : i == 1 ? DISK_ALL : DISK_MIXED, (unsigned)call * 4 + i);
    for (size_t name = 0; name < 2; name++) {
      (void)snprintf(path, sizeof path, "%s/%s", folder, name == 0 ? "one" : "two");
      there[name] = access(path, F_OK) == 0;
      if (there[name] && even_checkpoint_verify(path, NULL) != EVEN_OK) {
        fail_msg("power cut at call %ld, disk %u: %s", call, i, even_error_last()->what);
      }
    }
    assert_true(there[0] || there[1]);
    assert_int_equal(scratch_remove_tree(folder), 0);
  }
}

static void a_cut_leaves_both_whole(void **state) {
  (void)state;
  (void)shared_by(save_at_once, "one", NULL, FEW_BYTES);
  change(1);
  clones_begin(0, 0);
  disk_model_before = look_after_a_cut;
  disk_model_begin(scratch, DISK_SHARING);
  assert_int_equal(shared_by(save_at_once, "two", "one", FEW_BYTES), CHUNK);
  assert_int_equal(even_checkpoint_remove(scratch_path("one")), EVEN_OK);
  disk_model_end();
  disk_model_before = NULL;
  whole("two");
}

int main(void) {
#define CASE(name) cmocka_unit_test_setup_teardown(name, make, scratch_remove)
  const struct CMUnitTest tests[] = {
      CASE(what_has_not_changed_is_shared),
      CASE(files_that_grow_or_shrink_share_their_chunks),
      CASE(room_is_made_for_what_is_written),
      CASE(what_is_missing_is_what_was_to_be_written),
      CASE(a_call_that_fails_is_made_up_for),
      CASE(what_is_wrong_shares_nothing),
      CASE(the_earlier_one_may_go_meanwhile),
      CASE(damage_is_not_inherited_in_silence),
      CASE(each_bit_of_what_is_shared_is_watched),
      CASE(tensors_in_a_shared_chunk_are_told_apart),
      CASE(every_call_may_fail),
      CASE(a_cut_leaves_both_whole),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
