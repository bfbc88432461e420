/* Groups of many ranks: rings are shorter above 32, staged pieces longer above 64, and there are no messages above 256.
 */
#include "comm/ranks.h"
#include "comm/segment.h"
#include "support/sanitizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define ARENA ((size_t)32 << 10)
#define KB ((size_t)1 << 10)

/* What the ranks of a group do: `floats` is the longest all-reduce of plain memory. */
typedef struct many {
  size_t floats;
  size_t part; /* floats of a rank, about */
} many;

/* Memory of one rank, which may be a thread. */
typedef struct own {
  float *data;
  float *result;
  size_t counts[RANKS_MOST];
  const void *inputs[RANKS_MOST];
  void *outputs[RANKS_MOST];
  size_t sent[RANKS_MOST];
  size_t received[RANKS_MOST];
} own;

/* Whole numbers, whose sums over all ranks are exact. */
static float value_of(int rank, size_t index) {
  return (float)rank + (float)(index % 5);
}

static float sum_of(int ranks, size_t index) {
  return (float)(ranks * (ranks - 1) / 2) + (float)ranks * (float)(index % 5);
}

static int reduce_all(even_comm *comm, float *data, size_t count) {
  for (size_t i = 0; i < count; i++) {
    data[i] = value_of(even_comm_rank(comm), i);
  }
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, count, EVEN_F32, EVEN_SUM) == EVEN_OK);
  for (size_t i = 0; i < count; i++) {
    RANKS_EXPECT(comm, data[i] == sum_of(even_comm_ranks(comm), i));
  }
  return 0;
}

/* Parts of which none is as long as its neighbours', every third one is empty. */
static size_t cut(int ranks, size_t part, size_t *counts, int until) {
  size_t before = 0;
  for (int rank = 0; rank < ranks; rank++) {
    counts[rank] = rank % 3 == 2 ? 0 : part + (size_t)(rank % 7);
    before += rank < until ? counts[rank] : 0;
  }
  return before;
}

static int reduce_parts(even_comm *comm, own *at, size_t part) {
  int ranks = even_comm_ranks(comm);
  int rank = even_comm_rank(comm);
  size_t before = cut(ranks, part, at->counts, rank);
  size_t all = cut(ranks, part, at->counts, ranks);
  for (size_t i = 0; i < all; i++) {
    at->data[i] = value_of(rank, i);
  }
  RANKS_EXPECT(comm, even_comm_reduce_scatter(comm, at->data, at->result, at->counts, EVEN_F32, EVEN_SUM) == EVEN_OK);
  for (size_t i = 0; i < at->counts[rank]; i++) {
    RANKS_EXPECT(comm, at->result[i] == sum_of(ranks, before + i));
  }
  return 0;
}

static int gather_parts(even_comm *comm, own *at, size_t part) {
  int ranks = even_comm_ranks(comm);
  (void)cut(ranks, part, at->counts, 0);
  for (size_t i = 0; i < at->counts[even_comm_rank(comm)]; i++) {
    at->data[i] = value_of(even_comm_rank(comm), i);
  }
  RANKS_EXPECT(comm, even_comm_all_gather(comm, at->data, at->result, at->counts, EVEN_F32) == EVEN_OK);
  size_t place = 0;
  for (int rank = 0; rank < ranks; rank++) {
    for (size_t i = 0; i < at->counts[rank]; i++) {
      RANKS_EXPECT(comm, at->result[place++] == value_of(rank, i));
    }
  }
  return 0;
}

static int broadcast(even_comm *comm, own *at, size_t count, int root) {
  for (size_t i = 0; i < count; i++) {
    at->data[i] = value_of(even_comm_rank(comm), i);
  }
  RANKS_EXPECT(comm, even_comm_broadcast(comm, at->data, count * sizeof *at->data, root) == EVEN_OK);
  for (size_t i = 0; i < count; i++) {
    RANKS_EXPECT(comm, at->data[i] == value_of(root, i));
  }
  return 0;
}

/* Bytes from one rank to another: few to each, many to its neighbour. */
static size_t bytes_between(int from, int to, int ranks) {
  return to == (from + 1) % ranks ? 9000 : (size_t)((from + 2 * to) % 7);
}

static unsigned char byte_between(int from, int to) {
  return (unsigned char)(from * 3 + to * 5);
}

static int swap_all(even_comm *comm, own *at) {
  int ranks = even_comm_ranks(comm);
  int rank = even_comm_rank(comm);
  unsigned char *out = (unsigned char *)at->data;
  unsigned char *into = (unsigned char *)at->result;
  for (int other = 0; other < ranks; other++) {
    at->sent[other] = bytes_between(rank, other, ranks);
    at->received[other] = bytes_between(other, rank, ranks);
    at->inputs[other] = out;
    at->outputs[other] = into;
    memset(out, byte_between(rank, other), at->sent[other]);
    out += at->sent[other];
    into += at->received[other];
  }
  RANKS_EXPECT(comm, even_comm_all_to_all(comm, at->inputs, at->sent, at->outputs, at->received) == EVEN_OK);
  for (int other = 0; other < ranks; other++) {
    const unsigned char *got = at->outputs[other];
    for (size_t i = 0; i < at->received[other]; i++) {
      RANKS_EXPECT(comm, got[i] == byte_between(other, rank));
    }
  }
  return 0;
}

/* Around a ring, longer than what the pair's memory holds; then a word from each to rank 0. */
static int send_around(even_comm *comm, own *at) {
  int ranks = even_comm_ranks(comm);
  int rank = even_comm_rank(comm);
  size_t bytes = 300 * KB;
  even_comm_request *out = NULL;
  even_comm_request *into = NULL;
  int from = -1;
  memset(at->data, rank, bytes);
  RANKS_EXPECT(comm, even_comm_send_begin(comm, at->data, bytes, (rank + 1) % ranks, 7, &out) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_receive_begin(comm, at->result, bytes, (rank + ranks - 1) % ranks, 7, &into) == EVEN_OK);
  RANKS_EXPECT(comm, even_comm_request_wait(into, 0, &from) == EVEN_OK && from == (rank + ranks - 1) % ranks);
  RANKS_EXPECT(comm, even_comm_request_wait(out, 0, NULL) == EVEN_OK);
  even_comm_request_free(into);
  even_comm_request_free(out);
  const unsigned char *got = (const unsigned char *)at->result;
  RANKS_EXPECT(comm, got[0] == (unsigned char)from && memcmp(got, got + 1, bytes - 1) == 0);
  if (rank > 0) {
    RANKS_EXPECT(comm, even_comm_send_begin(comm, &rank, sizeof rank, 0, 8, &out) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_request_wait(out, 0, NULL) == EVEN_OK);
    even_comm_request_free(out);
    return 0;
  }
  int64_t sum = 0;
  for (int other = 1; other < ranks; other++) {
    int word = 0;
    RANKS_EXPECT(comm, even_comm_receive_begin(comm, &word, sizeof word, EVEN_COMM_ANY_RANK, 8, &into) == EVEN_OK);
    RANKS_EXPECT(comm, even_comm_request_wait(into, 0, &from) == EVEN_OK && from == word);
    even_comm_request_free(into);
    sum += word;
  }
  RANKS_EXPECT(comm, sum == (int64_t)ranks * (ranks - 1) / 2);
  return 0;
}

static int send_nothing(even_comm *comm, own *at) {
  even_comm_request *request = NULL;
  RANKS_EXPECT(comm, even_comm_send_begin(comm, at->data, 1, 0, 0, &request) == EVEN_ERR_UNSUPPORTED);
  RANKS_EXPECT(comm, strstr(even_error_last()->what, "256 at most can send them") != NULL);
  RANKS_EXPECT(comm, even_comm_receive_begin(comm, at->data, 1, 0, 0, &request) == EVEN_ERR_UNSUPPORTED);
  return 0;
}

static int make_calls(even_comm *comm, const many *what, own *at) {
  int ranks = even_comm_ranks(comm);
  int wrong = reduce_all(comm, at->data, 1) || reduce_all(comm, at->data, 2000) ||
              reduce_all(comm, at->data, what->floats) ||
              reduce_all(comm, even_comm_arena(comm), ARENA / sizeof(float));
  wrong = wrong || reduce_parts(comm, at, 1) || reduce_parts(comm, at, what->part);
  wrong = wrong || gather_parts(comm, at, 1) || gather_parts(comm, at, what->part);
  wrong = wrong || broadcast(comm, at, 10, ranks - 1) || broadcast(comm, at, what->floats, ranks / 2);
  wrong = wrong || swap_all(comm, at);
  RANKS_EXPECT(comm, even_comm_has_messages(comm) == (ranks <= EVEN_COMM_MESSAGE_RANKS));
  wrong = wrong || (even_comm_has_messages(comm) ? send_around(comm, at) : send_nothing(comm, at));
  RANKS_EXPECT(comm, !wrong && even_comm_barrier(comm) == EVEN_OK);
  return 0;
}

static int be_one_of_many(even_comm *comm, void *argument) {
  const many *what = argument;
  own *at = malloc(sizeof *at);
  RANKS_EXPECT(comm, at != NULL);
  at->data = malloc(400 * KB);
  at->result = malloc(400 * KB);
  int wrong = at->data == NULL || at->result == NULL || make_calls(comm, what, at) != 0;
  free(at->data);
  free(at->result);
  free(at);
  return wrong;
}

static void run_many(int ranks, bool threads, size_t floats, size_t part) {
  const ranks_setup setup = {
      .ranks = ranks, .arena_bytes = ARENA, .timeout_seconds = 400, .spin = -1, .threads = threads};
  many what = {.floats = floats, .part = part};
  assert_int_equal(ranks_run(&setup, be_one_of_many, &what, NULL), 0);
}

static void forty_ranks(void **state) {
  (void)state;
  run_many(40, false, 80 * KB, 500); /* 320 KB: two pieces */
}

static void seventy_ranks(void **state) {
  (void)state;
  run_many(70, true, 80 * KB, 300); /* as above: pieces are of 280 KB here */
}

/* Not with ThreadSanitizer, which takes minutes for so many threads: the seventy share the same. */
#if !EVEN_TEST_THREADS_WATCHED
static void more_ranks_than_have_messages(void **state) {
  (void)state;
  run_many(260, true, 4000, 20);
}
#endif

/* ---- what their memory is cut into ---- */

static even_comm_layout layout_of(int ranks) {
  const even_comm_params params = {.size = sizeof params, .ranks = ranks, .arena_bytes = 1000};
  even_comm_layout layout;
  assert_int_equal(even_comm_layout_of(&params, &layout), EVEN_OK);
  return layout;
}

static void rings_are_shorter_the_more_there_are(void **state) {
  static const struct {
    int ranks;
    size_t bytes;
  } rings[] = {{2, 256 * KB}, {32, 256 * KB}, {33, 128 * KB}, {64, 64 * KB}, {65, 32 * KB}, {256, 4 * KB}, {257, 0}};
  (void)state;
  for (size_t i = 0; i < sizeof rings / sizeof rings[0]; i++) {
    assert_int_equal(layout_of(rings[i].ranks).ring_bytes, rings[i].bytes);
  }
}

static void staging_has_a_limit(void **state) {
  static const struct {
    int ranks;
    size_t least, most;
  } pieces[] = {{4, 256 * KB, 16 << 20},  {5, 256 * KB, 4 << 20},  {64, 256 * KB, 1 << 20},
                {65, 260 * KB, 260 * KB}, {256, 1 << 20, 1 << 20}, {4096, 1 << 20, 1 << 20}};
  (void)state;
  for (size_t i = 0; i < sizeof pieces / sizeof pieces[0]; i++) {
    even_comm_layout layout = layout_of(pieces[i].ranks);
    assert_int_equal(layout.least_piece, pieces[i].least);
    assert_int_equal(layout.most_piece, pieces[i].most);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(forty_ranks),
      cmocka_unit_test(seventy_ranks),
#if !EVEN_TEST_THREADS_WATCHED
      cmocka_unit_test(more_ranks_than_have_messages),
#endif
      cmocka_unit_test(rings_are_shorter_the_more_there_are),
      cmocka_unit_test(staging_has_a_limit),
  };
  return cmocka_run_group_tests_name("groups of many ranks", tests, NULL, NULL);
}
