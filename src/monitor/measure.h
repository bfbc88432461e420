/* What a run does now, as numbers: one measurement feeds the page, the metrics, the live view, the report and the
 * verdict, so that all say the same. Pure data and pure functions. */
#ifndef EVEN_MONITOR_MEASURE_H
#define EVEN_MONITOR_MEASURE_H

#include "base/text.h"

#include <evenstep/telemetry.h>
#include <stdbool.h>

typedef enum even_phase {
  EVEN_PHASE_STARTING, /* no step yet */
  EVEN_PHASE_WARMING,  /* fewer than EVEN_WARM_STEPS in this attempt */
  EVEN_PHASE_TRAINING,
  EVEN_PHASE_STALLED, /* no step for far longer than a step takes */
  EVEN_PHASE_DONE,
  EVEN_PHASE_INTERRUPTED, /* by SIGINT, SIGTERM or SIGHUP, as its exit code tells */
  EVEN_PHASE_FAILED
} even_phase;

enum { EVEN_WARM_STEPS = 5 };

/* Numbers that are not known are NAN. Shares of time are fractions of the step, 0 to 1. */
typedef struct even_measure_rank {
  const char *device;
  const char *model;
  double cores;                   /* CPU time it may use */
  double quota;                   /* fraction set by --cpu-quota */
  double share_samples;           /* of a step, mean over the window */
  double busy_seconds;            /* a step */
  double wait_fraction;           /* of the step, not busy: others were waited for, or bytes moved in the open */
  double samples_per_busy_second; /* its speed while all run */
  double spans[EVEN_SPAN_COUNT];  /* seconds a step; NAN where that span was never seen */
  double communication_bytes;     /* a step */
  double cpu_cores;               /* cores in use */
  double rss_bytes;
  double throttled_fraction; /* of the wall time, stopped by its CPU quota */
  double run_wait_fraction;  /* of the time that its threads could have run, without a CPU */
  double major_faults_per_second;
  double swap_bytes;
  /* of its GPU; NAN, false where it has none */
  double gpu_clock_mhz;
  double gpu_celsius;
  double gpu_busy;       /* of the time */
  double gpu_others;     /* of the time, in which kernels of processes that are no ranks ran */
  bool gpu_slowed;       /* its clock is held down by heat, or by a lack of power */
  double clock_fraction; /* of its CPU's highest clock */
  /* of the last second's collectives; NAN where there were none */
  double collectives_per_second;
  double collective_bytes_per_second; /* of the wall time */
  double collective_fraction;         /* of the wall time, inside collectives, the wait for peers included */
  double bus_bandwidth;               /* bytes a second while they moved: nccl-tests' busbw, without that wait */
  long pid;                           /* 0: not running */
} even_measure_rank;

typedef struct even_measure {
  even_phase phase;
  const char *policy;
  int attempt;
  long step;  /* last step done, -1: none */
  long total; /* steps that the run will make, -1: not known */
  long epoch;
  int window_steps; /* that the means are over */
  double batch;
  double loss;
  double step_seconds;
  double samples_per_second;
  double predicted_step_seconds;
  double best_samples_per_second; /* sum over the ranks of samples per busy second */
  double efficiency;              /* samples_per_second / best_samples_per_second */
  double elapsed_seconds;
  double eta_seconds;
  double silent_seconds; /* since the last step ended */
  unsigned long long samples_total;
  unsigned long long lost_records;
  bool shares_moving; /* the shares changed in the window's second half */
  const char *hang;   /* what a rank is told to hang in, NULL: none does */
  const char *link;   /* which link is slow, NULL: none is told to be */
  int link_rank;      /* a rank at its end */
  int ranks;
  even_measure_rank *rank;
} even_measure;

const char *even_phase_text(even_phase phase);

/* Derives best, efficiency and the waits from the ranks' shares and busy times and step_seconds. */
void even_measure_derive(even_measure *measure);

#endif
