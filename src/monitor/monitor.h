/* History, verdicts and the page of one run: reads the ranks' telemetry, keeps it in
 * runs/NAME/run.db, serves it on localhost, and draws the live view. */
#ifndef EVEN_MONITOR_MONITOR_H
#define EVEN_MONITOR_MONITOR_H

#include "base/text.h"
#include "device/cuda/watch.h"
#include "device/usage.h"

#include <evenstep/status.h>
#include <stdbool.h>
#include <sys/types.h>

typedef struct even_monitor even_monitor;

typedef struct even_monitor_rank {
  const char *device; /* "cpu:0" */
  const char *model;  /* "AMD EPYC" */
  double cores;       /* CPU time it may use, quota honoured */
  double quota;       /* fraction set by --cpu-quota, NAN for none */
  const char *host;   /* another one, on which it runs; NULL: this one */
} even_monitor_rank;

/* When a watch tells. 0: as it has it; INFINITY: never. */
typedef struct even_monitor_limits {
  double straggler_factor;  /* of a rank's usual time: 1.5 (balancer/lag.h), */
  double straggler_seconds; /* for so long: 2 */
  double link_factor;       /* of a transfer's usual time: 3 (monitor/links.h), */
  double link_seconds;      /* for so long, in whole ones: 3 */
  double gpu_seconds;       /* between two looks at a GPU: 1 */
} even_monitor_limits;

typedef struct even_monitor_params {
  size_t size;            /* sizeof(even_monitor_params) */
  const char *run_folder; /* "runs/demo": run.db, report.html, agent.json */
  const char *run_name;
  const char *command; /* as the user typed it */
  const char *policy;
  int ranks;
  const even_monitor_rank *rank_facts;
  int telemetry_fd;    /* the rings; duplicated */
  int port;            /* on 127.0.0.1; 0: any free one; -1: no server. A port in use: EVEN_ERR_IN_USE with the fix, or,
                          where it `continues`, any free one */
  long long step_rows; /* of steps kept in run.db, one a rank and step: 0: 32768, at least 256 a rank; -1: all */
  double loss_spike;   /* deviations above the median at which a loss jumps; 0: 10; INFINITY: none is told */
  even_monitor_limits limits;
  long long calls; /* of a rank's collectives and messages, the last so many are kept one by one; 0: none */
  /* one line of what the monitor has found, for the terminal; called inside even_monitor_tick. NULL: nobody hears it */
  void (*notice)(void *context, const char *text);
  void *notice_context;
  const char *const *gpus;  /* a rank each: the UUID of its GPU, NULL or "" for none; NULL: nobody has one */
  const char *nvml_library; /* NULL: where the loader looks */
  /* The agent before was killed, and its ranks run on: run.db is gone on with, and so is what the page shows.
   * telemetry_fd is the segment of before; each record in it comes once, whether the killed agent had read it or not.
   * even_monitor_attempt says the attempt that runs, even_monitor_rank_started each rank that does, and
   * even_monitor_rank_gone or _ended what became of others. A run.db that cannot be gone on with (damaged, another
   * version's, locked for seconds) is moved aside and begun anew: the first tick's notice says why. */
  bool continues;
} even_monitor_params;

even_status even_monitor_open(const even_monitor_params *params, even_monitor **out) EVEN_MUST_USE;
/* Whether the page could be served at this port now, for who wants to know before anything is made. */
even_status even_monitor_check_port(int port) EVEN_MUST_USE;
/* "http://127.0.0.1:PORT/?token=…", "" without a server. */
const char *even_monitor_url(const even_monitor *monitor);
/* Drains the rings into the database; call it about ten times a second. One thread. A full disk is reported once, and
 * the history waits in memory until it has room; after another failure the run goes on without history. */
even_status even_monitor_tick(even_monitor *monitor) EVEN_MUST_USE;
/* The run has other ranks from the next attempt on, more or fewer: facts and GPUs as in even_monitor_params. */
even_status even_monitor_ranks(even_monitor *monitor, int ranks, const even_monitor_rank *facts,
                               const char *const *gpus) EVEN_MUST_USE;
void even_monitor_attempt(even_monitor *monitor, int attempt);
void even_monitor_rank_started(even_monitor *monitor, int rank, pid_t pid);
/* The rank's process is no more: it is not up from now on, and its number is looked at no longer. */
void even_monitor_rank_gone(even_monitor *monitor, int rank);
/* Why it ended, known when the attempt is over. */
void even_monitor_rank_ended(even_monitor *monitor, int rank, const char *cause);
/* A rank hangs, or, `over`, goes on after all; `words` say so. */
void even_monitor_hang(even_monitor *monitor, int rank, bool over, const char *words);
/* A rank is ended because it holds the others up; `words` say why. */
void even_monitor_straggler_ended(even_monitor *monitor, int rank, const char *words);
/* What a rank of another host takes there, as that one's agent says about once a second; `gpu` NULL: it has none. Of
 * processes that use that one and are no ranks users[0] is the sum. */
void even_monitor_usage(even_monitor *monitor, int rank, const even_rank_usage *usage, const even_gpu_sample *gpu);
/* A fault of the GPU of a rank (news->gpu) of another host, as that one's agent says. That its clock is held down, or
 * no more, may be told again and again. */
void even_monitor_gpu_fault(even_monitor *monitor, const even_gpu_news *news);
/* The live view, `columns` wide, several lines, each ended by a newline (as `evenstep top` shows it too). */
even_status even_monitor_view(even_monitor *monitor, int columns, bool colour, even_text *out) EVEN_MUST_USE;
/* Drains what is left, notes the exit code, writes report.html, frees. */
even_status even_monitor_close(even_monitor *monitor, int exit_code) EVEN_MUST_USE;
/* Frees, and writes nothing to the run folder any more: that is another job's. NULL is allowed. Keeps the last error.
 */
void even_monitor_leave(even_monitor *monitor);

#endif
