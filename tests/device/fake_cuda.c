/* Stands for libcuda.so.1. EVENSTEP_FAKE_GPUS says how many GPUs there are, EVENSTEP_FAKE_CUDA_ERROR what cuInit
 * returns; CUDA_VISIBLE_DEVICES ("1,0") is honoured as by the real one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cuInit(unsigned flags);
int cuDriverGetVersion(int *out);
int cuDeviceGetCount(int *out);
int cuDeviceGet(int *device, int index);
int cuDeviceGetName(char *out, int size, int device);
int cuDeviceTotalMem_v2(size_t *out, int device);
int cuDeviceGetAttribute(int *out, int attribute, int device);
int cuDeviceGetPCIBusId(char *out, int size, int device);
int cuDeviceGetUuid(unsigned char *out, int device);
int cuGetErrorString(int code, const char **out);

static int number(const char *name, int absent) {
  const char *text = getenv(name);
  return text == NULL ? absent : atoi(text);
}

/* The physical numbers of the visible GPUs. */
static int visible(int *out) {
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  int all = number("EVENSTEP_FAKE_GPUS", 0);
  int count = 0;
  if (list == NULL) {
    for (; count < all && count < 16; count++) {
      out[count] = count;
    }
    return count;
  }
  while (*list >= '0' && *list <= '9' && atoi(list) < all && count < 16) {
    out[count++] = atoi(list);
    list += strcspn(list, ",");
    list += *list == ',' ? 1 : 0;
  }
  return count;
}

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

int cuInit(unsigned flags) {
  int devices[16];
  int error = number("EVENSTEP_FAKE_CUDA_ERROR", 0);
  (void)flags;
  return error != 0 ? error : visible(devices) == 0 ? 100 : 0;
}

int cuDriverGetVersion(int *out) {
  *out = 12080;
  return 0;
}

int cuDeviceGetCount(int *out) {
  int devices[16];
  *out = visible(devices);
  return 0;
}

int cuDeviceGet(int *device, int index) {
  int devices[16];
  if (index >= visible(devices)) {
    return 101;
  }
  *device = devices[index];
  return 0;
}

int cuDeviceGetName(char *out, int size, int device) {
  (void)snprintf(out, (size_t)size, "Fake GPU %d", device);
  return number("EVENSTEP_FAKE_BROKEN_GPU", -1) == device ? 999 : 0;
}

int cuDeviceTotalMem_v2(size_t *out, int device) {
  *out = (size_t)(device + 1) << 30;
  return 0;
}

int cuDeviceGetAttribute(int *out, int attribute, int device) {
  (void)device;
  *out = attribute == 16 ? 132 : attribute == 13 ? 1980000 : attribute == 36 ? 3201000 : attribute == 75 ? 9 : 0;
  return 0;
}

int cuDeviceGetPCIBusId(char *out, int size, int device) {
  (void)snprintf(out, (size_t)size, "0000:%02x:00.0", device + 1);
  return 0;
}

#ifndef FAKE_OLD
int cuDeviceGetUuid(unsigned char *out, int device) {
  for (int i = 0; i < 16; i++) {
    out[i] = (unsigned char)(device * 16 + i);
  }
  return 0;
}
#endif

int cuGetErrorString(int code, const char **out) {
  *out = code == 100 ? "no CUDA-capable device is detected" : NULL;
  return *out == NULL ? 1 : 0;
}
