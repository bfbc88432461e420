/* Every call of a save fails once, in turn: the older checkpoint stays, nothing half stays. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/fail.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "support/fault.h"

#include <errno.h>
#include <string.h>

static bool replace_mode;
static bool nfs_mode;

static int64_t step_of(const char *name) {
  even_checkpoint_info info;
  int64_t step = even_checkpoint_verify(scratch_path(name), NULL) == EVEN_OK &&
                         even_checkpoint_inspect(scratch_path(name), &info) == EVEN_OK
                     ? info.step
                     : -1;
  if (step >= 0) {
    even_checkpoint_info_free(&info);
  }
  return step;
}

static void check_world(even_status status, long nth) {
  int64_t old = step_of("old");
  int64_t new = step_of("new");
  if (replace_mode) {
    /* either version, and whole */
    if (old != 1 && old != 2) {
      fail_msg("call %ld: the checkpoint that was to be replaced is not whole", nth);
    }
    if (status == EVEN_OK && old != 2) {
      fail_msg("call %ld: said to be written, but it is not there", nth);
    }
  } else {
    if (old != 1) {
      fail_msg("call %ld: the older checkpoint was touched", nth);
    }
    if (status == EVEN_OK && new != 2) {
      fail_msg("call %ld: said to be written, but it is not whole", nth);
    }
    if (new < 0 && scratch_has("new")) {
      fail_msg("call %ld: half a checkpoint has the name of a whole one", nth);
    }
  }
}

/* The 1st, 2nd, … call of a save fails, until one runs through. */
static void each_call_fails(int error_number) {
  long nth = 1;
  for (bool failed_one = true; failed_one; nth++) {
    assert_int_equal(save_sample(scratch_path("old"), false, 1), EVEN_OK);
    fault_allocation(0);
    fault_os_any(nth, error_number);
    if (nfs_mode) {
      scratch_is_nfs();
    }
    even_status status = save_sample(scratch_path(replace_mode ? "old" : "new"), replace_mode, 2);
    failed_one = fault_os_calls(FAULT_CALL_COUNT) >= nth;
    long leaked = fault_live_blocks();
    even_error error = *even_error_last();
    fault_reset();
    assert_int_equal(leaked, 0);
    check_world(status, nth);
    if (status != EVEN_OK) {
      assert_non_null(strstr(error.what, scratch));
      assert_true(error.fix[0] != '\0');
    }
    if (!failed_one) {
      assert_int_equal(status, EVEN_OK);
    }
    /* the replaced one may stay under the partial name when only its removal failed: the next save sweeps it */
    if (scratch_has("new" EVEN_CHECKPOINT_PARTIAL) ||
        (status != EVEN_OK && scratch_has("old" EVEN_CHECKPOINT_PARTIAL))) {
      fail_msg("call %ld: the partial folder was left", nth);
    }
    (void)scratch_remove(NULL);
    assert_int_equal(scratch_make(NULL), 0);
  }
  assert_true(nth > 20);
}

static void every_call_may_fail(void **state) {
  (void)state;
  replace_mode = false;
  each_call_fails(EIO);
}

static void every_call_may_fail_while_replacing(void **state) {
  (void)state;
  replace_mode = true;
  each_call_fails(EIO);
}

static void every_call_may_fail_on_nfs(void **state) {
  (void)state;
  nfs_mode = true;
  for (int i = 0; i < 2; i++) {
    replace_mode = i == 1;
    each_call_fails(EIO);
  }
  nfs_mode = false;
}

static void every_call_may_find_the_disk_full(void **state) {
  (void)state;
  replace_mode = false;
  each_call_fails(ENOSPC);
}

/* Cleaning up may fail, too: then the next save sweeps. */
static void cleaning_may_fail(void **state) {
  (void)state;
  static const fault_call cleaning[] = {FAULT_close, FAULT_unlink, FAULT_rmdir, FAULT_getdents64};
  for (size_t i = 0; i < sizeof cleaning / sizeof cleaning[0]; i++) {
    assert_int_equal(save_sample(scratch_path("old"), false, 1), EVEN_OK);
    fault_os_from(cleaning[i], 1, EIO);
    fault_os(FAULT_rename, 1, EIO);
    even_status status = save_sample(scratch_path("new"), false, 2);
    fault_reset();
    assert_int_not_equal(status, EVEN_OK);
    check_world(status, 1);
    assert_int_equal(save_sample(scratch_path("new"), false, 2), EVEN_OK);
    assert_int_equal(scratch_entries(), 2);
    (void)scratch_remove(NULL);
    assert_int_equal(scratch_make(NULL), 0);
  }
}

static void every_allocation_may_fail(void **state) {
  (void)state;
  for (long nth = 1;; nth++) {
    fault_allocation(nth);
    even_status status = save_sample(scratch_path("new"), false, 1);
    bool failed_one = fault_allocations() >= nth;
    long leaked = fault_live_blocks();
    fault_reset();
    assert_int_equal(leaked, 0);
    if (status == EVEN_OK) { /* none failed, or one of the sweep, which may wait */
      assert_int_equal(even_checkpoint_verify(scratch_path("new"), NULL), EVEN_OK);
      assert_int_equal(even_checkpoint_remove(scratch_path("new")), EVEN_OK);
    } else {
      assert_int_equal(status, EVEN_ERR_MEMORY);
      if (scratch_has("new")) { /* the very last: its name in the parent could not be synced */
        assert_int_equal(even_checkpoint_verify(scratch_path("new"), NULL), EVEN_OK);
        assert_int_equal(even_checkpoint_remove(scratch_path("new")), EVEN_OK);
      }
    }
    if (!failed_one) {
      assert_true(nth > 20);
      break;
    }
  }
}

static void removing_may_fail_anywhere(void **state) {
  (void)state;
  for (long nth = 1;; nth++) {
    assert_int_equal(save_sample(scratch_path("one"), true, 1), EVEN_OK);
    fault_os_any(nth, EIO);
    even_status status = even_checkpoint_remove(scratch_path("one"));
    bool failed_one = fault_os_calls(FAULT_CALL_COUNT) >= nth;
    fault_reset();
    if (scratch_has("one")) {
      assert_int_equal(step_of("one"), 1);
    }
    if (!failed_one) {
      assert_int_equal(status, EVEN_OK);
      assert_int_equal(scratch_entries(), 0);
      break;
    }
  }
}

/* What a whole checkpoint rests on is never skipped: two files, the manifest, their folder, its parent are synced. */
static void no_failure_that_matters_is_passed_over(void **state) {
  (void)state;
  static const struct {
    fault_call call;
    long times;
  } needed[] = {{FAULT_fsync, 5}, {FAULT_rename, 1}, {FAULT_mkdir, 1}, {FAULT_write, 5}};
  for (size_t i = 0; i < sizeof needed / sizeof needed[0]; i++) {
    for (long nth = 1; nth <= needed[i].times; nth++) {
      fault_os(needed[i].call, nth, EIO);
      even_status status = save_sample(scratch_path("new"), false, 2);
      fault_reset();
      assert_int_not_equal(status, EVEN_OK);
      if (scratch_has("new")) { /* the parent's sync came last */
        assert_int_equal(even_checkpoint_remove(scratch_path("new")), EVEN_OK);
      }
    }
  }
}

static void short_writes_are_continued(void **state) {
  (void)state;
  fault_os_short(7);
  fault_os(FAULT_CALL_COUNT, 0, 0);
  assert_int_equal(save_sample(scratch_path("new"), false, 3), EVEN_OK);
  fault_reset();
  assert_int_equal(step_of("new"), 3);
}

static void a_full_disk_is_told_with_figures(void **state) {
  (void)state;
  even_checkpoint_writer *writer = NULL;
  even_checkpoint_tensor tensors[3];
  even_checkpoint_params params = {.size = sizeof params, .folder = scratch_path("new"), .expected_bytes = 1000000};
  even_checkpoint_file file = {.size = sizeof file, .name = "m", .tensors = tensors, .tensor_count = 3};
  sample_tensors(tensors, 1);
  assert_int_equal(even_checkpoint_writer_open(&params, &writer), EVEN_OK);
  fault_os_from(FAULT_write, 1, ENOSPC);
  assert_int_equal(even_checkpoint_writer_add(writer, &file), EVEN_ERR_NO_SPACE);
  assert_non_null(strstr(even_error_last()->what, "/m "));
  assert_non_null(strstr(even_error_last()->what, "No space left"));
  assert_non_null(strstr(even_error_last()->fix, "free at least 1000000 bytes"));
  assert_non_null(strstr(even_error_last()->fix, "--checkpoint-dir"));
  even_checkpoint_writer_abandon(writer);
  assert_int_equal(scratch_entries(), 0);
}

int main(void) {
#define CASE(name) cmocka_unit_test_setup_teardown(name, scratch_make, scratch_remove)
  const struct CMUnitTest tests[] = {
      CASE(every_call_may_fail),        CASE(every_call_may_fail_while_replacing),
      CASE(every_call_may_fail_on_nfs), CASE(every_call_may_find_the_disk_full),
      CASE(cleaning_may_fail),          CASE(every_allocation_may_fail),
      CASE(removing_may_fail_anywhere), CASE(no_failure_that_matters_is_passed_over),
      CASE(short_writes_are_continued), CASE(a_full_disk_is_told_with_figures),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
