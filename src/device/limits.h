/* What the control groups of this process leave it of the host: CPU time and memory. */
#ifndef EVEN_DEVICE_LIMITS_H
#define EVEN_DEVICE_LIMITS_H

#include "device/source.h"

typedef struct even_limits {
  double cpu_cores;      /* CPU time in cores (half a core is 0.5); INFINITY where there is no quota */
  uint64_t memory_bytes; /* UINT64_MAX where there is no limit */
  char cpu_folder[256];  /* of the control group whose quota is the tightest; "" without one */
  char memory_folder[256];
} even_limits;

/* The tightest quota and limit between this process's control group and the top of what it can see, over cgroup v1
 * and v2 (Documentation/admin-guide/cgroup-v2.rst: cpu.max, memory.max; scheduler/sched-bwc.rst: cpu.cfs_quota_us).
 * A host without control groups has no limits: that is no error. Errors: EVEN_ERR_MEMORY. */
even_status even_limits_read(const even_device_source *source, even_limits *out) EVEN_MUST_USE;

#endif
