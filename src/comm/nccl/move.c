/* Moves of bytes: gathers, broadcasts, exchanges, messages. */
#include "comm/nccl/device_comm.h"

#include "base/checked.h"

static even_status check_parts(const even_device_comm *comm, const size_t *bytes, size_t *total, bool *equal) {
  *total = 0;
  *equal = true;
  if (bytes == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "no sizes for %d ranks", comm->ranks);
  }
  for (int rank = 0; rank < comm->ranks; rank++) {
    *equal = *equal && bytes[rank] == bytes[0];
    if (!even_add_size(*total, bytes[rank], total)) {
      return even_fail(EVEN_ERR_OVERFLOW, "the ranks' parts add up to more than a size can hold");
    }
  }
  return EVEN_OK;
}

/* A broadcast of every part, as one operation of NCCL. */
static even_status broadcast_parts(even_device_comm *comm, const even_device_call *call, const void *input,
                                   char *output, const size_t *bytes, void *stream) {
  EVEN_TRY(even_device_group_open(comm, call));
  even_status status = EVEN_OK;
  for (int rank = 0; rank < comm->ranks && status == EVEN_OK; rank++) {
    if (bytes[rank] > 0) {
      const void *source = rank == comm->rank ? input : output;
      int result = comm->nccl->broadcast(source, output, bytes[rank], EVEN_NCCL_UINT8, rank, comm->handle, stream);
      status = even_device_result(comm, call, result);
    }
    output += bytes[rank];
  }
  return even_device_group_shut(comm, call, status);
}

even_status even_device_comm_all_gather(even_device_comm *comm, const void *input, void *output, const size_t *bytes,
                                        void *stream) {
  size_t total = 0;
  bool equal = true;
  EVEN_TRY(check_parts(comm, bytes, &total, &equal));
  EVEN_TRY(even_device_check_data(input, bytes[comm->rank]));
  EVEN_TRY(even_device_check_data(output, total));
  const even_device_call call = {.name = "all_gather",
                                 .count = total,
                                 .kind = EVEN_CALL_ALL_GATHER,
                                 .dtype = EVEN_CALL_BYTES,
                                 .recorded = EVEN_RECORDED_ALL_GATHER,
                                 .peer = -1,
                                 .counts = bytes,
                                 .bytes = total,
                                 .stream = stream};
  EVEN_TRY(even_device_enter(comm, &call));
  even_status status = EVEN_OK;
  if (total > 0 && equal) {
    int result = comm->nccl->all_gather(input, output, bytes[0], EVEN_NCCL_UINT8, comm->handle, stream);
    status = even_device_result(comm, &call, result);
  } else if (total > 0) {
    status = broadcast_parts(comm, &call, input, output, bytes, stream);
  }
  return even_device_leave(comm, status);
}

even_status even_device_comm_broadcast(even_device_comm *comm, void *data, size_t bytes, int root, void *stream) {
  const even_device_call call = {.name = "broadcast",
                                 .count = bytes,
                                 .kind = EVEN_CALL_BROADCAST,
                                 .dtype = EVEN_CALL_BYTES,
                                 .recorded = EVEN_RECORDED_BROADCAST,
                                 .peer = root,
                                 .bytes = bytes,
                                 .stream = stream};
  EVEN_TRY(even_device_check_rank(comm, root, "root"));
  EVEN_TRY(even_device_check_data(data, bytes));
  EVEN_TRY(even_device_enter(comm, &call));
  even_status status = EVEN_OK;
  if (bytes > 0) {
    int result = comm->nccl->broadcast(data, data, bytes, EVEN_NCCL_UINT8, root, comm->handle, stream);
    status = even_device_result(comm, &call, result);
  }
  return even_device_leave(comm, status);
}

/* ---- grouped sends and receives ---- */

static even_status send_one(even_device_comm *comm, const even_device_call *call, const void *data, size_t bytes,
                            int peer, void *stream) {
  if (bytes == 0) {
    return EVEN_OK;
  }
  return even_device_result(comm, call, comm->nccl->send(data, bytes, EVEN_NCCL_UINT8, peer, comm->handle, stream));
}

static even_status receive_one(even_device_comm *comm, const even_device_call *call, void *data, size_t bytes, int peer,
                               void *stream) {
  if (bytes == 0) {
    return EVEN_OK;
  }
  return even_device_result(comm, call, comm->nccl->receive(data, bytes, EVEN_NCCL_UINT8, peer, comm->handle, stream));
}

/* One send and one receive for each rank; NULL in place of a list: nothing goes that way. */
typedef struct exchange {
  const void *const *inputs;
  const size_t *input_bytes;
  void *const *outputs;
  const size_t *output_bytes;
} exchange;

static even_status exchange_parts(even_device_comm *comm, const even_device_call *call, const exchange *parts,
                                  void *stream) {
  EVEN_TRY(even_device_enter(comm, call));
  even_status status = even_device_group_open(comm, call);
  if (status != EVEN_OK) {
    return even_device_leave(comm, status);
  }
  for (int rank = 0; rank < comm->ranks && status == EVEN_OK; rank++) {
    if (parts->inputs != NULL) {
      status = send_one(comm, call, parts->inputs[rank], parts->input_bytes[rank], rank, stream);
    }
    if (parts->outputs != NULL && status == EVEN_OK) {
      status = receive_one(comm, call, parts->outputs[rank], parts->output_bytes[rank], rank, stream);
    }
  }
  return even_device_leave(comm, even_device_group_shut(comm, call, status));
}

static even_status check_list(const even_device_comm *comm, const void *const *list, const size_t *bytes) {
  for (int rank = 0; rank < comm->ranks; rank++) {
    EVEN_TRY(even_device_check_data(list == NULL ? NULL : list[rank], bytes[rank]));
  }
  return EVEN_OK;
}

even_status even_device_comm_all_to_all(even_device_comm *comm, const void *const *inputs, const size_t *input_bytes,
                                        void *const *outputs, const size_t *output_bytes, void *stream) {
  size_t sent = 0;
  size_t received = 0;
  bool equal = true;
  EVEN_TRY(check_parts(comm, input_bytes, &sent, &equal));
  EVEN_TRY(check_parts(comm, output_bytes, &received, &equal));
  EVEN_TRY(check_list(comm, inputs, input_bytes));
  EVEN_TRY(check_list(comm, (const void *const *)outputs, output_bytes));
  const even_device_call call = {.name = "all_to_all",
                                 .kind = EVEN_CALL_ALL_TO_ALL,
                                 .dtype = EVEN_CALL_BYTES,
                                 .recorded = EVEN_RECORDED_ALL_TO_ALL,
                                 .peer = -1,
                                 .bytes = sent,
                                 .stream = stream};
  const exchange parts = {inputs, input_bytes, outputs, output_bytes};
  return exchange_parts(comm, &call, &parts, stream);
}

/* Begins a gather to the root, or a scatter from it: `own` is this rank's part, `list` are the root's. */
static even_status open_rooted(even_device_comm *comm, even_device_call *call, const void *own,
                               const void *const *list) {
  bool equal = true;
  EVEN_TRY(even_device_check_rank(comm, call->peer, "root"));
  EVEN_TRY(check_parts(comm, call->counts, &call->bytes, &equal));
  EVEN_TRY(even_device_check_data(own, call->counts[comm->rank]));
  if (comm->rank == call->peer) {
    EVEN_TRY(check_list(comm, list, call->counts));
  }
  call->count = call->bytes;
  EVEN_TRY(even_device_enter(comm, call));
  even_status status = even_device_group_open(comm, call);
  return status == EVEN_OK ? EVEN_OK : even_device_leave(comm, status);
}

even_status even_device_comm_gather(even_device_comm *comm, const void *input, void *const *outputs,
                                    const size_t *bytes, int root, void *stream) {
  even_device_call call = {.name = "gather",
                           .kind = EVEN_CALL_GATHER,
                           .dtype = EVEN_CALL_BYTES,
                           .recorded = EVEN_RECORDED_GATHER,
                           .peer = root,
                           .counts = bytes,
                           .stream = stream};
  EVEN_TRY(open_rooted(comm, &call, input, (const void *const *)outputs));
  even_status status = send_one(comm, &call, input, bytes[comm->rank], root, stream);
  for (int rank = 0; comm->rank == root && rank < comm->ranks && status == EVEN_OK; rank++) {
    status = receive_one(comm, &call, outputs[rank], bytes[rank], rank, stream);
  }
  return even_device_leave(comm, even_device_group_shut(comm, &call, status));
}

even_status even_device_comm_scatter(even_device_comm *comm, const void *const *inputs, void *output,
                                     const size_t *bytes, int root, void *stream) {
  even_device_call call = {.name = "scatter",
                           .kind = EVEN_CALL_SCATTER,
                           .dtype = EVEN_CALL_BYTES,
                           .recorded = EVEN_RECORDED_SCATTER,
                           .peer = root,
                           .counts = bytes,
                           .stream = stream};
  EVEN_TRY(open_rooted(comm, &call, output, inputs));
  even_status status = EVEN_OK;
  for (int rank = 0; comm->rank == root && rank < comm->ranks && status == EVEN_OK; rank++) {
    status = send_one(comm, &call, inputs[rank], bytes[rank], rank, stream);
  }
  if (status == EVEN_OK) {
    status = receive_one(comm, &call, output, bytes[comm->rank], root, stream);
  }
  return even_device_leave(comm, even_device_group_shut(comm, &call, status));
}

static even_status check_message(const even_device_comm *comm, const void *data, size_t bytes, int peer) {
  EVEN_TRY(even_device_check_rank(comm, peer, "peer"));
  EVEN_TRY(even_device_check_data(data, bytes));
  if (peer == comm->rank && !even_device_in_group(comm)) {
    (void)even_fail(EVEN_ERR_ARGUMENT,
                    "rank %d sends to itself or receives from itself outside a group, and waits for "
                    "ever",
                    peer);
    return even_error_fix("put the send and the receive between group_begin and group_end");
  }
  return EVEN_OK;
}

even_status even_device_comm_send(even_device_comm *comm, const void *data, size_t bytes, int peer, void *stream) {
  const even_device_call call = {
      .name = "send", .count = bytes, .recorded = EVEN_RECORDED_SEND, .peer = peer, .bytes = bytes, .stream = stream};
  EVEN_TRY(check_message(comm, data, bytes, peer));
  EVEN_TRY(even_device_enter(comm, &call));
  return even_device_leave(comm, send_one(comm, &call, data, bytes, peer, stream));
}

even_status even_device_comm_receive(even_device_comm *comm, void *data, size_t bytes, int peer, void *stream) {
  const even_device_call call = {.name = "receive",
                                 .count = bytes,
                                 .recorded = EVEN_RECORDED_RECEIVE,
                                 .peer = peer,
                                 .bytes = bytes,
                                 .stream = stream};
  EVEN_TRY(check_message(comm, data, bytes, peer));
  EVEN_TRY(even_device_enter(comm, &call));
  return even_device_leave(comm, receive_one(comm, &call, data, bytes, peer, stream));
}
