/* One suite for every way that ranks can be connected: random calls with random shapes, compared with the reference to
 * the last bit. */
#include "comm/group.h"
#include "comm/kernels.h"
#include "comm/ranks.h"
#include "conformance/comm/random_calls.h"
#include "conformance/comm/reference.h"
#include "support/search.h"

#include <evenstep/comm_costs.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Of so many random calls: ThreadSanitizer sees of ranks that are processes what each one's threads do, which soon
 * comes again, and not what the ranks do to one another. */
static int some(int calls, bool threads) {
  return SEARCH_STRIDE == 1 || threads ? calls : calls / 4 + 1;
}

/* Whether a rank writes past its caches it measures for itself: ranks that differ still understand each other. */
static int write_in_own_way(even_comm *comm, void *argument) {
  static const size_t sizes[] = {3001, 65536, 131072, 700001, 655360, 393217};
  unsigned ways = *(unsigned *)argument;
  size_t ranks = (size_t)even_comm_ranks(comm);
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    float *data = malloc(sizes[i] * sizeof *data);
    even_reduce_op op = i % 2 == 0 ? EVEN_SUM : EVEN_AVG;
    float parts = op == EVEN_AVG ? (float)ranks : 1.0f;
    for (int call = 0; call < 2; call++) { /* large ones: from either end */
      for (size_t k = 0; k < sizes[i]; k++) {
        data[k] = (float)((k + i) % 1000 + (size_t)even_comm_rank(comm));
      }
      comm->writing.stages = 100; /* no trial is near */
      comm->writing.past_caches = (ways >> even_comm_rank(comm) & 1u) != 0;
      comm->large_bytes = (ways >> ranks & 1u) != 0 ? 1 : SIZE_MAX;
      RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, sizes[i], EVEN_F32, op) == EVEN_OK);
      for (size_t k = 0; k < sizes[i]; k++) {
        RANKS_EXPECT(comm, data[k] == (float)((k + i) % 1000 * ranks + ranks * (ranks - 1) / 2) / parts);
      }
    }
    free(data);
  }
  return 0;
}

static void test_ways_of_writing_that_differ(void **state) {
  (void)state;
  for (int ranks = 2; ranks <= 3; ranks++) {
    for (unsigned ways = SEARCH_STRIDE == 1 ? 0 : 1; ways < 2u << ranks; ways += SEARCH_STRIDE == 1 ? 1 : 2) {
      ranks_setup setup = {.ranks = ranks, .timeout_seconds = 60, .spin = -1, .threads = ways % 2 == 1};
      assert_int_equal(ranks_run(&setup, write_in_own_way, &ways, NULL), 0);
    }
  }
}

static void check_over(ranks_engine engine, int ranks, int calls, size_t largest) {
  ranks_setup setup = {
      .ranks = ranks, .arena_bytes = RANDOM_CALLS_ARENA_BYTES, .timeout_seconds = 60, .spin = -1, .engine = engine};
  random_calls suite = {
      .seed = (uint64_t)ranks * 1000 + (uint64_t)engine, .calls = some(calls, false), .largest = largest};
  assert_int_equal(ranks_run(&setup, random_calls_run, &suite, NULL), 0);
}

static void check(int ranks, bool threads, int spin, int calls, size_t largest) {
  ranks_setup setup = {
      .ranks = ranks, .arena_bytes = RANDOM_CALLS_ARENA_BYTES, .timeout_seconds = 60, .spin = spin, .threads = threads};
  random_calls suite = {
      .seed = (uint64_t)ranks * 100 + (uint64_t)(spin + 2), .calls = some(calls, threads), .largest = largest};
  assert_int_equal(ranks_run(&setup, random_calls_run, &suite, NULL), 0);
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

/* As groups do whose ranks share cores; of more pieces than are under way at once, from either end. */
static int by_chain(even_comm *comm, void *argument) {
  const even_comm_choosing params = {.size = sizeof params, .way = "chain"};
  RANKS_EXPECT(comm, even_comm_choose(comm, &params) == EVEN_OK);
  comm->large_bytes = 500000;
  return random_calls_run(comm, argument);
}

static void check_chain(int ranks, bool threads, int calls, size_t largest) {
  ranks_setup setup = {
      .ranks = ranks, .arena_bytes = RANDOM_CALLS_ARENA_BYTES, .timeout_seconds = 60, .spin = -1, .threads = threads};
  random_calls suite = {.seed = (uint64_t)ranks * 100 + 77, .calls = some(calls, threads), .largest = largest};
  assert_int_equal(ranks_run(&setup, by_chain, &suite, NULL), 0);
}

static void test_chain(void **state) {
  (void)state;
  check_chain(2, false, 200, 200000);
  check_chain(3, true, 60, 3000000);
  check_chain(4, false, 60, 3000000);
  check_chain(7, false, 60, 300000);
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
    check_chain(3, false, 100, 100000);
  }
  even_kernels_use(NULL);
}

static void test_ucx(void **state) {
  (void)state;
  if (!ranks_have_ucx()) {
    skip();
  }
  check_over(RANKS_NETWORK, 1, 50, 100000);
  check_over(RANKS_NETWORK, 2, 200, 200000);
  check_over(RANKS_NETWORK, 2, 30, 4000000);
  check_over(RANKS_NETWORK, 3, 100, 300000);
  check_over(RANKS_NETWORK, 5, 60, 400000);
}

static void check_hosts(const char *mpi, int ranks, const int *host_of, int lanes, int calls, size_t largest) {
  ranks_setup setup = {.ranks = ranks,
                       .arena_bytes = RANDOM_CALLS_ARENA_BYTES,
                       .timeout_seconds = 60,
                       .spin = -1,
                       .engine = RANKS_HOSTS,
                       .host_of = host_of,
                       .lanes = lanes,
                       .mpi = mpi};
  random_calls suite = {.seed = (uint64_t)ranks * 1000 + 7, .calls = some(calls, false), .largest = largest};
  reference_set_hosts(host_of);
  int wrong = ranks_run(&setup, random_calls_run, &suite, NULL);
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
  check_hosts(NULL, 2, alone, 1, 60, 200000);
  check_hosts(NULL, 3, uneven, 2, 120, 300000);
  check_hosts(NULL, 3, uneven, 1, 12, 4000000);
  check_hosts(NULL, 3, uneven, 2, 12, 4000000);
  check_hosts(NULL, 6, three, 3, 60, 300000);
  check_hosts(NULL, 5, mixed, 1, 80, 300000);
}

/* Through libraries of each kind, and through MPI between hosts. */
static void test_mpi(void **state) {
  static const char *const libraries[] = {FAKE_MPI_NUMBERS, FAKE_MPI_ADDRESSES, FAKE_MPI_STANDARD};
  static const int mixed[] = {0, 1, 0, 2, 1};
  (void)state;
  for (size_t i = 0; i < sizeof libraries / sizeof libraries[0]; i++) {
    for (int ranks = 1; ranks <= 5; ranks += 2) {
      ranks_setup setup = {.ranks = ranks,
                           .arena_bytes = RANDOM_CALLS_ARENA_BYTES,
                           .timeout_seconds = 60,
                           .spin = -1,
                           .engine = RANKS_NETWORK,
                           .mpi = libraries[i]};
      random_calls suite = {.seed = (uint64_t)ranks * 1000 + 3, .calls = some(60, false), .largest = 300000};
      assert_int_equal(ranks_run(&setup, random_calls_run, &suite, NULL), 0);
    }
  }
  check_hosts(libraries[0], 5, mixed, 2, 40, 1500000);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_processes),
      cmocka_unit_test(test_more_ranks_than_cores),
      cmocka_unit_test(test_threads),
      cmocka_unit_test(test_chain),
      cmocka_unit_test(test_every_simd_path),
      cmocka_unit_test(test_ways_of_writing_that_differ),
      cmocka_unit_test(test_ucx),
      cmocka_unit_test(test_hosts),
      cmocka_unit_test(test_mpi),
  };
  return cmocka_run_group_tests_name("collectives against the reference", tests, NULL, NULL);
}
