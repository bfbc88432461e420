/* What an engine is: a way to move data between the ranks of a group. comm.c checks what callers pass, once for all
 * engines, and calls the group's engine through its table. */
#ifndef EVEN_COMM_ENGINE_H
#define EVEN_COMM_ENGINE_H

#include "comm/kernels.h"
#include "comm/recording.h"
#include "comm/waits.h"

#include <evenstep/comm_costs.h>
#include <evenstep/flight.h>
#include <stdatomic.h>

typedef struct even_comm_engine even_comm_engine;
typedef struct even_comm_whole even_comm_whole;

/* By what a group chooses among an engine's ways; of its rank 0. */
typedef struct even_comm_following {
  even_comm_costs *costs; /* may be NULL */
  const char *shape;
  const char *engine; /* as the caller's group is called: "hosts" of the "ucx" between them, too */
  const char *way;    /* the name of one to take whatever it costs; NULL: none */
} even_comm_following;

/* What the group of every engine begins with, so that an even_comm can be read as an even_comm_base. */
#define EVEN_COMM_BASE                                                                                      \
  const even_comm_engine *engine;                                                                           \
  const even_kernels *kernels; /* of the reductions */                                                      \
  int rank;                                                                                                 \
  int ranks;                                                                                                \
  uint32_t process_mark;             /* even_process_mark() at opening; 0: not checked */                   \
  size_t arena_bytes;                /* of each rank's part of the arena */                                 \
  uint32_t elements;                 /* of the bytes that are moved, of all calls; called.h. 0: not said */ \
  even_recording *recording;         /* of its calls; comm.c's. NULL: none */                               \
  char name[EVEN_WAITS_GROUP_BYTES]; /* what it is called, cut to fit; "": nobody has said */               \
  even_comm_over_call *over;         /* as in even_comm_params */                                           \
  void *over_context

typedef struct even_comm_base {
  EVEN_COMM_BASE;
} even_comm_base;

/* And what every engine's request begins with. */
#define EVEN_COMM_REQUEST_BASE                   \
  even_comm *comm;                               \
  even_recorded_message recorded; /* comm.c's */ \
  bool sends

typedef struct even_comm_request_base {
  EVEN_COMM_REQUEST_BASE;
} even_comm_request_base;

/* ---- what a collective is given; checked: the sizes fit, the pointers are aligned, the kernel exists ---- */

/* An all-reduce whose data come and go piece by piece while it is under way, for engines that have `stir`: piece p is
 * `piece` elements from p * stride on (the part of them that lies before the end of all), at one place on all ranks. */
typedef struct even_comm_flow {
  size_t piece;
  size_t stride;
  size_t pieces;
  _Atomic uint32_t ready; /* so many pieces are there; whoever raises it calls `stir` */
  /* On the call's thread: so many pieces have their results. */
  void (*done)(void *context, size_t pieces);
  void *context;
} even_comm_flow;

typedef struct even_comm_reduction {
  unsigned char *data;
  size_t count;
  size_t element; /* bytes */
  size_t bytes;   /* of all elements */
  even_dtype dtype;
  even_reduce_op op;
  double divisor; /* of AVG */
  even_reduce_function *reduce;
  even_comm_flow *flow; /* NULL: all of the data are there */
} even_comm_reduction;

typedef struct even_comm_scattering {
  const unsigned char *input;
  unsigned char *output;
  const size_t *counts;
  size_t total;   /* elements of input */
  size_t largest; /* elements of the largest part */
  size_t element;
  size_t bytes; /* of input */
  even_dtype dtype;
  even_reduce_op op;
  double divisor;
  even_reduce_function *reduce;
  /* NULL, or where each rank's part lies, in place of one after the other at `input`: for engines that have `stir`. */
  const unsigned char *const *places;
} even_comm_scattering;

typedef struct even_comm_gathering {
  const unsigned char *input;
  unsigned char *output;
  const size_t *counts;
  size_t total;   /* elements of output */
  size_t largest; /* bytes of the largest part */
  size_t element;
  size_t bytes; /* of output */
  even_dtype dtype;
  unsigned char *const *places; /* NULL, or where each rank's part goes, as in even_comm_scattering */
} even_comm_gathering;

typedef struct even_comm_exchange {
  const void *const *inputs; /* a part for each rank */
  void *const *outputs;      /* a part from each rank */
  const size_t *sends;       /* bytes of either */
  const size_t *receives;
} even_comm_exchange;

/* What a group is told that becomes part of a larger one; all of it stays as long as the group. */
struct even_comm_whole {
  const struct even_board *board; /* of the larger one, on this host */
  int rank;                       /* this one's there */
  int ranks;                      /* its ranks */
  const int *numbers;             /* what the ranks of this part are called there */
  const int *members;             /* those for whom this rank speaks, in the larger one's numbers */
  int member_count;
  void (*look)(void *context); /* called some fifty times a second by those who wait; it may end the group */
  void *context;
  even_wait_place place;      /* of the larger one; and its call under way: */
  const even_comm_call *call; /* NULL: of no larger one */
};

/* One engine: what <evenstep/comm.h> promises of each call, for this engine's groups. Sums are formed in an order that
 * the group's make-up alone decides, so that all ranks hold the same bits. */
struct even_comm_engine {
  const char *name;
  even_status (*all_reduce)(even_comm *comm, const even_comm_reduction *job);
  even_status (*reduce_scatter)(even_comm *comm, const even_comm_scattering *job);
  even_status (*all_gather)(even_comm *comm, const even_comm_gathering *job);
  even_status (*broadcast)(even_comm *comm, unsigned char *data, size_t bytes, int root);
  even_status (*all_to_all)(even_comm *comm, const even_comm_exchange *job);
  even_status (*barrier)(even_comm *comm);
  bool (*has_messages)(const even_comm *comm);
  /* `peer` is a rank of the group, or, of a receive, EVEN_COMM_ANY_RANK. */
  even_status (*send_begin)(even_comm *comm, const void *data, size_t bytes, int peer, uint64_t tag,
                            even_comm_request **out);
  even_status (*receive_begin)(even_comm *comm, void *data, size_t bytes, int peer, uint64_t tag,
                               even_comm_request **out);
  bool (*request_done)(even_comm_request *request);
  even_status (*request_wait)(even_comm_request *request, double timeout_seconds, int *peer);
  void (*request_free)(even_comm_request *request);
  void *(*arena)(even_comm *comm);                            /* called where arena_bytes is not 0 */
  const void *(*peer_arena)(const even_comm *comm, int rank); /* the same; NULL where ranks do not see each other's */
  void (*revoke)(even_comm *comm);
  /* NULL, or whether a message that this rank has sent fitted nowhere where it was received, and this rank has not
   * heard so: the calling thread's last error says it then, once. `waits`: for one who is in a collective, which it
   * ends: where the word may be taken back by one that is on its way, only when it has stood for a while; and it goes
   * on standing, for the collective may have failed meanwhile because whoever said it has left. Any thread. */
  bool (*refused)(even_comm *comm, bool waits);
  /* Ends the group as a revocation does, but with this error where the engine can hand it to all ranks. */
  void (*end)(even_comm *comm, const even_error *why);
  bool (*has_ended)(const even_comm *comm); /* any thread */
  /* Why it has ended, without what this rank was in. Of the calling thread's last error nothing is left. */
  void (*why)(const even_comm *comm, even_error *out);
  /* The group becomes part of a larger one: it names its ranks as that does, and leaves the record of calls to it. */
  void (*join)(even_comm *comm, const even_comm_whole *whole);
  /* NULL, or tells the others what those have reached for whom this rank speaks. */
  void (*tell)(even_comm *comm);
  void (*set_timeout)(even_comm *comm, double seconds);
  /* NULL where the engine sees no stops, and where it keeps no flight record: */
  void (*set_stop_grace)(even_comm *comm, double seconds);
  size_t (*flight)(const even_comm *comm, int rank, even_flight_call *out, size_t limit);
  void (*set_site)(even_comm *comm, const char *text);
  void (*ask_site)(even_comm *comm, even_comm_site_call *call, void *context);
  void (*on_stall)(even_comm *comm, double seconds, even_comm_stall_call *call, void *context);
  /* NULL, or the group as its user knows it; what is not known of it stays as it is. */
  void (*place)(even_comm *comm, even_wait_place *out);
  /* Of rank 0, between calls; NULL where there are no ways to choose from: chooses by `by` from now on. *lacking: the
   * largest size that is worth measuring at once (ways.h), 0 where none is. EVEN_ERR_NOT_FOUND where by->way is none of
   * this group's. */
  even_status (*follow)(even_comm *comm, const even_comm_following *by, size_t *lacking);
  /* NULL where all_reduce takes no flow; else wakes one that waits, to see what is ready. Any thread. */
  void (*stir)(even_comm *comm);
  /* NULL, or the parts, from 0 on until NULL, of what all ranks have to know alike of the ways that rank 0 follows:
   * read there, written on the others; asked behind the last, when all have them. */
  void *(*choice)(even_comm *comm, int number, size_t *bytes);
  /* NULL where nothing goes between hosts; else telemetry is told what the way to each takes, from the next call on;
   * NULL: not any more. Between calls. EVEN_ERR_MEMORY. */
  even_status (*tell_legs)(even_comm *comm, even_telemetry *telemetry);
  /* NULL where it is made of no others; else the first group `*at` of those, from 0 on, that there is; NULL behind the
   * last. */
  even_comm *(*part)(const even_comm *comm, int *at);
  uint64_t (*wait_ns)(const even_comm *comm);
  void (*describe)(const even_comm *comm, char *text, size_t bytes);
  void (*leave)(even_comm *comm);
  /* NULL, or `leave` in steps, for one who leaves several groups at once. The first says whether there is anything to
   * stay for. The second does what can be done now, into *moved whether that was anything, and says whether to stay on;
   * stayed_ns since the first. */
  bool (*leave_begin)(even_comm *comm);
  bool (*leave_stays)(even_comm *comm, uint64_t stayed_ns, bool *moved);
  void (*close)(even_comm *comm);
};

static inline const even_comm_base *even_comm_base_of(const even_comm *comm) {
  return (const even_comm_base *)(const void *)comm;
}
static inline even_comm_base *even_comm_base_of_mutable(even_comm *comm) {
  return (even_comm_base *)(void *)comm;
}
/* Whether the caller says that the group is over. */
static inline bool even_comm_is_over(const even_comm *comm) {
  const even_comm_base *base = even_comm_base_of(comm);
  return base->over != NULL && base->over(base->over_context);
}
static inline const even_comm_engine *even_comm_engine_of(const even_comm *comm) {
  return even_comm_base_of(comm)->engine;
}

/* The limit that <= 0 stands for. */
#define EVEN_COMM_DEFAULT_TIMEOUT_SECONDS 1800.0

/* Seconds as nanoseconds; <= 0: the default; beyond some thirty years: for ever. */
static inline uint64_t even_comm_limit_ns(double seconds) {
  double limit = seconds > 0 ? seconds : EVEN_COMM_DEFAULT_TIMEOUT_SECONDS;
  return limit < 1e9 ? (uint64_t)(limit * 1e9) : UINT64_MAX / 2;
}

#endif
