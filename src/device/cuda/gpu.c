/* GPUs from CUDA's driver interface (cuda.h's ABI: "CUDA Driver API", NVIDIA). */
#include "device/cuda/gpu.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "device/cuda/nvml.h"
#include "os/library.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* CUdevice_attribute */
enum {
  CLOCK_RATE_KHZ = 13,
  MULTIPROCESSOR_COUNT = 16,
  MEMORY_CLOCK_RATE_KHZ = 36,
  CAPABILITY_MAJOR = 75,
  CAPABILITY_MINOR = 76
};

typedef struct driver {
  even_library library;
  int (*init)(unsigned flags);
  int (*version)(int *out);
  int (*count)(int *out);
  int (*get)(int *device, int index);
  int (*name)(char *out, int size, int device);
  int (*memory)(size_t *out, int device);
  int (*attribute)(int *out, int attribute, int device);
  int (*pci_bus)(char *out, int size, int device);
  int (*uuid)(unsigned char out[16], int device);
  int (*error_text)(int code, const char **out);
} driver;

typedef struct wanted_symbol {
  void *function; /* address of the pointer */
  const char *name;
  const char *older; /* name of the same function in older versions, may be NULL */
} wanted_symbol;

static bool symbols_load(driver *cuda, const char **absent) {
  const wanted_symbol wanted[] = {
      {&cuda->init, "cuInit", NULL},
      {&cuda->version, "cuDriverGetVersion", NULL},
      {&cuda->count, "cuDeviceGetCount", NULL},
      {&cuda->get, "cuDeviceGet", NULL},
      {&cuda->name, "cuDeviceGetName", NULL},
      {&cuda->memory, "cuDeviceTotalMem_v2", NULL},
      {&cuda->attribute, "cuDeviceGetAttribute", NULL},
      {&cuda->pci_bus, "cuDeviceGetPCIBusId", NULL},
      {&cuda->uuid, "cuDeviceGetUuid_v2", "cuDeviceGetUuid"},
      {&cuda->error_text, "cuGetErrorString", NULL},
  };
  for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
    void *symbol = even_library_symbol(&cuda->library, wanted[i].name);
    if (symbol == NULL && wanted[i].older != NULL) {
      symbol = even_library_symbol(&cuda->library, wanted[i].older);
    }
    if (symbol == NULL) {
      *absent = wanted[i].name;
      return false;
    }
    memcpy(wanted[i].function, &symbol, sizeof symbol);
  }
  return true;
}

static void driver_error(const driver *cuda, const char *call, int code, even_gpu_list *out) {
  const char *text = NULL;
  if (cuda->error_text(code, &text) != 0 || text == NULL) {
    text = "unknown error";
  }
  (void)snprintf(out->note, sizeof out->note, "the NVIDIA driver is here, but %s says: %s (error %d)", call, text,
                 code);
}

/* Opens the driver; false with out->note where there is none that works. */
static bool driver_open(const even_device_source *source, driver *cuda, even_gpu_list *out) {
  const char *absent = NULL;
  if (even_library_open(source->cuda_library, &cuda->library) != EVEN_OK) {
    (void)snprintf(out->note, sizeof out->note, "%s was not found: no NVIDIA driver is installed",
                   source->cuda_library);
    return false;
  }
  if (!symbols_load(cuda, &absent)) {
    (void)snprintf(out->note, sizeof out->note, "%s lacks %s: too old a driver", source->cuda_library, absent);
    even_library_close(&cuda->library);
    return false;
  }
  int code = cuda->init(0);
  if (code != 0) {
    driver_error(cuda, "cuInit", code, out);
    even_library_close(&cuda->library);
    return false;
  }
  return true; /* once it runs, the driver is never unloaded: it may have threads */
}

static int attribute(const driver *cuda, int which, int device) {
  int value = 0;
  return cuda->attribute(&value, which, device) == 0 ? value : 0;
}

static void uuid_write(const unsigned char bytes[16], char *out, size_t size) {
  (void)snprintf(out, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", bytes[0],
                 bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7], bytes[8], bytes[9], bytes[10],
                 bytes[11], bytes[12], bytes[13], bytes[14], bytes[15]);
}

static int gpu_read(const driver *cuda, int index, even_gpu *out) {
  int device = 0;
  size_t memory = 0;
  unsigned char uuid[16];
  *out = (even_gpu){.index = index,
                    .temperature_celsius = NAN,
                    .power_watts = NAN,
                    .power_limit_watts = NAN,
                    .utilization_percent = NAN};
  int code = cuda->get(&device, index);
  if (code == 0) {
    code = cuda->name(out->name, sizeof out->name, device);
  }
  if (code == 0) {
    code = cuda->memory(&memory, device);
  }
  if (code != 0) {
    return code;
  }
  out->memory_bytes = memory;
  if (cuda->uuid(uuid, device) == 0) {
    uuid_write(uuid, out->uuid, sizeof out->uuid);
  }
  if (cuda->pci_bus(out->pci_bus, sizeof out->pci_bus, device) != 0) {
    out->pci_bus[0] = '\0';
  }
  out->multiprocessors = attribute(cuda, MULTIPROCESSOR_COUNT, device);
  out->capability_major = attribute(cuda, CAPABILITY_MAJOR, device);
  out->capability_minor = attribute(cuda, CAPABILITY_MINOR, device);
  out->clock_most_mhz = attribute(cuda, CLOCK_RATE_KHZ, device) / 1000;
  out->memory_clock_mhz = attribute(cuda, MEMORY_CLOCK_RATE_KHZ, device) / 1000;
  return 0;
}

static even_status gpus_read(const driver *cuda, even_gpu_list *out) {
  int count = 0;
  int code = cuda->count(&count);
  if (code != 0) {
    driver_error(cuda, "cuDeviceGetCount", code, out);
    return EVEN_OK;
  }
  if (cuda->version(&out->cuda_version) != 0) {
    out->cuda_version = 0;
  }
  if (count <= 0) {
    (void)snprintf(out->note, sizeof out->note, "the NVIDIA driver shows no GPU (CUDA_VISIBLE_DEVICES may hide them)");
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&out->items, (size_t)count));
  for (int i = 0; i < count; i++) {
    code = gpu_read(cuda, i, &out->items[i]);
    if (code != 0) {
      driver_error(cuda, "a GPU", code, out);
      break;
    }
    out->count++;
  }
  return EVEN_OK;
}

even_status even_gpu_list_read(const even_device_source *source, even_gpu_list *out) {
  driver cuda = {0};
  *out = (even_gpu_list){0};
  if (!driver_open(source, &cuda, out)) {
    return EVEN_OK;
  }
  EVEN_TRY(gpus_read(&cuda, out));
  if (out->count > 0) {
    even_nvml_complete(source, out);
  }
  return EVEN_OK;
}

void even_gpu_list_free(even_gpu_list *list) {
  even_free(list->items);
  *list = (even_gpu_list){0};
}
