/* What NVIDIA's management library knows of a GPU beyond the driver: clocks, temperature, power, near CPUs. */
#ifndef EVEN_DEVICE_CUDA_NVML_H
#define EVEN_DEVICE_CUDA_NVML_H

#include "device/cuda/gpu.h"

/* Fills in what NVML knows of list's GPUs (found by their PCI bus); without NVML it adds a note. */
void even_nvml_complete(const even_device_source *source, even_gpu_list *list);

#endif
