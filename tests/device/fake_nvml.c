/* Stands for libnvidia-ml.so.1. EVENSTEP_FAKE_NVML_ERROR says what nvmlInit returns. GPU 1 does not tell its power. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* named as our side names them: the sanitizer compares the types of the functions */
typedef struct handle *nvml_device;
typedef struct nvml_memory {
  unsigned long long total, free, used;
} nvml_memory;

int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlSystemGetDriverVersion(char *out, unsigned size);
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvml_device *out);
int nvmlDeviceGetTemperature(nvml_device device, int sensor, unsigned *out);
int nvmlDeviceGetPowerUsage(nvml_device device, unsigned *out);
int nvmlDeviceGetEnforcedPowerLimit(nvml_device device, unsigned *out);
int nvmlDeviceGetClockInfo(nvml_device device, int clock, unsigned *out);
int nvmlDeviceGetMemoryInfo(nvml_device device, nvml_memory *out);
int nvmlDeviceGetCpuAffinity(nvml_device device, unsigned words, unsigned long *out);

static char devices[16];

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

int nvmlInit_v2(void) {
  const char *error = getenv("EVENSTEP_FAKE_NVML_ERROR");
  return error == NULL ? 0 : atoi(error);
}

int nvmlShutdown(void) {
  return 0;
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
  (void)snprintf(out, size, "570.86.10");
  return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvml_device *out) {
  unsigned number = 0;
  if (sscanf(bus, "0000:%x:00.0", &number) != 1 || number == 0 || number > 16) {
    return 6;
  }
  *out = (nvml_device)(void *)&devices[number - 1];
  return 0;
}

int nvmlDeviceGetTemperature(nvml_device device, int sensor, unsigned *out) {
  (void)sensor;
  *out = 40 + (unsigned)((char *)(void *)device - devices);
  return 0;
}

int nvmlDeviceGetPowerUsage(nvml_device device, unsigned *out) {
  *out = 98500;
  return (void *)device == &devices[1] ? 3 : 0;
}

int nvmlDeviceGetEnforcedPowerLimit(nvml_device device, unsigned *out) {
  (void)device;
  *out = 700000;
  return 0;
}

int nvmlDeviceGetClockInfo(nvml_device device, int clock, unsigned *out) {
  (void)device;
  *out = clock == 1 ? 1755 : 0;
  return 0;
}

int nvmlDeviceGetMemoryInfo(nvml_device device, nvml_memory *out) {
  (void)device;
  *out = (nvml_memory){.total = 1 << 30, .free = 1 << 29, .used = 1 << 29};
  return 0;
}

/* GPU 0 is near CPUs 0-7, GPU 1 near 8-15. */
int nvmlDeviceGetCpuAffinity(nvml_device device, unsigned words, unsigned long *out) {
  memset(out, 0, words * sizeof *out);
  out[0] = (void *)device == &devices[0] ? 0xffUL : 0xff00UL;
  return 0;
}
