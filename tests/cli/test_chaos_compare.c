/* Which checkpoints `evenstep chaos` compares: the newest of both jobs, and where a fault spoiled the disturbed one's
 * last, the ones before. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "../checkpoint/scratch.h"
#include "base/alloc.h"
#include "cli/chaos.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static const char *spoiled; /* the name of a checkpoint */

static bool is_spoiled(const void *context, const char *name) {
  (void)context;
  return spoiled != NULL && strcmp(name, spoiled) == 0;
}

static void save(const char *run, int step) {
  char name[64];
  (void)snprintf(name, sizeof name, "%s/checkpoints/step-%08d", run, step);
  assert_int_equal(save_sample(scratch_path(name), false, step), EVEN_OK);
}

/* Both jobs have the steps from `first` to 3. */
static void two_jobs(int first) {
  static const char *const runs[] = {"calm", "hit"};
  char folder[64];
  for (int i = 0; i < 2; i++) {
    assert_int_equal(mkdir(scratch_path(runs[i]), 0700), 0);
    (void)snprintf(folder, sizeof folder, "%s/checkpoints", runs[i]);
    assert_int_equal(mkdir(scratch_path(folder), 0700), 0);
    for (int step = i == 0 ? first : 1; step <= 3; step++) {
      save(runs[i], step);
    }
  }
}

static void compared(int64_t calm, int64_t hit, bool same) {
  even_chaos_verdict verdict;
  assert_int_equal(even_chaos_compare(scratch_path("calm"), scratch_path("hit"), is_spoiled, NULL, &verdict), EVEN_OK);
  assert_int_equal(verdict.step[0], calm);
  assert_int_equal(verdict.step[1], hit);
  assert_int_equal(verdict.tensors, 3);
  assert_int_equal(verdict.different == 0, same);
  even_free(verdict.paths[0]);
  even_free(verdict.paths[1]);
}

static void the_newest_of_both(void **state) {
  (void)state;
  two_jobs(1);
  spoiled = NULL;
  compared(3, 3, true);
}

static void those_before_a_spoiled_one(void **state) {
  (void)state;
  two_jobs(1);
  scratch_flip("hit/checkpoints/step-00000003/model.safetensors",
               scratch_size("hit/checkpoints/step-00000003/model.safetensors") - 1, 3);
  spoiled = "step-00000003";
  compared(2, 2, true);
  spoiled = NULL; /* by no fault of ours: the disturbed job ended earlier */
  compared(3, 2, false);
  spoiled = "step-00000002"; /* the same */
  compared(3, 2, false);
}

static void nothing_earlier_is_left(void **state) {
  (void)state;
  two_jobs(3);
  scratch_flip("hit/checkpoints/step-00000003/model.safetensors",
               scratch_size("hit/checkpoints/step-00000003/model.safetensors") - 1, 3);
  spoiled = "step-00000003";
  compared(3, 2, false);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(the_newest_of_both, scratch_make, scratch_remove),
      cmocka_unit_test_setup_teardown(those_before_a_spoiled_one, scratch_make, scratch_remove),
      cmocka_unit_test_setup_teardown(nothing_earlier_is_left, scratch_make, scratch_remove),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
