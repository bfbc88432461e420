/* Large all-reduces over several hosts, in pieces that cross while others are summed, over one lane or several: the
 * same bits in every way, one choice on all ranks, and an end that all hear of. */
#include "base/fail.h"
#include "comm/hosts/group.h"
#include "comm/ranks.h"
#include "support/fault.h"
#include "support/search.h"

#include <errno.h>
#include <pthread.h>
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

/* Ranks 0, 2 and 3 on one host, 1 and 4 on another; and three on one, one on another. */
static const int MIXED[] = {0, 1, 0, 0, 1};
static const int UNEVEN[] = {0, 0, 0, 1};
#define LARGEST ((size_t)3 << 20)

static int run_on(const int *host_of, int ranks, int lanes, bool silent, ranks_body *body, void *argument,
                  int *results) {
  ranks_setup setup = {.ranks = ranks,
                       .arena_bytes = LARGEST,
                       .timeout_seconds = 100,
                       .spin = -1,
                       .engine = RANKS_HOSTS,
                       .host_of = host_of,
                       .lanes = lanes,
                       .silent = silent};
  return ranks_run(&setup, body, argument, results);
}

static bool mentions(const char *text) {
  return strstr(even_error_last()->what, text) != NULL;
}

/* ---- what they compute ---- */

/* Values whose sums' last bits depend on their order. */
static void fill(unsigned char *data, size_t count, even_dtype dtype, int rank) {
  uint32_t seed = 77u + (uint32_t)rank;
  for (size_t i = 0; i < count; i++) {
    seed = seed * 1664525u + 1013904223u;
    float value = (float)(seed >> 8) / 1e3f - 8000.0f;
    uint32_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    if (dtype == EVEN_F32) {
      memcpy(data + 4 * i, &bits, 4);
    } else if (dtype == EVEN_F64) {
      double wide = (double)value / 3;
      memcpy(data + 8 * i, &wide, 8);
    } else { /* EVEN_BF16 */
      uint16_t half = (uint16_t)(bits >> 16);
      memcpy(data + 2 * i, &half, 2);
    }
  }
}

typedef struct call {
  even_dtype dtype;
  even_reduce_op op;
  size_t count;
  bool arena;
} call;

static const call calls[] = {
    {EVEN_F32, EVEN_SUM, 300007, false}, {EVEN_F32, EVEN_AVG, 700001, true},   {EVEN_F64, EVEN_SUM, 262145, false},
    {EVEN_BF16, EVEN_SUM, 999999, true}, {EVEN_BF16, EVEN_AVG, 524289, false}, {EVEN_F32, EVEN_MAX, 786432, true},
};

static int in_way(even_comm *comm, const char *way, const call *of, unsigned char *data) {
  const even_comm_choosing choosing = {.size = sizeof choosing, .way = way};
  RANKS_EXPECT(comm, even_comm_choose(comm, &choosing) == EVEN_OK);
  fill(data, of->count, of->dtype, even_comm_rank(comm));
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, of->count, of->dtype, of->op) == EVEN_OK);
  return 0;
}

static int same_bits(even_comm *comm, void *argument) {
  static const char *const ways[] = {"overlap", "lanes"};
  unsigned char *plain = malloc(LARGEST);
  unsigned char *in_turns = malloc(LARGEST);
  int wrong = plain == NULL || in_turns == NULL;
  int lanes = *(int *)argument;
  for (size_t i = 0; i < sizeof calls / sizeof calls[0] && !wrong; i++) {
    size_t bytes = calls[i].count * even_dtype_bytes(calls[i].dtype);
    unsigned char *data = calls[i].arena ? even_comm_arena(comm) : plain;
    wrong = in_way(comm, "turns", &calls[i], data);
    memcpy(in_turns, data, bytes);
    for (int way = 0; way < (lanes > 1 ? 2 : 1) && !wrong; way++) {
      wrong = in_way(comm, ways[way], &calls[i], data);
      if (!wrong && memcmp(data, in_turns, bytes) != 0) {
        wrong = ranks_complain(comm, "call %zu differs in way %s", i, ways[way]);
      }
    }
  }
  free(plain);
  free(in_turns);
  return wrong;
}

static void every_way_gives_the_same_bits(void **state) {
  (void)state;
  for (int lanes = 1; lanes <= 3; lanes += 2) {
    assert_int_equal(run_on(MIXED, 5, lanes, false, same_bits, &lanes, NULL), 0);
  }
  int two = 2; /* the rank that is alone on its host carries both */
  assert_int_equal(run_on(UNEVEN, 4, two, true, same_bits, &two, NULL), 0);
}

/* ---- the others ---- */

#define PARTED ((size_t)(SEARCH_STRIDE == 1 ? 1500003 : 300003)) /* floats: 6 MB; 1.2 before ThreadSanitizer */
#define PARTED_SMALL ((size_t)25003)                             /* 100 KB: just enough to have a choice */
static size_t parted = PARTED;

/* Unequal parts; one rank has none. */
static void cut(size_t *counts, int ranks) {
  size_t left = parted;
  for (int rank = 0; rank < ranks; rank++) {
    counts[rank] = rank == ranks - 1 ? left : rank == 1 ? 0 : left / 3 + 5;
    left -= counts[rank];
  }
}

typedef struct moved {
  float *data; /* of a broadcast and of a gather */
  float *part; /* of a scatter */
} moved;

static int move_all(even_comm *comm, const char *way, int root, const size_t *counts, const moved *into) {
  const even_comm_choosing choosing = {.size = sizeof choosing, .way = way};
  int own = even_comm_rank(comm);
  RANKS_EXPECT(comm, even_comm_choose(comm, &choosing) == EVEN_OK);
  fill((unsigned char *)into->data, parted, EVEN_F32, own);
  RANKS_EXPECT(comm, even_comm_reduce_scatter(comm, into->data, into->part, counts, EVEN_F32, EVEN_AVG) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_broadcast(comm, into->data, parted * sizeof(float), root) == EVEN_OK);
  float *expected = malloc(parted * sizeof *expected);
  fill((unsigned char *)expected, parted, EVEN_F32, root);
  int wrong = memcmp(into->data, expected, parted * sizeof *expected);
  free(expected);
  RANKS_EXPECT(comm, wrong == 0);
  RANKS_EXPECT(comm, even_comm_all_gather(comm, into->part, into->data, counts, EVEN_F32) == EVEN_OK);
  return 0;
}

static int same_pieces(even_comm *comm, void *argument) {
  static const char *const ways[] = {"overlap", "direct", "lanes"};
  size_t counts[8];
  moved turns = {malloc(parted * 4), malloc(parted * 4)};
  moved pieces = {malloc(parted * 4), malloc(parted * 4)};
  int ranks = even_comm_ranks(comm);
  int lanes = *(int *)argument;
  cut(counts, ranks);
  RANKS_EXPECT(comm, turns.data != NULL && turns.part != NULL && pieces.data != NULL && pieces.part != NULL);
  for (int root = 0; root < ranks; root += 2) {
    size_t own = counts[even_comm_rank(comm)] * 4;
    RANKS_EXPECT(comm, move_all(comm, "turns", root, counts, &turns) == 0);
    for (int way = 0; way < (lanes > 1 ? 3 : 2); way++) {
      memset(pieces.part, 0, parted * 4);
      RANKS_EXPECT(comm, move_all(comm, ways[way], root, counts, &pieces) == 0);
      RANKS_EXPECT(comm, memcmp(turns.part, pieces.part, own) == 0);
      RANKS_EXPECT(comm, memcmp(turns.data, pieces.data, parted * 4) == 0);
    }
  }
  free(turns.data);
  free(turns.part);
  free(pieces.data);
  free(pieces.part);
  return 0;
}

static void what_moves_in_pieces_arrives(void **state) {
  static const int together[] = {0, 0, 0, 1, 1};
  (void)state;
  for (int lanes = 1; lanes <= 3; lanes++) { /* two ranks carry three of them */
    assert_int_equal(run_on(together, 5, lanes, lanes > 1, same_pieces, &lanes, NULL), 0);
  }
  int lanes = 4; /* the rank that is alone on its host carries all */
  assert_int_equal(run_on(UNEVEN, 4, lanes, true, same_pieces, &lanes, NULL), 0);
  lanes = 2; /* the ranks of a host are no neighbours: what is cut by ranks goes in turns */
  assert_int_equal(run_on(MIXED, 5, lanes, false, same_pieces, &lanes, NULL), 0);
}

static void what_is_small_moves_in_pieces_too(void **state) {
  static const int together[] = {0, 0, 0, 1, 1};
  int lanes = 3;
  (void)state;
  parted = PARTED_SMALL;
  int wrong = run_on(together, 5, lanes, true, same_pieces, &lanes, NULL);
  lanes = 4;
  wrong += run_on(UNEVEN, 4, lanes, true, same_pieces, &lanes, NULL);
  parted = PARTED;
  assert_int_equal(wrong, 0);
}

/* Where parts lie in one another's place: a scatter's output in its input, a gather's input in its output. */
static int in_place(even_comm *comm, void *argument) {
  static const char *const ways[] = {"turns", "overlap", "lanes", "direct"};
  size_t counts[8];
  size_t begin = 0;
  int own = even_comm_rank(comm);
  float *first = malloc(PARTED * 4);
  float *data = malloc(PARTED * 4);
  size_t usual = even_hosts_of(comm)->piece_bytes;
  cut(counts, even_comm_ranks(comm));
  RANKS_EXPECT(comm, first != NULL && data != NULL);
  for (int rank = 0; rank < own; rank++) {
    begin += counts[rank];
  }
  for (int way = 0; way < 4; way++) {
    const even_comm_choosing choosing = {.size = sizeof choosing, .way = ways[way]};
    even_hosts_of(comm)->piece_bytes = argument != NULL && way > 0 ? *(size_t *)argument : usual;
    RANKS_EXPECT(comm, even_comm_choose(comm, &choosing) == EVEN_OK);
    fill((unsigned char *)data, PARTED, EVEN_F32, own);
    RANKS_EXPECT(comm, even_comm_reduce_scatter(comm, data, data + begin, counts, EVEN_F32, EVEN_SUM) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_all_gather(comm, data + begin, data, counts, EVEN_F32) == EVEN_OK);
    if (way == 0) {
      memcpy(first, data, PARTED * 4);
    }
    RANKS_EXPECT(comm, memcmp(first, data, PARTED * 4) == 0);
  }
  free(first);
  free(data);
  return 0;
}

#define LITTLE ((size_t)96 << 10)

static void parts_may_lie_in_place(void **state) {
  static const int alone[] = {0, 1, 2};
  size_t little = LITTLE;
  (void)state;
  assert_int_equal(run_on(UNEVEN, 4, 2, true, in_place, NULL, NULL), 0);
  assert_int_equal(run_on(UNEVEN, 4, 2, true, in_place, &little, NULL), 0);
  assert_int_equal(run_on(alone, 3, 2, true, in_place, NULL, NULL), 0);
  assert_int_equal(run_on(alone, 3, 2, true, in_place, &little, NULL), 0);
}

/* ---- how much memory they take ---- */

/* In pieces of LITTLE bytes, and then as usual. */
static int same_in_little_room(even_comm *comm, void *argument) {
  static const char *const ways[] = {"turns", "overlap", "lanes"};
  even_hosts_group *group = even_hosts_of(comm);
  size_t counts[8];
  moved little[3];
  moved usual = {malloc(PARTED * 4), malloc(PARTED * 4)};
  int count = *(int *)argument > 1 ? 3 : 2;
  size_t piece_bytes = group->piece_bytes;
  cut(counts, even_comm_ranks(comm));
  group->piece_bytes = LITTLE;
  for (int way = 0; way < count; way++) {
    little[way] = (moved){malloc(PARTED * 4), malloc(PARTED * 4)};
    RANKS_EXPECT(comm, little[way].data != NULL && little[way].part != NULL);
    RANKS_EXPECT(comm, move_all(comm, ways[way], 0, counts, &little[way]) == 0);
  }
  RANKS_EXPECT(comm, group->scratch_bytes <= 4 * LITTLE);
  RANKS_EXPECT(comm, group->hosts < group->ranks || group->scratch_bytes == 0);
  group->piece_bytes = piece_bytes;
  RANKS_EXPECT(comm, move_all(comm, ways[0], 0, counts, &usual) == 0);
  for (int way = 0; way < count; way++) {
    RANKS_EXPECT(comm, memcmp(usual.part, little[way].part, counts[even_comm_rank(comm)] * 4) == 0);
    RANKS_EXPECT(comm, memcmp(usual.data, little[way].data, PARTED * 4) == 0);
    free(little[way].data);
    free(little[way].part);
  }
  free(usual.data);
  free(usual.part);
  return 0;
}

static void what_is_cut_by_ranks_takes_little_memory(void **state) {
  static const int together[] = {0, 0, 0, 1, 1};
  static const int alone[] = {0, 1, 2};
  int lanes = 2;
  (void)state;
  assert_int_equal(run_on(together, 5, lanes, true, same_in_little_room, &lanes, NULL), 0);
  assert_int_equal(run_on(UNEVEN, 4, lanes, true, same_in_little_room, &lanes, NULL), 0);
  assert_int_equal(run_on(MIXED, 5, lanes, true, same_in_little_room, &lanes, NULL), 0);
  lanes = 1;
  assert_int_equal(run_on(alone, 3, lanes, true, same_in_little_room, &lanes, NULL), 0);
}

/* ---- the choice ---- */

#define CHOSEN ((size_t)400000)      /* floats: 1.6 MB */
#define CHOSEN_SMALL ((size_t)40000) /* 160 KB */
static size_t chosen = CHOSEN;

/* Each of the collectives that have a choice, by its number among them. */
static even_status make_call(even_comm *comm, int which, float *values, int turn) {
  static float part[CHOSEN];
  size_t counts[5] = {chosen / 5, chosen / 5, chosen / 5, chosen / 5, chosen / 5};
  switch (which) {
    case EVEN_HOSTS_ALL_REDUCE:
      return even_comm_all_reduce(comm, values, chosen, EVEN_F32, EVEN_SUM);
    case EVEN_HOSTS_REDUCE_SCATTER:
      return even_comm_reduce_scatter(comm, values, part, counts, EVEN_F32, EVEN_SUM);
    case EVEN_HOSTS_ALL_GATHER:
      return even_comm_all_gather(comm, part, values, counts, EVEN_F32);
    default:
      return even_comm_broadcast(comm, values, chosen * sizeof *values, turn % even_comm_ranks(comm));
  }
}

static int same_choice(even_comm *comm, void *argument) {
  static float values[CHOSEN];
  even_ways_choice all[5];
  const size_t counts[5] = {sizeof all[0], sizeof all[0], sizeof all[0], sizeof all[0], sizeof all[0]};
  const even_ways *ways = even_hosts_of(comm)->ways;
  const even_comm_choosing choosing = {.size = sizeof choosing};
  char text[8192];
  (void)argument;
  RANKS_EXPECT(comm, even_comm_choose(comm, &choosing) == EVEN_OK);
  for (int i = 0; i < 2 * EVEN_WAYS_TRIAL * EVEN_HOSTS_CALLS; i++) {
    int which = i % EVEN_HOSTS_CALLS;
    RANKS_EXPECT(comm, make_call(comm, which, values, i) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_all_gather(comm, &ways[which].choice, all, counts, EVEN_U8) == EVEN_OK);
    for (int rank = 1; rank < 5; rank++) {
      for (size_t class = 0; class < EVEN_WAYS_CLASSES; class ++) {
        const even_ways_size *own = &all[rank].sizes[class];
        const even_ways_size *first = &all[0].sizes[class];
        RANKS_EXPECT(comm, own->current == first->current && own->call == first->call && own->pause == first->pause &&
                               (own->other == first->other || !own->started));
      }
    }
  }
  even_comm_describe(comm, text, sizeof text);
  RANKS_EXPECT(comm, strstr(text, "2 hosts, 2 lanes") != NULL);
  static const char *const names[] = {
      "; all_reduce by cost:", "; reduce_scatter by cost:", "; all_gather by cost:", "; broadcast by cost:"};
  /* small all-reduces have their choice between the hosts */
  int from = chosen == CHOSEN ? EVEN_HOSTS_ALL_REDUCE : EVEN_HOSTS_REDUCE_SCATTER;
  for (int which = from; which < EVEN_HOSTS_CALLS && even_comm_rank(comm) == 0; which++) {
    const char *found = strstr(text, names[which]);
    const char *other = chosen == CHOSEN || which == EVEN_HOSTS_REDUCE_SCATTER ? "lanes " : "direct ";
    RANKS_EXPECT(comm, found != NULL && strstr(found, other) != NULL);
  }
  return 0;
}

static void all_ranks_choose_alike(void **state) {
  static const int together[] = {0, 0, 1, 1, 1};
  (void)state;
  assert_int_equal(run_on(together, 5, 2, false, same_choice, NULL, NULL), 0);
  chosen = CHOSEN_SMALL;
  int wrong = run_on(together, 5, 2, false, same_choice, NULL, NULL);
  chosen = CHOSEN;
  assert_int_equal(wrong, 0);
}

/* ---- how they end ---- */

/* What the ranks share beside the group. */
typedef struct shared {
  _Atomic int processes[8];
  _Atomic int heard; /* ranks that have the error */
  int victim;
  int number; /* the signal */
} shared;

static void *strike(void *argument) {
  const shared *with = argument;
  (void)usleep(3000); /* any moment: it decides nothing */
  (void)kill(getpid(), with->number);
  return NULL;
}

/* One of the large collectives after the other. */
static even_status call_in_turn(even_comm *comm, float *values, int turn) {
  size_t count = LARGEST / sizeof *values;
  size_t counts[8] = {0};
  int ranks = even_comm_ranks(comm);
  for (int rank = 0; rank < ranks; rank++) {
    counts[rank] = count / (size_t)ranks;
  }
  float *own = values + counts[0] * (size_t)even_comm_rank(comm);
  switch (turn % 4) {
    case 0:
      return even_comm_all_reduce(comm, values, count, EVEN_F32, EVEN_MAX);
    case 1:
      return even_comm_broadcast(comm, values, LARGEST, turn / 4 % ranks);
    case 2:
      return even_comm_reduce_scatter(comm, values, own, counts, EVEN_F32, EVEN_MAX);
    default:
      return even_comm_all_gather(comm, own, values, counts, EVEN_F32);
  }
}

/* Calls until it fails; the last to hear of it ends the victim, who may be stopped. */
static int go_on_until_lost(even_comm *comm, void *argument) {
  shared *with = argument;
  float *values = calloc(LARGEST / sizeof *values, sizeof *values);
  int own = even_comm_rank(comm);
  pthread_t striker;
  atomic_store(&with->processes[own], (int)getpid());
  even_comm_set_stop_grace(comm, 0.05); /* a rank alone may be silent for 3 s then, not for 9 */
  RANKS_EXPECT(comm, values != NULL && even_comm_barrier(comm) == EVEN_OK);
  RANKS_EXPECT(comm, own != with->victim || pthread_create(&striker, NULL, strike, with) == 0);
  even_status status = EVEN_OK;
  for (int turn = 0; status == EVEN_OK; turn++) {
    status = call_in_turn(comm, values, with->victim % 2 != 0 ? turn : 0);
  }
  free(values);
  if (atomic_fetch_add(&with->heard, 1) + 2 == even_comm_ranks(comm)) {
    (void)kill(atomic_load(&with->processes[with->victim]), SIGKILL);
  }
  RANKS_EXPECT(comm, status == EVEN_ERR_PEER_LOST && even_error_last()->rank == with->victim);
  RANKS_EXPECT(comm, even_error_last()->fix[0] != '\0');
  RANKS_EXPECT(comm, with->number != SIGSTOP || mentions("was stopped"));
  return 0;
}

static void signal_one(const int *host_of, int ranks, int lanes, int victim, int number) {
  int results[RANKS_MOST];
  shared *with = mmap(NULL, sizeof *with, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_true(with != MAP_FAILED);
  with->victim = victim;
  with->number = number;
  assert_int_equal(run_on(host_of, ranks, lanes, true, go_on_until_lost, with, results), 1);
  assert_int_equal(results[victim], RANKS_KILLED);
  (void)munmap(with, sizeof *with);
}

static void a_killed_rank_is_named(void **state) {
  (void)state;
  for (int victim = 0; victim < 5; victim++) {
    signal_one(MIXED, 5, 1 + victim % 3, victim, SIGKILL);
  }
  for (int victim = 1; victim < 4; victim += 2) { /* of ranks in order, all of whose calls go over lanes */
    signal_one(UNEVEN, 4, 2, victim, SIGKILL);
  }
}

/* Without messages the other host hears it from the second rank there, which carries a lane. */
static void a_stopped_leader_is_named_on_all_hosts(void **state) {
  (void)state;
  signal_one(MIXED, 5, 2, 1, SIGSTOP);
  signal_one(MIXED, 5, 2, 0, SIGSTOP);
}

/* Nobody sees it: it does not answer. */
static void a_rank_that_is_stopped_alone_is_named(void **state) {
  (void)state;
  signal_one(UNEVEN, 4, 1, 3, SIGSTOP);
}

/* The watcher's thread is the first. Before there are any: they read what is replaced. */
static void allow_one_thread(int rank) {
  if (rank == 1) {
    fault_os_from(FAULT_thread_create, 2, EAGAIN);
  }
}

static int have_no_thread(even_comm *comm, void *argument) {
  static float values[400000];
  (void)argument;
  even_status status = even_comm_all_reduce(comm, values, 400000, EVEN_F32, EVEN_SUM);
  RANKS_EXPECT(comm, status != EVEN_OK && mentions("thread"));
  RANKS_EXPECT(comm, even_comm_barrier(comm) != EVEN_OK && mentions("unusable since"));
  return 0;
}

static void a_missing_thread_is_told_to_all(void **state) {
  (void)state;
  ranks_setup setup = {.ranks = 5,
                       .timeout_seconds = 100,
                       .spin = -1,
                       .engine = RANKS_HOSTS,
                       .host_of = MIXED,
                       .lanes = 2,
                       .enter = allow_one_thread};
  assert_int_equal(ranks_run(&setup, have_no_thread, NULL, NULL), 0);
}

static int open_badly(even_comm *comm, void *argument) {
  static const int together[] = {0};
  even_comm *inside = ranks_open_alone(0);
  even_comm *group = NULL;
  even_comm_hosts hosts = {.size = sizeof hosts, .ranks = 1, .host_of = together, .inside = inside, .lanes = 9};
  (void)argument;
  RANKS_EXPECT(comm, even_comm_open_hosts(&hosts, 1, &group) == EVEN_ERR_ARGUMENT && mentions("9 lanes"));
  hosts.lanes = 2;
  RANKS_EXPECT(comm, even_comm_open_hosts(&hosts, 1, &group) == EVEN_ERR_ARGUMENT && mentions("lane 0 of 2"));
  even_comm_close(inside);
  return 0;
}

static void lanes_are_checked(void **state) {
  ranks_setup alone = {.ranks = 1, .timeout_seconds = 30, .spin = -1};
  (void)state;
  assert_int_equal(ranks_run(&alone, open_badly, NULL, NULL), 0);
  for (int lane = 0; lane < 4; lane++) {
    assert_int_equal(even_comm_lane_rank(lane, 4, 7), lane);
    assert_int_equal(even_comm_lane_rank(lane, 4, 2), lane / 2);
    assert_int_equal(even_comm_lane_rank(lane, 4, 1), 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_way_gives_the_same_bits),
      cmocka_unit_test(what_moves_in_pieces_arrives),
      cmocka_unit_test(what_is_small_moves_in_pieces_too),
      cmocka_unit_test(parts_may_lie_in_place),
      cmocka_unit_test(what_is_cut_by_ranks_takes_little_memory),
      cmocka_unit_test(all_ranks_choose_alike),
      cmocka_unit_test(a_killed_rank_is_named),
      cmocka_unit_test(a_stopped_leader_is_named_on_all_hosts),
      cmocka_unit_test(a_rank_that_is_stopped_alone_is_named),
      cmocka_unit_test(a_missing_thread_is_told_to_all),
      cmocka_unit_test(lanes_are_checked),
  };
  if (!ranks_have_ucx()) {
    return 77; /* skipped, as CMakeLists.txt says */
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
