/* What each rank did and when: fixed records in lock-free rings in shared memory. Anyone may write,
 * from any thread, without a system call; the agent reads. A full ring overwrites its oldest records: the
 * reader counts what it missed, the writer never waits.
 *
 * One segment holds one ring for each rank. Under `evenstep run` its descriptor is in EVENSTEP_TELEMETRY_FD. */
#ifndef EVENSTEP_TELEMETRY_H
#define EVENSTEP_TELEMETRY_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, number, text) */
#define EVEN_SPAN_LIST(X)                                                                 \
  X(DATA, 0, "data")                   /* the user's loader, until the batch is there */  \
  X(FORWARD, 1, "forward")             /* from the batch to backward's start */           \
  X(BACKWARD, 2, "backward")           /* autograd, until its last gradient */            \
  X(COMMUNICATION, 3, "communication") /* engine thread: packing and reducing; no wait */ \
  X(WAIT, 4, "wait")                   /* the rank stood still for others */              \
  X(OPTIMIZER, 5, "optimizer")                                                            \
  X(CHECKPOINT, 6, "checkpoint")                                                          \
  X(EVALUATION, 7, "evaluation")

typedef enum even_span {
#define EVEN_SPAN_ENUM(name, number, text) EVEN_SPAN_##name = (number),
  EVEN_SPAN_LIST(EVEN_SPAN_ENUM)
#undef EVEN_SPAN_ENUM
} even_span;
#define EVEN_SPAN_COUNT 8

typedef enum even_record_kind {
  EVEN_RECORD_SPAN = 1,
  EVEN_RECORD_STEP = 2,
  EVEN_RECORD_EVENT = 3,
  EVEN_RECORD_CALL = 5, /* 4 is the rings' own */
  EVEN_RECORD_LEG = 6
} even_record_kind;

/* CLOCK_MONOTONIC in nanoseconds: what all times of records are. The same for all processes of a host. Any thread. */
EVEN_PUBLIC uint64_t even_clock_ns(void);

/* Times are of even_clock_ns. step counts optimizer steps from 0 since the start of training
 * (it goes on after a resume). */
typedef struct even_span_record {
  uint32_t step;
  uint32_t span; /* even_span */
  uint64_t start_ns;
  uint64_t duration_ns;
  uint64_t bytes; /* moved, for COMMUNICATION and CHECKPOINT; else 0 */
} even_span_record;

/* One per rank and optimizer step, written after the vote. */
typedef struct even_step_record {
  uint32_t step;
  uint32_t epoch;
  uint64_t end_ns;
  uint64_t duration_ns;    /* since the end of the step before */
  uint64_t busy_ns;        /* of it, this rank's own work */
  uint32_t samples;        /* this rank's share */
  uint32_t batch;          /* the global batch */
  float loss;              /* weighted mean over all ranks; NaN when unknown */
  float predicted_seconds; /* of this step, by the balancer, before it ran; NaN when unknown */
} even_step_record;

/* What the way between two hosts took, as a rank at one end saw it, since its record before: of transfers between ranks
 * that had all come to the exchange, each from its beginning to its end. */
typedef struct even_leg_record {
  uint32_t own;  /* mark of this rank's host, */
  uint32_t peer; /* and of the other end's */
  uint64_t at_ns;
  uint32_t transfers; /* that came from there */
  uint64_t bytes;
  uint64_t ns; /* of all of them together, if each had cost the median of the last ones a byte */
} even_leg_record;

/* What happened, with a few words. */
typedef enum even_event {
  EVEN_EVENT_SHARES = 1, /* the shares changed; words: "12,4", "12,4,…" where they do not fit */
  /* a checkpoint is whole; words: its folder's name; where it shares bytes with the one before, also how many:
   * "step-00000120: of 1024.0 MiB 0.0 linked, 992.0 shared" */
  EVEN_EVENT_CHECKPOINT = 2,
  EVEN_EVENT_TOTAL_STEPS = 3, /* value: steps that the run will make, as far as known */
  EVEN_EVENT_EPOCH = 4,       /* value: the epoch that begins */
  EVEN_EVENT_RESUME = 5,      /* value: the step resumed at */
  EVEN_EVENT_MESSAGE = 6,
  /* value 1: balanced shares were measured slower than equal ones, which run now; 0: balanced ones run again; words:
   * "21.5 ms, equal 18.2 ms", what a step took */
  EVEN_EVENT_BALANCING = 7,
  EVEN_EVENT_JOINING = 8, /* the rank came to es.prepare and waits there until all ranks have come */
  EVEN_EVENT_JOINED = 9,  /* all have come */
  EVEN_EVENT_SCALAR = 10, /* a number of the user's; words: its name, number: its value */
  /* value: percent of the gradients' bytes that are saved; words: how, "compression bf16: 50% fewer bytes" */
  EVEN_EVENT_COMPRESSION = 11,
  EVEN_EVENT_STALL = 12, /* the rank waits for long in a collective; words: for whom, and in what */
  /* a group whose calls are recorded; value: its mark in call records; words: "shm 4 torch/default", its engine, how
   * many ranks it has, its name */
  EVEN_EVENT_GROUP = 13,
  /* value: on how many ranks memory holds fewer samples than would be best, 0: on none any more; words: "memory holds
   * 20 of 26 samples on rank 1" */
  EVEN_EVENT_MEMORY = 14,
  /* value: how many ranks have no samples because steps are shorter so; words: which one has none now, what that gains
   * and when it returns, or which one has samples again */
  EVEN_EVENT_LEFT_OUT = 15,
  /* value: the generation that goes on without ranks that were killed; words: "generation 1: ranks 0 and 2 go on
   * without rank 1 after 31 ms" */
  EVEN_EVENT_GENERATION = 16,
  /* a loss or gradients that are not finite, in a step that would use them; value: on how many ranks, 1 where that is
   * not known, 0: they are finite again; words: what, on which ranks, of which parameters */
  EVEN_EVENT_NONFINITE = 17,
  /* parameters that differ between ranks; value: how many ranks are not as most are, 0: they are the same again, -1: no
   * more than rounding makes; words: which ranks, which parameters, by how much */
  EVEN_EVENT_PARAMETERS = 18,
  /* value: the bytes that are missing: the disk is full, and checkpoints wait until it has room; 0: they are written
   * again; words: both said */
  EVEN_EVENT_CHECKPOINTS_WAIT = 19,
  /* a sample cannot be read and is left out, as was asked for; value: its index, -1 where that is no number; words:
   * which one and why */
  EVEN_EVENT_SKIPPED = 20,
  /* the global batch is adapted, or would be; value: its samples from now on; words: "batch 64 -> 128 samples: noise
   * scale 310; learning rate x 1.41 (sqrt)" */
  EVEN_EVENT_BATCH = 21,
  /* the rank came to torch's init_process_group of all ranks and waits there until all have come; value: for which
   * time, from 1 */
  EVEN_EVENT_OPENING = 22,
  EVEN_EVENT_OPENED = 23, /* it came out of it, with a group or an error; value: as of OPENING */
  EVEN_EVENT_LAST = EVEN_EVENT_OPENED
} even_event;

#define EVEN_EVENT_WORDS_BYTES 128 /* with the NUL */

typedef struct even_event_record {
  uint32_t event; /* even_event */
  uint32_t step;
  uint64_t at_ns;
  int64_t value;
  double number;                      /* of SCALAR, in place of value */
  char words[EVEN_EVENT_WORDS_BYTES]; /* NUL-terminated, UTF-8; from 33 bytes on the record takes two or three slots */
} even_event_record;

/* Sets the words of a record whose event is set. What does not fit is left out: whole characters, and of SHARES whole
 * numbers, with "…" in their place. */
EVEN_PUBLIC void even_event_record_words(even_event_record *record, const char *words);

/* ---- calls of groups: collectives and messages ---- */

/* X(name, number, text) */
#define EVEN_CALL_LIST(X)                                                         \
  X(ALL_REDUCE, 1, "all_reduce")                                                  \
  X(REDUCE_SCATTER, 2, "reduce_scatter")                                          \
  X(ALL_GATHER, 3, "all_gather")                                                  \
  X(BROADCAST, 4, "broadcast")                                                    \
  X(ALL_TO_ALL, 5, "all_to_all")                                                  \
  X(BARRIER, 6, "barrier")                                                        \
  X(SEND, 7, "send")                                                              \
  X(RECEIVE, 8, "receive")                                                        \
  X(REDUCE, 9, "reduce") /* this one and those that follow: between GPUs alone */ \
  X(GATHER, 10, "gather")                                                         \
  X(SCATTER, 11, "scatter")

typedef enum even_recorded_call {
#define EVEN_RECORDED_ENUM(name, number, text) EVEN_RECORDED_##name = (number),
  EVEN_CALL_LIST(EVEN_RECORDED_ENUM)
#undef EVEN_RECORDED_ENUM
} even_recorded_call;
static inline bool even_call_is_message(int call) {
  return call == EVEN_RECORDED_SEND || call == EVEN_RECORDED_RECEIVE;
}
#define EVEN_RECORDED_COUNT 12 /* numbers below it */

#define EVEN_CALL_NONE 255 /* as dtype or op: it has none */

/* One call of one rank. (group, number) is the same on all ranks for a collective. A message begins when it is asked
 * for and ends when its rank has seen that it is done. */
typedef struct even_call_record {
  uint32_t step; /* optimizer steps done before it */
  uint8_t call;  /* even_recorded_call */
  uint8_t dtype; /* even_dtype, EVEN_CALL_NONE where bytes are only moved */
  uint8_t op;    /* even_reduce_op, or EVEN_CALL_NONE */
  uint8_t row;   /* even_telemetry_row */
  uint8_t failed;
  uint16_t ranks;  /* of the group */
  uint16_t member; /* this rank's number in it */
  int16_t peer;    /* root, or the rank at the other end; -1: none */
  uint32_t group;  /* mark of the group's name */
  uint32_t number; /* of the collective in its group, or of the message among this rank's in it */
  uint32_t tag;    /* of a message, its low half */
  uint64_t start_ns;
  uint64_t duration_ns;
  uint64_t wait_ns; /* of it, waiting for peers; 39 hours at most */
  uint64_t bytes;   /* as nccl-tests counts them: all_gather, reduce_scatter, all_to_all those of all ranks' parts */
} even_call_record;

/* What the links carry for each of `bytes`, so that bandwidths of different collectives and group sizes can be compared
 * with the hardware's: nccl-tests' bus bandwidth (doc/PERFORMANCE.md there): 2 (n - 1) / n for an all-reduce, (n - 1) /
 * n for reduce-scatter, all-gather and all-to-all, 1 for the others. */
EVEN_PUBLIC double even_call_bus_factor(even_recorded_call call, int ranks);

/* Sums over a rank's calls that ended well, which are kept beside its ring and only ever grow. */
typedef struct even_call_totals {
  uint64_t collectives;
  uint64_t bytes;     /* of collectives */
  uint64_t bus_bytes; /* the same, times even_call_bus_factor */
  uint64_t ns;        /* inside collectives */
  uint64_t wait_ns;   /* of it, waiting for peers */
  uint64_t messages;  /* sent and received */
  uint64_t message_bytes;
} even_call_totals;

typedef struct even_record {
  uint32_t kind; /* even_record_kind */
  uint32_t rank;
  union {
    even_span_record span;
    even_step_record step;
    even_event_record event;
    even_call_record call;
    even_leg_record leg;
  } as;
} even_record;

/* ---- the writer's side (rank) ---- */
typedef struct even_telemetry even_telemetry;

#define EVEN_TELEMETRY_MOST_RANKS 4096

/* A zeroed segment for `ranks` rings of `records` records each (rounded up to a power of two; 0: 8192). *fd is
 * close-on-exec and owned by the caller. Errors: EVEN_ERR_ARGUMENT, and those of the operating system. */
EVEN_PUBLIC even_status even_telemetry_create_segment(int ranks, size_t records, int *fd) EVEN_MUST_USE;
/* Opens rank's ring for writing; the descriptor is duplicated. EVEN_ERR_INPUT where `fd` is no such segment, or one of
 * another version; EVEN_ERR_ARGUMENT where it has no such rank. Any number of threads and processes may open a ring. */
EVEN_PUBLIC even_status even_telemetry_open(int fd, int rank, even_telemetry **out) EVEN_MUST_USE;
/* NULL is allowed. No thread may be writing through it any more, or write after: end them, or wait for them, first. */
EVEN_PUBLIC void even_telemetry_close(even_telemetry *telemetry);
/* Writes one record; a NULL telemetry does nothing. Any thread; wait-free (one fetch-and-add, one compare-and-swap a
 * slot, no waiting, no system call). Each record is a seqlock of its own (Boehm, "Can seqlocks get along with
 * programming language memory models?", MSPC 2012): a reader never takes a torn one for whole. */
EVEN_PUBLIC void even_telemetry_span(even_telemetry *telemetry, const even_span_record *record);
EVEN_PUBLIC void even_telemetry_step(even_telemetry *telemetry, const even_step_record *record);
EVEN_PUBLIC void even_telemetry_event(even_telemetry *telemetry, const even_event_record *record);
EVEN_PUBLIC void even_telemetry_leg(even_telemetry *telemetry, const even_leg_record *record);

/* Adds the call to the rank's totals and, where records of calls are wanted (even_telemetry_reader_want_calls), writes
 * one; `step` of the record is filled in from the last step record. Any thread, wait-free. */
EVEN_PUBLIC void even_telemetry_call(even_telemetry *telemetry, const even_call_record *record);
/* Whether records of calls are wanted. Any thread. */
EVEN_PUBLIC bool even_telemetry_wants_calls(const even_telemetry *telemetry);

/* Whether the ranks shall save their state after the step under way, and end. Any thread. */
EVEN_PUBLIC bool even_telemetry_asks_end(const even_telemetry *telemetry);

/* ---- what a rank is at now ---- */

/* X(name, number, text) */
#define EVEN_ACTIVITY_LIST(X)                                                      \
  X(SCRIPT, 0, "the script's own code") /* outside of the parts of a step */       \
  X(DATA, 1, "data")                    /* waits for its loader */                 \
  X(FORWARD, 2, "compute (forward)")                                               \
  X(BACKWARD, 3, "compute (backward)")                                             \
  X(COLLECTIVE, 4, "collective") /* waits for other ranks, as far as it says so */ \
  X(OPTIMIZER, 5, "compute (optimizer)")                                           \
  X(CHECKPOINT, 6, "checkpoint")                                                   \
  X(EVALUATION, 7, "evaluation")                                                   \
  X(COMPILE, 8, "compile") /* torch.compile, at its first calls */

typedef enum even_activity {
#define EVEN_ACTIVITY_ENUM(name, number, text) EVEN_ACTIVITY_##name = (number),
  EVEN_ACTIVITY_LIST(EVEN_ACTIVITY_ENUM)
#undef EVEN_ACTIVITY_ENUM
} even_activity;
#define EVEN_ACTIVITY_COUNT 9

/* Says what the rank does from now on: one store into its ring, no record. Of the thread that trains; any thread may,
 * the last one counts. A NULL telemetry does nothing. */
EVEN_PUBLIC void even_telemetry_enter(even_telemetry *telemetry, even_activity activity);

/* Rows of a timeline for the calls of a rank's threads: what threads of ours have, and the first of all others. A
 * thread that never said its row gets the next free one when it first asks. From EVEN_ROW_GPU on: what runs on GPU 0,
 * 1, … of the rank, the last row for all further ones. */
enum { EVEN_ROW_ENGINE = 1, EVEN_ROW_LATER = 2, EVEN_ROW_FIRST = 3, EVEN_ROW_GPU = 240, EVEN_ROW_MOST = 255 };
/* Both are of the calling thread. */
EVEN_PUBLIC void even_telemetry_set_row(int row);
EVEN_PUBLIC int even_telemetry_row(void);

/* While paused, nothing is written through this handle, whoever holds it: to measure what the records cost. NULL is
 * allowed. Any thread. */
EVEN_PUBLIC void even_telemetry_pause(even_telemetry *telemetry, bool paused);

/* ---- without an agent: a timeline file of this process's own ---- */
typedef struct even_timeline even_timeline;

#define EVEN_TIMELINE_MOST_RECORDS 2000000

/* Has a thread write what rank 0's ring of the segment `fd` gets into a new file at `path`, four times a second: a
 * Chrome trace (JSON array format, of which the end may be missing: also after a kill it can be read) of process
 * `rank`, times on even_clock_ns. A file that is there already is replaced. After EVEN_TIMELINE_MOST_RECORDS no more is
 * written. Records of calls are wanted from then on. Errors: those of the segment and of the file. */
EVEN_PUBLIC even_status even_timeline_open(int fd, int rank, const char *path, even_timeline **out) EVEN_MUST_USE;
/* Writes what is left and ends the thread. Returns the first error of writing (a full disk), after which nothing was
 * written any more. NULL is allowed; in a child of a fork it does nothing. */
EVEN_PUBLIC even_status even_timeline_close(even_timeline *timeline) EVEN_MUST_USE;

/* ---- the reader's side (agent) ---- */
typedef struct even_telemetry_reader even_telemetry_reader;

/* *out reads all rings of the segment; the descriptor is duplicated. It belongs to one thread at a time and is closed
 * by even_telemetry_reader_close; NULL after a failure. Errors: EVEN_ERR_INPUT as above, EVEN_ERR_MEMORY. */
EVEN_PUBLIC even_status even_telemetry_reader_open(int fd, even_telemetry_reader **out) EVEN_MUST_USE;
/* NULL is allowed. */
EVEN_PUBLIC void even_telemetry_reader_close(even_telemetry_reader *reader);
/* How many rings there are, one for each rank. */
EVEN_PUBLIC int even_telemetry_reader_ranks(const even_telemetry_reader *reader);
/* Up to `limit` new records of all rings into `records`, those of one rank in the order of their writing; returns how
 * many. *lost (may be NULL) grows by the records that cannot be had: overwritten before they were read, or begun by a
 * writer that died; one that takes several slots, of which one is lost, counts as so many. A record still being written
 * ends its ring's turn until the next call, for a second at most. The content is checked: a segment that a wild pointer
 * wrote over yields losses, never a record of no kind. One thread. */
EVEN_PUBLIC size_t even_telemetry_reader_drain(even_telemetry_reader *reader, even_record *records, size_t limit,
                                               uint64_t *lost);
/* Where the reader stands in a rank's ring: all records before it were handed out, or lost. Another reader of the same
 * segment goes on there, in this process or a later one, and gets each record once that is still in the ring: of those
 * overwritten meanwhile it counts the slots as lost. A place beyond all that was written is another segment's and
 * changes nothing; so does a rank that there is not, whose place is 0. One thread. */
EVEN_PUBLIC uint64_t even_telemetry_reader_place(const even_telemetry_reader *reader, int rank);
EVEN_PUBLIC void even_telemetry_reader_go_on(even_telemetry_reader *reader, int rank, uint64_t place);
/* Whether anybody may still write (true at first). false, when the writers have ended: a record that one of them had
 * only begun is lost at once, and what lies behind it is read. One thread. */
EVEN_PUBLIC void even_telemetry_reader_writers(even_telemetry_reader *reader, bool alive);

/* Whether the ranks are to write a record for each call; at first they do not, and only count. Any thread. */
EVEN_PUBLIC void even_telemetry_reader_want_calls(even_telemetry_reader *reader, bool wanted);
/* Asks the ranks to save their state after the step under way, and to end. At first nobody is asked. Any thread. */
EVEN_PUBLIC void even_telemetry_reader_ask_end(even_telemetry_reader *reader, bool asked);
/* What a rank is at, by its last even_telemetry_enter. */
typedef struct even_rank_activity {
  even_activity activity;
  uint32_t count; /* how often anything was entered, also in attempts before; 0: never */
  bool stepped;   /* whoever entered has made a step since it opened the ring, */
  bool ended;     /* and has been at this before, and ended it */
} even_rank_activity;
/* Any thread. */
EVEN_PUBLIC void even_telemetry_reader_activity(const even_telemetry_reader *reader, int rank, even_rank_activity *out);
/* The totals of a rank's calls. Any thread. */
EVEN_PUBLIC void even_telemetry_reader_totals(const even_telemetry_reader *reader, int rank, even_call_totals *out);

#ifdef __cplusplus
}
#endif
#endif
