/* Failures of device communicators: each call of NCCL and the driver in turn, asynchronous errors, hangs, aborts. */
#include "comm/device_ranks.h"
#include "comm/fake_gpu.h"
#include "comm/nccl/grouped.h"
#include "support/fault.h"

#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void open_alone(device_rank *at, double timeout_seconds) {
  even_device_comm_id id;
  device_setup setup = {.ranks = 1, .timeout_seconds = timeout_seconds};
  assert_int_equal(even_device_comm_make_id(NULL, &id), EVEN_OK);
  assert_int_equal(device_rank_begin(&setup, 0, &id, at), EVEN_OK);
}

static even_status sum_alone(device_rank *at, const double *weight) {
  static float data[4];
  return even_device_comm_all_reduce(at->comm, data, data, 4, EVEN_F32, EVEN_SUM, weight, at->stream);
}

/* A life in which one call fails; the status is the first failure's. */
static even_status live(void *unused) {
  even_device_comm_id id;
  even_device_comm_params params = {.size = sizeof params, .ranks = 1, .timeout_seconds = 30};
  even_device_comm *comm = (even_device_comm *)(void *)&id; /* what a caller's variable holds before it is opened */
  float data[6] = {0};
  double weight = 0.5;
  const size_t parts[] = {6};
  const void *inputs[] = {data};
  void *outputs[] = {data + 3};
  const size_t bytes[] = {4};
  (void)unused;
  even_status status = even_device_comm_make_id(NULL, &id);
  if (status == EVEN_OK) {
    status = even_device_comm_open(&params, &id, &comm);
    assert_true((status == EVEN_OK) == (comm != NULL));
  }
  if (status != EVEN_OK) {
    return status;
  }
#define STEP(call)                                \
  do {                                            \
    status = status == EVEN_OK ? (call) : status; \
  } while (0)
  STEP(even_device_comm_all_reduce(comm, data, data, 6, EVEN_F32, EVEN_SUM, &weight, NULL));
  STEP(even_device_comm_reduce(comm, data, data, 6, EVEN_F32, EVEN_MAX, NULL, 0, NULL));
  STEP(even_device_comm_reduce_scatter(comm, data, data, parts, EVEN_F32, EVEN_SUM, NULL, NULL));
  STEP(even_device_comm_all_gather(comm, data, data, bytes, NULL));
  STEP(even_device_comm_broadcast(comm, data, 4, 0, NULL));
  STEP(even_device_comm_all_to_all(comm, inputs, bytes, outputs, bytes, NULL));
  STEP(even_device_comm_poll(comm));
  fake_gpu_wait(NULL, 0);
  even_status closed = even_device_comm_close(comm);
  return status == EVEN_OK ? closed : status;
}

static void every_call_may_fail(void **state) {
  static const char *const functions[] = {"ncclGetUniqueId",
                                          "ncclCommInitRankConfig",
                                          "ncclCommFinalize",
                                          "ncclCommDestroy",
                                          "ncclCommGetAsyncError",
                                          "ncclRedOpCreatePreMulSum",
                                          "ncclAllReduce",
                                          "ncclReduce",
                                          "ncclReduceScatter",
                                          "ncclAllGather",
                                          "ncclBroadcast",
                                          "ncclSend",
                                          "ncclRecv",
                                          "ncclGroupStart",
                                          "ncclGroupEnd",
                                          "cuDeviceGetCount",
                                          "cuDeviceGet",
                                          "cuDevicePrimaryCtxRetain",
                                          "cuMemAlloc_v2"};
  (void)state;
  assert_int_equal(live(NULL), EVEN_OK);
  for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
    fake_gpu_fail(functions[i], 1, 2); /* NCCL: a system error; the driver: out of memory */
    even_status status = live(NULL);
    bool driver = functions[i][0] == 'c';
    if (status != (driver ? EVEN_ERR_DEVICE : EVEN_ERR_SYSTEM)) {
      fail_msg("%s: %s: %s", functions[i], even_status_name(status), even_error_last()->what);
    }
    assert_non_null(strstr(even_error_last()->what, driver ? "out of memory" : "unhandled system error"));
    assert_int_equal(fake_gpu_live(), 0);
    fake_gpu_fail(NULL, 0, 0);
  }
}

static void a_context_that_cannot_be_set_is_an_error(void **state) {
  (void)state;
  for (int nth = 1; nth <= 4; nth++) {
    fake_gpu_fail_here("cuCtxPushCurrent_v2", nth, 2);
    assert_int_equal(live(NULL), EVEN_ERR_DEVICE);
    fake_gpu_fail(NULL, 0, 0);
  }
  /* the memory of a GPU that is gone is lost: these four calls leave nothing else */
  while (fake_gpu_live() > 0) {
    fail_msg("%d things left", fake_gpu_live());
  }
}

static void memory_may_run_out(void **state) {
  (void)state;
  assert_true(fault_each_allocation(live, NULL) >= 2);
}

static void nccl_s_words_become_ours(void **state) {
  static const struct {
    int result;
    even_status status;
    const char *fix;
  } table[] = {{1, EVEN_ERR_DEVICE, "the process has to start anew"},
               {2, EVEN_ERR_SYSTEM, "/dev/shm"},
               {3, EVEN_ERR_DEVICE, "NCCL_DEBUG=WARN"},
               {5, EVEN_ERR_STATE, "NCCL_DEBUG=WARN"},
               {6, EVEN_ERR_PEER_LOST, "the other ranks' errors"},
               {99, EVEN_ERR_DEVICE, "NCCL_DEBUG=WARN"}};
  (void)state;
  for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
    device_rank at;
    open_alone(&at, 60);
    fake_gpu_say("words of its own");
    fake_gpu_fail("ncclAllReduce", 1, table[i].result);
    assert_int_equal(sum_alone(&at, NULL), table[i].status);
    assert_non_null(strstr(even_error_last()->what, "all_reduce (4) on rank 0 of 1, cuda:0: NCCL says: "));
    assert_non_null(strstr(even_error_last()->what, "words of its own"));
    assert_non_null(strstr(even_error_last()->fix, table[i].fix));
    assert_int_equal(even_error_last()->rank, 0);
    assert_string_equal(even_error_last()->device, "cuda:0");
    /* broken from now on, and it says why */
    assert_int_equal(sum_alone(&at, NULL), EVEN_ERR_STATE);
    assert_non_null(strstr(even_error_last()->what, "words of its own"));
    assert_int_equal(even_device_comm_poll(at.comm), table[i].status);
    assert_int_equal(device_rank_end(&at), EVEN_OK); /* aborted, not finalized */
    assert_non_null(strstr(fake_gpu_log(), "ncclCommAbort"));
    assert_null(strstr(fake_gpu_log(), "ncclCommFinalize"));
    fake_gpu_reset();
  }
}

static void a_refused_argument_breaks_nothing(void **state) {
  device_rank at;
  (void)state;
  open_alone(&at, 60);
  fake_gpu_fail("ncclAllReduce", 1, 4);
  assert_int_equal(sum_alone(&at, NULL), EVEN_ERR_ARGUMENT);
  assert_int_equal(sum_alone(&at, NULL), EVEN_OK);
  assert_int_equal(device_rank_end(&at), EVEN_OK);
}

static void a_failure_inside_a_group_ends_it(void **state) {
  device_rank at;
  double weight = 0.5;
  (void)state;
  open_alone(&at, 60);
  assert_int_equal(even_device_comm_group_begin(at.comm), EVEN_OK);
  assert_int_equal(sum_alone(&at, &weight), EVEN_OK);
  fake_gpu_fail("ncclAllReduce", 1, 3);
  assert_int_equal(sum_alone(&at, &weight), EVEN_ERR_DEVICE);
  assert_int_equal(even_device_comm_group_end(at.comm), EVEN_ERR_DEVICE);
  assert_int_equal(sum_alone(&at, NULL), EVEN_ERR_STATE);
  assert_int_equal(device_rank_end(&at), EVEN_OK);
}

static void an_asynchronous_error_is_seen(void **state) {
  device_rank at;
  (void)state;
  open_alone(&at, 60);
  assert_int_equal(even_device_comm_poll(at.comm), EVEN_OK);
  fake_gpu_async_error(0, 6);
  assert_int_equal(even_device_comm_poll(at.comm), EVEN_ERR_PEER_LOST);
  assert_int_equal(sum_alone(&at, NULL), EVEN_ERR_STATE);
  assert_int_equal(device_rank_end(&at), EVEN_OK);
}

static void a_rank_that_does_not_come_is_a_time_out(void **state) {
  even_device_comm_id id;
  device_rank at;
  device_setup setup = {.ranks = 2, .timeout_seconds = 0.05};
  (void)state;
  assert_int_equal(even_device_comm_make_id(NULL, &id), EVEN_OK);
  assert_int_equal(device_rank_begin(&setup, 0, &id, &at), EVEN_ERR_TIMEOUT);
  assert_non_null(strstr(even_error_last()->what, "open on rank 0 of 2 (cuda:0)"));
}

static void a_call_that_is_never_ready_is_a_time_out(void **state) {
  device_rank at;
  (void)state;
  open_alone(&at, 60);
  even_device_comm_set_timeout(at.comm, 0.05);
  fake_gpu_polls(1 << 30);
  assert_int_equal(sum_alone(&at, NULL), EVEN_ERR_TIMEOUT);
  even_status again = sum_alone(&at, NULL);
  /* a time-out again where the watcher was the first to see that it is late */
  assert_true(again == EVEN_ERR_STATE || again == EVEN_ERR_TIMEOUT);
  fake_gpu_polls(0);
  assert_int_equal(device_rank_end(&at), EVEN_OK);
}

static void a_call_that_is_never_ready_ends_at_its_own_limit(void **state) {
  device_rank at;
  (void)state;
  open_alone(&at, 60);
  even_device_comm_set_call_timeout(at.comm, 0.05);
  fake_gpu_polls(1 << 30);
  assert_int_equal(sum_alone(&at, NULL), EVEN_ERR_TIMEOUT);
  fake_gpu_polls(0);
  assert_int_equal(device_rank_end(&at), EVEN_OK);
}

static void work_that_never_ends_is_aborted_at_the_close(void **state) {
  device_rank at;
  (void)state;
  open_alone(&at, 0.05);
  fake_gpu_hang(true);
  assert_int_equal(sum_alone(&at, NULL), EVEN_OK); /* it is on the stream: the host goes on */
  assert_int_equal(even_device_comm_close(at.comm), EVEN_ERR_TIMEOUT);
  fake_gpu_wait(at.stream, 0); /* the abort has ended it */
  fake_gpu_stream_free(at.stream);
}

static void abort_ends_what_hangs(void **state) {
  device_rank at;
  (void)state;
  open_alone(&at, 60);
  fake_gpu_hang(true);
  assert_int_equal(sum_alone(&at, NULL), EVEN_OK);
  even_device_comm_abort(at.comm);
  device_rank_wait(&at);
  assert_int_equal(sum_alone(&at, NULL), EVEN_ERR_REVOKED);
  assert_int_equal(even_device_comm_poll(at.comm), EVEN_ERR_REVOKED);
  even_device_comm_abort(at.comm); /* again: nothing */
  assert_int_equal(device_rank_end(&at), EVEN_OK);
}

/* A thread that aborts while another is inside a call that would last for an hour. */
static void *abort_from_elsewhere(void *argument) {
  device_rank *at = argument;
  while (!fake_gpu_was_called("ncclAllReduce") && even_device_comm_poll(at->comm) == EVEN_OK) {
  }
  even_device_comm_abort(at->comm);
  return NULL;
}

static void abort_ends_a_call_under_way(void **state) {
  device_rank at;
  pthread_t thread;
  (void)state;
  open_alone(&at, 3600);
  fake_gpu_polls(1 << 30);
  assert_int_equal(pthread_create(&thread, NULL, abort_from_elsewhere, &at), 0);
  assert_int_equal(sum_alone(&at, NULL), EVEN_ERR_REVOKED);
  (void)pthread_join(thread, NULL);
  fake_gpu_polls(0);
  assert_int_equal(device_rank_end(&at), EVEN_OK);
}

static void *abort_at_once(void *argument) {
  even_device_comm_abort(((device_rank *)argument)->comm);
  return NULL;
}

/* Whose group is open, and who perhaps never ends it. */
static void abort_does_not_wait_for_another_thread_s_group(void **state) {
  device_rank at;
  pthread_t thread;
  (void)state;
  open_alone(&at, 60);
  fake_gpu_hang(true);
  assert_int_equal(sum_alone(&at, NULL), EVEN_OK);
  assert_int_equal(even_device_comm_group_begin(at.comm), EVEN_OK);
  assert_int_equal(pthread_create(&thread, NULL, abort_at_once, &at), 0);
  (void)pthread_join(thread, NULL);
  assert_false(fake_gpu_was_called("ncclCommAbort"));
  assert_int_equal(even_device_comm_group_end(at.comm), EVEN_ERR_REVOKED);
  device_rank_wait(&at); /* its end has ended what hangs */
  assert_int_equal(device_rank_end(&at), EVEN_OK);
}

typedef struct attempts {
  device_rank *at;
  even_status summed, closed;
  even_error sum_error, error;
} attempts;

static void *sum_and_close(void *argument) {
  attempts *tried = argument;
  tried->summed = sum_alone(tried->at, NULL);
  tried->sum_error = *even_error_last();
  tried->closed = even_device_comm_close(tried->at->comm);
  tried->error = *even_error_last();
  return NULL;
}

static void try_beside_an_open_group(attempts *tried) {
  pthread_t thread;
  assert_int_equal(pthread_create(&thread, NULL, sum_and_close, tried), 0);
  (void)pthread_join(thread, NULL);
  assert_int_equal(tried->closed, EVEN_ERR_TIMEOUT);
  assert_non_null(strstr(tried->error.what, "close on rank 7 of 1 (cuda:0): another thread has a group"));
  assert_int_equal(tried->error.rank, 7);
  assert_non_null(strstr(tried->error.fix, "then close again; until then the communicator keeps its memory"));
}

/* Which it perhaps never ends: the communicator stays, and is as it was. */
static void close_waits_for_another_thread_s_group_within_the_limit(void **state) {
  static const int number = 7; /* what rank 0 is called */
  const device_setup setup = {.ranks = 1, .timeout_seconds = 3600, .numbers = &number};
  device_rank at;
  even_device_comm_id id;
  attempts tried = {.at = &at};
  (void)state;
  assert_int_equal(even_device_comm_make_id(NULL, &id), EVEN_OK);
  assert_int_equal(device_rank_begin(&setup, 0, &id, &at), EVEN_OK);
  assert_int_equal(even_device_comm_group_begin(at.comm), EVEN_OK);
  even_device_comm_set_timeout(at.comm, 0.05);
  try_beside_an_open_group(&tried);
  even_device_comm_set_timeout(at.comm, 3600); /* what is to be done may take its time */
  assert_int_equal(tried.summed, EVEN_ERR_TIMEOUT);
  assert_string_equal(tried.sum_error.fix, "end the group on the thread that began it, then all_reduce again");
  assert_null(strstr(tried.error.what, "has ended"));
  assert_int_equal(even_device_comm_group_end(at.comm), EVEN_OK);
  assert_int_equal(sum_alone(&at, NULL), EVEN_OK);
  device_rank_wait(&at);
  assert_int_equal(even_device_comm_group_begin(at.comm), EVEN_OK);
  even_device_comm_abort(at.comm);
  try_beside_an_open_group(&tried);
  assert_int_equal(tried.summed, EVEN_ERR_REVOKED);
  assert_non_null(strstr(tried.error.what, ", though the communicator has ended"));
  assert_int_equal(even_device_comm_group_end(at.comm), EVEN_ERR_REVOKED);
  assert_int_equal(device_rank_end(&at), EVEN_OK);
}

/* ---- threads that end with a group open ---- */

typedef struct leaver {
  device_rank *at;
  int groups; /* that it opens, */
  bool ends;  /* and whether it ends them */
  sem_t open;
  sem_t on;
  even_status ended;
} leaver;

static void *open_groups(void *argument) {
  leaver *of = argument;
  for (int i = 0; i < of->groups; i++) {
    if (even_device_comm_group_begin(of->at->comm) != EVEN_OK) {
      return NULL;
    }
  }
  if (sum_alone(of->at, NULL) != EVEN_OK) {
    return NULL;
  }
  (void)sem_post(&of->open);
  (void)sem_wait(&of->on);
  for (int i = 0; of->ends && i < of->groups; i++) {
    of->ended = even_device_comm_group_end(of->at->comm);
  }
  return of;
}

static void begin_leaving(leaver *of, pthread_t *thread) {
  assert_int_equal(sem_init(&of->open, 0, 0), 0);
  assert_int_equal(sem_init(&of->on, 0, 0), 0);
  assert_int_equal(pthread_create(thread, NULL, open_groups, of), 0);
  assert_int_equal(sem_wait(&of->open), 0);
}

static void let_leave(leaver *of, pthread_t thread) {
  void *result = NULL;
  assert_int_equal(sem_post(&of->on), 0);
  assert_int_equal(pthread_join(thread, &result), 0);
  assert_ptr_equal(result, of);
}

static void a_thread_that_ends_leaves_no_group_open(void **state) {
  device_rank at;
  leaver of = {.at = &at};
  pthread_t thread;
  (void)state;
  for (of.groups = 1; of.groups <= 2; of.groups++) {
    open_alone(&at, 60);
    begin_leaving(&of, &thread);
    let_leave(&of, thread);
    assert_int_equal(sum_alone(&at, NULL), EVEN_ERR_STATE);
    assert_non_null(strstr(even_error_last()->what, "a thread of rank 0 of 1 (cuda:0) has ended with a group of this"));
    assert_non_null(strstr(even_error_last()->fix, "end the group on the thread that began it"));
    assert_int_equal(device_rank_end(&at), EVEN_OK); /* and all is given back */
  }
  of.groups = 1; /* of one that has ended before */
  open_alone(&at, 60);
  begin_leaving(&of, &thread);
  even_device_comm_abort(at.comm);
  let_leave(&of, thread);
  assert_int_equal(sum_alone(&at, NULL), EVEN_ERR_REVOKED);
  assert_int_equal(device_rank_end(&at), EVEN_OK);
}

/* It goes with the group, and nobody has it any more. */
static void what_is_forgotten_goes_with_another_thread_s_group(void **state) {
  device_rank at;
  leaver of = {.at = &at};
  pthread_t thread;
  (void)state;
  for (int i = 0; i < 4; i++) {
    of.groups = 1 + i / 2;
    of.ends = i % 2 == 0;
    open_alone(&at, 60);
    begin_leaving(&of, &thread);
    even_device_forget(at.comm);
    assert_true(fake_gpu_live() > 0);
    let_leave(&of, thread);
    assert_true(!of.ends || of.ended == EVEN_ERR_REVOKED);
    device_rank_wait(&at);
    assert_int_equal(fake_gpu_live(), 0);
    fake_gpu_stream_free(at.stream);
  }
  open_alone(&at, 60); /* one's own group, and none */
  assert_int_equal(even_device_comm_group_begin(at.comm), EVEN_OK);
  even_device_forget(at.comm);
  fake_gpu_stream_free(at.stream);
  open_alone(&at, 60);
  even_device_forget(at.comm);
  fake_gpu_stream_free(at.stream);
}

static void abort_and_close_inside_a_group(void **state) {
  device_rank at;
  double weight = 0.5;
  (void)state;
  open_alone(&at, 60);
  assert_int_equal(even_device_comm_group_begin(at.comm), EVEN_OK);
  assert_int_equal(sum_alone(&at, &weight), EVEN_OK);
  even_device_comm_abort(at.comm);
  assert_int_equal(sum_alone(&at, NULL), EVEN_ERR_REVOKED);
  assert_int_equal(device_rank_end(&at), EVEN_OK);
  open_alone(&at, 60);
  assert_int_equal(even_device_comm_group_begin(at.comm), EVEN_OK);
  assert_int_equal(even_device_comm_group_begin(at.comm), EVEN_OK);
  assert_int_equal(device_rank_end(&at), EVEN_OK);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, device_test_begin, device_test_end)
  const struct CMUnitTest tests[] = {
      TEST(every_call_may_fail),
      TEST(a_context_that_cannot_be_set_is_an_error),
      TEST(memory_may_run_out),
      TEST(nccl_s_words_become_ours),
      TEST(a_refused_argument_breaks_nothing),
      TEST(a_failure_inside_a_group_ends_it),
      TEST(an_asynchronous_error_is_seen),
      TEST(a_rank_that_does_not_come_is_a_time_out),
      TEST(a_call_that_is_never_ready_is_a_time_out),
      TEST(a_call_that_is_never_ready_ends_at_its_own_limit),
      TEST(work_that_never_ends_is_aborted_at_the_close),
      TEST(abort_ends_what_hangs),
      TEST(abort_ends_a_call_under_way),
      TEST(abort_does_not_wait_for_another_thread_s_group),
      TEST(close_waits_for_another_thread_s_group_within_the_limit),
      TEST(a_thread_that_ends_leaves_no_group_open),
      TEST(what_is_forgotten_goes_with_another_thread_s_group),
      TEST(abort_and_close_inside_a_group),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
