/* The usable part of a host's topology, from hwloc. */
#include "device/topology.h"

#include "base/alloc.h"
#include "base/fail.h"

#include <errno.h>
#include <hwloc.h>
#include <stdio.h>
#include <string.h>

static even_status source_set(hwloc_topology_t hwloc, const even_device_source *source) {
  if (source->synthetic != NULL && hwloc_topology_set_synthetic(hwloc, source->synthetic) != 0) {
    return even_fail(EVEN_ERR_INPUT, "\"%s\" does not describe a machine in hwloc's words", source->synthetic);
  }
  if (source->xml != NULL && hwloc_topology_set_xml(hwloc, source->xml) != 0) {
    return even_fail(EVEN_ERR_INPUT, "%s is not a topology that hwloc recorded", source->xml);
  }
  return EVEN_OK;
}

/* Leaves only the CPUs that this process may use: hwloc itself honours the cgroup's cpuset, the affinity it does not.
 */
static even_status restrict_to_allowed(hwloc_topology_t hwloc, const even_device_source *source) {
  hwloc_bitmap_t allowed = hwloc_bitmap_alloc();
  even_status status = EVEN_OK;
  if (allowed == NULL) {
    return even_fail(EVEN_ERR_MEMORY, "no memory for a set of CPUs");
  }
  if (source->allowed != NULL) {
    if (hwloc_bitmap_list_sscanf(allowed, source->allowed) != 0) {
      status = even_fail(EVEN_ERR_INPUT, "\"%s\" is not a list of CPUs", source->allowed);
    }
  } else if (!hwloc_topology_is_thissystem(hwloc) || hwloc_get_cpubind(hwloc, allowed, HWLOC_CPUBIND_PROCESS) != 0) {
    hwloc_bitmap_fill(allowed);
  }
  if (status == EVEN_OK && !hwloc_bitmap_intersects(allowed, hwloc_topology_get_allowed_cpuset(hwloc))) {
    status = even_fail(EVEN_ERR_DEVICE, "this process may use no CPU of this host");
  }
  if (status == EVEN_OK && hwloc_topology_restrict(hwloc, allowed, 0) != 0) {
    status = even_fail_errno(errno, "the topology cannot be restricted to the CPUs that this process may use");
  }
  hwloc_bitmap_free(allowed);
  return status;
}

static even_status nodes_read(hwloc_topology_t hwloc, even_topology *out) {
  int count = hwloc_get_nbobjs_by_type(hwloc, HWLOC_OBJ_NUMANODE);
  EVEN_TRY(EVEN_NEW_ARRAY(&out->nodes, count > 0 ? (size_t)count : 1));
  for (int i = 0; i < count; i++) {
    hwloc_obj_t node = hwloc_get_obj_by_type(hwloc, HWLOC_OBJ_NUMANODE, (unsigned)i);
    if (hwloc_bitmap_iszero(node->cpuset)) {
      continue; /* memory without cores: no device of its own */
    }
    even_numa_node *to = &out->nodes[out->node_count++];
    to->os_index = (int)node->os_index;
    to->memory_bytes = node->attr->numanode.local_memory;
  }
  if (out->node_count == 0) {
    out->nodes[out->node_count++] = (even_numa_node){.os_index = 0};
  }
  return EVEN_OK;
}

static int node_of(hwloc_obj_t core, const even_topology *topology) {
  for (size_t i = 0; i < topology->node_count; i++) {
    if (core->nodeset != NULL && hwloc_bitmap_isset(core->nodeset, (unsigned)topology->nodes[i].os_index)) {
      return (int)i;
    }
  }
  return 0;
}

static int package_of(hwloc_topology_t hwloc, hwloc_obj_t core) {
  hwloc_obj_t package = hwloc_get_ancestor_obj_by_type(hwloc, HWLOC_OBJ_PACKAGE, core);
  return package == NULL ? 0 : (int)package->logical_index;
}

static int efficiency_of(hwloc_topology_t hwloc, hwloc_obj_t core) {
  if (hwloc_cpukinds_get_nr(hwloc, 0) < 2) {
    return -1;
  }
  return hwloc_cpukinds_get_by_cpuset(hwloc, core->cpuset, 0);
}

static even_status cores_read(hwloc_topology_t hwloc, even_topology *out) {
  /* some virtual machines show hardware threads but no cores */
  int core_count = hwloc_get_nbobjs_by_type(hwloc, HWLOC_OBJ_CORE);
  hwloc_obj_type_t type = core_count > 0 ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
  core_count = hwloc_get_nbobjs_by_type(hwloc, type);
  int cpu_count = hwloc_get_nbobjs_by_type(hwloc, HWLOC_OBJ_PU);
  if (core_count <= 0 || cpu_count <= 0) {
    return even_fail(EVEN_ERR_DEVICE, "hwloc finds no CPU on this host");
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&out->cores, (size_t)core_count));
  EVEN_TRY(EVEN_NEW_ARRAY(&out->cpus, (size_t)cpu_count));
  for (int i = 0; i < core_count; i++) {
    hwloc_obj_t core = hwloc_get_obj_by_type(hwloc, type, (unsigned)i);
    even_core *to = &out->cores[out->core_count++];
    *to = (even_core){.first = out->cpu_count,
                      .package = package_of(hwloc, core),
                      .numa = node_of(core, out),
                      .efficiency = efficiency_of(hwloc, core)};
    int cpu = -1;
    while ((cpu = hwloc_bitmap_next(core->cpuset, cpu)) >= 0 && out->cpu_count < (size_t)cpu_count) {
      out->cpus[out->cpu_count++] = cpu;
      to->cpu_count++;
    }
    out->nodes[to->numa].core_count++;
  }
  return EVEN_OK;
}

static uint64_t cache_bytes(hwloc_topology_t hwloc, hwloc_obj_type_t type) {
  hwloc_obj_t cache = hwloc_get_obj_by_type(hwloc, type, 0);
  return cache == NULL ? 0 : cache->attr->cache.size;
}

static void words_read(hwloc_topology_t hwloc, even_topology *out) {
  hwloc_obj_t package = hwloc_get_obj_by_type(hwloc, HWLOC_OBJ_PACKAGE, 0);
  const char *model = package == NULL ? NULL : hwloc_obj_get_info_by_name(package, "CPUModel");
  if (model == NULL) {
    model = hwloc_obj_get_info_by_name(hwloc_get_root_obj(hwloc), "CPUModel");
  }
  (void)snprintf(out->model, sizeof out->model, "%s", model != NULL ? model : "CPU of unknown model");
  int packages = hwloc_get_nbobjs_by_type(hwloc, HWLOC_OBJ_PACKAGE);
  out->package_count = packages > 0 ? (size_t)packages : 1;
  out->l1_data_bytes = cache_bytes(hwloc, HWLOC_OBJ_L1CACHE);
  out->l2_bytes = cache_bytes(hwloc, HWLOC_OBJ_L2CACHE);
  out->l3_bytes = cache_bytes(hwloc, HWLOC_OBJ_L3CACHE);
  int l3 = hwloc_get_nbobjs_by_type(hwloc, HWLOC_OBJ_L3CACHE);
  out->l3_count = l3 > 0 ? (size_t)l3 : 0;
}

static even_status read_all(hwloc_topology_t hwloc, const even_device_source *source, even_topology *out) {
  EVEN_TRY(source_set(hwloc, source));
  if (hwloc_topology_load(hwloc) != 0) {
    return even_fail_errno(errno, "hwloc cannot read the topology of this host");
  }
  int host_cpus = hwloc_bitmap_weight(hwloc_topology_get_complete_cpuset(hwloc));
  out->host_cpu_count = host_cpus > 0 ? (size_t)host_cpus : 0;
  out->memory_bytes = hwloc_get_root_obj(hwloc)->total_memory;
  EVEN_TRY(restrict_to_allowed(hwloc, source));
  EVEN_TRY(nodes_read(hwloc, out));
  EVEN_TRY(cores_read(hwloc, out));
  words_read(hwloc, out);
  return EVEN_OK;
}

even_status even_topology_read(const even_device_source *source, even_topology *out) {
  hwloc_topology_t hwloc;
  *out = (even_topology){0};
  if (hwloc_topology_init(&hwloc) != 0) {
    return even_fail(EVEN_ERR_MEMORY, "hwloc cannot start");
  }
  even_status status = read_all(hwloc, source, out);
  hwloc_topology_destroy(hwloc);
  return status;
}

void even_topology_free(even_topology *topology) {
  even_free(topology->cores);
  even_free(topology->cpus);
  even_free(topology->nodes);
  *topology = (even_topology){0};
}
