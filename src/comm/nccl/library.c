/* Opens NCCL and the CUDA driver, and fills their tables. */
#include "comm/nccl/abi.h"

#include "base/fail.h"

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LIBRARIES = 4, NAME_BYTES = 512 };

/* The libraries that are open, each with the name that it was asked for by; "" where there is none yet. */
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static char nccl_names[LIBRARIES][NAME_BYTES];
static char cuda_names[LIBRARIES][NAME_BYTES];
static even_nccl nccls[LIBRARIES];
static even_cuda_driver cudas[LIBRARIES];

static even_status take(const even_library *library, const char *path, const even_library_wanted *wanted, size_t count,
                        void *table) {
  const char *absent = even_library_take(library, wanted, count, table);
  return absent == NULL ? EVEN_OK
                        : even_fail(EVEN_ERR_UNSUPPORTED, "%s lacks %s: not this library, or too old a version of it",
                                    path, absent);
}

static even_status nccl_load(const char *name, even_nccl *out) {
  static const even_library_wanted wanted[] = {
      {"ncclGetVersion", offsetof(even_nccl, get_version), false},
      {"ncclGetUniqueId", offsetof(even_nccl, make_id), false},
      {"ncclCommInitRankConfig", offsetof(even_nccl, init), false},
      {"ncclCommFinalize", offsetof(even_nccl, finalize), false},
      {"ncclCommDestroy", offsetof(even_nccl, destroy), false},
      {"ncclCommAbort", offsetof(even_nccl, abort), false},
      {"ncclCommGetAsyncError", offsetof(even_nccl, async_error), false},
      {"ncclGetErrorString", offsetof(even_nccl, error_text), false},
      {"ncclGetLastError", offsetof(even_nccl, last_error), false},
      {"ncclRedOpCreatePreMulSum", offsetof(even_nccl, op_make), false},
      {"ncclRedOpDestroy", offsetof(even_nccl, op_free), false},
      {"ncclAllReduce", offsetof(even_nccl, all_reduce), false},
      {"ncclReduce", offsetof(even_nccl, reduce), false},
      {"ncclReduceScatter", offsetof(even_nccl, reduce_scatter), false},
      {"ncclAllGather", offsetof(even_nccl, all_gather), false},
      {"ncclBroadcast", offsetof(even_nccl, broadcast), false},
      {"ncclSend", offsetof(even_nccl, send), false},
      {"ncclRecv", offsetof(even_nccl, receive), false},
      {"ncclGroupStart", offsetof(even_nccl, group_begin), false},
      {"ncclGroupEnd", offsetof(even_nccl, group_end), false},
      {"ncclCommShrink", offsetof(even_nccl, shrink), true},
      {"ncclCommGetUniqueId", offsetof(even_nccl, grow_id), true},
      {"ncclCommGrow", offsetof(even_nccl, grow), true},
  };
  if (even_library_open(name, &out->library) != EVEN_OK) {
    char why[sizeof even_error_last()->what];
    (void)snprintf(why, sizeof why, "%s", even_error_last()->what);
    (void)even_fail(EVEN_ERR_UNSUPPORTED, "NCCL was not found: %s", why);
    return even_error_fix(
        "install NCCL (pip install nvidia-nccl-cu13, or -cu12 for an older driver), or name its "
        "libnccl.so.2 in EVENSTEP_NCCL_LIBRARY");
  }
  EVEN_TRY(take(&out->library, name, wanted, sizeof wanted / sizeof wanted[0], out));
  int code = out->get_version(&out->version);
  if (code != EVEN_NCCL_SUCCESS) {
    return even_fail(EVEN_ERR_UNSUPPORTED, "%s does not say its version: %s", name, out->error_text(code));
  }
  if (out->version < EVEN_NCCL_LEAST_VERSION) {
    (void)even_fail(EVEN_ERR_UNSUPPORTED, "%s is NCCL %d.%d.%d; this build needs 2.18 or newer", name,
                    out->version / 10000, out->version / 100 % 100, out->version % 100);
    return even_error_fix("install a newer NCCL, or name one in EVENSTEP_NCCL_LIBRARY");
  }
  return EVEN_OK;
}

static even_status driver_start(const even_cuda_driver *cuda, const char *name) {
  const char *text = NULL;
  int code = cuda->init(0);
  if (code == 0) {
    return EVEN_OK;
  }
  if (cuda->error_text(code, &text) != 0 || text == NULL) {
    text = "unknown error";
  }
  (void)even_fail(EVEN_ERR_UNSUPPORTED, "the NVIDIA driver (%s) does not start: %s (error %d)", name, text, code);
  return even_error_fix("see what nvidia-smi says; in a container, pass the GPU in");
}

static even_status cuda_load(const char *name, even_cuda_driver *out) {
  static const even_library_wanted wanted[] = {
      {"cuInit", offsetof(even_cuda_driver, init), false},
      {"cuDeviceGetCount", offsetof(even_cuda_driver, device_count), false},
      {"cuDeviceGet", offsetof(even_cuda_driver, device_get), false},
      {"cuDevicePrimaryCtxRetain", offsetof(even_cuda_driver, context_retain), false},
      {"cuDevicePrimaryCtxRelease_v2", offsetof(even_cuda_driver, context_release), false},
      {"cuCtxPushCurrent_v2", offsetof(even_cuda_driver, context_push), false},
      {"cuCtxPopCurrent_v2", offsetof(even_cuda_driver, context_pop), false},
      {"cuMemAlloc_v2", offsetof(even_cuda_driver, memory_allocate), false},
      {"cuMemFree_v2", offsetof(even_cuda_driver, memory_free), false},
      {"cuGetErrorString", offsetof(even_cuda_driver, error_text), false},
      {"cuEventCreate", offsetof(even_cuda_driver, event_create), false},
      {"cuEventDestroy_v2", offsetof(even_cuda_driver, event_destroy), false},
      {"cuEventRecord", offsetof(even_cuda_driver, event_record), false},
      {"cuEventQuery", offsetof(even_cuda_driver, event_query), false},
      {"cuEventElapsedTime", offsetof(even_cuda_driver, event_elapsed), false},
      {"cuStreamIsCapturing", offsetof(even_cuda_driver, stream_captures), false},
      {"cuThreadExchangeStreamCaptureMode", offsetof(even_cuda_driver, capture_mode_exchange), false},
  };
  if (even_library_open(name, &out->library) != EVEN_OK) {
    (void)even_fail(EVEN_ERR_UNSUPPORTED, "%s was not found: no NVIDIA driver is installed", name);
    return even_error_fix("GPU collectives need an NVIDIA GPU and its driver; CPU ranks use even_comm");
  }
  EVEN_TRY(take(&out->library, name, wanted, sizeof wanted / sizeof wanted[0], out));
  return driver_start(out, name);
}

static const char *name_or(const char *given, const char *variable, const char *otherwise) {
  const char *named = given == NULL || given[0] == '\0' ? getenv(variable) : given;
  return named == NULL || named[0] == '\0' ? otherwise : named;
}

/* The place of the library of that name, or the next one that is free: its own name is "" then. */
static even_status find_place(char names[][NAME_BYTES], const char *name, size_t *out) {
  for (size_t i = 0; i < LIBRARIES; i++) {
    if (names[i][0] == '\0' || strcmp(names[i], name) == 0) {
      *out = i;
      return EVEN_OK;
    }
  }
  return even_fail(EVEN_ERR_STATE, "%s would be one library more than the %d that a process may open", name, LIBRARIES);
}

/* After an attempt to open one in a free place: keeps it under its name, or gives it back. */
static even_status keep(even_status status, const char *name, char *place, even_library *library) {
  if (status == EVEN_OK) {
    (void)snprintf(place, NAME_BYTES, "%s", name);
  } else {
    even_library_close(library);
  }
  return status;
}

static even_status nccl_find(const char *name, const even_nccl **out) {
  size_t i = 0;
  EVEN_TRY(find_place(nccl_names, name, &i));
  if (nccl_names[i][0] == '\0') {
    nccls[i] = (even_nccl){0};
    EVEN_TRY(keep(nccl_load(name, &nccls[i]), name, nccl_names[i], &nccls[i].library));
  }
  *out = &nccls[i];
  return EVEN_OK;
}

static even_status cuda_find(const char *name, const even_cuda_driver **out) {
  size_t i = 0;
  EVEN_TRY(find_place(cuda_names, name, &i));
  if (cuda_names[i][0] == '\0') {
    cudas[i] = (even_cuda_driver){0};
    EVEN_TRY(keep(cuda_load(name, &cudas[i]), name, cuda_names[i], &cudas[i].library));
  }
  *out = &cudas[i];
  return EVEN_OK;
}

static even_status check_name(const char *name) {
  if (strlen(name) >= NAME_BYTES) {
    return even_fail(EVEN_ERR_ARGUMENT, "the name of a library has %zu bytes; up to %d are possible", strlen(name),
                     NAME_BYTES - 1);
  }
  return EVEN_OK;
}

even_status even_nccl_open(const char *name, const even_nccl **out) {
  const char *wanted = name_or(name, "EVENSTEP_NCCL_LIBRARY", "libnccl.so.2");
  EVEN_TRY(check_name(wanted));
  (void)pthread_mutex_lock(&guard);
  even_status status = nccl_find(wanted, out);
  (void)pthread_mutex_unlock(&guard);
  return status;
}

even_status even_cuda_driver_open(const even_cuda_driver **out) {
  const char *wanted = name_or(NULL, "EVENSTEP_CUDA_LIBRARY", "libcuda.so.1");
  EVEN_TRY(check_name(wanted));
  (void)pthread_mutex_lock(&guard);
  even_status status = cuda_find(wanted, out);
  (void)pthread_mutex_unlock(&guard);
  return status;
}
