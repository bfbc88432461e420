/* Opening, ending and remaking communicators. */
#include "comm/nccl/device_comm.h"

#include "base/alloc.h"
#include "base/params.h"
#include "os/thread.h"

#include <stdlib.h>
#include <string.h>

/* How long one that could not open a communicator waits for others to come and hear why. */
#define TELLING_NS ((uint64_t)2000000000u)

_Static_assert((int)EVEN_DEVICE_COMM_ID_BYTES == (int)EVEN_NCCL_ID_BYTES, "the public id holds NCCL's");

static double limit_of(double seconds) {
  return seconds > 0 ? seconds : 1800.0;
}

even_status even_device_comm_library(const char *library, int *version) {
  const even_nccl *nccl = NULL;
  const even_cuda_driver *cuda = NULL;
  EVEN_TRY(even_nccl_open(library, &nccl));
  EVEN_TRY(even_cuda_driver_open(&cuda));
  *version = nccl->version;
  return EVEN_OK;
}

even_status even_device_comm_make_id(const char *library, even_device_comm_id *out) {
  const even_nccl *nccl = NULL;
  even_nccl_id id;
  EVEN_TRY(even_nccl_open(library, &nccl));
  int result = nccl->make_id(&id);
  if (result != EVEN_NCCL_SUCCESS) {
    (void)even_fail(EVEN_ERR_SYSTEM, "NCCL cannot make an identity for a group: %s: %s", nccl->error_text(result),
                    nccl->last_error(NULL));
    return even_error_fix("NCCL_DEBUG=WARN says more; NCCL_SOCKET_IFNAME names the network interface to use");
  }
  memcpy(out->bytes, id.internal, sizeof out->bytes);
  return EVEN_OK;
}

/* ---- a communicator without its handle ---- */

static even_status driver_failed(const even_device_comm *comm, const char *call, int code) {
  const char *text = NULL;
  (void)comm->cuda->error_text(code, &text);
  return even_fail(EVEN_ERR_DEVICE, "cuda:%d: %s: %s (error %d)", comm->device, call,
                   text == NULL ? "unknown error" : text, code);
}

static even_status take_device(even_device_comm *comm) {
  int count = 0;
  int code = comm->cuda->device_count(&count);
  if (code != 0) {
    return driver_failed(comm, "cuDeviceGetCount", code);
  }
  if (comm->device < 0 || comm->device >= count) {
    (void)even_fail(EVEN_ERR_DEVICE, "there is no cuda:%d: the driver shows %d GPU%s", comm->device, count,
                    count == 1 ? "" : "s");
    return even_error_fix("see `evenstep devices`, and CUDA_VISIBLE_DEVICES");
  }
  code = comm->cuda->device_get(&comm->cuda_device, comm->device);
  if (code != 0) {
    return driver_failed(comm, "cuDeviceGet", code);
  }
  code = comm->cuda->context_retain(&comm->context, comm->cuda_device);
  if (code != 0) {
    comm->context = NULL;
    return driver_failed(comm, "cuDevicePrimaryCtxRetain", code);
  }
  return EVEN_OK;
}

/* Memory for the barrier, once the context is current. */
static even_status take_word(even_device_comm *comm) {
  int code = comm->cuda->memory_allocate(&comm->word, sizeof(float));
  if (code != 0) {
    comm->word = 0;
    return driver_failed(comm, "cuMemAlloc", code);
  }
  return EVEN_OK;
}

void even_device_free(even_device_comm *comm) {
  even_device_track_free(comm);
  if (comm->context != NULL) {
    if (comm->word != 0 && even_device_context_push(comm) == EVEN_OK) {
      (void)comm->cuda->memory_free(comm->word);
      even_device_context_pop(comm);
    }
    (void)comm->cuda->context_release(comm->cuda_device);
  }
  (void)pthread_mutex_destroy(&comm->lock);
  (void)pthread_mutex_destroy(&comm->aside);
  (void)pthread_mutex_destroy(&comm->track);
  even_board_close(&comm->board);
  even_free(comm->recording);
  even_free(comm->compared);
  even_free(comm->settled_ns);
  even_free(comm->numbers);
  even_free(comm->ops);
  even_free(comm);
}

even_status even_device_new(const even_nccl *nccl, const even_cuda_driver *cuda, const even_device_comm_params *params,
                            even_device_comm **out) {
  even_device_comm *comm = NULL;
  EVEN_TRY(EVEN_NEW(&comm));
  comm->nccl = nccl;
  comm->cuda = cuda;
  comm->rank = params->rank;
  comm->ranks = params->ranks;
  comm->device = params->device;
  comm->process_mark = even_process_mark();
  comm->blocking = params->blocking;
  comm->leave_abort = params->leave_abort;
  comm->board.memory.fd = -1;
  comm->stall_ns = UINT64_MAX;
  even_device_comm_set_stop_grace(comm, 0);
  atomic_flag_clear(&comm->taken);
  atomic_init(&comm->holders, 1);
  atomic_init(&comm->timeout_seconds, limit_of(params->timeout_seconds));
  (void)pthread_mutex_init(&comm->lock, NULL);
  (void)pthread_mutex_init(&comm->aside, NULL);
  (void)pthread_mutex_init(&comm->track, NULL);
  even_status status = EVEN_NEW_ARRAY(&comm->compared, (size_t)params->ranks);
  if (status == EVEN_OK) {
    status = EVEN_NEW_ARRAY(&comm->settled_ns, (size_t)params->ranks);
  }
  if (status == EVEN_OK) {
    status = take_device(comm);
  }
  if (status == EVEN_OK) {
    status = even_device_context_push(comm);
  }
  if (status == EVEN_OK) {
    status = take_word(comm);
    even_device_context_pop(comm);
  }
  if (status != EVEN_OK) {
    even_device_free(comm);
    return status;
  }
  *out = comm;
  return EVEN_OK;
}

/* ---- opening ---- */

static even_status check_params(const even_device_comm_params *params, const even_nccl *nccl) {
  if (params->ranks < 1 || params->rank < 0 || params->rank >= params->ranks) {
    return even_fail(EVEN_ERR_ARGUMENT, "rank %d of %d: ranks count from 0, and there is one at least", params->rank,
                     params->ranks);
  }
  if (!params->shares_device) {
    return EVEN_OK;
  }
  if (nccl->version < EVEN_NCCL_SHARING_VERSION) {
    (void)even_fail(EVEN_ERR_UNSUPPORTED, "rank %d shares cuda:%d with another rank: NCCL %d.%d takes one rank a GPU",
                    params->rank, params->device, nccl->version / 10000, nccl->version / 100 % 100);
    return even_error_fix("give each rank a GPU of its own, or install NCCL 2.30 or newer");
  }
  const char *enabled = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  if (enabled == NULL || strcmp(enabled, "1") != 0) {
    (void)even_fail(EVEN_ERR_UNSUPPORTED, "rank %d shares cuda:%d with another rank, which NCCL has to be told",
                    params->rank, params->device);
    return even_error_fix("set NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment of all ranks");
  }
  return EVEN_OK;
}

static even_nccl_config config_of(const even_device_comm_params *params) {
  return (even_nccl_config){.size = sizeof(even_nccl_config),
                            .magic = EVEN_NCCL_CONFIG_MAGIC,
                            .version = EVEN_NCCL_CONFIG_VERSION,
                            .blocking = params->blocking ? 1 : 0,
                            .cga_cluster_size = EVEN_NCCL_UNSET,
                            .least_ctas = EVEN_NCCL_UNSET,
                            .most_ctas = EVEN_NCCL_UNSET};
}

/* Makes the handle: with init, or as a new rank of a group that grows. */
static even_status come_together(even_device_comm *comm, const even_device_comm_params *params,
                                 const even_device_comm_id *id, bool joins) {
  const even_device_call call = {.name = joins ? "join" : "open", .count = (size_t)params->ranks};
  even_nccl_config config = config_of(params);
  even_nccl_id given;
  memcpy(given.internal, id->bytes, sizeof given.internal);
  EVEN_TRY(even_device_context_push(comm));
  int result = joins ? comm->nccl->grow(NULL, params->ranks, &given, params->rank, &comm->handle, &config)
                     : comm->nccl->init(&comm->handle, params->ranks, given, params->rank, &config);
  even_status status = even_device_settle(comm, comm->handle, &call, result);
  if (status != EVEN_OK && comm->handle != NULL) {
    (void)comm->nccl->abort(comm->handle);
  }
  even_device_context_pop(comm);
  return status;
}

even_status even_device_needs(const void *function, const even_nccl *nccl, const char *what, const char *version) {
  if (function != NULL) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_UNSUPPORTED, "NCCL %d.%d.%d cannot %s", nccl->version / 10000, nccl->version / 100 % 100,
                  nccl->version % 100, what);
  return even_error_fix("install NCCL %s or newer, or close the communicator and open a new one", version);
}

even_status even_device_check_grow(const even_nccl *nccl) {
  return even_device_needs(nccl->grow == NULL || nccl->grow_id == NULL ? NULL : nccl, nccl, "grow a communicator",
                           "2.29");
}

static even_status open_or_join(const even_device_comm_params *params, const even_device_comm_id *id, bool joins,
                                even_device_comm **out) {
  const even_nccl *nccl = NULL;
  const even_cuda_driver *cuda = NULL;
  even_device_comm *comm = NULL;
  even_device_comm_params own;
  *out = NULL;
  EVEN_TRY(EVEN_TAKE_PARAMS(even_device_comm_params, &own, params));
  EVEN_TRY(EVEN_CHECK_RESERVED(even_device_comm_params, &own));
  params = &own;
  EVEN_TRY(even_nccl_open(params->library, &nccl));
  EVEN_TRY(check_params(params, nccl));
  if (joins) {
    EVEN_TRY(even_device_check_grow(nccl));
  }
  EVEN_TRY(even_cuda_driver_open(&cuda));
  EVEN_TRY(even_device_new(nccl, cuda, params, &comm));
  even_status status = even_device_introduce(comm, params);
  atomic_store(&comm->meets, true);
  even_device_watch_begin(comm);
  if (status == EVEN_OK) {
    status = come_together(comm, params, id, joins);
  }
  if (status != EVEN_OK) {
    const even_error kept = *even_error_of(status);
    even_device_watch_end(comm);
    even_board_end(&comm->board, &kept);
    even_board_await(&comm->board, TELLING_NS);
    even_device_free(comm);
    return even_error_restore(&kept);
  }
  atomic_store(&comm->meets, false);
  *out = comm;
  return EVEN_OK;
}

even_status even_device_comm_open(const even_device_comm_params *params, const even_device_comm_id *id,
                                  even_device_comm **out) {
  return open_or_join(params, id, false, out);
}

even_status even_device_comm_join(const even_device_comm_params *params, const even_device_comm_id *id,
                                  even_device_comm **out) {
  return open_or_join(params, id, true, out);
}

/* ---- ending ---- */

static even_status finish(even_device_comm *comm) {
  const even_device_call call = {.name = "close"};
  if (comm->handle == NULL) {
    return EVEN_OK;
  }
  even_status status = EVEN_OK;
  if (atomic_load(&comm->ending) == 0 && comm->broken.status == EVEN_OK) {
    status = even_device_settle(comm, comm->handle, &call, comm->nccl->finalize(comm->handle));
    if (status == EVEN_OK) {
      (void)atomic_flag_test_and_set(&comm->taken);
      int result = comm->nccl->destroy(comm->handle);
      comm->handle = NULL;
      return even_device_settle(comm, NULL, &call, result == EVEN_NCCL_IN_PROGRESS ? EVEN_NCCL_SUCCESS : result);
    }
  }
  even_device_end_handle(comm);
  return status;
}

/* Nobody looks any more, and the others know that this rank has left. */
static even_status end_watch(even_device_comm *comm, even_status status) {
  even_device_watch_end(comm);
  if (comm->has_aborter) {
    even_thread_join(comm->aborter);
  }
  status = status == EVEN_OK ? even_device_untold(comm) : status;
  const even_error kept = *even_error_last();
  even_device_track_drop(comm);
  even_board_leave(&comm->board);
  even_device_free(comm);
  (void)even_error_restore(&kept);
  return status;
}

even_status even_device_comm_close(even_device_comm *comm) {
  const even_device_call call = {.name = "close", .revives = true};
  if (comm == NULL || even_device_is_inherited(comm)) {
    return EVEN_OK;
  }
  if (even_device_in_group(comm)) {
    atomic_store(&comm->ending, EVEN_DEVICE_ABORTED); /* a group left open: what is in it is not wanted */
    even_device_drop_groups(comm);
  }
  EVEN_TRY(even_device_lock(comm, &call));
  atomic_store(&comm->meets, true);
  even_status status = even_device_context_push(comm);
  if (status == EVEN_OK) {
    status = finish(comm);
    even_device_context_pop(comm);
  } else {
    even_device_end_handle(comm);
  }
  (void)pthread_mutex_unlock(&comm->lock);
  return end_watch(comm, status);
}

static void see_what_is_done(even_device_comm *comm) {
  const even_error kept = *even_error_last();
  if (even_device_context_push(comm) == EVEN_OK) {
    (void)pthread_mutex_lock(&comm->track);
    (void)even_device_track_look(comm);
    (void)pthread_mutex_unlock(&comm->track);
    even_device_context_pop(comm);
  }
  (void)even_error_restore(&kept);
}

even_status even_device_comm_poll(even_device_comm *comm) {
  const even_device_call call = {.name = "poll"};
  if (atomic_load(&comm->ending) != EVEN_DEVICE_WHOLE) {
    return even_device_ended(comm, &call);
  }
  if (pthread_mutex_trylock(&comm->lock) != 0) {
    return EVEN_OK; /* a call is under way: it says itself what is wrong */
  }
  even_status status = EVEN_OK;
  if (comm->broken.status != EVEN_OK) {
    status = even_error_restore(&comm->broken);
  } else if (comm->handle == NULL) {
    status = even_device_ended(comm, &call);
  } else {
    int state = EVEN_NCCL_SUCCESS;
    int code = comm->nccl->async_error(comm->handle, &state);
    int result = code == EVEN_NCCL_SUCCESS ? state : code;
    status = even_device_result(comm, &call, result == EVEN_NCCL_IN_PROGRESS ? EVEN_NCCL_SUCCESS : result);
    see_what_is_done(comm);
  }
  (void)pthread_mutex_unlock(&comm->lock);
  return status;
}

void even_device_comm_set_timeout(even_device_comm *comm, double seconds) {
  atomic_store(&comm->timeout_seconds, limit_of(seconds));
}
void even_device_comm_set_call_timeout(even_device_comm *comm, double seconds) {
  atomic_store(&comm->call_seconds, seconds > 0 ? seconds : 0);
}
int even_device_comm_rank(const even_device_comm *comm) {
  return comm->rank;
}
int even_device_comm_ranks(const even_device_comm *comm) {
  return comm->ranks;
}
int even_device_comm_device(const even_device_comm *comm) {
  return comm->device;
}
