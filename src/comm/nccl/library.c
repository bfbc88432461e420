/* Opens NCCL and the CUDA driver, and fills their tables. */
#include "comm/nccl/abi.h"

#include "base/fail.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LIBRARIES = 4, NAME_BYTES = 512 };

typedef struct wanted_symbol {
  void *function; /* address of the pointer */
  const char *name;
  bool optional;
} wanted_symbol;

/* The libraries that are open, each with the name that it was asked for by; "" where there is none yet. */
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static char nccl_names[LIBRARIES][NAME_BYTES];
static char cuda_names[LIBRARIES][NAME_BYTES];
static even_nccl nccls[LIBRARIES];
static even_cuda_driver cudas[LIBRARIES];

static even_status symbols_load(const even_library *library, const char *path, const wanted_symbol *wanted,
                                size_t count) {
  for (size_t i = 0; i < count; i++) {
    void *symbol = even_library_symbol(library, wanted[i].name);
    if (symbol == NULL && !wanted[i].optional) {
      return even_fail(EVEN_ERR_UNSUPPORTED, "%s lacks %s: not this library, or too old a version of it", path,
                       wanted[i].name);
    }
    memcpy(wanted[i].function, &symbol, sizeof symbol);
  }
  return EVEN_OK;
}

static even_status nccl_load(const char *name, even_nccl *out) {
  const wanted_symbol wanted[] = {
      {&out->get_version, "ncclGetVersion", false},
      {&out->make_id, "ncclGetUniqueId", false},
      {&out->init, "ncclCommInitRankConfig", false},
      {&out->finalize, "ncclCommFinalize", false},
      {&out->destroy, "ncclCommDestroy", false},
      {&out->abort, "ncclCommAbort", false},
      {&out->async_error, "ncclCommGetAsyncError", false},
      {&out->error_text, "ncclGetErrorString", false},
      {&out->last_error, "ncclGetLastError", false},
      {&out->op_make, "ncclRedOpCreatePreMulSum", false},
      {&out->op_free, "ncclRedOpDestroy", false},
      {&out->all_reduce, "ncclAllReduce", false},
      {&out->reduce, "ncclReduce", false},
      {&out->reduce_scatter, "ncclReduceScatter", false},
      {&out->all_gather, "ncclAllGather", false},
      {&out->broadcast, "ncclBroadcast", false},
      {&out->send, "ncclSend", false},
      {&out->receive, "ncclRecv", false},
      {&out->group_begin, "ncclGroupStart", false},
      {&out->group_end, "ncclGroupEnd", false},
      {&out->shrink, "ncclCommShrink", true},
      {&out->grow_id, "ncclCommGetUniqueId", true},
      {&out->grow, "ncclCommGrow", true},
  };
  if (even_library_open(name, &out->library) != EVEN_OK) {
    char why[sizeof even_error_last()->what];
    (void)snprintf(why, sizeof why, "%s", even_error_last()->what);
    (void)even_fail(EVEN_ERR_UNSUPPORTED, "NCCL was not found: %s", why);
    return even_error_fix(
        "install NCCL (pip install nvidia-nccl-cu13, or -cu12 for an older driver), or name its "
        "libnccl.so.2 in EVENSTEP_NCCL_LIBRARY");
  }
  EVEN_TRY(symbols_load(&out->library, name, wanted, sizeof wanted / sizeof wanted[0]));
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
  const wanted_symbol wanted[] = {
      {&out->init, "cuInit", false},
      {&out->device_count, "cuDeviceGetCount", false},
      {&out->device_get, "cuDeviceGet", false},
      {&out->context_retain, "cuDevicePrimaryCtxRetain", false},
      {&out->context_release, "cuDevicePrimaryCtxRelease_v2", false},
      {&out->context_push, "cuCtxPushCurrent_v2", false},
      {&out->context_pop, "cuCtxPopCurrent_v2", false},
      {&out->memory_allocate, "cuMemAlloc_v2", false},
      {&out->memory_free, "cuMemFree_v2", false},
      {&out->error_text, "cuGetErrorString", false},
  };
  if (even_library_open(name, &out->library) != EVEN_OK) {
    (void)even_fail(EVEN_ERR_UNSUPPORTED, "%s was not found: no NVIDIA driver is installed", name);
    return even_error_fix("GPU collectives need an NVIDIA GPU and its driver; CPU ranks use even_comm");
  }
  EVEN_TRY(symbols_load(&out->library, name, wanted, sizeof wanted / sizeof wanted[0]));
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
