/* Who stands still, in shared memory: what the agent writes and what ranks see. */
#include "base/fail.h"
#include "fault/standing.h"
#include "os/calls.h"
#include "os/shared_memory.h"
#include "support/fault.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define MS ((uint64_t)1000000u)

typedef struct two_views {
  int fd;
  even_standing *agent, *rank;
} two_views;

static two_views open_views(int ranks) {
  two_views views = {.fd = -1};
  assert_int_equal(even_standing_create(ranks, &views.fd), EVEN_OK);
  assert_int_equal(even_standing_open(views.fd, &views.agent), EVEN_OK);
  assert_int_equal(even_standing_open(views.fd, &views.rank), EVEN_OK);
  return views;
}

static void close_views(two_views *views) {
  even_shared_memory memory;
  even_standing_close(views->agent);
  even_standing_close(views->rank);
  assert_int_equal(even_shared_memory_adopt(views->fd, &memory), EVEN_OK);
  even_shared_memory_close(&memory);
}

static void a_process_stands_until_it_is_told_to_go_on(void **state) {
  two_views views = open_views(3);
  (void)state;
  assert_int_equal(even_standing_ns(views.rank, 7, 4711, 1000 * MS), 0);
  even_standing_tell(views.agent, 2, 7, 4711, 20 * MS, 1000 * MS);
  assert_int_equal(even_standing_ns(views.rank, 7, 4711, 1000 * MS), 20 * MS);
  assert_int_equal(even_standing_ns(views.rank, 7, 4711, 1500 * MS), 20 * MS); /* what was seen, and no more */
  even_standing_tell(views.agent, 2, 7, 4711, 160 * MS, 1600 * MS);
  assert_int_equal(even_standing_ns(views.rank, 7, 4711, 1600 * MS), 160 * MS);
  even_standing_tell(views.agent, 2, 7, 4711, 0, 1620 * MS);
  assert_int_equal(even_standing_ns(views.rank, 7, 4711, 1620 * MS), 0);
  close_views(&views);
}

static void nobody_else_is_meant(void **state) {
  two_views views = open_views(3);
  (void)state;
  even_standing_tell(views.agent, 0, 7, 4711, 20 * MS, 1000 * MS);
  even_standing_tell(views.agent, 1, 8, 4712, 30 * MS, 1000 * MS);
  assert_int_equal(even_standing_ns(views.rank, 8, 4711, 1000 * MS), 0); /* the same number on another host */
  assert_int_equal(even_standing_ns(views.rank, 7, 4712, 1000 * MS), 0);
  assert_int_equal(even_standing_ns(views.rank, 0, 0, 1000 * MS), 0);
  assert_int_equal(even_standing_ns(views.rank, 8, 4712, 1000 * MS), 30 * MS);
  even_standing_tell(views.agent, 0, 7, 4711, 0, 1000 * MS);
  assert_int_equal(even_standing_ns(views.rank, 8, 4712, 1000 * MS), 30 * MS);
  even_standing_tell(views.agent, 1, 8, 4713, 40 * MS, 1000 * MS); /* another process in its place */
  assert_int_equal(even_standing_ns(views.rank, 8, 4712, 1000 * MS), 0);
  even_standing_begin(views.agent); /* another attempt */
  assert_int_equal(even_standing_ns(views.rank, 8, 4713, 1000 * MS), 0);
  even_standing_tell(views.agent, 3, 8, 4713, 40 * MS, 1000 * MS); /* no rank */
  even_standing_tell(views.agent, -1, 8, 4713, 40 * MS, 1000 * MS);
  assert_int_equal(even_standing_ns(views.rank, 8, 4713, 1000 * MS), 0);
  close_views(&views);
}

static void what_nobody_says_again_counts_no_more(void **state) {
  two_views views = open_views(1);
  (void)state;
  even_standing_tell(views.agent, 0, 7, 4711, 160 * MS, 1000 * MS);
  assert_int_equal(even_standing_ns(views.rank, 7, 4711, 1000 * MS + EVEN_STANDING_FRESH_NS - 1), 160 * MS);
  assert_int_equal(even_standing_ns(views.rank, 7, 4711, 1000 * MS + EVEN_STANDING_FRESH_NS), 0);
  assert_int_equal(even_standing_ns(views.rank, 7, 4711, 999 * MS), 160 * MS); /* told since the clock was read */
  close_views(&views);
}

static void other_memory_is_refused(void **state) {
  even_shared_memory memory;
  even_standing *standing = NULL;
  int fd = -1;
  (void)state;
  assert_int_equal(even_shared_memory_create("something-else", 4096, &memory), EVEN_OK);
  assert_int_equal(even_standing_open(memory.fd, &standing), EVEN_ERR_INPUT);
  assert_null(standing);
  even_shared_memory_close(&memory);
  assert_int_not_equal(even_standing_open(-1, &standing), EVEN_OK);
  assert_int_equal(even_standing_create(0, &fd), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_standing_create(4097, &fd), EVEN_ERR_ARGUMENT);
  assert_int_equal(fd, -1);
  even_standing_close(NULL);
}

static even_status make_and_map(void *context) {
  even_standing *standing = NULL;
  int fd = -1;
  (void)context;
  EVEN_TRY(even_standing_create(2, &fd));
  even_status status = even_standing_open(fd, &standing);
  even_standing_close(standing);
  (void)even_os_real.close(fd);
  return status;
}

static void faults_leave_nothing(void **state) {
  (void)state;
  assert_true(fault_each_allocation(make_and_map, NULL) > 0);
  assert_true(fault_each_os(make_and_map, NULL, EMFILE) > 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_process_stands_until_it_is_told_to_go_on),
      cmocka_unit_test(nobody_else_is_meant),
      cmocka_unit_test(what_nobody_says_again_counts_no_more),
      cmocka_unit_test(other_memory_is_refused),
      cmocka_unit_test(faults_leave_nothing),
  };
  return cmocka_run_group_tests_name("who stands still", tests, NULL, NULL);
}
