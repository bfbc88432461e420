/* Of which node CPUs are, on invented hosts; and pages that are asked of one, of the kernel that is here. */
#include "os/numa.h"

#include "os/calls.h"
#include "support/fault.h"
#include "support/folder.h"
#include "support/nodes.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

static char root[FOLDER_BYTES];

static int make_root(void **state) {
  (void)state;
  int made = folder_make("numa", root);
  nodes_lie_in(root);
  return made;
}

static int remove_root(void **state) {
  (void)state;
  fault_reset();
  return folder_remove(root);
}

/* Two sockets of 70 CPUs with two threads each: node 0 has 0-69 and 140-209. Node 2 has memory and no CPU, node 3 the
 * other way round. */
static void invent_two_sockets(void) {
  folder_write(root, "has_memory", "0-2\n");
  folder_write(root, "node0/cpulist", "0-69,140-209\n");
  folder_write(root, "node1/cpulist", "70-139,210-279\n");
  folder_write(root, "node2/cpulist", "\n");
  folder_write(root, "node3/cpulist", "280-283\n");
}

enum { WORDS = 5 };

static void add(uint64_t *cpus, int first, int last) {
  for (int cpu = first; cpu <= last; cpu++) {
    cpus[cpu / 64] |= (uint64_t)1 << (cpu % 64);
  }
}

static void cpus_are_of_the_node_that_has_all_of_them(void **state) {
  static const struct {
    int first, last, also_first, also_last;
    even_numa_answer answer;
    int node;
  } masks[] = {
      {0, 0, 0, 0, EVEN_NUMA_FOUND, 0},
      {60, 69, 140, 209, EVEN_NUMA_FOUND, 0},
      {70, 70, 70, 70, EVEN_NUMA_FOUND, 1},
      {279, 279, 139, 139, EVEN_NUMA_FOUND, 1},
      {69, 70, 69, 70, EVEN_NUMA_SEVERAL, -1},
      {0, 279, 0, 0, EVEN_NUMA_SEVERAL, -1},
      {280, 283, 280, 283, EVEN_NUMA_SEVERAL, -1},
      {300, 310, 0, 0, EVEN_NUMA_SEVERAL, -1},
  };
  (void)state;
  invent_two_sockets();
  for (size_t i = 0; i < sizeof masks / sizeof masks[0]; i++) {
    uint64_t cpus[WORDS] = {0};
    int node = 7;
    add(cpus, masks[i].first, masks[i].last);
    add(cpus, masks[i].also_first, masks[i].also_last);
    assert_int_equal(even_numa_of_cpus(cpus, WORDS, &node), masks[i].answer);
    assert_int_equal(node, masks[i].node);
  }
  const uint64_t none[WORDS] = {0};
  int node = 7;
  assert_int_equal(even_numa_of_cpus(none, WORDS, &node), EVEN_NUMA_SEVERAL);
  assert_int_equal(node, -1);
}

static void where_one_node_has_memory_there_is_nothing_to_choose(void **state) {
  static const char *const lists[] = {"0\n", "1\n", "\n", "", "nonsense\n"};
  const uint64_t cpus[WORDS] = {1};
  int node = 7;
  (void)state;
  assert_int_equal(even_numa_of_cpus(cpus, WORDS, &node), EVEN_NUMA_ONE); /* no such file */
  invent_two_sockets();
  for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
    folder_write(root, "has_memory", lists[i]);
    assert_int_equal(even_numa_of_cpus(cpus, WORDS, &node), EVEN_NUMA_ONE);
    assert_int_equal(node, -1);
  }
}

static even_numa_answer ask_with(fault_call call, long nth, int error_number) {
  const uint64_t cpus[WORDS] = {1};
  int node = 7;
  fault_os(call, nth, error_number);
  if (call != FAULT_open) {
    nodes_lie_in(root);
  }
  even_numa_answer answer = even_numa_of_cpus(cpus, WORDS, &node);
  assert_int_equal(node, answer == EVEN_NUMA_FOUND ? 0 : -1);
  fault_reset();
  return answer;
}

/* What cannot be read is not there: nothing is placed, and nobody fails. */
static void files_that_cannot_be_read_place_nothing(void **state) {
  (void)state;
  invent_two_sockets();
  assert_int_equal(ask_with(FAULT_open, 1, EACCES), EVEN_NUMA_ONE);
  assert_int_equal(ask_with(FAULT_read, 0, 0), EVEN_NUMA_FOUND);
  /* each file takes two reads: what it says, and its end */
  assert_int_equal(ask_with(FAULT_read, 1, EIO), EVEN_NUMA_ONE);
  assert_int_equal(ask_with(FAULT_read, 2, EIO), EVEN_NUMA_ONE);
  assert_int_equal(ask_with(FAULT_read, 3, EIO), EVEN_NUMA_SEVERAL);
  assert_int_equal(ask_with(FAULT_read, 4, EIO), EVEN_NUMA_SEVERAL);
  for (long nth = 1; nth < 5; nth++) {
    assert_int_equal(ask_with(FAULT_read, nth, EINTR), EVEN_NUMA_FOUND);
  }
  static char endless[20000];
  memset(endless, '0', sizeof endless - 1);
  folder_write(root, "node0/cpulist", endless);
  assert_int_equal(ask_with(FAULT_read, 0, 0), EVEN_NUMA_SEVERAL);
}

static void whole_pages_between_the_ends_are_asked_for(void **state) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  const nodes_call *calls = NULL;
  unsigned char *memory = mmap(NULL, 6 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  (void)state;
  assert_ptr_not_equal(memory, MAP_FAILED);
  nodes_answer(0, MPOL_DEFAULT);
  assert_int_equal(even_numa_prefer(memory + 1, 4 * page, 70), 0);
  assert_int_equal(even_numa_prefer(memory, 6 * page, 1023), 0);
  assert_int_equal(nodes_calls(&calls), 2);
  assert_ptr_equal(calls[0].address, memory + page);
  assert_int_equal(calls[0].bytes, 3 * page);
  assert_int_equal(calls[0].node, 70);
  assert_int_equal(calls[0].mode, MPOL_PREFERRED);
  assert_int_equal(calls[0].flags, 0);
  assert_ptr_equal(calls[1].address, memory);
  assert_int_equal(calls[1].bytes, 6 * page);
  assert_int_equal(calls[1].node, 1023);
  (void)munmap(memory, 6 * page);
}

/* The kernel that is here: node 0 is there, node 900 is not. */
static void the_kernel_takes_it_or_says_why_not(void **state) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  int mode = -1;
  unsigned long mask[16] = {0};
  (void)state;
  unsigned char *memory = mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_ptr_not_equal(memory, MAP_FAILED);
  int failed = even_numa_prefer(memory + 1, 3 * page, 0);
  if (failed == EPERM || failed == ENOSYS) {
    (void)munmap(memory, 4 * page);
    skip(); /* a container that forbids it */
  }
  assert_int_equal(failed, 0);
  assert_int_equal(even_os_real.get_mempolicy(&mode, mask, 1025, memory + page, MPOL_F_ADDR), 0);
  assert_int_equal(mode, MPOL_PREFERRED);
  assert_int_equal(mask[0], 1);
  assert_int_equal(even_os_real.get_mempolicy(&mode, mask, 1025, memory, MPOL_F_ADDR), 0);
  assert_int_equal(mode, MPOL_DEFAULT); /* the first page was not whole */
  assert_int_equal(even_os_real.get_mempolicy(&mode, mask, 1025, memory + 3 * page, MPOL_F_ADDR), 0);
  assert_int_equal(mode, MPOL_DEFAULT);
  assert_int_equal(even_numa_prefer(memory, page, 900), EINVAL);
  (void)munmap(memory, 4 * page);
}

static void what_makes_no_sense_is_not_asked(void **state) {
  const nodes_call *calls = NULL;
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  static unsigned char memory[64];
  (void)state;
  nodes_answer(0, MPOL_DEFAULT);
  assert_int_equal(even_numa_prefer(memory, page, -1), EINVAL);
  assert_int_equal(even_numa_prefer(memory, page, 1024), EINVAL);
  assert_int_equal(even_numa_prefer(memory, 0, 1), 0);
  assert_int_equal(even_numa_prefer(memory, sizeof memory, 1), 0);
  assert_int_equal(nodes_calls(&calls), 0);
}

static void a_policy_of_the_process_is_seen(void **state) {
  bool own = true;
  (void)state;
  nodes_answer(0, MPOL_DEFAULT);
  assert_int_equal(even_numa_has_policy(&own), 0);
  assert_false(own);
  nodes_answer(0, MPOL_INTERLEAVE);
  assert_int_equal(even_numa_has_policy(&own), 0);
  assert_true(own);
  fault_reset();
  fault_os(FAULT_get_mempolicy, 1, EPERM);
  assert_int_equal(even_numa_has_policy(&own), EPERM);
  assert_false(own);
  fault_reset();
  fault_os(FAULT_mbind, 1, ENOSYS);
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  static unsigned char memory[1 << 18];
  assert_int_equal(even_numa_prefer(memory, sizeof memory > 2 * page ? sizeof memory : 0, 0), ENOSYS);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(cpus_are_of_the_node_that_has_all_of_them, make_root, remove_root),
      cmocka_unit_test_setup_teardown(where_one_node_has_memory_there_is_nothing_to_choose, make_root, remove_root),
      cmocka_unit_test_setup_teardown(files_that_cannot_be_read_place_nothing, make_root, remove_root),
      cmocka_unit_test_setup_teardown(whole_pages_between_the_ends_are_asked_for, make_root, remove_root),
      cmocka_unit_test_setup_teardown(the_kernel_takes_it_or_says_why_not, make_root, remove_root),
      cmocka_unit_test_setup_teardown(what_makes_no_sense_is_not_asked, make_root, remove_root),
      cmocka_unit_test_setup_teardown(a_policy_of_the_process_is_seen, make_root, remove_root),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
