/* On which NUMA node the ranks' parts of a segment are asked for, on invented hosts. Each rank's process has invented
 * nodes of its own, so that one machine's CPUs can be of several. */
#include "comm/group.h"

#include "comm/ranks.h"
#include "os/calls.h"
#include "os/numa.h"
#include "support/fault.h"
#include "support/folder.h"
#include "support/nodes.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { RANKS = 3, COUNT = 100000, CANNOT = 77 };

/* Where all CPUs are of node 0, or of node 1; where each is of another one; where there is one node. */
static char on_first[FOLDER_BYTES];
static char on_second[FOLDER_BYTES];
static char on_both[FOLDER_BYTES];
static char on_one[FOLDER_BYTES];

/* The even CPUs of 0 … 1023, or the odd ones: of a machine with one CPU, too, they are not all of it. */
static void write_half(const char *folder, const char *path, int first) {
  static char list[8192];
  size_t at = 0;
  for (int cpu = first; cpu < 1024; cpu += 2) {
    at += (size_t)snprintf(list + at, sizeof list - at, "%s%d", at == 0 ? "" : ",", cpu);
  }
  folder_write(folder, path, list);
}

static void write_nodes(const char *folder, const char *first, const char *second) {
  folder_write(folder, "has_memory", "0-1\n");
  folder_write(folder, "node0/cpulist", first);
  folder_write(folder, "node1/cpulist", second);
}

static int setup(void **state) {
  (void)state;
  if (folder_make("node0", on_first) != 0 || folder_make("node1", on_second) != 0 ||
      folder_make("nodes", on_both) != 0 || folder_make("node", on_one) != 0) {
    return -1;
  }
  write_nodes(on_first, "0-1023\n", "1024-2047\n");
  write_nodes(on_second, "1024-2047\n", "0-1023\n");
  write_nodes(on_both, "", "");
  write_half(on_both, "node0/cpulist", 0);
  write_half(on_both, "node1/cpulist", 1);
  folder_write(on_one, "has_memory", "0\n");
  folder_write(on_one, "node0/cpulist", "0-1023\n");
  return 0;
}

static int teardown(void **state) {
  (void)state;
  int first = folder_remove(on_first);
  int second = folder_remove(on_second);
  int both = folder_remove(on_both);
  int one = folder_remove(on_one);
  return first == 0 && second == 0 && both == 0 && one == 0 ? 0 : -1;
}

/* ---- what ranks find when they come ---- */

static void two_nodes(int rank) {
  nodes_lie_in(rank == RANKS - 1 ? on_second : on_first);
  nodes_answer(0, MPOL_DEFAULT);
}

static void refusals(int rank) {
  two_nodes(rank);
  nodes_answer(EPERM, MPOL_DEFAULT);
}

static void one_refusal(int rank) {
  two_nodes(rank);
  nodes_answer(rank == 1 ? ENOSYS : 0, MPOL_DEFAULT);
}

static void own_policy(int rank) {
  two_nodes(rank);
  nodes_answer(0, MPOL_INTERLEAVE);
}

static void one_node(int rank) {
  (void)rank;
  nodes_lie_in(on_one);
  nodes_answer(0, MPOL_DEFAULT);
}

static void no_files(int rank) {
  (void)rank;
  nodes_lie_in("/nowhere/at/all");
  nodes_answer(0, MPOL_DEFAULT);
}

static void this_kernel(int rank) {
  (void)rank;
  nodes_lie_in(on_first);
}

/* ---- what they do then ---- */

typedef struct expectation {
  const char *words; /* of the group's description */
  size_t calls;      /* of mbind */
} expectation;

/* Small, staged and in the arena, each as it shall be. */
static int reduce(even_comm *comm) {
  static float plain[COUNT];
  for (int way = 0; way < 3; way++) {
    float *data = way == 2 ? even_comm_arena(comm) : plain;
    size_t count = way == 0 ? 10 : COUNT;
    for (size_t i = 0; i < count; i++) {
      data[i] = (float)(i % 100);
    }
    RANKS_EXPECT(comm, even_comm_all_reduce(comm, data, count, EVEN_F32, EVEN_SUM) == EVEN_OK);
    for (size_t i = 0; i < count; i++) {
      RANKS_EXPECT(comm, data[i] == (float)RANKS * (float)(i % 100));
    }
  }
  return 0;
}

static int say_and_reduce(even_comm *comm, void *argument) {
  const expectation *wanted = argument;
  const nodes_call *calls = NULL;
  char text[1024];
  even_comm_describe(comm, text, sizeof text);
  if (strstr(text, wanted->words) == NULL) {
    return ranks_complain(comm, "it says \"%s\"", text);
  }
  RANKS_EXPECT(comm, nodes_calls(&calls) == wanted->calls);
  return reduce(comm);
}

static bool covers(const nodes_call *call, const unsigned char *begin, size_t bytes) {
  return call->address <= begin && call->address + call->bytes >= begin + bytes;
}

static bool touches(const nodes_call *call, const unsigned char *begin, size_t bytes) {
  return call->address < begin + bytes && call->address + call->bytes > begin;
}

/* Every byte of the rank's own parts, and none of the others'. */
static int asks_for_its_own(even_comm *comm, void *argument) {
  const nodes_call *calls = NULL;
  size_t count = nodes_calls(&calls);
  size_t most = comm->layout.most_piece;
  (void)argument;
  for (int rank = 0; rank < RANKS; rank++) {
    const struct {
      const unsigned char *begin;
      size_t bytes;
    } parts[] = {
        {even_comm_arena_of(comm, rank), COUNT * sizeof(float)},
        {even_comm_staging_of(comm, rank, 0), 4 * most},
        {even_comm_slot_of(comm, rank, 0), 2 * EVEN_COMM_SLOT_BYTES},
        {(unsigned char *)even_comm_channel_of(comm, rank, 0), RANKS * comm->layout.channel_stride},
    };
    for (size_t part = 0; part < sizeof parts / sizeof parts[0]; part++) {
      size_t covered = 0;
      size_t touched = 0;
      for (size_t i = 0; i < count; i++) {
        covered += covers(&calls[i], parts[part].begin, parts[part].bytes);
        touched += touches(&calls[i], parts[part].begin, parts[part].bytes);
      }
      RANKS_EXPECT(comm, covered == (rank == comm->rank) && touched == (rank == comm->rank));
    }
  }
  for (size_t i = 0; i < count; i++) {
    RANKS_EXPECT(comm, calls[i].node == (comm->rank == RANKS - 1) && calls[i].mode == MPOL_PREFERRED);
    RANKS_EXPECT(comm, !touches(&calls[i], (unsigned char *)comm->header, sizeof *comm->header));
  }
  return reduce(comm);
}

static int lies_as_asked(even_comm *comm, void *argument) {
  int mode = -1;
  unsigned long mask[16] = {0};
  (void)argument;
  if (comm->unplaced[0] != '\0') {
    return CANNOT;
  }
  RANKS_EXPECT(comm, even_os_real.get_mempolicy(&mode, mask, 1025, even_comm_arena(comm), MPOL_F_ADDR) == 0);
  RANKS_EXPECT(comm, mode == MPOL_PREFERRED && mask[0] == 1);
  /* and each sees the others' policy: it is the memory's */
  mode = -1;
  RANKS_EXPECT(comm, even_os_real.get_mempolicy(&mode, mask, 1025, even_comm_arena_of(comm, (comm->rank + 1) % RANKS),
                                                MPOL_F_ADDR) == 0);
  RANKS_EXPECT(comm, mode == MPOL_PREFERRED && mask[0] == 1);
  return reduce(comm);
}

static int run(void (*enter)(int rank), ranks_body *body, void *argument, int *results) {
  const ranks_setup three = {
      .ranks = RANKS, .arena_bytes = COUNT * sizeof(float), .timeout_seconds = 120, .spin = -1, .enter = enter};
  return ranks_run(&three, body, argument, results);
}

/* ---- what is asserted ---- */

static void each_asks_for_its_own_parts_on_its_own_node(void **state) {
  (void)state;
  assert_int_equal(run(two_nodes, asks_for_its_own, NULL, NULL), 0);
}

static void a_group_says_where_its_memory_lies(void **state) {
  static const struct {
    void (*enter)(int rank);
    expectation wanted;
  } hosts[] = {
      {two_nodes, {"; memory of ranks 0-1 on node 0, rank 2 on node 1", 5}},
      {refusals, {"; memory where it is first written: the kernel does not let it be placed (Operation not perm", 1}},
      {own_policy, {"; memory where it is first written: by the memory policy that this process was started with", 0}},
      {one_node, {"; memory where it is first written: one NUMA node", 0}},
      {no_files, {"; memory where it is first written: one NUMA node", 0}},
  };
  (void)state;
  for (size_t i = 0; i < sizeof hosts / sizeof hosts[0]; i++) {
    expectation wanted = hosts[i].wanted;
    assert_int_equal(run(hosts[i].enter, say_and_reduce, &wanted, NULL), 0);
  }
}

static int only_the_second_is_refused(even_comm *comm, void *argument) {
  expectation wanted = {"; memory of rank 0 on node 0, rank 1 where it is first written, rank 2 on node 1",
                        comm->rank == 1 ? 1 : 5};
  (void)argument;
  return say_and_reduce(comm, &wanted);
}

static void of_several_ranks_one_may_be_refused(void **state) {
  (void)state;
  assert_int_equal(run(one_refusal, only_the_second_is_refused, NULL, NULL), 0);
}

static int says_several(even_comm *comm, void *argument) {
  expectation wanted = {"; memory where it is first written: its CPUs are of several NUMA nodes: pin ranks", 0};
  uint64_t even = 0;
  uint64_t odd = 0;
  (void)argument;
  for (size_t i = 0; i < EVEN_COMM_CPU_WORDS; i++) {
    even |= comm->controls[comm->rank].cpus[i] & 0x5555555555555555u;
    odd |= comm->controls[comm->rank].cpus[i] & 0xaaaaaaaaaaaaaaaau;
  }
  return even == 0 || odd == 0 ? reduce(comm) : say_and_reduce(comm, &wanted);
}

static void several_nodes(int rank) {
  (void)rank;
  nodes_lie_in(on_both);
  nodes_answer(0, MPOL_DEFAULT);
}

static void ranks_on_cpus_of_several_nodes_are_left_alone(void **state) {
  (void)state;
  assert_int_equal(run(several_nodes, says_several, NULL, NULL), 0);
}

static void this_kernel_places_what_all_ranks_share(void **state) {
  int results[RANKS] = {0};
  (void)state;
  int failed = run(this_kernel, lies_as_asked, NULL, results);
  if (failed > 0 && results[0] == CANNOT) {
    skip(); /* a container that forbids it, or a policy of the test's own */
  }
  assert_int_equal(failed, 0);
}

/* ---- on a host that has several nodes ---- */

static size_t cpus[2]; /* one of each of two nodes */
static int nodes[2];

/* Whether this process may use CPUs of two nodes that have memory. */
static bool find_two_nodes(void) {
  cpu_set_t own;
  int found = 0;
  assert_int_equal(sched_getaffinity(0, sizeof own, &own), 0);
  for (size_t cpu = 0; cpu < EVEN_COMM_CPU_WORDS * 64 && found < 2; cpu++) {
    uint64_t mask[EVEN_COMM_CPU_WORDS] = {0};
    int node = -1;
    mask[cpu / 64] = (uint64_t)1 << (cpu % 64);
    if (CPU_ISSET(cpu, &own) && even_numa_of_cpus(mask, EVEN_COMM_CPU_WORDS, &node) == EVEN_NUMA_FOUND &&
        (found == 0 || node != nodes[0])) {
      cpus[found] = cpu;
      nodes[found++] = node;
    }
  }
  return found == 2;
}

static void pinned(int rank) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpus[rank % 2], &one);
  assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
}

/* Each rank's arena is first written by its neighbour, which is of the other node; its pages are of the rank's own. */
static int pages_lie_with_their_rank(even_comm *comm, void *argument) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  unsigned char *arena = even_comm_arena(comm);
  (void)argument;
  if (comm->unplaced[0] != '\0') {
    return CANNOT;
  }
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  memset(even_comm_arena_of(comm, (comm->rank + 1) % comm->ranks), 1, COUNT * sizeof(float));
  RANKS_EXPECT(comm, even_comm_barrier(comm) == EVEN_OK);
  for (size_t at = 0; at + page <= COUNT * sizeof(float); at += page) {
    int node = -1;
    RANKS_EXPECT(comm, even_os_real.get_mempolicy(&node, NULL, 0, arena + at, MPOL_F_NODE | MPOL_F_ADDR) == 0);
    if (node != nodes[comm->rank % 2]) {
      return ranks_complain(comm, "the page at %zu is of node %d, not of %d", at, node, nodes[comm->rank % 2]);
    }
  }
  return 0;
}

static void on_several_nodes_pages_lie_with_their_rank(void **state) {
  int results[RANKS] = {0};
  const ranks_setup two = {
      .ranks = 2, .arena_bytes = COUNT * sizeof(float), .timeout_seconds = 120, .spin = -1, .enter = pinned};
  (void)state;
  if (!find_two_nodes()) {
    skip();
  }
  int failed = ranks_run(&two, pages_lie_with_their_rank, NULL, results);
  if (failed > 0 && results[0] == CANNOT) {
    skip();
  }
  assert_int_equal(failed, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(each_asks_for_its_own_parts_on_its_own_node),
      cmocka_unit_test(a_group_says_where_its_memory_lies),
      cmocka_unit_test(of_several_ranks_one_may_be_refused),
      cmocka_unit_test(ranks_on_cpus_of_several_nodes_are_left_alone),
      cmocka_unit_test(this_kernel_places_what_all_ranks_share),
      cmocka_unit_test(on_several_nodes_pages_lie_with_their_rank),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
