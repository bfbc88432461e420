/* What ends a device communicator of one rank: the GPU, NCCL, time; and whom nothing ends: graphs, forks, faults. */
#include "comm/device_ranks.h"
#include "comm/fake_gpu.h"
#include "os/clock.h"
#include "support/fault.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static even_status only_mine(void *context, const void *mine, size_t bytes, void *all) {
  (void)context;
  memcpy(all, mine, bytes);
  return EVEN_OK;
}

static even_status open_alone(double timeout_seconds, bool leave_abort, even_device_comm **out) {
  even_device_comm_id id;
  even_device_comm_params params = {.size = sizeof params,
                                    .ranks = 1,
                                    .timeout_seconds = timeout_seconds,
                                    .gather = only_mine,
                                    .leave_abort = leave_abort};
  even_status status = even_device_comm_make_id(NULL, &id);
  return status == EVEN_OK ? even_device_comm_open(&params, &id, out) : status;
}

/* Opens one, with a call on its stream that does not end by itself. */
static even_device_comm *open_hanging(double timeout_seconds, bool leave_abort) {
  static float data[4];
  even_device_comm *comm = NULL;
  assert_int_equal(open_alone(timeout_seconds, leave_abort, &comm), EVEN_OK);
  fake_gpu_hang(true);
  assert_int_equal(even_device_comm_all_reduce(comm, data, data, 4, EVEN_F32, EVEN_SUM, NULL, NULL), EVEN_OK);
  return comm;
}

static even_status await_end(even_device_comm *comm) {
  while (!even_device_comm_has_ended(comm)) {
    even_clock_sleep_ns(200000);
  }
  return even_device_comm_poll(comm);
}

static void an_error_of_the_gpu_ends_it(void **state) {
  even_device_comm *comm = open_hanging(60, false);
  (void)state;
  fake_gpu_fail("cuEventQuery", 1, 700);
  assert_int_equal(await_end(comm), EVEN_ERR_DEVICE);
  assert_non_null(strstr(even_error_last()->what, "cuda:0 failed with calls on its streams"));
  assert_int_equal(even_device_comm_close(comm), EVEN_OK);
}

static void an_error_of_nccl_ends_it(void **state) {
  even_device_comm *comm = open_hanging(60, false);
  (void)state;
  fake_gpu_async_error(0, 6);
  assert_int_equal(await_end(comm), EVEN_ERR_PEER_LOST);
  assert_non_null(strstr(even_error_last()->what, "remote process exited"));
  assert_int_equal(even_device_comm_close(comm), EVEN_OK);
}

/* An end that nobody heard of is the close's status. */
static void the_close_says_what_nobody_asked_for(void **state) {
  even_device_comm *comm = open_hanging(0.01, false);
  (void)state;
  while (!even_device_comm_has_ended(comm)) {
    even_clock_sleep_ns(200000);
  }
  assert_int_equal(even_device_comm_close(comm), EVEN_ERR_TIMEOUT);
}

static void who_shrinks_leaves_the_abort_to_that(void **state) {
  static float data[4];
  even_device_comm *comm = open_hanging(0.01, true);
  (void)state;
  assert_int_equal(await_end(comm), EVEN_ERR_TIMEOUT);
  assert_false(fake_gpu_was_called("ncclCommAbort"));
  assert_int_equal(even_device_comm_all_reduce(comm, data, data, 4, EVEN_F32, EVEN_SUM, NULL, NULL), EVEN_ERR_TIMEOUT);
  even_device_comm_abort(comm);
  assert_true(fake_gpu_was_called("ncclCommAbort"));
  assert_int_equal(even_device_comm_close(comm), EVEN_OK);
}

static void what_a_graph_captures_is_not_asked_for(void **state) {
  static float data[4];
  even_device_comm *comm = NULL;
  (void)state;
  void *stream = fake_gpu_stream(0);
  assert_int_equal(open_alone(60, false, &comm), EVEN_OK);
  fake_gpu_capture(stream, true);
  assert_int_equal(even_device_comm_all_reduce(comm, data, data, 4, EVEN_F32, EVEN_SUM, NULL, stream), EVEN_OK);
  fake_gpu_wait(stream, 0);
  assert_int_equal(even_device_comm_poll(comm), EVEN_OK);
  fake_gpu_capture(stream, false);
  assert_int_equal(even_device_comm_close(comm), EVEN_OK);
  fake_gpu_stream_free(stream);
}

static void a_child_of_a_fork_leaves_it_alone(void **state) {
  even_device_comm *comm = NULL;
  int status = 1;
  (void)state;
  assert_int_equal(open_alone(60, false, &comm), EVEN_OK);
  pid_t child = fork();
  if (child == 0) {
    even_device_comm_abort(comm);
    _exit(even_device_comm_close(comm) != EVEN_OK || fake_gpu_was_called("ncclCommAbort"));
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_int_equal(status, 0);
  assert_int_equal(even_device_comm_close(comm), EVEN_OK);
}

/* Without a thread for it, the look itself aborts. */
static void streams_go_on_without_a_thread(void **state) {
  (void)state;
  fault_os(FAULT_thread_create, 2,
           EAGAIN); /* the first one looks; it runs from here on, and sees no change of faults */
  even_device_comm *comm = open_hanging(0.01, false);
  assert_int_equal(await_end(comm), EVEN_ERR_TIMEOUT);
  fake_gpu_wait(NULL, 0);
  assert_int_equal(even_device_comm_close(comm), EVEN_OK);
  assert_int_equal(fault_os_calls(FAULT_thread_create), 2);
}

static even_status live(void *unused) {
  static float data[4];
  even_device_comm *comm = NULL;
  (void)unused;
  even_status status = open_alone(60, false, &comm);
  if (status != EVEN_OK) {
    return status;
  }
  for (int i = 0; i < 20 && status == EVEN_OK; i++) { /* more than there is room for at first */
    status = even_device_comm_all_reduce(comm, data, data, 4, EVEN_F32, EVEN_SUM, NULL, NULL);
  }
  fake_gpu_wait(NULL, 0);
  even_status closed = even_device_comm_close(comm);
  return status == EVEN_OK ? closed : status;
}

static void memory_may_run_out(void **state) {
  (void)state;
  assert_int_equal(live(NULL), EVEN_OK); /* the watcher is made */
  for (long nth = 1;; nth++) {           /* without its host's name a rank knows nobody, and that is all */
    fault_reset();
    fault_allocation(nth);
    even_status status = live(NULL);
    bool faulted = fault_allocations() >= nth;
    assert_int_equal(fault_live_blocks(), 0);
    assert_true(status == EVEN_OK || (faulted && status == EVEN_ERR_MEMORY));
    assert_int_equal(fake_gpu_live(), 0);
    if (!faulted) {
      assert_true(nth > 6);
      break;
    }
  }
}

static void the_system_may_fail(void **state) {
  (void)state;
  assert_true(fault_each_os(live, NULL, EMFILE) >= 3);
}

static void events_may_fail(void **state) {
  static const char *const functions[] = {"cuEventCreate", "cuEventRecord"};
  (void)state;
  for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
    for (int nth = 1; nth <= 4; nth++) { /* the call is made, and not watched */
      fake_gpu_fail(functions[i], nth, 2);
      assert_int_equal(live(NULL), EVEN_OK);
      assert_int_equal(fake_gpu_live(), 0);
    }
    fake_gpu_fail(NULL, 0, 0);
  }
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, device_test_begin, device_test_end)
  const struct CMUnitTest tests[] = {
      TEST(an_error_of_the_gpu_ends_it),
      TEST(an_error_of_nccl_ends_it),
      TEST(the_close_says_what_nobody_asked_for),
      TEST(who_shrinks_leaves_the_abort_to_that),
      TEST(what_a_graph_captures_is_not_asked_for),
      TEST(a_child_of_a_fork_leaves_it_alone),
      TEST(streams_go_on_without_a_thread),
      TEST(memory_may_run_out),
      TEST(the_system_may_fail),
      TEST(events_may_fail),
  };
  return cmocka_run_group_tests_name("a device communicator alone", tests, NULL, NULL);
}
