/* What the collectives do when something goes wrong: death, departure, revocation, lateness, disagreement. */
#include "base/fail.h"
#include "comm/group.h"
#include "comm/ranks.h"
#include "os/clock.h"
#include "support/descriptors.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define FLOATS ((size_t)300000)

static const ranks_setup three = {.ranks = 3, .arena_bytes = FLOATS * 4, .timeout_seconds = 60, .spin = -1};
static const ranks_setup two = {.ranks = 2, .arena_bytes = 4096, .timeout_seconds = 60, .spin = -1};

/* A message to the next rank and one from the one before, at once. */
static even_status pass_on(even_comm *comm, const float *data, float *into, size_t count) {
  int ranks = even_comm_ranks(comm);
  int own = even_comm_rank(comm);
  even_comm_request *out = NULL;
  even_comm_request *in = NULL;
  even_status status = even_comm_send_begin(comm, data, count * 4, (own + 1) % ranks, 1, &out);
  if (status == EVEN_OK) {
    status = even_comm_receive_begin(comm, into, count * 4, (own + ranks - 1) % ranks, 1, &in);
  }
  status = status == EVEN_OK ? even_comm_request_wait(in, 0, NULL) : status;
  status = status == EVEN_OK ? even_comm_request_wait(out, 0, NULL) : status;
  even_error failure = *even_error_last();
  even_comm_request_free(in);
  even_comm_request_free(out);
  return status == EVEN_OK ? EVEN_OK : even_error_restore(&failure);
}

/* Calls of all kinds, sizes and ways until one fails; returns that failure. */
static even_status work_until_failure(even_comm *comm, float *plain) {
  even_status status = EVEN_OK;
  for (size_t i = 0; status == EVEN_OK; i++) {
    static const size_t sizes[] = {16, 5000, FLOATS};
    size_t count = sizes[i % 3];
    float *data = i % 2 == 0 ? plain : even_comm_arena(comm);
    status = i % 5 == 4 ? pass_on(comm, plain, even_comm_arena(comm), count)
                        : even_comm_all_reduce(comm, data, count, EVEN_F32, EVEN_MAX);
  }
  return status;
}

/* ---- death ---- */

static int die_outside(even_comm *comm, void *argument) {
  float *plain = calloc(FLOATS, 4);
  (void)argument;
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, plain, FLOATS, EVEN_F32, EVEN_SUM) == EVEN_OK);
  if (even_comm_rank(comm) == 1) {
    (void)raise(SIGKILL);
  }
  uint64_t began = even_clock_ns();
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, plain, FLOATS, EVEN_F32, EVEN_SUM) == EVEN_ERR_PEER_LOST);
  RANKS_EXPECT(comm, even_error_last()->rank == 1);
  RANKS_EXPECT(comm, strstr(even_error_last()->what, "rank 1 (process ") != NULL);
  RANKS_EXPECT(comm, strstr(even_error_last()->what, "died") != NULL && even_error_last()->fix[0] != '\0');
  RANKS_EXPECT(comm, even_clock_ns() - began < (uint64_t)20 * 1000000000u); /* and not the timeout */
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_PEER_LOST);        /* unusable from then on */
  free(plain);
  return 0;
}

static void test_dead_peer(void **state) {
  int results[RANKS_MOST];
  (void)state;
  (void)ranks_run(&three, die_outside, NULL, results);
  assert_int_equal(results[0], 0);
  assert_int_equal(results[1], RANKS_KILLED);
  assert_int_equal(results[2], 0);
}

#define TRAFFIC 500

/* Rank 0 waits for a message of rank 1's, which dies, while rank 2's come one by one. */
static int die_beside_traffic(even_comm *comm, void *argument) {
  static int words[TRAFFIC];
  int word = 0;
  even_comm_request *request = NULL;
  even_status status = EVEN_OK;
  (void)argument;
  for (int i = 0; even_comm_rank(comm) == 0 && i < TRAFFIC; i++) {
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, &words[i], 4, 2, 1, &request) == EVEN_OK);
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  if (even_comm_rank(comm) == 1) {
    (void)raise(SIGKILL);
  }
  if (even_comm_rank(comm) == 0) {
    status = even_comm_receive_begin(comm, &word, 4, 1, 1, &request);
    status = status == EVEN_OK ? even_comm_request_wait(request, 0, NULL) : status;
  }
  for (int i = 0; even_comm_rank(comm) == 2 && status == EVEN_OK && i < TRAFFIC; i++) {
    even_clock_sleep_ns(2000000); /* so that something always comes */
    status = even_comm_send_begin(comm, &word, 4, 0, 1, &request);
  }
  RANKS_EXPECT(comm, status == EVEN_ERR_PEER_LOST && even_error_last()->rank == 1); /* and rank 2 not only at its end */
  return 0;
}

static void test_dead_peer_beside_traffic(void **state) {
  int results[RANKS_MOST];
  (void)state;
  (void)ranks_run(&three, die_beside_traffic, NULL, results);
  assert_int_equal(results[0], 0);
  assert_int_equal(results[1], RANKS_KILLED);
  assert_int_equal(results[2], 0);
}

static int work_and_expect_loss(even_comm *comm, void *argument) {
  float *plain = calloc(FLOATS, 4);
  int ready = *(int *)argument;
  RANKS_EXPECT(comm, write(ready, "r", 1) == 1);
  RANKS_EXPECT(comm, work_until_failure(comm, plain) == EVEN_ERR_PEER_LOST);
  free(plain);
  return even_error_last()->rank == 1 ? 0 : ranks_complain(comm, "not rank 1: %s", even_error_last()->what);
}

/* Kills rank 1 at any moment of any collective. EVENSTEP_TEST_KILLS: how often. */
static void test_kills_at_any_moment(void **state) {
  const char *wanted = getenv("EVENSTEP_TEST_KILLS");
  int kills = wanted == NULL ? 12 : atoi(wanted);
  int before = open_descriptors();
  (void)state;
  for (int kill_number = 0; kill_number < kills; kill_number++) {
    int pipe_ends[2];
    int fd = -1;
    pid_t processes[3];
    even_comm_params params = {
        .size = sizeof params, .ranks = 3, .arena_bytes = FLOATS * 4, .timeout_seconds = 60, .spin = -1};
    assert_int_equal(even_comm_create_segment(&params, &fd), EVEN_OK);
    assert_int_equal(pipe(pipe_ends), 0);
    for (int rank = 0; rank < 3; rank++) {
      processes[rank] = fork();
      if (processes[rank] == 0) {
        even_comm *comm = NULL;
        params.rank = rank;
        _exit(even_comm_open(&params, fd, &comm) != EVEN_OK ? 98 : work_and_expect_loss(comm, &pipe_ends[1]));
      }
    }
    (void)close(fd);
    (void)close(pipe_ends[1]);
    for (int ready = 0; ready < 3; ready++) {
      char byte;
      assert_int_equal(read(pipe_ends[0], &byte, 1), 1);
    }
    (void)usleep((useconds_t)(kill_number * 7919 % 20000)); /* any moment will do: it decides nothing */
    assert_int_equal(kill(processes[1], SIGKILL), 0);
    for (int rank = 0; rank < 3; rank++) {
      int status = 0;
      (void)waitpid(processes[rank], &status, 0);
      assert_true(rank == 1 ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    (void)close(pipe_ends[0]);
  }
  assert_int_equal(open_descriptors(), before);
}

/* ---- departure, revocation, lateness ---- */

static int leave_early(even_comm *comm, void *argument) {
  (void)argument;
  if (even_comm_rank(comm) == 1) {
    return 0; /* the caller closes the group */
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_PEER_LOST);
  RANKS_EXPECT(comm, strstr(even_error_last()->what, "left the group") != NULL && even_error_last()->rank == 1);
  return 0;
}

static void test_departure(void **state) {
  ranks_setup threads = three;
  threads.threads = true;
  (void)state;
  assert_int_equal(ranks_run(&three, leave_early, NULL, NULL), 0);
  assert_int_equal(ranks_run(&threads, leave_early, NULL, NULL), 0);
}

static int close_in_child(even_comm *comm, void *argument) {
  (void)argument;
  pid_t child = fork();
  if (child == 0) {
    even_comm_close(comm);
    _exit(0);
  }
  (void)waitpid(child, NULL, 0);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  return 0;
}

static void test_a_forked_child_does_not_leave_for_its_parent(void **state) {
  (void)state;
  assert_int_equal(ranks_run(&two, close_in_child, NULL, NULL), 0);
}

static int call_all_in_child(even_comm *comm, void *argument) {
  float data[2] = {1, 2};
  float output[4] = {0};
  size_t counts[2] = {1, 1};
  const void *inputs[2] = {&data[0], &data[1]};
  void *outputs[2] = {&output[0], &output[1]};
  size_t bytes[2] = {4, 4};
  even_comm_request *begun = argument;
  even_comm_request *request = NULL;
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, 2, EVEN_F32, EVEN_SUM) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, strstr(even_error_last()->what, "was forked from rank") != NULL);
  RANKS_EXPECT(comm, even_comm_reduce_scatter(comm, data, output, counts, EVEN_F32, EVEN_SUM) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, even_comm_all_gather(comm, data, output, counts, EVEN_F32) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, even_comm_broadcast(comm, data, 8, 0) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, even_comm_all_to_all(comm, inputs, bytes, outputs, bytes) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, even_comm_send_begin(comm, data, 8, 0, 0, &request) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, even_comm_receive_begin(comm, data, 8, 0, 0, &request) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, even_comm_request_done(begun));
  RANKS_EXPECT(comm, even_comm_request_wait(begun, 0, NULL) == EVEN_ERR_STATE);
  even_comm_request_free(begun);
  even_comm_revoke(comm);
  return 0;
}

static int go_on_beside_child(even_comm *comm, void *argument) {
  int word = even_comm_rank(comm);
  int ended = -1;
  even_comm_request *begun = NULL;
  (void)argument;
  RANKS_EXPECT(comm, even_comm_receive_begin(comm, &word, sizeof word, 1 - word, 7, &begun) == EVEN_OK);
  pid_t child = fork();
  if (child == 0) {
    _exit(call_all_in_child(comm, begun));
  }
  RANKS_EXPECT(comm, waitpid(child, &ended, 0) == child && WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
  int own = even_comm_rank(comm);
  even_comm_request *sent = NULL;
  RANKS_EXPECT(comm, even_comm_send_begin(comm, &own, sizeof own, 1 - own, 7, &sent) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_request_wait(begun, 0, NULL) == EVEN_OK && word == 1 - own);
  RANKS_EXPECT(comm, even_comm_request_wait(sent, 0, NULL) == EVEN_OK);
  even_comm_request_free(begun);
  even_comm_request_free(sent);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  return 0;
}

static void test_a_forked_child_cannot_call_for_its_parent(void **state) {
  (void)state;
  static const int host_of[2] = {0, 1};
  ranks_setup setup = two;
  assert_int_equal(ranks_run(&setup, go_on_beside_child, NULL, NULL), 0);
  if (ranks_have_ucx()) {
    setup.engine = RANKS_NETWORK;
    assert_int_equal(ranks_run(&setup, go_on_beside_child, NULL, NULL), 0);
    setup.engine = RANKS_HOSTS;
    setup.host_of = host_of;
    assert_int_equal(ranks_run(&setup, go_on_beside_child, NULL, NULL), 0);
  }
}

static void *revoke_when_waiting(void *argument) {
  even_comm *comm = argument;
  uint32_t before = 1; /* opening the group was the first stage */
  while (atomic_load(&comm->controls[0].sequence) == before) {
  }
  even_comm_revoke(comm);
  return NULL;
}

static int be_revoked(even_comm *comm, void *argument) {
  (void)argument;
  if (even_comm_rank(comm) == 0) {
    pthread_t thread;
    RANKS_EXPECT(comm, pthread_create(&thread, NULL, revoke_when_waiting, comm) == 0);
    RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_REVOKED);
    RANKS_EXPECT(comm, pthread_join(thread, NULL) == 0);
    return 0;
  }
  if (even_comm_rank(comm) == 1) {
    RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_REVOKED);
    return 0;
  }
  /* Rank 2 comes only once the group is revoked. */
  while (atomic_load(&comm->header->state) == EVEN_GROUP_WHOLE) {
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_REVOKED);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_REVOKED);
  return 0;
}

static void test_revoke(void **state) {
  ranks_setup threads = three;
  threads.threads = true;
  (void)state;
  assert_int_equal(ranks_run(&three, be_revoked, NULL, NULL), 0);
  assert_int_equal(ranks_run(&threads, be_revoked, NULL, NULL), 0);
}

static int be_late(even_comm *comm, void *argument) {
  (void)argument;
  if (even_comm_rank(comm) == 0) {
    RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_TIMEOUT);
    RANKS_EXPECT(comm, even_error_last()->rank == 1 && strstr(even_error_last()->what, "Timed out") != NULL);
    return 0;
  }
  while (atomic_load(&comm->header->state) == EVEN_GROUP_WHOLE) {
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_TIMEOUT);
  return 0;
}

static void test_timeout(void **state) {
  ranks_setup short_limit = two;
  short_limit.timeout_seconds = 0.2;
  (void)state;
  assert_int_equal(ranks_run(&short_limit, be_late, NULL, NULL), 0);
}

/* Rank 0 waits for rank 1 by a limit of its own; rank 2 has a longer one, and does not claim that it has passed. */
static int wait_by_own_limits(even_comm *comm, void *argument) {
  (void)argument;
  if (even_comm_rank(comm) == 1) {
    while (atomic_load(&comm->header->state) == EVEN_GROUP_WHOLE) {
    }
    return 0;
  }
  even_comm_set_timeout(comm, even_comm_rank(comm) == 0 ? 0.2 : 50);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_TIMEOUT && even_error_last()->rank == 1);
  const char *words = even_comm_rank(comm) == 0 ? "rank 1 did not come within the timeout of 0.2 s; rank 0 was in"
                                                : "rank 1 did not come in time; rank 2 was in";
  RANKS_EXPECT(comm, strstr(even_error_last()->what, words) != NULL);
  return 0;
}

static void test_limits_that_differ(void **state) {
  (void)state;
  assert_int_equal(ranks_run(&three, wait_by_own_limits, NULL, NULL), 0);
}

static int measure_wait(even_comm *comm, void *argument) {
  (void)argument;
  uint64_t before = even_comm_wait_ns(comm);
  if (even_comm_rank(comm) == 0) {
    RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_wait_ns(comm) > before);
    return 0;
  }
  while (atomic_load(&comm->controls[0].sequence) == 1) { /* until rank 0 waits */
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  return 0;
}

static void test_wait_is_counted(void **state) {
  (void)state;
  assert_int_equal(ranks_run(&two, measure_wait, NULL, NULL), 0);
}

/* ---- disagreement ---- */

static int disagree(even_comm *comm, void *argument) {
  int what = *(int *)argument;
  int other = even_comm_rank(comm) == 1;
  size_t counts[3] = {4, 4, 4};
  float data[16] = {0};
  float output[16];
  even_status status = EVEN_OK;
  const char *words = "";
  switch (what) {
    case 0:
      status = even_comm_all_reduce(comm, data, other ? 5 : 4, EVEN_F32, EVEN_SUM);
      words = other ? "rank 1 called all_reduce of 5 F32 elements with SUM, but rank 0 called all_reduce of 4"
                    : "called all_reduce of 4 F32 elements with SUM, but rank 1 called all_reduce of 5";
      break;
    case 1:
      status = even_comm_all_reduce(comm, data, 4, other ? EVEN_I32 : EVEN_F32, EVEN_SUM);
      words = "4 I32 elements";
      break;
    case 2:
      status = even_comm_all_reduce(comm, data, 4, EVEN_F32, other ? EVEN_MIN : EVEN_SUM);
      words = "with MIN";
      break;
    case 3:
      status = other ? even_comm_barrier(comm) : even_comm_all_reduce(comm, data, 4, EVEN_F32, EVEN_SUM);
      words = "barrier";
      break;
    case 4:
      status = even_comm_broadcast(comm, data, 16, other);
      words = "broadcast of 16 bytes from rank 1";
      break;
    default:
      counts[0] = other ? 3 : 4;
      counts[2] = other ? 5 : 4;
      status = even_comm_all_gather(comm, data, output, counts, EVEN_F32);
      words = "divided otherwise";
      break;
  }
  RANKS_EXPECT(comm, status == EVEN_ERR_MISMATCH);
  RANKS_EXPECT(comm, strstr(even_error_last()->what, words) != NULL);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_MISMATCH);
  return 0;
}

static void test_mismatch(void **state) {
  (void)state;
  for (int what = 0; what < 6; what++) {
    assert_int_equal(ranks_run(&three, disagree, &what, NULL), 0);
  }
}

static int exchange_that_disagrees(even_comm *comm, void *argument) {
  char data[16] = {0};
  char output[16];
  size_t sends[3] = {1, 2, 3};
  size_t receives[3] = {1, 1, 1};
  (void)argument;
  /* Everybody sends 1 byte to rank 0, 2 to rank 1, 3 to rank 2; rank 1 alone expects something else. */
  for (int rank = 0; rank < 3; rank++) {
    receives[rank] = even_comm_rank(comm) == 1 && rank == 2 ? 5 : (size_t)even_comm_rank(comm) + 1;
  }
  const void *inputs[3] = {data, data + 1, data + 3};
  void *outputs[3] = {output, output + 5, output + 10};
  even_comm_set_site(comm, even_comm_rank(comm) == 1 ? "train.py:7" : "train.py:41");
  RANKS_EXPECT(comm, even_comm_all_to_all(comm, inputs, sends, outputs, receives) == EVEN_ERR_MISMATCH);
  if (even_comm_rank(comm) == 1) {
    RANKS_EXPECT(comm, even_error_last()->rank == 2);
    RANKS_EXPECT(comm, strstr(even_error_last()->what,
                              "rank 2 sends 2 bytes to rank 1, which expects 5; called at "
                              "train.py:7, by the other at train.py:41") != NULL);
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_MISMATCH);
  return 0;
}

static void test_exchange_of_sizes_that_differ(void **state) {
  (void)state;
  assert_int_equal(ranks_run(&three, exchange_that_disagrees, NULL, NULL), 0);
}

static void *wait_in_barrier(void *argument) {
  static even_status result;
  result = even_comm_barrier(argument);
  return &result;
}

static int call_twice(even_comm *comm, void *argument) {
  (void)argument;
  if (even_comm_rank(comm) == 0) {
    pthread_t thread;
    void *result = NULL;
    RANKS_EXPECT(comm, pthread_create(&thread, NULL, wait_in_barrier, comm) == 0);
    while (atomic_load(&comm->controls[0].sequence) == 1) {
    }
    RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_STATE);
    RANKS_EXPECT(comm, strstr(even_error_last()->what, "two threads") != NULL);
    /* A word that no barrier uses tells rank 1, past the library, that it may come. */
    atomic_store(&comm->header->claim[1], 77);
    RANKS_EXPECT(comm, pthread_join(thread, &result) == 0 && *(even_status *)result == EVEN_OK);
  } else {
    while (atomic_load(&comm->header->claim[1]) != 77) {
    }
    RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK); /* the refused call did no harm */
  return 0;
}

static void test_two_threads_in_one_group(void **state) {
  (void)state;
  assert_int_equal(ranks_run(&two, call_twice, NULL, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_dead_peer),
      cmocka_unit_test(test_dead_peer_beside_traffic),
      cmocka_unit_test(test_kills_at_any_moment),
      cmocka_unit_test(test_departure),
      cmocka_unit_test(test_a_forked_child_does_not_leave_for_its_parent),
      cmocka_unit_test(test_a_forked_child_cannot_call_for_its_parent),
      cmocka_unit_test(test_revoke),
      cmocka_unit_test(test_timeout),
      cmocka_unit_test(test_limits_that_differ),
      cmocka_unit_test(test_wait_is_counted),
      cmocka_unit_test(test_mismatch),
      cmocka_unit_test(test_exchange_of_sizes_that_differ),
      cmocka_unit_test(test_two_threads_in_one_group),
  };
  return cmocka_run_group_tests_name("collectives that fail", tests, NULL, NULL);
}
