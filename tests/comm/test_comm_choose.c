/* Groups that choose by costs: the same way on all ranks, the same bits in every way, what is measured and what is not.
 */
#include "base/fail.h"
#include "comm/called.h"
#include "comm/group.h"
#include "comm/hosts/group.h"
#include "comm/ranks.h"
#include "comm/ways.h"
#include "support/fault.h"

#include <evenstep/comm_costs.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const int HOST_OF[] = {0, 1, 0, 2};
#define RANKS 4
#define COUNT 50001

static int run(ranks_engine engine, int ranks, ranks_body *body, void *argument) {
  ranks_setup setup = {.ranks = ranks, .timeout_seconds = 60, .spin = -1, .engine = engine, .host_of = HOST_OF};
  return ranks_run(&setup, body, argument, NULL);
}

static bool mentions(const char *text) {
  return strstr(even_error_last()->what, text) != NULL;
}

static even_comm_choosing by(even_comm_costs *costs, const char *way, double seconds) {
  return (even_comm_choosing){
      .size = sizeof(even_comm_choosing), .costs = costs, .shape = "a test", .way = way, .measure_seconds = seconds};
}

static void fill(float *values, int rank) {
  uint32_t seed = 17u + (uint32_t)rank;
  for (int i = 0; i < COUNT; i++) {
    seed = seed * 1664525u + 1013904223u;
    values[i] = (float)(seed >> 8) / 1e3f - 8000.0f;
  }
}

static bool same_bytes(const void *a, const void *b, size_t bytes) {
  return memcmp(a, b, bytes) == 0;
}

/* Sums whose last bits depend on the order in which they are formed. */
static int same_bits(even_comm *comm, void *argument) {
  static float parts[COUNT];
  static float whole[COUNT];
  even_comm_choosing params = by(NULL, "parts", 0);
  (void)argument;
  RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_OK);
  for (size_t count = 3000; count <= COUNT; count += 15667) {
    params.way = "parts";
    RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_OK);
    fill(parts, even_comm_rank(comm));
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, parts, count, EVEN_F32, EVEN_AVG) == EVEN_OK);
    params.way = "whole";
    RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_OK);
    fill(whole, even_comm_rank(comm));
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, whole, count, EVEN_F32, EVEN_AVG) == EVEN_OK);
    RANKS_EXPECT(comm, same_bytes(parts, whole, sizeof parts));
  }
  char text[2048];
  even_comm_describe(comm, text, sizeof text);
  RANKS_EXPECT(comm, even_comm_rank(comm) != 0 || strstr(text, "all_reduce: whole, as asked for") != NULL);
  return 0;
}

static void every_way_gives_the_same_bits(void **state) {
  (void)state;
  assert_int_equal(run(RANKS_NETWORK, 3, same_bits, NULL), 0);
  assert_int_equal(run(RANKS_HOSTS, RANKS, same_bits, NULL), 0);
}

/* Unequal parts, one of them none. */
static void cut(size_t *counts, int ranks) {
  size_t left = COUNT;
  for (int rank = 0; rank < ranks; rank++) {
    counts[rank] = rank == ranks - 1 ? left : rank == 1 ? 0 : left / 3 + 5;
    left -= counts[rank];
  }
}

/* What is moved, and reduced, by a way. */
typedef struct moves {
  float part[COUNT];
  float all[COUNT];
  float told[COUNT];
} moves;

static int move_by(even_comm *comm, const char *way, int root, moves *out) {
  static float input[COUNT];
  size_t counts[RANKS] = {0};
  const even_comm_choosing params = by(NULL, way, 0);
  int own = even_comm_rank(comm);
  cut(counts, even_comm_ranks(comm));
  RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_OK);
  memset(out, 0, sizeof *out);
  fill(input, own);
  fill(out->told, own);
  RANKS_EXPECT(comm, even_comm_reduce_scatter(comm, input, out->part, counts, EVEN_F32, EVEN_AVG) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_all_gather(comm, out->part, out->all, counts, EVEN_F32) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_broadcast(comm, out->told, sizeof out->told, root) == EVEN_OK);
  fill(input, root);
  RANKS_EXPECT(comm, same_bytes(input, out->told, sizeof input));
  return 0;
}

static int same_moves(even_comm *comm, void *argument) {
  static const char *const ways[] = {"direct", "pairs", "parts", "whole"};
  static moves first;
  static moves other;
  int wrong = 0;
  (void)argument;
  for (int root = 0; root < even_comm_ranks(comm) && wrong == 0; root++) {
    wrong = move_by(comm, ways[0], root, &first);
    for (size_t way = 1; way < sizeof ways / sizeof ways[0] && wrong == 0; way++) {
      wrong = move_by(comm, ways[way], root, &other);
      RANKS_EXPECT(comm, wrong != 0 || same_bytes(&first, &other, sizeof first));
    }
  }
  return wrong;
}

/* Each is tried in the first calls, and what they cost is kept, by rank 0. */
static int try_moves(even_comm *comm, void *argument) {
  static const char *const said[] = {"; all_gather by cost: ", "; broadcast by cost: ", "; reduce_scatter by cost: "};
  even_comm_costs *costs = NULL;
  static moves result;
  char text[4096];
  bool chooses = even_comm_rank(comm) == 0;
  (void)argument;
  RANKS_EXPECT(comm, !chooses || even_comm_costs_open(&costs) == EVEN_OK);
  even_comm_choosing params = by(costs, NULL, 0);
  RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_OK);
  size_t counts[RANKS] = {0};
  cut(counts, even_comm_ranks(comm));
  for (int call = 0; call < EVEN_WAYS_TRIAL; call++) {
    RANKS_EXPECT(comm, even_comm_reduce_scatter(comm, result.all, result.part, counts, EVEN_F32, EVEN_MAX) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_all_gather(comm, result.part, result.all, counts, EVEN_F32) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_broadcast(comm, result.told, sizeof result.told, call % 3) == EVEN_OK);
  }
  even_comm_describe(comm, text, sizeof text);
  for (size_t i = 0; i < sizeof said / sizeof said[0]; i++) {
    RANKS_EXPECT(comm, (strstr(text, said[i]) != NULL) == chooses);
  }
  size_t kept = 0;
  even_comm_cost cost;
  for (size_t i = 0; chooses && even_comm_costs_at(costs, i, &cost); i++) {
    kept += strcmp(cost.collective, "all_reduce") != 0 && strcmp(cost.engine, "ucx") == 0;
  }
  RANKS_EXPECT(comm, kept == (chooses ? 6 : 0));
  even_comm_costs_close(costs);
  return even_comm_barrier(comm) != EVEN_OK;
}

static void what_is_moved_has_its_ways_too(void **state) {
  (void)state;
  assert_int_equal(run(RANKS_NETWORK, RANKS, same_moves, NULL), 0);
  assert_int_equal(run(RANKS_NETWORK, 2, same_moves, NULL), 0);
  assert_int_equal(run(RANKS_NETWORK, 3, try_moves, NULL), 0);
}

/* Rank 0 chooses: the others, who do not know by what, say nothing of a choice. */
static int describe_what_is_known(even_comm *comm, void *argument) {
  const even_comm_choosing choosing = {.size = sizeof choosing, .way = "parts"};
  static float values[8192];
  char text[2048];
  (void)argument;
  RANKS_EXPECT(comm, even_comm_choose(comm, &choosing) == EVEN_OK);
  for (int call = 0; call < 2 * EVEN_WAYS_TRIAL; call++) {
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, values, 8192, EVEN_F32, EVEN_SUM) == EVEN_OK);
  }
  even_comm_describe(comm, text, sizeof text);
  bool chooses = even_comm_rank(comm) == 0;
  RANKS_EXPECT(comm, strstr(text, "by cost") == NULL && (strstr(text, "as asked for") != NULL) == chooses);
  return even_comm_barrier(comm) != EVEN_OK;
}

static void only_who_chooses_tells_of_the_choice(void **state) {
  (void)state;
  assert_int_equal(run(RANKS_NETWORK, 3, describe_what_is_known, NULL), 0);
}

static size_t entries_of(even_comm_costs *costs, const char *way) {
  even_comm_cost cost;
  size_t count = 0;
  for (size_t i = 0; even_comm_costs_at(costs, i, &cost); i++) {
    count += strcmp(cost.way, way) == 0 && strcmp(cost.collective, "all_reduce") == 0 && cost.seconds > 0;
  }
  return count;
}

/* What is measured at first use, and not a second time. Costs are rank 0's. */
static int measure_once(even_comm *comm, void *argument) {
  even_comm_costs *costs = NULL;
  bool chooses = even_comm_rank(comm) == 0;
  (void)argument;
  RANKS_EXPECT(comm, !chooses || even_comm_costs_open(&costs) == EVEN_OK);
  even_comm_choosing params = by(costs, NULL, 30);
  RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_OK);
  RANKS_EXPECT(comm, !chooses || (entries_of(costs, "parts") == 5 && entries_of(costs, "whole") == 5));
  even_comm_cost first = {.samples = 0};
  RANKS_EXPECT(comm, !chooses || (even_comm_costs_at(costs, 0, &first) && first.samples == 1));
  RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_OK);
  RANKS_EXPECT(comm, !chooses || (even_comm_costs_at(costs, 0, &first) && first.samples == 1));
  params.shape = "another";
  params.measure_seconds = 1e-9; /* one size, then time is up */
  RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_OK);
  RANKS_EXPECT(comm, !chooses || entries_of(costs, "parts") == 6);
  params.shape = "a third";
  params.measure_seconds = 0;
  RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_OK);
  RANKS_EXPECT(comm, !chooses || entries_of(costs, "parts") == 6);
  even_comm_costs_close(costs); /* the group holds it on */
  return even_comm_barrier(comm) != EVEN_OK;
}

static void what_is_lacking_is_measured_once(void **state) {
  (void)state;
  assert_int_equal(run(RANKS_NETWORK, 3, measure_once, NULL), 0);
  assert_int_equal(run(RANKS_HOSTS, RANKS, measure_once, NULL), 0);
}

static int measure_calls(even_comm *comm, void *argument) {
  even_comm_costs *costs = NULL;
  double seconds = 0;
  (void)argument;
  if (even_comm_rank(comm) == 0) {
    RANKS_EXPECT(comm, even_comm_costs_open(&costs) == EVEN_OK);
  }
  RANKS_EXPECT(comm, even_comm_measure(comm, costs, "a test", 0) == EVEN_OK);
  RANKS_EXPECT(comm, costs == NULL || entries_of(costs, "call") == 2);
  RANKS_EXPECT(comm, even_comm_measure(comm, costs, "a test", 30) == EVEN_OK);
  RANKS_EXPECT(comm, costs == NULL || entries_of(costs, "call") == 4);
  const char *engine = even_comm_engine_name(comm);
  RANKS_EXPECT(comm, costs == NULL || (even_comm_costs_step(costs, "a test", engine, &seconds) && seconds > 0));
  RANKS_EXPECT(comm, costs == NULL || !even_comm_costs_step(costs, "a test", "gloo", &seconds));
  RANKS_EXPECT(comm, even_comm_measure(comm, costs, "", 0) == EVEN_ERR_ARGUMENT && mentions("shape"));
  even_comm_costs_close(costs);
  return even_comm_barrier(comm) != EVEN_OK;
}

static void whole_calls_are_measured(void **state) {
  (void)state;
  assert_int_equal(run(RANKS_SHM, 2, measure_calls, NULL), 0);
  if (ranks_have_ucx()) {
    assert_int_equal(run(RANKS_HOSTS, RANKS, measure_calls, NULL), 0);
  }
}

static bool describes(const even_comm *comm, const char *words) {
  char text[4096];
  even_comm_describe(comm, text, sizeof text);
  return strstr(text, words) != NULL;
}

/* What the ranks of each host do among themselves takes the ways of shared memory, on the hosts of other leaders, too.
 */
static int ask_inside(even_comm *comm, void *argument) {
  static const struct {
    const char *way;
    size_t piece_bytes; /* 0: not asked for */
    even_writing_way writing;
  } asked[] = {{"pieces-4M", 4 << 20, EVEN_WRITING_MEASURED},
               {"past-caches", 0, EVEN_WRITING_PAST},
               {"chain", 1 << 20, EVEN_WRITING_MEASURED}, /* what forms no all-reduce goes in its pieces */
               {"turns", 0, EVEN_WRITING_MEASURED},
               {NULL, 0, EVEN_WRITING_MEASURED}};
  static float values[COUNT];
  const even_comm *inside = even_hosts_within(comm)->inside;
  (void)argument;
  for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++) {
    const even_comm_choosing params = by(NULL, asked[i].way, 0);
    RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_OK);
    for (int k = 0; k < COUNT; k++) {
      values[k] = (float)(k + even_comm_rank(comm));
    }
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, values, COUNT, EVEN_F32, EVEN_SUM) == EVEN_OK);
    for (int k = 0; k < COUNT; k++) {
      RANKS_EXPECT(comm, values[k] == (float)(4 * k + 6));
    }
    RANKS_EXPECT(comm, inside->writing.forced == asked[i].writing);
    RANKS_EXPECT(comm, asked[i].piece_bytes == 0 || inside->piece_bytes == asked[i].piece_bytes);
    RANKS_EXPECT(comm, even_comm_rank(comm) != 0 || describes(comm, ", as asked for") == (asked[i].way != NULL));
  }
  return even_comm_barrier(comm) != EVEN_OK;
}

static void a_way_of_shared_memory_is_taken_inside_each_host(void **state) {
  static const int host_of[] = {0, 1, 0, 1};
  ranks_setup setup = {.ranks = 4, .timeout_seconds = 60, .spin = -1, .engine = RANKS_HOSTS, .host_of = host_of};
  (void)state;
  assert_int_equal(ranks_run(&setup, ask_inside, NULL, NULL), 0);
}

/* On one host: the size of pieces is asked for, or known. */
static int pieces(even_comm *comm, void *argument) {
  static float values[2 << 20]; /* 8 MB: more than the least that is learnt from */
  static const struct {
    const char *way;
    size_t bytes;
  } asked[] = {{"pieces-256K", 256 << 10}, {"pieces-4M", 4 << 20}, {"pieces-900M", 16 << 20}, {"pieces-3M", 4 << 20}};
  (void)argument;
  for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++) {
    even_comm_choosing params = by(NULL, asked[i].way, 0);
    RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_OK);
    for (int call = 0; call < 10; call++) {
      RANKS_EXPECT(comm, even_comm_all_reduce(comm, values, 2 << 20, EVEN_F32, EVEN_SUM) == EVEN_OK);
      RANKS_EXPECT(comm, comm->piece_bytes == asked[i].bytes);
    }
    RANKS_EXPECT(comm, describes(comm, ", as asked for") == (even_comm_rank(comm) == 0));
  }
  return 0;
}

static int pieces_by_costs(even_comm *comm, void *argument) {
  static float values[2 << 20];
  even_comm_costs *costs = NULL;
  even_comm_cost_key key = {.collective = "all_reduce", .shape = "a test", .engine = "shm", .bytes = 16 << 20};
  (void)argument;
  RANKS_EXPECT(comm, even_comm_costs_open(&costs) == EVEN_OK);
  key.way = "pieces-1M";
  RANKS_EXPECT(comm, even_comm_costs_add(costs, &key, 1e-3) == EVEN_OK);
  key.way = "pieces-256K";
  RANKS_EXPECT(comm, even_comm_costs_add(costs, &key, 2e-3) == EVEN_OK);
  even_comm_choosing params = by(costs, NULL, 30);
  RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_OK);
  /* rank 0, which has chosen, says by which figures */
  RANKS_EXPECT(comm, describes(comm, "(1 ms for 16 MB; pieces-256K 2") == (even_comm_rank(comm) == 0));
  for (int call = 0; call < 40; call++) {
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, values, 2 << 20, EVEN_F32, EVEN_SUM) == EVEN_OK);
    RANKS_EXPECT(comm, call > 7 || comm->piece_bytes == 1 << 20);
  }
  /* by now a trial has ended, which rank 0 keeps */
  even_comm_cost cost;
  uint32_t samples = 0;
  for (size_t i = 0; even_comm_costs_at(costs, i, &cost); i++) {
    samples += cost.samples;
  }
  RANKS_EXPECT(comm, (samples > 2) == (even_comm_rank(comm) == 0));
  even_comm_costs_close(costs);
  return 0;
}

#define MOVED ((size_t)8 << 20)

/* One of each call whose data pass through staging, of MOVED bytes in all on a rank; whether all came right. */
static bool move_each(even_comm *comm, unsigned char *from, unsigned char *to, unsigned char seed) {
  const size_t half = MOVED / 2;
  const size_t counts[] = {half, half};
  const size_t sizes[] = {half, half};
  const unsigned char own = (unsigned char)(seed + even_comm_rank(comm));
  const unsigned char other = (unsigned char)(seed + 1 - even_comm_rank(comm));
  const void *inputs[] = {from, from + half};
  void *outputs[] = {to, to + half};
  bool right = true;
  memset(from, own, MOVED);
  right = right && even_comm_reduce_scatter(comm, from, to, counts, EVEN_U8, EVEN_BXOR) == EVEN_OK;
  right = right && to[0] == (own ^ other) && same_bytes(to, to + 1, half - 1);
  right = right && even_comm_all_gather(comm, from, to, counts, EVEN_U8) == EVEN_OK;
  right = right && to[0] == seed && same_bytes(to, to + 1, half - 1);
  right = right && to[half] == (unsigned char)(seed + 1) && same_bytes(to + half, to + half + 1, half - 1);
  memset(to, 0, MOVED);
  right = right && even_comm_all_to_all(comm, inputs, sizes, outputs, sizes) == EVEN_OK;
  right = right && to[0] == seed && to[half] == (unsigned char)(seed + 1) && same_bytes(to, to + 1, half - 1);
  right = right && even_comm_broadcast(comm, from, MOVED, seed & 1) == EVEN_OK;
  return right && from[0] == (unsigned char)(seed + (seed & 1)) && same_bytes(from, from + 1, MOVED - 1);
}

static size_t pieces_of(even_comm_costs *costs, const char *collective, uint32_t *samples) {
  even_comm_cost cost;
  size_t count = 0;
  for (size_t i = 0; even_comm_costs_at(costs, i, &cost); i++) {
    bool of = strcmp(cost.collective, collective) == 0 && strcmp(cost.engine, "shm") == 0 && cost.bytes == 16 << 20;
    count += of && even_pieces_named(cost.way) > 0;
    *samples += of ? cost.samples : 0;
  }
  return count;
}

/* Each call tries its own sizes of pieces, keeps what they cost, and begins with what was known before. */
static int moves_by_costs(even_comm *comm, void *argument) {
  static const char *const calls[] = {"reduce_scatter", "all_gather", "broadcast", "all_to_all"};
  static unsigned char from[MOVED];
  static unsigned char to[MOVED];
  const bool chooses = even_comm_rank(comm) == 0;
  even_comm_costs *costs = NULL;
  even_comm_costs *known = NULL;
  char text[4096];
  (void)argument;
  RANKS_EXPECT(comm, even_comm_costs_open(&costs) == EVEN_OK && even_comm_costs_open(&known) == EVEN_OK);
  even_comm_choosing params = by(costs, NULL, 0);
  RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_OK);
  for (unsigned char call = 0; call < 6; call++) {
    RANKS_EXPECT(comm, move_each(comm, from, to, call));
  }
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    uint32_t samples = 0;
    RANKS_EXPECT(comm, pieces_of(costs, calls[i], &samples) == (chooses ? 2 : 0));
    even_comm_describe(comm, text, sizeof text);
    RANKS_EXPECT(comm, !chooses || (strstr(text, calls[i]) != NULL && strstr(text, " ms for 16 MB; pieces-") != NULL));
  }
  /* What goes as one of them teaches nothing: one rank of it has most of the work. */
  const even_comm_called reduce = {.kind = EVEN_CALL_REDUCE, .root = 0, .count = MOVED};
  const even_comm_called gather = {.kind = EVEN_CALL_GATHER, .root = 1, .count = MOVED};
  const size_t to_root[] = {0, chooses ? MOVED : 0};
  const size_t at_root[] = {chooses ? 0 : MOVED, 0};
  for (int call = 0; call < 40; call++) {
    even_comm_call_as(&reduce);
    RANKS_EXPECT(comm, even_comm_reduce_scatter(comm, from, to, (size_t[]){MOVED, 0}, EVEN_U8, EVEN_BXOR) == EVEN_OK);
    even_comm_call_as(&gather);
    RANKS_EXPECT(comm, even_comm_all_to_all(comm, (const void *[]){from, from}, to_root, (void *[]){to, to}, at_root) ==
                           EVEN_OK);
    RANKS_EXPECT(comm, comm->pieces[0].call == 0 && !comm->chained && !comm->timed);
  }
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    uint32_t samples = 0;
    RANKS_EXPECT(comm, pieces_of(costs, calls[i], &samples) == samples);
  }
  RANKS_EXPECT(comm, pieces_of(costs, "all_reduce", &(uint32_t){0}) == 0);
  const even_comm_cost_key cheap = {
      .collective = "broadcast", .shape = "a test", .engine = "shm", .way = "pieces-4M", .bytes = 16 << 20};
  RANKS_EXPECT(comm, even_comm_costs_add(known, &cheap, 1e-9) == EVEN_OK);
  params.costs = known;
  RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_broadcast(comm, from, MOVED, 1) == EVEN_OK && comm->piece_bytes == 4 << 20);
  RANKS_EXPECT(comm, even_comm_all_gather(comm, from, to, (size_t[]){1, MOVED - 1}, EVEN_U8) == EVEN_OK);
  RANKS_EXPECT(comm, comm->piece_bytes < 4 << 20); /* what is cheap for one says nothing of another */
  even_comm_costs_close(costs);
  even_comm_costs_close(known);
  return even_comm_barrier(comm) != EVEN_OK;
}

static void what_is_moved_has_pieces_of_its_own(void **state) {
  (void)state;
  assert_int_equal(run(RANKS_SHM, 2, moves_by_costs, NULL), 0);
}

/* How staged data are written: on every rank. */
static int write_as_asked(even_comm *comm, void *argument) {
  static const char *const asked[] = {"past-caches", "through-caches", NULL};
  static const char *const said[] = {"written past the caches, as asked for",
                                     "written through the caches, as asked for", "written through the caches"};
  static float values[COUNT * 10];
  (void)argument;
  for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++) {
    even_comm_choosing params = by(NULL, asked[i], 0);
    RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_OK);
    RANKS_EXPECT(comm, describes(comm, said[i]) && describes(comm, "as asked for") == (asked[i] != NULL));
    for (size_t k = 0; k < COUNT * 10; k++) {
      values[k] = (float)(k % 1000) + (float)even_comm_rank(comm);
    }
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, values, COUNT * 10, EVEN_F32, EVEN_SUM) == EVEN_OK);
    for (size_t k = 0; k < COUNT * 10; k++) {
      RANKS_EXPECT(comm, values[k] == (float)(k % 1000 * 2 + 1));
    }
    RANKS_EXPECT(comm, asked[i] == NULL || comm->writing.stages == 0); /* nothing was tried */
  }
  return 0;
}

static void pieces_of_the_size_that_is_asked_for_or_known(void **state) {
  (void)state;
  assert_int_equal(run(RANKS_SHM, 2, pieces, NULL), 0);
  assert_int_equal(run(RANKS_SHM, 2, pieces_by_costs, NULL), 0);
  assert_int_equal(run(RANKS_SHM, 2, write_as_asked, NULL), 0);
}

/* Rank 0's trouble is everybody's error, and nobody's end. */
static int ask_for_nonsense(even_comm *comm, void *argument) {
  even_comm_choosing params = by(NULL, "sideways", 0);
  (void)argument;
  RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_ERR_ARGUMENT && mentions("'sideways' is no way"));
  RANKS_EXPECT(comm, strstr(even_error_last()->fix, "parts, whole") != NULL);
  params.way = "pieces-many";
  RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_ERR_ARGUMENT && mentions("'pieces-many' is no way"));
  params.way = "whole"; /* another engine's, or this one's */
  RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_OK);
  params.size = 3;
  RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_ERR_ARGUMENT);
  even_comm_costs *costs = NULL;
  RANKS_EXPECT(comm, even_comm_costs_open(&costs) == EVEN_OK);
  params = by(costs, NULL, 0);
  params.shape = NULL;
  RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_ERR_ARGUMENT && mentions("shape"));
  even_comm_costs_close(costs);
  return even_comm_barrier(comm) != EVEN_OK;
}

static void what_is_refused_is_refused_on_all_ranks(void **state) {
  (void)state;
  assert_int_equal(run(RANKS_SHM, 2, ask_for_nonsense, NULL), 0);
  if (ranks_have_ucx()) {
    assert_int_equal(run(RANKS_NETWORK, 2, ask_for_nonsense, NULL), 0);
  }
}

/* A rank that has no memory to measure with: nobody measures, and the group goes on. */
static int lack_memory(even_comm *comm, void *argument) {
  even_comm_costs *costs = NULL;
  (void)argument;
  RANKS_EXPECT(comm, even_comm_costs_open(&costs) == EVEN_OK);
  if (even_comm_rank(comm) == 1) {
    fault_allocation(1);
  }
  RANKS_EXPECT(comm, even_comm_measure(comm, costs, "a test", 0) == EVEN_OK);
  fault_reset();
  RANKS_EXPECT(comm, entries_of(costs, "call") == 0);
  even_comm_costs_close(costs);
  return even_comm_barrier(comm) != EVEN_OK;
}

static void without_memory_nothing_is_measured(void **state) {
  (void)state;
  assert_int_equal(run(RANKS_SHM, 2, lack_memory, NULL), 0);
}

int main(int count, char **words) {
  const struct CMUnitTest over_ucx[] = {
      cmocka_unit_test(every_way_gives_the_same_bits),
      cmocka_unit_test(only_who_chooses_tells_of_the_choice),
      cmocka_unit_test(what_is_lacking_is_measured_once),
      cmocka_unit_test(what_is_moved_has_its_ways_too),
      cmocka_unit_test(a_way_of_shared_memory_is_taken_inside_each_host),
  };
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(whole_calls_are_measured),
      cmocka_unit_test(pieces_of_the_size_that_is_asked_for_or_known),
      cmocka_unit_test(what_is_moved_has_pieces_of_its_own),
      cmocka_unit_test(what_is_refused_is_refused_on_all_ranks),
      cmocka_unit_test(without_memory_nothing_is_measured),
  };
  if (count > 1 && strcmp(words[1], "ucx") == 0) {
    return ranks_have_ucx() ? cmocka_run_group_tests_name("comm_choose over UCX", over_ucx, NULL, NULL) : 77;
  }
  return cmocka_run_group_tests_name("comm_choose", tests, NULL, NULL);
}
