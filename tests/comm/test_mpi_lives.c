/* MPI as a guest in the process: who starts and ends it, and what is left when it fails. (Which library it is, and what
 * it refuses: mpi_open; what groups over it do: comm_mpi; what they compute: tests/conformance/comm.) */
#include "comm/mpi_guest.h"
#include "comm/ranks.h"
#include "os/shared_memory.h"
#include "support/fault.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- who starts it, who ends it ---- */

static bool end_is_right;

static void look_at_the_end(void) {
  _exit(control()->finalized == end_is_right ? 0 : 1);
}

/* A handler that is set earlier is called later. */
static int end_by_exit(const void *argument) {
  even_comm *comm = NULL;
  (void)argument;
  end_is_right = true;
  (void)atexit(look_at_the_end);
  EXPECT(open_alone(LIBRARY, &comm) == EVEN_OK);
  exit(7); /* the group is still open */
}

/* After a failure, too, where nothing keeps MPI from it. */
static int end_after_a_failure(const void *argument) {
  even_comm *comm = NULL;
  (void)argument;
  end_is_right = true;
  (void)atexit(look_at_the_end);
  EXPECT(open_alone(LIBRARY, &comm) == EVEN_OK);
  even_comm_revoke(comm);
  EXPECT(even_comm_barrier(comm) == EVEN_ERR_REVOKED);
  even_comm_close(comm);
  exit(7);
}

static int end_a_child_by_exit(const void *argument) {
  even_comm *comm = NULL;
  int status = 0;
  (void)argument;
  (void)atexit(look_at_the_end);
  EXPECT(open_alone(LIBRARY, &comm) == EVEN_OK);
  pid_t child = fork();
  if (child == 0) {
    end_is_right = false;
    exit(7);
  }
  EXPECT(waitpid(child, &status, 0) == child && status == 0);
  even_comm_close(comm);
  EXPECT(control()->communicators == 0);
  return 0;
}

static int open_in_a_child(const void *argument) {
  even_comm *comm = NULL;
  int status = 0;
  (void)argument;
  EXPECT(open_alone(LIBRARY, &comm) == EVEN_OK);
  pid_t child = fork();
  if (child == 0) {
    even_comm *other = NULL;
    _exit(open_alone(LIBRARY, &other) == EVEN_ERR_STATE && mentions("forked from one that had started MPI") ? 0 : 1);
  }
  EXPECT(waitpid(child, &status, 0) == child && status == 0);
  even_comm_close(comm);
  return 0;
}

static int start_without_a_last_call(const void *argument) {
  even_comm *comm = NULL;
  (void)argument;
  fault_os(FAULT_at_exit, 1, ENOMEM);
  EXPECT(open_alone(LIBRARY, &comm) == EVEN_ERR_MEMORY && comm == NULL);
  EXPECT(control()->finalized);
  EXPECT(open_alone(LIBRARY, &comm) == EVEN_ERR_STATE && mentions("has been finalized"));
  return 0;
}

static void mpi_is_left_in_order(void **state) {
  (void)state;
  assert_int_equal(in_child(end_by_exit, NULL), 0);
  assert_int_equal(in_child(end_after_a_failure, NULL), 0);
  assert_int_equal(in_child(end_a_child_by_exit, NULL), 0);
  assert_int_equal(in_child(open_in_a_child, NULL), 0);
  assert_int_equal(in_child(start_without_a_last_call, NULL), 0);
}

/* Another part of the process has started MPI, and ends it while groups are open. */
static int end_elsewhere(even_comm *comm, void *argument) {
  float value = 1;
  even_comm *group = NULL;
  even_comm *late = NULL;
  (void)argument;
  if (even_comm_rank(comm) == 0) {
    RANKS_EXPECT(comm, call_library("MPI_Finalize") == 0);
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, &value, 1, EVEN_F32, EVEN_SUM) == EVEN_ERR_STATE);
    RANKS_EXPECT(comm, open_alone(LIBRARY, &late) == EVEN_ERR_STATE && mentions("has been finalized"));
    return group != NULL;
  }
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, &value, 1, EVEN_F32, EVEN_SUM) == EVEN_ERR_PEER_LOST);
  RANKS_EXPECT(comm, mentions("rank 0 ") && mentions("left the group"));
  return 0;
}

static void start_elsewhere(int rank) {
  (void)rank;
  if (start_library(3) != 0) {
    abort();
  }
}

static void who_started_it_may_end_it(void **state) {
  ranks_setup setup = {.ranks = 2,
                       .timeout_seconds = 300,
                       .spin = -1,
                       .engine = RANKS_NETWORK,
                       .mpi = LIBRARY,
                       .enter = start_elsewhere};
  (void)state;
  assert_int_equal(ranks_run(&setup, end_elsewhere, NULL, NULL), 0);
}

/* ---- groups ---- */

static void allow_one_call_at_a_time(int rank) {
  (void)rank;
  control()->threads = 2;
}

/* Messages move in a thread of their own while collectives run; the made-up library aborts where two calls meet. */
static int use_many_threads(even_comm *comm, void *argument) {
  enum { MESSAGES = 30, BYTES = 200000 };
  static unsigned char out[BYTES];
  static unsigned char in[MESSAGES][BYTES];
  char text[512];
  even_comm_request *sends[MESSAGES];
  even_comm_request *receives[MESSAGES];
  int peer = 1 - even_comm_rank(comm);
  (void)argument;
  even_comm_describe(comm, text, sizeof text);
  RANKS_EXPECT(comm, strstr(text, "one call at a time") != NULL);
  memset(out, 3 + even_comm_rank(comm), sizeof out);
  for (int i = 0; i < MESSAGES; i++) {
    RANKS_EXPECT(comm, even_comm_send_begin(comm, out, BYTES, peer, 5, &sends[i]) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, in[i], BYTES, peer, 5, &receives[i]) == EVEN_OK);
  }
  for (int i = 0; i < 50; i++) {
    float value = 1;
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, &value, 1, EVEN_F32, EVEN_SUM) == EVEN_OK && value == 2);
  }
  for (int i = 0; i < MESSAGES; i++) {
    RANKS_EXPECT(comm, even_comm_request_wait(receives[i], 0, NULL) == EVEN_OK && in[i][BYTES - 1] == 3 + peer);
    RANKS_EXPECT(comm, even_comm_request_wait(sends[i], 0, NULL) == EVEN_OK);
    even_comm_request_free(receives[i]);
    even_comm_request_free(sends[i]);
  }
  return 0;
}

static void calls_come_one_at_a_time(void **state) {
  ranks_setup setup = {.ranks = 2,
                       .timeout_seconds = 60,
                       .spin = -1,
                       .engine = RANKS_NETWORK,
                       .mpi = LIBRARY,
                       .enter = allow_one_call_at_a_time};
  (void)state;
  assert_int_equal(ranks_run(&setup, use_many_threads, NULL, NULL), 0);
}

static void allow_few_tags(int rank) {
  (void)rank;
  control()->largest_tag = 40;
}

/* 19 messages of a pair have tags of their own. */
static int send_too_many(even_comm *comm, void *argument) {
  enum { MESSAGES = 25 };
  int values[MESSAGES];
  even_comm_request *requests[MESSAGES];
  int got = -1;
  (void)argument;
  if (even_comm_rank(comm) == 0) {
    for (int i = 0; i < MESSAGES; i++) {
      values[i] = 100 + i;
      RANKS_EXPECT(comm, even_comm_send_begin(comm, &values[i], sizeof(int), 1, (uint64_t)i, &requests[i]) == EVEN_OK);
    }
    for (int i = 0; i < MESSAGES; i++) {
      RANKS_EXPECT(comm, even_comm_request_wait(requests[i], 0, NULL) == EVEN_OK);
      even_comm_request_free(requests[i]);
    }
    return even_comm_barrier(comm) != EVEN_OK;
  }
  RANKS_EXPECT(comm, even_comm_receive_begin(comm, &got, sizeof got, 0, MESSAGES - 1, &requests[0]) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_request_wait(requests[0], 0, NULL) == EVEN_ERR_UNSUPPORTED);
  RANKS_EXPECT(comm, mentions("19 messages and more of rank 0") && advises("in about the order"));
  even_comm_request_free(requests[0]);
  for (int i = 0; i < MESSAGES; i++) {
    int number = i;
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, &got, sizeof got, 0, (uint64_t)number, &requests[0]) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_request_wait(requests[0], 0, NULL) == EVEN_OK && got == 100 + number);
    even_comm_request_free(requests[0]);
  }
  return even_comm_barrier(comm) != EVEN_OK;
}

static void messages_that_tags_cannot_tell_apart_are_refused(void **state) {
  ranks_setup setup = {
      .ranks = 2, .timeout_seconds = 60, .spin = -1, .engine = RANKS_NETWORK, .mpi = LIBRARY, .enter = allow_few_tags};
  (void)state;
  assert_int_equal(ranks_run(&setup, send_too_many, NULL, NULL), 0);
}

/* Rank 0 gives up; what it had sent before is not taken for a result by the rank that comes later. */
static int come_after_the_end(even_comm *comm, void *argument) {
  const int *gate = argument;
  float value = 1;
  char word = 0;
  if (even_comm_rank(comm) == 1) {
    RANKS_EXPECT(comm, read(gate[0], &word, 1) == 1);
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, &value, 1, EVEN_F32, EVEN_SUM) == EVEN_ERR_TIMEOUT);
    RANKS_EXPECT(comm, mentions("rank 1 (process ") && mentions("did not come within"));
    return 0;
  }
  even_comm_set_timeout(comm, 0.2);
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, &value, 1, EVEN_F32, EVEN_SUM) == EVEN_ERR_TIMEOUT);
  RANKS_EXPECT(comm, even_error_last()->rank == 1);
  RANKS_EXPECT(comm, write(gate[1], &word, 1) == 1);
  return 0;
}

static void what_was_given_up_does_not_count(void **state) {
  int gate[2];
  ranks_setup setup = {.ranks = 2, .timeout_seconds = 60, .spin = -1, .engine = RANKS_NETWORK, .mpi = LIBRARY};
  (void)state;
  assert_int_equal(pipe(gate), 0);
  assert_int_equal(ranks_run(&setup, come_after_the_end, gate, NULL), 0);
  (void)close(gate[0]);
  (void)close(gate[1]);
}

/* The least tag of a call's transfers (comm/mpi/transport.c). */
#define FIRST_TAG 2

static int fail_to_move(even_comm *comm, void *argument) {
  float value = 1;
  if (even_comm_rank(comm) == 0) {
    control()->fails_from_tag = FIRST_TAG; /* a rank's words of itself may leave or come at any time */
    control()->fails = argument;
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, &value, 1, EVEN_F32, EVEN_SUM) == EVEN_ERR_PEER_LOST);
    RANKS_EXPECT(comm, mentions("(MPI: made-up error 15)"));
    return 0;
  }
  even_status status = even_comm_all_reduce(comm, &value, 1, EVEN_F32, EVEN_SUM);
  RANKS_EXPECT(comm, status == EVEN_OK || status == EVEN_ERR_PEER_LOST); /* what rank 0 sent may have come */
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_PEER_LOST);
  return 0;
}

static void what_cannot_be_moved_ends_the_group(void **state) {
  char *calls[] = {"MPI_Irecv", "MPI_Isend"};
  ranks_setup setup = {.ranks = 2, .timeout_seconds = 20, .spin = -1, .engine = RANKS_NETWORK, .mpi = LIBRARY};
  (void)state;
  for (int i = 0; i < 2; i++) {
    assert_int_equal(ranks_run(&setup, fail_to_move, calls[i], NULL), 0);
  }
}

/* What MPI does not take back stays where it is until the process ends. */
static int keep_what_is_open(const void *argument) {
  even_comm *comm = NULL;
  (void)argument;
  fault_allocation(0);
  control()->keeps_receiving = true;
  EXPECT(open_alone(LIBRARY, &comm) == EVEN_OK);
  even_comm_close(comm);
  EXPECT(control()->communicators == 1 && fault_live_blocks() > 0);
  control()->keeps_receiving = false;
  EXPECT(open_alone(LIBRARY, &comm) == EVEN_OK);
  long before = fault_live_blocks();
  even_comm_close(comm);
  EXPECT(control()->communicators == 1 && fault_live_blocks() < before);
  return 0;
}

static void memory_that_mpi_uses_stays(void **state) {
  (void)state;
  assert_int_equal(in_child(keep_what_is_open, NULL), 0);
}

/* One of two ranks never comes: what MPI was given for the meeting may be written to whenever it does. */
static int give_up_a_meeting(const void *argument) {
  even_comm *comm = NULL;
  even_comm_params params = {.size = sizeof params, .ranks = 2, .timeout_seconds = 0.02, .spin = -1};
  even_comm_network network = {.size = sizeof network, .number = -1, .library = LIBRARY};
  even_shared_memory world;
  char fd[16];
  (void)argument;
  EXPECT(even_shared_memory_create("evenstep-test", FAKE_MPI_WORLD_BYTES, &world) == EVEN_OK);
  (void)snprintf(fd, sizeof fd, "%d", world.fd);
  (void)setenv(FAKE_MPI_WORLD, fd, 1);
  (void)setenv(FAKE_MPI_RANK, "0", 1);
  (void)setenv(FAKE_MPI_RANKS, "2", 1);
  fault_allocation(0);
  EXPECT(even_comm_open_mpi(&params, &network, &comm) == EVEN_ERR_TIMEOUT);
  EXPECT(mentions("not all 2 ranks of the MPI job came") && fault_live_blocks() > 0);
  return 0;
}

static void a_meeting_that_was_given_up_keeps_its_memory(void **state) {
  (void)state;
  assert_int_equal(in_child(give_up_a_meeting, NULL), 0);
}

/* ---- faults, in this process: the last tests ---- */

static even_status open_and_close(void *context) {
  even_comm *comm = NULL;
  float value = 1;
  (void)context;
  even_status status = open_alone(LIBRARY, &comm);
  if (status == EVEN_OK) {
    status = even_comm_all_reduce(comm, &value, 1, EVEN_F32, EVEN_SUM);
    even_comm_close(comm);
  }
  return status;
}

/* What hears of the others' messages does without memory until there is some. */
static void allocations_fail(void **state) {
  long failed = 0;
  (void)state;
  assert_int_equal(open_and_close(NULL), EVEN_OK);
  for (long nth = 1; failed == nth - 1; nth++) {
    fault_reset();
    fault_allocation(nth);
    even_status status = open_and_close(NULL);
    failed += fault_allocations() >= nth;
    assert_true(status == EVEN_OK || status == EVEN_ERR_MEMORY);
    assert_int_equal(fault_live_blocks(), 0);
  }
  assert_true(failed > 8);
}

static int reset(void **state) {
  (void)state;
  fault_reset();
  return 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(mpi_is_left_in_order),
      cmocka_unit_test(who_started_it_may_end_it),
      cmocka_unit_test(calls_come_one_at_a_time),
      cmocka_unit_test(messages_that_tags_cannot_tell_apart_are_refused),
      cmocka_unit_test(what_was_given_up_does_not_count),
      cmocka_unit_test(what_cannot_be_moved_ends_the_group),
      cmocka_unit_test(memory_that_mpi_uses_stays),
      cmocka_unit_test(a_meeting_that_was_given_up_keeps_its_memory),
      cmocka_unit_test_teardown(allocations_fail, reset),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
