/* Discovery: asks every driver for its devices. */
#include "device/device.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "device/driver.h"
#include "device/memory_facts.h"

const even_device_source even_device_source_host = {
    .root = "", .cuda_library = "libcuda.so.1", .nvml_library = "libnvidia-ml.so.1"};

static const even_device_driver *const drivers[] = {&even_cpu_driver, &even_cuda_driver};

enum { DRIVER_COUNT = sizeof drivers / sizeof drivers[0] };

even_status even_device_context_read(const even_device_source *source, even_device_context *out) {
  even_memory_facts memory;
  *out = (even_device_context){.source = source};
  EVEN_TRY(even_topology_read(source, &out->topology));
  EVEN_TRY(even_memory_facts_read(source, &memory));
  /* a virtual machine whose memory grew may say less of it per NUMA node (which hwloc adds up) than in all */
  out->memory_bytes = memory.total_bytes > 0 ? memory.total_bytes : out->topology.memory_bytes;
  return even_limits_read(source, &out->limits);
}

void even_device_context_free(even_device_context *context) {
  even_topology_free(&context->topology);
}

void even_device_free(even_device *device) {
  even_free(device->cpus);
  device->cpus = NULL;
}

void even_device_list_free(even_device_list *list) {
  for (size_t i = 0; i < list->count; i++) {
    even_device_free(&list->items[i]);
  }
  even_free(list->items);
  *list = (even_device_list){0};
}

even_status even_device_list_add(even_device_list *list, even_device *device) {
  even_status status = even_realloc((void **)&list->items, list->count + 1, sizeof *list->items);
  if (status != EVEN_OK) {
    even_device_free(device);
    return status;
  }
  list->items[list->count++] = *device;
  return EVEN_OK;
}

even_status even_device_append_all(const even_device_context *context, even_device_list *out) {
  for (size_t i = 0; i < DRIVER_COUNT; i++) {
    EVEN_TRY(drivers[i]->append(context, out));
  }
  return EVEN_OK;
}
