/* Communicators made from others: of fewer ranks after a failure, of more when new ones come. */
#include "comm/nccl/device_comm.h"

#include "base/alloc.h"

#include <string.h>

static even_status enter(even_device_comm *comm, const even_device_call *call, bool also_broken) {
  if (even_device_in_group(comm)) {
    return even_fail(EVEN_ERR_STATE, "%s inside a group: end it first", call->name);
  }
  return even_device_enter_any(comm, call, also_broken);
}

static even_device_comm_params params_of(const even_device_comm *comm, int rank, int ranks) {
  return (even_device_comm_params){.size = sizeof(even_device_comm_params),
                                   .rank = rank,
                                   .ranks = ranks,
                                   .device = comm->device,
                                   .blocking = comm->blocking,
                                   .timeout_seconds = atomic_load(&comm->timeout_seconds)};
}

/* What NCCL returned, once the parent is through with it and then the child. A parent that is aborted on the way may
 * end with its old error: what counts then is the child. */
static even_status settle_both(even_device_comm *comm, even_device_comm *child, const even_device_call *call,
                               int result, bool aborts) {
  even_status status = even_device_settle(comm, comm->handle, call, result);
  if (status != EVEN_OK && !(aborts && child->handle != NULL)) {
    return status;
  }
  if (child->handle == NULL) {
    return even_fail(EVEN_ERR_DEVICE, "%s: NCCL made no communicator", call->name);
  }
  return even_device_settle(comm, child->handle, call, EVEN_NCCL_IN_PROGRESS);
}

static void drop(even_device_comm *child) {
  if (child->handle != NULL) {
    (void)child->nccl->abort(child->handle);
  }
  even_device_free(child);
}

static even_status check_excluded(const even_device_comm *comm, const int *excluded, int count) {
  if (count < 1 || excluded == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "shrink: no rank to leave out");
  }
  for (int i = 0; i < count; i++) {
    EVEN_TRY(even_device_check_rank(comm, excluded[i], "shrink without rank"));
    if (excluded[i] == comm->rank) {
      return even_fail(EVEN_ERR_ARGUMENT, "shrink: rank %d would leave itself out: only those that stay call it",
                       comm->rank);
    }
    for (int j = 0; j < i; j++) {
      if (excluded[j] == excluded[i]) {
        return even_fail(EVEN_ERR_ARGUMENT, "shrink: rank %d is left out twice", excluded[i]);
      }
    }
  }
  return EVEN_OK;
}

static int rank_after(const even_device_comm *comm, const int *excluded, int count) {
  int rank = comm->rank;
  for (int i = 0; i < count; i++) {
    rank -= excluded[i] < comm->rank ? 1 : 0;
  }
  return rank;
}

static even_status shrink(even_device_comm *comm, int *excluded, int count, bool abort, even_device_comm *child) {
  const even_device_call call = {.name = "shrink", .count = (size_t)count, .revives = true};
  EVEN_TRY(enter(comm, &call, abort));
  int result = comm->nccl->shrink(comm->handle, excluded, count, &child->handle, NULL,
                                  abort ? EVEN_NCCL_SHRINK_ABORT : EVEN_NCCL_SHRINK_DEFAULT);
  return even_device_leave(comm, settle_both(comm, child, &call, result, abort));
}

even_status even_device_comm_shrink(even_device_comm *comm, const int *excluded, int count, bool abort,
                                    even_device_comm **out) {
  int *copy = NULL; /* NCCL takes it without const */
  even_device_comm *child = NULL;
  *out = NULL;
  EVEN_TRY(even_device_needs((const void *)(comm->nccl->shrink == NULL ? NULL : comm), comm->nccl,
                             "shrink a communicator", "2.27"));
  EVEN_TRY(check_excluded(comm, excluded, count));
  even_device_comm_params params = params_of(comm, rank_after(comm, excluded, count), comm->ranks - count);
  EVEN_TRY(EVEN_NEW_ARRAY(&copy, (size_t)count));
  memcpy(copy, excluded, (size_t)count * sizeof *copy);
  even_status status = even_device_new(comm->nccl, comm->cuda, &params, &child);
  if (status == EVEN_OK) {
    status = shrink(comm, copy, count, abort, child);
    if (status != EVEN_OK) {
      drop(child);
    } else {
      even_device_watch_begin(child);
      *out = child;
    }
  }
  even_free(copy);
  return status;
}

even_status even_device_comm_grow_id(even_device_comm *comm, even_device_comm_id *out) {
  const even_device_call call = {.name = "grow_id"};
  even_nccl_id id = {{0}};
  EVEN_TRY(even_device_check_grow(comm->nccl));
  EVEN_TRY(enter(comm, &call, false));
  even_status status = even_device_result(comm, &call, comm->nccl->grow_id(comm->handle, &id));
  if (status == EVEN_OK) {
    memcpy(out->bytes, id.internal, sizeof out->bytes);
  }
  return even_device_leave(comm, status);
}

static even_status grow(even_device_comm *comm, int ranks, const even_device_comm_id *id, even_device_comm *child) {
  const even_device_call call = {.name = "grow", .count = (size_t)ranks};
  even_nccl_id given = {{0}};
  if (id != NULL) {
    memcpy(given.internal, id->bytes, sizeof given.internal);
  }
  EVEN_TRY(enter(comm, &call, false));
  int result = comm->nccl->grow(comm->handle, ranks, id == NULL ? NULL : &given, -1, &child->handle, NULL);
  return even_device_leave(comm, settle_both(comm, child, &call, result, false));
}

even_status even_device_comm_grow(even_device_comm *comm, int ranks, const even_device_comm_id *id,
                                  even_device_comm **out) {
  even_device_comm *child = NULL;
  *out = NULL;
  EVEN_TRY(even_device_check_grow(comm->nccl));
  if (ranks <= comm->ranks) {
    return even_fail(EVEN_ERR_ARGUMENT, "grow from %d to %d ranks: give more than there are", comm->ranks, ranks);
  }
  even_device_comm_params params = params_of(comm, comm->rank, ranks);
  EVEN_TRY(even_device_new(comm->nccl, comm->cuda, &params, &child));
  even_status status = grow(comm, ranks, id, child);
  if (status != EVEN_OK) {
    drop(child);
    return status;
  }
  even_device_watch_begin(child);
  *out = child;
  return EVEN_OK;
}
