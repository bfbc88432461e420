/* The cores, NUMA nodes and caches of a host that this process may use, read once through hwloc. */
#ifndef EVEN_DEVICE_TOPOLOGY_H
#define EVEN_DEVICE_TOPOLOGY_H

#include "device/source.h"

/* One physical core; its hardware threads are cpus[first … first + cpu_count) of the topology. */
typedef struct even_core {
  size_t first;
  size_t cpu_count;
  int package;
  int numa;       /* index into nodes */
  int efficiency; /* of hybrid processors: 0 the most efficient kind, higher faster; -1 where all are alike */
} even_core;

typedef struct even_numa_node {
  int os_index;
  uint64_t memory_bytes; /* 0 where unknown */
  size_t core_count;     /* that may be used */
} even_numa_node;

typedef struct even_topology {
  even_core *cores; /* that may be used, in hwloc's order: cpu:K is cores[K] */
  size_t core_count;
  int32_t *cpus; /* OS numbers, core by core */
  size_t cpu_count;
  even_numa_node *nodes; /* those with usable cores: numa:K is nodes[K] */
  size_t node_count;
  size_t package_count;
  size_t host_cpu_count; /* hardware threads of the host, also those that may not be used; 0 where unknown */
  char model[128];       /* of the first package */
  uint64_t l1_data_bytes, l2_bytes, l3_bytes; /* one cache of each level; 0 where there is none */
  size_t l3_count;
  uint64_t memory_bytes; /* of the host, 0 where unknown */
} even_topology;

/* Errors: EVEN_ERR_INPUT (a synthetic text or XML that hwloc refuses), EVEN_ERR_DEVICE (no CPU is left),
 * EVEN_ERR_MEMORY. Free with even_topology_free, also after an error. */
even_status even_topology_read(const even_device_source *source, even_topology *out) EVEN_MUST_USE;
void even_topology_free(even_topology *topology);

#endif
