/* The power is cut at every call of a save, of a replacement, of a removal: whatever the disk then holds of what was
 * not synced, the newest checkpoint that can be loaded is whole, and never older than the one before. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "checkpoint/disk_model.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "os/calls.h"
#include "support/fault.h"

#include <dirent.h>
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { MIXED = 24 }; /* disks a call, beside the two extremes */

static int64_t least_step;
static int64_t most_step;
static long disks;

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

static void check_disk(long call, disk_outcome outcome, unsigned seed) {
  char folder[128];
  char *path = NULL;
  (void)snprintf(folder, sizeof folder, "%s-cut", scratch);
  even_os_calls watched = even_os;
  disk_model_cut(folder, outcome, seed);
  even_os = even_os_real; /* the machine has started again */
  even_checkpoint_info info = {.step = -1};
  check_names(folder, call, seed);
  assert_int_equal(even_checkpoint_find_newest(folder, true, &path), EVEN_OK);
  if (path == NULL || even_checkpoint_inspect(path, &info) != EVEN_OK || info.step < least_step ||
      info.step > most_step) {
    fail_msg("power cut at call %ld, disk %u: the newest checkpoint is of step %ld, not %ld … %ld", call, seed,
             path == NULL ? -1L : (long)info.step, (long)least_step, (long)most_step);
  }
  even_checkpoint_info_free(&info);
  even_free(path);
  assert_int_equal(nftw(folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS), 0);
  even_os = watched;
  disks++;
}

static void cut(long call) {
  check_disk(call, DISK_SAFE_ONLY, 0);
  check_disk(call, DISK_ALL, 0);
  for (unsigned i = 0; i < MIXED; i++) {
    check_disk(call, DISK_MIXED, (unsigned)call * MIXED + i + 1);
  }
}

static void begin(void) {
  fault_reset();
  disks = 0;
  disk_model_before = cut;
  disk_model_begin(scratch);
}

/* least: of what the newest must be while the calls are made, and when they have returned. */
static void end(int64_t least_after) {
  least_step = least_after;
  assert_true(disk_model_calls() > 5);
  disk_model_end();
  assert_true(disks >= (MIXED + 2) * 5);
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

int main(void) {
#define CASE(name) cmocka_unit_test_setup_teardown(name, scratch_make, scratch_remove)
  const struct CMUnitTest tests[] = {
      CASE(a_save),
      CASE(a_replacement),
      CASE(a_save_and_a_removal),
      CASE(a_save_after_a_dead_writer),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
