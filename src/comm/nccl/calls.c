/* What every call on a communicator does before and after NCCL's: the lock, the context, groups, waits, errors. */
#include "comm/nccl/device_comm.h"

#include "base/alloc.h"
#include "os/clock.h"
#include "os/futex.h"

#include <stdio.h>
#include <string.h>

/* NCCL's groups belong to the thread; ours to one communicator of it. */
static _Thread_local even_device_comm *grouped;

bool even_device_in_group(const even_device_comm *comm) {
  return grouped == comm;
}

bool even_device_has_group(const even_device_comm *comm) {
  return atomic_load(&comm->depth) > 0;
}

/* ---- errors ---- */

static even_status too_late(const even_device_comm *comm, const even_device_call *call, double seconds) {
  (void)even_fail(EVEN_ERR_TIMEOUT,
                  "%s on rank %d of %d (cuda:%d): NCCL was not ready after %.3g s: a rank did not come", call->name,
                  even_device_number(comm, comm->rank), comm->ranks, comm->device, seconds);
  (void)even_device_place(comm);
  return even_error_fix("see what the other ranks do; NCCL_DEBUG=INFO on all of them says whom NCCL waits for");
}

static even_status status_of(int result, const char *words) {
  switch (result) {
    case EVEN_NCCL_SYSTEM_ERROR:
      return EVEN_ERR_SYSTEM;
    case EVEN_NCCL_INVALID_ARGUMENT:
      return EVEN_ERR_ARGUMENT;
    case EVEN_NCCL_INVALID_USAGE:
      return strstr(words, "Duplicate GPU") != NULL ? EVEN_ERR_UNSUPPORTED : EVEN_ERR_STATE;
    case EVEN_NCCL_REMOTE_ERROR:
      return EVEN_ERR_PEER_LOST;
    case EVEN_NCCL_TIMEOUT:
      return EVEN_ERR_TIMEOUT;
    default:
      return EVEN_ERR_DEVICE;
  }
}

static even_status advise(even_status status) {
  switch (status) {
    case EVEN_ERR_SYSTEM:
      return even_error_fix(
          "NCCL_DEBUG=WARN names the call that failed; look at the room in /dev/shm and at the network "
          "interfaces (NCCL_SOCKET_IFNAME)");
    case EVEN_ERR_ARGUMENT:
      return even_error_fix("give device memory and a stream of this communicator's GPU");
    case EVEN_ERR_UNSUPPORTED:
      return even_error_fix(
          "give each rank a GPU of its own (CUDA_VISIBLE_DEVICES); NCCL 2.30 and newer take several "
          "ranks on one with NCCL_MULTI_RANK_GPU_ENABLE=1 and shares_device");
    case EVEN_ERR_PEER_LOST:
      return even_error_fix("see the other ranks' errors; abort, and make a new group of those that are left");
    default:
      return even_error_fix(
          "NCCL_DEBUG=WARN says more; abort the communicator; after an error of CUDA itself the process "
          "has to start anew");
  }
}

even_status even_device_translate(const even_device_comm *comm, even_nccl_comm *handle, const even_device_call *call,
                                  int result) {
  const char *text = comm->nccl->error_text(result);
  const char *words = comm->nccl->last_error(handle);
  words = words == NULL ? "" : words;
  even_status status =
      even_fail(status_of(result, words), "%s (%zu) on rank %d of %d, cuda:%d: NCCL says: %s%s%s", call->name,
                call->count, even_device_number(comm, comm->rank), comm->ranks, comm->device,
                text == NULL ? "unknown error" : text, words[0] == '\0' ? "" : ": ", words);
  (void)even_device_place(comm);
  return advise(status);
}

static even_status broken_before(const even_device_comm *comm, const even_device_call *call) {
  (void)even_fail(EVEN_ERR_STATE, "%s: the communicator is broken since: %s", call->name, comm->broken.what);
  (void)even_device_place(comm);
  return even_error_fix("abort or close it, and open a new one");
}

/* What a failure means for later calls: a refused argument nothing, all else the end. */
static even_status remember(even_device_comm *comm, even_status status) {
  bool harmless = status == EVEN_OK || status == EVEN_ERR_REVOKED || (status == EVEN_ERR_ARGUMENT && grouped != comm);
  if (!harmless && comm->broken.status == EVEN_OK) {
    comm->broken = *even_error_of(status);
    if (atomic_load(&comm->ending) == EVEN_DEVICE_WHOLE) {
      even_device_tell(comm, &comm->broken);
    }
  }
  return status;
}

/* ---- waits ---- */

even_status even_device_settle(even_device_comm *comm, even_nccl_comm *handle, const even_device_call *call,
                               int result) {
  enum { SHORT_NS = 20000 };
  double seconds = even_device_limit(comm);
  uint64_t begun = result == EVEN_NCCL_IN_PROGRESS ? even_clock_ns() : 0;
  while (result == EVEN_NCCL_IN_PROGRESS) {
    uint32_t ending = atomic_load(&comm->ending);
    if (ending == EVEN_DEVICE_ABORTED || (ending == EVEN_DEVICE_ENDED && !call->revives)) {
      return even_device_ended(comm, call);
    }
    int state = EVEN_NCCL_SUCCESS;
    int code = comm->nccl->async_error(handle, &state);
    result = code == EVEN_NCCL_SUCCESS ? state : code;
    if (result == EVEN_NCCL_IN_PROGRESS) {
      if ((double)(even_clock_ns() - begun) > seconds * 1e9) {
        return too_late(comm, call, seconds);
      }
      even_futex_wait(&comm->ending, ending, SHORT_NS);
    }
  }
  return result == EVEN_NCCL_SUCCESS ? EVEN_OK : even_device_translate(comm, handle, call, result);
}

even_status even_device_result(even_device_comm *comm, const even_device_call *call, int result) {
  if (grouped == comm && result == EVEN_NCCL_IN_PROGRESS) {
    return EVEN_OK; /* it begins at the group's end */
  }
  return remember(comm, even_device_settle(comm, comm->handle, call, result));
}

/* ---- before and after ---- */

even_status even_device_context_push(even_device_comm *comm) {
  int code = comm->cuda->context_push(comm->context);
  if (code != 0) {
    const char *text = NULL;
    (void)comm->cuda->error_text(code, &text);
    (void)even_fail(EVEN_ERR_DEVICE, "cuda:%d cannot be made current: %s (error %d)", comm->device,
                    text == NULL ? "unknown error" : text, code);
    return even_device_place(comm);
  }
  return EVEN_OK;
}

void even_device_context_pop(even_device_comm *comm) {
  void *context = NULL;
  (void)comm->cuda->context_pop(&context);
}

static even_status ready(even_device_comm *comm, const even_device_call *call, bool also_broken) {
  uint32_t ending = atomic_load(&comm->ending);
  if (ending == EVEN_DEVICE_ABORTED || (ending == EVEN_DEVICE_ENDED && !(call->revives && comm->leave_abort))) {
    return even_device_ended(comm, call);
  }
  if (comm->broken.status != EVEN_OK && !also_broken) {
    return broken_before(comm, call);
  }
  return even_device_context_push(comm);
}

/* `ended`: the communicator has, and is to be closed, or to be made anew. */
static even_status group_is_open(const even_device_comm *comm, const even_device_call *call, double seconds,
                                 bool ended) {
  (void)even_fail(EVEN_ERR_TIMEOUT,
                  "%s on rank %d of %d (cuda:%d): another thread has a group of this communicator's calls open, and "
                  "has not ended it within %.3g s%s",
                  call->name, even_device_number(comm, comm->rank), comm->ranks, comm->device, seconds,
                  ended ? ", though the communicator has ended" : "");
  (void)even_device_place(comm);
  return even_error_fix(call->revives ? "end the group on the thread that began it, then %s again; until then the "
                                        "communicator keeps its memory on the GPU"
                                      : "end the group on the thread that began it, then %s again",
                        call->name);
}

even_status even_device_lock(even_device_comm *comm, const even_device_call *call) {
  if (pthread_mutex_trylock(&comm->lock) == 0) {
    return EVEN_OK;
  }
  double limit = even_device_limit(comm);
  uint64_t begun = even_clock_ns();
  while (!even_device_lock_within(comm, limit < EVEN_DEVICE_GRACE_SECONDS ? limit : EVEN_DEVICE_GRACE_SECONDS)) {
    bool ended = atomic_load(&comm->ending) != EVEN_DEVICE_WHOLE;
    bool late = (double)(even_clock_ns() - begun) > limit * 1e9;
    if (atomic_load(&comm->depth) > 0 && (ended || late)) {
      return ended && !call->revives ? even_device_ended(comm, call)
                                     : group_is_open(comm, call, (double)(even_clock_ns() - begun) * 1e-9, ended);
    }
  }
  return EVEN_OK;
}

even_status even_device_enter_any(even_device_comm *comm, const even_device_call *call, bool also_broken) {
  if (grouped != NULL && grouped != comm) {
    (void)even_fail(EVEN_ERR_STATE, "%s: this thread has a group of another communicator open", call->name);
    (void)even_device_place(comm);
    return even_error_fix("end that group first: a group is of one communicator");
  }
  if (grouped == NULL) {
    EVEN_TRY(even_device_lock(comm, call));
  }
  even_status status = ready(comm, call, also_broken);
  if (status != EVEN_OK && grouped == NULL) {
    (void)pthread_mutex_unlock(&comm->lock);
  }
  return status;
}

even_status even_device_enter(even_device_comm *comm, const even_device_call *call) {
  EVEN_TRY(even_device_enter_any(comm, call, false));
  even_status status = call->recorded == 0 ? EVEN_OK : even_device_track_begin(comm, call);
  return status == EVEN_OK ? EVEN_OK : even_device_leave(comm, status);
}

static void free_ops(even_device_comm *comm) {
  while (comm->op_count > 0) {
    int op = comm->ops[--comm->op_count];
    if (comm->handle != NULL) {
      (void)comm->nccl->op_free(op, comm->handle);
    }
  }
}

/* Its operations go with the communicator: they cannot be freed without the GPU's context. */
static even_status leave_without_context(even_device_comm *comm, even_status status) {
  if (grouped == NULL) {
    even_device_track_launched(comm, status == EVEN_OK ? EVEN_ERR_DEVICE : status); /* nothing, where it was done */
    (void)pthread_mutex_unlock(&comm->lock);
  }
  return status;
}

even_status even_device_leave(even_device_comm *comm, even_status status) {
  if (grouped == NULL) {
    even_device_track_launched(comm, status);
    even_device_end_if_aborted(comm);
    free_ops(comm);
  }
  even_device_track_pop();
  even_device_context_pop(comm);
  return leave_without_context(comm, status);
}

even_status even_device_reserve_op(even_device_comm *comm) {
  if (comm->op_count < comm->op_capacity) {
    return EVEN_OK;
  }
  size_t capacity = comm->op_capacity == 0 ? 8 : 2 * comm->op_capacity;
  EVEN_TRY(even_realloc((void **)&comm->ops, capacity, sizeof *comm->ops));
  comm->op_capacity = capacity;
  return EVEN_OK;
}

void even_device_keep_op(even_device_comm *comm, int op) {
  comm->ops[comm->op_count++] = op;
}

/* ---- groups ---- */

even_status even_device_group_open(even_device_comm *comm, const even_device_call *call) {
  int result = comm->nccl->group_begin();
  if (result != EVEN_NCCL_SUCCESS) {
    return remember(comm, even_device_translate(comm, comm->handle, call, result));
  }
  if (comm->depth++ == 0) {
    grouped = comm;
    even_device_end_with_thread(comm);
  }
  return EVEN_OK;
}

even_status even_device_group_shut(even_device_comm *comm, const even_device_call *call, even_status status) {
  int result = comm->nccl->group_end();
  if (--comm->depth == 0) {
    grouped = NULL;
    even_device_end_with_thread(NULL);
  }
  if (status != EVEN_OK) {
    return status; /* its words stay the last ones */
  }
  return even_device_result(comm, call, result);
}

even_status even_device_comm_group_begin(even_device_comm *comm) {
  const even_device_call call = {.name = "group_begin"};
  EVEN_TRY(even_device_enter(comm, &call));
  even_status status = even_device_group_open(comm, &call);
  if (status != EVEN_OK) {
    return even_device_leave(comm, status);
  }
  (void)atomic_fetch_add(&comm->holders, atomic_load(&comm->depth) == 1 ? 1 : 0);
  even_device_context_pop(comm); /* the lock stays with the group */
  return EVEN_OK;
}

/* Ends one of this thread's groups; `pushed`: whether the context is there, `status`: why its calls are not to begin.
 */
static even_status end_group(even_device_comm *comm, const even_device_call *call, even_status pushed,
                             even_status status) {
  status = even_device_group_shut(comm, call, status);
  bool last = grouped == NULL && even_device_let_go(comm); /* before the lock is free: then another may close it */
  status = pushed == EVEN_OK ? even_device_leave(comm, status) : leave_without_context(comm, status);
  if (last) {
    const even_error kept = *even_error_last();
    (void)even_device_comm_close(comm);
    (void)even_error_restore(&kept);
  }
  return status;
}

void even_device_drop_groups(even_device_comm *comm) {
  const even_device_call call = {.name = "group_end"};
  while (even_device_in_group(comm)) {
    even_status pushed = even_device_context_push(comm);
    (void)end_group(comm, &call, pushed, pushed == EVEN_OK ? EVEN_ERR_REVOKED : pushed);
  }
}

even_status even_device_comm_group_end(even_device_comm *comm) {
  const even_device_call call = {.name = "group_end"};
  if (grouped != comm) {
    (void)even_fail(EVEN_ERR_STATE, "group_end: this thread has no group of this communicator open");
    return even_device_place(comm);
  }
  even_status pushed = even_device_context_push(comm);
  even_status status = pushed;
  if (comm->broken.status != EVEN_OK) {
    status = even_error_restore(&comm->broken);
  } else if (atomic_load(&comm->ending) != 0) {
    status = even_device_ended(comm, &call);
  }
  return end_group(comm, &call, pushed, status);
}

/* ---- arguments ---- */

even_status even_device_check_data(const void *data, size_t count) {
  if (count > 0 && data == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "no device memory for %zu elements", count);
  }
  return EVEN_OK;
}

even_status even_device_check_rank(const even_device_comm *comm, int rank, const char *what) {
  if (rank < 0 || rank >= comm->ranks) {
    return even_fail(EVEN_ERR_ARGUMENT, "%s %d: the group has ranks 0 to %d", what, rank, comm->ranks - 1);
  }
  return EVEN_OK;
}
