/* Stands for libnvidia-ml.so.1. EVENSTEP_FAKE_NVML_ERROR says what nvmlInit returns. GPU 1 does not tell its power.
 * With FAKE_WHOLE it has what only newer ones have, and the file that EVENSTEP_FAKE_NVML_STATE names says how GPU 0 is,
 * in words and numbers: "reasons 64", "clock 900", "busy 40", "user 4711" (a process that takes "used 60" percent),
 * "uncorrected 2", "lost 1"; one beside it, NAME.xid, "79", is an event, taken once. "deaf 1": waiting for events is
 * refused at once. fake_nvml_counts says how often that was called, and how often a GPU's utilisation was. nvmlInit
 * does not return as long as the file that EVENSTEP_FAKE_NVML_HELD names is there; fake_nvml_beginning says how many
 * are in it. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* named as our side names them: the sanitizer compares the types of the functions */
typedef struct handle *nvml_device;
typedef struct nvml_memory {
  unsigned long long total, free, used;
} nvml_memory;

int nvmlInit_v2(void);
unsigned fake_nvml_beginning(void);
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

typedef struct nvml_utilization {
  unsigned gpu, memory;
} nvml_utilization;
typedef struct event_set *nvml_event_set;
typedef struct nvml_event {
  nvml_device device;
  unsigned long long type;
  unsigned long long data;
  unsigned gpu_instance, compute_instance;
} nvml_event;

int nvmlDeviceGetHandleByUUID(const char *uuid, nvml_device *out);
int nvmlDeviceGetUtilizationRates(nvml_device device, nvml_utilization *out);
int nvmlDeviceGetCurrentClocksThrottleReasons(nvml_device device, unsigned long long *out);
int nvmlDeviceGetTotalEccErrors(nvml_device device, int corrected, int counter, unsigned long long *out);
int nvmlEventSetCreate(nvml_event_set *out);
int nvmlDeviceRegisterEvents(nvml_device device, unsigned long long types, nvml_event_set set);
int nvmlEventSetWait_v2(nvml_event_set set, nvml_event *out, unsigned milliseconds);
int nvmlEventSetFree(nvml_event_set set);
void fake_nvml_counts(unsigned *waits, unsigned *samples);
typedef struct nvml_process {
  unsigned pid;
  unsigned long long microseconds;
  unsigned gpu, memory, encoder, decoder;
} nvml_process;
int nvmlDeviceGetProcessUtilization(nvml_device device, nvml_process *out, unsigned *count, unsigned long long since);

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

static atomic_uint beginning;

unsigned fake_nvml_beginning(void) {
  return atomic_load(&beginning);
}

int nvmlInit_v2(void) {
  const char *error = getenv("EVENSTEP_FAKE_NVML_ERROR");
  const char *held = getenv("EVENSTEP_FAKE_NVML_HELD");
  (void)atomic_fetch_add(&beginning, 1u);
  while (held != NULL && access(held, F_OK) == 0) {
    (void)usleep(1000); /* as a driver that has much to wake up */
  }
  (void)atomic_fetch_sub(&beginning, 1u);
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

static unsigned long long state_of(nvml_device device, const char *word) {
  const char *path = getenv("EVENSTEP_FAKE_NVML_STATE");
  FILE *file = path == NULL || (void *)device != &devices[0] ? NULL : fopen(path, "r");
  char name[32];
  unsigned long long value = 0;
  unsigned long long found = 0;
  while (file != NULL && fscanf(file, "%31s %llu", name, &value) == 2) {
    found = strcmp(name, word) == 0 ? value : found;
  }
  if (file != NULL) {
    (void)fclose(file);
  }
  return found;
}

int nvmlDeviceGetTemperature(nvml_device device, int sensor, unsigned *out) {
  (void)sensor;
  if (state_of(device, "lost") != 0) {
    return 15;
  }
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
  unsigned long long told = state_of(device, "clock");
  *out = clock != 1 ? 0 : told != 0 ? (unsigned)told : 1755;
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

#ifdef FAKE_WHOLE
static char set;
static atomic_uint waits;
static atomic_uint samples;

void fake_nvml_counts(unsigned *out_waits, unsigned *out_samples) {
  *out_waits = atomic_load(&waits);
  *out_samples = atomic_load(&samples);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, nvml_device *out) {
  unsigned first = 0;
  if (sscanf(uuid, "GPU-%2x", &first) != 1 || first > 0xf0) {
    return 6;
  }
  *out = (nvml_device)(void *)&devices[first >> 4];
  return 0;
}

int nvmlDeviceGetUtilizationRates(nvml_device device, nvml_utilization *out) {
  (void)atomic_fetch_add(&samples, 1u);
  *out = (nvml_utilization){.gpu = (void *)device == &devices[0] ? 87 : 12, .memory = 5};
  out->gpu = state_of(device, "busy") != 0 ? (unsigned)state_of(device, "busy") : out->gpu;
  return 0;
}

/* Two samples of a process each time: half and one and a half times what it takes. */
int nvmlDeviceGetProcessUtilization(nvml_device device, nvml_process *out, unsigned *count, unsigned long long since) {
  unsigned pid = (unsigned)state_of(device, "user");
  unsigned used = (unsigned)state_of(device, "used");
  if (pid == 0) {
    return 6;
  }
  if (*count < 2) {
    return 7;
  }
  *count = 2;
  out[0] = (nvml_process){.pid = pid, .microseconds = since + 1, .gpu = used / 2};
  out[1] = (nvml_process){.pid = pid, .microseconds = since + 2, .gpu = used + used / 2};
  return 0;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(nvml_device device, unsigned long long *out) {
  *out = 1 | state_of(device, "reasons");
  return 0;
}

int nvmlDeviceGetTotalEccErrors(nvml_device device, int corrected, int counter, unsigned long long *out) {
  *out = corrected == 1 ? state_of(device, "uncorrected") : 3;
  return counter == 0 ? 0 : 3;
}

int nvmlEventSetCreate(nvml_event_set *out) {
  *out = (nvml_event_set)(void *)&set;
  return 0;
}

int nvmlDeviceRegisterEvents(nvml_device device, unsigned long long types, nvml_event_set to) {
  (void)to;
  return types == 8 && (void *)device == &devices[0] ? 0 : 3;
}

int nvmlEventSetWait_v2(nvml_event_set from, nvml_event *out, unsigned milliseconds) {
  const char *path = getenv("EVENSTEP_FAKE_NVML_STATE");
  char name[4096];
  unsigned long long xid = 0;
  (void)from;
  (void)atomic_fetch_add(&waits, 1u);
  if (state_of((nvml_device)(void *)&devices[0], "deaf") != 0) {
    return 15;
  }
  (void)snprintf(name, sizeof name, "%s.xid", path == NULL ? "" : path);
  FILE *file = path == NULL ? NULL : fopen(name, "r");
  if (file != NULL) {
    int got = fscanf(file, "%llu", &xid);
    (void)fclose(file);
    (void)remove(name);
    if (got == 1) {
      *out = (nvml_event){.device = (nvml_device)(void *)&devices[0], .type = 8, .data = xid};
      return 0;
    }
  }
  (void)usleep(milliseconds * 1000u); /* as the real one waits */
  return 10;
}

int nvmlEventSetFree(nvml_event_set from) {
  return (void *)from == &set ? 0 : 2;
}
#endif
