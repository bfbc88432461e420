/* Ranks of a device communicator that never come: killed, stopped, gone, in another call, or late. Who is named, by
 * whom, in which words; the ranks are processes, and the signals are real. */
#include "comm/board.h"
#include "comm/device_members.h"
#include "comm/device_ranks.h"
#include "comm/fake_gpu.h"
#include "os/clock.h"
#include "os/process_stat.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#define RANKS 3

static bool says(const char *words) {
  return strstr(even_error_last()->what, words) != NULL;
}

static int run(ranks_body *body, void *argument, int *results) {
  const ranks_setup setup = {.ranks = RANKS, .arena_bytes = 4096, .timeout_seconds = 120, .spin = -1};
  return ranks_run(&setup, body, argument, results);
}

/* Threads, so that ThreadSanitizer sees them. */
static int run_threads(int ranks, ranks_body *body, void *argument) {
  const ranks_setup setup = {.ranks = ranks, .arena_bytes = 4096, .timeout_seconds = 120, .spin = -1, .threads = true};
  return ranks_run(&setup, body, argument, NULL);
}

/* ---- signals ---- */

typedef struct signalling {
  int number;
  bool blocking;    /* NCCL's other mode */
  bool inside;      /* it is in the collective itself */
  bool in_the_host; /* the others are in the host's part of it */
  const char *words;
} signalling;

/* Rank 1 of three, when the others are in their second call. */
static int be_signalled(device_member *at, const signalling *what) {
  if (what->inside) {
    fake_gpu_hang(true);
    RANKS_EXPECT(at->host, device_member_sum(at, 1000) == EVEN_OK);
  }
  device_member_await(at, 0, 2);
  device_member_await(at, 2, 2);
  (void)raise(what->number);
  /* stopped, and let go by rank 0 when all others had gone on without it */
  if (!what->inside) {
    RANKS_EXPECT(at->host, device_member_sum(at, 1000) != EVEN_ERR_TIMEOUT);
  }
  RANKS_EXPECT(at->host, device_member_failure(at) == EVEN_ERR_PEER_LOST && even_error_last()->rank == 1);
  RANKS_EXPECT(at->host, says(what->words));
  (void)!device_member_end(at);
  return 0;
}

static int lose_rank_1(even_comm *host, void *argument) {
  const signalling *what = argument;
  device_member at;
  RANKS_EXPECT(host, device_member_meet(host, &at) == 0);
  even_device_comm_params params = device_member_params(&at);
  params.blocking = what->blocking;
  RANKS_EXPECT(host, even_device_comm_open(&params, &at.id, &at.comm) == EVEN_OK);
  RANKS_EXPECT(host, device_member_sum(&at, 4) == EVEN_OK);
  fake_gpu_wait(at.stream, at.rank);
  if (at.rank == 1) {
    return be_signalled(&at, what);
  }
  fake_gpu_polls(what->in_the_host ? 1 << 30 : 0);
  even_status status = device_member_sum(&at, 1000);
  RANKS_EXPECT(host, status == (what->in_the_host ? EVEN_ERR_PEER_LOST : EVEN_OK));
  fake_gpu_polls(0);
  RANKS_EXPECT(host, device_member_failure(&at) == EVEN_ERR_PEER_LOST && even_error_last()->rank == 1);
  RANKS_EXPECT(host, says("rank 1 (process ") && says(what->words));
  RANKS_EXPECT(host, says("was in all_reduce of 1000 F32 elements with SUM; reached: "));
  RANKS_EXPECT(host, even_error_last()->fix[0] != '\0');
  RANKS_EXPECT(host, device_member_sum(&at, 4) == EVEN_ERR_PEER_LOST && says(what->words)); /* and from now on */
  if (at.rank == 0) {
    device_member_await(&at, 2, 2);
    (void)kill(at.processes[1], SIGCONT);
  }
  RANKS_EXPECT(host, device_member_end(&at) == EVEN_OK);
  RANKS_EXPECT(host, fake_gpu_violation()[0] == '\0' && fake_gpu_live() == 0);
  device_member_forget(&at);
  return 0;
}

static void a_killed_rank_is_named(void **state) {
  static const signalling ways[] = {
      {.number = SIGKILL},
      {.number = SIGKILL, .inside = true},
      {.number = SIGKILL, .in_the_host = true},
      {.number = SIGKILL, .in_the_host = true, .inside = true},
      {.number = SIGKILL, .blocking = true, .inside = true},
  };
  int results[RANKS];
  (void)state;
  for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
    signalling what = ways[i];
    what.words = "died or came to its end";
    assert_int_equal(run(lose_rank_1, &what, results), 1);
    assert_int_equal(results[1], RANKS_KILLED);
  }
}

static void a_stopped_rank_is_named(void **state) {
  (void)state;
  for (int i = 0; i < 2; i++) {
    signalling what = {.number = SIGSTOP, .inside = i == 1, .words = "was stopped (SIGSTOP, SIGTSTP) and stands still"};
    assert_int_equal(run(lose_rank_1, &what, NULL), 0);
  }
}

static bool has_ended(pid_t process) {
  even_process_stat facts;
  return even_process_stat_read(process, &facts) != 0 || facts.state == 'Z';
}

/* A rank has presented itself, and then it never comes to NCCL. */
typedef struct opening {
  bool late; /* rank 2 waits between its presenting itself and its coming until rank 0 has ended */
  even_device_comm_id id;
} opening;

typedef struct gathering {
  device_member *at;
  const opening *what;
} gathering;

static even_status gather_and_die(void *context, const void *mine, size_t bytes, void *all) {
  const gathering *by = context;
  even_device_comm_params params = device_member_params(by->at);
  even_status status = params.gather(params.context, mine, bytes, all);
  if (status == EVEN_OK && by->at->rank == 1) {
    (void)raise(SIGKILL);
  }
  while (by->what->late && by->at->rank == 2 && !has_ended(by->at->processes[0])) {
    even_clock_sleep_ns(1000000);
  }
  return status;
}

static int die_while_opening(even_comm *host, void *argument) {
  device_member at;
  opening *what = argument;
  gathering by = {.at = &at, .what = what};
  RANKS_EXPECT(host, device_member_meet(host, &at) == 0);
  even_device_comm_params params = device_member_params(&at);
  params.gather = gather_and_die;
  params.context = &by;
  if (at.rank == 0) {
    what->id = at.id;
  }
  RANKS_EXPECT(host, even_device_comm_open(&params, &at.id, &at.comm) == EVEN_ERR_PEER_LOST);
  RANKS_EXPECT(host, says("opening or closing the communicator"));
  RANKS_EXPECT(host, even_error_last()->rank == 1 || (what->late && at.rank == 2 && even_error_last()->rank == 0));
  return 0;
}

/* Rank 1 of three is killed; the others' file of NCCL, of which rank 0 leaves the id in `id`, is removed. */
static void lose_while_opening(ranks_body *body, opening *what) {
  int results[RANKS];
  device_member at = {0};
  assert_int_equal(run(body, what, results), 1);
  assert_int_equal(results[1], RANKS_KILLED);
  at.id = what->id;
  device_member_forget(&at); /* not before: a rank that comes to NCCL when the others have ended looks for its file */
}

static void a_rank_that_dies_while_opening_is_named(void **state) {
  opening *what = mmap(NULL, sizeof *what, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  (void)state;
  assert_true(what != MAP_FAILED);
  lose_while_opening(die_while_opening, what);
  (void)munmap(what, sizeof *what);
}

/* Rank 2 comes to the board when rank 0, whose board it is, has found rank 1 dead and has ended. */
static void who_comes_when_the_first_has_ended_is_told(void **state) {
  opening *what = mmap(NULL, sizeof *what, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  (void)state;
  assert_true(what != MAP_FAILED);
  what->late = true;
  lose_while_opening(die_while_opening, what);
  (void)munmap(what, sizeof *what);
}

/* ---- ranks that are gone ---- */

static int leave_early(even_comm *host, void *argument) {
  device_member at;
  (void)argument;
  RANKS_EXPECT(host, device_member_begin(host, &at) == 0 && device_member_sum(&at, 4) == EVEN_OK);
  if (at.rank == 1) {
    return device_member_end(&at) != EVEN_OK;
  }
  fake_gpu_wait(at.stream, at.rank);
  even_status status = device_member_sum(&at, 5); /* refused where the other waiting rank was heard of already */
  RANKS_EXPECT(host, status == EVEN_OK || status == EVEN_ERR_PEER_LOST);
  RANKS_EXPECT(host, device_member_failure(&at) == EVEN_ERR_PEER_LOST && even_error_last()->rank == 1);
  RANKS_EXPECT(host, says("left the communicator"));
  return device_member_end(&at) != EVEN_OK;
}

static void a_rank_that_left_is_named(void **state) {
  (void)state;
  assert_int_equal(run_threads(RANKS, leave_early, NULL), 0);
}

/* Who has done all that it was waited for may go: nobody is lost. */
static int leave_one_by_one(even_comm *host, void *argument) {
  device_member at;
  (void)argument;
  RANKS_EXPECT(host, device_member_begin(host, &at) == 0);
  for (size_t i = 0; i < 40; i++) {
    RANKS_EXPECT(host, device_member_sum(&at, 1 + i) == EVEN_OK);
  }
  RANKS_EXPECT(host, device_member_end(&at) == EVEN_OK);
  return 0;
}

static void ranks_go_when_they_are_done(void **state) {
  (void)state;
  assert_int_equal(run_threads(RANKS, leave_one_by_one, NULL), 0);
}

static int abort_one(even_comm *host, void *argument) {
  device_member at;
  (void)argument;
  RANKS_EXPECT(host, device_member_begin(host, &at) == 0);
  if (at.rank == 1) {
    device_member_await(&at, 0, 1);
    device_member_await(&at, 2, 1);
    fake_gpu_hang(true);
  }
  RANKS_EXPECT(host, device_member_sum(&at, 4) == EVEN_OK);
  if (at.rank == 1) {
    even_device_comm_abort(at.comm);
  }
  RANKS_EXPECT(host, device_member_failure(&at) == EVEN_ERR_REVOKED);
  RANKS_EXPECT(host, at.rank == 1 || (says("rank 1 aborted the communicator") && even_error_last()->rank == 1));
  (void)!device_member_end(&at);
  device_member_forget(&at);
  return 0;
}

static void an_abort_is_heard_of(void **state) {
  (void)state;
  assert_int_equal(run(abort_one, NULL, NULL), 0);
}

/* ---- different calls ---- */

static int call_differently(even_comm *host, void *argument) {
  device_member at;
  (void)argument;
  RANKS_EXPECT(host, device_member_begin(host, &at) == 0 && device_member_sum(&at, 4) == EVEN_OK);
  fake_gpu_wait(at.stream, at.rank);
  even_device_comm_set_site(at.comm, at.rank == 1 ? "b.c:7" : "a.c:3");
  even_status status = device_member_sum(&at, at.rank == 1 ? 5 : 4);
  RANKS_EXPECT(host, status == EVEN_OK || status == EVEN_ERR_MISMATCH);
  RANKS_EXPECT(host, device_member_failure(&at) == EVEN_ERR_MISMATCH);
  RANKS_EXPECT(host, says("rank 1 called all_reduce of 5 F32 elements with SUM at b.c:7"));
  RANKS_EXPECT(host, says(" called all_reduce of 4 F32 elements with SUM at a.c:3") && says("(call 2 of the comm"));
  (void)!device_member_end(&at);
  return 0;
}

static void different_calls_are_told(void **state) {
  (void)state;
  for (int i = 0; i < 10; i++) {
    assert_int_equal(run_threads(RANKS, call_differently, NULL), 0);
    assert_string_equal(fake_gpu_violation(), ""); /* they never met on the GPU */
  }
}

static int divide_differently(even_comm *host, void *argument) {
  float data[2][8] = {{0}};
  device_member at;
  (void)argument;
  RANKS_EXPECT(host, device_member_begin(host, &at) == 0);
  const size_t counts[2] = {at.rank == 0 ? 2 : 4, at.rank == 0 ? 4 : 2};
  even_status status =
      even_device_comm_reduce_scatter(at.comm, data[0], data[1], counts, EVEN_F32, EVEN_SUM, NULL, at.stream);
  RANKS_EXPECT(host, status == EVEN_OK || status == EVEN_ERR_MISMATCH);
  RANKS_EXPECT(host, device_member_failure(&at) == EVEN_ERR_MISMATCH && says("divided otherwise among the ranks"));
  (void)!device_member_end(&at);
  return 0;
}

static void different_parts_are_told(void **state) {
  (void)state;
  assert_int_equal(run_threads(2, divide_differently, NULL), 0);
}

/* Hosts run far ahead of their GPUs: what differs may be in the record no more. */
static int run_ahead(even_comm *host, void *argument) {
  device_member at;
  (void)argument;
  RANKS_EXPECT(host, device_member_begin(host, &at) == 0);
  if (at.rank == 1) {
    device_member_await(&at, 0, 40);
  }
  even_status status = EVEN_OK;
  for (size_t i = 0; i < 40 && status == EVEN_OK; i++) {
    status = device_member_sum(&at, at.rank == 0 && i == 3 ? 6 : 4);
  }
  RANKS_EXPECT(host, device_member_failure(&at) == EVEN_ERR_MISMATCH);
  RANKS_EXPECT(host, says("but other calls before, which the record has no more"));
  (void)!device_member_end(&at);
  return 0;
}

static void calls_that_differed_long_ago_are_told(void **state) {
  (void)state;
  fake_gpu_hang(true);
  assert_int_equal(run_threads(2, run_ahead, NULL), 0);
}

/* ---- ranks that are late ---- */

/* Rank 0 alone has a short limit, and begins when rank 2 is in the call: only rank 1 is missing when the limit is over,
 * however long a thread is held up. The calls themselves may not have returned by then. */
static int come_late(even_comm *host, void *argument) {
  device_member at;
  (void)argument;
  RANKS_EXPECT(host, device_member_begin(host, &at) == 0 && device_member_sum(&at, 4) == EVEN_OK);
  fake_gpu_wait(at.stream, at.rank);
  if (at.rank == 0) {
    device_member_await(&at, 2, 2);
    even_device_comm_set_timeout(at.comm, 0.05);
  }
  if (at.rank != 1) {
    even_status status = device_member_sum(&at, 5);
    RANKS_EXPECT(host, status == EVEN_OK || status == EVEN_ERR_TIMEOUT);
    RANKS_EXPECT(host, device_member_failure(&at) == EVEN_ERR_TIMEOUT && even_error_last()->rank == 1);
    RANKS_EXPECT(host, says("all_reduce of 5 F32 elements with SUM on cuda:") && says("rank 1 did not come"));
  }
  RANKS_EXPECT(host, even_comm_barrier(host) == EVEN_OK);
  (void)!device_member_end(&at);
  return 0;
}

static void a_late_rank_is_named_at_the_limit(void **state) {
  (void)state;
  assert_int_equal(run_threads(RANKS, come_late, NULL), 0);
}

/* The same with a limit of the call alone. */
static int limit_one_call(even_comm *host, void *argument) {
  device_member at;
  (void)argument;
  RANKS_EXPECT(host, device_member_begin(host, &at) == 0);
  if (at.rank == 0) {
    device_member_await(&at, 2, 1);
    even_device_comm_set_call_timeout(at.comm, 0.05);
  }
  if (at.rank != 1) {
    even_status status = device_member_sum(&at, 4);
    RANKS_EXPECT(host, status == EVEN_OK || status == EVEN_ERR_TIMEOUT);
    even_device_comm_set_call_timeout(at.comm, 0); /* what is under way keeps its own */
    RANKS_EXPECT(host, device_member_failure(&at) == EVEN_ERR_TIMEOUT && even_error_last()->rank == 1);
    RANKS_EXPECT(host, says("all_reduce of 4 F32 elements with SUM on cuda:") && says("was not done after 0.05 s"));
  }
  RANKS_EXPECT(host, even_comm_barrier(host) == EVEN_OK);
  (void)!device_member_end(&at);
  return 0;
}

static void a_call_may_have_a_limit_of_its_own(void **state) {
  (void)state;
  assert_int_equal(run_threads(RANKS, limit_one_call, NULL), 0);
}

typedef struct note {
  atomic_int count;
  char words[768];
} note;

static void keep_words(void *context, const char *words) {
  note *into = context;
  (void)snprintf(into->words, sizeof into->words, "%s", words);
  atomic_fetch_add(&into->count, 1);
}

static int stand_still(even_comm *host, void *argument) {
  device_member at;
  note told = {0};
  (void)argument;
  RANKS_EXPECT(host, device_member_begin(host, &at) == 0);
  even_device_comm_on_stall(at.comm, 0.001, keep_words, &told);
  if (at.rank == 1) {
    RANKS_EXPECT(host, even_comm_barrier(host) == EVEN_OK); /* the others have been told of it */
  }
  RANKS_EXPECT(host, device_member_sum(&at, 7) == EVEN_OK);
  while (at.rank != 1 && atomic_load(&told.count) == 0) {
    even_clock_sleep_ns(200000);
  }
  if (at.rank != 1) {
    RANKS_EXPECT(host, strstr(told.words, "for rank 1 (process ") != NULL &&
                           strstr(told.words, "in all_reduce of 7 F32 elements with SUM on cuda:") != NULL &&
                           strstr(told.words, "; reached: ") != NULL);
    RANKS_EXPECT(host, even_comm_barrier(host) == EVEN_OK);
  }
  fake_gpu_wait(at.stream, at.rank);
  RANKS_EXPECT(host, even_device_comm_poll(at.comm) == EVEN_OK); /* it was late, and that is all */
  even_device_comm_on_stall(at.comm, 0, NULL, NULL);
  RANKS_EXPECT(host, at.rank == 1 || atomic_load(&told.count) == 1);
  return device_member_end(&at) != EVEN_OK;
}

static void a_stall_is_told_once(void **state) {
  (void)state;
  assert_int_equal(run_threads(RANKS, stand_still, NULL), 0);
}

/* ---- what is made of what is left ---- */

/* Of the first two; the third takes part. */
static even_status gather_two(void *context, const void *mine, size_t bytes, void *all) {
  const size_t counts[RANKS] = {bytes, bytes, bytes};
  unsigned char three[RANKS * 512];
  if (bytes > 512 || even_comm_all_gather(context, mine, three, counts, EVEN_U8) != EVEN_OK) {
    return even_error_last()->status;
  }
  memcpy(all, three, 2 * bytes);
  return EVEN_OK;
}

static int shrink_and_meet(even_comm *host, void *argument) {
  const int gone[] = {2};
  const int numbers[] = {10, 20};
  device_member at;
  even_device_comm *whole = NULL;
  (void)argument;
  even_device_comm_params params = {.size = sizeof params, .gather = gather_two, .context = host, .numbers = numbers};
  RANKS_EXPECT(host, device_member_begin(host, &at) == 0 && device_member_sum(&at, 4) == EVEN_OK);
  fake_gpu_wait(at.stream, at.rank);
  whole = at.comm;
  if (at.rank < 2) {
    RANKS_EXPECT(host, even_device_comm_shrink(whole, gone, 1, false, &at.comm) == EVEN_OK);
    RANKS_EXPECT(host, even_device_comm_meet(at.comm, &params) == EVEN_OK);
    (void)!device_member_sum(&at, at.rank == 0 ? 4 : 5);
    RANKS_EXPECT(host, device_member_failure(&at) == EVEN_ERR_MISMATCH && says("rank 10 called all_reduce of 4"));
    RANKS_EXPECT(host, says("rank 20 called all_reduce of 5") && says("(call 1 of the communicator)"));
    (void)!even_device_comm_close(at.comm);
    at.comm = whole;
  } else {
    unsigned char nothing[512] = {0};
    unsigned char two[1024];
    RANKS_EXPECT(host, gather_two(host, nothing, sizeof(even_board_place), two) == EVEN_OK);
  }
  RANKS_EXPECT(host, even_comm_barrier(host) == EVEN_OK);
  return device_member_end(&at) != EVEN_OK;
}

static void those_that_are_left_meet_again(void **state) {
  (void)state;
  assert_int_equal(run_threads(RANKS, shrink_and_meet, NULL), 0);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, device_test_begin, device_test_end)
  const struct CMUnitTest tests[] = {
      TEST(a_killed_rank_is_named),
      TEST(a_stopped_rank_is_named),
      TEST(a_rank_that_dies_while_opening_is_named),
      TEST(who_comes_when_the_first_has_ended_is_told),
      TEST(a_rank_that_left_is_named),
      TEST(ranks_go_when_they_are_done),
      TEST(an_abort_is_heard_of),
      TEST(different_calls_are_told),
      TEST(different_parts_are_told),
      TEST(calls_that_differed_long_ago_are_told),
      TEST(a_late_rank_is_named_at_the_limit),
      TEST(a_call_may_have_a_limit_of_its_own),
      TEST(a_stall_is_told_once),
      TEST(those_that_are_left_meet_again),
  };
  return cmocka_run_group_tests_name("watching device communicators", tests, NULL, NULL);
}
