/* One suite for every way that ranks can be connected: random calls with random shapes, compared with the reference to
 * the last bit. */
#include "comm/group.h"
#include "comm/kernels.h"
#include "comm/ranks.h"
#include "conformance/comm/reference.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define ARENA_BYTES ((size_t)4 << 20)
#define GUARD 0x5a

typedef struct random_calls {
  uint64_t seed;
  int calls;
  size_t largest; /* bytes of one rank's data */
} random_calls;

/* One call, the same on all ranks. */
typedef struct random_call {
  uint64_t number;
  int kind; /* 0 all-reduce, 1 reduce-scatter, 2 all-gather, 3 broadcast, 4 barrier, 5 all-to-all */
  even_dtype dtype;
  even_reduce_op op;
  int root;
  size_t counts[RANKS_MOST];
  size_t total;
  bool in_arena[RANKS_MOST];
  size_t shift; /* elements between the memory's beginning and the data */
} random_call;

static size_t random_count(uint64_t *state, size_t most) {
  uint64_t shape = reference_random(state) % 8;
  size_t count = (size_t)(reference_random(state) % (most + 1));
  return shape == 0 ? 0 : shape == 1 ? count % 7 : shape < 5 ? count % (most / 64 + 1) : count;
}

static random_call random_call_of(const random_calls *suite, int ranks, uint64_t number) {
  uint64_t state = suite->seed * 0x9e3779b97f4a7c15u + number * 0xd1342543de82ef95u + 1;
  random_call call = {.number = number};
  for (int i = 0; i < 4; i++) {
    (void)reference_random(&state);
  }
  call.kind = (int)(reference_random(&state) % 6);
  do {
    call.dtype = (even_dtype)(reference_random(&state) % EVEN_DTYPES);
    call.op = (even_reduce_op)(reference_random(&state) % EVEN_REDUCE_OPS);
  } while (!reference_has(call.dtype, call.op));
  call.root = (int)(reference_random(&state) % (uint64_t)ranks);
  size_t most = suite->largest / even_dtype_bytes(call.dtype);
  uint64_t where = reference_random(&state) % 4;
  call.shift = reference_random(&state) % 2 == 0 ? 0 : (size_t)(reference_random(&state) % 33);
  for (int rank = 0; rank < ranks; rank++) {
    call.counts[rank] = random_count(&state, call.kind == 0 || call.kind == 3 ? most : most / (size_t)ranks);
    bool only_root = call.kind == 1 && call.shift % 3 == 1; /* a reduce to one rank */
    call.counts[rank] = only_root && rank != call.root ? 0 : call.counts[rank];
    call.total += call.counts[rank];
    call.in_arena[rank] = where == 0 || (where == 1 && reference_random(&state) % 2 == 0);
  }
  return call;
}

static unsigned char *memory_for(even_comm *comm, const random_call *call, unsigned char *plain) {
  unsigned char *memory = call->in_arena[even_comm_rank(comm)] ? even_comm_arena(comm) : plain;
  return memory + call->shift * even_dtype_bytes(call->dtype);
}

static int compare(even_comm *comm, const random_call *call, const unsigned char *got, size_t index, const void *wanted,
                   const char *what) {
  size_t element = even_dtype_bytes(call->dtype);
  if (memcmp(got + index * element, wanted, element) != 0) {
    return ranks_complain(comm, "call %llu, %s of dtype %d, op %d: element %zu of %zu is wrong",
                          (unsigned long long)call->number, what, (int)call->dtype, (int)call->op, index, call->total);
  }
  return 0;
}

static int try_all_reduce(even_comm *comm, const random_call *call, unsigned char *plain) {
  size_t element = even_dtype_bytes(call->dtype);
  size_t count = call->counts[0];
  unsigned char *data = memory_for(comm, call, plain);
  unsigned char wanted[8];
  for (size_t i = 0; i < count; i++) {
    reference_fill(data + i * element, call->dtype, call->number, even_comm_rank(comm), i);
  }
  memset(data + count * element, GUARD, element);
  RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, count, call->dtype, call->op) == EVEN_OK);
  for (size_t i = count; i-- > 0;) { /* from the end: what a peer might still be writing */
    reference_reduce(wanted, call->dtype, call->op, call->number, even_comm_ranks(comm), i);
    if (compare(comm, call, data, i, wanted, "all_reduce") != 0) {
      return 1;
    }
  }
  memset(wanted, GUARD, sizeof wanted);
  return compare(comm, call, data, count, wanted, "the end of all_reduce");
}

static int try_reduce_scatter(even_comm *comm, const random_call *call, unsigned char *plain, unsigned char *output) {
  size_t element = even_dtype_bytes(call->dtype);
  int own = even_comm_rank(comm);
  size_t begin = 0;
  unsigned char *input = memory_for(comm, call, plain);
  unsigned char wanted[8];
  for (int rank = 0; rank < own; rank++) {
    begin += call->counts[rank];
  }
  for (size_t i = 0; i < call->total; i++) {
    reference_fill(input + i * element, call->dtype, call->number, own, i);
  }
  unsigned char *into = call->root == 0 ? input + begin * element : output;
  if (into == output) {
    memset(into + call->counts[own] * element, GUARD, element);
  }
  RANKS_EXPECT(comm, even_comm_reduce_scatter(comm, input, into, call->counts, call->dtype, call->op) == EVEN_OK);
  for (size_t i = 0; i < call->counts[own]; i++) {
    reference_reduce(wanted, call->dtype, call->op, call->number, even_comm_ranks(comm), begin + i);
    if (compare(comm, call, into, i, wanted, "reduce_scatter") != 0) {
      return 1;
    }
  }
  memset(wanted, GUARD, sizeof wanted);
  return into == output ? compare(comm, call, into, call->counts[own], wanted, "the end of reduce_scatter") : 0;
}

static int try_all_gather(even_comm *comm, const random_call *call, unsigned char *plain, unsigned char *output) {
  size_t element = even_dtype_bytes(call->dtype);
  int own = even_comm_rank(comm);
  bool in_place = call->root == 0;
  size_t begin = 0;
  unsigned char wanted[8];
  for (int rank = 0; rank < own; rank++) {
    begin += call->counts[rank];
  }
  unsigned char *input = in_place ? output + begin * element : memory_for(comm, call, plain);
  for (size_t i = 0; i < call->counts[own]; i++) {
    reference_fill(input + i * element, call->dtype, call->number, own, i);
  }
  memset(output + call->total * element, GUARD, element);
  RANKS_EXPECT(comm, even_comm_all_gather(comm, input, output, call->counts, call->dtype) == EVEN_OK);
  size_t at = 0;
  for (int rank = 0; rank < even_comm_ranks(comm); rank++) {
    for (size_t i = 0; i < call->counts[rank]; i++, at++) {
      memset(wanted, 0, sizeof wanted);
      reference_fill(wanted, call->dtype, call->number, rank, i);
      if (compare(comm, call, output, at, wanted, "all_gather") != 0) {
        return 1;
      }
    }
  }
  memset(wanted, GUARD, sizeof wanted);
  return compare(comm, call, output, call->total, wanted, "the end of all_gather");
}

static int try_broadcast(even_comm *comm, const random_call *call, unsigned char *plain) {
  size_t element = even_dtype_bytes(call->dtype);
  size_t count = call->counts[0];
  unsigned char *data = memory_for(comm, call, plain);
  unsigned char wanted[8];
  for (size_t i = 0; i < count; i++) {
    reference_fill(data + i * element, call->dtype, call->number, even_comm_rank(comm), i);
  }
  RANKS_EXPECT(comm, even_comm_broadcast(comm, data, count * element, call->root) == EVEN_OK);
  for (size_t i = 0; i < count; i++) {
    reference_fill(wanted, call->dtype, call->number, call->root, i);
    if (compare(comm, call, data, i, wanted, "broadcast") != 0) {
      return 1;
    }
  }
  return 0;
}

/* Bytes that `from` has for `to`: now few, now many, now for one rank or from one rank alone. */
static size_t part_bytes(const random_calls *suite, const random_call *call, int ranks, int from, int to) {
  uint64_t state = call->number * 0x9e3779b97f4a7c15u + (uint64_t)(from * 64 + to) * 0xd1342543de82ef95u + 7;
  for (int i = 0; i < 4; i++) {
    (void)reference_random(&state);
  }
  int shape = (int)call->shift % 4;
  size_t most = suite->largest / (size_t)ranks;
  size_t bytes = random_count(&state, shape == 0 ? (size_t)6000 / (size_t)ranks : most);
  return (shape == 1 && to != call->root) || (shape == 2 && from != call->root) ? 0 : bytes;
}

static int try_all_to_all(even_comm *comm, const random_calls *suite, const random_call *call, unsigned char *input,
                          unsigned char *output) {
  size_t sends[RANKS_MOST];
  size_t receives[RANKS_MOST];
  const void *inputs[RANKS_MOST];
  void *outputs[RANKS_MOST];
  int ranks = even_comm_ranks(comm);
  int own = even_comm_rank(comm);
  size_t at = 0;
  for (int rank = 0; rank < ranks; rank++) {
    sends[rank] = part_bytes(suite, call, ranks, own, rank);
    receives[rank] = part_bytes(suite, call, ranks, rank, own);
    inputs[rank] = input + at;
    for (size_t i = 0; i < sends[rank]; i++) {
      reference_fill(input + at++, EVEN_U8, call->number, own * 64 + rank, i);
    }
  }
  size_t total = 0;
  for (int rank = 0; rank < ranks; rank++) {
    outputs[rank] = output + total;
    total += receives[rank];
  }
  memset(output + total, GUARD, 1);
  RANKS_EXPECT(comm, even_comm_all_to_all(comm, inputs, sends, outputs, receives) == EVEN_OK);
  at = 0;
  for (int rank = 0; rank < ranks; rank++) {
    for (size_t i = 0; i < receives[rank]; i++, at++) {
      unsigned char wanted[8] = {0};
      reference_fill(wanted, EVEN_U8, call->number, rank * 64 + own, i);
      if (output[at] != wanted[0]) {
        return ranks_complain(comm, "call %llu, all_to_all: byte %zu from rank %d is wrong",
                              (unsigned long long)call->number, i, rank);
      }
    }
  }
  RANKS_EXPECT(comm, output[total] == GUARD);
  return 0;
}

static int run_suite(even_comm *comm, void *argument) {
  const random_calls *suite = argument;
  int wrong = 0;
  unsigned char *plain = malloc(suite->largest + 4096);
  unsigned char *output = malloc(suite->largest + 4096);
  for (int number = 0; wrong == 0 && number < suite->calls; number++) {
    random_call call = random_call_of(suite, even_comm_ranks(comm), (uint64_t)number);
    switch (call.kind) {
      case 0:
        wrong = try_all_reduce(comm, &call, plain);
        break;
      case 1:
        wrong = try_reduce_scatter(comm, &call, plain, output);
        break;
      case 2:
        wrong = try_all_gather(comm, &call, plain, output);
        break;
      case 3:
        wrong = try_broadcast(comm, &call, plain);
        break;
      case 5:
        wrong = try_all_to_all(comm, suite, &call, plain, output);
        break;
      default:
        wrong = even_comm_barrier(comm) != EVEN_OK;
        break;
    }
  }
  free(plain);
  free(output);
  return wrong;
}

/* Whether a rank writes past its caches it measures for itself: ranks that differ still understand each other. */
static int write_in_own_way(even_comm *comm, void *argument) {
  static const size_t sizes[] = {3001, 65536, 131072, 700001};
  unsigned ways = *(unsigned *)argument;
  size_t ranks = (size_t)even_comm_ranks(comm);
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    float *data = malloc(sizes[i] * sizeof *data);
    for (size_t k = 0; k < sizes[i]; k++) {
      data[k] = (float)((k + i) % 1000 + (size_t)even_comm_rank(comm));
    }
    comm->writing.stages = 100; /* no trial is near */
    comm->writing.past_caches = (ways >> even_comm_rank(comm) & 1u) != 0;
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, sizes[i], EVEN_F32, EVEN_SUM) == EVEN_OK);
    for (size_t k = 0; k < sizes[i]; k++) {
      RANKS_EXPECT(comm, data[k] == (float)((k + i) % 1000 * ranks + ranks * (ranks - 1) / 2));
    }
    free(data);
  }
  return 0;
}

static void test_ways_of_writing_that_differ(void **state) {
  (void)state;
  for (int ranks = 2; ranks <= 3; ranks++) {
    for (unsigned ways = 0; ways < 1u << ranks; ways++) {
      ranks_setup setup = {.ranks = ranks, .timeout_seconds = 60, .spin = -1, .threads = ways % 2 == 1};
      assert_int_equal(ranks_run(&setup, write_in_own_way, &ways, NULL), 0);
    }
  }
}

static void check_over(ranks_engine engine, int ranks, int calls, size_t largest) {
  ranks_setup setup = {.ranks = ranks, .arena_bytes = ARENA_BYTES, .timeout_seconds = 60, .spin = -1, .engine = engine};
  random_calls suite = {.seed = (uint64_t)ranks * 1000 + (uint64_t)engine, .calls = calls, .largest = largest};
  assert_int_equal(ranks_run(&setup, run_suite, &suite, NULL), 0);
}

static void check(int ranks, bool threads, int spin, int calls, size_t largest) {
  ranks_setup setup = {
      .ranks = ranks, .arena_bytes = ARENA_BYTES, .timeout_seconds = 60, .spin = spin, .threads = threads};
  random_calls suite = {.seed = (uint64_t)ranks * 100 + (uint64_t)(spin + 2), .calls = calls, .largest = largest};
  assert_int_equal(ranks_run(&setup, run_suite, &suite, NULL), 0);
}

static void test_processes(void **state) {
  (void)state;
  check(1, false, -1, 100, 100000);
  check(2, false, -1, 300, 200000);
  check(2, false, 0, 100, 1500000);
  check(3, false, -1, 200, 200000);
  check(5, false, -1, 100, 400000);
}

static void test_more_ranks_than_cores(void **state) {
  (void)state;
  check(8, false, -1, 60, 200000);
  check(13, false, 0, 30, 100000);
}

static void test_threads(void **state) {
  (void)state;
  check(2, true, -1, 100, 200000);
  check(4, true, 50, 60, 200000);
  check(3, true, 0, 60, 800000);
  check(2, true, 1000000, 60, 200000); /* nobody sleeps: the ranks see each other by the sequence words alone */
}

static void test_every_simd_path(void **state) {
  static const char *const names[] = {"portable", "avx2", "avx512", "neon"};
  (void)state;
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    const even_kernels *kernels = even_kernels_named(names[i]);
    if (kernels == NULL) {
      print_message("%s: not on this machine, not tested\n", names[i]);
      continue;
    }
    even_kernels_use(kernels);
    check(2, false, -1, 200, 50000);
    check(3, false, -1, 200, 50000);
  }
  even_kernels_use(NULL);
}

static void test_ucx(void **state) {
  (void)state;
  if (!ranks_have_ucx()) {
    skip();
  }
  check_over(RANKS_UCX, 1, 50, 100000);
  check_over(RANKS_UCX, 2, 200, 200000);
  check_over(RANKS_UCX, 2, 30, 4000000);
  check_over(RANKS_UCX, 3, 100, 300000);
  check_over(RANKS_UCX, 5, 60, 400000);
}

static void check_hosts(int ranks, const int *host_of, int calls, size_t largest) {
  ranks_setup setup = {.ranks = ranks,
                       .arena_bytes = ARENA_BYTES,
                       .timeout_seconds = 60,
                       .spin = -1,
                       .engine = RANKS_HOSTS,
                       .host_of = host_of};
  random_calls suite = {.seed = (uint64_t)ranks * 1000 + 7, .calls = calls, .largest = largest};
  reference_set_hosts(host_of);
  int wrong = ranks_run(&setup, run_suite, &suite, NULL);
  reference_set_hosts(NULL);
  assert_int_equal(wrong, 0);
}

static void test_hosts(void **state) {
  static const int alone[] = {0, 1};
  static const int uneven[] = {0, 0, 1};
  static const int three[] = {0, 1, 1, 1, 2, 2};
  static const int mixed[] = {0, 1, 0, 2, 1}; /* the ranks of a host are not neighbours */
  (void)state;
  if (!ranks_have_ucx()) {
    skip();
  }
  check_hosts(2, alone, 60, 200000);
  check_hosts(3, uneven, 120, 300000);
  check_hosts(3, uneven, 20, 4000000);
  check_hosts(6, three, 60, 300000);
  check_hosts(5, mixed, 80, 300000);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_processes),
      cmocka_unit_test(test_more_ranks_than_cores),
      cmocka_unit_test(test_threads),
      cmocka_unit_test(test_every_simd_path),
      cmocka_unit_test(test_ways_of_writing_that_differ),
      cmocka_unit_test(test_ucx),
      cmocka_unit_test(test_hosts),
  };
  return cmocka_run_group_tests_name("collectives against the reference", tests, NULL, NULL);
}
