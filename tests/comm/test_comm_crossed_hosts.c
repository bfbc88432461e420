/* Ranks that wait for one another in several groups over UCX, and on several hosts: named, and ended where none of them
 * can get on. (Those of one host: test_comm_crossed.c; who is stuck: test_comm_circle.c.) */
#include "comm/ranks.h"
#include "comm/waits.h"
#include "os/clock.h"

#include <evenstep/comm_costs.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define GROUPS 3
/* Longer than it takes to find that ranks wait for one another. */
#define LONG_NS ((uint64_t)5000 * 1000000u)

static const ranks_setup two = {.ranks = 2, .timeout_seconds = 120, .spin = -1, .engine = RANKS_NETWORK};

/* Made before the ranks are. */
static ranks_setup setups[GROUPS];
static ranks_segments segments[GROUPS];

static void make_groups(int count, const ranks_setup *of) {
  for (int number = 0; number < count; number++) {
    setups[number] = *of;
    if (ranks_make_segments(of, &segments[number]) != EVEN_OK) {
      abort();
    }
  }
}

static void close_groups(int count) {
  for (int number = 0; number < count; number++) {
    ranks_close_segments(&setups[number], &segments[number]);
  }
}

static even_comm *open_group(int number, int rank, const char *site) {
  even_comm *group = NULL;
  char name[16];
  if (ranks_open(&setups[number], &segments[number], rank, &group) != EVEN_OK) {
    return NULL;
  }
  (void)snprintf(name, sizeof name, "test/%d", number);
  even_comm_set_site(group, site);
  return even_comm_record(group, NULL, name) == EVEN_OK ? group : NULL;
}

/* UCX has threads of its own, of which the engine cannot know that they make no calls. */
static even_waits_others nobody_calls(void *context) {
  (void)context;
  return EVEN_WAITS_OTHERS_NONE;
}

static bool says(const char *words) {
  return strstr(even_error_last()->what, words) != NULL;
}

/* ---- circles ---- */

/* Whether another rank saw the circle first, went on, and left the group in which this one waited. */
static bool was_left(even_status status) {
  return status == EVEN_ERR_PEER_LOST && says("left the group");
}

static int call_in_opposite_order(even_comm *comm, void *argument) {
  int rank = even_comm_rank(comm);
  float values[3] = {0};
  (void)argument;
  even_waits_ask_others(nobody_calls, NULL);
  even_comm *one = open_group(0, rank, "one.c:17");
  even_comm *other = open_group(1, rank, "other.c:4");
  RANKS_EXPECT(comm, one != NULL && other != NULL && even_comm_barrier(comm) == EVEN_OK);
  even_status status = rank == 0 ? even_comm_all_reduce(one, values, 3, EVEN_F32, EVEN_SUM) : even_comm_barrier(other);
  if (!was_left(status)) {
    RANKS_EXPECT(comm, status == EVEN_ERR_MISMATCH && even_error_last()->rank == 1 - rank);
    RANKS_EXPECT(comm, says("ranks wait for one another: ") && says("rank 0 (host ") && says("rank 1 (host "));
    RANKS_EXPECT(comm, says(") is in all_reduce of 3 F32 elements with SUM of group test/0 at one.c:17 for "));
    RANKS_EXPECT(comm, says(") is in barrier of group test/1 at other.c:4 for "));
    RANKS_EXPECT(comm, strstr(even_error_last()->fix, "in one order") != NULL);
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK); /* other groups go on */
  even_comm_close(one);
  even_comm_close(other);
  return 0;
}

/* Beside `count` groups like `of`; how many ranks found something wrong. */
static int run_beside(int count, const ranks_setup *of, const ranks_setup *setup, ranks_body *body, void *argument) {
  make_groups(count, of);
  int wrong = ranks_run(setup, body, argument, NULL);
  close_groups(count);
  return wrong;
}

static int groups_in_opposite_order_are_a_mismatch(void) {
  return run_beside(2, &two, &two, call_in_opposite_order, NULL);
}

static int groups_over_mpi_in_opposite_order_are_a_mismatch(void) {
  ranks_setup mpi = two;
  mpi.mpi = FAKE_MPI_NUMBERS;
  return run_beside(2, &mpi, &mpi, call_in_opposite_order, NULL);
}

static const int apart[] = {0, 1};

/* The same of two groups over two hosts, as Python makes them. */
static int groups_over_hosts_in_opposite_order_are_a_mismatch(void) {
  ranks_setup hosts = two;
  hosts.engine = RANKS_HOSTS;
  hosts.host_of = apart;
  return run_beside(2, &hosts, &hosts, call_in_opposite_order, NULL);
}

/* From the other rank, or from any; beside one that has come, and is received. */
static int receive_against_barrier(even_comm *comm, void *argument) {
  char place[] = "receive.c:9";
  int word = 0;
  int peer = *(int *)argument;
  even_comm_request *request = NULL;
  even_waits_ask_others(nobody_calls, NULL);
  even_comm_ask_site(comm, ranks_say_site, place);
  even_status status = EVEN_OK;
  if (even_comm_rank(comm) == 0) {
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, &word, 4, 1, 6, &request) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_request_wait(request, 0, NULL) == EVEN_OK);
    even_comm_request_free(request);
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, &word, 4, peer, 7, &request) == EVEN_OK);
    status = even_comm_request_wait(request, 0, NULL);
  } else {
    RANKS_EXPECT(comm, even_comm_send_begin(comm, &word, 4, 0, 6, &request) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_request_wait(request, 0, NULL) == EVEN_OK);
    status = even_comm_barrier(comm);
  }
  if (!was_left(status)) {
    RANKS_EXPECT(comm, status == EVEN_ERR_MISMATCH && says(") is in receive of 4 bytes from "));
    RANKS_EXPECT(comm, says(" with tag 7 of a group of 2 ranks at receive.c"));
    RANKS_EXPECT(comm, says(") is in barrier of a group of 2 ranks at receive.c:9"));
  }
  even_comm_request_free(request);
  return 0;
}

static int a_receive_against_a_collective_is_a_mismatch(void) {
  int peer = 1;
  return ranks_run(&two, receive_against_barrier, &peer, NULL);
}

static int a_receive_from_any_against_a_collective_is_a_mismatch(void) {
  int peer = EVEN_COMM_ANY_RANK;
  return ranks_run(&two, receive_against_barrier, &peer, NULL);
}

/* Three groups of two, in each of which one waits for the next: nobody is told by whom it waits for what it waits for
 * in the end. */
static int wait_in_a_ring(even_comm *comm, void *argument) {
  int rank = even_comm_rank(comm);
  even_comm *with[3] = {NULL};
  (void)argument;
  even_waits_ask_others(nobody_calls, NULL);
  for (int number = 0; number < 3; number++) { /* of rank `number` and the next */
    if (rank == number || rank == (number + 1) % 3) {
      with[number] = open_group(number, rank == number ? 0 : 1, NULL);
      RANKS_EXPECT(comm, with[number] != NULL);
    }
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  even_status status = even_comm_barrier(with[rank]);
  bool left = was_left(status);
  RANKS_EXPECT(comm, left || (status == EVEN_ERR_MISMATCH && says("ranks wait for one another: ")));
  for (int other = 0; other < 3; other++) {
    char words[64];
    (void)snprintf(words, sizeof words, "is in barrier of group test/%d for ", other);
    RANKS_EXPECT(comm, left || says(words));
  }
  even_comm_close(with[rank]);
  even_comm_close(with[(rank + 2) % 3]);
  return 0;
}

static int longer_circles_are_found(void) {
  ranks_setup three = two;
  three.ranks = 3;
  return run_beside(3, &two, &three, wait_in_a_ring, NULL);
}

/* Two ranks on each of two hosts. Rank 1 is in a group with rank 3 alone, and waits for it; rank 3 waits inside its
 * host for rank 2, that between the hosts for rank 0, and that inside its host for rank 1. */
static int wait_on_both_hosts(even_comm *comm, void *argument) {
  int rank = even_comm_rank(comm);
  (void)argument;
  even_waits_ask_others(nobody_calls, NULL);
  even_comm *odd = rank % 2 == 1 ? open_group(0, rank / 2, NULL) : NULL;
  RANKS_EXPECT(comm, (odd != NULL) == (rank % 2 == 1));
  RANKS_EXPECT(comm, even_comm_record(comm, NULL, "test/all") == EVEN_OK && even_comm_barrier(comm) == EVEN_OK);
  even_status status = even_comm_barrier(rank == 1 ? odd : comm);
  if (!was_left(status)) {
    RANKS_EXPECT(comm, status == EVEN_ERR_MISMATCH && says("ranks wait for one another: "));
    RANKS_EXPECT(comm, says(") is in barrier of group test/all for ") && says(", and 1 more"));
  }
  even_comm_close(odd);
  return 0;
}

static const int pairs[] = {0, 0, 1, 1};

static int run_on_both_hosts(ranks_body *body, int lanes) {
  ranks_setup of_two = two;
  of_two.engine = RANKS_HOSTS;
  of_two.host_of = apart;
  ranks_setup of_four = of_two;
  of_four.ranks = 4;
  of_four.host_of = pairs;
  of_four.lanes = lanes;
  return run_beside(1, &of_two, &of_four, body, &lanes);
}

static int circles_go_through_hosts(void) {
  return run_on_both_hosts(wait_on_both_hosts, 1);
}

/* Nothing is measured, before which all would meet. */
static even_status go_one_way(even_comm *comm, const char *way) {
  const even_comm_choosing choosing = {.size = sizeof choosing, .way = way};
  return even_comm_choose(comm, &choosing);
}

/* The same where what the others call goes in pieces by the hosts' carriers: of a rank whose carrier waits for another
 * host's pieces, and of one that has none ready, since rank 3 does not come. */
static int wait_for_pieces(even_comm *comm, void *argument) {
  enum { COUNT = 4 << 20 };
  static float values[COUNT];
  int rank = even_comm_rank(comm);
  even_waits_ask_others(nobody_calls, NULL);
  even_comm *odd = rank % 2 == 1 ? open_group(0, rank / 2, "odd.c:1") : NULL;
  RANKS_EXPECT(comm, (odd != NULL) == (rank % 2 == 1));
  even_comm_set_site(comm, "all.c:2");
  RANKS_EXPECT(comm, even_comm_record(comm, NULL, "test/all") == EVEN_OK && even_comm_barrier(comm) == EVEN_OK);
  RANKS_EXPECT(comm, go_one_way(comm, *(const int *)argument == 1 ? "overlap" : "lanes") == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, values, COUNT, EVEN_F32, EVEN_SUM) == EVEN_OK);
  even_status status =
      rank == 3 ? even_comm_barrier(odd) : even_comm_all_reduce(comm, values, COUNT, EVEN_F32, EVEN_SUM);
  if (rank == 3 || status != EVEN_OK) { /* else rank 3 saw it first, and made the call in which the others were */
    RANKS_EXPECT(comm, status == EVEN_ERR_MISMATCH && says("ranks wait for one another: "));
    RANKS_EXPECT(comm, says(") is in barrier of group test/0 at odd.c:1 for ") || says(", and 1 more"));
    RANKS_EXPECT(comm, says(") is in all_reduce of 4194304 F32 elements with SUM of group test/all at all.c:2 for "));
  }
  if (rank == 3) { /* who is in no circle, but waits for it, is not to take it for lost */
    status = even_comm_all_reduce(comm, values, COUNT, EVEN_F32, EVEN_SUM);
    RANKS_EXPECT(comm, status == EVEN_ERR_MISMATCH || status == EVEN_OK);
  }
  even_comm_close(odd);
  return 0;
}

static int large_calls_in_pieces_are_seen(void) {
  return run_on_both_hosts(wait_for_pieces, 1);
}

static int large_calls_over_lanes_are_seen(void) {
  return run_on_both_hosts(wait_for_pieces, 2);
}

/* Of a broadcast the hosts' carriers wait for each other before each piece. */
static int wait_for_a_broadcast(even_comm *comm, void *argument) {
  enum { BYTES = 16 << 20 };
  static unsigned char bytes[BYTES];
  int rank = even_comm_rank(comm);
  (void)argument;
  even_waits_ask_others(nobody_calls, NULL);
  even_comm *other = open_group(0, rank, NULL);
  RANKS_EXPECT(comm, other != NULL);
  RANKS_EXPECT(comm, go_one_way(comm, "overlap") == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_broadcast(comm, bytes, BYTES, 0) == EVEN_OK);
  even_status status = rank < 2 ? even_comm_broadcast(comm, bytes, BYTES, 0) : even_comm_barrier(other);
  if (!was_left(status)) {
    RANKS_EXPECT(comm, status == EVEN_ERR_MISMATCH && says("ranks wait for one another: "));
    RANKS_EXPECT(comm, says(") is in broadcast of ") && says(") is in barrier of group test/0 for "));
  }
  even_comm_close(other);
  return 0;
}

static int broadcasts_in_pieces_are_seen(void) {
  ranks_setup hosts = two;
  hosts.engine = RANKS_HOSTS;
  hosts.ranks = 4;
  hosts.host_of = pairs;
  return run_beside(1, &hosts, &hosts, wait_for_a_broadcast, NULL);
}

/* One has waited in a group, of the same size, in which the ranks were the other way round. */
static int wait_after_another_group(even_comm *comm, void *argument) {
  int rank = even_comm_rank(comm);
  int word = 0;
  even_comm_request *request = NULL;
  (void)argument;
  even_waits_ask_others(nobody_calls, NULL);
  even_comm *old = open_group(0, 1 - rank, NULL);
  RANKS_EXPECT(comm, old != NULL);
  if (rank == 0) {
    (void)usleep(800000); /* longer than it takes to be told of */
  }
  RANKS_EXPECT(comm, even_comm_barrier(old) == EVEN_OK);
  even_comm_close(old);
  RANKS_EXPECT(comm, even_comm_receive_begin(comm, &word, 4, 1 - rank, 7, &request) == EVEN_OK);
  even_status status = even_comm_request_wait(request, 0, NULL);
  if (!was_left(status)) {
    RANKS_EXPECT(comm, status == EVEN_ERR_MISMATCH && says("rank 0 (host ") && says("rank 1 (host "));
    RANKS_EXPECT(comm, says(") is in receive of 4 bytes from rank 0 "));
    RANKS_EXPECT(comm, says(") is in receive of 4 bytes from rank 1 "));
  }
  even_comm_request_free(request);
  return 0;
}

static int ranks_of_a_closed_group_are_not_named(void) {
  return run_beside(1, &two, &two, wait_after_another_group, NULL);
}

/* Rank 0 waits for all others, of which the last alone waits for it: more are late than one asks at a time, and than
 * are told of. */
#define LATE 10

static int wait_for_many(even_comm *comm, void *argument) {
  _Atomic int *over = argument;
  int rank = even_comm_rank(comm);
  even_waits_ask_others(nobody_calls, NULL);
  even_comm *other = rank % (LATE - 1) == 0 ? open_group(0, rank / (LATE - 1), NULL) : NULL;
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  if (other == NULL) {
    while (atomic_load(over) == 0) {
      (void)usleep(10000);
    }
    return 0;
  }
  even_status status = even_comm_barrier(rank == 0 ? comm : other);
  atomic_store(over, 1);
  if (!was_left(status)) {
    RANKS_EXPECT(comm, status == EVEN_ERR_MISMATCH && says("ranks wait for one another: "));
    RANKS_EXPECT(comm, says(") is in barrier of a group of 10 ranks for "));
    RANKS_EXPECT(comm, says(") is in barrier of group test/0 for "));
  }
  even_comm_close(other);
  return 0;
}

static int one_of_many_that_are_late_is_found(void) {
  ranks_setup many = two;
  _Atomic int *over = mmap(NULL, sizeof *over, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (over == MAP_FAILED) {
    return 1;
  }
  many.ranks = LATE;
  return run_beside(1, &two, &many, wait_for_many, (void *)over);
}

/* ---- what is none ---- */

/* A message that goes on beside the calls may be what lets another rank get on; and a rank that computes comes in the
 * end to what the others wait for. */
static int wait_beside_a_message(even_comm *comm, void *argument) {
  int rank = even_comm_rank(comm);
  int word = rank;
  even_comm_request *request = NULL;
  (void)argument;
  even_waits_ask_others(nobody_calls, NULL);
  even_comm *one = open_group(0, rank, NULL);
  even_comm *other = open_group(1, rank, NULL);
  RANKS_EXPECT(comm, one != NULL && other != NULL);
  even_comm_set_timeout(one, (double)LONG_NS * 1e-9);
  RANKS_EXPECT(comm, even_comm_receive_begin(one, &word, 4, 1 - rank, 7, &request) == EVEN_OK);
  if (rank == 0) { /* rank 1 waits in the other group, beside a message that nobody sends */
    RANKS_EXPECT(comm, even_comm_barrier(one) == EVEN_ERR_TIMEOUT);
  }
  RANKS_EXPECT(comm, even_comm_barrier(other) == EVEN_OK);
  even_comm_request_free(request);
  even_comm_close(one);
  even_comm_close(other);
  return 0;
}

static int a_message_under_way_may_end_it(void) {
  return run_beside(2, &two, &two, wait_beside_a_message, NULL);
}

static int asked;

static even_waits_others count_asked(void *context) {
  (void)context;
  asked++;
  return EVEN_WAITS_OTHERS_NONE;
}

/* Of a call that waits again and again is told as often as of one that waits once. */
static int wait_again_and_again(even_comm *comm, void *argument) {
  (void)argument;
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  even_waits_ask_others(count_asked, NULL);
  if (even_comm_rank(comm) == 0) {
    even_waiting waiting = {.told = false};
    even_circle_found found;
    uint64_t now_ns = even_clock_ns();
    for (int wait = 0; wait < 10; wait++) {
      even_wait_words words = {.since_ns = now_ns - 2 * EVEN_WAITS_TOLD_NS, .seen_ns = now_ns};
      RANKS_EXPECT(comm, !even_waits_in_network(comm, &waiting, &words, NULL, &found));
      RANKS_EXPECT(comm, !even_waits_end(&waiting));
    }
    RANKS_EXPECT(comm, asked == 1);
  }
  even_waits_ask_others(nobody_calls, NULL);
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  return 0;
}

static int waits_of_one_call_are_told_together(void) {
  return ranks_run(&two, wait_again_and_again, NULL, NULL);
}

/* ---- all of them at once: they wait ---- */

static const struct {
  const char *name;
  int (*run)(void);
} scenes[] = {
#define SCENE(name) {#name, name}
    SCENE(groups_in_opposite_order_are_a_mismatch),
    SCENE(groups_over_mpi_in_opposite_order_are_a_mismatch),
    SCENE(groups_over_hosts_in_opposite_order_are_a_mismatch),
    SCENE(a_receive_against_a_collective_is_a_mismatch),
    SCENE(a_receive_from_any_against_a_collective_is_a_mismatch),
    SCENE(longer_circles_are_found),
    SCENE(circles_go_through_hosts),
    SCENE(large_calls_in_pieces_are_seen),
    SCENE(large_calls_over_lanes_are_seen),
    SCENE(broadcasts_in_pieces_are_seen),
    SCENE(ranks_of_a_closed_group_are_not_named),
    SCENE(one_of_many_that_are_late_is_found),
    SCENE(a_message_under_way_may_end_it),
    SCENE(waits_of_one_call_are_told_together),
};
#define SCENES (sizeof scenes / sizeof scenes[0])

static void each_scene_ends_as_it_should(void **state) {
  pid_t processes[SCENES];
  int wrong = 0;
  (void)state;
  (void)fflush(NULL);
  for (size_t i = 0; i < SCENES; i++) {
    processes[i] = fork();
    if (processes[i] == 0) {
      _exit(scenes[i].run() == 0 ? 0 : 1);
    }
  }
  for (size_t i = 0; i < SCENES; i++) {
    int status = 1;
    (void)waitpid(processes[i], &status, 0);
    if (status != 0) {
      (void)fprintf(stderr, "%s\n", scenes[i].name);
      wrong++;
    }
  }
  assert_int_equal(wrong, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(each_scene_ends_as_it_should)};
  return ranks_have_ucx() ? cmocka_run_group_tests(tests, NULL, NULL) : 77;
}
