/* Messages of a group that ends, or that its rank leaves, in the middle of them: nothing is moved any more, and
 * everybody reads why. */
#include "base/alloc.h"
#include "base/fail.h"
#include "comm/messages.h"
#include "comm/ranks.h"
#include "os/clock.h"
#include "support/fault.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define TAG 7
#define MESSAGE ((size_t)4096)
#define HALF (MESSAGE / 2)

static const ranks_setup two = {.ranks = 2, .timeout_seconds = 60, .spin = -1};

static void on_both(ranks_body *body) {
  ranks_setup threads = two;
  threads.threads = true;
  assert_int_equal(ranks_run(&two, body, NULL, NULL), 0);
  assert_int_equal(ranks_run(&threads, body, NULL, NULL), 0);
}

static even_status receive_now(even_comm *comm, void *data, size_t bytes, int peer, uint64_t tag) {
  even_comm_request *request = NULL;
  even_status status = even_comm_receive_begin(comm, data, bytes, peer, tag, &request);
  status = status == EVEN_OK ? even_comm_request_wait(request, 0, NULL) : status;
  even_comm_request_free(request);
  return status;
}

/* ---- a receive of which a half has come, from the only rank of a group, which the test writes itself ---- */

typedef struct half_receive {
  even_comm *comm;
  even_comm_request *request;
  unsigned char *data;
  unsigned char sent[MESSAGE];
} half_receive;

static void receive_half(half_receive *half) {
  even_message_header header = {.tag = TAG, .what = MESSAGE};
  half->comm = ranks_open_alone(0);
  half->data = calloc(1, MESSAGE);
  memset(half->sent, 's', MESSAGE);
  assert_int_equal(even_channel_write(half->comm, 0, &header, sizeof header), sizeof header);
  assert_int_equal(even_channel_write(half->comm, 0, half->sent, HALF), HALF);
  assert_int_equal(even_comm_receive_begin(half->comm, half->data, MESSAGE, 0, TAG, &half->request), EVEN_OK);
  assert_int_equal(half->data[HALF - 1], 's');
  assert_int_equal(half->data[HALF], 0);
}

static void send_rest(half_receive *half) {
  (void)even_channel_write(half->comm, 0, half->sent + HALF, MESSAGE - HALF);
}

/* A call that begins a message takes memory after its first look at the group and before the lock: what another thread
 * may do in that moment is done there. */
static half_receive *interrupted;
static void (*meanwhile)(half_receive *half);
static even_status meanwhile_status;

static void *allocate_and_interrupt(size_t bytes) {
  void (*once)(half_receive *) = meanwhile;
  meanwhile = NULL;
  if (once != NULL) {
    once(interrupted);
  }
  return malloc(bytes);
}

/* Begins another receive of the same message, which `interruption` interrupts. */
static even_status begin_interrupted(half_receive *half, void (*interruption)(half_receive *), unsigned char *data,
                                     even_comm_request **out) {
  even_allocator kept = even_allocator_current;
  interrupted = half;
  meanwhile = interruption;
  even_allocator_current.allocate = allocate_and_interrupt;
  even_status status = even_comm_receive_begin(half->comm, data, MESSAGE, 0, TAG, out);
  even_allocator_current = kept;
  assert_null(meanwhile);
  return status;
}

static void wait_too_long(half_receive *half) {
  meanwhile_status = even_comm_request_wait(half->request, 0.01, NULL);
  even_comm_request_free(half->request);
  free(half->data); /* nobody may write there now */
  half->data = NULL;
  send_rest(half);
}

static void revoke_it(half_receive *half) {
  even_comm_revoke(half->comm);
  meanwhile_status = even_comm_request_wait(half->request, 0, NULL);
  even_comm_request_free(half->request);
  send_rest(half);
}

static void leave_it(half_receive *half) {
  even_comm_leave(half->comm);
  meanwhile_status = even_comm_request_wait(half->request, 0, NULL);
  even_comm_request_free(half->request);
  send_rest(half);
}

static void check_interrupted(void (*interruption)(half_receive *), even_status expected) {
  half_receive half;
  unsigned char data[MESSAGE] = {0};
  even_comm_request *request = NULL;
  receive_half(&half);
  assert_int_equal(begin_interrupted(&half, interruption, data, &request), expected);
  assert_int_equal(meanwhile_status, expected);
  assert_null(request);
  assert_int_equal(data[HALF], 0);
  even_message_stream *stream = &half.comm->messages->streams[0];
  (void)pthread_mutex_lock(&half.comm->messages->lock);
  assert_true(stream->taker == NULL && stream->keeper == NULL && !stream->headed && stream->got == 0);
  (void)pthread_mutex_unlock(&half.comm->messages->lock);
  free(half.data);
  even_comm_close(half.comm);
}

static void test_begun_while_another_times_out(void **state) {
  (void)state;
  check_interrupted(wait_too_long, EVEN_ERR_TIMEOUT);
}

static void test_begun_while_the_group_ends(void **state) {
  (void)state;
  check_interrupted(revoke_it, EVEN_ERR_REVOKED);
}

static void test_begun_while_another_thread_leaves(void **state) {
  (void)state;
  check_interrupted(leave_it, EVEN_ERR_STATE);
}

static void test_nothing_moves_after_the_end(void **state) {
  half_receive half;
  (void)state;
  receive_half(&half);
  (void)pthread_mutex_lock(&half.comm->messages->lock); /* nobody hears of the end yet */
  even_comm_revoke(half.comm);
  send_rest(&half);
  assert_false(even_messages_move(half.comm));
  assert_int_equal(half.data[HALF], 0);
  (void)pthread_mutex_unlock(&half.comm->messages->lock);
  assert_int_equal(even_comm_request_wait(half.request, 0, NULL), EVEN_ERR_REVOKED);
  even_comm_request_free(half.request);
  free(half.data);
  even_comm_close(half.comm);
}

/* ---- a dead peer, and nobody waits ---- */

#define WATCHDOG_NS ((uint64_t)30 * 1000000000u)

static int poll_alone(even_comm *comm, void *argument) {
  char word = 0;
  even_comm_request *request = NULL;
  (void)argument;
  if (even_comm_rank(comm) == 1) {
    (void)raise(SIGKILL);
  }
  fault_os_from(FAULT_thread_create, 1, EAGAIN);
  even_status status = even_comm_receive_begin(comm, &word, 1, 1, 0, &request);
  fault_reset();
  RANKS_EXPECT(comm, status == EVEN_OK);
  uint64_t began = even_clock_ns();
  while (!even_comm_request_done(request)) {
    RANKS_EXPECT(comm, even_clock_ns() - began < WATCHDOG_NS);
  }
  RANKS_EXPECT(comm, even_comm_request_wait(request, 0, NULL) == EVEN_ERR_PEER_LOST && even_error_last()->rank == 1);
  even_comm_request_free(request);
  return 0;
}

static void test_polled_alone(void **state) {
  int results[RANKS_MOST];
  (void)state;
  (void)ranks_run(&two, poll_alone, NULL, results);
  assert_int_equal(results[0], 0);
  assert_int_equal(results[1], RANKS_KILLED);
}

/* ---- who is late, and by whose limit ---- */

static bool says(const char *words) {
  return strstr(even_error_last()->what, words) != NULL;
}

static int one_is_late(even_comm *comm, void *argument) {
  char word = 0;
  even_comm_request *request = NULL;
  (void)argument;
  if (even_comm_rank(comm) == 0) {
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, &word, 1, 1, TAG, &request) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_request_wait(request, 0.05, NULL) == EVEN_ERR_TIMEOUT);
    RANKS_EXPECT(comm, says("receive of 1 bytes from rank 1 with tag 7 within the timeout of 0.05 s"));
    RANKS_EXPECT(comm, even_error_last()->rank == 1);
    even_comm_request_free(request);
    return 0;
  }
  RANKS_EXPECT(comm, receive_now(comm, &word, 1, 0, 0) == EVEN_ERR_TIMEOUT);
  RANKS_EXPECT(comm, says("rank 1 did not come in time") && !says("60")); /* its own limit has not passed */
  RANKS_EXPECT(comm, even_error_last()->rank == 1);
  return 0;
}

static int all_are_late(even_comm *comm, void *argument) {
  char word = 0;
  even_comm_request *request = NULL;
  (void)argument;
  if (even_comm_rank(comm) == 0) {
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, &word, 1, EVEN_COMM_ANY_RANK, TAG, &request) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_request_wait(request, 0.05, NULL) == EVEN_ERR_TIMEOUT);
    RANKS_EXPECT(comm, says("from any rank") && even_error_last()->rank == -1);
    RANKS_EXPECT(comm, strstr(even_error_last()->fix, "rank 0") == NULL && even_error_last()->fix[0] != '\0');
    even_comm_request_free(request);
    return 0;
  }
  RANKS_EXPECT(comm, receive_now(comm, &word, 1, 0, 0) == EVEN_ERR_TIMEOUT);
  RANKS_EXPECT(comm, says("no rank sent in time what rank 0 receives") && even_error_last()->rank == -1);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_TIMEOUT && even_error_last()->rank == -1);
  return 0;
}

static void test_the_late_one_is_named(void **state) {
  (void)state;
  on_both(one_is_late);
}

static void test_nobody_is_named_where_any_could_come(void **state) {
  (void)state;
  on_both(all_are_late);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_begun_while_another_times_out),
      cmocka_unit_test(test_begun_while_the_group_ends),
      cmocka_unit_test(test_begun_while_another_thread_leaves),
      cmocka_unit_test(test_nothing_moves_after_the_end),
      cmocka_unit_test(test_polled_alone),
      cmocka_unit_test(test_the_late_one_is_named),
      cmocka_unit_test(test_nobody_is_named_where_any_could_come),
  };
  return cmocka_run_group_tests_name("messages at the end of a group", tests, NULL, NULL);
}
