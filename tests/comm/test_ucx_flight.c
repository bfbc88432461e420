/* What ranks over UCX know of one another: the flight record on one host and between hosts, both sides of a mismatch,
 * ranks that are stopped, and calls that stand still. */
#include "comm/group.h"
#include "comm/ranks.h"
#include "comm/ucx/group.h"
#include "os/clock.h"
#include "os/shared_memory.h"

#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define RANKS 4

static bool mentions(const char *text) {
  return strstr(even_error_last()->what, text) != NULL;
}

/* Ranks 0 and 2 on one host, 1 and 3 on another. */
static void enter_one_of_two(int rank) {
  (void)setenv("EVENSTEP_HOST_ID", rank % 2 == 0 ? "even" : "odd", 1);
}
static void enter_own(int rank) {
  char name[16];
  (void)snprintf(name, sizeof name, "host-%d", rank);
  (void)setenv("EVENSTEP_HOST_ID", name, 1);
}

typedef void enter_host(int rank);
/* All on one host, on two, each on its own. */
static enter_host *const PLACES[] = {NULL, enter_one_of_two, enter_own};

static int run_at(enter_host *enter, ranks_body *body, void *argument, int *results) {
  ranks_setup setup = {
      .ranks = RANKS, .arena_bytes = 4096, .timeout_seconds = 60, .spin = -1, .engine = RANKS_NETWORK, .enter = enter};
  return ranks_run(&setup, body, argument, results);
}

/* ---- the record ---- */

static int keep_calls(even_comm *comm, void *argument) {
  float data[64] = {0};
  even_flight_call calls[EVEN_FLIGHT_CALLS + 4];
  (void)argument;
  for (size_t i = 0; i < 20; i++) {
    even_comm_set_site(comm, i < 15 ? "a.c:1" : "b.c:2");
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, 10 + i, EVEN_F32, EVEN_MAX) == EVEN_OK);
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  for (int rank = 0; rank < RANKS; rank++) {
    size_t count = even_comm_flight(comm, rank, calls, sizeof calls / sizeof calls[0]);
    size_t last = count - 1;
    RANKS_EXPECT(comm, count >= EVEN_FLIGHT_CALLS - 1 && count <= EVEN_FLIGHT_CALLS);
    last -= calls[last].number == 23; /* it is in the last barrier already */
    RANKS_EXPECT(comm, calls[last].number == 22 && strcmp(calls[last].call, "barrier") == 0);
    RANKS_EXPECT(comm, strcmp(calls[last - 1].call, "all_reduce of 29 F32 elements with MAX") == 0);
    RANKS_EXPECT(comm, calls[last - 1].state == EVEN_FLIGHT_DONE && strcmp(calls[last - 1].site, "b.c:2") == 0);
  }
  return even_comm_barrier(comm) != EVEN_OK;
}

static void ranks_of_one_host_see_all_calls(void **state) {
  (void)state;
  assert_int_equal(run_at(NULL, keep_calls, NULL, NULL), 0);
}

static bool count_records(void *context, int fd, uint64_t identity) {
  even_flight *flight = NULL;
  even_flight_call call;
  (void)identity;
  if (even_flight_open(fd, &flight) == EVEN_OK) {
    bool found = even_flight_ranks(flight) == RANKS && even_flight_process(flight, 2) != 0 &&
                 even_flight_read(flight, 2, &call, 1) == 1 && strcmp(call.site, "found.c:1") == 0;
    *(int *)context += found;
  }
  even_flight_close(flight);
  return true;
}

/* As the agent does. */
static int be_found(even_comm *comm, void *argument) {
  int found = 0;
  (void)argument;
  even_comm_set_site(comm, "found.c:1");
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  RANKS_EXPECT(comm, even_shared_memory_each(getpid(), "evenstep-group", count_records, &found) == EVEN_OK);
  RANKS_EXPECT(comm, found == 1);
  return even_comm_barrier(comm) != EVEN_OK;
}

static void others_find_the_record(void **state) {
  (void)state;
  assert_int_equal(run_at(NULL, be_found, NULL, NULL), 0);
}

/* The processes of all ranks. */
static even_status find_processes(even_comm *comm, pid_t *processes) {
  const size_t counts[RANKS] = {sizeof(pid_t), sizeof(pid_t), sizeof(pid_t), sizeof(pid_t)};
  pid_t own = getpid();
  return even_comm_all_gather(comm, &own, processes, counts, EVEN_U8);
}

/* Returns when `rank` is known to be in that call: a rank of another host is asked. */
static void await_call(even_comm *comm, int rank, uint64_t number) {
  even_ucx_group *group = even_ucx_of(comm);
  even_flight_call call = {0};
  while (even_comm_flight(comm, rank, &call, 1) != 1 || call.number != number) {
    (void)pthread_mutex_lock(&group->lock);
    even_ucx_ask(group, rank, false);
    (void)pthread_mutex_unlock(&group->lock);
    (void)usleep(1000);
  }
}

static void await_end(even_comm *comm) {
  while (!even_comm_engine_of(comm)->has_ended(comm)) { /* its watcher hears of it */
    (void)usleep(1000);
  }
}

/* Rank 3 is in no call: its watcher asks, is told, and tells what it reached. */
static int leave_behind(even_comm *comm, void *argument) {
  int own = even_comm_rank(comm);
  pid_t processes[RANKS];
  even_flight_call call;
  (void)argument;
  RANKS_EXPECT(comm, find_processes(comm, processes) == EVEN_OK);
  if (own == 3) {
    await_call(comm, 0, 3);
    await_call(comm, 2, 3);
    (void)kill(processes[1], SIGKILL);
    await_end(comm);
    RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_PEER_LOST && even_error_last()->rank == 1);
    return 0;
  }
  if (own == 1) {
    for (;;) {
      (void)pause();
    }
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_PEER_LOST && even_error_last()->rank == 1);
  RANKS_EXPECT(comm, mentions("ranks 0, 2 in call 3 (barrier)"));
  RANKS_EXPECT(comm, mentions(" 3 done with call 2 (all_gather of 16 U8 elements in all)"));
  RANKS_EXPECT(comm, even_comm_flight(comm, 3, &call, 1) == 1 && call.number == 2 && call.state == EVEN_FLIGHT_DONE);
  return 0;
}

/* A failing call waits for the others' words for 50 ms: with little processor time that is not always enough. */
static void failures_say_what_each_rank_reached(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof PLACES / sizeof PLACES[0]; i++) {
    int unequal = -1;
    for (int attempt = 0; attempt < 20 && unequal != 1; attempt++) {
      unequal = run_at(PLACES[i], leave_behind, NULL, NULL); /* the killed one alone */
    }
    assert_int_equal(unequal, 1);
  }
}

/* ---- a mismatch ---- */

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
  RANKS_EXPECT(comm, mentions(" at train.py:7 in step") && mentions(" at train.c:41"));
  if (odd) {
    RANKS_EXPECT(comm,
                 mentions("rank 1 called all_reduce of 2 F32 elements with SUM at train.py:7 in step, but rank "));
  }
  return 0;
}

static void both_sides_of_a_mismatch_are_named(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof PLACES / sizeof PLACES[0]; i++) {
    assert_int_equal(run_at(PLACES[i], disagree, NULL, NULL), 0);
  }
}

/* ---- a stop ---- */

static even_status wait_for_message(even_comm *comm, int from) {
  char byte = 0;
  even_comm_request *request = NULL;
  even_status status = even_comm_receive_begin(comm, &byte, 1, from, 1, &request);
  status = status == EVEN_OK ? even_comm_request_wait(request, 0, NULL) : status;
  even_comm_request_free(request);
  return status;
}

/* Rank 1 stops itself. Rank 3, which alone may see that, is in no call; 0 waits in a collective, 2 for a message. */
static int stop_one(even_comm *comm, void *argument) {
  int own = even_comm_rank(comm);
  pid_t processes[RANKS];
  (void)argument;
  RANKS_EXPECT(comm, find_processes(comm, processes) == EVEN_OK);
  if (own == 1) {
    (void)raise(SIGSTOP);
    return 0;
  }
  if (own == 3) {
    await_end(comm);
  }
  even_status status = own == 2 ? wait_for_message(comm, 1) : even_comm_barrier(comm);
  if (own == 0) {
    (void)kill(processes[1], SIGKILL);
  }
  RANKS_EXPECT(comm, status == EVEN_ERR_PEER_LOST && even_error_last()->rank == 1);
  RANKS_EXPECT(comm, mentions("rank 1 (process ") && mentions("was stopped (SIGSTOP, SIGTSTP) and stands still"));
  return 0;
}

static void a_stopped_rank_is_named(void **state) {
  int results[RANKS];
  (void)state;
  for (size_t i = 0; i < 2; i++) { /* alone on its host nobody sees it */
    assert_int_equal(run_at(PLACES[i], stop_one, NULL, results), 1);
    assert_int_equal(results[1], RANKS_KILLED);
  }
}

/* ---- a stall ---- */

/* Rank 3 comes when it hears that rank 0 has told of its stall, from the very words. */
static void tell_the_late(void *context, const char *words) {
  int *pipe_end = context;
  (void)!write(*pipe_end, words, strlen(words) + 1);
}

static int pipe_ends[2];

static int stand_still(even_comm *comm, void *argument) {
  int own = even_comm_rank(comm);
  float data[8] = {0};
  char words[768] = "";
  (void)argument;
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  if (own == 0) {
    even_comm_on_stall(comm, 0.05, tell_the_late, &pipe_ends[1]);
  }
  if (own == 3) {
    struct pollfd told = {.fd = pipe_ends[0], .events = POLLIN};
    RANKS_EXPECT(comm, poll(&told, 1, 30000) == 1 && read(pipe_ends[0], words, sizeof words) > 0);
    RANKS_EXPECT(comm,
                 strstr(words, "rank 0 has waited 0.") == words && strstr(words, " s for rank 3 (process ") != NULL);
    RANKS_EXPECT(comm, strstr(words, " in all_reduce of 8 F32 elements with SUM; reached: ") != NULL);
    RANKS_EXPECT(comm, strstr(words, "rank 3 done with call 2 (barrier)") != NULL);
  }
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, 8, EVEN_F32, EVEN_SUM) == EVEN_OK);
  return 0;
}

static void a_stall_is_told_with_what_each_rank_reached(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof PLACES / sizeof PLACES[0]; i++) {
    assert_int_equal(pipe(pipe_ends), 0);
    assert_int_equal(run_at(PLACES[i], stand_still, NULL, NULL), 0);
    (void)close(pipe_ends[0]);
    (void)close(pipe_ends[1]);
  }
}

/* ---- words that no rank of this library says ---- */

/* Of a message, as messages.c has it. */
typedef struct header {
  uint64_t tag;
  uint64_t bytes;
  uint64_t number;
  int32_t sender;
} header;

static void say(even_comm *comm, int to, even_ucx_kind kind, const void *words, size_t bytes) {
  even_ucx_group *group = even_ucx_of(comm);
  even_ucx_transfer transfer = {0};
  (void)pthread_mutex_lock(&group->lock);
  even_ucx_send(group, &transfer, to, even_ucx_tag(kind, group->rank, 0), words, bytes);
  while (!even_ucx_settled(group, &transfer)) {
    (void)even_ucx_move(group);
  }
  (void)pthread_mutex_unlock(&group->lock);
}

static int announce_for_nobody(even_comm *comm, void *argument) {
  static const int32_t senders[] = {1000000, -1, RANKS};
  even_comm_request *request = NULL;
  int value = 42;
  int other = -1;
  (void)argument;
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  if (even_comm_rank(comm) == 0) {
    for (size_t i = 0; i < sizeof senders / sizeof senders[0]; i++) {
      const header wrong = {.tag = 7, .bytes = sizeof value, .sender = senders[i]};
      say(comm, 1, EVEN_UCX_HEADER, &wrong, sizeof wrong);
    }
    RANKS_EXPECT(comm, even_comm_send_begin(comm, &value, sizeof value, 1, 7, &request) == EVEN_OK);
  } else if (even_comm_rank(comm) == 1) {
    value = 0;
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, &value, sizeof value, EVEN_COMM_ANY_RANK, 7, &request) == EVEN_OK);
  }
  RANKS_EXPECT(comm, request == NULL || even_comm_request_wait(request, 0, &other) == EVEN_OK);
  RANKS_EXPECT(comm, value == 42 && other == (even_comm_rank(comm) == 1 ? 0 : even_comm_rank(comm) == 0 ? 1 : -1));
  even_comm_request_free(request);
  return even_comm_barrier(comm) != EVEN_OK;
}

static void a_message_of_no_rank_is_passed_over(void **state) {
  (void)state;
  assert_int_equal(run_at(NULL, announce_for_nobody, NULL, NULL), 0);
}

/* A rank whose group was ended "well" would take calls that moved nothing for done. */
static int end_without_a_cause(even_comm *comm, void *argument) {
  even_ucx_notice notice = {.word = EVEN_UCX_ENDED, .sender = 0};
  notice.end.status = *(const int32_t *)argument;
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  char out_of_it = 0;
  if (even_comm_rank(comm) == 0) {
    RANKS_EXPECT(comm, read(pipe_ends[0], &out_of_it, 1) == 1);
    say(comm, 1, EVEN_UCX_NOTICE, &notice, sizeof notice);
  }
  RANKS_EXPECT(comm, even_comm_rank(comm) != 1 || write(pipe_ends[1], &out_of_it, 1) == 1);
  while (even_comm_rank(comm) == 1 && !even_comm_engine_of(comm)->has_ended(comm)) {
    even_clock_sleep_ns(1000000);
  }
  even_status status = even_comm_barrier(comm);
  RANKS_EXPECT(comm, status > EVEN_OK && status <= EVEN_ERR_INTERRUPTED);
  return 0;
}

static void an_end_without_a_cause_is_an_error(void **state) {
  static const int32_t none[] = {EVEN_OK, -1, 12345};
  (void)state;
  for (size_t i = 0; i < sizeof none / sizeof none[0]; i++) {
    int32_t status = none[i];
    assert_int_equal(pipe(pipe_ends), 0);
    assert_int_equal(run_at(enter_own, end_without_a_cause, &status, NULL), 0);
    (void)close(pipe_ends[0]);
    (void)close(pipe_ends[1]);
  }
}

static int report_the_last_number(even_comm *comm, void *argument) {
  even_ucx_notice notice = {.word = EVEN_UCX_REPORTS, .sender = 0};
  even_flight_call call = {0};
  (void)argument;
  notice.news.call = (even_flight_report){
      .number = UINT64_MAX, .state = 99, .began_ago_ns = UINT64_MAX, .what = UINT64_MAX, .count = UINT64_MAX};
  memset(notice.news.call.site, 'x', sizeof notice.news.call.site);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  if (even_comm_rank(comm) == 0) {
    say(comm, 1, EVEN_UCX_NOTICE, &notice, sizeof notice);
  }
  while (even_comm_rank(comm) == 1 && call.number != UINT64_MAX) {
    even_clock_sleep_ns(1000000);
    RANKS_EXPECT(comm, even_comm_flight(comm, 0, &call, 1) <= 1);
  }
  RANKS_EXPECT(comm, strlen(call.site) < sizeof call.site && call.began_ns <= even_clock_ns());
  return even_comm_barrier(comm) != EVEN_OK;
}

static void a_wild_report_is_read_to_its_end(void **state) {
  (void)state;
  assert_int_equal(run_at(enter_own, report_the_last_number, NULL, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(ranks_of_one_host_see_all_calls),
      cmocka_unit_test(others_find_the_record),
      cmocka_unit_test(failures_say_what_each_rank_reached),
      cmocka_unit_test(both_sides_of_a_mismatch_are_named),
      cmocka_unit_test(a_stopped_rank_is_named),
      cmocka_unit_test(a_stall_is_told_with_what_each_rank_reached),
      cmocka_unit_test(a_message_of_no_rank_is_passed_over),
      cmocka_unit_test(an_end_without_a_cause_is_an_error),
      cmocka_unit_test(a_wild_report_is_read_to_its_end),
  };
  if (!ranks_have_ucx()) {
    return 77; /* skipped, as CMakeLists.txt says */
  }
  return cmocka_run_group_tests_name("what ranks over UCX know of one another", tests, NULL, NULL);
}
