/* Writes gpu_profiles.json; every name says its unit. */
#include "base/json_writer.h"
#include "device/measure.h"
#include "device/profile.h"
#include "os/clock.h"

#include <evenstep/version.h>
#include <stdio.h>
#include <time.h>

const char even_profile_format[] = "evenstep-profile-1";

/* ISO 8601, UTC. */
static void created(even_json *json) {
  char text[40];
  struct tm parts;
  time_t seconds = (time_t)(even_clock_wall_ns() / 1000000000U);
  if (gmtime_r(&seconds, &parts) == NULL || strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts) == 0) {
    (void)snprintf(text, sizeof text, "unknown");
  }
  even_json_string(json, "created", text);
}

static void device_write(even_json *json, const even_device_list *devices, const even_measure_result *result,
                         size_t index) {
  const even_device *device = &devices->items[index];
  const even_measurement *measured = &result->items[index];
  even_json_object(json, NULL);
  even_json_string(json, "name", device->name);
  even_json_string(json, "kind", device->kind == EVEN_DEVICE_CUDA ? "cuda" : "cpu");
  even_json_string(json, "model", device->model);
  if (device->uuid[0] != '\0') {
    even_json_string(json, "uuid", device->uuid);
  }
  even_json_array(json, "cpus");
  for (size_t i = 0; i < device->cpu_count; i++) {
    even_json_integer(json, NULL, device->cpus[i]);
  }
  even_json_array_end(json);
  even_json_number(json, "cores", device->cores);
  even_json_unsigned(json, "memory_total_bytes", device->memory_bytes);
  even_json_number(json, "matmul_fp32_gflops", measured->matmul_fp32_gflops);
  even_json_number(json, "matmul_bf16_gflops", measured->matmul_bf16_gflops);
  even_json_number(json, "memory_bandwidth_gb_per_second", measured->memory_bandwidth_gb_per_second);
  even_json_number(json, "memory_read_gb_per_second", measured->memory_read_gb_per_second);
  even_json_number(json, "cpu_time_fraction", measured->cpu_fraction);
  even_json_bool(json, "disturbed", even_measurement_disturbed(device, measured));
  even_json_number(json, "relative_score", measured->relative_score);
  even_json_string(json, "measured_on", devices->items[measured->like].name);
  even_json_object_end(json);
}

/* Only what was measured: a reader may count on every score. */
static void devices_write(even_json *json, const even_device_list *devices, const even_measure_result *result) {
  even_json_array(json, "devices");
  for (size_t i = 0; i < result->count; i++) {
    if (result->items[i].measured) {
      device_write(json, devices, result, i);
    }
  }
  even_json_array_end(json);
  even_json_array(json, "not_measured");
  for (size_t i = 0; i < result->count; i++) {
    if (!result->items[i].measured) {
      even_json_object(json, NULL);
      even_json_string(json, "name", devices->items[i].name);
      even_json_string(json, "reason", result->items[i].note);
      even_json_object_end(json);
    }
  }
  even_json_array_end(json);
}

even_status even_profile_write(const even_host *host, const even_device_list *devices,
                               const even_measure_result *result, even_text *out) {
  even_json json = even_json_begin(out, 2);
  even_json_object(&json, NULL);
  even_json_string(&json, "format", even_profile_format);
  even_json_string(&json, "host", host->names.host);
  created(&json);
  even_json_string(&json, "evenstep_version", even_version());
  even_json_string(&json, "measured_with", result->kernels);
  even_json_string(&json, "note", result->note[0] != '\0' ? result->note : NULL);
  even_json_number(&json, "cpu_quota_cores", host->context.limits.cpu_cores); /* null: none */
  devices_write(&json, devices, result);
  even_json_object(&json, "disk");
  even_json_string(&json, "filesystem", host->disk.filesystem);
  even_json_string(&json, "mount", host->disk.mount);
  even_json_unsigned(&json, "free_bytes", host->disk.free_bytes);
  even_json_bool(&json, "direct", result->disk.direct);
  even_json_number(&json, "write_mb_per_second", result->disk.write_mb_per_second);
  even_json_number(&json, "read_mb_per_second", result->disk.read_mb_per_second);
  even_json_string(&json, "note", result->disk_note[0] != '\0' ? result->disk_note : NULL);
  even_json_object_end(&json);
  even_host_network_json(&json, &host->interfaces);
  even_json_object_end(&json);
  even_text_add(out, "\n");
  return even_text_status(out);
}
