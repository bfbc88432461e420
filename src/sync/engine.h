/* What the API and the engine thread share. */
#ifndef EVEN_SYNC_ENGINE_H
#define EVEN_SYNC_ENGINE_H

#include "sync/encoded.h"
#include "sync/layout.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

/* Where the round stands: one word, so that no thread can see half of a change. */
typedef enum even_sync_phase {
  EVEN_SYNC_IDLE,    /* between rounds; begin goes on to ROUND */
  EVEN_SYNC_ROUND,   /* gradients come; complete, or finish, goes on to CLOSING */
  EVEN_SYNC_CLOSING, /* what is not ready will not come; the engine goes on to DONE, in every case */
  EVEN_SYNC_DONE,    /* buckets and flags are reduced, or `broken` says why not; finish goes back to IDLE */
  EVEN_SYNC_STOP     /* the engine is to end; close sets it, from any other phase */
} even_sync_phase;

/* In place of a number of sums: no round has begun, or it has ended by an error. */
#define EVEN_SYNC_NO_SUMS UINT32_MAX

/* Where the thread stands that encodes ahead. */
typedef enum even_sync_ahead_state {
  EVEN_SYNC_AHEAD_IDLE,
  EVEN_SYNC_AHEAD_ASKED, /* it begins once the bucket is complete; the engine may take it back */
  EVEN_SYNC_AHEAD_WORKS,
  EVEN_SYNC_AHEAD_DONE, /* until the engine takes what it made */
  EVEN_SYNC_AHEAD_STOP,
  EVEN_SYNC_AHEAD_STATES = 8 /* a power of two */
} even_sync_ahead_state;

typedef struct even_sync_ahead {
  pthread_t thread;
  bool runs;
  /* even_sync_ahead_state, and of a request its number, times EVEN_SYNC_AHEAD_STATES, besides: who has looked at one
   * may not begin another. The engine sleeps on it while the other works. */
  _Atomic uint32_t state;
  _Atomic size_t bucket; /* of the request */
  uint32_t requests;     /* the engine's own */
} even_sync_ahead;

struct even_sync {
  even_comm *comm;
  even_telemetry *telemetry;
  even_sync_parameter *parameters;
  size_t parameter_count;
  even_sync_layout layout;
  unsigned char *base; /* of the buckets in this rank's arena */
  bool unsummed;       /* as in even_sync_params */
  size_t *first;       /* bucket b's members: layout.order[first[b] … first[b] + members) */

  even_encoded *encoded; /* NULL: no bucket travels encoded */
  even_sync_ahead ahead; /* runs where some do */

  pthread_t thread;
  bool thread_runs;

  /* The round. Written by the caller before the phase says ROUND, then by ready and the engine until it says DONE. */
  double weight;
  uint32_t step;
  const void **gradients;  /* one a parameter: where its gradient lies */
  _Atomic uint8_t *ready;  /* one a parameter: whose call was the first has set it */
  _Atomic size_t *pending; /* one a bucket: members that are not ready */
  _Atomic size_t next;     /* the bucket that the engine wants */
  _Atomic uint32_t phase;  /* even_sync_phase; finish sleeps on it */
  _Atomic uint32_t bell;   /* the engine, and who encodes ahead, sleep on it */
  _Atomic uint32_t sleepers;
  _Atomic uint32_t summed;   /* buckets whose sums are there; await sleeps on it */
  _Atomic uint32_t awaiting; /* calls of await */
  bool known;                /* flags are not reduced: `told` says what is used */
  uint8_t *told;             /* one a parameter, the caller's */
  uint8_t *used;             /* one a parameter: reduced flags, the engine's */
  uint8_t *bad;              /* one a parameter: bits of even_sync_nonfinite, the engine's */
  bool overflowed;           /* some sum of the round is not finite; the same on all ranks; the engine's */
  even_sync_report report;   /* the engine's part of it */

  even_status broken; /* the first error; no further round after it */
  even_error error;
};

/* The engine thread's body; `sync` is its argument. */
void *even_sync_engine(void *sync);
/* Wakes the engine, and who encodes ahead. */
void even_sync_ring(even_sync *sync);
/* Sleeps until the bell, which stood at `bell`, is rung. */
void even_sync_sleep(even_sync *sync, uint32_t bell);

/* What was handed over of a parameter has been looked at; the engine thread's. */
void even_sync_saw(even_sync *sync, size_t index, bool finite);
/* Before the last bucket, which ends there, is reduced: puts the layout's mark where this rank has seen a gradient that
 * is not finite. */
void even_sync_mark(const even_sync *sync, void *end, even_dtype dtype);
/* Whether the bucket travels in 16 bits. */
bool even_sync_is_narrow(const even_sync_layout *layout, size_t bucket);
/* Packs and reduces such a bucket by way of the wire; the engine thread's. */
even_status even_sync_reduce_narrow(even_sync *sync, size_t bucket) EVEN_MUST_USE;

/* Encodes a bucket and forms its sum; the engine thread's. *moved: the bytes that travel, as those of an all-reduce
 * count (a rank sends 2 (n - 1) / n of these); *full: those of the gradients. 0 of both where no rank has any. */
even_status even_sync_reduce_encoded(even_sync *sync, size_t bucket, uint64_t *moved, uint64_t *full) EVEN_MUST_USE;

/* encoded_ahead.c: opened after, closed before all that it works with. */
even_status even_sync_ahead_open(even_sync *sync) EVEN_MUST_USE;
void even_sync_ahead_close(even_sync *sync);
/* Asks for a bucket to be encoded; nothing where there is none, or it travels as it is. The engine thread's. */
void even_sync_ahead_ask(even_sync *sync, size_t bucket);
/* Whether the bucket was encoded; waits for it where it was begun, and takes back what was not. After it nobody reads
 * gradients but the engine thread, whose call it is. */
bool even_sync_ahead_take(even_sync *sync, size_t bucket);
/* Begins a request of which the word of `ahead.state` was seen: false where another one has come since. */
bool even_sync_ahead_claim(even_sync *sync, uint32_t asked);
/* Puts a bucket's values together and encodes them, which this rank does: every gradient is there. */
void even_sync_encode_ahead(even_sync *sync, size_t bucket);

#endif
