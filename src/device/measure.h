/* Measures devices and the disk, and says how fast each device is beside the fastest. */
#ifndef EVEN_DEVICE_MEASURE_H
#define EVEN_DEVICE_MEASURE_H

#include "device/device.h"
#include "device/disk_speed.h"

/* NaN: not measured. GB/s are 10^9 bytes, GFLOP/s 10^9 operations a second. */
typedef struct even_measurement {
  size_t like;   /* index of the device that was measured in this one's stead (a like core), or its own */
  bool measured; /* else `note` says why not */
  double matmul_fp32_gflops;
  double matmul_bf16_gflops;
  double memory_bandwidth_gb_per_second; /* copying: bytes read plus written */
  double memory_read_gb_per_second;
  double cpu_fraction;   /* of a CPU's time, how much the measuring threads got (even_cpu_bandwidth) */
  double relative_score; /* 1 for the fastest */
  char note[256];        /* "" when all is well */
} even_measurement;

/* Whether other work took a good part (15% or more) of the CPU while this was measured: the figures are too low. */
bool even_measurement_disturbed(const even_device *device, const even_measurement *of);

typedef struct even_measure_params {
  const even_device_list *devices;
  const char *folder; /* whose disk is measured */
  const char *python; /* interpreter that has torch; NULL: measure in C */
  double seconds;     /* for each device in each round */
  int rounds;         /* the best of each figure counts: what else runs on the host disturbs it less */
  double disk_seconds;
  uint64_t cache_bytes; /* of the last level */
  /* told before each step, and after it, in words ("cpu:0: 85.8 GFLOP/s"); may be NULL */
  void (*progress)(void *context, size_t done, size_t of, const char *words);
  void *context;
} even_measure_params;

typedef struct even_measure_result {
  even_measurement *items; /* one a device of params->devices */
  size_t count;
  even_disk_speed disk;
  char disk_note[256];
  char kernels[96]; /* what multiplied: "torch 2.13.0", or "C" */
  char note[384];   /* why not torch; "" otherwise */
} even_measure_result;

/* Devices are measured one at a time, each pinned to itself: what they lose to one another when all work is not in
 * it (training measures that as it goes). More than 16 single cores: one of each kind is measured for all of them. The
 * score is the geometric mean of fp32 products and memory bandwidth, over the fastest device's. A device or disk that
 * cannot be measured gets a note. Errors: EVEN_ERR_MEMORY, EVEN_ERR_DEVICE (nothing could be measured). Free with
 * even_measure_result_free, also after an error. */
even_status even_measure(const even_measure_params *params, even_measure_result *out) EVEN_MUST_USE;
void even_measure_result_free(even_measure_result *result);

#endif
