/* A communicator from the inside, and what its files share. */
#ifndef EVEN_COMM_NCCL_DEVICE_COMM_H
#define EVEN_COMM_NCCL_DEVICE_COMM_H

#include "base/fail.h"
#include "comm/nccl/abi.h"

#include <evenstep/device_comm.h>
#include <pthread.h>
#include <stdatomic.h>

struct even_device_comm {
  const even_nccl *nccl;
  const even_cuda_driver *cuda;
  even_nccl_comm *handle; /* NULL once aborted */
  void *context;          /* the GPU's primary context */
  int cuda_device;        /* the driver's number of it */
  int rank, ranks, device;
  bool blocking;
  unsigned long long word; /* device memory for the barrier */
  _Atomic double timeout_seconds;
  /* Held by whoever is inside NCCL with the handle. abort says `ending` first, so that who holds it lets go. */
  pthread_mutex_t lock;
  _Atomic uint32_t ending; /* a word that waits look at (futex) */
  even_error broken;       /* the first failure; EVEN_OK: none */
  int depth;               /* of groups */
  int *ops;                /* PreMulSum operations to free at the group's end */
  size_t op_count, op_capacity;
};

/* What a call is about, for the words of its error. */
typedef struct even_device_call {
  const char *name; /* "all_reduce" */
  size_t count;     /* of elements or bytes */
} even_device_call;

/* Before a call: the lock is held and the GPU's context current, or an error and neither. */
even_status even_device_enter(even_device_comm *comm, const even_device_call *call) EVEN_MUST_USE;
/* The same, for a communicator that may be broken where also_broken says so. */
even_status even_device_enter_any(even_device_comm *comm, const even_device_call *call, bool also_broken) EVEN_MUST_USE;
/* After it; hands `status` through. */
even_status even_device_leave(even_device_comm *comm, even_status status);
/* What NCCL returned, made a status: waits for the host's part of a call that is in progress (not inside a group, where
 * nothing has begun), translates a failure and remembers it. */
even_status even_device_result(even_device_comm *comm, const even_device_call *call, int result) EVEN_MUST_USE;
/* The same for `handle`, which may be another communicator that is being made, and without remembering. */
even_status even_device_settle(even_device_comm *comm, even_nccl_comm *handle, const even_device_call *call,
                               int result) EVEN_MUST_USE;
/* The GPU's context, for a few calls of the driver or NCCL. */
even_status even_device_context_push(even_device_comm *comm) EVEN_MUST_USE;
void even_device_context_pop(even_device_comm *comm);
/* Whether the calling thread has a group of this communicator open. */
bool even_device_in_group(const even_device_comm *comm);
/* Room for one operation more, and an operation put there: freed when the call or its group ends. */
even_status even_device_reserve_op(even_device_comm *comm) EVEN_MUST_USE;
void even_device_keep_op(even_device_comm *comm, int op);

/* Begins and ends a group inside a call. End gives `status` where that is a failure. */
even_status even_device_group_open(even_device_comm *comm, const even_device_call *call) EVEN_MUST_USE;
even_status even_device_group_shut(even_device_comm *comm, const even_device_call *call,
                                   even_status status) EVEN_MUST_USE;

/* A communicator without its handle, and its end (the handle is gone by then). */
even_status even_device_new(const even_nccl *nccl, const even_cuda_driver *cuda, const even_device_comm_params *params,
                            even_device_comm **out) EVEN_MUST_USE;
void even_device_free(even_device_comm *comm);
/* EVEN_ERR_UNSUPPORTED where this NCCL lacks a function: what cannot be done, and the version that can. */
even_status even_device_needs(const void *function, const even_nccl *nccl, const char *what,
                              const char *version) EVEN_MUST_USE;
even_status even_device_check_grow(const even_nccl *nccl) EVEN_MUST_USE;

even_status even_device_check_data(const void *data, size_t count) EVEN_MUST_USE;
even_status even_device_check_rank(const even_device_comm *comm, int rank, const char *what) EVEN_MUST_USE;

#endif
