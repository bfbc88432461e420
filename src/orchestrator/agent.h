/* The host agent: starts one process for each rank, watches them, forwards signals, restarts
 * the job after a failure, and leaves nothing behind. It knows nothing of the monitor: whoever runs it
 * may watch through the observer. */
#ifndef EVEN_ORCHESTRATOR_AGENT_H
#define EVEN_ORCHESTRATOR_AGENT_H

#include "device/cuda/watch.h"
#include "device/device.h"
#include "device/usage.h"

#include <stdbool.h>
#include <sys/types.h>

/* The exit code of ranks that have saved their state and ended because of notice, and of their job: EX_TEMPFAIL of
 * sysexits.h. python/evenstep/checkpoint.py has it, too. */
enum { EVEN_SAVED_AND_ENDED = 75 };

typedef enum even_rank_end {
  EVEN_RANK_EXITED,           /* by itself: code */
  EVEN_RANK_SIGNALLED,        /* by a signal: code */
  EVEN_RANK_OUT_OF_MEMORY,    /* by the kernel's out-of-memory killer */
  EVEN_RANK_STOPPED_BY_AGENT, /* because another rank failed or the user asked */
  EVEN_RANK_LEFT,             /* by itself with code 0, but others could not go on without it */
  EVEN_RANK_LOST              /* with its host */
} even_rank_end;

/* Called from the agent's loop, one thread. Any member may be NULL. */
enum { EVEN_JOB_ID = 32 }; /* hexadecimal digits that name a job */

typedef struct even_agent_observer {
  void *context;
  /* an attempt begins (0 for the first); the ranks are not started yet */
  void (*attempt)(void *context, int attempt);
  void (*rank_started)(void *context, int rank, pid_t pid);
  /* the rank's process has ended; why is told by rank_ended, when all of the attempt have */
  void (*rank_gone)(void *context, int rank);
  /* `cause` is one line: which rank, where, why; `traceback` the last lines of its output, "" when it ended well */
  void (*rank_ended)(void *context, int rank, even_rank_end end, int code, const char *cause, const char *traceback);
  /* a line of a rank's output, without its newline; `error` for stderr */
  void (*line)(void *context, int rank, bool error, const char *text, size_t length);
  /* about ten times a second */
  void (*tick)(void *context);
  /* before that, while ranks run: any error ends them at once, and even_agent_run with it */
  even_status (*check)(void *context);
  /* a rank hangs, or, `over`, goes on after all: what the notice of it says too */
  void (*hang)(void *context, int rank, bool over, const char *words);
  /* once a second: what a rank of another host takes there, by the word of its agent; `gpu` NULL: it has none. Of those
   * processes that use that one and are no ranks users[0] is the sum */
  void (*usage)(void *context, int rank, const even_rank_usage *usage, const even_gpu_sample *gpu);
  /* a fault of the GPU of a rank of another host (news->gpu: the rank), by the word of its agent */
  void (*gpu_fault)(void *context, const even_gpu_news *news);
  /* a rank that holds the others up is about to be ended: why */
  void (*straggler_ended)(void *context, int rank, const char *words);
  /* the user ends the job by this signal (SIGINT, SIGTERM, SIGHUP): once, before the ranks are asked to end. What they
   * say of that from now on is no failure */
  void (*interrupted)(void *context, int signal);
  /* a host takes part while the others train: these are the devices of its ranks, from `first` on, which the caller has
   * in its list when this returns */
  void (*host_joined)(void *context, const char *host, int first, const even_device_list *devices);
  /* another rank is the main one now (es.rank() is 0 there): those that go on are others; told before its next line */
  void (*main_rank)(void *context, int rank);
  /* one line of what the agent does or cannot do: a restart, a slower way taken, a log that cannot be written */
  void (*notice)(void *context, const char *text);
} even_agent_observer;

/* What is asked for of the place where checkpoints are kept elsewhere. No string is NULL but `url`. */
typedef struct even_agent_wish {
  const char *url;                  /* NULL: of where the job uploads its own */
  const char *folder;               /* where it is to be put */
  const char *after;                /* only one that is newer: an `order` as of even_checkpoint_info; "": any */
  const char *job;                  /* only one that this job wrote ("": anybody), */
  const char *lineage;              /* or that is of this training, */
  const char *until;                /* and no newer than this one */
  void (*meanwhile)(void *context); /* called some times a second until there is an answer; NULL: nobody waits */
  void *meanwhile_context;
} even_agent_wish;

typedef struct even_agent_elsewhere {
  void *context;
  bool kept;               /* whether the job uploads its checkpoints */
  double patience_seconds; /* so long a place that does not answer is asked again before steps are given up for it */
  /* Brings the newest whole checkpoint that was asked for, every checksum compared, and says where it is now: *path
   * (free with even_free), NULL where there is none. Damaged ones there are passed over, and named. Secrets of the URL
   * are in no message. Errors: EVEN_ERR_INTERRUPTED, else why nothing can be fetched. */
  even_status (*fetch)(void *context, const even_agent_wish *wish, char **path);
} even_agent_elsewhere;

/* What becomes of a rank that holds the others up (stragglers.h). */
typedef enum even_on_straggler {
  EVEN_ON_STRAGGLER_KEEP,
  EVEN_ON_STRAGGLER_REPLACE, /* with `replace`: it is ended, and another process takes its place */
  EVEN_ON_STRAGGLER_LEAVE    /* with `shrink`: it is ended, and the others go on without it */
} even_on_straggler;

typedef struct even_agent_params {
  size_t size;                     /* sizeof(even_agent_params) */
  const even_device_list *devices; /* one a rank */
  char *const *command;            /* argv of every rank, NULL-terminated: {"python3", "-u", "script.py", …} */
  const char *run_folder;          /* made; logs/rank-N.log go there */
  const char *id;                  /* of a job that begins, EVEN_JOB_ID digits; NULL: drawn */
  char *const *environment;        /* "NAME=value" lines added for every rank, NULL-terminated, may be NULL */
  const double *cpu_quota;         /* for each rank: fraction of its cores' time (0 < q <= 1), or NAN; NULL: none */
  /* Inherited by the ranks as EVENSTEP_TELEMETRY_FD; what they write there tells the agent who waits for a rank that
   * has ended. -1: none, nobody is known to wait. */
  int telemetry_fd;
  /* A rank that is silent for so long, or ten times what it takes otherwise for what it is at, hangs (silence.h); 0:
   * nobody looks. Needs telemetry_fd. */
  double hang_seconds;
  /* SIGTERM and SIGUSR1 give notice: the ranks have so long to save their state and end, and the exit code is 75 then.
   * 0: they end the job, and are passed on. Needs telemetry_fd. */
  double notice_seconds;
  /* With notice_seconds: who announces the end of this machine without a signal (notice_place.h), asked on each host
   * for its own, every so often (0: 2 s); what it announces is notice, too. NULL: nobody is asked. */
  const char *notice_from;
  double notice_every_seconds;
  bool restart_hung; /* it, with `shrink`, or the attempt is ended then, and the job restarted; else it is told alone */
  /* So long a stopped rank is waited for before calls of the others fail for it (the ranks' EVENSTEP_STOP_GRACE; 0:
   * 0.15 s; INFINITY: they never do), and from then on until it is ended: with `shrink`, for them to go on without it,
   * and where others wait for all to come together. 0: 1 s. */
  double stop_grace_seconds;
  double stop_seconds;
  bool unpinned; /* leave the ranks on all CPUs */
  int max_restarts;
  /* Restart even when a rank ended by an error of its own (not a signal) and no checkpoint was written since the
   * attempt began, that is, when a restart is likely to end the same way. */
  bool restart_always;
  bool paced; /* attempts that end early, one after the other, are followed by pauses (pace.h) */
  /* A rank that was killed does not end the others where they all say that they can go on without it (es.prepare) and
   * are at least so many: they do, in their processes. Else the job is started again, as without. */
  bool shrink;
  /* With `shrink`: another process takes the place of one that was killed, and joins the others between two steps. With
   * fewer than least_ranks they save their state and wait for it. */
  bool replace;
  int spares;             /* the last so many of the devices begin outside: processes that wait to take a place */
  const int *spare_hosts; /* the host's number of each of them, none lower than the one before; NULL: this one's */
  /* With `shrink`, of hosts: the last `kept` of those places are not of spares. No host has them yet; hosts that join
   * take them, and their ranks join the others between two steps. */
  bool grows;
  int kept;
  int least_ranks;
  even_on_straggler on_straggler; /* needs telemetry_fd */
  double straggler_gain;          /* the part of a step by which the others must be faster then; 0: 0.05 */
  double straggler_seconds;       /* and for so long; 0: 60 */
  double straggler_pause_seconds; /* between two ends; 0: 600 */
  double gpu_seconds;             /* between two looks at the GPUs of other hosts; 0: 1; INFINITY: none is watched */
  bool shares_follow;             /* the shares follow the speeds */
  /* Where the newest whole checkpoint is looked for before a (re)start; other jobs may write there, too. A restart
   * takes those whose state names this job ("job": its EVENSTEP_JOB), with "auto" also those of the training that it
   * went on with; of those that name neither a job nor a training, the ones made since the job began. */
  const char *checkpoint_folder;
  /* NULL: start anew; "auto": newest whole checkpoint, if any (EVEN_ERR_CORRUPT where all are damaged or cannot be
   * read); a URL: fetched from there; else its path (whose checksums the caller has compared) */
  const char *resume;
  even_agent_elsewhere elsewhere;
  /* The other hosts of the job, in order (hosts.h); their devices follow this host's in `devices`. NULL: there are
   * none. */
  struct even_hosts *hosts;
  struct even_estate *estate; /* of the leader whose job this one goes on with (estate.h); NULL: it is a new one */
  /* Where ranks of this host keep checkpoints in memory, which a restart takes where they are newer; NULL: nowhere. */
  struct even_host_memory *memory;
  struct even_aside *aside; /* devices that fail are left out of further attempts (aside.h); NULL: none is */
  /* Shared with the process that starts another agent in this one's place once it was killed, and goes on with what is
   * left there (legacy.h); NULL: nobody does. */
  struct even_legacy *legacy;
  const bool *shown; /* of hosts: whose lines the observer wants, a rank each; NULL: all */
  even_agent_observer observer;
} even_agent_params;

/* Runs the job to its end. *exit_code = the script's exit code (the first failing rank's; 128+signal for a
 * signal; 130 after Ctrl-C; 7 when a rank that others needed ended with 0). Errors: only those of the agent itself
 * (EVEN_ERR_SYSTEM …). While it runs, all children of the calling process are its own: it adopts orphans and reaps
 * whatever ends. Call it from the main thread, with the signals blocked before other threads start
 * (even_signals_block). Where it returns for the job's hosts to change (even_hosts_changed), or its devices (aside.h),
 * it is called again with the devices of those that there are then. EVEN_ERR_INTERRUPTED: the thread's question
 * (base/stop.h) ended the reading of checkpoints. */
even_status even_agent_run(const even_agent_params *params, int *exit_code) EVEN_MUST_USE;

#endif
