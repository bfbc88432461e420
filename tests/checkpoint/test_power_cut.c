/* The power is cut at every call of a save, of a replacement, of a removal: whatever the disk then holds of what was
 * not synced, the newest checkpoint that can be loaded is whole, and never older than the one before. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "checkpoint/disk_model.h"
#include "checkpoint/placing.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "os/file.h"
#include "os/folder.h"
#include "support/fault.h"
#include "support/search.h"

#include <dirent.h>
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { MANY = SEARCH_STRIDE == 1 ? 24 : 1, FEW = 1 }; /* mixed disks a call, beside the two extremes */

static int64_t least_step;
static int64_t most_step;
static long disks;
static unsigned mixed = MANY;
static long stride = 1;        /* of the calls at which the power is cut */
static const char *below = ""; /* the root: where checkpoints lie */
static disk_kind disk;

static int remove_entry(const char *path, const struct stat *facts, int kind, struct FTW *place) {
  (void)facts;
  (void)kind;
  (void)place;
  return remove(path);
}

static void check_names(const char *folder, long call, unsigned seed) {
  DIR *stream = opendir(folder);
  assert_non_null(stream);
  for (struct dirent *each = readdir(stream); each != NULL; each = readdir(stream)) {
    char path[512];
    const char *partial = strstr(each->d_name, EVEN_CHECKPOINT_PARTIAL);
    if (each->d_name[0] == '.' || partial != NULL) {
      continue;
    }
    (void)snprintf(path, sizeof path, "%s/%s", folder, each->d_name);
    if (even_checkpoint_verify(path, NULL) != EVEN_OK) {
      fail_msg("power cut at call %ld, disk %u: %s has the name of a whole checkpoint and is none", call, seed,
               each->d_name);
    }
  }
  (void)closedir(stream);
}

/* The step of the newest that can be loaded; -1: there is none. */
static int64_t newest_of(const char *folder) {
  char *path = NULL;
  even_checkpoint_info info = {.step = -1};
  assert_int_equal(even_checkpoint_find_newest(folder, true, &path), EVEN_OK);
  if (path == NULL) {
    return -1;
  }
  assert_int_equal(even_checkpoint_inspect(path, &info), EVEN_OK);
  int64_t step = info.step;
  even_checkpoint_info_free(&info);
  even_free(path);
  return step;
}

static void check_disk(long call, disk_outcome outcome, unsigned seed) {
  char folder[128];
  char place[192];
  (void)snprintf(folder, sizeof folder, "%s-cut", scratch);
  (void)snprintf(place, sizeof place, "%s%s", folder, below);
  disk_model_cut(folder, outcome, seed);
  if (even_path_exists(place)) {
    check_names(place, call, seed);
  }
  int64_t step = newest_of(place);
  if (step < least_step || step > most_step) {
    fail_msg("power cut at call %ld, disk %u: the newest checkpoint is of step %ld, not %ld … %ld", call, seed,
             (long)step, (long)least_step, (long)most_step);
  }
  assert_int_equal(nftw(folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS), 0);
  disks++;
}

static void cut(long call) {
  if (call % stride != 0) {
    return;
  }
  check_disk(call, DISK_SAFE_ONLY, 0);
  check_disk(call, DISK_ALL, 0);
  for (unsigned i = 0; i < mixed; i++) {
    check_disk(call, DISK_MIXED, (unsigned)call * MANY + i + 1);
  }
}

static void begin_on(disk_kind on) {
  fault_reset();
  disks = 0;
  disk_model_before = cut;
  disk_model_begin(scratch, on);
}

static void begin(void) {
  begin_on(disk);
}

/* least: of what the newest must be while the calls are made, and when they have returned. */
static void end(int64_t least_after) {
  least_step = least_after;
  assert_true(disk_model_calls() > 5);
  disk_model_end();
  assert_true(disks >= (mixed + 2) * 5);
}

static void a_save(void **state) {
  (void)state;
  assert_int_equal(save_sample(scratch_path("step-1"), false, 1), EVEN_OK);
  least_step = 1;
  most_step = 2;
  begin();
  assert_int_equal(save_sample(scratch_path("step-2"), false, 2), EVEN_OK);
  end(2);
}

static void a_replacement(void **state) {
  (void)state;
  assert_int_equal(save_sample(scratch_path("best"), false, 1), EVEN_OK);
  least_step = 1;
  most_step = 2;
  begin();
  assert_int_equal(save_sample(scratch_path("best"), true, 2), EVEN_OK);
  end(2);
}

/* What --keep does: the next is written, then the oldest goes; twice. */
static void a_save_and_a_removal(void **state) {
  (void)state;
  assert_int_equal(save_sample(scratch_path("step-1"), false, 1), EVEN_OK);
  least_step = 1;
  most_step = 3;
  begin();
  assert_int_equal(save_sample(scratch_path("step-2"), false, 2), EVEN_OK);
  least_step = 2;
  assert_int_equal(even_checkpoint_remove(scratch_path("step-1")), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("step-3"), false, 3), EVEN_OK);
  least_step = 3;
  assert_int_equal(even_checkpoint_remove(scratch_path("step-2")), EVEN_OK);
  end(3);
}

/* A writer died before: its partial folder is swept, and the power goes meanwhile. */
static void a_save_after_a_dead_writer(void **state) {
  (void)state;
  assert_int_equal(save_sample(scratch_path("step-1"), false, 1), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("left"), false, 9), EVEN_OK);
  char from[256];
  char to[256];
  (void)snprintf(from, sizeof from, "%s", scratch_path("left"));
  (void)snprintf(to, sizeof to, "%s", scratch_path("step-2" EVEN_CHECKPOINT_PARTIAL));
  assert_int_equal(rename(from, to), 0);
  least_step = 1;
  most_step = 2;
  begin();
  assert_int_equal(save_sample(scratch_path("step-2"), false, 2), EVEN_OK);
  end(2);
}

/* Large enough for several threads, and past the page cache. */
static even_status save_large(const char *folder, int step) {
  static char data[2 * EVEN_CHECKPOINT_CHUNK_BYTES + 70001];
  static const int64_t shape[] = {sizeof data};
  even_checkpoint_writer *writer = NULL;
  const even_checkpoint_tensor tensor = {"a", "U8", shape, 1, data, sizeof data};
  const even_checkpoint_params params = {.size = sizeof params, .folder = folder};
  const even_checkpoint_file file = {
      .size = sizeof file, .name = "m.safetensors", .tensors = &tensor, .tensor_count = 1};
  char state[64];
  memset(data, step, sizeof data);
  (void)snprintf(state, sizeof state, "{\"step\": %d}", step);
  EVEN_TRY(even_checkpoint_writer_open(&params, &writer));
  even_status status = even_checkpoint_writer_add(writer, &file);
  if (status != EVEN_OK) {
    even_checkpoint_writer_abandon(writer);
    return status;
  }
  return even_checkpoint_writer_commit(writer, state);
}

static void a_large_save(void **state) {
  (void)state;
  for (disk_kind on = DISK_USUAL; on <= DISK_DIRECT; on++) {
    assert_int_equal(save_sample(scratch_path("step-1"), true, 1), EVEN_OK);
    least_step = 1;
    most_step = 2;
    mixed = FEW;
    stride = SEARCH_LARGE_STRIDE;
    begin_on(on);
    assert_int_equal(save_large(scratch_path("step-2"), 2), EVEN_OK);
    end(2);
    mixed = MANY;
    stride = 1;
    assert_int_equal(even_checkpoint_remove(scratch_path("step-2")), EVEN_OK);
  }
}

/* The folders in which it lies are new, too: their names are safe before it counts as written. */
static void a_first_save_in_new_folders(void **state) {
  (void)state;
  below = "/runs/first/checkpoints";
  least_step = -1;
  most_step = 1;
  begin();
  assert_int_equal(even_folder_make(scratch_path("runs/first/checkpoints")), EVEN_OK);
  assert_int_equal(save_sample(scratch_path("runs/first/checkpoints/step-1"), false, 1), EVEN_OK);
  end(1);
  below = "";
}

/* A cut came between the two renames of a replacement, or before the older one went: the next save mends it, also where
 * it is of another name, and the power goes again meanwhile. */
static void a_save_after_a_cut_replacement(void **state) {
  static const char *const names[] = {"best", "other"};
  (void)state;
  for (int i = 0; i < 4; i++) {
    bool has_both = i / 2 == 1;
    assert_int_equal(save_sample(scratch_path("old"), false, 1), EVEN_OK);
    if (has_both) {
      assert_int_equal(save_sample(scratch_path("best"), false, 2), EVEN_OK);
    }
    char from[256];
    char to[256];
    (void)snprintf(from, sizeof from, "%s", scratch_path("old"));
    (void)snprintf(to, sizeof to, "%s", scratch_path("best" EVEN_CHECKPOINT_REPLACED));
    assert_int_equal(rename(from, to), 0);
    least_step = has_both ? 2 : 1;
    most_step = 3;
    begin();
    assert_int_equal(save_sample(scratch_path(names[i % 2]), i % 2 == 0, 3), EVEN_OK);
    end(3);
    assert_false(scratch_has("best" EVEN_CHECKPOINT_REPLACED));
    assert_true(scratch_has("best"));
    assert_int_equal(even_checkpoint_remove(scratch_path("best")), EVEN_OK);
    if (i % 2 == 1) {
      assert_int_equal(even_checkpoint_remove(scratch_path("other")), EVEN_OK);
    }
    assert_int_equal(scratch_entries(), 0);
  }
}

static int on_nfs(void **state) {
  disk = DISK_NFS;
  return scratch_make(state);
}

static int as_usual(void **state) {
  disk = DISK_USUAL;
  return scratch_remove(state);
}

int main(void) {
#define CASE(name) cmocka_unit_test_setup_teardown(name, scratch_make, scratch_remove)
#define ON_NFS(name) cmocka_unit_test_setup_teardown(name, on_nfs, as_usual)
  const struct CMUnitTest tests[] = {
      CASE(a_save),
      CASE(a_replacement),
      CASE(a_save_and_a_removal),
      CASE(a_save_after_a_dead_writer),
      CASE(a_first_save_in_new_folders),
      CASE(a_save_after_a_cut_replacement),
      CASE(a_large_save),
      ON_NFS(a_save),
      ON_NFS(a_replacement),
      ON_NFS(a_save_and_a_removal),
      ON_NFS(a_save_after_a_dead_writer),
      ON_NFS(a_save_after_a_cut_replacement),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
