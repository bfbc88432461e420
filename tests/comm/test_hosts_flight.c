/* Groups over several hosts: what their ranks know of one another, whoever leads a host and whatever it does. */
#include "comm/group.h"
#include "comm/hosts/group.h"
#include "comm/ranks.h"

#include <poll.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

/* Ranks 0, 2 and 3 on one host, 1 and 4 on another: the leaders are 0 and 1. */
static const int HOST_OF[] = {0, 1, 0, 0, 1};
#define RANKS 5

static bool mentions(const char *text) {
  return strstr(even_error_last()->what, text) != NULL;
}

static void enter_host(int rank) {
  (void)setenv("EVENSTEP_HOST_ID", HOST_OF[rank] == 0 ? "first" : "second", 1);
}

static int run(ranks_body *body, void *argument, int *results) {
  ranks_setup setup = {.ranks = RANKS,
                       .arena_bytes = 4096,
                       .timeout_seconds = 60,
                       .spin = -1,
                       .engine = RANKS_HOSTS,
                       .host_of = HOST_OF,
                       .enter = enter_host};
  return ranks_run(&setup, body, argument, results);
}

static void await_end(even_comm *comm) {
  while (!even_comm_engine_of(comm)->has_ended(comm)) { /* its watcher hears of it */
    (void)usleep(1000);
  }
}

static even_status find_processes(even_comm *comm, pid_t *processes) {
  size_t counts[RANKS];
  pid_t own = getpid();
  for (int rank = 0; rank < RANKS; rank++) {
    counts[rank] = sizeof own;
  }
  return even_comm_all_gather(comm, &own, processes, counts, EVEN_U8);
}

/* ---- the record ---- */

static int keep_calls(even_comm *comm, void *argument) {
  float data[8] = {0};
  even_flight_call calls[EVEN_FLIGHT_CALLS];
  (void)argument;
  even_comm_set_site(comm, "a.c:1");
  for (int i = 0; i < 20; i++) {
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, 8, EVEN_F32, EVEN_MAX) == EVEN_OK);
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  for (int rank = 0; rank < RANKS; rank++) {
    size_t count = even_comm_flight(comm, rank, calls, EVEN_FLIGHT_CALLS);
    if (HOST_OF[rank] == HOST_OF[even_comm_rank(comm)]) {
      RANKS_EXPECT(comm, count >= EVEN_FLIGHT_CALLS - 1);
      size_t last = count - 1 - (calls[count - 1].number == 23);
      RANKS_EXPECT(comm, calls[last].number == 22 && strcmp(calls[last].call, "barrier") == 0);
      RANKS_EXPECT(comm, strcmp(calls[last - 1].call, "all_reduce of 8 F32 elements with MAX") == 0);
      RANKS_EXPECT(comm, strcmp(calls[last - 1].site, "a.c:1") == 0);
    }
  }
  return even_comm_barrier(comm) != EVEN_OK;
}

static void calls_of_the_whole_group_are_kept(void **state) {
  (void)state;
  assert_int_equal(run(keep_calls, NULL, NULL), 0);
}

/* ---- calls that wait in different parts of the group ---- */

static bool is_odd(int odd, int rank) {
  return odd < RANKS ? rank == odd : HOST_OF[rank] == 1;
}

static even_status exchange_nothing(even_comm *comm) {
  char byte = 0;
  const void *inputs[RANKS];
  void *outputs[RANKS];
  const size_t bytes[RANKS] = {0};
  for (int rank = 0; rank < RANKS; rank++) {
    inputs[rank] = outputs[rank] = &byte;
  }
  return even_comm_all_to_all(comm, inputs, bytes, outputs, bytes);
}

static int cross_calls(even_comm *comm, void *argument) {
  bool odd = is_odd(*(int *)argument, even_comm_rank(comm));
  float data[4] = {0};
  even_comm_set_site(comm, odd ? "odd.c:7" : "even.c:9");
  even_status status = odd ? exchange_nothing(comm) : even_comm_all_reduce(comm, data, 4, EVEN_F32, EVEN_SUM);
  RANKS_EXPECT(comm, status == EVEN_ERR_MISMATCH);
  RANKS_EXPECT(comm,
               mentions("all_to_all at odd.c:7") && mentions("all_reduce of 4 F32 elements with SUM at even.c:9"));
  RANKS_EXPECT(comm, mentions("call 2 of the group"));
  return 0;
}

static void different_calls_are_told_apart_wherever_they_wait(void **state) {
  (void)state;
  for (int odd = 0; odd <= RANKS; odd++) { /* each rank, and a whole host */
    assert_int_equal(run(cross_calls, &odd, NULL), 0);
  }
}

/* ---- an end that finds leaders in no call ---- */

/* `argument` counts the ranks that are out of the first call: the end must not find one of them in it. */
static int lose_behind_leaders(even_comm *comm, void *argument) {
  int own = even_comm_rank(comm);
  pid_t processes[RANKS];
  _Atomic int *out = argument;
  RANKS_EXPECT(comm, find_processes(comm, processes) == EVEN_OK);
  (void)atomic_fetch_add(out, 1);
  if (own == 3) {
    for (;;) {
      (void)pause();
    }
  }
  if (own < 2) { /* the leaders */
    while (own == 0 && atomic_load(out) < RANKS) {
      (void)sched_yield();
    }
    if (own == 0) {
      (void)kill(processes[3], SIGKILL);
    }
    await_end(comm);
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_PEER_LOST && even_error_last()->rank == 3);
  bool late = own < 2 || !mentions(" was in "); /* the end came before its call */
  RANKS_EXPECT(comm, mentions("rank 3 (process ") && (late || mentions("; reached: ranks 0-1")));
  RANKS_EXPECT(comm, late || mentions(" done with call 2 (all_gather of "));
  return 0;
}

static int revoke_behind_leaders(even_comm *comm, void *argument) {
  int own = even_comm_rank(comm);
  _Atomic int *out = argument;
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  (void)atomic_fetch_add(out, 1);
  if (own == 2) {
    while (atomic_load(out) < RANKS) { /* as above */
      (void)sched_yield();
    }
    even_comm_engine_of(even_hosts_of(comm)->inside)->revoke(even_hosts_of(comm)->inside); /* as a rank in it does */
  }
  if (own < 2) {
    await_end(comm);
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_ERR_REVOKED);
  return 0;
}

static void an_end_reaches_all_while_leaders_compute(void **state) {
  int results[RANKS];
  (void)state;
  _Atomic int *out = mmap(NULL, sizeof *out, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_true(out != MAP_FAILED);
  assert_int_equal(run(lose_behind_leaders, out, results), 1);
  assert_int_equal(results[3], RANKS_KILLED);
  atomic_store(out, 0);
  assert_int_equal(run(revoke_behind_leaders, out, NULL), 0);
  (void)munmap(out, sizeof *out);
}

/* ---- a stop ---- */

static int stop_one(even_comm *comm, void *argument) {
  int victim = *(int *)argument;
  int own = even_comm_rank(comm);
  pid_t processes[RANKS];
  RANKS_EXPECT(comm, find_processes(comm, processes) == EVEN_OK);
  if (own == victim) {
    (void)raise(SIGSTOP);
    return 0;
  }
  even_status status = even_comm_barrier(comm);
  if (own == (victim == 0 ? 1 : 0)) {
    (void)kill(processes[victim], SIGKILL);
  }
  RANKS_EXPECT(comm, status == EVEN_ERR_PEER_LOST && even_error_last()->rank == victim);
  RANKS_EXPECT(comm, mentions("was stopped (SIGSTOP, SIGTSTP) and stands still") && mentions("was in barrier"));
  return 0;
}

static void a_stopped_rank_is_named_on_all_hosts(void **state) {
  int results[RANKS];
  (void)state;
  for (int victim = 0; victim < RANKS; victim++) {
    assert_int_equal(run(stop_one, &victim, results), 1);
    assert_int_equal(results[victim], RANKS_KILLED);
  }
}

/* ---- a stall ---- */

static int pipe_ends[2];

static void tell_the_late(void *context, const char *words) {
  int *pipe_end = context;
  (void)!write(*pipe_end, words, strlen(words) + 1);
}

/* Rank 4 comes when rank 2, which leads no host, has told of its stall. */
static int stand_still(even_comm *comm, void *argument) {
  int own = even_comm_rank(comm);
  float data[8] = {0};
  char words[1024] = "";
  struct pollfd told = {.fd = pipe_ends[0], .events = POLLIN};
  (void)argument;
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  if (own == 2) {
    even_comm_on_stall(comm, 0.05, tell_the_late, &pipe_ends[1]);
  }
  if (own == 4) {
    RANKS_EXPECT(comm, poll(&told, 1, 30000) == 1 && read(pipe_ends[0], words, sizeof words) > 0);
    RANKS_EXPECT(comm, strstr(words, "rank 2 has waited 0.") == words);
    RANKS_EXPECT(comm, strstr(words, ", a step of all_reduce of 8 F32 elements with SUM; reached: ") != NULL);
  }
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, 8, EVEN_F32, EVEN_SUM) == EVEN_OK);
  return 0;
}

static void a_stall_names_the_whole_groups_call(void **state) {
  (void)state;
  assert_int_equal(pipe(pipe_ends), 0);
  assert_int_equal(run(stand_still, NULL, NULL), 0);
  (void)close(pipe_ends[0]);
  (void)close(pipe_ends[1]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(calls_of_the_whole_group_are_kept),
      cmocka_unit_test(different_calls_are_told_apart_wherever_they_wait),
      cmocka_unit_test(an_end_reaches_all_while_leaders_compute),
      cmocka_unit_test(a_stopped_rank_is_named_on_all_hosts),
      cmocka_unit_test(a_stall_names_the_whole_groups_call),
  };
  if (!ranks_have_ucx()) {
    return 77; /* skipped, as CMakeLists.txt says */
  }
  return cmocka_run_group_tests_name("what ranks on several hosts know of one another", tests, NULL, NULL);
}
