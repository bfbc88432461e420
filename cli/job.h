/* A job as the command line describes it: the options that `run` and `plan` share, their checks, and the
 * start of the agent with a view of what it does. */
#ifndef EVEN_CLI_JOB_H
#define EVEN_CLI_JOB_H

#include "cli/command.h"

/* As typed; even_job_options_defaults() before parsing. */
typedef struct even_job_options {
  const char *ranks;            /* -n: "auto", a number, or NULL */
  const char *devices;          /* --devices */
  const char *name;             /* --name */
  const char *runs_folder;      /* --runs-dir */
  const char *policy;           /* --policy */
  const char *profile;          /* --profile; NULL: gpu_profiles.json where present */
  const char *log_rank;         /* --log-rank: "all", "none", "0,2" */
  int64_t max_restarts;         /* --max-restarts; -1: not given */
  const char *recovery;         /* --recovery: "restart", "shrink" or "replace" */
  const char *spares;           /* --spares, NULL: none */
  int64_t min_ranks;            /* --min-ranks; 0: not given */
  int64_t max_ranks;            /* --max-ranks; 0: not given */
  int64_t join_port;            /* --join-port; 0: any */
  const char *checkpoint_every; /* "100" steps, "30s" */
  const char *checkpoint_folder;
  int64_t keep;              /* checkpoints to keep */
  const char *keep_every;    /* "1000" steps, "3600s": also these */
  const char *checkpoint_to; /* a URL that checkpoints are uploaded to; NULL, "": none */
  const char *resume;        /* NULL, "auto", a path or a URL */
  bool set_aside;            /* places that fail attempt after attempt are left out */
  const char *cpu_quota;
  const char *straggler_watch;    /* "X:SECONDS", "off"; this and what follows: NULL: EVENSTEP_STRAGGLER_WATCH …, */
  const char *link_watch;         /* else the monitor's */
  const char *gpu_watch;          /* seconds, "off" */
  const char *loss_spike;         /* deviations, "off"; NULL: EVENSTEP_LOSS_SPIKE, else the monitor's */
  const char *hang_timeout;       /* seconds, "off"; NULL: EVENSTEP_HANG_TIMEOUT, else 30 */
  const char *on_hang;            /* "report", "restart"; NULL: EVENSTEP_ON_HANG, else report */
  const char *on_straggler;       /* "keep", "replace", "leave"; NULL: keep */
  const char *straggler_gain;     /* percent; NULL: 5 */
  const char *straggler_patience; /* seconds; NULL: 60 */
  const char *notice;             /* seconds; NULL: EVENSTEP_NOTICE, else none */
  const char *notice_from;        /* "aws", "exec:COMMAND" …; NULL: EVENSTEP_NOTICE_FROM, else nobody is asked */
  const char *on_nonfinite;       /* "report", "skip", "stop"; NULL: EVENSTEP_ON_NONFINITE, else report */
  const char *check_parameters;   /* steps, "off"; NULL: EVENSTEP_CHECK_PARAMETERS, else 100 */
  const char *on_difference;      /* "report", "stop"; NULL: EVENSTEP_ON_DIFFERENCE, else report */
  const char *batch_adapt;        /* "64:1024,lr=sqrt,every=100"; NULL: EVENSTEP_BATCH_ADAPT, else the batch stays */
  bool no_pin;
  int64_t port; /* of the monitor; 0: any */
  bool no_monitor;
  bool whole_history; /* --whole-history */
  bool timeline;      /* --timeline, or EVENSTEP_TIMELINE in the environment */
  int64_t timeline_calls;
  const char *hosts;                    /* NULL: this one alone */
  const char *ssh;                      /* NULL: EVENSTEP_SSH, or ssh */
  const char *address;                  /* NULL: any of this host's */
  const char *rendezvous;               /* --rendezvous; NULL: the working folder */
  bool replace_leader;                  /* asked for; */
  bool keep_leader;                     /* or not wanted, where it would be by itself: --no-replace-leader */
  bool restart_agent;                   /* --restart-agent of earlier versions: it is so by itself */
  int64_t checkpoint_copies;            /* --checkpoint-copies: on so many other hosts */
  int64_t checkpoint_memory;            /* --checkpoint-memory: steps; 0: none */
  int64_t memory_copies;                /* --memory-copies: in so many other hosts' memory; -1: not given */
  const char *witness;                  /* a host without ranks that votes on who leads; NULL: none */
  const struct even_launched *launched; /* with --hosts auto: which of the hosts this is; else NULL */
  struct even_legacy *legacy;           /* of the agents of this job before this one; NULL: none is started again. Not
                                         * of the command line */
  struct even_estate *estate;           /* of the leader whose job this is; NULL: a new one. Not of the command line */
  const char *python;
  bool module;    /* -m: the operand is a module */
  bool no_python; /* the operand is a program */
  bool quiet;
  bool json;
} even_job_options;

enum { EVEN_JOB_OPTION_ROOM = 64 }; /* at least as many as there are */

void even_job_options_defaults(even_job_options *options);
/* The options' declarations, for even_options_parse, into table[EVEN_JOB_OPTION_ROOM]; how many there are. */
size_t even_job_options_declare(even_job_options *options, even_option *table);
/* Of these only the ones with a name in `names`, in their own order; returns how many. `table` has room for as many. */
size_t even_job_options_declare_some(even_job_options *options, const char *const *names, size_t count,
                                     even_option *table);
/* Of `count` declared ones, has the help of -n say that it is two where nothing is said. */
void even_job_options_tell_two_ranks(even_option *table, size_t count);

/* Runs `words` (script and its arguments, count >= 1) as a job and returns its exit code; an error before the ranks
 * start is printed. `environment` ("NAME=value", NULL-terminated, may be NULL) is added for every rank. Uses the
 * calling (main) thread; call it before other threads are started. */
int even_job_start(const even_job_options *options, char *const *environment, size_t count, char **words);
/* Before even_job_start: the agent is a child of this process, and another one is started when it is killed
 * (job_restart.c), of one that does not lead, too. True in each agent, whose `options` are changed for it; false in the
 * calling process once the job is over, with its exit code. Where another host takes a killed one's place and its ranks
 * could not live on with one that is started here, and with EVENSTEP_RESTART_AGENT=0: true, in the calling process;
 * =anew: no rank outlasts its agent. */
bool even_job_supervise(even_job_options *options, int *code);
/* The same of an agent that a leader has started over ssh (cli/agent.c): *legacy is what those before it have left. It
 * is not started again where its ranks have ended with it: the leader sees to that. The calling process keeps nothing
 * of the invitation, which has the key, once the first agent has it. */
bool even_job_supervise_agent(char *invitation, struct even_legacy **legacy, int *code);
/* Whether another one of the hosts that `options` names takes this one's place when it is lost. */
bool even_job_replaces_leader(const even_job_options *options);
/* The same for a process of --hosts auto that does not lead: does its part of the job, and returns its exit code. With
 * a `legacy` it looks for another leader where that is lost, whose agent is started again as this one is. */
int even_job_follow(const even_job_options *options, size_t count, char **words);

/* In an agent whose host leads a job from now on (orchestrator/estate.h): goes on with that job, and returns its exit
 * code. Takes `estate`. */
int even_job_succeed(struct even_estate *estate);

#endif
