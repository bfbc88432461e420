/* How a communicator ends: who hears of it, in which words, and who frees its streams. */
#include "comm/nccl/device_comm.h"

#include "comm/engine.h"
#include "os/futex.h"
#include "os/thread.h"

#include <stdio.h>
#include <time.h>

even_status even_device_place(const even_device_comm *comm) {
  char device[32];
  (void)snprintf(device, sizeof device, "cuda:%d", comm->device);
  return even_error_place(even_device_number(comm, comm->rank), device);
}

bool even_device_is_inherited(const even_device_comm *comm) {
  return comm->process_mark != even_process_mark();
}

/* ---- the others ---- */

static bool has_far_ranks(const even_device_comm *comm) {
  for (int rank = 0; rank < comm->ranks; rank++) {
    if (!even_board_is_near(&comm->board, rank)) {
      return true;
    }
  }
  return false;
}

void even_device_tell(even_device_comm *comm, const even_error *why) {
  bool crosses = why->status == EVEN_ERR_PEER_LOST || why->status == EVEN_ERR_MISMATCH;
  even_board_end(&comm->board, why);
  (void)pthread_mutex_lock(&comm->aside);
  if (comm->beside != NULL && crosses && has_far_ranks(comm)) {
    const even_comm_engine *engine = even_comm_engine_of(comm->beside);
    engine->end(comm->beside, why);
  }
  (void)pthread_mutex_unlock(&comm->aside);
}

/* ---- the handle ---- */

bool even_device_lock_within(even_device_comm *comm, double seconds) {
  const long second_ns = 1000000000;
  struct timespec until;
  (void)timespec_get(&until, TIME_UTC);
  long ns = until.tv_nsec + (long)(seconds * (double)second_ns);
  until.tv_sec += ns / second_ns;
  until.tv_nsec = ns % second_ns;
  return pthread_mutex_timedlock(&comm->lock, &until) == 0;
}

/* The lock, but within a grace alone in blocking mode, where a thread may be inside NCCL for good, and abort gets it
 * out; and where another thread has a group open, which may be for good, too. */
static bool take_lock(even_device_comm *comm) {
  bool taken = even_device_lock_within(comm, EVEN_DEVICE_GRACE_SECONDS);
  while (!taken && !comm->blocking && atomic_load(&comm->depth) == 0) {
    taken = even_device_lock_within(comm, EVEN_DEVICE_GRACE_SECONDS);
  }
  return taken;
}

void even_device_end_handle(even_device_comm *comm) {
  if (atomic_flag_test_and_set(&comm->taken)) {
    return;
  }
  even_nccl_comm *handle = comm->handle;
  comm->handle = NULL;
  comm->op_count = 0; /* they go with the handle */
  if (handle != NULL) {
    (void)comm->nccl->abort(handle);
  }
}

static void end_with_lock(even_device_comm *comm) {
  bool current = even_device_context_push(comm) == EVEN_OK;
  even_device_end_handle(comm); /* NCCL finds its GPU itself, if need be */
  even_device_track_drop(comm);
  if (current) {
    even_device_context_pop(comm);
  }
}

void even_device_end_if_aborted(even_device_comm *comm) {
  if (atomic_load(&comm->ending) == EVEN_DEVICE_ABORTED) {
    const even_error kept = *even_error_last();
    even_device_end_handle(comm);
    even_device_track_drop(comm);
    (void)even_error_restore(&kept);
  }
}

static void free_streams(even_device_comm *comm) {
  if (take_lock(comm)) {
    end_with_lock(comm);
    (void)pthread_mutex_unlock(&comm->lock);
  } else if (comm->blocking) {
    end_with_lock(comm);
  } /* else the end of that thread's group does it, or the close */
}

/* ---- for a reason that was found ---- */

static void *abort_aside(void *argument) {
  even_device_comm *comm = argument;
  if (comm->blocking) {
    free_streams(comm);
    return NULL;
  }
  (void)pthread_mutex_lock(&comm->lock); /* whatever group is open: only the close waits for this */
  end_with_lock(comm);
  (void)pthread_mutex_unlock(&comm->lock);
  return NULL;
}

/* NCCL's abort may take its time: whoever looks at all communicators of the process does not wait for it. */
static void start_aborter(even_device_comm *comm) {
  const even_error kept = *even_error_last();
  (void)pthread_mutex_lock(&comm->track);
  comm->has_aborter = even_thread_start(abort_aside, comm, &comm->aborter) == EVEN_OK;
  bool started = comm->has_aborter;
  (void)pthread_mutex_unlock(&comm->track);
  if (!started && pthread_mutex_trylock(&comm->lock) == 0) { /* else the caller's abort or close has to do it */
    end_with_lock(comm);
    (void)pthread_mutex_unlock(&comm->lock);
  }
  (void)even_error_restore(&kept);
}

/* The reason with what this rank was in; `track` is held. */
static void keep_cause(even_device_comm *comm, const even_error *why) {
  char doing[128];
  char reached[EVEN_FLIGHT_REACHED];
  const even_error kept = *even_error_last();
  even_device_track_describe(comm, doing, sizeof doing);
  even_flight_reached(&comm->flight, reached, sizeof reached);
  (void)even_fail(why->status, "%.400s; rank %d was in %s%s", why->what, even_device_number(comm, comm->rank), doing,
                  reached);
  if (why->rank >= 0) {
    (void)even_error_place(why->rank, NULL);
  } else {
    (void)even_device_place(comm);
  }
  if (why->fix[0] != '\0') {
    (void)even_error_fix("%s", why->fix);
  }
  comm->cause = *even_error_last();
  (void)even_error_restore(&kept);
}

void even_device_end(even_device_comm *comm, const even_error *why, bool tells) {
  uint32_t whole = EVEN_DEVICE_WHOLE;
  (void)pthread_mutex_lock(&comm->track);
  bool first = atomic_load(&comm->ending) == EVEN_DEVICE_WHOLE && comm->cause.status == EVEN_OK;
  if (first) {
    keep_cause(comm, why);
  }
  (void)pthread_mutex_unlock(&comm->track);
  if (!first) {
    return;
  }
  if (tells) {
    even_device_tell(comm, why);
  }
  (void)atomic_compare_exchange_strong(&comm->ending, &whole, EVEN_DEVICE_ENDED);
  even_futex_wake_all(&comm->ending);
  if (!atomic_load(&comm->meets) && !comm->leave_abort) {
    start_aborter(comm);
  }
}

even_status even_device_ended(even_device_comm *comm, const even_device_call *call) {
  (void)pthread_mutex_lock(&comm->track);
  const even_error cause = comm->cause;
  comm->cause_told = true;
  (void)pthread_mutex_unlock(&comm->track);
  if (cause.status != EVEN_OK) {
    return even_error_restore(&cause);
  }
  (void)even_fail(EVEN_ERR_REVOKED, "%s: the communicator of rank %d of %d was aborted", call->name,
                  even_device_number(comm, comm->rank), comm->ranks);
  return even_device_place(comm);
}

even_status even_device_untold(even_device_comm *comm) {
  (void)pthread_mutex_lock(&comm->track);
  const even_error cause = comm->cause;
  bool told = comm->cause_told;
  (void)pthread_mutex_unlock(&comm->track);
  return told || cause.status == EVEN_OK ? EVEN_OK : even_error_restore(&cause);
}

/* ---- for the caller's own reasons ---- */

static bool has_unfinished(even_device_comm *comm) {
  const even_error kept = *even_error_last();
  bool current = even_device_context_push(comm) == EVEN_OK;
  (void)pthread_mutex_lock(&comm->track);
  if (current) {
    (void)even_device_track_look(comm);
  }
  bool unfinished = comm->put_count > 0;
  (void)pthread_mutex_unlock(&comm->track);
  if (current) {
    even_device_context_pop(comm);
  }
  (void)even_error_restore(&kept);
  return unfinished;
}

static void tell_of_abort(even_device_comm *comm) {
  even_error why = {.status = EVEN_ERR_REVOKED, .rank = even_device_number(comm, comm->rank)};
  (void)snprintf(why.what, sizeof why.what, "rank %d aborted the communicator with calls unfinished", why.rank);
  (void)snprintf(why.fix, sizeof why.fix, "rank %d's own output says why", why.rank);
  even_device_tell(comm, &why);
}

void even_device_comm_abort(even_device_comm *comm) {
  if (even_device_is_inherited(comm)) {
    return;
  }
  bool unfinished = has_unfinished(comm);
  if (atomic_exchange(&comm->ending, EVEN_DEVICE_ABORTED) == EVEN_DEVICE_WHOLE && unfinished) {
    tell_of_abort(comm);
  }
  even_futex_wake_all(&comm->ending);
  if (!even_device_in_group(comm)) { /* this thread's own group: its end, or close, ends the handle */
    free_streams(comm);
  }
}

bool even_device_comm_has_ended(const even_device_comm *comm) {
  return atomic_load(&comm->ending) != EVEN_DEVICE_WHOLE;
}
