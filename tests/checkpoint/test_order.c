/* Which of two checkpoints is the newer: by what they know, whatever the clocks were. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "support/fault.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static time_t today;

static int set_clock(clockid_t clock, struct timespec *out) {
  (void)clock;
  *out = (struct timespec){today, 0};
  return 0;
}

/* One of an empty training, as a host does whose clock says so. */
static void save(const char *name, const char *order, time_t clock) {
  even_checkpoint_writer *writer = NULL;
  char state[128];
  const even_checkpoint_params params = {.size = sizeof params, .folder = scratch_path(name)};
  (void)snprintf(state, sizeof state, "{\"step\":1%s%s}",
                 order == NULL ? "" : ",\"order\":", order == NULL ? "" : order);
  today = clock;
  even_os.clock_gettime = set_clock;
  assert_int_equal(even_checkpoint_writer_open(&params, &writer), EVEN_OK);
  assert_int_equal(even_checkpoint_writer_commit(writer, state), EVEN_OK);
  fault_reset();
}

static void assert_newest(const char *name) {
  char folders[2][256];
  char *path = NULL;
  even_names damaged;
  (void)snprintf(folders[0], sizeof folders[0], "%s", scratch_path("disk"));
  (void)snprintf(folders[1], sizeof folders[1], "%s", scratch_path("memory"));
  const char *const both[] = {folders[0], folders[1]};
  assert_int_equal(even_checkpoint_find_whole_of(both, 2, NULL, NULL, &damaged, &path), EVEN_OK);
  assert_non_null(path);
  assert_string_equal(path, scratch_path(name));
  even_free(path);
  even_names_free(&damaged);
}

/* Two folders of two hosts, in the order in which they came to be; each clock is a day behind the one before. */
static void clocks_that_differ_turn_nothing(void **state) {
  (void)state;
  static const char *const orders[] = {NULL,      "[1,0,1]", "[1,0,2]",  "[1,0,10]", "[1,1,1]", "[1,2,1]",
                                       "[2,0,1]", "[2,0,7]", "[10,0,1]", "[10,0,2]", "[11,3,4]"};
  assert_int_equal(mkdir(scratch_path("disk"), 0777), 0);
  assert_int_equal(mkdir(scratch_path("memory"), 0777), 0);
  for (int i = 0; i < (int)(sizeof orders / sizeof orders[0]); i++) {
    char name[32];
    (void)snprintf(name, sizeof name, "%s/step-%d", i % 2 == 0 ? "disk" : "memory", i);
    save(name, orders[i], 1000000000 - i * 86400);
    assert_newest(name);
  }
}

/* Those of before, and those of other writers, go by the clock, and are older than all that say it. */
static void manifests_of_before_stay_readable(void **state) {
  (void)state;
  static const char *const none[] = {NULL, "[2,1]", "[2,1,-1]", "[2,1,10000000000]", "[2,1,\"1\"]", "7"};
  even_checkpoint_info info;
  assert_int_equal(mkdir(scratch_path("disk"), 0777), 0);
  for (int i = 0; i < (int)(sizeof none / sizeof none[0]); i++) {
    char name[32];
    (void)snprintf(name, sizeof name, "disk/step-%d", i);
    save(name, none[i], 1000000000 + i);
    assert_newest(name);
    assert_int_equal(even_checkpoint_inspect(scratch_path(name), &info), EVEN_OK);
    assert_int_equal(info.turn, 0);
    assert_string_equal(strchr(info.order, ' ') + 1, info.created);
    even_checkpoint_info_free(&info);
  }
  save("disk/own", "[1,0,1]", 900000000);
  assert_newest("disk/own");
}

static void of_one_order_the_clock_decides(void **state) {
  (void)state;
  even_checkpoint_info info;
  assert_int_equal(mkdir(scratch_path("disk"), 0777), 0);
  save("disk/a", "[3,1,2]", 1000000000);
  save("disk/b", "[3,1,2]", 1000000001);
  assert_newest("disk/b");
  assert_int_equal(even_checkpoint_inspect(scratch_path("disk/b"), &info), EVEN_OK);
  assert_string_equal(info.order, "0000000003.0000000001.0000000002 2001-09-09T01:46:41.000000Z");
  assert_int_equal(info.turn, 3);
  even_checkpoint_info_free(&info);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, scratch_make, scratch_remove)

int main(void) {
  const struct CMUnitTest tests[] = {
      CASE(clocks_that_differ_turn_nothing),
      CASE(manifests_of_before_stay_readable),
      CASE(of_one_order_the_clock_decides),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
