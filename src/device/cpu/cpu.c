/* The CPU driver: every core and every NUMA node of this host is a device. */
#include "base/alloc.h"
#include "base/fail.h"
#include "device/driver.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* `node` >= 0: all of that node. */
static uint64_t memory_of(const even_device_context *context, int node) {
  uint64_t bytes = context->memory_bytes;
  if (node >= 0 && context->topology.node_count > 1 && context->topology.nodes[node].memory_bytes > 0) {
    bytes = context->topology.nodes[node].memory_bytes;
  }
  return bytes < context->limits.memory_bytes ? bytes : context->limits.memory_bytes;
}

even_status even_cpu_device(const even_device_context *context, const char *name, const unsigned char *chosen,
                            even_device *out) {
  const even_topology *topology = &context->topology;
  double cores = 0;
  int node = -1;
  bool several_nodes = false;
  *out = (even_device){.kind = EVEN_DEVICE_CPU, .numa_node = -1, .cuda_index = -1, .efficiency = -1};
  EVEN_TRY(EVEN_NEW_ARRAY(&out->cpus, topology->cpu_count));
  for (size_t i = 0; i < topology->core_count; i++) {
    const even_core *core = &topology->cores[i];
    if (chosen[i] == 0) {
      continue;
    }
    memcpy(&out->cpus[out->cpu_count], &topology->cpus[core->first], core->cpu_count * sizeof *out->cpus);
    out->cpu_count += core->cpu_count;
    several_nodes = several_nodes || (node >= 0 && node != core->numa);
    node = core->numa;
    out->efficiency = cores > 0 && out->efficiency != core->efficiency ? -1 : core->efficiency;
    cores += 1;
  }
  bool whole_node = !several_nodes && node >= 0 && (size_t)cores == topology->nodes[node].core_count;
  out->numa_node = several_nodes || node < 0 ? -1 : topology->nodes[node].os_index;
  out->cores = cores < context->limits.cpu_cores ? cores : context->limits.cpu_cores;
  out->memory_bytes = memory_of(context, whole_node ? node : -1);
  (void)snprintf(out->name, sizeof out->name, "%s", name);
  (void)snprintf(out->model, sizeof out->model, "%s", topology->model);
  return EVEN_OK;
}

/* Appends one device of the cores [first, first + count) for which numa is `node` (-1: any). */
static even_status append_one(const even_device_context *context, unsigned char *chosen, size_t first, size_t count,
                              int node, const char *name, even_device_list *out) {
  even_device device;
  memset(chosen, 0, context->topology.core_count);
  for (size_t i = first; i < first + count; i++) {
    chosen[i] = node < 0 || context->topology.cores[i].numa == node;
  }
  even_status status = even_cpu_device(context, name, chosen, &device);
  if (status != EVEN_OK) {
    even_device_free(&device);
    return status;
  }
  return even_device_list_add(out, &device);
}

static even_status append(const even_device_context *context, even_device_list *out) {
  const even_topology *topology = &context->topology;
  unsigned char *chosen = NULL;
  char name[32];
  EVEN_TRY(EVEN_NEW_ARRAY(&chosen, topology->core_count));
  even_status status = EVEN_OK;
  for (size_t i = 0; i < topology->core_count && status == EVEN_OK; i++) {
    (void)snprintf(name, sizeof name, "cpu:%zu", i);
    status = append_one(context, chosen, i, 1, -1, name, out);
  }
  for (size_t i = 0; i < topology->node_count && status == EVEN_OK; i++) {
    (void)snprintf(name, sizeof name, "numa:%zu", i);
    status = append_one(context, chosen, 0, topology->core_count, (int)i, name, out);
  }
  even_free(chosen);
  return status;
}

const even_device_driver even_cpu_driver = {.name = "cpu", .kind = EVEN_DEVICE_CPU, .append = append};
