/* The public calls: what a caller passes is checked here, once for all engines, and handed to the group's engine. */
#include "base/alloc.h"
#include "comm/arguments.h"
#include "comm/engine.h"
#include "os/clock.h"
#include "os/thread.h"

/* A child that was forked after the group had been opened has its parent's place in it, and would answer for it. */
static bool is_inherited(const even_comm_base *base) {
  return base->process_mark != 0 && base->process_mark != even_process_mark();
}

static even_status check_process(const even_comm_base *base) {
  if (!is_inherited(base)) {
    return EVEN_OK;
  }
  (void)even_fail(
      EVEN_ERR_STATE,
      "process %d was forked from rank %d of a group of %d after that had opened the group, which belongs to "
      "the process that opened it",
      (int)even_own_process(), base->rank, base->ranks);
  return even_error_fix(
      "open a group of the child's own, or start it by \"spawn\" or \"forkserver\" (multiprocessing)");
}

/* Where a message of this rank has fitted nowhere, it is told at its next call, in place of that. */
static even_status check_refused(even_comm *comm) {
  const even_comm_engine *engine = even_comm_engine_of(comm);
  return engine->refused != NULL && engine->refused(comm, false) ? even_error_last()->status : EVEN_OK;
}

/* Before a collective: the others, who would wait in it, have the error, too. */
static even_status check_told(even_comm *comm) {
  even_status status = check_refused(comm);
  if (status == EVEN_OK) {
    return EVEN_OK;
  }
  const even_error why = *even_error_last();
  even_comm_engine_of(comm)->end(comm, &why);
  return even_error_restore(&why);
}

/* ---- collectives ---- */

static even_call_record called(even_recorded_call what, int dtype, int op, int peer, size_t bytes) {
  return (even_call_record){
      .call = (uint8_t)what, .dtype = (uint8_t)dtype, .op = (uint8_t)op, .peer = (int16_t)peer, .bytes = bytes};
}

even_status even_comm_all_reduce(even_comm *comm, void *data, size_t count, even_dtype dtype, even_reduce_op op) {
  const even_comm_base *base = even_comm_base_of(comm);
  even_comm_reduction job = {.data = data, .count = count, .dtype = dtype, .op = op, .divisor = base->ranks};
  EVEN_TRY(check_process(base));
  EVEN_TRY(even_check_reduction(base->kernels, dtype, op, &job.reduce));
  EVEN_TRY(even_check_data(data, count, dtype, &job.bytes));
  job.element = even_dtype_bytes(dtype);
  even_call_record call = called(EVEN_RECORDED_ALL_REDUCE, (int)dtype, (int)op, -1, job.bytes);
  EVEN_TRY(check_told(comm));
  even_recording_begin(comm, &call);
  return even_recording_end(comm, &call, base->engine->all_reduce(comm, &job));
}

even_status even_comm_reduce_scatter(even_comm *comm, const void *input, void *output, const size_t *counts,
                                     even_dtype dtype, even_reduce_op op) {
  const even_comm_base *base = even_comm_base_of(comm);
  even_comm_scattering job = {
      .input = input, .output = output, .counts = counts, .dtype = dtype, .op = op, .divisor = base->ranks};
  size_t own_bytes = 0;
  EVEN_TRY(check_process(base));
  EVEN_TRY(even_check_reduction(base->kernels, dtype, op, &job.reduce));
  EVEN_TRY(even_check_counts(counts, base->ranks, dtype, &job.total, &job.largest));
  EVEN_TRY(even_check_data(input, job.total, dtype, &job.bytes));
  EVEN_TRY(even_check_data(output, counts[base->rank], dtype, &own_bytes));
  job.element = even_dtype_bytes(dtype);
  even_call_record call = called(EVEN_RECORDED_REDUCE_SCATTER, (int)dtype, (int)op, -1, job.bytes);
  EVEN_TRY(check_told(comm));
  even_recording_begin(comm, &call);
  return even_recording_end(comm, &call, base->engine->reduce_scatter(comm, &job));
}

even_status even_comm_all_gather(even_comm *comm, const void *input, void *output, const size_t *counts,
                                 even_dtype dtype) {
  const even_comm_base *base = even_comm_base_of(comm);
  even_comm_gathering job = {.input = input, .output = output, .counts = counts, .dtype = dtype};
  size_t own_bytes = 0;
  EVEN_TRY(check_process(base));
  EVEN_TRY(even_check_counts(counts, base->ranks, dtype, &job.total, &job.largest));
  EVEN_TRY(even_check_data(input, counts[base->rank], dtype, &own_bytes));
  EVEN_TRY(even_check_data(output, job.total, dtype, &job.bytes));
  job.element = even_dtype_bytes(dtype);
  job.largest *= job.element;
  even_call_record call = called(EVEN_RECORDED_ALL_GATHER, (int)dtype, EVEN_CALL_NONE, -1, job.bytes);
  EVEN_TRY(check_told(comm));
  even_recording_begin(comm, &call);
  return even_recording_end(comm, &call, base->engine->all_gather(comm, &job));
}

even_status even_comm_broadcast(even_comm *comm, void *data, size_t bytes, int root) {
  const even_comm_base *base = even_comm_base_of(comm);
  size_t checked = 0;
  EVEN_TRY(check_process(base));
  if (root < 0 || root >= base->ranks) {
    return even_fail(EVEN_ERR_ARGUMENT, "broadcast from rank %d in a group of %d ranks", root, base->ranks);
  }
  EVEN_TRY(even_check_data(data, bytes, EVEN_U8, &checked));
  even_call_record call = called(EVEN_RECORDED_BROADCAST, EVEN_CALL_NONE, EVEN_CALL_NONE, root, bytes);
  EVEN_TRY(check_told(comm));
  even_recording_begin(comm, &call);
  return even_recording_end(comm, &call, base->engine->broadcast(comm, data, bytes, root));
}

static even_status check_parts(int ranks, const void *const *parts, const size_t *bytes, size_t *total) {
  size_t largest = 0;
  size_t part = 0;
  if (parts == NULL || bytes == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "all_to_all without the parts or their sizes");
  }
  EVEN_TRY(even_check_counts(bytes, ranks, EVEN_U8, total, &largest));
  for (int rank = 0; rank < ranks; rank++) {
    EVEN_TRY(even_check_data(parts[rank], bytes[rank], EVEN_U8, &part));
  }
  return EVEN_OK;
}

even_status even_comm_all_to_all(even_comm *comm, const void *const *inputs, const size_t *input_bytes,
                                 void *const *outputs, const size_t *output_bytes) {
  const even_comm_base *base = even_comm_base_of(comm);
  even_comm_exchange job = {.inputs = inputs, .outputs = outputs, .sends = input_bytes, .receives = output_bytes};
  EVEN_TRY(check_process(base));
  size_t sent = 0;
  size_t received = 0;
  EVEN_TRY(check_parts(base->ranks, inputs, input_bytes, &sent));
  EVEN_TRY(check_parts(base->ranks, (const void *const *)outputs, output_bytes, &received));
  even_call_record call =
      called(EVEN_RECORDED_ALL_TO_ALL, EVEN_CALL_NONE, EVEN_CALL_NONE, -1, sent > received ? sent : received);
  EVEN_TRY(check_told(comm));
  even_recording_begin(comm, &call);
  return even_recording_end(comm, &call, base->engine->all_to_all(comm, &job));
}

even_status even_comm_barrier(even_comm *comm) {
  EVEN_TRY(check_process(even_comm_base_of(comm)));
  even_call_record call = called(EVEN_RECORDED_BARRIER, EVEN_CALL_NONE, EVEN_CALL_NONE, -1, 0);
  EVEN_TRY(check_told(comm));
  even_recording_begin(comm, &call);
  return even_recording_end(comm, &call, even_comm_engine_of(comm)->barrier(comm));
}

/* ---- messages ---- */

bool even_comm_has_messages(const even_comm *comm) {
  return even_comm_engine_of(comm)->has_messages(comm);
}

static even_status check_message(even_comm *comm, const void *data, size_t bytes, int peer, bool receives) {
  int ranks = even_comm_base_of(comm)->ranks;
  EVEN_TRY(check_process(even_comm_base_of(comm)));
  if (!even_comm_has_messages(comm)) {
    return even_fail(EVEN_ERR_UNSUPPORTED, "messages in a group of %d ranks: %d at most can send them", ranks,
                     EVEN_COMM_MESSAGE_RANKS);
  }
  if (peer >= ranks || (peer < 0 && !(receives && peer == EVEN_COMM_ANY_RANK))) {
    return even_fail(EVEN_ERR_ARGUMENT, "a message %s rank %d in a group of %d ranks", receives ? "from" : "to", peer,
                     ranks);
  }
  if (bytes > 0 && data == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "no data for a message of %zu bytes", bytes);
  }
  return check_refused(comm);
}

static void record_message(even_comm *comm, even_comm_request *request, even_recorded_call what, int peer, size_t bytes,
                           uint64_t tag) {
  even_call_record call = called(what, EVEN_CALL_NONE, EVEN_CALL_NONE, peer, bytes);
  call.tag = (uint32_t)tag;
  even_recording_message(comm, request, call);
}

even_status even_comm_send_begin(even_comm *comm, const void *data, size_t bytes, int peer, uint64_t tag,
                                 even_comm_request **out) {
  *out = NULL;
  EVEN_TRY(check_message(comm, data, bytes, peer, false));
  EVEN_TRY(even_comm_engine_of(comm)->send_begin(comm, data, bytes, peer, tag, out));
  record_message(comm, *out, EVEN_RECORDED_SEND, peer, bytes, tag);
  return EVEN_OK;
}

even_status even_comm_receive_begin(even_comm *comm, void *data, size_t bytes, int peer, uint64_t tag,
                                    even_comm_request **out) {
  *out = NULL;
  EVEN_TRY(check_message(comm, data, bytes, peer, true));
  EVEN_TRY(even_comm_engine_of(comm)->receive_begin(comm, data, bytes, peer, tag, out));
  record_message(comm, *out, EVEN_RECORDED_RECEIVE, peer, bytes, tag);
  return EVEN_OK;
}

static even_comm_request_base *request_base(even_comm_request *request) {
  return (even_comm_request_base *)(void *)request;
}

static const even_comm_base *base_of_request(even_comm_request *request) {
  return even_comm_base_of(request_base(request)->comm);
}

bool even_comm_request_done(even_comm_request *request) {
  const even_comm_base *base = base_of_request(request);
  if (is_inherited(base)) {
    return true; /* to wait for it is an error there */
  }
  bool done = base->engine->request_done(request);
  if (done && even_recording_has_message(request)) {
    int peer = -1;
    even_status status = base->engine->request_wait(request, 0, &peer);
    even_recording_message_done(request, status, peer, 0);
  }
  return done;
}

even_status even_comm_request_wait(even_comm_request *request, double timeout_seconds, int *peer) {
  const even_comm_engine *engine = base_of_request(request)->engine;
  EVEN_TRY(check_process(base_of_request(request)));
  /* A send that is over has its own outcome, however soon its receiver looked at it. */
  if (request_base(request)->sends && !engine->request_done(request)) {
    EVEN_TRY(check_refused(request_base(request)->comm));
  }
  if (!even_recording_has_message(request)) {
    return engine->request_wait(request, timeout_seconds, peer);
  }
  int other = -1;
  uint64_t since = even_clock_ns();
  even_status status = engine->request_wait(request, timeout_seconds, &other);
  even_recording_message_done(request, status, other, since);
  if (peer != NULL) {
    *peer = other;
  }
  return status;
}

void even_comm_request_free(even_comm_request *request) {
  /* In a child of a fork its lock may be held by a thread that is not there: the memory goes with the child. */
  if (request != NULL && !is_inherited(base_of_request(request))) {
    base_of_request(request)->engine->request_free(request);
  }
}

/* ---- the group ---- */

const char *even_comm_engine_name(const even_comm *comm) {
  return even_comm_engine_of(comm)->name;
}

int even_comm_rank(const even_comm *comm) {
  return even_comm_base_of(comm)->rank;
}

int even_comm_ranks(const even_comm *comm) {
  return even_comm_base_of(comm)->ranks;
}

void *even_comm_arena(even_comm *comm) {
  return even_comm_base_of(comm)->arena_bytes == 0 ? NULL : even_comm_engine_of(comm)->arena(comm);
}

const void *even_comm_peer_arena(const even_comm *comm, int rank) {
  const even_comm_base *base = even_comm_base_of(comm);
  const even_comm_engine *engine = even_comm_engine_of(comm);
  bool there = base->arena_bytes != 0 && engine->peer_arena != NULL && rank >= 0 && rank < base->ranks;
  return there ? engine->peer_arena(comm, rank) : NULL;
}

size_t even_comm_arena_bytes(const even_comm *comm) {
  return even_comm_base_of(comm)->arena_bytes;
}

void even_comm_revoke(even_comm *comm) {
  if (is_inherited(even_comm_base_of(comm))) {
    return; /* the parent goes on with it */
  }
  even_comm_engine_of(comm)->revoke(comm);
}

void even_comm_set_timeout(even_comm *comm, double seconds) {
  even_comm_engine_of(comm)->set_timeout(comm, seconds);
}

void even_comm_set_stop_grace(even_comm *comm, double seconds) {
  if (even_comm_engine_of(comm)->set_stop_grace != NULL) {
    even_comm_engine_of(comm)->set_stop_grace(comm, seconds);
  }
}

size_t even_comm_flight(const even_comm *comm, int rank, even_flight_call *out, size_t limit) {
  const even_comm_base *base = even_comm_base_of(comm);
  return base->engine->flight == NULL || rank < 0 || rank >= base->ranks ? 0
                                                                         : base->engine->flight(comm, rank, out, limit);
}

void even_comm_set_site(even_comm *comm, const char *text) {
  if (even_comm_engine_of(comm)->set_site != NULL) {
    even_comm_engine_of(comm)->set_site(comm, text);
  }
}

void even_comm_on_stall(even_comm *comm, double seconds, even_comm_stall_call *call, void *context) {
  if (even_comm_engine_of(comm)->on_stall != NULL) {
    even_comm_engine_of(comm)->on_stall(comm, seconds, call, context);
  }
}

void even_comm_ask_site(even_comm *comm, even_comm_site_call *call, void *context) {
  if (even_comm_engine_of(comm)->ask_site != NULL) {
    even_comm_engine_of(comm)->ask_site(comm, call, context);
  }
}

uint64_t even_comm_wait_ns(const even_comm *comm) {
  return even_comm_engine_of(comm)->wait_ns(comm);
}

void even_comm_describe(const even_comm *comm, char *text, size_t bytes) {
  even_comm_engine_of(comm)->describe(comm, text, bytes);
}

void even_comm_leave(even_comm *comm) {
  if (!is_inherited(even_comm_base_of(comm))) {
    even_comm_engine_of(comm)->leave(comm);
  }
}

void even_comm_close(even_comm *comm) {
  if (comm != NULL) {
    even_recording *recording = even_comm_base_of(comm)->recording;
    even_comm_engine_of(comm)->close(comm);
    even_free(recording);
  }
}
