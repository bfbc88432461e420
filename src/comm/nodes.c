/* On which NUMA node a rank's part of the segment lies: on that of its own CPUs. It writes its slots, its staging, the
 * rings of what it sends and its arena first and most; what others read of these crosses between nodes once, wherever
 * it lies. So would a first touch have it, but for what others touch first, and pages that a reader fills with zeros.
 */
#include "base/fail.h"
#include "base/text.h"
#include "comm/group.h"
#include "os/numa.h"

#include <stdio.h>
#include <string.h>

/* Sets the policy of one part; the first errno is kept. */
static void prefer(const even_comm *comm, size_t offset, size_t bytes, int node, int *failed) {
  if (*failed == 0 && bytes > 0) {
    *failed = even_numa_prefer(even_comm_memory(comm) + offset, bytes, node);
  }
}

static int prefer_all(const even_comm *comm, int node) {
  const even_comm_layout *layout = &comm->layout;
  size_t rank = (size_t)comm->rank;
  size_t rings = layout->ring_bytes == 0 ? 0 : (size_t)comm->ranks * layout->channel_stride;
  int failed = 0;
  prefer(comm, layout->flights + rank * layout->flight_stride, layout->flight_stride, node, &failed);
  prefer(comm, layout->slots + rank * layout->slot_stride, layout->slot_stride, node, &failed);
  prefer(comm, layout->stagings + rank * layout->staging_stride, layout->staging_stride, node, &failed);
  prefer(comm, layout->channels + rank * rings, rings, node, &failed);
  prefer(comm, layout->arenas + rank * layout->arena_stride, layout->arena_stride, node, &failed);
  return failed;
}

static const char *place(even_comm *comm, int *failed) {
  even_comm_control *own = &comm->controls[comm->rank];
  char folder[64];
  bool has_policy = false;
  int node = -1;
  if (comm->memory.address == NULL) {
    return "its caller's memory";
  }
  switch (even_numa_of_cpus(own->cpus, EVEN_COMM_CPU_WORDS, &node)) {
    case EVEN_NUMA_ONE:
      return "one NUMA node";
    case EVEN_NUMA_SEVERAL:
      return "its CPUs are of several NUMA nodes: pin ranks to have it placed";
    default:
      break;
  }
  if (even_shared_memory_is_file(comm->memory.fd, folder, sizeof folder)) {
    return "a file, whose pages are taken when it is made";
  }
  *failed = even_numa_has_policy(&has_policy);
  if (*failed == 0 && has_policy) {
    return "by the memory policy that this process was started with";
  }
  *failed = *failed == 0 ? prefer_all(comm, node) : *failed;
  if (*failed != 0) {
    return "the kernel does not let it be placed";
  }
  atomic_store(&own->node_and_one, (uint32_t)node + 1u);
  return NULL;
}

void even_nodes_place(even_comm *comm) {
  int failed = 0;
  const char *unplaced = place(comm, &failed);
  char buffer[96];
  comm->unplaced[0] = '\0';
  if (unplaced != NULL && failed != 0) {
    (void)snprintf(comm->unplaced, sizeof comm->unplaced, "%s (%s)", unplaced,
                   strerror_r(failed, buffer, sizeof buffer));
  } else if (unplaced != NULL) {
    (void)snprintf(comm->unplaced, sizeof comm->unplaced, "%s", unplaced);
  }
}

static uint32_t node_of(const even_comm *comm, int rank) {
  return rank < comm->ranks ? atomic_load(&comm->controls[rank].node_and_one) : 0;
}

/* Adds "rank 3 on node 1" or "ranks 0-2 on node 0", of ranks in a row on one node. */
static void add_run(even_text *out, bool first, int begin, int end, uint32_t node) {
  even_text_add(out, first ? "" : ", ");
  if (end == begin + 1) {
    even_text_format(out, "rank %d", begin);
  } else {
    even_text_format(out, "ranks %d-%d", begin, end - 1);
  }
  if (node == 0) {
    even_text_add(out, " where it is first written");
  } else {
    even_text_format(out, " on node %u", node - 1u);
  }
}

void even_nodes_describe(const even_comm *comm, char *text, size_t bytes) {
  even_text out = EVEN_TEXT_EMPTY;
  bool any = false;
  for (int rank = 0; rank < comm->ranks; rank++) {
    any = any || node_of(comm, rank) != 0;
  }
  if (any) {
    even_text_add(&out, "memory of ");
  }
  for (int begin = 0, end = 0; any && begin < comm->ranks; begin = end) {
    for (end = begin + 1; end < comm->ranks && node_of(comm, end) == node_of(comm, begin); end++) {
    }
    add_run(&out, begin == 0, begin, end, node_of(comm, begin));
  }
  if (!any) {
    even_text_format(&out, "memory where it is first written: %s",
                     comm->unplaced[0] == '\0' ? "not placed" : comm->unplaced);
  }
  (void)snprintf(text, bytes, "%s", even_text_string(&out));
  even_text_free(&out);
}
