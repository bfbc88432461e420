/* Any bytes as gpu_profiles.json: an error, or for each device a speed or none, and a strength or none. */
#include "device/profile.h"

#include <math.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  int32_t cpus[] = {0, 1, 2};
  even_device items[] = {
      {.name = "cpu:0", .kind = EVEN_DEVICE_CPU, .model = "a CPU", .cpus = cpus, .cpu_count = 1},
      {.name = "cpu:0-1", .kind = EVEN_DEVICE_CPU, .model = "a CPU", .cpus = cpus, .cpu_count = 3},
      {.name = "cuda:0", .kind = EVEN_DEVICE_CUDA, .model = "a GPU", .cpus = NULL, .cpu_count = 0},
  };
  even_device_list devices = {items, sizeof items / sizeof items[0]};
  double speeds[sizeof items / sizeof items[0]] = {-1, -1, -1};
  even_status status = even_profile_read("fuzz", (const char *)data, size, &devices, speeds);
  if (status != EVEN_OK && status != EVEN_ERR_INPUT) {
    abort();
  }
  for (size_t i = 0; i < devices.count; i++) {
    bool kept = speeds[i] < 0 && speeds[i] > -2;
    if (status == EVEN_OK ? !isnan(speeds[i]) && !(isfinite(speeds[i]) && speeds[i] > 0) : !kept) {
      abort();
    }
  }
  if (even_profile_read_strengths("fuzz", (const char *)data, size, &devices) != status) {
    abort();
  }
  for (size_t i = 0; i < devices.count; i++) {
    double strength = items[i].strength;
    if (!(strength >= 0) || !isfinite(strength) || (strength > 0 && (status != EVEN_OK || isnan(speeds[i])))) {
      abort();
    }
  }
  return 0;
}
