/* The devices of this host and what a rank on each may use. */
#ifndef EVEN_DEVICE_DEVICE_H
#define EVEN_DEVICE_DEVICE_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum even_device_kind { EVEN_DEVICE_CPU, EVEN_DEVICE_CUDA } even_device_kind;

/* A device as `--devices` names it:
 *   cpu:K    physical core K of those this process may use (with its hardware threads), in hwloc's order
 *   cpu:A-B  cores A to B as one device
 *   cpu      all cores as one device
 *   numa:K   the cores of NUMA node K as one device
 *   cuda:K   NVIDIA GPU K, in the order of the driver under CUDA_VISIBLE_DEVICES */
typedef struct even_device {
  char name[32];
  even_device_kind kind;
  char model[128]; /* "AMD EPYC 7B13", "NVIDIA H200" */
  int32_t *cpus;   /* OS numbers of the CPUs to pin a rank to: the device's own, or those near a GPU */
  size_t cpu_count;
  int numa_node;         /* -1 where unknown or several */
  int cuda_index;        /* -1 for a CPU */
  int efficiency;        /* of hybrid processors' cores: higher is faster; -1 where all are alike or mixed */
  char uuid[64];         /* of a GPU */
  double cores;          /* CPU time that it may use, in cores: the cgroup's quota honoured (half a core is 0.5) */
  uint64_t memory_bytes; /* that it may use: the cgroup's limit honoured; of a GPU its own */
  double strength;       /* as even_profile_strengths says; 0: not known */
  bool strength_in_c;    /* its measure */
} even_device;

typedef struct even_device_list {
  even_device *items;
  size_t count;
} even_device_list;

/* The devices for the ranks of one job, one a rank. Free with even_device_list_free.
 * spec "cpu:0,cuda:1": just these (a device named twice is EVEN_ERR_ARGUMENT; one that does not exist EVEN_ERR_DEVICE,
 * with those that do); ranks must then be 0 or their number. spec NULL, ranks > 0: GPUs when there are as many, else
 * the cores of this host split into `ranks` even, neighbouring sets (more ranks than cores share them). spec NULL,
 * ranks 0 ("auto"): one rank a GPU, or without any one a NUMA node.
 * `cores` of the result is each rank's part: a core that several ranks share is divided among them, and so is the
 * cgroup's quota where it is less than all of them together. A rank on a GPU gets the near CPUs that no CPU rank owns.
 * ranks outside 0 … 4096 or not the number of devices in spec: EVEN_ERR_ARGUMENT. */
even_status even_device_select(const char *spec, int ranks, even_device_list *out) EVEN_MUST_USE;

void even_device_list_free(even_device_list *list);

/* The profile that `evenstep profile` wrote: one relative score for each device of `devices` into speeds[count]; the
 * score of a device that the profile lacks, or measured while other work took its time ("disturbed") or on another
 * model of processor (another machine), is NaN; a set of cores that it lacks as such has the sum of its cores' scores.
 * Errors: EVEN_ERR_NOT_FOUND (no file), EVEN_ERR_INPUT (not JSON, a speed that is not positive: says which). */
even_status even_profile_speeds(const char *path, const even_device_list *devices, double *speeds) EVEN_MUST_USE;
/* The profile's scores in a unit that is the same on all hosts, the square root of fp32 GFLOP/s times the GB/s of
 * copied memory, into `strength` of each device that has none yet; those whose score is NaN, and all where the file
 * does not say what was measured, keep none. Of different measures (in C, and by torch) they are not to be compared.
 * Errors: as even_profile_speeds. */
even_status even_profile_strengths(const char *path, even_device_list *devices) EVEN_MUST_USE;

#endif
