/* Ranks that wait for one another in several groups: named, and ended where none of them can get on. */
#include "comm/ranks.h"
#include "comm/waits.h"
#include "os/clock.h"
#include "support/sanitizer.h"

#include <evenstep/flight.h>

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define GROUPS 4
/* Longer than it takes to find that ranks wait for one another. */
#define LONG_NS ((uint64_t)3500 * 1000000u)

static const ranks_setup two = {.ranks = 2, .timeout_seconds = 60, .spin = -1};

/* Made before the ranks are. */
static int fds[GROUPS];

static void make_groups(int count, int ranks) {
  even_comm_params params = {.size = sizeof params, .ranks = ranks, .spin = -1};
  for (int number = 0; number < count; number++) {
    assert_int_equal(even_comm_create_segment(&params, &fds[number]), EVEN_OK);
  }
}

static void close_groups(int count) {
  for (int number = 0; number < count; number++) {
    (void)close(fds[number]);
  }
}

static even_comm *open_group(int number, int rank, int ranks, const char *site) {
  even_comm *group = NULL;
  even_comm_params params = {.size = sizeof params, .rank = rank, .ranks = ranks, .timeout_seconds = 60, .spin = -1};
  if (even_comm_open(&params, fds[number], &group) == EVEN_OK) {
    char name[16];
    (void)snprintf(name, sizeof name, "test/%d", number);
    even_comm_set_site(group, site);
    if (even_comm_record(group, NULL, name) != EVEN_OK) {
      return NULL;
    }
  }
  return group;
}

static even_waits_others nobody_calls(void *context) {
  (void)context;
  return EVEN_WAITS_OTHERS_NONE;
}

/* ThreadSanitizer has a thread of its own, of which the engine cannot know that it makes no calls. */
static void have_no_other_threads(void) {
  if (EVEN_TEST_THREADS_WATCHED) {
    even_waits_ask_others(nobody_calls, NULL);
  }
}

static bool says(const char *words) {
  return strstr(even_error_last()->what, words) != NULL;
}

/* ---- circles ---- */

static int call_in_opposite_order(even_comm *comm, void *argument) {
  int rank = even_comm_rank(comm);
  float values[3] = {0};
  have_no_other_threads();
  (void)argument;
  even_comm *one = open_group(0, rank, 2, "one.c:17");
  even_comm *other = open_group(1, rank, 2, "other.c:4");
  RANKS_EXPECT(comm, one != NULL && other != NULL && even_comm_barrier(comm) == EVEN_OK);
  even_status status = rank == 0 ? even_comm_all_reduce(one, values, 3, EVEN_F32, EVEN_SUM) : even_comm_barrier(other);
  RANKS_EXPECT(comm, status == EVEN_ERR_MISMATCH && even_error_last()->rank == 1 - rank);
  RANKS_EXPECT(comm, says("ranks wait for one another: "));
  RANKS_EXPECT(comm, says("rank 0 is in all_reduce of 3 F32 elements with SUM of group test/0 at one.c:17 for "));
  RANKS_EXPECT(comm, says("rank 1 is in barrier of group test/1 at other.c:4 for "));
  RANKS_EXPECT(comm, strstr(even_error_last()->fix, "in one order") != NULL);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK); /* other groups go on */
  even_comm_close(one);
  even_comm_close(other);
  return 0;
}

static void groups_in_opposite_order_are_a_mismatch(void **state) {
  (void)state;
  make_groups(2, 2);
  assert_int_equal(ranks_run(&two, call_in_opposite_order, NULL, NULL), 0);
  close_groups(2);
}

/* From the other rank, or from any. */
static int receive_against_barrier(even_comm *comm, void *argument) {
  char place[] = "receive.c:9";
  int word = 0;
  int peer = *(int *)argument;
  char from[16];
  char words[128];
  even_comm_request *request = NULL;
  have_no_other_threads();
  (void)snprintf(from, sizeof from, "%s", peer == EVEN_COMM_ANY_RANK ? "any rank" : "rank 1");
  even_comm_ask_site(comm, ranks_say_site, place);
  even_status status = EVEN_OK;
  if (even_comm_rank(comm) == 0) {
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, &word, 4, peer, 7, &request) == EVEN_OK);
    status = even_comm_request_wait(request, 0, NULL);
    (void)snprintf(words, sizeof words, "rank 0 was in receive of 4 bytes from %s with tag 7", from);
    RANKS_EXPECT(comm, says(words));
  } else {
    status = even_comm_barrier(comm);
  }
  RANKS_EXPECT(comm, status == EVEN_ERR_MISMATCH);
  (void)snprintf(words, sizeof words,
                 "rank 0 is in receive of 4 bytes from %s with tag 7 of a group of 2 ranks at receive.c:9", from);
  RANKS_EXPECT(comm, says(words));
  RANKS_EXPECT(comm, says("rank 1 is in barrier of a group of 2 ranks at receive.c:9"));
  even_comm_request_free(request);
  return 0;
}

static void a_receive_against_a_collective_is_a_mismatch(void **state) {
  int peers[] = {1, EVEN_COMM_ANY_RANK};
  (void)state;
  for (int i = 0; i < 2; i++) {
    assert_int_equal(ranks_run(&two, receive_against_barrier, &peers[i], NULL), 0);
  }
}

/* Three groups of two, in each of which one waits for the next. */
static int wait_in_a_ring(even_comm *comm, void *argument) {
  int rank = even_comm_rank(comm);
  have_no_other_threads();
  (void)argument;
  even_comm *with[3] = {NULL};
  for (int number = 0; number < 3; number++) { /* of rank `number` and the next */
    if (rank == number || rank == (number + 1) % 3) {
      with[number] = open_group(number, rank == number ? 0 : 1, 2, NULL);
      RANKS_EXPECT(comm, with[number] != NULL);
    }
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_barrier(with[rank]) == EVEN_ERR_MISMATCH && says("ranks wait for one another: "));
  for (int other = 0; other < 3; other++) {
    char words[64];
    (void)snprintf(words, sizeof words, "rank %d is in barrier of group test/%d for ", other, other);
    RANKS_EXPECT(comm, says(words));
  }
  even_comm_close(with[rank]);
  even_comm_close(with[(rank + 2) % 3]);
  return 0;
}

static void longer_circles_are_found(void **state) {
  ranks_setup three = two;
  (void)state;
  three.ranks = 3;
  make_groups(3, 2);
  assert_int_equal(ranks_run(&three, wait_in_a_ring, NULL, NULL), 0);
  close_groups(3);
}

/* ---- what is none ---- */

typedef struct late_caller {
  even_comm *group;
  bool called; /* it has called before */
  even_status status;
} late_caller;

static void *call_late(void *argument) {
  late_caller *caller = argument;
  caller->status = caller->called ? even_comm_barrier(caller->group) : EVEN_OK;
  even_clock_sleep_ns(LONG_NS); /* computes */
  caller->status = caller->status == EVEN_OK ? even_comm_barrier(caller->group) : caller->status;
  return NULL;
}

/* Of each two ranks the second waits in one group, while a thread of it comes to the other; in the second pair that
 * thread has called before. */
static int wait_for_a_thread(even_comm *comm, void *argument) {
  int pair = even_comm_rank(comm) / 2;
  int rank = even_comm_rank(comm) % 2;
  even_comm *one = open_group(2 * pair, rank, 2, NULL);
  even_comm *other = open_group(2 * pair + 1, rank, 2, NULL);
  late_caller caller = {.group = one, .called = pair == 1};
  pthread_t thread;
  (void)argument;
  if (pair == 1) { /* in the first it is the question: there it cannot fail under ThreadSanitizer */
    have_no_other_threads();
  }
  RANKS_EXPECT(comm, one != NULL && other != NULL);
  if (rank == 0) {
    RANKS_EXPECT(comm, pair == 0 || even_comm_barrier(one) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_barrier(one) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_barrier(other) == EVEN_OK);
  } else {
    RANKS_EXPECT(comm, pthread_create(&thread, NULL, call_late, &caller) == 0);
    even_status status = even_comm_barrier(other);
    (void)pthread_join(thread, NULL);
    RANKS_EXPECT(comm, status == EVEN_OK && caller.status == EVEN_OK);
  }
  even_comm_close(one);
  even_comm_close(other);
  return 0;
}

static void another_thread_may_come(void **state) {
  ranks_setup four = two;
  (void)state;
  four.ranks = 4;
  make_groups(4, 2);
  assert_int_equal(ranks_run(&four, wait_for_a_thread, NULL, NULL), 0);
  close_groups(4);
}

static void keep_words(void *context, const char *words) {
  (void)snprintf(context, 1024, "%s", words);
}

/* A message that goes on beside the calls may be what lets another rank get on. */
static int wait_beside_a_message(even_comm *comm, void *argument) {
  int rank = even_comm_rank(comm);
  int word = 0;
  char stalled[1024] = "";
  even_comm_request *request = NULL;
  have_no_other_threads();
  (void)argument;
  even_comm *one = open_group(0, rank, 2, NULL);
  even_comm *other = open_group(1, rank, 2, "other.c:4");
  RANKS_EXPECT(comm, one != NULL && other != NULL);
  even_comm_set_timeout(one, 4);
  even_comm_on_stall(one, 2, keep_words, stalled);
  RANKS_EXPECT(comm, even_comm_receive_begin(comm, &word, 4, 1 - rank, 7, &request) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_barrier(other) == EVEN_OK);
  if (rank == 0) {
    RANKS_EXPECT(comm, even_comm_barrier(one) == EVEN_ERR_TIMEOUT);
    RANKS_EXPECT(
        comm, says("did not come within the timeout of 4 s; rank 1 is in barrier of group test/1 at other.c:4 for "));
    RANKS_EXPECT(comm, strstr(stalled, "; rank 1 is in barrier of group test/1 at other.c:4 for ") != NULL);
  }
  RANKS_EXPECT(comm, even_comm_barrier(other) == EVEN_OK);
  even_comm_request_free(request);
  even_comm_close(one);
  even_comm_close(other);
  return 0;
}

static void what_the_other_is_in_is_told(void **state) {
  (void)state;
  make_groups(2, 2);
  assert_int_equal(ranks_run(&two, wait_beside_a_message, NULL, NULL), 0);
  close_groups(2);
}

static void *wait_for_the_same(void *request) {
  (void)!even_comm_request_wait(request, 0, NULL);
  return NULL;
}

/* Two threads that wait for one message are not one beside which another is waited for. */
static int wait_twice_beside_a_message(even_comm *comm, void *argument) {
  int rank = even_comm_rank(comm);
  int words[2] = {0};
  even_comm_request *requests[2] = {NULL};
  pthread_t thread;
  have_no_other_threads();
  (void)argument;
  even_comm *one = open_group(0, rank, 2, NULL);
  RANKS_EXPECT(comm, one != NULL);
  even_comm_set_timeout(one, (double)LONG_NS * 1e-9);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  if (rank == 0) {
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, &words[0], 4, 1, 7, &requests[0]) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_receive_begin(one, &words[1], 4, 1, 7, &requests[1]) == EVEN_OK);
    RANKS_EXPECT(comm, pthread_create(&thread, NULL, wait_for_the_same, requests[1]) == 0);
    even_status status = even_comm_request_wait(requests[1], 0, NULL);
    (void)pthread_join(thread, NULL);
    RANKS_EXPECT(comm, status == EVEN_ERR_TIMEOUT);
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  even_comm_request_free(requests[0]);
  even_comm_request_free(requests[1]);
  even_comm_close(one);
  return 0;
}

static void a_message_is_counted_once(void **state) {
  (void)state;
  make_groups(1, 2);
  assert_int_equal(ranks_run(&two, wait_twice_beside_a_message, NULL, NULL), 0);
  close_groups(1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(groups_in_opposite_order_are_a_mismatch),
      cmocka_unit_test(a_receive_against_a_collective_is_a_mismatch),
      cmocka_unit_test(longer_circles_are_found),
      cmocka_unit_test(another_thread_may_come),
      cmocka_unit_test(what_the_other_is_in_is_told),
      cmocka_unit_test(a_message_is_counted_once),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
