/* The seam between the device room and one kind of device: a driver finds the devices of its kind. */
#ifndef EVEN_DEVICE_DRIVER_H
#define EVEN_DEVICE_DRIVER_H

#include "device/limits.h"
#include "device/topology.h"

/* What every driver may look at; read once for a discovery. */
typedef struct even_device_context {
  const even_device_source *source;
  even_topology topology;
  even_limits limits;
  uint64_t memory_bytes; /* of the host */
} even_device_context;

typedef struct even_device_driver {
  const char *name; /* what stands before the colon: "cuda" */
  even_device_kind kind;
  /* Appends all devices of this kind; a host without any appends none and is no error. */
  even_status (*append)(const even_device_context *context, even_device_list *out);
} even_device_driver;

extern const even_device_driver even_cpu_driver;
extern const even_device_driver even_cuda_driver;

/* Topology and limits of `source`. Free with even_device_context_free, also after an error. */
even_status even_device_context_read(const even_device_source *source, even_device_context *out) EVEN_MUST_USE;
void even_device_context_free(even_device_context *context);

/* The devices of every driver, appended: each physical core, each NUMA node, each GPU. GPUs are looked for through the
 * driver and NVML, opened at run time; their absence is no error. */
even_status even_device_append_all(const even_device_context *context, even_device_list *out) EVEN_MUST_USE;

/* Moves `device` to the end of the list, which owns it then; on an error the device is freed. */
even_status even_device_list_add(even_device_list *list, even_device *device) EVEN_MUST_USE;
void even_device_free(even_device *device);

/* The cores with chosen[core] != 0 (topology.core_count of them) as one device. */
even_status even_cpu_device(const even_device_context *context, const char *name, const unsigned char *chosen,
                            even_device *out) EVEN_MUST_USE;

#endif
