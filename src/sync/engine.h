/* What the API and the engine thread share. */
#ifndef EVEN_SYNC_ENGINE_H
#define EVEN_SYNC_ENGINE_H

#include "sync/layout.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

typedef enum even_sync_phase {
  EVEN_SYNC_IDLE,    /* between rounds */
  EVEN_SYNC_ROUND,   /* begin … finish */
  EVEN_SYNC_CLOSING, /* finish was called: what is not ready will not come */
  EVEN_SYNC_STOP     /* the engine is to end */
} even_sync_phase;

struct even_sync {
  even_comm *comm;
  even_telemetry *telemetry;
  even_sync_parameter *parameters;
  size_t parameter_count;
  even_sync_layout layout;
  unsigned char *base; /* of the buckets in this rank's arena */
  size_t *first;       /* bucket b's members: layout.order[first[b] … first[b] + members) */

  pthread_t thread;
  bool thread_runs;

  /* The round. Written by the caller before the phase says so, then by ready and the engine. */
  double weight;
  uint32_t step;
  const void **gradients;  /* one a parameter: where its gradient lies */
  _Atomic uint8_t *ready;  /* one a parameter */
  _Atomic size_t *pending; /* one a bucket: members that are not ready */
  _Atomic size_t next;     /* the bucket that the engine wants */
  _Atomic uint32_t phase;  /* even_sync_phase */
  _Atomic uint32_t bell;   /* the engine sleeps on it */
  _Atomic uint32_t engine_sleeps;
  _Atomic uint32_t done;   /* 1 when the round's buckets and flags are reduced; finish sleeps on it */
  uint8_t *used;           /* one a parameter: reduced flags, the engine's */
  even_sync_report report; /* the engine's part of it */

  even_status broken; /* the first error; no further round after it */
  even_error error;
};

/* The engine thread's body; `sync` is its argument. */
void *even_sync_engine(void *sync);
/* Wakes the engine. */
void even_sync_ring(even_sync *sync);

#endif
