/* Rounds that form no sums: after them each rank's part is where the others find it. */
#include "comm/ranks.h"

#include <evenstep/sync.h>

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { PARAMETERS = 5, ROUNDS = 4, LARGE = 2300000 }; /* past the caches, as the others are then, too */

static even_sync_parameter parameters[PARAMETERS] = {
    {1000, EVEN_F32, 0}, {513, EVEN_F64, 0}, {70000, EVEN_BF16, 0}, {0, EVEN_F32, 0}, {5001, EVEN_F32, 1}};

static even_sync_params all(void) {
  return (even_sync_params){
      .size = sizeof(even_sync_params), .parameters = parameters, .parameter_count = PARAMETERS, .unsummed = 1};
}

static float widened(uint16_t number) {
  uint32_t bits = (uint32_t)number << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Element i of parameter p on a rank: numbers that bfloat16 has, weighed or not. */
static double value(int rank, int round, size_t p, size_t i) {
  return (double)((rank + 1) * 4 + round * 2 + (int)p * 8 + (int)(i % 3));
}

static void set(void *data, even_dtype dtype, size_t i, double to) {
  float narrow = (float)to;
  uint32_t bits;
  memcpy(&bits, &narrow, sizeof bits);
  if (dtype == EVEN_F64) {
    ((double *)data)[i] = to;
  } else if (dtype == EVEN_F32) {
    ((float *)data)[i] = narrow;
  } else {
    ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
  }
}

static double get(const void *data, even_dtype dtype, size_t i) {
  return dtype == EVEN_F64   ? ((const double *)data)[i]
         : dtype == EVEN_F32 ? (double)((const float *)data)[i]
                             : (double)widened(((const uint16_t *)data)[i]);
}

/* Powers of two, so that products are exact; in the last round the first rank counts nothing. */
static double weight(int rank, int ranks, int round) {
  return ranks == 1 ? 1.0 : round == ROUNDS - 1 && rank == 0 ? 0.0 : 1.0 / (double)(2 << rank);
}

/* Parameter 1 is the first rank's alone, the last has no gradient in the first round. */
static bool has(int rank, int round, size_t p) {
  return (p != 1 || rank == 0) && (p != 4 || round > 0);
}

static int check(even_comm *comm, even_sync *sync, int round) {
  const unsigned char *own = even_comm_arena(comm);
  int ranks = even_comm_ranks(comm);
  for (int rank = 0; rank < ranks; rank++) {
    const unsigned char *theirs = even_comm_peer_arena(comm, rank);
    for (size_t p = 0; p < PARAMETERS; p++) {
      const void *part = theirs + ((const unsigned char *)even_sync_slot(sync, p) - own);
      double counts = has(rank, round, p) ? weight(rank, ranks, round) : 0;
      for (size_t i = 0; i < parameters[p].count && (p != 4 || round > 0); i++) {
        double wanted = counts == 0 ? 0 : value(rank, round, p, i) * counts;
        RANKS_EXPECT(comm, get(part, parameters[p].dtype, i) == wanted);
      }
    }
  }
  return 0;
}

static int leave_parts(even_comm *comm, void *argument) {
  even_sync_params params = all();
  (void)argument;
  even_sync *sync = NULL;
  int rank = even_comm_rank(comm);
  void *memory[PARAMETERS];
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  for (size_t p = 0; p < PARAMETERS; p++) {
    memory[p] = p == 2 ? even_sync_slot(sync, p) : malloc(parameters[p].count * 8 + 1);
  }
  for (int round = 0; round < ROUNDS; round++) {
    uint8_t used[PARAMETERS];
    even_sync_report report;
    double counts = weight(rank, even_comm_ranks(comm), round);
    RANKS_EXPECT(comm, even_sync_begin(sync, counts, (uint32_t)round) == EVEN_OK);
    for (size_t p = 0; p < PARAMETERS; p++) {
      for (size_t i = 0; i < parameters[p].count && has(rank, round, p); i++) {
        set(memory[p], parameters[p].dtype, i, counts == 0 ? NAN : value(rank, round, p, i));
      }
      RANKS_EXPECT(comm, !has(rank, round, p) || even_sync_ready(sync, p, memory[p]) == EVEN_OK);
    }
    RANKS_EXPECT(comm, even_sync_finish(sync, used, &report) == EVEN_OK);
    RANKS_EXPECT(comm, even_sync_await(sync, 0) == EVEN_ERR_UNSUPPORTED);
    RANKS_EXPECT(comm, used[0] && used[1] && used[2] && used[4] == (round > 0) && report.nonfinite == 0);
    RANKS_EXPECT(comm, report.bytes > 70000 && report.bytes == report.full_bytes);
    if (check(comm, sync, round) != 0) {
      return 1;
    }
    RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK); /* all have looked */
  }
  /* What is not finite is told, as in a round with sums. */
  RANKS_EXPECT(comm, even_sync_begin(sync, 1.0, ROUNDS) == EVEN_OK);
  set(memory[4], EVEN_F32, 4999, rank == 0 ? INFINITY : 1);
  RANKS_EXPECT(comm, even_sync_ready(sync, 4, memory[4]) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_finish(sync, NULL, NULL) == EVEN_OK);
  int told = even_sync_nonfinite(sync, 4);
  RANKS_EXPECT(comm, told == (EVEN_SYNC_NONFINITE_ANYWHERE | (rank == 0 ? EVEN_SYNC_NONFINITE_HERE : 0)));
  for (size_t p = 0; p < PARAMETERS; p++) {
    if (p != 2) {
      free(memory[p]);
    }
  }
  even_sync_close(sync);
  return 0;
}

static size_t room_for(const even_sync_params *params) {
  size_t bytes = 0;
  assert_int_equal(even_sync_arena_bytes(params, &bytes), EVEN_OK);
  return bytes;
}

static void leave_each_rank_its_part(void **state) {
  (void)state;
  for (int large = 0; large <= 1; large++) {
    parameters[4].count = large ? LARGE : 5001;
    even_sync_params params = all();
    for (int ranks = 1; ranks <= 3; ranks++) {
      ranks_setup setup = {
          .ranks = ranks, .arena_bytes = room_for(&params), .timeout_seconds = 200, .threads = ranks == 3};
      assert_int_equal(ranks_run(&setup, leave_parts, NULL, NULL), 0);
    }
  }
}

static int ask_wrong(even_comm *comm, void *argument) {
  even_sync_params params = all();
  even_sync *sync = NULL;
  const ranks_engine *engine = argument;
  if (*engine == RANKS_HOSTS) {
    RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_ERR_UNSUPPORTED && sync == NULL);
    RANKS_EXPECT(comm, even_comm_peer_arena(comm, even_comm_rank(comm)) == NULL);
    return 0;
  }
  params.wire = EVEN_BF16;
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_ERR_ARGUMENT && sync == NULL);
  params.wire = EVEN_F32;
  params.encoding = EVEN_SYNC_INT8;
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_ERR_ARGUMENT && sync == NULL);
  return 0;
}

static void refuse_what_would_travel(void **state) {
  (void)state;
  even_sync_params params = all();
  params.wire = EVEN_BF16;
  ranks_engine engine = RANKS_SHM;
  ranks_setup setup = {.ranks = 2, .arena_bytes = room_for(&params), .timeout_seconds = 200};
  assert_int_equal(ranks_run(&setup, ask_wrong, &engine, NULL), 0);
  if (ranks_have_ucx()) {
    static const int host_of[2] = {0, 1};
    engine = setup.engine = RANKS_HOSTS;
    setup.host_of = host_of;
    assert_int_equal(ranks_run(&setup, ask_wrong, &engine, NULL), 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(leave_each_rank_its_part),
      cmocka_unit_test(refuse_what_would_travel),
  };
  return cmocka_run_group_tests_name("sync_unsummed", tests, NULL, NULL);
}
