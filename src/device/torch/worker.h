/* Any device that torch knows, measured by torch itself: in a Python process of ours (evenstep.profile_worker), since
 * this program does not link torch. */
#ifndef EVEN_DEVICE_TORCH_WORKER_H
#define EVEN_DEVICE_TORCH_WORKER_H

#include "device/device.h"
#include "os/dialogue.h"

typedef struct even_torch_worker {
  even_dialogue dialogue;
  bool running;
  char version[64]; /* of torch */
} even_torch_worker;

/* GB/s are 10^9 bytes, GFLOP/s 10^9 operations a second; NaN: not measured. */
typedef struct even_torch_speed {
  double matmul_fp32_gflops;
  double matmul_bf16_gflops;
  double memory_bandwidth_gb_per_second; /* of a GPU: copying, bytes read plus written */
  double memory_read_gb_per_second;
} even_torch_speed;

/* Starts the interpreter; torch is imported while the caller does something else. `out` must stay in place until
 * even_torch_worker_end. */
even_status even_torch_worker_start(const char *python, even_torch_worker *out) EVEN_MUST_USE;
/* Waits until torch is there. EVEN_ERR_NOT_FOUND with the interpreter's words where it (or this package) is missing. */
even_status even_torch_worker_ready(even_torch_worker *worker) EVEN_MUST_USE;
/* Measures one device with `threads` threads for about `seconds`. Errors: EVEN_ERR_DEVICE (torch cannot use it),
 * EVEN_ERR_TIMEOUT, EVEN_ERR_SYSTEM (the worker died). */
even_status even_torch_worker_measure(even_torch_worker *worker, const even_device *device, size_t threads,
                                      double seconds, even_torch_speed *out) EVEN_MUST_USE;
/* Fine when it is not running. */
void even_torch_worker_end(even_torch_worker *worker);

#endif
