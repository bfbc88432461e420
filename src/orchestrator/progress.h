/* How far the ranks have come, from what they write into their telemetry rings: in torch's init_process_group, in
 * es.prepare, and in steps. */
#ifndef EVEN_ORCHESTRATOR_PROGRESS_H
#define EVEN_ORCHESTRATOR_PROGRESS_H

#include <evenstep/status.h>
#include <evenstep/telemetry.h>
#include <stdbool.h>

typedef struct even_rank_progress {
  bool joining;       /* it came to es.prepare */
  bool joined;        /* and all others, too */
  int64_t opening;    /* how often it came to torch's init_process_group of all ranks, */
  int64_t opened;     /* and out of it */
  bool stepped;       /* it made a step */
  uint64_t last_step; /* the last that it made, from 0 since the start of training */
  int64_t saved;      /* the furthest step of which it wrote a whole checkpoint; 0: none */
  uint32_t samples;   /* its own in that step, */
  uint32_t batch;     /* and all ranks'; 0: of no prepared loader */
  bool shared;        /* it made a step with a batch of all ranks' */
} even_rank_progress;

typedef struct even_progress {
  even_telemetry_reader *reader; /* NULL: nothing is known */
  even_rank_progress *ranks;
  size_t count;
  uint64_t since_ns; /* the attempt's start: what is older is another attempt's */
} even_progress;

/* telemetry_fd -1: no rank ever says anything. After a failure close it, too. */
even_status even_progress_open(int telemetry_fd, size_t ranks, even_progress *out) EVEN_MUST_USE;
void even_progress_close(even_progress *progress);
/* A new attempt begins. */
void even_progress_begin(even_progress *progress);
/* Whether a rank has made a step, of a script in es.prepare, which can be asked to save its state; */
bool even_progress_steps(const even_progress *progress);
/* and one with a global batch (a loader of es.prepare's), which does not hang on the number of ranks. */
bool even_progress_shares(const even_progress *progress);
/* Another process is at the rank's place: what came of the one before counts no more. */
void even_progress_forget(even_progress *progress, size_t rank);
/* Reads what came since the last time. It need not be called before something is to be known: a ring keeps a rank's
 * last records, and a rank that waits writes none. */
void even_progress_read(even_progress *progress);

#endif
