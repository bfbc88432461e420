/* NVML (nvml.h's ABI: "NVML API Reference Guide", NVIDIA). Any part of it may be missing. */
#include "device/cuda/nvml.h"

#include "os/library.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

enum { CLOCK_SM = 1, SENSOR_GPU = 0 };

typedef struct handle *nvml_device; /* opaque to us */

typedef struct nvml_memory {
  unsigned long long total, free, used;
} nvml_memory;

typedef struct nvml_utilization {
  unsigned gpu, memory;
} nvml_utilization;

typedef struct nvml {
  even_library library;
  int (*init)(void);
  int (*shutdown)(void);
  int (*driver_version)(char *out, unsigned size);
  int (*by_bus)(const char *bus, nvml_device *out);
  int (*temperature)(nvml_device device, int sensor, unsigned *out);
  int (*power)(nvml_device device, unsigned *milliwatts);
  int (*power_limit)(nvml_device device, unsigned *milliwatts);
  int (*clock)(nvml_device device, int clock, unsigned *mhz);
  int (*memory)(nvml_device device, nvml_memory *out);
  int (*utilization)(nvml_device device, nvml_utilization *out);
  int (*affinity)(nvml_device device, unsigned words, unsigned long *out);
} nvml;

static void load(const nvml *from, void *function, const char *name) {
  void *symbol = even_library_symbol(&from->library, name);
  memcpy(function, &symbol, sizeof symbol);
}

static void symbols_load(nvml *to) {
  load(to, &to->init, "nvmlInit_v2");
  load(to, &to->shutdown, "nvmlShutdown");
  load(to, &to->driver_version, "nvmlSystemGetDriverVersion");
  load(to, &to->by_bus, "nvmlDeviceGetHandleByPciBusId_v2");
  load(to, &to->temperature, "nvmlDeviceGetTemperature");
  load(to, &to->power, "nvmlDeviceGetPowerUsage");
  load(to, &to->power_limit, "nvmlDeviceGetEnforcedPowerLimit");
  load(to, &to->clock, "nvmlDeviceGetClockInfo");
  load(to, &to->memory, "nvmlDeviceGetMemoryInfo");
  load(to, &to->utilization, "nvmlDeviceGetUtilizationRates");
  load(to, &to->affinity, "nvmlDeviceGetCpuAffinity");
}

static void near_read(const nvml *from, nvml_device device, even_gpu *gpu) {
  unsigned long words[EVEN_GPU_NEAR_WORDS] = {0};
  _Static_assert(sizeof(unsigned long) == sizeof(uint64_t), "NVML's masks have 64 CPUs a word on 64-bit Linux");
  if (from->affinity != NULL && from->affinity(device, EVEN_GPU_NEAR_WORDS, words) == 0) {
    memcpy(gpu->near, words, sizeof words);
  }
}

static void gpu_complete(const nvml *from, even_gpu *gpu) {
  nvml_device device = NULL;
  nvml_memory memory;
  nvml_utilization utilization;
  unsigned value = 0;
  if (gpu->pci_bus[0] == '\0' || from->by_bus(gpu->pci_bus, &device) != 0) {
    return;
  }
  if (from->temperature != NULL && from->temperature(device, SENSOR_GPU, &value) == 0) {
    gpu->temperature_celsius = value;
  }
  if (from->power != NULL && from->power(device, &value) == 0) {
    gpu->power_watts = value / 1000.0;
  }
  if (from->power_limit != NULL && from->power_limit(device, &value) == 0) {
    gpu->power_limit_watts = value / 1000.0;
  }
  if (from->clock != NULL && from->clock(device, CLOCK_SM, &value) == 0 && value < INT_MAX) {
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

void even_nvml_complete(const even_device_source *source, even_gpu_list *list) {
  nvml from = {0};
  if (even_library_open(source->nvml_library, &from.library) != EVEN_OK) {
    (void)snprintf(list->note, sizeof list->note,
                   "%s was not found: clocks, temperature and power of the GPUs are unknown", source->nvml_library);
    return;
  }
  symbols_load(&from);
  if (from.init == NULL || from.shutdown == NULL || from.by_bus == NULL) {
    (void)snprintf(list->note, sizeof list->note, "%s is too old: clocks, temperature and power are unknown",
                   source->nvml_library);
  } else {
    int code = from.init();
    if (code != 0) {
      (void)snprintf(list->note, sizeof list->note,
                     "NVML does not start (error %d): clocks, temperature and power are unknown", code);
    } else {
      if (from.driver_version == NULL || from.driver_version(list->driver, sizeof list->driver) != 0) {
        list->driver[0] = '\0';
      }
      for (size_t i = 0; i < list->count; i++) {
        gpu_complete(&from, &list->items[i]);
      }
      (void)from.shutdown();
    }
  }
  even_library_close(&from.library);
}
