/* The shared-memory engine: opening and closing a group, the small questions about it, and the table of its calls. */
#include "comm/group.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/params.h"
#include "comm/messages.h"
#include "comm/writing.h"
#include "os/thread.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* A poll takes 20 to 50 ns. Whoever polls steals from whatever shares the core (a backward pass, often), so that these
 * are small, and smaller yet while peers come late (stage.c learns that). Within a call peers are near. */
#define ARRIVAL_POLLS 1000u
#define PROGRESS_POLLS 2000u
#define LEAST_POLLS 8u
#define YIELDS 200u /* where ranks share cores; one takes half a microsecond where nobody else wants the core */

static const even_comm_engine shared_engine;
static void close_group(even_comm *comm);
static void set_stop_grace(even_comm *comm, double seconds);

static void choose_patience(even_comm *comm, int spin) {
  uint32_t arrival = ARRIVAL_POLLS;
  uint32_t progress = PROGRESS_POLLS;
  uint32_t least = LEAST_POLLS;
  if (spin >= 0) {
    arrival = progress = least = even_comm_polls_of(spin);
  } else if (!even_peers_have_cpus(comm)) {
    arrival = progress = YIELDS;
    least = 1;
  }
  bool yields = spin < 0 && !even_peers_have_cpus(comm);
  comm->arrival = (even_comm_patience){.polls = arrival, .least = least, .most = arrival, .yields = yields};
  comm->progress = (even_comm_patience){.polls = progress, .least = least, .most = progress, .yields = yields};
}

static even_status join(even_comm *comm, int spin) {
  EVEN_TRY(even_peers_introduce(comm));
  even_waits_open(comm);
  even_nodes_place(comm);
  even_shared_start_pieces(comm, comm->layout.least_piece, comm->layout.least_piece, false);
  comm->arrival = (even_comm_patience){0};
  EVEN_TRY(even_call_begin(comm, EVEN_CALL_OPEN, 0, 0, 0, 0, NULL, NULL, 0));
  even_status status = even_call_end(comm, even_call_meet(comm));
  choose_patience(comm, spin);
  comm->large_bytes = EVEN_COMM_LARGE_BYTES;
  even_shared_start_pieces(comm, comm->layout.least_piece, comm->layout.most_piece, !even_peers_have_cpus(comm));
  return status;
}

static even_status check_open(const even_comm_params *given, even_comm_params *params, even_comm_layout *layout) {
  EVEN_TRY(EVEN_TAKE_PARAMS(even_comm_params, params, given));
  EVEN_TRY(even_comm_layout_of(params, layout));
  if (params->rank < 0 || params->rank >= params->ranks) {
    return even_fail(EVEN_ERR_ARGUMENT, "rank %d of a group of %d ranks", params->rank, params->ranks);
  }
  return EVEN_OK;
}

/* Takes over `memory` in every case. */
static even_status open_over(const even_comm_params *params, const even_comm_layout *layout, even_comm_header *header,
                             even_shared_memory memory, even_comm **out) {
  even_comm *comm = NULL;
  even_status status = EVEN_NEW(&comm);
  if (status != EVEN_OK) {
    even_shared_memory_close(&memory);
    return status;
  }
  comm->engine = &shared_engine;
  comm->rank = params->rank;
  comm->ranks = params->ranks;
  comm->process = even_own_process();
  comm->process_mark = even_process_mark();
  comm->header = header;
  comm->layout = *layout;
  comm->memory = memory;
  comm->arena_bytes = params->arena_bytes;
  comm->over = params->over;
  comm->over_context = params->over_context;
  atomic_store(&comm->timeout_ns, even_comm_limit_ns(params->timeout_seconds));
  set_stop_grace(comm, 0);
  comm->kernels = even_kernels_best();
  comm->controls = (even_comm_control *)(void *)(even_comm_memory(comm) + layout->controls);
  comm->flight.records = (even_flight_record *)(void *)(even_comm_memory(comm) + layout->flights);
  comm->pads = (even_wait_pad *)(void *)(even_comm_memory(comm) + layout->pads);
  comm->flight.stride = layout->flight_stride;
  comm->flight.rank = comm->rank;
  comm->flight.ranks = comm->ranks;
  atomic_flag_clear(&comm->busy);
  status = EVEN_NEW_ARRAY(&comm->sources, (size_t)comm->ranks);
  if (status == EVEN_OK) {
    status = EVEN_NEW_ARRAY(&comm->targets, (size_t)comm->ranks);
  }
  if (status == EVEN_OK) {
    status = even_messages_open(comm);
  }
  if (status == EVEN_OK) {
    status = join(comm, params->spin);
  }
  if (status != EVEN_OK) {
    close_group(comm);
    return status;
  }
  *out = comm;
  return EVEN_OK;
}

even_status even_comm_open_mapped(const even_comm_params *params, void *segment, size_t segment_bytes,
                                  even_comm **out) {
  even_comm_params own;
  even_comm_layout layout;
  even_shared_memory none = {.fd = -1};
  *out = NULL;
  EVEN_TRY(check_open(params, &own, &layout));
  EVEN_TRY(even_comm_header_check(segment, segment_bytes, &own, &layout));
  return open_over(&own, &layout, segment, none, out);
}

even_status even_comm_open(const even_comm_params *params, int fd, even_comm **out) {
  even_comm_params own;
  even_comm_layout layout;
  even_shared_memory memory;
  *out = NULL;
  EVEN_TRY(check_open(params, &own, &layout));
  EVEN_TRY(even_shared_memory_duplicate(fd, &memory));
  even_status status = even_comm_header_check(memory.address, memory.bytes, &own, &layout);
  if (status != EVEN_OK) {
    even_shared_memory_close(&memory);
    return status;
  }
  return open_over(&own, &layout, memory.address, memory, out);
}

static void leave_group(even_comm *comm) {
  /* Not where the rank never came, and not in a child that inherited the mapping by fork. */
  if (comm->stage > 0 && comm->process == even_own_process()) {
    even_messages_stop(comm);
    atomic_store(&comm->controls[comm->rank].left, 1u);
    even_group_alarm(comm);
  }
}

static void close_group(even_comm *comm) {
  leave_group(comm);
  even_waits_close(comm);
  even_messages_free(comm);
  even_free(comm->sources);
  even_free(comm->targets);
  even_comm_costs_close(comm->costs);
  even_shared_memory_close(&comm->memory);
  even_free(comm);
}

static void *arena(even_comm *comm) {
  return even_comm_arena_of(comm, comm->rank);
}

static const void *peer_arena(const even_comm *comm, int rank) {
  return even_comm_arena_of(comm, rank);
}

static void set_timeout(even_comm *comm, double seconds) {
  atomic_store(&comm->timeout_ns, even_comm_limit_ns(seconds));
}

static void set_stop_grace(even_comm *comm, double seconds) {
  atomic_store(&comm->stop_grace_ns, even_comm_limit_ns(seconds > 0 ? seconds : EVEN_COMM_STOP_GRACE_SECONDS));
}

static uint64_t wait_ns(const even_comm *comm) {
  return atomic_load_explicit(&comm->wait_ns, memory_order_relaxed);
}

static void describe(const even_comm *comm, char *text, size_t bytes) {
  char folder[64];
  bool file = even_shared_memory_is_file(comm->memory.fd, folder, sizeof folder);
  char lies[512];
  char staged[64];
  char figures[160];
  char written[128];
  char moves[640];
  even_nodes_describe(comm, lies, sizeof lies);
  /* who does not choose knows of the last call */
  uint64_t pieces = comm->rank == 0 ? even_pieces_bytes(&comm->pieces[EVEN_STAGED_ALL_REDUCE])
                    : comm->chained ? EVEN_PIECES_CHAINED
                                    : comm->piece_bytes;
  if ((pieces & EVEN_PIECES_CHAINED) != 0) {
    (void)snprintf(staged, sizeof staged, "by a chain");
  } else {
    (void)snprintf(staged, sizeof staged, "staged in pieces of %zu KB", (size_t)pieces >> 10);
  }
  even_shared_describe_pieces(comm, figures, sizeof figures);
  even_writing_describe(comm, written, sizeof written);
  even_shared_describe_moves(comm, moves, sizeof moves);
  (void)snprintf(text, bytes,
                 "shared memory%s%s, %d ranks, %s: up to %zu bytes in one meeting; in the arena where they lie, in "
                 "claimed pieces; else %s%s, %s%s; polls %u times before it sleeps; %s",
                 file ? " in a file of " : "", file ? folder : "", comm->ranks, comm->kernels->name,
                 EVEN_COMM_SLOT_BYTES, staged, figures, written, moves, comm->progress.polls, lies);
}

static size_t flight(const even_comm *comm, int rank, even_flight_call *out, size_t limit) {
  return even_flight_calls(&comm->flight, rank, out, limit);
}

static void set_site(even_comm *comm, const char *text) {
  even_flight_set_site(&comm->flight, text);
}

static void ask_site(even_comm *comm, even_comm_site_call *call, void *context) {
  even_flight_ask_site(&comm->flight, call, context);
}

static void revoke_group(even_comm *comm) {
  even_group_end(comm, EVEN_GROUP_REVOKED);
}

static void end_group(even_comm *comm, const even_error *why) {
  if (why->status == EVEN_ERR_REVOKED) {
    revoke_group(comm);
  } else {
    even_group_end_told(comm, why);
  }
}

static void why_ended(const even_comm *comm, even_error *out) {
  (void)!even_group_cause(comm);
  *out = *even_error_last();
}

static void join_whole(even_comm *comm, const even_comm_whole *whole) {
  even_waits_join(comm, whole);
  even_flight_drop(&comm->flight);
}

static void place(even_comm *comm, even_wait_place *out) {
  out->flight = &comm->flight;
  *out = comm->whole.call != NULL ? comm->whole.place : *out;
}

static bool has_ended(const even_comm *comm) {
  return !even_group_whole(comm);
}

static const even_comm_engine shared_engine = {
    .name = "shm",
    .all_reduce = even_shared_all_reduce,
    .reduce_scatter = even_shared_reduce_scatter,
    .all_gather = even_shared_all_gather,
    .broadcast = even_shared_broadcast,
    .all_to_all = even_shared_all_to_all,
    .barrier = even_shared_barrier,
    .has_messages = even_shared_has_messages,
    .send_begin = even_shared_send_begin,
    .receive_begin = even_shared_receive_begin,
    .request_done = even_shared_request_done,
    .request_wait = even_shared_request_wait,
    .request_free = even_shared_request_free,
    .arena = arena,
    .peer_arena = peer_arena,
    .revoke = revoke_group,
    .refused = even_shared_refused,
    .end = end_group,
    .has_ended = has_ended,
    .why = why_ended,
    .join = join_whole,
    .set_timeout = set_timeout,
    .set_stop_grace = set_stop_grace,
    .flight = flight,
    .set_site = set_site,
    .ask_site = ask_site,
    .on_stall = even_shared_on_stall,
    .place = place,
    .follow = even_shared_follow,
    .choice = even_shared_choice,
    .wait_ns = wait_ns,
    .describe = describe,
    .leave = leave_group,
    .close = close_group,
};
