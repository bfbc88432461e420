/* What NVML says of a GPU once, when devices are looked for. Any part of it may be missing. */
#include "device/cuda/nvml.h"

#include "device/cuda/nvml_calls.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

static void near_read(const even_nvml *from, even_nvml_device device, even_gpu *gpu) {
  unsigned long words[EVEN_GPU_NEAR_WORDS] = {0};
  _Static_assert(sizeof(unsigned long) == sizeof(uint64_t), "NVML's masks have 64 CPUs a word on 64-bit Linux");
  if (from->affinity != NULL && from->affinity(device, EVEN_GPU_NEAR_WORDS, words) == 0) {
    memcpy(gpu->near, words, sizeof words);
  }
}

static void gpu_complete(const even_nvml *from, even_gpu *gpu) {
  even_nvml_device device = NULL;
  even_nvml_memory memory;
  even_nvml_utilization utilization;
  unsigned value = 0;
  if (gpu->pci_bus[0] == '\0' || from->by_bus(gpu->pci_bus, &device) != 0) {
    return;
  }
  if (from->temperature != NULL && from->temperature(device, EVEN_NVML_SENSOR_GPU, &value) == 0) {
    gpu->temperature_celsius = value;
  }
  if (from->power != NULL && from->power(device, &value) == 0) {
    gpu->power_watts = value / 1000.0;
  }
  if (from->power_limit != NULL && from->power_limit(device, &value) == 0) {
    gpu->power_limit_watts = value / 1000.0;
  }
  if (from->clock != NULL && from->clock(device, EVEN_NVML_CLOCK_SM, &value) == 0 && value < INT_MAX) {
    gpu->clock_mhz = (int)value;
  }
  if (from->memory != NULL && from->memory(device, &memory) == 0) {
    gpu->memory_free_bytes = memory.free;
  }
  if (from->utilization != NULL && from->utilization(device, &utilization) == 0) {
    gpu->utilization_percent = utilization.gpu;
  }
  near_read(from, device, gpu);
}

static void list_complete(const even_nvml *from, even_gpu_list *list) {
  int code = from->init();
  if (code != 0) {
    (void)snprintf(list->note, sizeof list->note,
                   "NVML does not start (error %d): clocks, temperature and power are unknown", code);
    return;
  }
  if (from->driver_version == NULL || from->driver_version(list->driver, sizeof list->driver) != 0) {
    list->driver[0] = '\0';
  }
  for (size_t i = 0; i < list->count; i++) {
    gpu_complete(from, &list->items[i]);
  }
  (void)from->shutdown();
}

void even_nvml_complete(const even_device_source *source, even_gpu_list *list) {
  even_nvml from;
  even_status opened = even_nvml_open(source->nvml_library, &from);
  if (opened == EVEN_ERR_NOT_FOUND) {
    (void)snprintf(list->note, sizeof list->note,
                   "%s was not found: clocks, temperature and power of the GPUs are unknown", source->nvml_library);
  } else if (opened != EVEN_OK || from.by_bus == NULL) {
    (void)snprintf(list->note, sizeof list->note, "%s is too old: clocks, temperature and power are unknown",
                   source->nvml_library);
  } else {
    list_complete(&from, list);
  }
  even_nvml_close(&from);
}
