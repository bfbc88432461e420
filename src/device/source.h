/* Where discovery looks: this host, or a recorded or invented one (tests, planning on a laptop). */
#ifndef EVEN_DEVICE_SOURCE_H
#define EVEN_DEVICE_SOURCE_H

#include "device/device.h"

typedef struct even_device_source {
  const char *root;         /* put before /proc and /sys; "" for this host */
  const char *synthetic;    /* hwloc's words for an invented machine ("pack:2 core:4 pu:2"); NULL: none */
  const char *xml;          /* a machine recorded with `lstopo FILE.xml`; NULL: none */
  const char *allowed;      /* OS numbers of the CPUs that may be used ("0-3,8"); NULL: this process's affinity */
  const char *cuda_library; /* "libcuda.so.1" */
  const char *nvml_library; /* "libnvidia-ml.so.1" */
} even_device_source;

/* This host. */
extern const even_device_source even_device_source_host;

/* even_device_select on `source`. */
even_status even_device_select_from(const even_device_source *source, const char *spec, int ranks,
                                    even_device_list *out) EVEN_MUST_USE;

#endif
