/* GPUs while a job runs, through NVML: sampled once a second (or as often as asked), and what it tells of their faults.
 * A thread of its own asks, since NVML may take its time (for a GPU that has fallen off its bus, minutes). */
#ifndef EVEN_DEVICE_CUDA_WATCH_H
#define EVEN_DEVICE_CUDA_WATCH_H

#include "device/source.h"

#include <stdbool.h>
#include <stdint.h>

enum { EVEN_GPU_USERS = 8 };

/* A process that computes on it. */
typedef struct even_gpu_user {
  long pid;       /* as NVML sees it: the host's number, also where this process is in a container */
  double percent; /* of the time since the sample before, in which its kernels ran */
} even_gpu_user;

/* NAN where NVML does not say. */
typedef struct even_gpu_sample {
  uint64_t at_ns; /* 0: none yet */
  double clock_mhz;
  double temperature_celsius;
  double power_watts;
  double memory_used_bytes;
  double utilization_percent;
  double corrected;                    /* ECC errors since the driver was loaded */
  double uncorrected;                  /* the same, of those that were not */
  even_gpu_user users[EVEN_GPU_USERS]; /* those that NVML tells of, */
  int user_count;                      /* -1: it tells of none */
  bool slowed;                         /* its clock is held down by heat, or by a lack of power */
} even_gpu_sample;

typedef enum even_gpu_fault {
  EVEN_GPU_XID,  /* value: NVIDIA's number of it */
  EVEN_GPU_ECC,  /* value: how many errors more that could not be corrected */
  EVEN_GPU_SLOW, /* value 1; and 0 when it is over */
  EVEN_GPU_LOST  /* it does not answer any more: off its bus */
} even_gpu_fault;

typedef struct even_gpu_news {
  size_t gpu; /* as they were given */
  even_gpu_fault fault;
  uint64_t value;
  uint64_t at_ns;
  char words[120]; /* "Xid 79: the GPU has fallen off the bus" */
} even_gpu_news;

typedef struct even_gpu_watch even_gpu_watch;

/* The time between two looks that was asked for; 0: 1 s. false: INFINITY, for none. */
bool even_gpu_watch_every(double seconds, uint64_t *every_ns);

/* GPUs by their UUID ("GPU-…"; "" for a place without one). Returns at once: NVML, which may take minutes to begin, is
 * begun by the watch's thread. *out NULL: no place has one. EVEN_ERR_MEMORY, EVEN_ERR_SYSTEM. */
even_status even_gpu_watch_open(const even_device_source *source, const char *const *uuids, size_t count,
                                uint64_t every_ns, even_gpu_watch **out) EVEN_MUST_USE;
/* There is no NVML, or it knows none of these GPUs: nothing comes of it any more, and it can be closed. NULL is allowed
 * here and below. */
bool even_gpu_watch_is_over(even_gpu_watch *watch);
/* The newest sample of a GPU; at_ns 0: none. Any thread. */
void even_gpu_watch_look(even_gpu_watch *watch, size_t gpu, even_gpu_sample *out);
/* The oldest news that was not taken yet; false: there is none. Of more than 64 that nobody takes the later are lost.
 */
bool even_gpu_watch_news(even_gpu_watch *watch, even_gpu_news *out);
/* Waits up to 2 s for NVML; a call that does not return, its beginning too, is left behind, with its memory. */
void even_gpu_watch_close(even_gpu_watch *watch);

#endif
