/* A communicator from the inside, and what its files share. */
#ifndef EVEN_COMM_NCCL_DEVICE_COMM_H
#define EVEN_COMM_NCCL_DEVICE_COMM_H

#include "base/fail.h"
#include "comm/board.h"
#include "comm/nccl/abi.h"
#include "comm/nccl/grouped.h"
#include "comm/recording.h"
#include "comm/watcher.h"

#include <evenstep/device_comm.h>
#include <pthread.h>
#include <stdatomic.h>

/* A call that is on a stream, or is being put there. */
typedef struct even_device_put {
  even_comm_call call;
  uint64_t number; /* of a collective; 0: a message */
  int peer;        /* of a message; -1 */
  void *stream;
  void *before; /* events on the stream; NULL: none */
  void *behind;
  bool launched;
  bool told;           /* the stall inspector has told of it */
  uint64_t put_ns;     /* when it was put there, */
  uint64_t reached_ns; /* and when the stream was seen to have come to it; 0: not yet */
  double limit;        /* seconds from then on; 0: the communicator's */
  even_call_record record;
} even_device_put;

/* Times of a GPU's events on the host's clock (times.c). */
typedef struct even_device_times {
  void *base; /* an event; NULL: none yet */
  uint64_t base_ns;
} even_device_times;

/* How a communicator ends, in `ending`. */
enum {
  EVEN_DEVICE_WHOLE = 0,
  EVEN_DEVICE_ENDED = 1, /* for the cause */
  EVEN_DEVICE_ABORTED = 2
};

struct even_device_comm {
  const even_nccl *nccl;
  const even_cuda_driver *cuda;
  even_nccl_comm *handle; /* NULL once aborted */
  void *context;          /* the GPU's primary context */
  int cuda_device;        /* the driver's number of it */
  int rank, ranks, device;
  uint32_t process_mark; /* even_process_mark() at opening */
  bool blocking;
  bool leave_abort;
  unsigned long long word; /* device memory for the barrier */
  _Atomic double timeout_seconds;
  _Atomic double call_seconds; /* the same of the calls that follow; 0: as that */
  /* Held by whoever is inside NCCL with the handle. abort says `ending` first, so that who holds it lets go. */
  pthread_mutex_t lock;
  _Atomic uint32_t ending; /* a word that waits look at (futex) */
  atomic_flag taken;       /* the handle, by who aborts it */
  even_error broken;       /* the first failure of NCCL; EVEN_OK: none */
  _Atomic int depth;       /* of groups; written with the lock held */
  _Atomic int holders;     /* the caller, and a thread with a group open: the last one to let go closes it */
  int *ops;                /* PreMulSum operations to free at the group's end */
  size_t op_count, op_capacity;

  /* ---- what ranks know of one another ---- */
  even_board board; /* of the ranks that know one another; memory.address NULL: none do */
  int *numbers;     /* NULL: as here */
  _Atomic uint64_t stop_grace_ns;
  even_watch watch;
  bool watched;
  uint64_t failed_ns;    /* when NCCL was first seen to have failed; the watcher's */
  _Atomic bool meets;    /* it is opened or closed: it waits for all ranks */
  pthread_mutex_t aside; /* over these, and every look at the group beside */
  even_comm *beside;
  even_comm_stall_call *stall_call;
  void *stall_context;
  uint64_t stall_ns;

  pthread_mutex_t track; /* over what follows */
  even_flight_writer flight;
  uint64_t call_count;
  uint64_t message_count;
  even_device_put *puts; /* in the order of the calls */
  size_t put_count, put_capacity;
  void **events; /* to be used again */
  size_t event_count, event_capacity;
  even_device_times times;
  uint64_t *compared;   /* of each rank: the number up to which its calls are known to be ours, */
  uint64_t *settled_ns; /* and since when it is seen gone though it has done all that is waited for; 0: not so */
  even_recording *recording;
  even_error cause; /* why it has ended; EVEN_OK: it has not, or was aborted */
  bool cause_told;  /* to a caller */
  bool has_aborter;
  pthread_t aborter;
};

/* What a call is about. */
typedef struct even_device_call {
  const char *name;            /* "all_reduce" */
  size_t count;                /* of elements or bytes */
  even_call_kind kind;         /* of a collective; 0: none */
  even_recorded_call recorded; /* 0: nothing that goes on a stream */
  uint32_t dtype;              /* of a reduction */
  uint32_t op;
  int peer;             /* root, or the rank at the other end */
  const size_t *counts; /* of the ranks; NULL: `count` says all */
  size_t bytes;
  void *stream;
  bool revives; /* it is for a communicator that has ended and was not aborted */
} even_device_call;

static inline int even_device_number(const even_device_comm *comm, int rank) {
  return comm->numbers == NULL ? rank : comm->numbers[rank];
}

/* The limit of a call that begins now, in seconds. */
static inline double even_device_limit(const even_device_comm *comm) {
  double own = atomic_load(&comm->call_seconds);
  return own > 0 ? own : atomic_load(&comm->timeout_seconds);
}

/* ---- calls.c ---- */

/* The lock. While another thread has a group open, which it may never end, it is waited for within the time limit
 * alone, and for a second where the communicator has ended: an error then. */
even_status even_device_lock(even_device_comm *comm, const even_device_call *call) EVEN_MUST_USE;
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
/* A failure of NCCL as the calling thread's error. */
even_status even_device_translate(const even_device_comm *comm, even_nccl_comm *handle, const even_device_call *call,
                                  int result) EVEN_MUST_USE;
/* The GPU's context, for a few calls of the driver or NCCL. */
even_status even_device_context_push(even_device_comm *comm) EVEN_MUST_USE;
void even_device_context_pop(even_device_comm *comm);
/* Room for one operation more, and an operation put there: freed when the call or its group ends. */
even_status even_device_reserve_op(even_device_comm *comm) EVEN_MUST_USE;
void even_device_keep_op(even_device_comm *comm, int op);

/* Begins and ends a group inside a call. End gives `status` where that is a failure. */
even_status even_device_group_open(even_device_comm *comm, const even_device_call *call) EVEN_MUST_USE;
even_status even_device_group_shut(even_device_comm *comm, const even_device_call *call,
                                   even_status status) EVEN_MUST_USE;

/* Ends all groups that this thread has open, none of whose calls are wanted: tells nobody why. */
void even_device_drop_groups(even_device_comm *comm);

even_status even_device_check_data(const void *data, size_t count) EVEN_MUST_USE;
even_status even_device_check_rank(const even_device_comm *comm, int rank, const char *what) EVEN_MUST_USE;

/* ---- left_open.c ---- */

/* At the calling thread's end its groups of this communicator's calls end, and the communicator with them. NULL: it has
 * none open. Without memory for that they stay open. */
void even_device_end_with_thread(even_device_comm *comm);
/* One of those who hold it does no more; whether that was the last. */
bool even_device_let_go(even_device_comm *comm);

/* ---- open.c ---- */

/* A communicator without its handle, and its end (the handle is gone by then). */
even_status even_device_new(const even_nccl *nccl, const even_cuda_driver *cuda, const even_device_comm_params *params,
                            even_device_comm **out) EVEN_MUST_USE;
void even_device_free(even_device_comm *comm);
/* EVEN_ERR_UNSUPPORTED where this NCCL lacks a function: what cannot be done, and the version that can. */
even_status even_device_needs(const void *function, const even_nccl *nccl, const char *what,
                              const char *version) EVEN_MUST_USE;
even_status even_device_check_grow(const even_nccl *nccl) EVEN_MUST_USE;

/* ---- track.c: calls on streams, and their records ---- */

/* The call is about to be put on its stream: it is written down where others see it. With the GPU's context. An error
 * where others make another call. */
even_status even_device_track_begin(even_device_comm *comm, const even_device_call *call) EVEN_MUST_USE;
/* Those begun are on their streams now, or, with a failure, never will be. */
void even_device_track_launched(even_device_comm *comm, even_status status);
/* With `track` held and the context: which are done. Returns 0, or CUDA's error. */
int even_device_track_look(even_device_comm *comm);
/* With `track` held: the oldest collective that is not done; 0: none. */
uint64_t even_device_track_oldest(const even_device_comm *comm);
/* Gives up what is left, without a GPU to ask. */
void even_device_track_drop(even_device_comm *comm);
void even_device_track_free(even_device_comm *comm);
/* With `track` held: the call's words, and those of the oldest one. */
void even_device_put_describe(const even_device_comm *comm, const even_device_put *put, char *text, size_t bytes);
void even_device_track_describe(const even_device_comm *comm, char *text, size_t bytes);
/* On the thread of even_device_track_begin, once the call is over for the host. */
void even_device_track_pop(void);

/* ---- times.c: with `track` held ---- */

/* Begins with an event that is recorded just now; NULL: does not. */
void even_device_times_begin(even_device_comm *comm, void *event, uint64_t now_ns);
/* When an event was that was put on its stream at put_ns, not before that. */
uint64_t even_device_times_of(even_device_comm *comm, void *event, uint64_t put_ns);
/* Nanoseconds from one event to another. */
uint64_t even_device_times_passed(const even_device_comm *comm, void *from, void *to);
/* Whether the base is too old to be exact; a new one, which was at at_ns as far as is known. */
bool even_device_times_are_old(const even_device_comm *comm, uint64_t now_ns);
void even_device_times_renew(even_device_comm *comm, void *event, uint64_t at_ns, uint64_t put_ns);

/* ---- watch.c: what is looked at, fifty times a second ---- */

void even_device_watch_begin(even_device_comm *comm);
void even_device_watch_end(even_device_comm *comm);

/* ---- differ.c: with `track` held ---- */

/* Whether a rank of this host has made another call than this one under the same number: *why says both. */
bool even_device_find_difference(even_device_comm *comm, even_error *why);
/* The same of that call alone. */
bool even_device_differs_at(even_device_comm *comm, uint64_t number, even_error *why);

/* ---- meet.c ---- */

/* Presents the ranks to one another. */
even_status even_device_introduce(even_device_comm *comm, const even_device_comm_params *params) EVEN_MUST_USE;

/* ---- ending.c ---- */

/* Ends the communicator for this reason, unless it has ended: tells the others where `tells`, frees the streams. Any
 * thread that holds nothing. */
void even_device_end(even_device_comm *comm, const even_error *why, bool tells);
/* Tells the others alone: for a failure of NCCL's in a call. */
void even_device_tell(even_device_comm *comm, const even_error *why);
/* Why it has ended, as the calling thread's error. */
even_status even_device_ended(even_device_comm *comm, const even_device_call *call) EVEN_MUST_USE;
/* What was never told to a caller, as the calling thread's error; EVEN_OK: nothing. */
even_status even_device_untold(even_device_comm *comm) EVEN_MUST_USE;
/* Whether a child inherited it by fork: it must not touch NCCL, nor the locks. */
bool even_device_is_inherited(const even_device_comm *comm);
/* For how long one who has to get on waits for the lock; and whether it came within so many seconds. */
#define EVEN_DEVICE_GRACE_SECONDS 1.0
bool even_device_lock_within(even_device_comm *comm, double seconds);
/* Ends the handle by force, with the lock or without. */
void even_device_end_handle(even_device_comm *comm);
/* With the lock held and the context: does so where it has been aborted, which may not have waited for the lock. */
void even_device_end_if_aborted(even_device_comm *comm);
/* Names this rank and its GPU as the place of the last error. */
even_status even_device_place(const even_device_comm *comm);

#endif
