/* The NVIDIA GPUs of this host, through the driver (libcuda) and NVML, both opened at run time. */
#ifndef EVEN_DEVICE_CUDA_GPU_H
#define EVEN_DEVICE_CUDA_GPU_H

#include "device/source.h"

enum { EVEN_GPU_NEAR_WORDS = 64 }; /* of 64 CPUs each */

typedef struct even_gpu {
  int index; /* in the driver's order, under CUDA_VISIBLE_DEVICES */
  char name[128];
  char uuid[64]; /* "GPU-…": what CUDA_VISIBLE_DEVICES takes, too */
  char pci_bus[32];
  uint64_t memory_bytes;
  uint64_t memory_free_bytes; /* 0 where NVML does not say */
  int multiprocessors;
  int capability_major, capability_minor;
  int clock_mhz, clock_most_mhz; /* now (0: unknown) and at most */
  int memory_clock_mhz;
  /* NaN where NVML is absent or does not say */
  double temperature_celsius;
  double power_watts, power_limit_watts;
  double utilization_percent;
  uint64_t near[EVEN_GPU_NEAR_WORDS]; /* CPUs near the GPU, a bit each; all zero: unknown */
} even_gpu;

typedef struct even_gpu_list {
  even_gpu *items;
  size_t count;
  char driver[80];  /* "570.86.10"; "" where NVML is absent */
  int cuda_version; /* of the driver: 12080 is 12.8; 0 without a driver */
  char note[256];   /* why there is no GPU, or what is missing of the rest; "" when all is well */
} even_gpu_list;

/* A host without GPUs, driver or NVML has an empty list (or unknown temperatures) and a note: no error. Errors:
 * EVEN_ERR_MEMORY. Not for several threads at once. Free with even_gpu_list_free, also after an error. */
even_status even_gpu_list_read(const even_device_source *source, even_gpu_list *out) EVEN_MUST_USE;
void even_gpu_list_free(even_gpu_list *list);

#endif
