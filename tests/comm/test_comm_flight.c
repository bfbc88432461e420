/* The flight record: what it keeps, what failures say of it, and that it outlives the ranks. */
#include "comm/group.h"
#include "comm/ranks.h"
#include "os/shared_memory.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static const ranks_setup three = {.ranks = 3, .arena_bytes = 4096, .timeout_seconds = 60, .spin = -1};

static int keep_calls(even_comm *comm, void *argument) {
  float data[64] = {0};
  even_flight_call calls[EVEN_FLIGHT_CALLS + 4];
  (void)argument;
  for (size_t i = 0; i < 20; i++) {
    even_comm_set_site(comm, i < 15 ? "a.c:1" : i < 18 ? NULL : "b.c:2");
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, 10 + i, EVEN_F32, EVEN_MAX) == EVEN_OK);
  }
  RANKS_EXPECT(comm, even_comm_broadcast(comm, data, 16, 2) == EVEN_OK); /* all have read what all have written */
  for (int rank = 0; rank < even_comm_ranks(comm); rank++) {
    size_t count = even_comm_flight(comm, rank, calls, sizeof calls / sizeof calls[0]);
    size_t last = count - 1;
    RANKS_EXPECT(comm, count >= EVEN_FLIGHT_CALLS - 1 && count <= EVEN_FLIGHT_CALLS); /* one may be changing */
    last -= calls[last].number == 23; /* it is in the last barrier already */
    RANKS_EXPECT(comm, calls[last].number == 22 && calls[last - 1].number == 21);
    RANKS_EXPECT(comm, strcmp(calls[last].call, "broadcast of 16 bytes from rank 2") == 0);
    RANKS_EXPECT(comm, strcmp(calls[last - 1].call, "all_reduce of 29 F32 elements with MAX") == 0);
    RANKS_EXPECT(comm, calls[last - 1].state == EVEN_FLIGHT_DONE && calls[last - 1].began_ns > 0);
    RANKS_EXPECT(comm, calls[last - 1].ended_ns >= calls[last - 1].began_ns);
    RANKS_EXPECT(comm, strcmp(calls[last - 1].site, "b.c:2") == 0 && calls[last - 4].site[0] == '\0');
  }
  RANKS_EXPECT(comm, even_comm_flight(comm, even_comm_rank(comm), calls, 2) == 2 && calls[1].number == 22);
  RANKS_EXPECT(comm, even_comm_flight(comm, 3, calls, 2) == 0 && even_comm_flight(comm, -1, calls, 2) == 0);
  return even_comm_barrier(comm) != EVEN_OK;
}

static void the_last_calls_of_all_are_kept(void **state) {
  ranks_setup threads = three;
  threads.threads = true;
  (void)state;
  assert_int_equal(ranks_run(&three, keep_calls, NULL, NULL), 0);
  assert_int_equal(ranks_run(&threads, keep_calls, NULL, NULL), 0);
}

static int leave_behind(even_comm *comm, void *argument) {
  float data[4] = {0};
  (void)argument;
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, 4, EVEN_F32, EVEN_SUM) == EVEN_OK);
  if (even_comm_rank(comm) == 1) {
    return 0; /* leaves */
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_PEER_LOST);
  const char *what = even_error_last()->what;
  RANKS_EXPECT(comm, strstr(what, " done with call 2 (all_reduce of 4 F32 elements with SUM)") != NULL);
  RANKS_EXPECT(comm, strstr(what, "in call 3 (barrier)") != NULL);
  return 0;
}

static void failures_say_what_each_rank_reached(void **state) {
  (void)state;
  assert_int_equal(ranks_run(&three, leave_behind, NULL, NULL), 0);
}

static bool answer(void *context, char *text, size_t bytes) {
  (void)snprintf(text, bytes, "%s", (const char *)context);
  return true;
}

static int disagree(even_comm *comm, void *argument) {
  float data[4] = {0};
  char asked[] = "train.py:7 in step";
  bool odd = even_comm_rank(comm) == 1;
  (void)argument;
  if (odd) {
    even_comm_ask_site(comm, answer, asked);
  } else {
    even_comm_set_site(comm, "train.c:41");
  }
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, odd ? 2 : 4, EVEN_F32, EVEN_SUM) == EVEN_ERR_MISMATCH);
  if (odd) {
    RANKS_EXPECT(comm, strstr(even_error_last()->what, "with SUM at train.py:7 in step, but rank 0 called") != NULL);
    RANKS_EXPECT(comm, strstr(even_error_last()->what, " at train.c:41 (call 2") != NULL);
  } else if (strstr(even_error_last()->what, "called all_reduce") != NULL) {
    RANKS_EXPECT(comm, strstr(even_error_last()->what, "with SUM at train.c:41, but rank 1 called") != NULL);
    RANKS_EXPECT(comm, strstr(even_error_last()->what, " at train.py:7 in step (call 2") != NULL);
  }
  return 0;
}

static void both_sides_of_a_mismatch_are_named(void **state) {
  (void)state;
  assert_int_equal(ranks_run(&three, disagree, NULL, NULL), 0);
}

static void the_record_outlives_the_ranks(void **state) {
  even_comm_params params = {.size = sizeof params, .ranks = 2, .arena_bytes = 64, .timeout_seconds = 60, .spin = -1};
  even_flight_call calls[EVEN_FLIGHT_CALLS];
  even_flight *flight = NULL;
  char words[256];
  pid_t processes[2];
  int fd = -1;
  (void)state;
  assert_int_equal(even_comm_create_segment(&params, &fd), EVEN_OK);
  for (int rank = 0; rank < 2; rank++) {
    processes[rank] = fork();
    if (processes[rank] == 0) {
      even_comm *comm = NULL;
      params.rank = rank;
      if (even_comm_open(&params, fd, &comm) == EVEN_OK) {
        char data[8] = {0};
        (void)!(rank == 0 ? even_comm_barrier(comm) : even_comm_broadcast(comm, data, sizeof data, 0));
      }
      (void)raise(SIGKILL);
    }
  }
  for (int rank = 0; rank < 2; rank++) {
    (void)waitpid(processes[rank], NULL, 0);
  }
  assert_int_equal(even_flight_open(fd, &flight), EVEN_OK);
  (void)close(fd);
  assert_int_equal(even_flight_ranks(flight), 2);
  for (int rank = 0; rank < 2; rank++) {
    assert_int_equal(even_flight_process(flight, rank), processes[rank]);
    assert_int_equal(even_flight_read(flight, rank, calls, EVEN_FLIGHT_CALLS), 2);
    assert_string_equal(calls[0].call, "opening the group");
    assert_string_equal(calls[1].call, rank == 0 ? "barrier" : "broadcast of 8 bytes from rank 0");
  }
  even_flight_summary(flight, words, sizeof words);
  assert_string_equal(words, "rank 0 in call 2 (barrier), rank 1 in call 2 (broadcast of 8 bytes from rank 0)");
  even_flight_close(flight);
  even_flight_close(NULL);
}

static void what_is_no_group_has_no_record(void **state) {
  even_flight *flight = NULL;
  even_shared_memory memory;
  (void)state;
  assert_int_not_equal(even_flight_open(-1, &flight), EVEN_OK);
  for (size_t bytes = 64; bytes <= 65536; bytes *= 1024) {
    assert_int_equal(even_shared_memory_create("zeros", bytes, &memory), EVEN_OK);
    assert_int_equal(even_flight_open(memory.fd, &flight), EVEN_ERR_INPUT);
    assert_null(flight);
    even_shared_memory_close(&memory);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_last_calls_of_all_are_kept),     cmocka_unit_test(failures_say_what_each_rank_reached),
      cmocka_unit_test(both_sides_of_a_mismatch_are_named), cmocka_unit_test(the_record_outlives_the_ranks),
      cmocka_unit_test(what_is_no_group_has_no_record),
  };
  return cmocka_run_group_tests_name("the flight record", tests, NULL, NULL);
}
