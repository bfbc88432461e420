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

typedef enum even_record_kind { EVEN_RECORD_SPAN = 1, EVEN_RECORD_STEP = 2, EVEN_RECORD_EVENT = 3 } even_record_kind;

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

/* What happened, with a few words. */
typedef enum even_event {
  EVEN_EVENT_SHARES = 1,      /* the shares changed; words: "12,4", "12,4,…" where they do not fit */
  EVEN_EVENT_CHECKPOINT = 2,  /* a checkpoint is whole; words: its folder's name */
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
  EVEN_EVENT_STALL = 12 /* the rank waits for long in a collective; words: for whom, and in what */
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

typedef struct even_record {
  uint32_t kind; /* even_record_kind */
  uint32_t rank;
  union {
    even_span_record span;
    even_step_record step;
    even_event_record event;
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

/* While paused, nothing is written through this handle, whoever holds it: to measure what the records cost. NULL is
 * allowed. Any thread. */
EVEN_PUBLIC void even_telemetry_pause(even_telemetry *telemetry, bool paused);

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
/* Whether anybody may still write (true at first). false, when the writers have ended: a record that one of them had
 * only begun is lost at once, and what lies behind it is read. One thread. */
EVEN_PUBLIC void even_telemetry_reader_writers(even_telemetry_reader *reader, bool alive);

#ifdef __cplusplus
}
#endif
#endif
