/* What the watcher's thread sees of communicators with calls on streams: which are done, and whether the others will
 * ever come. */
#include "comm/nccl/device_comm.h"

#include "comm/engine.h"
#include "os/clock.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* A rank that has done its part of all that is waited for, and is gone, may have ended as it should: what it sent is on
 * its way, for as long as this from when this rank's stream came to take it. */
#define SETTLED_NS ((uint64_t)2000000000u)
/* NCCL says that a connection is lost before anybody has seen whose: so long is that rank looked for. */
#define NAMING_NS ((uint64_t)300000000u)

/* What this rank waits for. */
typedef struct waiting {
  uint64_t now_ns;
  uint64_t oldest;     /* collective on a stream; 0: none */
  uint64_t reached_ns; /* when the stream came to it; 0: not yet */
} waiting;

/* ---- ranks ---- */

static const even_device_put *message_with(const even_device_comm *comm, int rank) {
  for (size_t i = 0; i < comm->put_count; i++) {
    if (comm->puts[i].number == 0 && comm->puts[i].peer == rank) {
      return &comm->puts[i];
    }
  }
  return NULL;
}

static bool waits_for(const even_device_comm *comm, const waiting *what, int rank) {
  return what->oldest != 0 || atomic_load(&comm->meets) || message_with(comm, rank) != NULL;
}

/* Whether the rank has done its part of all that is waited for. */
static bool is_settled(const even_device_comm *comm, const waiting *what, int rank, bool left) {
  if (message_with(comm, rank) != NULL || atomic_load(&comm->meets)) {
    return left;
  }
  return left ? even_flight_last(&comm->flight, rank) >= what->oldest
              : even_flight_state_of(&comm->flight, rank, what->oldest) == EVEN_FLIGHT_DONE;
}

static void name_lost(const even_device_comm *comm, int rank, const char *what, even_error *why) {
  *why = (even_error){.status = EVEN_ERR_PEER_LOST, .rank = even_device_number(comm, rank)};
  (void)snprintf(why->what, sizeof why->what, "rank %d (process %u) %s", why->rank,
                 even_board_process(&comm->board, rank), what);
  (void)snprintf(why->fix, sizeof why->fix,
                 "the end of rank %d's own output says why; under `evenstep run` the job restarts from its last "
                 "checkpoint",
                 why->rank);
}

static void name_stopped(const even_device_comm *comm, int rank, even_error *why) {
  name_lost(comm, rank, "was stopped (SIGSTOP, SIGTSTP) and stands still", why);
  (void)snprintf(why->fix, sizeof why->fix,
                 "see who stopped process %u; EVENSTEP_STOP_GRACE (even_device_comm_set_stop_grace) says how many "
                 "seconds a rank may stand still while others wait",
                 even_board_process(&comm->board, rank));
}

static bool is_gone_for_good(even_device_comm *comm, const waiting *what, int rank, bool left) {
  if (!is_settled(comm, what, rank, left)) {
    return true;
  }
  const even_device_put *message = message_with(comm, rank);
  uint64_t taken_ns = what->oldest != 0 ? what->reached_ns : message != NULL ? message->reached_ns : 0;
  if (left && taken_ns == 0) { /* the stream has other things to do, or this rank is opening or closing, too */
    return false;
  }
  uint64_t *since = &comm->settled_ns[rank];
  *since = *since == 0 ? what->now_ns : *since;
  *since = *since < taken_ns ? taken_ns : *since;
  return what->now_ns - *since > SETTLED_NS;
}

static bool stands_in_the_way(const even_device_comm *comm, const waiting *what, int rank) {
  const even_device_put *message = message_with(comm, rank);
  return atomic_load(&comm->meets) || (what->oldest != 0 && what->reached_ns != 0) ||
         (message != NULL && message->reached_ns != 0);
}

static bool find_lost(even_device_comm *comm, const waiting *what, even_error *why) {
  uint64_t grace = atomic_load_explicit(&comm->stop_grace_ns, memory_order_relaxed);
  for (int rank = 0; rank < comm->ranks; rank++) {
    if (rank == comm->rank || !even_board_is_near(&comm->board, rank) || !waits_for(comm, what, rank)) {
      continue;
    }
    even_peer_state state = even_board_look_near(&comm->board, rank, grace, what->now_ns);
    bool left = even_board_has_left(&comm->board, rank);
    if (state == EVEN_PEER_GONE && is_gone_for_good(comm, what, rank, left)) {
      name_lost(comm, rank, left ? "left the communicator" : "died or came to its end", why);
      return true;
    }
    comm->settled_ns[rank] = state == EVEN_PEER_GONE ? comm->settled_ns[rank] : 0;
    if (state == EVEN_PEER_STANDS && stands_in_the_way(comm, what, rank)) {
      name_stopped(comm, rank, why);
      return true;
    }
  }
  return false;
}

/* ---- other hosts ---- */

static bool find_end_beside(even_device_comm *comm, even_error *why) {
  bool found = false;
  (void)pthread_mutex_lock(&comm->aside);
  if (comm->beside != NULL) {
    const even_comm_engine *engine = even_comm_engine_of(comm->beside);
    if (engine->has_ended(comm->beside)) {
      engine->why(comm->beside, why);
      found = why->status == EVEN_ERR_PEER_LOST || why->status == EVEN_ERR_REVOKED || why->status == EVEN_ERR_MISMATCH;
    }
  }
  (void)pthread_mutex_unlock(&comm->aside);
  return found;
}

/* ---- time ---- */

/* The first rank of this host that has not made the collective; -1: all have. */
static int missing_rank(const even_device_comm *comm, uint64_t number, int *others) {
  int missing = -1;
  *others = 0;
  for (int rank = comm->ranks - 1; number != 0 && rank >= 0; rank--) {
    if (rank != comm->rank && even_board_is_near(&comm->board, rank) &&
        even_flight_last(&comm->flight, rank) < number) {
      *others += missing >= 0;
      missing = rank;
    }
  }
  return missing;
}

static bool find_late(even_device_comm *comm, const waiting *what, even_error *why) {
  for (size_t i = 0; i < comm->put_count; i++) {
    const even_device_put *put = &comm->puts[i];
    double limit = put->limit > 0 ? put->limit : atomic_load(&comm->timeout_seconds);
    if (put->reached_ns != 0 && (double)(what->now_ns - put->reached_ns) > limit * 1e9) {
      char call[128];
      char absent[64] = "";
      int others = 0;
      int missing = missing_rank(comm, put->number, &others);
      even_device_put_describe(comm, put, call, sizeof call);
      if (missing >= 0) {
        (void)snprintf(absent, sizeof absent, ": rank %d did not come", even_device_number(comm, missing));
      }
      *why = (even_error){.status = EVEN_ERR_TIMEOUT, .rank = missing < 0 ? -1 : even_device_number(comm, missing)};
      (void)snprintf(why->what, sizeof why->what, "Timed out: %s on cuda:%d was not done after %.3g s%s", call,
                     comm->device, limit, absent);
      (void)snprintf(why->fix, sizeof why->fix,
                     "see what the other ranks do (one may be dead, or in another call); start again from a "
                     "checkpoint, or raise the time limit");
      return true;
    }
  }
  return false;
}

/* A call that has been on the GPU for long, and not been told of yet. */
static bool find_stall(even_device_comm *comm, const waiting *what, char *words, size_t bytes) {
  for (size_t i = 0; i < comm->put_count; i++) {
    even_device_put *put = &comm->puts[i];
    if (put->told || put->reached_ns == 0 || what->now_ns - put->reached_ns < comm->stall_ns) {
      continue;
    }
    char call[128];
    char reached[EVEN_FLIGHT_REACHED];
    char whom[96] = "the GPU: all ranks of this host are in it";
    char more[32] = "";
    int others = 0;
    int missing = put->number == 0 ? put->peer : missing_rank(comm, put->number, &others);
    put->told = true;
    if (others > 0) {
      (void)snprintf(more, sizeof more, " and %d more", others);
    }
    if (missing >= 0) {
      (void)snprintf(whom, sizeof whom, "rank %d (process %u)%s", even_device_number(comm, missing),
                     even_board_process(&comm->board, missing), more);
    }
    even_device_put_describe(comm, put, call, sizeof call);
    even_flight_reached(&comm->flight, reached, sizeof reached);
    (void)snprintf(words, bytes, "rank %d has waited %.3g s for %s in %s on cuda:%d%s",
                   even_device_number(comm, comm->rank), (double)(what->now_ns - put->reached_ns) * 1e-9, whom, call,
                   comm->device, reached);
    return true;
  }
  return false;
}

/* ---- NCCL's own ---- */

static bool find_failure(even_device_comm *comm, uint64_t now_ns, even_error *why) {
  const even_device_call call = {.name = "looking"};
  bool found = false;
  if (atomic_load(&comm->meets) || pthread_mutex_trylock(&comm->lock) != 0) {
    return false; /* a call is under way: it says itself what is wrong */
  }
  if (comm->handle != NULL && comm->broken.status == EVEN_OK) {
    int state = EVEN_NCCL_SUCCESS;
    int code = comm->nccl->async_error(comm->handle, &state);
    int result = code == EVEN_NCCL_SUCCESS ? state : code;
    if (result != EVEN_NCCL_SUCCESS && result != EVEN_NCCL_IN_PROGRESS) {
      (void)!even_device_translate(comm, comm->handle, &call, result);
      *why = *even_error_last();
      comm->failed_ns = comm->failed_ns == 0 ? now_ns : comm->failed_ns;
      found = comm->board.memory.address == NULL || now_ns - comm->failed_ns > NAMING_NS;
    }
  }
  (void)pthread_mutex_unlock(&comm->lock);
  return found;
}

static bool find_gpu_error(const even_device_comm *comm, int code, even_error *why) {
  const char *text = NULL;
  if (code == 0) {
    return false;
  }
  (void)comm->cuda->error_text(code, &text);
  *why = (even_error){.status = EVEN_ERR_DEVICE, .rank = -1};
  (void)snprintf(why->what, sizeof why->what, "cuda:%d failed with calls on its streams: %s (error %d)", comm->device,
                 text == NULL ? "unknown error" : text, code);
  (void)snprintf(why->fix, sizeof why->fix, "after an error of CUDA itself the process has to start anew");
  return true;
}

/* ---- a look ---- */

static int find_done(even_device_comm *comm) {
  if (even_device_context_push(comm) != EVEN_OK) {
    return 0;
  }
  int code = even_device_track_look(comm);
  even_device_context_pop(comm);
  return code;
}

static waiting what_is_waited_for(const even_device_comm *comm) {
  waiting what = {.now_ns = even_clock_ns(), .oldest = even_device_track_oldest(comm)};
  for (size_t i = 0; i < comm->put_count; i++) {
    const even_device_put *put = &comm->puts[i];
    what.reached_ns = put->number != 0 && put->number == what.oldest ? put->reached_ns : what.reached_ns;
  }
  return what;
}

static void look(void *context) {
  even_device_comm *comm = context;
  even_error why;
  char words[768];
  if (atomic_load(&comm->ending) != EVEN_DEVICE_WHOLE) {
    return;
  }
  (void)pthread_mutex_lock(&comm->track);
  int code = comm->put_count > 0 ? find_done(comm) : 0;
  waiting what = what_is_waited_for(comm);
  bool waits = comm->put_count > 0 || atomic_load(&comm->meets);
  bool told = waits && even_board_has_ended(&comm->board, &why);
  bool found = waits && !told &&
               (find_gpu_error(comm, code, &why) || find_end_beside(comm, &why) || find_lost(comm, &what, &why) ||
                even_device_find_difference(comm, &why) || find_late(comm, &what, &why));
  even_comm_stall_call *stall = comm->stall_call;
  void *stall_context = comm->stall_context;
  bool stalls = !told && !found && stall != NULL && find_stall(comm, &what, words, sizeof words);
  (void)pthread_mutex_unlock(&comm->track);
  if (stalls) {
    stall(stall_context, words);
  }
  if (told || found || (waits && find_failure(comm, what.now_ns, &why))) {
    even_device_end(comm, &why, !told);
  }
}

void even_device_watch_begin(even_device_comm *comm) {
  if (!comm->watched) {
    comm->watch = (even_watch){.look = look, .context = comm};
    comm->watched = true;
    even_watcher_add(&comm->watch);
  }
}

void even_device_watch_end(even_device_comm *comm) {
  if (comm->watched) {
    even_watcher_remove(&comm->watch);
    comm->watched = false;
  }
}

/* ---- what callers ask for ---- */

void even_device_comm_go_beside(even_device_comm *comm, even_comm *group) {
  (void)pthread_mutex_lock(&comm->aside);
  comm->beside = group;
  (void)pthread_mutex_unlock(&comm->aside);
}

void even_device_comm_set_stop_grace(even_device_comm *comm, double seconds) {
  atomic_store(&comm->stop_grace_ns, even_comm_limit_ns(seconds > 0 ? seconds : EVEN_COMM_STOP_GRACE_SECONDS));
}

void even_device_comm_set_site(even_device_comm *comm, const char *text) {
  (void)pthread_mutex_lock(&comm->track);
  even_flight_set_site(&comm->flight, text);
  (void)pthread_mutex_unlock(&comm->track);
}

size_t even_device_comm_flight(const even_device_comm *comm, int rank, even_flight_call *out, size_t limit) {
  return rank < 0 || rank >= comm->ranks ? 0 : even_flight_calls(&comm->flight, rank, out, limit);
}

void even_device_comm_on_stall(even_device_comm *comm, double seconds, even_comm_stall_call *call, void *context) {
  bool off = !(seconds > 0) || isinf(seconds);
  (void)pthread_mutex_lock(&comm->track);
  comm->stall_ns = off ? UINT64_MAX : even_comm_limit_ns(seconds);
  comm->stall_call = off ? NULL : call;
  comm->stall_context = context;
  (void)pthread_mutex_unlock(&comm->track);
}

even_status even_device_comm_record(even_device_comm *comm, even_telemetry *telemetry, const char *name) {
  (void)pthread_mutex_lock(&comm->track);
  even_status status = even_recording_begin_as(&comm->recording, telemetry, "nccl", comm->ranks, name);
  (void)pthread_mutex_unlock(&comm->track);
  return status;
}
