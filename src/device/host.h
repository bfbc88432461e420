/* Everything that `evenstep devices` shows of a host: its parts, what this process may use of them, its devices. */
#ifndef EVEN_DEVICE_HOST_H
#define EVEN_DEVICE_HOST_H

#include "base/json_writer.h"
#include "device/cuda/gpu.h"
#include "device/driver.h"
#include "device/memory_facts.h"
#include "os/host.h"

typedef struct even_host {
  even_host_names names;
  char distribution[128]; /* "Debian GNU/Linux 12 (bookworm)" */
  char simd[160];
  even_device_context context; /* topology and limits */
  even_memory_facts memory;
  even_disk disk;
  char folder[256]; /* the one that `disk` holds */
  even_interface_list interfaces;
  even_gpu_list gpus;
  even_device_list devices;
} even_host;

/* `folder` says which disk is meant ("."). Free with even_host_free, also after an error. Parts that cannot be read
 * stay empty; errors: those of even_topology_read and EVEN_ERR_MEMORY. */
even_status even_host_read(const even_device_source *source, const char *folder, even_host *out) EVEN_MUST_USE;
void even_host_free(even_host *host);

/* The interfaces as the member "network" of the object that is open. */
void even_host_network_json(even_json *json, const even_interface_list *interfaces);

#endif
