/* evenstep devices: what this host has, and what a rank may use of it. */
#include "base/json_writer.h"
#include "cli/command.h"
#include "cli/units.h"
#include "device/host.h"

#include <math.h>
#include <string.h>

enum { CORES_SHOWN = 16 };

static void host_print(const even_host *host) {
  const even_topology *topology = &host->context.topology;
  char one[32];
  char two[32];
  char three[32];
  (void)printf("host     %s: %s, Linux %s, %s, %s\n", host->names.host,
               host->distribution[0] != '\0' ? host->distribution : "unknown distribution", host->names.kernel,
               host->names.architecture, host->names.libc);
  (void)printf("CPU      %s: %zu socket%s, %zu core%s, %zu hardware thread%s; SIMD: %s\n", topology->model,
               topology->package_count, topology->package_count == 1 ? "" : "s", topology->core_count,
               topology->core_count == 1 ? "" : "s", topology->cpu_count, topology->cpu_count == 1 ? "" : "s",
               host->simd);
  if (topology->l1_data_bytes + topology->l2_bytes + topology->l3_bytes > 0) {
    (void)printf("caches   L1 data %s, L2 %s a core; L3 %s, %zu of them\n",
                 even_cli_bytes(topology->l1_data_bytes, one, sizeof one),
                 even_cli_bytes(topology->l2_bytes, two, sizeof two),
                 even_cli_bytes(topology->l3_bytes, three, sizeof three), topology->l3_count);
  }
}

static void limits_print(const even_host *host) {
  const even_topology *topology = &host->context.topology;
  const even_limits *limits = &host->context.limits;
  char bytes[32];
  if (topology->host_cpu_count > topology->cpu_count) {
    (void)printf("allowed  %zu of the host's %zu CPUs (affinity or cpuset)\n", topology->cpu_count,
                 topology->host_cpu_count);
  }
  if (isfinite(limits->cpu_cores)) {
    (void)printf("quota    %.4g cores of CPU time (%s)\n", limits->cpu_cores, limits->cpu_folder);
  }
  if (limits->memory_bytes < host->context.memory_bytes) {
    (void)printf("limit    %s of memory (%s)\n", even_cli_bytes(limits->memory_bytes, bytes, sizeof bytes),
                 limits->memory_folder);
  }
}

static void stores_print(const even_host *host) {
  char one[32];
  char two[32];
  (void)printf("memory   %s, %s available; ", even_cli_bytes(host->memory.total_bytes, one, sizeof one),
               even_cli_bytes(host->memory.available_bytes, two, sizeof two));
  if (host->memory.swap_total_bytes > 0) {
    (void)printf("swap %s, %s free\n", even_cli_bytes(host->memory.swap_total_bytes, one, sizeof one),
                 even_cli_bytes(host->memory.swap_free_bytes, two, sizeof two));
  } else {
    (void)printf("no swap\n");
  }
  if (host->disk.total_bytes > 0) {
    (void)printf("disk     %s on %s (this folder's): %s free of %s\n", host->disk.filesystem,
                 host->disk.mount[0] != '\0' ? host->disk.mount : "?",
                 even_cli_bytes(host->disk.free_bytes, one, sizeof one),
                 even_cli_bytes(host->disk.total_bytes, two, sizeof two));
  }
}

static void network_print(const even_host *host) {
  for (size_t i = 0; i < host->interfaces.count; i++) {
    const even_interface *interface = &host->interfaces.items[i];
    char speed[48] = "";
    if (interface->megabits_per_second > 0) {
      (void)snprintf(speed, sizeof speed, ", %.4g Gbit/s", (double)interface->megabits_per_second / 1000);
    }
    (void)printf("%-8s %s %s%s%s%s\n", i == 0 ? "network" : "", interface->name, interface->up ? "up" : "down", speed,
                 interface->addresses[0] != '\0' ? ", " : "", interface->addresses);
  }
}

/* ", 12 W" where the value is known. */
static void known_print(const char *format, double value) {
  if (!isnan(value)) {
    (void)printf(format, value);
  }
}

static void gpus_print(const even_host *host) {
  const even_gpu_list *gpus = &host->gpus;
  if (gpus->count > 0) {
    (void)printf("NVIDIA   driver %s, CUDA %d.%d\n", gpus->driver[0] != '\0' ? gpus->driver : "of unknown version",
                 gpus->cuda_version / 1000, gpus->cuda_version % 1000 / 10);
  }
  for (size_t i = 0; i < gpus->count; i++) {
    const even_gpu *gpu = &gpus->items[i];
    (void)printf("         cuda:%d: compute capability %d.%d, %d multiprocessors, ", gpu->index, gpu->capability_major,
                 gpu->capability_minor, gpu->multiprocessors);
    if (gpu->clock_mhz > 0) {
      (void)printf("%d of ", gpu->clock_mhz);
    }
    (void)printf("%d MHz", gpu->clock_most_mhz);
    known_print(", %.0f °C", gpu->temperature_celsius);
    known_print(", %.0f W", gpu->power_watts);
    known_print(isnan(gpu->power_watts) ? ", at most %.0f W" : " of %.0f W", gpu->power_limit_watts);
    known_print(", %.0f%% busy", gpu->utilization_percent);
    (void)printf(", PCI %s\n", gpu->pci_bus);
  }
  if (gpus->note[0] != '\0') {
    (void)printf("%-8s %s\n", gpus->count == 0 ? "GPU" : "", gpus->note);
  }
}

static void device_print(const even_device *device) {
  char cpus[32];
  char memory[32];
  char node[16] = "-";
  if (device->numa_node >= 0) {
    (void)snprintf(node, sizeof node, "%d", device->numa_node);
  }
  (void)printf("%-9s %-15s %5.4g  %4s  %10s  %s\n", device->name,
               even_cli_cpus(device->cpus, device->cpu_count, cpus, 16), device->cores, node,
               even_cli_bytes(device->memory_bytes, memory, sizeof memory), device->model);
}

static void devices_print(const even_host *host, bool all) {
  size_t cores = host->context.topology.core_count;
  (void)printf("\n%-9s %-15s %5s  %4s  %10s  %s\n", "DEVICE", "CPUS", "CORES", "NUMA", "MEMORY", "MODEL");
  for (size_t i = 0; i < host->devices.count; i++) {
    if (!all && cores > CORES_SHOWN && i >= CORES_SHOWN / 2 && i < cores - 1) {
      if (i == CORES_SHOWN / 2) {
        (void)printf("%-9s (%zu more cores: --all lists them)\n", "…", cores - 1 - CORES_SHOWN / 2);
      }
      continue;
    }
    device_print(&host->devices.items[i]);
  }
  (void)printf("\nName them to `evenstep run --devices cpu:0,cpu:1 …`; cpu:A-B joins cores, cpu is all of them.\n");
}

static void gpu_json(even_json *json, const even_gpu_list *gpus, int index) {
  for (size_t i = 0; i < gpus->count; i++) {
    const even_gpu *gpu = &gpus->items[i];
    if (gpu->index != index) {
      continue;
    }
    even_json_string(json, "uuid", gpu->uuid);
    even_json_string(json, "pci_bus", gpu->pci_bus);
    even_json_integer(json, "multiprocessors", gpu->multiprocessors);
    even_json_integer(json, "compute_capability_major", gpu->capability_major);
    even_json_integer(json, "compute_capability_minor", gpu->capability_minor);
    even_json_integer(json, "clock_mhz", gpu->clock_mhz);
    even_json_integer(json, "clock_maximum_mhz", gpu->clock_most_mhz);
    even_json_integer(json, "memory_clock_mhz", gpu->memory_clock_mhz);
    even_json_unsigned(json, "memory_free_bytes", gpu->memory_free_bytes);
    even_json_number(json, "temperature_celsius", gpu->temperature_celsius);
    even_json_number(json, "power_watts", gpu->power_watts);
    even_json_number(json, "power_limit_watts", gpu->power_limit_watts);
    even_json_number(json, "utilization_percent", gpu->utilization_percent);
  }
}

static void device_json(even_json *json, const even_host *host, const even_device *device) {
  even_json_object(json, NULL);
  even_json_string(json, "name", device->name);
  even_json_string(json, "kind", device->kind == EVEN_DEVICE_CUDA ? "cuda" : "cpu");
  even_json_string(json, "model", device->model);
  even_json_array(json, "cpus");
  for (size_t i = 0; i < device->cpu_count; i++) {
    even_json_integer(json, NULL, device->cpus[i]);
  }
  even_json_array_end(json);
  even_json_number(json, "cores", device->cores);
  if (device->numa_node >= 0) {
    even_json_integer(json, "numa_node", device->numa_node);
  } else {
    even_json_null(json, "numa_node");
  }
  even_json_unsigned(json, "memory_bytes", device->memory_bytes);
  gpu_json(json, &host->gpus, device->cuda_index);
  even_json_object_end(json);
}

static void cpu_json(even_json *json, const even_host *host) {
  const even_topology *topology = &host->context.topology;
  const even_limits *limits = &host->context.limits;
  even_json_object(json, "cpu");
  even_json_string(json, "model", topology->model);
  even_json_unsigned(json, "sockets", topology->package_count);
  even_json_unsigned(json, "cores", topology->core_count);
  even_json_unsigned(json, "hardware_threads", topology->cpu_count);
  even_json_unsigned(json, "host_hardware_threads", topology->host_cpu_count);
  even_json_unsigned(json, "numa_nodes", topology->node_count);
  even_json_string(json, "simd", host->simd);
  even_json_unsigned(json, "l1_data_bytes", topology->l1_data_bytes);
  even_json_unsigned(json, "l2_bytes", topology->l2_bytes);
  even_json_unsigned(json, "l3_bytes", topology->l3_bytes);
  even_json_number(json, "quota_cores", limits->cpu_cores); /* null: none */
  even_json_string(json, "quota_group", limits->cpu_folder[0] != '\0' ? limits->cpu_folder : NULL);
  even_json_object_end(json);
}

static void stores_json(even_json *json, const even_host *host) {
  const even_limits *limits = &host->context.limits;
  even_json_object(json, "memory");
  even_json_unsigned(json, "total_bytes", host->memory.total_bytes);
  even_json_unsigned(json, "available_bytes", host->memory.available_bytes);
  if (limits->memory_bytes < UINT64_MAX) {
    even_json_unsigned(json, "limit_bytes", limits->memory_bytes);
  } else {
    even_json_null(json, "limit_bytes");
  }
  even_json_unsigned(json, "swap_total_bytes", host->memory.swap_total_bytes);
  even_json_unsigned(json, "swap_free_bytes", host->memory.swap_free_bytes);
  even_json_unsigned(json, "huge_page_bytes", host->memory.huge_page_bytes);
  even_json_object_end(json);
  even_json_object(json, "disk");
  even_json_string(json, "filesystem", host->disk.filesystem);
  even_json_string(json, "mount", host->disk.mount);
  even_json_unsigned(json, "total_bytes", host->disk.total_bytes);
  even_json_unsigned(json, "free_bytes", host->disk.free_bytes);
  even_json_object_end(json);
}

static int json_print(const even_host *host) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 2);
  even_json_object(&json, NULL);
  even_json_string(&json, "format", "evenstep-devices-1");
  even_json_string(&json, "host", host->names.host);
  even_json_string(&json, "distribution", host->distribution);
  even_json_string(&json, "kernel", host->names.kernel);
  even_json_string(&json, "architecture", host->names.architecture);
  even_json_string(&json, "libc", host->names.libc);
  cpu_json(&json, host);
  stores_json(&json, host);
  even_host_network_json(&json, &host->interfaces);
  even_json_object(&json, "nvidia");
  even_json_string(&json, "driver", host->gpus.driver[0] != '\0' ? host->gpus.driver : NULL);
  even_json_integer(&json, "cuda_version", host->gpus.cuda_version);
  even_json_string(&json, "note", host->gpus.note[0] != '\0' ? host->gpus.note : NULL);
  even_json_object_end(&json);
  even_json_array(&json, "devices");
  for (size_t i = 0; i < host->devices.count; i++) {
    device_json(&json, host, &host->devices.items[i]);
  }
  even_json_array_end(&json);
  even_json_object_end(&json);
  even_status status = even_text_status(&text);
  if (status == EVEN_OK) {
    (void)puts(even_text_string(&text));
  }
  even_text_free(&text);
  return status == EVEN_OK ? 0 : even_cli_fail_of(status);
}

int even_cli_devices(int argc, char **argv) {
  bool json = false;
  bool all = false;
  const even_option options[] = {
      {0, "all", EVEN_OPTION_FLAG, &all, NULL, "list every core of a large machine", 0, 0},
      {0, "json", EVEN_OPTION_FLAG, &json, NULL, "print JSON, with units in the names", 0, 0},
  };
  const even_usage usage = {
      .command = "devices",
      .synopsis = "evenstep devices [--json] [--all]",
      .description =
          "Shows what this host has and what a rank may use of it: CPUs that the process may run on, the\n"
          "quota and limit of its control groups, memory, disk, network, NVIDIA GPUs."};
  int operand = 0;
  int code = 0;
  even_host host;
  if (!even_cli_begin(&usage, options, sizeof options / sizeof options[0], argc, argv, 0, NULL, &operand, &code)) {
    return code;
  }
  even_status status = even_host_read(&even_device_source_host, ".", &host);
  if (status != EVEN_OK) {
    code = even_cli_fail_of(status);
  } else if (json) {
    code = json_print(&host);
  } else {
    host_print(&host);
    limits_print(&host);
    stores_print(&host);
    network_print(&host);
    gpus_print(&host);
    devices_print(&host, all);
  }
  even_host_free(&host);
  return code;
}
