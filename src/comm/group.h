/* The shared-memory engine: a rank's view of its group, and what the files of the engine share. */
#ifndef EVEN_COMM_GROUP_H
#define EVEN_COMM_GROUP_H

#include "comm/engine.h"
#include "comm/flight.h"
#include "comm/peers.h"
#include "comm/pieces.h"
#include "comm/segment.h"
#include "comm/waits.h"
#include "os/shared_memory.h"

#include <stdbool.h>

/* The collectives whose data pass through staging, each in pieces of a size of its own. */
typedef enum even_staged_kind {
  EVEN_STAGED_ALL_REDUCE,
  EVEN_STAGED_REDUCE_SCATTER,
  EVEN_STAGED_ALL_GATHER,
  EVEN_STAGED_BROADCAST,
  EVEN_STAGED_ALL_TO_ALL,
  EVEN_STAGED_KINDS /* how many */
} even_staged_kind;

/* How long to poll before sleeping, learnt from how waiting went lately. */
typedef struct even_comm_patience {
  uint32_t polls;
  uint32_t least;
  uint32_t most;
  bool yields;    /* ranks share cores: each poll lets others have the core */
  uint32_t rests; /* so many waits to come sleep at once: somebody who is no rank kept the core for long */
  uint32_t rest;  /* how many that will be the next time */
} even_comm_patience;

/* A user's `spin` that is not less than 0, with any engine. Nobody looks for the dead meanwhile: some 50 ms at most. */
static inline uint32_t even_comm_polls_of(int spin) {
  const int most = 1 << 20;
  return (uint32_t)(spin < most ? spin : most);
}

/* As which the user wants staged data written; on all ranks alike. */
typedef enum even_writing_way { EVEN_WRITING_MEASURED, EVEN_WRITING_THROUGH, EVEN_WRITING_PAST } even_writing_way;

/* How staged data are written (writing.c). */
typedef struct even_comm_writing {
  _Atomic bool past_caches; /* the verdict of the last trial */
  _Atomic uint8_t forced;   /* even_writing_way; 0: what is measured decides */
  uint8_t asked;            /* the same, as it comes from rank 0 (even_shared_choice) */
  uint32_t stages;          /* full ones since the trial began */
  uint32_t kind;            /* of the calls that the trial is made of */
  size_t piece_bytes;       /* of their stages */
  uint64_t least[2];        /* ns of the trial's stages for 1024 bytes: through the caches, past them */
  uint32_t passed;          /* full stages of other kinds meanwhile */
  bool counted;             /* the stage under way is one of the trial's or of the time to the next */
  uint64_t began;           /* the stage under way, 0 where it is not measured */
} even_comm_writing;

/* An all-reduce by a chain (chain.c). */
typedef struct even_comm_chain {
  bool under_way;
  bool backwards;
  uint32_t begin;  /* pieces of all calls before this one, modulo 2^32 */
  uint32_t pieces; /* of this call */
  size_t elements; /* of a piece */
  uint32_t slots;  /* pieces that may be under way */
  uint32_t added;  /* those to which this rank has added its data */
  uint32_t taken;  /* those whose sums it has taken */
  even_reduce_function *step;
} even_comm_chain;

typedef struct even_stall_inspector {
  uint64_t limit_ns;
  uint64_t told; /* the number of the call of which it was */
  even_comm_stall_call *call;
  void *context;
} even_stall_inspector;

typedef struct even_messages even_messages; /* messages.h */

struct even_comm {
  EVEN_COMM_BASE;
  pid_t process; /* that opened the group */
  even_comm_header *header;
  even_comm_control *controls; /* ranks of them */
  even_comm_layout layout;
  even_shared_memory memory;      /* address NULL where the caller owns the mapping */
  _Atomic uint64_t timeout_ns;    /* of a call's waiting, from its first wait on */
  uint64_t waits_since;           /* when the call under way first waited, 0: not yet */
  _Atomic uint64_t stop_grace_ns; /* how long a peer may stand still while this rank waits for it */

  uint32_t stage; /* stages that this rank has reached */
  uint32_t slot;  /* which of the two slots the next small message uses */
  uint64_t call_count;
  even_comm_call call;         /* the call under way */
  even_comm_patience arrival;  /* for peers that may be busy elsewhere */
  even_comm_patience progress; /* for peers that are in the same call */
  size_t piece_bytes;          /* of this call, the same on all ranks from even_call_meet on */
  size_t large_bytes;          /* staged calls of so many bytes do not find their data in the caches; on all ranks */
  bool chained;                /* this call may go by a chain; on all ranks */
  bool timed;                  /* this call is one that rank 0 measures, if it is large enough; on all ranks */
  even_comm_chain chain;
  bool backwards;                        /* the next of these begins at its data's end, as on all ranks */
  even_pieces pieces[EVEN_STAGED_KINDS]; /* of rank 0 */
  even_comm_writing writing;
  even_comm_costs *costs; /* of rank 0: NULL, or what the trials of `pieces` add to (prefer.c) */
  char shape[EVEN_COMM_COSTS_SHAPE];
  _Atomic uint64_t wait_ns; /* spent waiting for peers since the group was opened */
  atomic_flag busy;         /* a thread is in a call */
  even_status ended;        /* not EVEN_OK: the group is unusable, and why */
  char ended_what[320];
  even_flight_writer flight;
  even_wait_pad *pads;   /* of all ranks, layout.pad_stride apart; NULL: none */
  even_comm *next_group; /* waits.c: of this process */
  const int *numbers;    /* what the ranks are called in errors; NULL: as here */
  even_comm_whole whole; /* that this group is part of */
  even_stall_inspector stall;
  even_messages *messages;
  char unplaced[160];   /* why this rank's part lies on no chosen node, "" where it does (nodes.c) */
  const void **sources; /* room for one pointer a rank */
  void **targets;
};

static inline int even_comm_number(const even_comm *comm, int rank) {
  return comm->numbers == NULL ? rank : comm->numbers[rank];
}

/* Opens a group over a segment that the caller has mapped and keeps mapped: lets threads of one process be ranks. */
even_status even_comm_open_mapped(const even_comm_params *params, void *segment, size_t segment_bytes,
                                  even_comm **out) EVEN_MUST_USE;

static inline unsigned char *even_comm_memory(const even_comm *comm) {
  return (unsigned char *)comm->header;
}
static inline unsigned char *even_comm_slot_of(const even_comm *comm, int rank, uint32_t slot) {
  return even_comm_memory(comm) + comm->layout.slots + (size_t)rank * comm->layout.slot_stride +
         (slot & 1u) * EVEN_COMM_SLOT_BYTES;
}
/* part: 0 … 3. After even_call_meet: a call's pieces have another size than those of the one before, and all are past
 * that one. */
static inline unsigned char *even_comm_staging_of(const even_comm *comm, int rank, size_t part) {
  return even_comm_memory(comm) + comm->layout.stagings + (size_t)rank * comm->layout.staging_stride +
         part * comm->piece_bytes;
}
static inline even_comm_channel *even_comm_channel_of(const even_comm *comm, int from, int to) {
  size_t number = (size_t)from * (size_t)comm->ranks + (size_t)to;
  return (even_comm_channel *)(void *)(even_comm_memory(comm) + comm->layout.channels +
                                       number * comm->layout.channel_stride);
}
/* NULL in groups without messages. */
static inline even_comm_mail *even_comm_mail_of(const even_comm *comm, int rank) {
  return comm->layout.ring_bytes == 0 ? NULL
                                      : (even_comm_mail *)(void *)(even_comm_memory(comm) + comm->layout.mails +
                                                                   (size_t)rank * comm->layout.mail_stride);
}
static inline even_wait_pad *even_comm_pad_of(const even_comm *comm, int rank) {
  return (even_wait_pad *)(void *)((unsigned char *)comm->pads + (size_t)rank * comm->layout.pad_stride);
}
static inline unsigned char *even_comm_arena_of(const even_comm *comm, int rank) {
  return even_comm_memory(comm) + comm->layout.arenas + (size_t)rank * comm->layout.arena_stride;
}

static inline bool even_group_whole(const even_comm *comm) {
  return atomic_load(&comm->header->state) == EVEN_GROUP_WHOLE;
}

/* More than the caches of a chiplet hold of both ranks' data. */
#define EVEN_COMM_LARGE_BYTES ((size_t)32 << 20)

/* prefer.c: which size of pieces a group begins with, and what is kept of what it learns. */
even_status even_shared_follow(even_comm *comm, const even_comm_following *by, size_t *lacking) EVEN_MUST_USE;
/* The sizes that a group begins with. `crowded`: ranks share cores. */
void even_shared_start_pieces(even_comm *comm, size_t least, size_t most, bool crowded);
/* Rank 0: what the call under way announces of its pieces. */
uint64_t even_shared_pieces_word(const even_comm *comm);
/* A staged call of so many bytes, the same on all ranks, begins, all being there, and has ended well; then all meet
 * where it is measured, and what a trial that has ended with it found is kept. */
void even_shared_staged_begins(even_comm *comm, size_t bytes);
even_status even_shared_staged_ends(even_comm *comm, size_t bytes) EVEN_MUST_USE;
/* What of it all ranks know alike. */
void *even_shared_choice(even_comm *comm, int number, size_t *bytes);
/* How rank 0 has chosen the pieces of all_reduce, " (9.1 ms for 16 MB; chain 12)", and of the others, "; broadcast in
 * pieces-1M (2.1 ms for 16 MB; pieces-256K 2.4)": as far as there are figures. */
void even_shared_describe_pieces(const even_comm *comm, char *text, size_t bytes);
void even_shared_describe_moves(const even_comm *comm, char *text, size_t bytes);

/* What the engine's table (group.c) names; each where its subject is. */
even_status even_shared_all_reduce(even_comm *comm, const even_comm_reduction *job) EVEN_MUST_USE;
even_status even_shared_reduce_scatter(even_comm *comm, const even_comm_scattering *job) EVEN_MUST_USE;
even_status even_shared_all_gather(even_comm *comm, const even_comm_gathering *job) EVEN_MUST_USE;
even_status even_shared_broadcast(even_comm *comm, unsigned char *data, size_t bytes, int root) EVEN_MUST_USE;
even_status even_shared_all_to_all(even_comm *comm, const even_comm_exchange *job) EVEN_MUST_USE;
even_status even_shared_barrier(even_comm *comm) EVEN_MUST_USE;
bool even_shared_has_messages(const even_comm *comm);
even_status even_shared_send_begin(even_comm *comm, const void *data, size_t bytes, int peer, uint64_t tag,
                                   even_comm_request **out) EVEN_MUST_USE;
even_status even_shared_receive_begin(even_comm *comm, void *data, size_t bytes, int peer, uint64_t tag,
                                      even_comm_request **out) EVEN_MUST_USE;
bool even_shared_request_done(even_comm_request *request);
even_status even_shared_request_wait(even_comm_request *request, double timeout_seconds, int *peer) EVEN_MUST_USE;
void even_shared_request_free(even_comm_request *request);

/* refusal.c: messages that do not fit where they are received */

/* Tells a sender so, with the words of that receive's error, and takes it back where the message has been received
 * after all, unless the sender has heard it. */
void even_refusal_say(even_comm *comm, int sender, uint64_t tag, const even_error *why);
void even_refusal_withdraw(even_comm *comm, int sender, uint64_t tag);
/* Whether a message of this rank was refused that it has not heard of: the calling thread's last error then, once; of
 * one who waits in a collective it goes on. Any thread. */
bool even_shared_refused(even_comm *comm, bool waits);
/* The same, which goes on. */
bool even_refusal_stands(const even_comm *comm);
/* The number of the text of a site of this rank's messages, and the text; 0: not known, or there are too many. With the
 * messages' lock held. */
uint32_t even_message_site_number(even_comm *comm, const char *text);
void even_message_site_of(const even_comm *comm, int rank, uint32_t number, char *text, size_t bytes);

/* peers.c: how are the processes of the others? */

/* Writes who this process is, and which CPUs the calling thread may use, into this rank's control block. */
even_status even_peers_introduce(even_comm *comm) EVEN_MUST_USE;
/* The process of a rank, or the one that will come; 0: not known. */
uint32_t even_peers_process(const even_comm *comm, int rank);
/* How `rank` is; EVEN_PEER_LIVES where it cannot be told, and where another rank has just looked (it does what follows,
 * or nothing does). `now_ns` of even_clock_ns. */
even_peer_state even_peers_look(const even_comm *comm, int rank, uint64_t now_ns);
/* Ends the group for a rank that even_peers_look found gone or standing; whether it was. */
bool even_peers_end_group(even_comm *comm, int rank, even_peer_state state);
/* Whether the CPUs that all ranks may use together are at least as many as the ranks. */
bool even_peers_have_cpus(const even_comm *comm);

/* nodes.c: on which NUMA node a rank's part of the segment lies. */

/* After even_peers_introduce, before anybody writes to the parts: chooses the node of this rank's CPUs for its own. */
void even_nodes_place(even_comm *comm);
/* "memory of ranks 0-3 on node 0, ranks 4-7 on node 1", or why it is not placed. */
void even_nodes_describe(const even_comm *comm, char *text, size_t bytes);

/* stage.c: one synchronisation of all ranks. */

/* Says that this rank has reached the next stage and returns when all have. `patience` is one of the group's two. */
even_status even_stage(even_comm *comm, even_comm_patience *patience) EVEN_MUST_USE;
/* Waits until the chain under way has something to do for this rank; may return before. */
even_status even_stage_wait(even_comm *comm) EVEN_MUST_USE;
/* Whether `rank` has reached the stage of this rank; in a chain: has done all that is its to do. */
bool even_stage_has_come(const even_comm *comm, int rank);
/* stall.c: the call under way waits for `missing`, the first that has not come. */
void even_stall_inspect(even_comm *comm, int missing, uint64_t now_ns);
void even_shared_on_stall(even_comm *comm, double seconds, even_comm_stall_call *call, void *context);
/* Ends the group for all ranks, for the first cause given, and wakes those that wait. */
void even_group_end(even_comm *comm, uint32_t state);
/* The same for a cause that is known from elsewhere. */
void even_group_end_told(even_comm *comm, const even_error *why);
/* Records why the group has ended as the calling thread's error, without what this rank was in. */
even_status even_group_cause(const even_comm *comm) EVEN_MUST_USE;
/* Wakes all that wait in collectives, to look again. */
void even_group_wake(even_comm *comm);
/* Wakes also those that wait for messages. */
void even_group_alarm(even_comm *comm);
/* Wakes those of one rank that wait for messages (channel.c). */
void even_message_bell_ring(even_comm *comm, int rank);
/* Records the group's end as the calling thread's error. */
even_status even_group_failure(even_comm *comm) EVEN_MUST_USE;
/* The same for one who was not in a collective: `doing` says in what. */
even_status even_group_failure_in(const even_comm *comm, const char *doing) EVEN_MUST_USE;

/* chain.c */

/* After even_call_meet, on all ranks: all-reduces any data, of any type. */
even_status even_chain_reduce(even_comm *comm, const even_comm_reduction *job, bool backwards) EVEN_MUST_USE;
/* Within it: whom this rank waits for, `ranks` where there is something to do for it; and whether another is through.
 */
int even_chain_missing(const even_comm *comm);
bool even_chain_has_done(const even_comm *comm, int rank);

/* call.c: the beginning and the end of a collective. */

/* Takes the group for this thread and announces the call; even_call_end must follow on success. `counts` are the
 * elements of each rank, or NULL where `count` says all. */
even_status even_call_begin(even_comm *comm, even_call_kind kind, uint32_t dtype, uint32_t op, int root, size_t count,
                            const size_t *counts, const void *arena_data, size_t arena_data_bytes) EVEN_MUST_USE;
/* The call's first stage: all ranks are in the same call, or EVEN_ERR_MISMATCH. */
even_status even_call_meet(even_comm *comm) EVEN_MUST_USE;
/* A further stage of the same call. */
even_status even_call_next(even_comm *comm) EVEN_MUST_USE;
/* Gives the group free; keeps the first failure. Returns `status`. */
even_status even_call_end(even_comm *comm, even_status status);
/* After even_call_meet: whether the data of all ranks lie in their arenas. */
bool even_call_all_in_arena(const even_comm *comm);
/* After even_call_meet: the data of `rank`, which lies in its arena. */
unsigned char *even_call_arena_data(const even_comm *comm, int rank);

#endif
