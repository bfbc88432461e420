/* The engine between hosts: a rank's view of a group over UCX, or over another transport (MPI), and what the files of
 * the engine share. */
#ifndef EVEN_COMM_UCX_GROUP_H
#define EVEN_COMM_UCX_GROUP_H

#include "comm/board.h"
#include "comm/group.h"
#include "comm/ucx/transport.h"
#include "comm/watcher.h"
#include "comm/ways.h"

#include <pthread.h>

/* A collective of at most so many bytes travels with the words that say which call it is. */
#define EVEN_UCX_SMALL_BYTES ((size_t)8192)
#define EVEN_UCX_HOST_BYTES 64

/* What a message between ranks is: the upper bits of its tag; the sender's rank follows, then what tells it apart. */
typedef enum even_ucx_kind {
  EVEN_UCX_NOTICE = 1, /* what ranks tell one another of themselves and of the group: even_ucx_word */
  EVEN_UCX_CALL,       /* a collective's: its number, and the step in it */
  EVEN_UCX_HEADER,     /* of a message that a caller sends */
  EVEN_UCX_PAYLOAD     /* its data: its number */
} even_ucx_kind;

#define EVEN_UCX_KIND_SHIFT 60
#define EVEN_UCX_RANK_SHIFT 48
#define EVEN_UCX_KIND_MASK ((uint64_t)0xf << EVEN_UCX_KIND_SHIFT) /* of any rank */
#define EVEN_UCX_STEP_BITS 24

/* Of so many ranks each tells each what it reached; in larger groups a failure names its cause alone. */
#define EVEN_UCX_REPORTING_RANKS 256

static inline uint64_t even_ucx_tag(even_ucx_kind kind, int sender, uint64_t rest) {
  return (uint64_t)kind << EVEN_UCX_KIND_SHIFT | (uint64_t)(unsigned)sender << EVEN_UCX_RANK_SHIFT |
         (rest & (((uint64_t)1 << EVEN_UCX_RANK_SHIFT) - 1));
}

/* A part of a collective under way; request NULL: done, or never begun. */
typedef struct even_ucx_transfer {
  void *request;
  int peer;
  bool watched; /* legs.c wants to know when it is done */
  size_t bytes;
} even_ucx_transfer;

typedef struct even_ucx_peer {
  void *endpoint;
  bool left;          /* it has closed the group */
  bool gone;          /* its process has ended, as those of its host see */
  bool unwatched;     /* it answers in its calls alone */
  signed char failed; /* the transport's error; 0: it can be reached */
  int number;         /* in error texts */
  int process;
  char host[EVEN_UCX_HOST_BYTES];
  int host_number;          /* the first rank of its host */
  uint32_t mark;            /* of its host: even_host_mark */
  uint64_t sent;            /* messages to it */
  uint64_t on_way;          /* bytes of messages to it that it has not returned (credit.c) */
  uint64_t owed;            /* bytes of its messages that are to be returned to it */
  bool reported;            /* what it reached when the group ended */
  uint64_t answered_ns;     /* when this rank last heard what it does */
  uint64_t standing_ns;     /* for how long a rank of its host had seen it stand still when that told so, */
  uint64_t told_ns;         /* and when that was */
  uint64_t asked_ns;        /* when it was asked what it does and has not answered since; 0: it has answered */
  uint64_t slowest_ns;      /* the longest that it took to answer */
  uint64_t under_way;       /* bytes to and from it that are under way */
  uint64_t heard;           /* messages from it whose headers have come */
  even_circle_answer waits; /* what it said last, */
  uint64_t waits_asked_ns;  /* when it was asked for that and has not answered since; 0: it has answered */
  uint64_t waits_turn;      /* so many times it was told of what this process knows */
} even_ucx_peer;

typedef enum even_ucx_word {
  EVEN_UCX_LEFT = 1,   /* the sender has left the group */
  EVEN_UCX_ENDED,      /* the group has ended: why */
  EVEN_UCX_ASKS,       /* what does the receiver do, and how are the ranks of its host? */
  EVEN_UCX_REPORTS,    /* what a rank does */
  EVEN_UCX_RETURNS,    /* room for messages to the sender */
  EVEN_UCX_REFUSES,    /* a message of the receiver's, which does not fit here; */
  EVEN_UCX_ACCEPTS,    /* it has been received after all */
  EVEN_UCX_ASKS_WAITS, /* what does the receiver wait in? */
  EVEN_UCX_WAITS,      /* what a process waits in */
  EVEN_UCX_CROSSED     /* ranks wait for one another, the receiver among them */
} even_ucx_word;

/* Why a group has ended. */
typedef struct even_ucx_end_words {
  int32_t status;
  int32_t rank; /* whom the error names, as in even_error */
  char what[480];
  char fix[256];
} even_ucx_end_words;
void even_ucx_end_words_write(even_ucx_end_words *words, const even_error *why);
/* Whatever they hold. */
void even_ucx_end_words_read(const even_ucx_end_words *words, even_error *out);

/* What a rank, or another of its host, says of it. */
typedef struct even_ucx_news {
  even_flight_report call; /* of that rank, or of the one in the larger group */
  int32_t about;           /* a rank of this group */
  uint64_t standing_ns;    /* for so long it has been seen standing still */
  int32_t gone;            /* its process has ended */
  int32_t last;            /* the group has ended, and this is what it reached */
  int32_t unwatched;       /* that rank has no watcher */
} even_ucx_news;

/* Of a message that does not fit where it is received: its number, and the words of that receive's error. */
typedef struct even_ucx_refusal {
  uint64_t number;
  char what[400];
  char fix[128];
} even_ucx_refusal;

/* What a process waits in, and, of the sender's own, up to where it has come in the group. */
typedef struct even_ucx_waits {
  uint64_t own;
  even_circle_answer answer;
  even_far_waits of;
} even_ucx_waits;

/* A circle that was found, and the error. */
typedef struct even_ucx_crossed {
  even_circle_members members;
  even_ucx_end_words words;
} even_ucx_crossed;

typedef struct even_ucx_notice {
  int32_t word; /* even_ucx_word */
  int32_t sender;
  union {
    even_ucx_end_words end;
    even_ucx_news news;
    uint64_t room;
    even_ucx_refusal refusal;
    int32_t hosts;    /* whether those who are asked answer for their host, too */
    uint64_t process; /* of one that asks what the receiver waits in */
    even_ucx_waits waits;
    even_ucx_crossed crossed;
  };
} even_ucx_notice;

/* A notice on its way. */
typedef struct even_ucx_letter {
  struct even_ucx_letter *next;
  even_ucx_transfer transfer;
  even_ucx_notice notice; /* as much of it as is sent */
} even_ucx_letter;

/* What every rank of a collective sends to every other: which call it makes, and the data of small ones. */
typedef struct even_ucx_block {
  even_comm_call call;
  uint64_t bytes;   /* all_to_all: of the part for the receiver, */
  uint64_t balance; /* and of all that the sender sends and expects (exchange.c) */
  _Alignas(64) unsigned char data[EVEN_UCX_SMALL_BYTES];
} even_ucx_block;

typedef struct even_ucx_messages even_ucx_messages;

/* When one who waits last looked how the others are, and asked other hosts for it. */
typedef struct even_ucx_looks {
  uint64_t looked_ns;
  uint64_t since_ns; /* since when it has looked again and again */
  uint64_t asked_ns;
} even_ucx_looks;

/* A thread's side of a wait that others are told of. */
typedef struct even_ucx_waiting {
  even_waiting of;
  uint64_t asked_ns; /* when it last asked others what they wait in, */
  int ask_from;      /* and whom it asks next: from this rank on */
} even_ucx_waiting;

/* Links of larger groups are not measured. */
#define EVEN_UCX_FIT_RANKS 256

/* Parts by the speeds of the links (fit.c). */
typedef struct even_ucx_fit {
  bool unequal;    /* the links are, as far as is known */
  uint32_t *ends;  /* then: where each rank's part ends, of EVEN_UCX_FIT_WHOLE */
  uint64_t *times; /* what the ranks' links took: this rank's own; on rank 0 all */
  uint64_t word;
  uint64_t calls;
  size_t *cuts;   /* of the call under way: where in a step each rank's part begins; ranks + 1 */
  even_ways ways; /* of rank 0: of all_reduces that may be fitted */
} even_ucx_fit;

#define EVEN_UCX_LEG_COSTS 16

/* What came from a peer in exchanges that were measured (legs.c), since it was told. */
typedef struct even_ucx_leg {
  uint32_t transfers;
  uint64_t bytes;
  double costs[EVEN_UCX_LEG_COSTS]; /* ns a byte, of the last ones */
} even_ucx_leg;

typedef struct even_ucx_legs {
  even_telemetry *telemetry; /* is told; NULL: nothing is measured */
  even_ucx_leg *each;        /* one a rank; NULL before it is asked for */
  bool measures;             /* the first exchange of the call under way */
  uint64_t began_ns;         /* the exchange that was measured last */
  uint64_t told_ns;
} even_ucx_legs;

/* The collectives that have two ways and are no all-reduce (by_cost.c). */
typedef enum even_ucx_moved {
  EVEN_UCX_ALL_GATHER,    /* way 0: all parts at once; 1: one pair after the other */
  EVEN_UCX_BROADCAST,     /* 0: in parts, which are passed on; 1: whole, from the root to each */
  EVEN_UCX_REDUCE_SCATTER /* as EVEN_UCX_ALL_GATHER */
} even_ucx_moved;
#define EVEN_UCX_MOVES 3

typedef struct even_ucx_group {
  EVEN_COMM_BASE;
  const even_transport *transport;
  void *link;                  /* the transport's own of this group; NULL: there is nothing of it */
  struct even_ucx_group *next; /* for the transport's list of its groups */
  uint64_t message_numbers;    /* so many messages of a pair its tags tell apart; 0: more than there are */
  even_ucx_peer *peers;
  pid_t process; /* that opened the group */
  void *arena;
  _Atomic uint64_t timeout_ns;
  _Atomic uint64_t wait_ns;
  _Atomic uint64_t stop_grace_ns;
  even_board board;
  even_flight_writer flight;
  even_stall_inspector stall;
  uint64_t stall_asked; /* the number of the call of which the others were asked, */
  uint64_t stall_asked_ns;
  even_watch watch;

  pthread_mutex_t lock; /* over UCX, and all that follows but the call's own */
  _Atomic bool refused; /* a message of this rank was, and it has not heard so; written with the lock held, as: */
  int refused_by;
  uint64_t refused_ns; /* when that was heard */
  even_ucx_refusal refusal;
  int sleepers;          /* threads that sleep until something comes, */
  bool listens;          /* one of them on the transport, */
  _Atomic uint32_t turn; /* the others on this word (futex): it changes where they are to look */
  _Atomic bool ended;    /* set with the lock held */
  even_error end;        /* why; its text lacks what this rank was doing */
  bool has_left;
  bool drained;          /* it has left, and nothing that others sent it is under way any more */
  even_comm_whole whole; /* that this group is part of; ranks 0: of none */
  even_ucx_notice incoming;
  void *incoming_request;
  bool deaf;              /* the group closes: nothing more is heard */
  even_ucx_notice ending; /* what this rank says of the group's end, and of its own leaving */
  even_ucx_notice leaving;
  even_ucx_transfer *notices; /* two a rank */
  even_ucx_letter *letters;
  bool owes;                 /* room that could not be returned */
  even_ucx_looks call_looks; /* of the thread in a collective, and of those who wait for messages */
  even_ucx_looks message_looks;
  even_comm_patience patience;
  even_ucx_messages *messages;

  atomic_flag busy; /* a thread is in a call */
  bool refuses;     /* a call has failed: `end` is an earlier failure for those that follow */
  uint64_t call_count;
  uint64_t passed; /* circles of which it has told */
  uint64_t met;    /* the last call of which this rank has told the others */
  uint64_t steps;  /* of that call, for which it has sent what it has */
  bool meets;      /* this rank waits for what they tell of theirs */
  bool rests;      /* as even_ucx_tell_rest says */
  even_ucx_waiting call_waiting;
  uint64_t waits_since; /* when the call under way first waited; 0: not yet */
  even_comm_call call;
  even_ucx_block *outgoing; /* one a rank */
  even_ucx_block *arrived;
  even_ucx_transfer *transfers; /* of the call: room for EVEN_UCX_TRANSFERS a rank */
  size_t *lengths;              /* room for one a rank, as here: */
  bool *waits;
  bool *asked; /* messages.c */
  const void **sources;
  unsigned char *staging;              /* NULL until a reduction needs it */
  even_ways reduce_ways;               /* of rank 0: of all_reduce, */
  even_ways move_ways[EVEN_UCX_MOVES]; /* and of the others */
  even_ucx_fit fit;
  even_ucx_legs legs;
} even_ucx_group;

#define EVEN_UCX_TRANSFERS 8
#define EVEN_UCX_ARENA_ALIGNMENT ((size_t)64)

extern const even_comm_engine even_ucx_engine;
extern const even_comm_engine even_ucx_mpi_engine;

static inline even_ucx_group *even_ucx_of(even_comm *comm) {
  return (even_ucx_group *)(void *)comm;
}

/* ---- open.c, group.c: opening and closing, for every transport ---- */

even_status even_ucx_open(const even_comm_params *params, const even_comm_network *network,
                          const even_transport *transport, even_comm **out) EVEN_MUST_USE;
/* For a transport that goes while its groups are still open: ends the group for this rank with the calling thread's
 * last error, and gives back all that the transport has of it. */
void even_ucx_lose_transport(even_ucx_group *group);

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
/* Moves, and where there was nothing to do polls (lock let go between) or sleeps, 20 ms or limit_ns at most. `polls`
 * counts since something last moved. With the lock held. */
void even_ucx_rest(even_ucx_group *group, uint32_t *polls, uint64_t limit_ns);
/* Lets those look who sleep in even_ucx_rest. With the lock held. */
void even_ucx_wake(even_ucx_group *group);
/* Returns when all transfers of the call are done, or with the group's end. */
even_status even_ucx_wait(even_ucx_group *group, even_ucx_transfer *transfers, size_t count) EVEN_MUST_USE;
/* The same as soon as `until` says so (with the lock held), whatever is under way. What this rank's own side has to do
 * for it has no limit here, and is told by even_ucx_stir. */
typedef bool even_ucx_until(even_ucx_group *group, const void *context);
/* What it waits for, some fifty times a second: by even_ucx_tell_step, even_ucx_tell_rest or even_ucx_tell_nothing. */
typedef void even_ucx_tell(even_ucx_group *group, const void *context, uint64_t now_ns);
even_status even_ucx_wait_until(even_ucx_group *group, even_ucx_transfer *transfers, size_t count,
                                even_ucx_until *until, even_ucx_tell *tell, const void *context) EVEN_MUST_USE;
/* For one who waits, at times: has the group that this one is part of look whether it ends. With the lock held, which
 * is let go meanwhile. */
void even_ucx_look_at_whole(even_ucx_group *group);
/* After a failure: nothing of these transfers touches their memory any more. With the lock held. */
void even_ucx_abandon(even_ucx_group *group, even_ucx_transfer *transfers, size_t count);
/* Does what can be done now, or sleeps for a moment with the lock held: for those who end a group. */
void even_ucx_breathe(even_ucx_group *group, uint32_t *idle);
/* Closes the connection to a peer at once, if there is one. With the lock held. */
void even_ucx_cut(even_ucx_group *group, int peer);

/* ---- ending.c: how a group ends, and who hears of it; with the lock held ---- */

/* Looks for what others say. Whether there was something. */
bool even_ucx_hear(even_ucx_group *group);
/* Ends the group for all ranks with the calling thread's last error, or does nothing where it has ended. */
void even_ucx_end(even_ucx_group *group);
/* Ends it for this rank alone, in the same way. */
void even_ucx_end_here(even_ucx_group *group);
/* Ends the group because `peer`, on whom something depends, has left or cannot be reached. */
void even_ucx_end_lost(even_ucx_group *group, int peer);
/* Ends the group because `peer`, on whom this rank waits, stands still. */
void even_ucx_end_stopped(even_ucx_group *group, int peer);
/* Ends the group because `peer`, whom nobody else can see, has not answered for so long. */
void even_ucx_end_silent(even_ucx_group *group, int peer, uint64_t silent_ns);
/* Ends the group where whoever opened it says that it is over; the others hear so from theirs. */
void even_ucx_end_over(even_ucx_group *group);
static inline bool even_ucx_is_over(const even_ucx_group *group) {
  return even_comm_is_over((const even_comm *)(const void *)group);
}
/* The group's end as the calling thread's error; `doing` says in what this rank was. */
even_status even_ucx_failure(const even_ucx_group *group, const char *doing) EVEN_MUST_USE;
/* The same for the collective under way: says where it was made, and waits a moment for what the others reached. The
 * lock is let go meanwhile. */
even_status even_ucx_call_failure(even_ucx_group *group) EVEN_MUST_USE;
/* Tells all others that this rank leaves; */
void even_ucx_goodbye_begin(even_ucx_group *group);
/* does what can be done now, into *moved whether that was anything, and says whether to stay on, for them to leave,
 * too, or to know of the end; */
bool even_ucx_goodbye_stays(even_ucx_group *group, uint64_t stayed_ns, bool *moved);
/* and stays as long. */
void even_ucx_goodbye_wait(even_ucx_group *group);
/* "rank 3 (host b)" */
void even_ucx_name(const even_ucx_group *group, int rank, char *text, size_t bytes);

/* ---- news.c: what ranks tell one another of themselves; with the lock held ---- */

/* Sends a notice of so many bytes; without memory for it, it is not sent: whether it was. */
bool even_ucx_post(even_ucx_group *group, int peer, const even_ucx_notice *notice, size_t bytes);
/* Lets go what has been sent. */
void even_ucx_letters_settle(even_ucx_group *group);
/* Gives up what has not, and, once the transport has stopped, its memory. */
void even_ucx_letters_abandon(even_ucx_group *group);
void even_ucx_letters_free(even_ucx_group *group);
/* Tells all others what this rank does. */
void even_ucx_report(even_ucx_group *group, bool last);
/* Takes a notice of these kinds. */
void even_ucx_answer(even_ucx_group *group, const even_ucx_notice *notice);
void even_ucx_take_news(even_ucx_group *group, const even_ucx_notice *notice);
/* Asks `peer` what it does, and, with `hosts`, how the ranks of its host are. */
void even_ucx_ask(even_ucx_group *group, int peer, bool hosts);
/* Waits, for a moment, until all who can have told what they reached. */
void even_ucx_await_reports(even_ucx_group *group);

/* ---- lives.c: how those are that this rank waits for; with the lock held ---- */

/* Whether it is time to look again; a sleep that ends a little early must not cost a look. */
static inline bool even_ucx_look_is_due(const even_ucx_looks *looks, uint64_t now_ns) {
  return now_ns - looks->looked_ns >= EVEN_COMM_LOOK_NS / 4 * 3;
}
/* Looks: whoever is gone is marked, whoever stands still for too long ends the group. `waits[r]` says whether this rank
 * depends on rank r. */
void even_ucx_look(even_ucx_group *group, even_ucx_looks *looks, const bool *waits, uint64_t now_ns);
/* Says once a call, to whoever asked for it, for whom it waits for so long. The lock is let go meanwhile. */
void even_ucx_stall_inspect(even_ucx_group *group, const bool *waits, uint64_t now_ns);
void even_ucx_on_stall(even_comm *comm, double seconds, even_comm_stall_call *call, void *context);

/* ---- waits.c: what ranks wait in; with the lock held ---- */

/* Takes a notice of these kinds. */
void even_ucx_answer_waits(even_ucx_group *group, const even_ucx_notice *question);
void even_ucx_take_waits(even_ucx_group *group, const even_ucx_notice *notice);
void even_ucx_take_crossed(const even_ucx_notice *notice);
/* Tells those of a circle with this process in it that are in this group, where one was found: they wait in others. */
void even_ucx_pass_on(even_ucx_group *group);
/* This rank has waited in a meeting, and does still: `receives` are those of even_ucx_call_meet. Ends the group where
 * it waits in a circle. The lock is let go meanwhile. Of the calling thread's last error nothing is left. */
void even_ucx_tell_meeting(even_ucx_group *group, const even_ucx_transfer *receives, uint64_t now_ns);
/* The same of one that waits, within a call to which all have come, for what others send for its step of that number,
 * among `count` transfers; of one that rests while *word is `seen`, which another thread of this rank changes; and of
 * one that waits for what is under way. */
void even_ucx_tell_step(even_ucx_group *group, const even_ucx_transfer *transfers, size_t count, uint64_t step,
                        uint64_t now_ns);
void even_ucx_tell_rest(even_ucx_group *group, const _Atomic uint32_t *word, uint32_t seen);
bool even_ucx_tell_nothing(even_ucx_group *group); /* as even_waits_end */

/* ---- call.c: the beginning and the end of a collective ---- */

even_status even_ucx_call_begin(even_ucx_group *group, even_call_kind kind, uint32_t dtype, uint32_t op, int root,
                                size_t count, const size_t *counts) EVEN_MUST_USE;
/* All ranks are in the same call, or EVEN_ERR_MISMATCH. bytes[r] bytes of outgoing[r].data have gone to rank r, and
 * what the others sent is in arrived[r].data. counts NULL: `bytes` of outgoing[own].data to everybody. */
even_status even_ucx_call_meet(even_ucx_group *group, size_t bytes, const size_t *each) EVEN_MUST_USE;
even_status even_ucx_call_end(even_ucx_group *group, even_status status);
/* For one who names both sides of a mismatch: returns when `rank` has said where it made its call, or after a moment.
 * With the lock held. */
void even_ucx_await_site(even_ucx_group *group, int rank);
/* The tag of a step of the call under way; steps count from 1. */
uint64_t even_ucx_call_tag(const even_ucx_group *group, int sender, uint64_t step);

/* ---- legs.c: what the way to each other host takes ---- */

/* Tells telemetry, once a second, from the next call on; NULL: not any more. */
even_status even_ucx_tell_legs(even_comm *comm, even_telemetry *telemetry) EVEN_MUST_USE;
/* In a large call, after all have met. */
void even_ucx_legs_begin(even_ucx_group *group);
/* With the lock held: this rank begins an exchange; whether it is the one that is measured. */
bool even_ucx_legs_start(even_ucx_group *group);
/* The same, where it is: it has begun to receive a part of it. */
void even_ucx_legs_watch(even_ucx_group *group, even_ucx_transfer *transfer, bool measured);
/* One of them is done. */
void even_ucx_legs_settled(even_ucx_group *group, const even_ucx_transfer *transfer);
/* The call has ended well. */
void even_ucx_legs_end(even_ucx_group *group);

/* ---- the collectives ---- */

/* The ways of all_reduce, and up to which size there is one between whole and parts. */
void even_ucx_start_ways(even_ucx_group *group);
size_t even_ucx_choice_bytes(const even_ucx_group *group);

/* ---- by_cost.c: the ways of the others ---- */

void even_ucx_start_move_ways(even_ucx_group *group);
/* In place of even_ucx_call_meet and what follows: all ranks go the way that costs least. */
typedef even_status even_ucx_run(even_ucx_group *group, const void *job, int way);
even_status even_ucx_by_cost(even_ucx_group *group, even_ucx_moved move, size_t bytes, even_ucx_run *run,
                             const void *job) EVEN_MUST_USE;

even_status even_ucx_all_reduce(even_comm *comm, const even_comm_reduction *job) EVEN_MUST_USE;
even_status even_ucx_reduce_scatter(even_comm *comm, const even_comm_scattering *job) EVEN_MUST_USE;
even_status even_ucx_all_gather(even_comm *comm, const even_comm_gathering *job) EVEN_MUST_USE;
even_status even_ucx_broadcast(even_comm *comm, unsigned char *data, size_t bytes, int root) EVEN_MUST_USE;
even_status even_ucx_all_to_all(even_comm *comm, const even_comm_exchange *job) EVEN_MUST_USE;
even_status even_ucx_barrier(even_comm *comm) EVEN_MUST_USE;

/* ---- credit.c: how many messages may lie at a receiver that does not ask for them; with the lock held ---- */

/* Whether a message of so many bytes may be announced to the peer, and that it is. */
bool even_ucx_has_room(const even_ucx_group *group, int peer, size_t bytes);
void even_ucx_take_room(even_ucx_group *group, int peer, size_t bytes);
/* A message of that sender was taken here, or is in the way of one that is asked for. */
void even_ucx_give_room_back(even_ucx_group *group, int sender, size_t bytes);
void even_ucx_give_owed_room_back(even_ucx_group *group);
/* The notice of a receiver. */
void even_ucx_take_room_back(even_ucx_group *group, const even_ucx_notice *notice);

/* ---- refusal.c: messages that do not fit where they are received; with the lock held ---- */

/* Takes what the sender was told back. */
void even_ucx_accept(even_ucx_group *group, int sender, uint64_t number);
/* Either notice. */
void even_ucx_take_refusal(even_ucx_group *group, const even_ucx_notice *notice);
/* Whether a message of this rank was refused that it has not heard of: the calling thread's last error then; and,
 * without the lock, once. */
bool even_ucx_refusal_stands(const even_ucx_group *group);
bool even_ucx_refusal_take(even_ucx_group *group); /* the same, once */
bool even_ucx_refused(even_comm *comm, bool waits);
/* Whether it has stood for so long that no word that takes it back can be behind it. */
bool even_ucx_refusal_lasts(const even_ucx_group *group);

/* ---- messages.c ---- */

/* With the lock held: begins the sends to a peer that have waited for room. */
void even_ucx_messages_start(even_ucx_group *group, int peer);

even_status even_ucx_messages_open(even_ucx_group *group) EVEN_MUST_USE;
/* With the lock held: what has come, and what is done with it. Whether anything was. */
bool even_ucx_messages_move(even_ucx_group *group);
/* Ends all requests that are not done, and the background's work. Without the lock. */
void even_ucx_messages_stop(even_ucx_group *group);
/* With the lock held: takes back what was to receive the next header. */
void even_ucx_messages_hear_no_more(even_ucx_group *group);
void even_ucx_messages_free(even_ucx_group *group);
/* Whether messages came, or were to come, that this rank has not taken. With the lock held, after
 * even_ucx_messages_stop.
 */
bool even_ucx_messages_are_left(even_ucx_group *group);
even_status even_ucx_send_begin(even_comm *comm, const void *data, size_t bytes, int peer, uint64_t tag,
                                even_comm_request **out) EVEN_MUST_USE;
even_status even_ucx_receive_begin(even_comm *comm, void *data, size_t bytes, int peer, uint64_t tag,
                                   even_comm_request **out) EVEN_MUST_USE;
bool even_ucx_request_done(even_comm_request *request);
even_status even_ucx_request_wait(even_comm_request *request, double timeout_seconds, int *peer) EVEN_MUST_USE;
void even_ucx_request_free(even_comm_request *request);

#endif
