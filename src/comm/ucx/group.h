/* The engine between hosts: a rank's view of a group over UCX, and what the files of the engine share. */
#ifndef EVEN_COMM_UCX_GROUP_H
#define EVEN_COMM_UCX_GROUP_H

#include "comm/group.h"
#include "comm/ucx/api.h"

#include <pthread.h>

/* A collective of at most so many bytes travels with the words that say which call it is. */
#define EVEN_UCX_SMALL_BYTES ((size_t)8192)
#define EVEN_UCX_HOST_BYTES 64

/* What a message between ranks is: the upper bits of its tag; the sender's rank follows, then what tells it apart. */
typedef enum even_ucx_kind {
  EVEN_UCX_NOTICE = 1, /* a rank has left, or the group has ended */
  EVEN_UCX_CALL,       /* a collective's: its number, and the step in it */
  EVEN_UCX_HEADER,     /* of a message that a caller sends */
  EVEN_UCX_PAYLOAD     /* its data: its number */
} even_ucx_kind;

#define EVEN_UCX_KIND_SHIFT 60
#define EVEN_UCX_RANK_SHIFT 48
#define EVEN_UCX_KIND_MASK ((uint64_t)0xf << EVEN_UCX_KIND_SHIFT) /* of any rank */
#define EVEN_UCX_STEP_BITS 24

static inline uint64_t even_ucx_tag(even_ucx_kind kind, int sender, uint64_t rest) {
  return (uint64_t)kind << EVEN_UCX_KIND_SHIFT | (uint64_t)(unsigned)sender << EVEN_UCX_RANK_SHIFT |
         (rest & (((uint64_t)1 << EVEN_UCX_RANK_SHIFT) - 1));
}

/* A part of a collective under way; request NULL: done, or never begun. */
typedef struct even_ucx_transfer {
  void *request;
  int peer;
} even_ucx_transfer;

typedef struct even_ucx_peer {
  void *endpoint;
  bool left;          /* it has closed the group */
  signed char failed; /* UCX's error; 0: it can be reached */
  int number;         /* in error texts */
  int process;
  char host[EVEN_UCX_HOST_BYTES];
  uint64_t sent; /* messages to it */
} even_ucx_peer;

/* What a rank tells all others. */
typedef struct even_ucx_notice {
  int32_t status; /* why the group has ended; 0: the sender has left it */
  int32_t sender;
  int32_t rank; /* whom the error names, as in even_error */
  char what[400];
  char fix[256];
} even_ucx_notice;

/* What every rank of a collective sends to every other: which call it makes, and the data of small ones. */
typedef struct even_ucx_block {
  even_comm_call call;
  uint64_t bytes; /* all_to_all: of the part for the receiver */
  _Alignas(64) unsigned char data[EVEN_UCX_SMALL_BYTES];
} even_ucx_block;

typedef struct even_ucx_messages even_ucx_messages;

typedef struct even_ucx_group {
  EVEN_COMM_BASE;
  const even_ucx_api *api;
  void *context;
  void *worker;
  int descriptor; /* readable when there is something to do */
  even_ucx_peer *peers;
  pid_t process; /* that opened the group */
  void *arena;
  _Atomic uint64_t timeout_ns;
  _Atomic uint64_t wait_ns;

  pthread_mutex_t lock; /* over UCX, and all that follows but the call's own */
  int sleepers;         /* threads that sleep on the descriptor */
  _Atomic bool ended;   /* set with the lock held */
  even_error end;       /* why; its text lacks what this rank was doing */
  bool has_left;
  bool (*watched)(void *context); /* NULL, or says that the group is to end */
  void *watched_context;
  even_ucx_notice incoming;
  void *incoming_request;
  bool deaf;              /* the group closes: nothing more is heard */
  even_ucx_notice ending; /* what this rank says of the group's end, and of its own leaving */
  even_ucx_notice leaving;
  even_ucx_transfer *notices; /* two a rank */
  even_comm_patience patience;
  even_ucx_messages *messages;

  atomic_flag busy; /* a thread is in a call */
  bool refuses;     /* a call has failed: `end` is an earlier failure for those that follow */
  uint64_t call_count;
  uint64_t waits_since; /* when the call under way first waited; 0: not yet */
  even_comm_call call;
  even_ucx_block *outgoing; /* one a rank */
  even_ucx_block *arrived;
  even_ucx_transfer *transfers; /* of the call: room for EVEN_UCX_TRANSFERS a rank */
  size_t *lengths;              /* room for one a rank, as here: */
  const void **sources;
  unsigned char *staging; /* NULL until a reduction needs it */
} even_ucx_group;

#define EVEN_UCX_TRANSFERS 8

static inline even_ucx_group *even_ucx_of(even_comm *comm) {
  return (even_ucx_group *)(void *)comm;
}

/* ---- wire.c: moving and waiting ---- */

/* Begins a transfer; one that cannot begin marks the peer as failed, and its wait says so. With the lock held. */
void even_ucx_send(even_ucx_group *group, even_ucx_transfer *transfer, int peer, uint64_t tag, const void *data,
                   size_t bytes);
void even_ucx_receive(even_ucx_group *group, even_ucx_transfer *transfer, int peer, uint64_t tag, void *data,
                      size_t bytes);
/* Whether it is done, well or not; frees its request. With the lock held. */
bool even_ucx_settled(even_ucx_group *group, even_ucx_transfer *transfer);
/* Does all that can be done now; whether anything was. With the lock held. */
bool even_ucx_move(even_ucx_group *group);
/* Moves, and where there was nothing to do polls (lock let go between) or sleeps, 100 ms or limit_ns at most. `polls`
 * counts since something last moved. With the lock held. */
void even_ucx_rest(even_ucx_group *group, uint32_t *polls, uint64_t limit_ns);
/* Returns when all transfers of the call are done, or with the group's end. */
even_status even_ucx_wait(even_ucx_group *group, even_ucx_transfer *transfers, size_t count) EVEN_MUST_USE;
/* After a failure: nothing of these transfers touches their memory any more. With the lock held. */
void even_ucx_abandon(even_ucx_group *group, even_ucx_transfer *transfers, size_t count);
/* Closes the connection to a peer at once, if there is one. With the lock held. */
void even_ucx_cut(even_ucx_group *group, int peer);

/* ---- ending.c: how a group ends, and who hears of it; with the lock held ---- */

/* Looks for what others say. Whether there was something. */
bool even_ucx_hear(even_ucx_group *group);
/* Ends the group for all ranks with the calling thread's last error, or does nothing where it has ended. */
void even_ucx_end(even_ucx_group *group);
/* Ends the group because `peer`, on whom something depends, has left or cannot be reached. */
void even_ucx_end_lost(even_ucx_group *group, int peer);
/* The group's end as the calling thread's error; `doing` says in what this rank was. */
even_status even_ucx_failure(const even_ucx_group *group, const char *doing) EVEN_MUST_USE;
/* Tells all others that this rank leaves, and stays until they have left too, at most limit_ns. */
void even_ucx_say_goodbye(even_ucx_group *group, uint64_t limit_ns);
/* "rank 3 (host b)" */
void even_ucx_name(const even_ucx_group *group, int rank, char *text, size_t bytes);

/* ---- call.c: the beginning and the end of a collective ---- */

even_status even_ucx_call_begin(even_ucx_group *group, even_call_kind kind, uint32_t dtype, uint32_t op, int root,
                                size_t count, const size_t *counts) EVEN_MUST_USE;
/* All ranks are in the same call, or EVEN_ERR_MISMATCH. bytes[r] bytes of outgoing[r].data have gone to rank r, and
 * what the others sent is in arrived[r].data. counts NULL: `bytes` of outgoing[own].data to everybody. */
even_status even_ucx_call_meet(even_ucx_group *group, size_t bytes, const size_t *each) EVEN_MUST_USE;
even_status even_ucx_call_end(even_ucx_group *group, even_status status);
/* The tag of a step of the call under way; steps count from 1. */
uint64_t even_ucx_call_tag(const even_ucx_group *group, int sender, uint64_t step);

/* ---- the collectives ---- */

even_status even_ucx_all_reduce(even_comm *comm, const even_comm_reduction *job) EVEN_MUST_USE;
even_status even_ucx_reduce_scatter(even_comm *comm, const even_comm_scattering *job) EVEN_MUST_USE;
even_status even_ucx_all_gather(even_comm *comm, const even_comm_gathering *job) EVEN_MUST_USE;
even_status even_ucx_broadcast(even_comm *comm, unsigned char *data, size_t bytes, int root) EVEN_MUST_USE;
even_status even_ucx_all_to_all(even_comm *comm, const even_comm_exchange *job) EVEN_MUST_USE;
even_status even_ucx_barrier(even_comm *comm) EVEN_MUST_USE;

/* ---- messages.c ---- */

even_status even_ucx_messages_open(even_ucx_group *group) EVEN_MUST_USE;
/* With the lock held: what has come, and what is done with it. Whether anything was. */
bool even_ucx_messages_move(even_ucx_group *group);
/* Ends all requests that are not done, and the background's work. Without the lock. */
void even_ucx_messages_stop(even_ucx_group *group);
void even_ucx_messages_free(even_ucx_group *group);
even_status even_ucx_send_begin(even_comm *comm, const void *data, size_t bytes, int peer, uint64_t tag,
                                even_comm_request **out) EVEN_MUST_USE;
even_status even_ucx_receive_begin(even_comm *comm, void *data, size_t bytes, int peer, uint64_t tag,
                                   even_comm_request **out) EVEN_MUST_USE;
bool even_ucx_request_done(even_comm_request *request);
even_status even_ucx_request_wait(even_comm_request *request, double timeout_seconds, int *peer) EVEN_MUST_USE;
void even_ucx_request_free(even_comm_request *request);

#endif
