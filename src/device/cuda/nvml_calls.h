/* NVIDIA's management library, opened at run time: the part of its ABI that we use, declared and not included ("NVML
 * API Reference Guide", NVIDIA). */
#ifndef EVEN_DEVICE_CUDA_NVML_CALLS_H
#define EVEN_DEVICE_CUDA_NVML_CALLS_H

#include "os/library.h"

enum { EVEN_NVML_CLOCK_SM = 1, EVEN_NVML_SENSOR_GPU = 0 };                               /* of clock, temperature */
enum { EVEN_NVML_CORRECTED = 0, EVEN_NVML_UNCORRECTED = 1, EVEN_NVML_SINCE_DRIVER = 0 }; /* of errors */
/* nvmlReturn_t */
enum {
  EVEN_NVML_OK = 0,
  EVEN_NVML_NOT_FOUND = 6,
  EVEN_NVML_TIMED_OUT = 10,
  EVEN_NVML_GPU_IS_LOST = 15,
  EVEN_NVML_RESET_REQUIRED = 16
};

typedef struct even_nvml_device_opaque *even_nvml_device;
typedef struct even_nvml_events_opaque *even_nvml_events;

typedef struct even_nvml_memory {
  unsigned long long total, free, used;
} even_nvml_memory;

typedef struct even_nvml_utilization {
  unsigned gpu, memory;
} even_nvml_utilization;

typedef struct even_nvml_event {
  even_nvml_device device;
  unsigned long long type;
  unsigned long long data;
  unsigned gpu_instance, compute_instance;
} even_nvml_event;

/* nvmlProcessUtilizationSample_t: of a process and a span of time, in percent. */
typedef struct even_nvml_process {
  unsigned pid;
  unsigned long long microseconds; /* since 1970 */
  unsigned gpu, memory, encoder, decoder;
} even_nvml_process;

/* Each returns an nvmlReturn_t. init and shutdown are there in a library that was opened; any other may be NULL. */
typedef struct even_nvml {
  even_library library;
  int (*init)(void);
  int (*shutdown)(void);
  int (*driver_version)(char *out, unsigned size);
  int (*by_bus)(const char *bus, even_nvml_device *out);
  int (*by_uuid)(const char *uuid, even_nvml_device *out);
  int (*temperature)(even_nvml_device device, int sensor, unsigned *out);
  int (*power)(even_nvml_device device, unsigned *milliwatts);
  int (*power_limit)(even_nvml_device device, unsigned *milliwatts);
  int (*clock)(even_nvml_device device, int clock, unsigned *mhz);
  int (*memory)(even_nvml_device device, even_nvml_memory *out);
  int (*utilization)(even_nvml_device device, even_nvml_utilization *out);
  int (*processes)(even_nvml_device device, even_nvml_process *out, unsigned *count, unsigned long long since);
  int (*affinity)(even_nvml_device device, unsigned words, unsigned long *out);
  int (*reasons)(even_nvml_device device, unsigned long long *out);
  int (*older_reasons)(even_nvml_device device, unsigned long long *out);
  int (*errors)(even_nvml_device device, int corrected, int counter, unsigned long long *out);
  int (*events_make)(even_nvml_events *out);
  int (*events_register)(even_nvml_device device, unsigned long long types, even_nvml_events events);
  int (*events_wait)(even_nvml_events events, even_nvml_event *out, unsigned milliseconds);
  int (*events_free)(even_nvml_events events);
} even_nvml;

/* Opens the library and finds its calls; it is not started. EVEN_ERR_NOT_FOUND: there is none; EVEN_ERR_UNSUPPORTED: it
 * cannot be started or ended (it is too old). Close it also then. */
even_status even_nvml_open(const char *library, even_nvml *out) EVEN_MUST_USE;
void even_nvml_close(even_nvml *nvml);

#endif
