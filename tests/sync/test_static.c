/* Rounds of a static graph: which parameters are used is told once, and ranks no longer ask one another. */
#include "comm/ranks.h"

#include <evenstep/flight.h>
#include <evenstep/sync.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { PARAMETERS = 4, COUNT = 300 };

static const even_sync_parameter parameters[PARAMETERS] = {
    {COUNT, EVEN_F32, 1}, {COUNT, EVEN_F32, 0}, {COUNT, EVEN_F32, 0}, {COUNT, EVEN_F32, 0}};

static const uint8_t usual[PARAMETERS] = {0, 1, 1, 1};

static even_sync_params sync_params(const even_dtype *wire) {
  return (even_sync_params){.size = sizeof(even_sync_params),
                            .parameters = parameters,
                            .parameter_count = PARAMETERS,
                            .wire = *wire,
                            .static_graph = 1};
}

/* The collectives of this rank so far. */
static uint64_t calls(const even_comm *comm) {
  even_flight_call last[EVEN_FLIGHT_CALLS];
  size_t count = even_comm_flight(comm, even_comm_rank(comm), last, EVEN_FLIGHT_CALLS);
  return count == 0 ? 0 : last[count - 1].number;
}

/* A round in which rank 0 has no gradient of parameter 2; asked: how many collectives it took. */
static int one_round(even_comm *comm, even_sync *sync, uint64_t *asked) {
  float values[COUNT];
  uint8_t used[PARAMETERS] = {9, 9, 9, 9};
  uint64_t before = calls(comm);
  for (size_t i = 0; i < COUNT; i++) {
    values[i] = (float)(even_comm_rank(comm) + 1);
  }
  RANKS_EXPECT(comm, even_sync_begin(sync, 1.0, 0) == EVEN_OK);
  for (size_t p = 1; p < PARAMETERS; p++) {
    if (p != 2 || even_comm_rank(comm) != 0) {
      RANKS_EXPECT(comm, even_sync_ready(sync, p, values) == EVEN_OK);
    }
  }
  RANKS_EXPECT(comm, even_sync_know(sync, usual) == EVEN_ERR_STATE);
  RANKS_EXPECT(comm, even_sync_finish(sync, used, NULL) == EVEN_OK);
  RANKS_EXPECT(comm, memcmp(used, usual, sizeof used) == 0);
  for (size_t p = 1; p < PARAMETERS; p++) {
    const float *sums = even_sync_slot(sync, p);
    for (size_t i = 0; i < COUNT; i++) {
      RANKS_EXPECT(comm, sums[i] == (p == 2 ? 5.0f : 6.0f)); /* 2 + 3, and 1 */
    }
  }
  *asked = calls(comm) - before;
  return 0;
}

static int body(even_comm *comm, void *argument) {
  even_sync_params params = sync_params(argument);
  even_sync *sync = NULL;
  uint64_t asked[5];
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  for (size_t round = 0; round < 5; round++) {
    if (round == 1) {
      RANKS_EXPECT(comm, even_sync_know(sync, usual) == EVEN_OK);
    }
    if (round == 4) {
      RANKS_EXPECT(comm, even_sync_know(sync, NULL) == EVEN_OK);
    }
    if (one_round(comm, sync, &asked[round]) != 0) {
      return 1;
    }
  }
  RANKS_EXPECT(comm, asked[0] == 3 && asked[4] == 3); /* two buckets, the second of what is late, and the flags */
  RANKS_EXPECT(comm, asked[1] == 2 && asked[2] == 2 && asked[3] == 2);
  even_sync_close(sync);
  return 0;
}

static void run(even_dtype wire) {
  int results[RANKS_MOST];
  size_t bytes = 0;
  even_sync_params params = sync_params(&wire);
  assert_int_equal(even_sync_arena_bytes(&params, &bytes), EVEN_OK);
  ranks_setup setup = {.ranks = 3, .arena_bytes = bytes, .timeout_seconds = 60, .spin = -1};
  assert_int_equal(ranks_run(&setup, body, &wire, results), 0);
}

static void told_once(void **state) {
  (void)state;
  run(EVEN_F32);
}

static void told_once_in_bf16(void **state) {
  (void)state;
  run(EVEN_BF16);
}

static int refused(even_comm *comm, void *argument) {
  even_dtype wire = EVEN_F32;
  even_sync *sync = NULL;
  even_sync_params params = sync_params(&wire);
  (void)argument;
  params.unsummed = 1;
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_ERR_ARGUMENT);
  params.unsummed = 0;
  params.encoding = EVEN_SYNC_INT8;
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_ERR_ARGUMENT);
  params.encoding = EVEN_SYNC_PLAIN;
  params.static_graph = 0;
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_know(sync, usual) == EVEN_ERR_ARGUMENT);
  even_sync_close(sync);
  params.static_graph = 1;
  params.parameter_count = 0; /* nothing to be told, and no place to tell it */
  RANKS_EXPECT(comm, even_sync_open(&params, comm, &sync) == EVEN_OK);
  RANKS_EXPECT(comm, even_sync_know(sync, usual) == EVEN_ERR_ARGUMENT);
  even_sync_close(sync);
  return 0;
}

static void only_of_static_graphs(void **state) {
  int results[RANKS_MOST];
  ranks_setup setup = {.ranks = 1, .arena_bytes = 1 << 20, .timeout_seconds = 60, .spin = -1};
  (void)state;
  assert_int_equal(ranks_run(&setup, refused, NULL, results), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(told_once),
      cmocka_unit_test(told_once_in_bf16),
      cmocka_unit_test(only_of_static_graphs),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
