/* The CUDA driver of the device room: every visible NVIDIA GPU is a device. */
#include "base/alloc.h"
#include "base/fail.h"
#include "device/cuda/gpu.h"
#include "device/driver.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static bool near_to(const even_gpu *gpu, int32_t cpu) {
  return cpu < EVEN_GPU_NEAR_WORDS * 64 && (gpu->near[cpu / 64] >> (cpu % 64) & 1) != 0;
}

/* The cores near the GPU; all of them where none is known to be near. */
static even_status cores_near(const even_device_context *context, const even_gpu *gpu, even_device *out) {
  const even_topology *topology = &context->topology;
  unsigned char *chosen = NULL;
  bool any = false;
  EVEN_TRY(EVEN_NEW_ARRAY(&chosen, topology->core_count));
  for (size_t i = 0; i < topology->core_count; i++) {
    chosen[i] = near_to(gpu, topology->cpus[topology->cores[i].first]);
    any = any || chosen[i] != 0;
  }
  if (!any) {
    memset(chosen, 1, topology->core_count);
  }
  char name[32];
  (void)snprintf(name, sizeof name, "cuda:%d", gpu->index);
  even_status status = even_cpu_device(context, name, chosen, out);
  even_free(chosen);
  return status;
}

static even_status append(const even_device_context *context, even_device_list *out) {
  even_gpu_list gpus;
  even_status status = even_gpu_list_read(context->source, &gpus);
  for (size_t i = 0; i < gpus.count && status == EVEN_OK; i++) {
    even_device device = {0};
    status = cores_near(context, &gpus.items[i], &device);
    if (status != EVEN_OK) {
      even_device_free(&device);
      break;
    }
    device.kind = EVEN_DEVICE_CUDA;
    device.cuda_index = gpus.items[i].index;
    device.memory_bytes = gpus.items[i].memory_bytes;
    (void)snprintf(device.model, sizeof device.model, "%s", gpus.items[i].name);
    (void)snprintf(device.uuid, sizeof device.uuid, "%s", gpus.items[i].uuid);
    status = even_device_list_add(out, &device);
  }
  even_gpu_list_free(&gpus);
  return status;
}

const even_device_driver even_cuda_driver = {.name = "cuda", .kind = EVEN_DEVICE_CUDA, .append = append};
