/* Groups over UCX, or over MPI (OVER_MPI: a library): how they end, and messages. (What the collectives compute:
 * tests/conformance/comm.) */
#include "base/fail.h"
#include "comm/ranks.h"
#include "comm/ucx/group.h"
#include "conformance/comm/reference.h"
#include "os/clock.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define LARGE ((size_t)3 << 20)

#ifdef OVER_MPI
#define LIBRARY OVER_MPI
#define ENGINE "mpi"
#define OPEN even_comm_open_mpi
#define MAY_END_LATE true /* a call that comes to its end after the group's has failed */
#else
#define LIBRARY NULL
#define ENGINE "ucx"
#define OPEN even_comm_open_ucx
#define MAY_END_LATE false
#endif

static bool mentions(const char *text) {
  return strstr(even_error_last()->what, text) != NULL;
}

static int run(int ranks, double timeout_seconds, ranks_body *body, void *argument, int *results) {
  ranks_setup setup = {.ranks = ranks,
                       .arena_bytes = 4096,
                       .timeout_seconds = timeout_seconds,
                       .spin = -1,
                       .engine = RANKS_NETWORK,
                       .mpi = LIBRARY};
  return ranks_run(&setup, body, argument, results);
}

/* ---- how a group ends ---- */

static int lose_rank_one(even_comm *comm, void *argument) {
  size_t bytes = *(size_t *)argument;
  int own = even_comm_rank(comm);
  RANKS_EXPECT(comm, strcmp(even_comm_engine_name(comm), ENGINE) == 0);
  even_status met = even_comm_barrier(comm);
  if (MAY_END_LATE && met == EVEN_ERR_PEER_LOST) {
    return even_error_last()->rank != 1;
  }
  RANKS_EXPECT(comm, met == EVEN_OK);
  if (own == 1) {
    (void)raise(SIGKILL);
  }
  unsigned char *data = calloc(1, bytes);
  even_status status = even_comm_all_reduce(comm, data, bytes / 4, EVEN_F32, EVEN_SUM);
  free(data);
  RANKS_EXPECT(comm, status == EVEN_ERR_PEER_LOST);
  RANKS_EXPECT(comm, even_error_last()->rank == 1 && mentions("rank 1 (process ") && mentions(" on host "));
  RANKS_EXPECT(comm, mentions(own == 0 ? "rank 0 was in all_reduce" : "rank 2 was in all_reduce"));
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_PEER_LOST && mentions("unusable since"));
  return 0;
}

static void a_killed_rank_is_named(void **state) {
  size_t sizes[] = {64, LARGE};
  int results[3];
  (void)state;
  for (int i = 0; i < 2; i++) {
    assert_int_equal(run(3, 300, lose_rank_one, &sizes[i], results), 1);
    assert_int_equal(results[1], RANKS_KILLED);
  }
}

/* Rank 2 does not come to the collective: it waits for a message that nobody sends, and so hears of the end. */
static int come_late(even_comm *comm, void *argument) {
  float value = 1;
  even_comm_request *request = NULL;
  (void)argument;
  if (even_comm_rank(comm) == 2) {
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, &value, sizeof value, 0, 7, &request) == EVEN_OK);
    even_status status = even_comm_request_wait(request, 60, NULL);
    even_comm_request_free(request);
    RANKS_EXPECT(comm, status == EVEN_ERR_TIMEOUT && mentions("rank 2 was in receive of 4 bytes from rank 0"));
    return 0;
  }
  even_comm_set_timeout(comm, 0.5);
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, &value, 1, EVEN_F32, EVEN_SUM) == EVEN_ERR_TIMEOUT);
  RANKS_EXPECT(comm, even_error_last()->rank == 2 && mentions("rank 2 (process ") && mentions("did not come"));
  return 0;
}

static void a_late_rank_is_named(void **state) {
  (void)state;
  assert_int_equal(run(3, 300, come_late, NULL, NULL), 0);
}

static even_status gather_inside(void *context, const void *mine, size_t bytes, void *all) {
  size_t counts[3] = {bytes, bytes, bytes};
  return even_comm_all_gather(context, mine, all, counts, EVEN_U8);
}

/* Rank 1's library is missing: it says so, and the others, which have theirs, do not wait for it. */
static int open_without_a_library(even_comm *comm, void *argument) {
  int own = even_comm_rank(comm);
  even_comm *group = NULL;
  even_comm_params params = {.size = sizeof params, .rank = own, .ranks = 3, .timeout_seconds = 300, .spin = -1};
  even_comm_network network = {.size = sizeof network,
                               .gather = gather_inside,
                               .context = comm,
                               .number = -1,
                               .library = own == 1 ? "/missing/library.so.0" : LIBRARY};
  (void)argument;
  even_status status = OPEN(&params, &network, &group);
  RANKS_EXPECT(comm, group == NULL && even_error_last()->rank == (own == 1 ? -1 : 1));
  RANKS_EXPECT(comm, status == (own == 1 ? EVEN_ERR_NOT_FOUND : EVEN_ERR_UNSUPPORTED));
  RANKS_EXPECT(comm, mentions(own == 1 ? "/missing/library.so.0" : "rank 1 on host "));
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  return 0;
}

static void a_rank_without_the_library_is_named(void **state) {
  ranks_setup setup = {.ranks = 3, .arena_bytes = 4096, .timeout_seconds = 300, .spin = -1};
  (void)state;
  assert_int_equal(ranks_run(&setup, open_without_a_library, NULL, NULL), 0);
}

static int call_differently(even_comm *comm, void *argument) {
  float values[101] = {0};
  size_t count = even_comm_rank(comm) == 1 ? 101 : 100;
  (void)argument;
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, values, count, EVEN_F32, EVEN_SUM) == EVEN_ERR_MISMATCH);
  RANKS_EXPECT(comm, mentions("all_reduce of 100 F32 elements") && mentions("all_reduce of 101 F32 elements"));
  return 0;
}

static int divide_differently(even_comm *comm, void *argument) {
  unsigned char in[64] = {0};
  unsigned char out[64];
  const void *inputs[] = {in, in};
  void *outputs[] = {out, out};
  size_t sends[] = {4, 4};
  size_t receives[] = {4, 4};
  (void)argument;
  receives[0] = even_comm_rank(comm) == 1 ? 5 : 4;
  even_status status = even_comm_all_to_all(comm, inputs, sends, outputs, receives);
  if (even_comm_rank(comm) == 1) {
    RANKS_EXPECT(comm, status == EVEN_ERR_MISMATCH && mentions("sends 4 bytes to rank 1, which expects 5"));
  }
  RANKS_EXPECT(comm, even_comm_rank(comm) == 0 || even_comm_barrier(comm) == EVEN_ERR_MISMATCH);
  return 0;
}

static void different_calls_are_told_apart(void **state) {
  (void)state;
  assert_int_equal(run(3, 300, call_differently, NULL, NULL), 0);
  assert_int_equal(run(2, 300, divide_differently, NULL, NULL), 0);
}

static int be_revoked(even_comm *comm, void *argument) {
  int own = even_comm_rank(comm);
  (void)argument;
  if (own == 0) {
    even_comm_revoke(comm);
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_REVOKED);
  RANKS_EXPECT(comm, mentions("the group was revoked") && mentions("was in barrier"));
  return 0;
}

static int be_left(even_comm *comm, void *argument) {
  (void)argument;
  if (even_comm_rank(comm) == 0) {
    even_comm_leave(comm);
    RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_STATE && mentions("has left the group"));
    return 0;
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_PEER_LOST);
  RANKS_EXPECT(comm, even_error_last()->rank == 0 && mentions("left the group"));
  return 0;
}

static void revoked_and_left(void **state) {
  (void)state;
  assert_int_equal(run(3, 300, be_revoked, NULL, NULL), 0);
  assert_int_equal(run(3, 300, be_left, NULL, NULL), 0);
}

/* Who closes the group first takes nothing from the others that they still have to read. */
static int close_at_once(even_comm *comm, void *argument) {
  static unsigned char data[LARGE];
  (void)argument;
  memset(data, even_comm_rank(comm) == 0 ? 7 : 0, LARGE);
  RANKS_EXPECT(comm, even_comm_broadcast(comm, data, LARGE, 0) == EVEN_OK);
  for (size_t i = 0; i < LARGE; i++) {
    RANKS_EXPECT(comm, data[i] == 7);
  }
  return 0;
}

/* A child has no part in the group, and the rank goes on undisturbed. */
static int fork_a_rank(even_comm *comm, void *argument) {
  float value = 1;
  even_comm_request *request = NULL;
  int ended = 0;
  (void)argument;
  pid_t child = fork();
  if (child == 0) {
    bool refused = even_comm_all_reduce(comm, &value, 1, EVEN_F32, EVEN_SUM) == EVEN_ERR_STATE;
    refused = even_comm_send_begin(comm, &value, 4, 0, 1, &request) == EVEN_ERR_STATE && refused;
    even_comm_revoke(comm);
    even_comm_close(comm);
    _exit(refused && mentions("was forked from rank") ? 0 : 1);
  }
  RANKS_EXPECT(comm, waitpid(child, &ended, 0) == child && ended == 0);
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, &value, 1, EVEN_F32, EVEN_SUM) == EVEN_OK && value == 2);
  return 0;
}

static void a_forked_child_has_no_part(void **state) {
  (void)state;
  assert_int_equal(run(2, 300, fork_a_rank, NULL, NULL), 0);
}

static void closing_loses_nothing(void **state) {
  (void)state;
  for (int i = 0; i < 5; i++) {
    assert_int_equal(run(3, 300, close_at_once, NULL, NULL), 0);
  }
}

/* ---- messages ---- */

#define MESSAGES 40
#define MOST 600001 /* bytes, and one more */

/* Size and tag of message `number` between two ranks, the same wherever they are asked for. */
static size_t size_of(int from, int to, int number) {
  uint64_t state = (uint64_t)(from * 64 + to * 8 + 1) * 1000 + (uint64_t)number;
  static const size_t sizes[] = {0, 1, 100, 9000, 70000, MOST - 1};
  (void)reference_random(&state);
  return sizes[reference_random(&state) % 6];
}
static uint64_t tag_of(int number) {
  return number % 3 == 0 ? UINT64_MAX : (uint64_t)(number % 3);
}

/* Everybody sends to everybody, itself too, and receives tag by tag, so in another order than things were sent in. */
static int exchange(even_comm *comm, void *argument) {
  int own = even_comm_rank(comm);
  int ranks = even_comm_ranks(comm);
  even_comm_request *sends[4][MESSAGES];
  unsigned char *out[4][MESSAGES];
  static unsigned char sent[4][(size_t)MESSAGES * MOST];
  static unsigned char in[MOST];
  (void)argument;
  for (int number = 0; number < MESSAGES; number++) {
    for (int to = 0; to < ranks; to++) {
      size_t bytes = size_of(own, to, number);
      out[to][number] = &sent[to][number * MOST];
      memset(out[to][number], own * 50 + number, bytes);
      RANKS_EXPECT(
          comm, even_comm_send_begin(comm, out[to][number], bytes, to, tag_of(number), &sends[to][number]) == EVEN_OK);
    }
  }
  float one = 1;
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, &one, 1, EVEN_F32, EVEN_SUM) == EVEN_OK); /* beside the messages */
  RANKS_EXPECT(comm, one == (float)ranks);
  for (int residue = 2; residue >= 0; residue--) {
    for (int from = 0; from < ranks; from++) {
      for (int number = residue; number < MESSAGES; number += 3) {
        size_t bytes = size_of(from, own, number);
        even_comm_request *request = NULL;
        int peer = -2;
        in[bytes] = 99;
        RANKS_EXPECT(comm, even_comm_receive_begin(comm, in, bytes, from, tag_of(number), &request) == EVEN_OK);
        RANKS_EXPECT(comm, even_comm_request_wait(request, 0, &peer) == EVEN_OK && peer == from);
        even_comm_request_free(request);
        for (size_t i = 0; i < bytes; i++) {
          RANKS_EXPECT(comm, in[i] == (unsigned char)(from * 50 + number));
        }
        RANKS_EXPECT(comm, in[bytes] == 99);
      }
    }
  }
  for (int number = 0; number < MESSAGES; number++) {
    for (int to = 0; to < ranks; to++) {
      RANKS_EXPECT(comm, even_comm_request_wait(sends[to][number], 0, NULL) == EVEN_OK);
      even_comm_request_free(sends[to][number]);
    }
  }
  return 0;
}

static void messages_arrive_where_they_belong(void **state) {
  (void)state;
  assert_int_equal(run(3, 60, exchange, NULL, NULL), 0);
}

/* Rank 0 sends more than the pair's room while rank 1 asks for nothing; then 1 asks for the last one first. */
#define RUN_AHEAD 2000
#define SHORT 1000

static int run_ahead(even_comm *comm, void *argument) {
  static unsigned char data[RUN_AHEAD][SHORT];
  static even_comm_request *requests[RUN_AHEAD];
  static unsigned char in[SHORT];
  (void)argument;
  for (size_t i = 0; even_comm_rank(comm) == 0 && i < RUN_AHEAD; i++) {
    memset(data[i], (int)(i % 251), SHORT);
    RANKS_EXPECT(comm, even_comm_send_begin(comm, data[i], SHORT, 1, i, &requests[i]) == EVEN_OK);
  }
  if (even_comm_rank(comm) == 0) {
    RANKS_EXPECT(comm, even_comm_request_wait(requests[100], 0, NULL) == EVEN_OK); /* what fits goes at once */
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  if (even_comm_rank(comm) == 0) { /* no more than fits has gone */
    RANKS_EXPECT(comm, even_ucx_of(comm)->peers[1].on_way <= (size_t)256 << 10);
    RANKS_EXPECT(comm, even_ucx_of(comm)->peers[1].sent < 300 && !even_comm_request_done(requests[RUN_AHEAD - 1]));
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  for (size_t i = RUN_AHEAD; i-- > 0;) {
    if (even_comm_rank(comm) == 1) {
      RANKS_EXPECT(comm, even_comm_receive_begin(comm, in, SHORT, 0, i, &requests[i]) == EVEN_OK);
    }
    RANKS_EXPECT(comm, even_comm_request_wait(requests[i], 0, NULL) == EVEN_OK);
    even_comm_request_free(requests[i]);
    RANKS_EXPECT(comm, even_comm_rank(comm) == 0 || (in[0] == i % 251 && in[SHORT - 1] == i % 251));
  }
  return 0;
}

/* The same to itself. */
static int run_ahead_alone(even_comm *comm, void *argument) {
  static unsigned char data[SHORT];
  static even_comm_request *requests[RUN_AHEAD];
  (void)argument;
  for (size_t i = 0; i < RUN_AHEAD; i++) {
    RANKS_EXPECT(comm, even_comm_send_begin(comm, data, SHORT, 0, 1, &requests[i]) == EVEN_OK);
  }
  RANKS_EXPECT(comm, even_ucx_of(comm)->peers[0].sent < 300);
  for (size_t i = 0; i < RUN_AHEAD; i++) {
    even_comm_request *in = NULL;
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, data, SHORT, 0, 1, &in) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_request_wait(in, 0, NULL) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_request_wait(requests[i], 0, NULL) == EVEN_OK);
    even_comm_request_free(in);
    even_comm_request_free(requests[i]);
  }
  return 0;
}

/* A long one that waits for room is given up without harm: nobody has heard of it. */
static int give_up_waiting(even_comm *comm, void *argument) {
  static unsigned char data[LARGE];
  even_comm_request *first = NULL;
  even_comm_request *second = NULL;
  (void)argument;
  if (even_comm_rank(comm) == 0) {
    RANKS_EXPECT(comm, even_comm_send_begin(comm, data, LARGE, 1, 1, &first) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_send_begin(comm, data, LARGE, 1, 2, &second) == EVEN_OK);
    even_comm_request_free(second);
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  if (even_comm_rank(comm) == 1) {
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, data, LARGE, 0, 1, &first) == EVEN_OK);
  }
  RANKS_EXPECT(comm, even_comm_request_wait(first, 0, NULL) == EVEN_OK);
  even_comm_request_free(first);
  return even_comm_barrier(comm) != EVEN_OK;
}

static void senders_wait_for_receivers_that_do_not_ask(void **state) {
  (void)state;
  assert_int_equal(run(2, 60, run_ahead, NULL, NULL), 0);
  assert_int_equal(run(1, 60, run_ahead_alone, NULL, NULL), 0);
  assert_int_equal(run(2, 60, give_up_waiting, NULL, NULL), 0);
}

/* Rank 0 takes from anybody as they come. */
static int take_from_anybody(even_comm *comm, void *argument) {
  int own = even_comm_rank(comm);
  int ranks = even_comm_ranks(comm);
  even_comm_request *request = NULL;
  (void)argument;
  if (own != 0) {
    RANKS_EXPECT(comm, even_comm_send_begin(comm, &own, sizeof own, 0, 3, &request) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_request_wait(request, 0, NULL) == EVEN_OK);
    even_comm_request_free(request);
    return even_comm_barrier(comm) != EVEN_OK;
  }
  int seen = 0;
  for (int i = 1; i < ranks; i++) {
    int value = -1;
    int peer = -1;
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, &value, sizeof value, EVEN_COMM_ANY_RANK, 3, &request) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_request_wait(request, 0, &peer) == EVEN_OK && peer == value);
    even_comm_request_free(request);
    seen |= 1 << peer;
  }
  RANKS_EXPECT(comm, seen == (1 << ranks) - 2);
  return even_comm_barrier(comm) != EVEN_OK;
}

static void messages_from_anybody(void **state) {
  (void)state;
  assert_int_equal(run(4, 60, take_from_anybody, NULL, NULL), 0);
}

/* Another thread writes there meanwhile, which is what is waited for. */
__attribute__((no_sanitize("thread"))) static unsigned char peek(const volatile unsigned char *at) {
  return *at;
}

/* A long message goes on while neither end waits for it: a thread moves it. */
static int send_in_background(even_comm *comm, void *argument) {
  int own = even_comm_rank(comm);
  static unsigned char data[LARGE];
  even_comm_request *request = NULL;
  (void)argument;
  memset(data, own == 0 ? 5 : 0, LARGE);
  if (own == 0) {
    RANKS_EXPECT(comm, even_comm_send_begin(comm, data, LARGE, 1, 1, &request) == EVEN_OK);
  } else {
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, data, LARGE, 0, 1, &request) == EVEN_OK);
    uint64_t began = even_clock_ns();
    while (peek(&data[LARGE - 1]) != 5) { /* nothing is called */
      RANKS_EXPECT(comm, even_clock_ns() - began < UINT64_C(60000000000));
    }
  }
  RANKS_EXPECT(comm, even_comm_request_wait(request, 0, NULL) == EVEN_OK);
  even_comm_request_free(request);
  return 0;
}

static void messages_go_on_in_the_background(void **state) {
  (void)state;
  assert_int_equal(run(2, 60, send_in_background, NULL, NULL), 0);
}

static int lose_a_sender(even_comm *comm, void *argument) {
  int own = even_comm_rank(comm);
  int value = 0;
  even_comm_request *request = NULL;
  (void)argument;
  even_status met = even_comm_barrier(comm);
  if (MAY_END_LATE && met == EVEN_ERR_PEER_LOST) {
    return even_error_last()->rank != 1;
  }
  RANKS_EXPECT(comm, met == EVEN_OK);
  if (own == 1) {
    (void)raise(SIGKILL);
  }
  /* It may be known before the receive has begun. */
  even_status status =
      even_comm_receive_begin(comm, &value, sizeof value, own == 0 ? 1 : EVEN_COMM_ANY_RANK, 3, &request);
  status = status == EVEN_OK ? even_comm_request_wait(request, 0, NULL) : status;
  RANKS_EXPECT(comm, status == EVEN_ERR_PEER_LOST);
  RANKS_EXPECT(comm, even_error_last()->rank == 1 && mentions("was in receive of 4 bytes"));
  even_comm_request_free(request);
  return 0;
}

static void a_killed_sender_is_named(void **state) {
  (void)state;
  assert_int_equal(run(3, 60, lose_a_sender, NULL, NULL), 1);
}

/* ---- opening ---- */

static even_status refuse_to_gather(void *context, const void *mine, size_t bytes, void *all) {
  (void)context;
  (void)mine;
  (void)bytes;
  (void)all;
  return even_fail(EVEN_ERR_TIMEOUT, "nobody else came");
}

static int open_badly(even_comm *comm, void *argument) {
  even_comm_params params = {.size = sizeof params, .rank = 0, .ranks = 2, .timeout_seconds = 5};
  even_comm_network network = {.size = sizeof network, .gather = refuse_to_gather, .number = -1, .library = LIBRARY};
  even_comm *group = NULL;
  (void)argument;
  RANKS_EXPECT(comm, OPEN(&params, &network, &group) == EVEN_ERR_TIMEOUT && group == NULL);
  RANKS_EXPECT(comm, mentions("nobody else came"));
  network.interfaces = "no-such-interface";
  RANKS_EXPECT(comm, OPEN(&params, &network, &group) != EVEN_OK && group == NULL);
  network.interfaces = NULL;
  params.rank = 2;
  RANKS_EXPECT(comm, OPEN(&params, &network, &group) == EVEN_ERR_ARGUMENT);
  params.size = 1;
  RANKS_EXPECT(comm, OPEN(&params, &network, &group) == EVEN_ERR_ARGUMENT);
  return 0;
}

static void what_is_refused(void **state) {
  (void)state;
  assert_int_equal(run(1, 300, open_badly, NULL, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_rank_without_the_library_is_named),
      cmocka_unit_test(a_killed_rank_is_named),
      cmocka_unit_test(a_killed_sender_is_named),
      cmocka_unit_test(a_late_rank_is_named),
      cmocka_unit_test(different_calls_are_told_apart),
      cmocka_unit_test(revoked_and_left),
      cmocka_unit_test(a_forked_child_has_no_part),
      cmocka_unit_test(closing_loses_nothing),
      cmocka_unit_test(messages_arrive_where_they_belong),
      cmocka_unit_test(senders_wait_for_receivers_that_do_not_ask),
      cmocka_unit_test(messages_from_anybody),
      cmocka_unit_test(messages_go_on_in_the_background),
      cmocka_unit_test(what_is_refused),
  };
#ifndef OVER_MPI
  if (!ranks_have_ucx()) {
    return 77; /* skipped, as CMakeLists.txt says */
  }
#endif
  return cmocka_run_group_tests(tests, NULL, NULL);
}
