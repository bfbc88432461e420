/* Memory bandwidth and, where torch is missing, fp32 matrix products of a CPU device, measured in C. */
#ifndef EVEN_DEVICE_CPU_SPEED_H
#define EVEN_DEVICE_CPU_SPEED_H

#include "device/device.h"

typedef struct even_cpu_bandwidth {
  double copy_gb_per_second; /* 10^9 bytes read plus written (as STREAM counts: McCalpin 1995) */
  double read_gb_per_second;
  double cpu_fraction; /* of the time, how much the threads really ran: less under a quota or beside busy neighbours */
} even_cpu_bandwidth;

/* Each takes about `seconds` and counts all that was done in all of that time, so that a CPU quota shows. `threads`
 * run at once on the device's CPUs; `cache_bytes` is the last level's, of which the buffers are a multiple. Errors:
 * EVEN_ERR_MEMORY, EVEN_ERR_SYSTEM. */
even_status even_cpu_bandwidth_measure(const even_device *device, size_t threads, uint64_t cache_bytes, double seconds,
                                       even_cpu_bandwidth *out) EVEN_MUST_USE;

/* fp32 matrix products, in 10^9 floating-point operations a second. A plain kernel: well below what torch reaches, but
 * below by the same factor on like devices. */
even_status even_cpu_matmul_measure(const even_device *device, size_t threads, double seconds,
                                    double *gflops) EVEN_MUST_USE;

#endif
