/* /sys/devices/system/node, mbind(2), get_mempolicy(2): what libnuma does, without it. */
#include "os/numa.h"

#include "os/calls.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/mempolicy.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NODES "/sys/devices/system/node"

enum { MOST_NODES = 1024, WORD_BITS = 8 * (int)sizeof(unsigned long), LIST_BYTES = 16384, PAGE_BYTES = 4096 };

/* Calls `each` for every number of a list ("0-3,8\n"), until it returns false. */
static void each_number(const char *list, bool (*each)(void *context, unsigned long number), void *context) {
  bool more = true;
  while (more && *list != '\0') {
    char *end = NULL;
    unsigned long first = strtoul(list, &end, 10);
    unsigned long last = first;
    if (end == list) {
      return; /* an empty list, or none */
    }
    if (*end == '-') {
      last = strtoul(end + 1, &end, 10);
    }
    for (unsigned long number = first; more && number <= last && number < INT_MAX; number++) {
      more = each(context, number);
    }
    list = *end == ',' ? end + 1 : "";
  }
}

/* A file below NODES; "" where it cannot be read, or is longer than such a list. Without memory of the heap: what fails
 * here is no failure of the caller's. */
static void read_list(const char *name, char out[LIST_BYTES]) {
  char path[128];
  size_t length = 0;
  ssize_t got = 0;
  int kept = errno;
  (void)snprintf(path, sizeof path, NODES "/%s", name);
  int fd = even_os.open(path, O_RDONLY | O_CLOEXEC, 0);
  if (fd >= 0) {
    do {
      got = even_os.read(fd, out + length, LIST_BYTES - 1 - length);
      length += got > 0 ? (size_t)got : 0;
    } while (got > 0 || (got < 0 && errno == EINTR));
    (void)even_os.close(fd);
  }
  bool whole = fd >= 0 && got == 0 && length < LIST_BYTES - 1;
  out[whole ? length : 0] = '\0';
  errno = kept;
}

typedef struct search {
  const uint64_t *cpus;
  size_t words;
  size_t nodes; /* with memory */
  int found;    /* the first of them that has all of the CPUs; -1: none */
  size_t inside;
} search;

static bool is_wanted(const search *one, unsigned long cpu) {
  return cpu / 64 < one->words && (one->cpus[cpu / 64] >> (cpu % 64) & 1u) != 0;
}

static bool count_inside(void *context, unsigned long cpu) {
  search *one = context;
  one->inside += is_wanted(one, cpu);
  return cpu / 64 < one->words;
}

static size_t count_wanted(const search *one) {
  size_t count = 0;
  for (size_t i = 0; i < one->words; i++) {
    count += (size_t)__builtin_popcountll(one->cpus[i]);
  }
  return count;
}

static bool look_at_node(void *context, unsigned long node) {
  search *one = context;
  char cpus[LIST_BYTES];
  char name[64];
  size_t wanted = count_wanted(one);
  one->nodes++;
  one->inside = 0;
  if (one->found < 0 && wanted > 0 && node < MOST_NODES) {
    (void)snprintf(name, sizeof name, "node%lu/cpulist", node);
    read_list(name, cpus);
    each_number(cpus, count_inside, one);
    one->found = one->inside == wanted ? (int)node : -1;
  }
  return node < MOST_NODES;
}

even_numa_answer even_numa_of_cpus(const uint64_t *cpus, size_t words, int *node) {
  search one = {.cpus = cpus, .words = words, .found = -1};
  char with_memory[LIST_BYTES];
  read_list("has_memory", with_memory);
  each_number(with_memory, look_at_node, &one);
  *node = one.nodes > 1 ? one.found : -1;
  return one.nodes <= 1 ? EVEN_NUMA_ONE : one.found >= 0 ? EVEN_NUMA_FOUND : EVEN_NUMA_SEVERAL;
}

int even_numa_has_policy(bool *out) {
  int mode = MPOL_DEFAULT;
  int kept = errno;
  int failed = even_os.get_mempolicy(&mode, NULL, 0, NULL, 0) == 0 ? 0 : errno;
  errno = kept;
  *out = failed == 0 && mode != MPOL_DEFAULT;
  return failed;
}

int even_numa_prefer(void *address, size_t bytes, int node) {
  unsigned long nodes[MOST_NODES / WORD_BITS] = {0};
  long said = even_os.sysconf(_SC_PAGESIZE);
  uintptr_t page = said > 0 ? (uintptr_t)said : PAGE_BYTES;
  uintptr_t begin = ((uintptr_t)address + page - 1) / page * page;
  uintptr_t end = ((uintptr_t)address + bytes) / page * page;
  int kept = errno;
  if (node < 0 || node >= MOST_NODES) {
    return EINVAL;
  }
  if (begin >= end) {
    return 0; /* no whole page */
  }
  nodes[node / WORD_BITS] |= 1ul << (node % WORD_BITS);
  /* PREFERRED and not BIND: where the node is full, others have to do. The kernel takes one bit less than it is told.
   */
  int failed = even_os.mbind((char *)address + (begin - (uintptr_t)address), end - begin, MPOL_PREFERRED, nodes,
                             MOST_NODES + 1ul, 0) == 0
                   ? 0
                   : errno;
  errno = kept;
  return failed;
}
