/* The made-up NCCL's calls: they check what they are given and put operations on the made-up driver's streams, where
 * ranks meet and exchange bytes. Declared here on its own, from NCCL's documentation, as a second reading of it. */
#include "comm/fake_nccl.h"

#include <stdlib.h>

static _Thread_local int group_depth;
static _Thread_local operation *group_first, *group_last;
static _Thread_local int group_error;

int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, ncclComm *comm);
int ncclRedOpDestroy(int op, ncclComm *comm);
int ncclAllReduce(const void *input, void *output, size_t count, int type, int op, ncclComm *comm, void *stream);
int ncclReduce(const void *input, void *output, size_t count, int type, int op, int root, ncclComm *comm, void *stream);
int ncclReduceScatter(const void *input, void *output, size_t count, int type, int op, ncclComm *comm, void *stream);
int ncclAllGather(const void *input, void *output, size_t count, int type, ncclComm *comm, void *stream);
int ncclBroadcast(const void *input, void *output, size_t count, int type, int root, ncclComm *comm, void *stream);
int ncclSend(const void *data, size_t count, int type, int peer, ncclComm *comm, void *stream);
int ncclRecv(void *data, size_t count, int type, int peer, ncclComm *comm, void *stream);
int ncclGroupStart(void);
int ncclGroupEnd(void);

bool fake_call_fails(const char *function, int *result) {
  if (fake_fails(function, result)) {
    group_error = group_depth > 0 ? *result : group_error;
    return true;
  }
  return false;
}

void fake_batch_begin(batch *all) {
  atomic_fetch_add(&all->comm->outstanding, 1);
  fake_stream_put(all->stream, fake_batch_run, all);
}

static int launch(batch *all) {
  ncclComm *comm = all->comm;
  int polls = fake_polls();
  if (atomic_load(&comm->polls) > 0) {
    fake_violate("a call on a communicator that is still in progress");
  }
  if (comm->blocking || polls == 0) {
    fake_batch_begin(all);
    return SUCCESS;
  }
  comm->put_by = all;
  atomic_store(&comm->polls, polls);
  return IN_PROGRESS;
}

static int group_launch(void) {
  int result = SUCCESS;
  while (group_first != NULL) {
    batch *all = calloc(1, sizeof *all);
    operation *rest = NULL;
    operation **last = NULL;
    operation **rest_last = &rest;
    if (all == NULL) {
      abort();
    }
    all->comm = group_first->comm;
    all->stream = fake_stream_of(group_first->stream);
    last = &all->first;
    for (operation *op = group_first, *next = NULL; op != NULL; op = next) {
      next = op->next;
      op->next = NULL;
      if (op->comm == all->comm) {
        if (fake_stream_of(op->stream) != all->stream) {
          fake_violate("a group on several streams");
        }
        *last = op;
        last = &op->next;
      } else {
        *rest_last = op;
        rest_last = &op->next;
      }
    }
    group_first = rest;
    fake_batch_check(all);
    int one = launch(all);
    result = one == SUCCESS ? result : one;
  }
  group_last = NULL;
  return result;
}

static int enqueue(const char *function, operation given) {
  int result = SUCCESS;
  if (fake_call_fails(function, &result)) {
    return result;
  }
  ncclComm *comm = given.comm;
  if (!fake_alive(comm, function)) {
    return INVALID_ARGUMENT;
  }
  if (!comm->up) {
    fake_violate("%s before all ranks have come", function);
  }
  if (fake_current_device() != comm->device || fake_stream_device(fake_stream_of(given.stream)) != comm->device) {
    fake_violate("%s of device %d with device %d current, on a stream of device %d", function, comm->device,
                 fake_current_device(), fake_stream_device(fake_stream_of(given.stream)));
  }
  if (fake_size_of(given.type) == 0 || given.peer < 0 || given.peer >= comm->ranks) {
    fake_violate("%s: type %d, rank %d", function, given.type, given.peer);
    return INVALID_ARGUMENT;
  }
  if (given.op >= OWN_OPS) {
    own_op *own = given.op - OWN_OPS < OPS ? &comm->ops[given.op - OWN_OPS] : NULL;
    if (own == NULL || !own->used || own->type != given.type) {
      fake_violate("%s with an operation that is not this communicator's and type's", function);
      return INVALID_ARGUMENT;
    }
    given.scaled = true;
    given.factor = own->factor;
    given.op = SUM;
  }
  operation *op = malloc(sizeof *op);
  if (op == NULL) {
    abort();
  }
  *op = given;
  if (group_first == NULL) {
    group_first = op;
  } else {
    group_last->next = op;
  }
  group_last = op;
  return group_depth > 0 ? SUCCESS : group_launch();
}

int ncclGroupStart(void) {
  int result = SUCCESS;
  fake_note("ncclGroupStart");
  if (fake_call_fails("ncclGroupStart", &result)) {
    return result;
  }
  group_depth++;
  return SUCCESS;
}

int ncclGroupEnd(void) {
  int result = SUCCESS;
  fake_note("ncclGroupEnd");
  if (group_depth == 0) {
    fake_violate("ncclGroupEnd without ncclGroupStart");
    return INVALID_USAGE;
  }
  bool broken = fake_fails("ncclGroupEnd", &result);
  if (--group_depth > 0) {
    return broken ? result : SUCCESS;
  }
  result = broken ? result : group_error;
  group_error = SUCCESS;
  if (result == SUCCESS) {
    return group_launch();
  }
  while (group_first != NULL) {
    operation *op = group_first;
    group_first = op->next;
    free(op);
  }
  group_last = NULL;
  return result;
}

int ncclAllReduce(const void *input, void *output, size_t count, int type, int op, ncclComm *comm, void *stream) {
  fake_note("ncclAllReduce %zu", count);
  return enqueue("ncclAllReduce", (operation){.kind = ALL_REDUCE,
                                              .input = input,
                                              .output = output,
                                              .count = count,
                                              .type = type,
                                              .op = op,
                                              .comm = comm,
                                              .stream = stream});
}
int ncclReduce(const void *input, void *output, size_t count, int type, int op, int root, ncclComm *comm,
               void *stream) {
  fake_note("ncclReduce %zu to %d", count, root);
  return enqueue("ncclReduce", (operation){.kind = REDUCE,
                                           .input = input,
                                           .output = output,
                                           .count = count,
                                           .type = type,
                                           .op = op,
                                           .peer = root,
                                           .comm = comm,
                                           .stream = stream});
}
int ncclReduceScatter(const void *input, void *output, size_t count, int type, int op, ncclComm *comm, void *stream) {
  fake_note("ncclReduceScatter %zu", count);
  return enqueue("ncclReduceScatter", (operation){.kind = REDUCE_SCATTER,
                                                  .input = input,
                                                  .output = output,
                                                  .count = count,
                                                  .type = type,
                                                  .op = op,
                                                  .comm = comm,
                                                  .stream = stream});
}
int ncclAllGather(const void *input, void *output, size_t count, int type, ncclComm *comm, void *stream) {
  fake_note("ncclAllGather %zu", count);
  return enqueue("ncclAllGather", (operation){.kind = ALL_GATHER,
                                              .input = input,
                                              .output = output,
                                              .count = count,
                                              .type = type,
                                              .comm = comm,
                                              .stream = stream});
}
int ncclBroadcast(const void *input, void *output, size_t count, int type, int root, ncclComm *comm, void *stream) {
  fake_note("ncclBroadcast %zu from %d", count, root);
  return enqueue("ncclBroadcast", (operation){.kind = BROADCAST,
                                              .input = input,
                                              .output = output,
                                              .count = count,
                                              .type = type,
                                              .peer = root,
                                              .comm = comm,
                                              .stream = stream});
}
int ncclSend(const void *data, size_t count, int type, int peer, ncclComm *comm, void *stream) {
  fake_note("ncclSend %zu to %d", count, peer);
  return enqueue(
      "ncclSend",
      (operation){
          .kind = SEND, .input = data, .count = count, .type = type, .peer = peer, .comm = comm, .stream = stream});
}
int ncclRecv(void *data, size_t count, int type, int peer, ncclComm *comm, void *stream) {
  fake_note("ncclRecv %zu from %d", count, peer);
  return enqueue(
      "ncclRecv",
      (operation){
          .kind = RECEIVE, .output = data, .count = count, .type = type, .peer = peer, .comm = comm, .stream = stream});
}

int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, ncclComm *comm) {
  int result = SUCCESS;
  if (fake_call_fails("ncclRedOpCreatePreMulSum", &result)) {
    return result;
  }
  if (!fake_alive(comm, "ncclRedOpCreatePreMulSum")) {
    return INVALID_ARGUMENT;
  }
  if (residence != 1) {
    fake_violate("a scalar of the host is said to be in device memory");
  }
  for (int i = 0; i < OPS; i++) {
    if (!comm->ops[i].used) {
      comm->ops[i] = (own_op){true, type, fake_load(type, scalar)};
      *op = OWN_OPS + i;
      fake_count(1);
      return SUCCESS;
    }
  }
  return INTERNAL_ERROR;
}

int ncclRedOpDestroy(int op, ncclComm *comm) {
  if (!fake_alive(comm, "ncclRedOpDestroy")) {
    return INVALID_ARGUMENT;
  }
  if (group_first != NULL) {
    fake_violate("an operation is freed inside the group that uses it");
  }
  if (op < OWN_OPS || op >= OWN_OPS + OPS || !comm->ops[op - OWN_OPS].used) {
    fake_violate("an operation is freed that is not there");
    return INVALID_ARGUMENT;
  }
  comm->ops[op - OWN_OPS].used = false;
  fake_count(-1);
  return SUCCESS;
}
