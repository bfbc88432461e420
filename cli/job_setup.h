/* What a job needs before its ranks start, made from its options. */
#ifndef EVEN_CLI_JOB_SETUP_H
#define EVEN_CLI_JOB_SETUP_H

#include "base/text.h"
#include "cli/job.h"
#include "device/device.h"
#include "monitor/monitor.h"
#include "orchestrator/agent.h"
#include "orchestrator/aside.h"
#include "orchestrator/environment.h"
#include "orchestrator/hosts.h"
#include "orchestrator/launched.h"

enum { EVEN_JOB_SHELL_WORDS = 32 };

/* How other hosts are reached; lives as long as they are. */
typedef struct even_job_way {
  char *shell; /* cut into `words`; NULL: with --hosts auto */
  char *words[EVEN_JOB_SHELL_WORDS + 1];
  even_rendezvous rendezvous; /* with --hosts auto */
  char key[EVEN_KEY_DIGITS + 1];
  even_text program;
  even_text folder;
} even_job_way;

typedef struct even_job_setup {
  even_device_list devices;
  even_hosts *hosts;              /* NULL: this one alone */
  even_job_way way;               /* to the others */
  size_t local;                   /* ranks of this host, */
  size_t first;                   /* the first of them; 0 but where ranks of another leader go on */
  size_t spares;                  /* the last of `devices`: processes that wait to take a place, */
  int *spare_hosts;               /* and the host of each; */
  bool grows;                     /* and behind them places for hosts that join while the others train: */
  size_t kept;                    /* so many of `spares`, */
  size_t joined;                  /* of which so many are taken, or were */
  size_t most;                    /* ranks that there ever were, where hosts have changed */
  const char **labels;            /* a rank each: the host that it is on, NULL for this one */
  char (*names)[EVEN_HOSTS_NAME]; /* theirs */
  double *quota;                  /* a rank each, NAN: none; NULL without --cpu-quota */
  double *speeds;                 /* a rank each, > 0; NULL: unknown */
  int no_score;                   /* a rank whose device a profile that counts tells no usable score of; -1: none */
  bool *shown;                    /* ranks whose output is shown */
  char **command;                 /* argv of the ranks, NULL-terminated; `words` of the caller inside */
  even_text python;
  even_text run_name;
  even_text run_folder;
  int lock;                 /* on the run folder, for as long as the job lives; -1: none (no locks there) */
  struct even_lease *lease; /* the same among hosts; NULL: the file system is this one's alone, or has no room */
  const struct even_legacy *legacy; /* to which both are left where another agent follows this one; NULL: none does */
  char id[EVEN_JOB_ID + 1];         /* the job's; that of the leader, or agent, that it goes on after */
  even_text checkpoint_folder;      /* absolute */
  struct even_host_memory *memory;  /* with --checkpoint-memory; else NULL */
  even_environment environment;     /* added for every rank */
  int max_restarts;
  bool restart_always;
  double hang_seconds; /* 0: off */
  bool restart_hung;
  double stop_grace_seconds; /* INFINITY: never; this and the next: 0: as the agent has it */
  double stop_seconds;
  even_on_straggler on_straggler;
  double straggler_gain; /* of a step; this and what follows: 0: as the agent has it */
  double straggler_seconds;
  double straggler_pause_seconds;
  double notice_seconds;   /* 0: none */
  const char *notice_from; /* NULL: nobody */
  double notice_every_seconds;
  double loss_spike; /* deviations; 0: as the monitor has it; INFINITY: off */
  even_monitor_limits watches;
  bool shrink;
  bool replace;
  even_aside aside; /* places that do not take part (--set-aside) */
} even_job_setup;

/* job_succeed.c: under another leader a rank has what the one in its place on its host had. `places`: ranks and spares.
 */
even_status even_job_inherit_quota(const struct even_estate *estate, size_t places,
                                   even_job_setup *setup) EVEN_MUST_USE;
/* Checks the options and builds all of it; the run folder is made last. On failure everything is freed. */
even_status even_job_setup_open(const even_job_options *options, char *const *environment, size_t count, char **words,
                                even_job_setup *out) EVEN_MUST_USE;
void even_job_setup_close(even_job_setup *setup);
/* The job's hosts have changed: all that is counted by ranks follows them. */
even_status even_job_setup_follow(const even_job_options *options, even_job_setup *setup) EVEN_MUST_USE;

/* The ranks' argv: interpreter, script and arguments. */
/* The number of ranks on this host as --hosts has it, 0: as -n has it. */
even_status even_job_first_host(const even_job_options *options, int ranks, int *first) EVEN_MUST_USE;
/* The option, else the variable, else NULL. *from: how the user gave it. */
const char *even_job_given(const char *option, const char *option_name, const char *variable, const char **from);
/* What the job is watched for: hangs, stops, notice. */
even_status even_job_watching(const even_job_options *options, even_job_setup *setup) EVEN_MUST_USE;
/* Whether the options go together with several hosts. */
even_status even_job_check_hosts(const even_job_options *options) EVEN_MUST_USE;
/* The hosts of a list as --hosts has it; `ranks`: where it says no number. *out is the caller's also after a failure
 * (even_free). */
even_status even_job_read_hosts(const char *list, int ranks, even_host_wish **out, size_t *count) EVEN_MUST_USE;
/* What reaches the other hosts, and the program there; where they were started with this one, nothing does. */
even_status even_job_find_way(const even_job_options *options, even_job_way *way) EVEN_MUST_USE;
void even_job_way_free(even_job_way *way);
/* How long hosts wait for one another: 120 s, or EVENSTEP_HOSTS_PATIENCE. */
even_status even_job_patience(double *seconds) EVEN_MUST_USE;
/* With --hosts auto: where the hosts meet, and the key that the user gave them. */
even_status even_job_meet(const even_job_options *options, even_rendezvous *rendezvous,
                          char key[EVEN_KEY_DIGITS + 1]) EVEN_MUST_USE;
/* The devices of the hosts that there are now, behind those of this one, with a label each. */
even_status even_job_add_devices(even_job_setup *setup) EVEN_MUST_USE;
/* "3 ranks on 2 hosts: here 2, there 1", added to *out. */
void even_job_name_hosts(const even_job_setup *setup, even_text *out);
/* With --hosts: reaches the other hosts, whose devices follow this one's then. */
even_status even_job_reach_hosts(const even_job_options *options, int ranks, size_t word_count, char **words,
                                 even_job_setup *setup) EVEN_MUST_USE;
/* The profile that is looked for: --profile, or the file's usual name. */
const char *even_job_profile_path(const even_job_options *options);
/* setup->speeds, by profiles and quota; EVENSTEP_SPEEDS from them, of so many ranks. Other hosts' devices have their
 * own host's; where that has none, this one's, if a device of the same name and model is in it. `begins`: the user
 * starts the job now, and hears of a profile that cannot be read as an error; later it is said. */
even_status even_job_read_speeds(const even_job_options *options, bool begins, even_job_setup *setup) EVEN_MUST_USE;
even_status even_job_set_speeds(even_job_setup *setup, size_t ranks) EVEN_MUST_USE;
/* job_spares.c. How many there are and on which hosts they wait, of the hosts that there are now; `left`: some that the
 * option names may have left. */
even_status even_job_read_spares(const even_job_options *options, bool left, even_job_setup *setup) EVEN_MUST_USE;
/* Their devices, behind those of the ranks, and labels. */
even_status even_job_add_spares(even_job_setup *setup) EVEN_MUST_USE;
/* Without them again. */
void even_job_drop_spares(even_job_setup *setup);
/* job_places.c. Places for hosts that join while the others train, where that can be; in the way of spares. */
void even_job_keep_places(const even_job_options *options, even_job_setup *setup);
/* A host has come into the attempt that runs: the devices of its ranks, from `first` on. */
void even_job_take_places(even_job_setup *setup, const char *host, size_t first, const even_device_list *devices);
/* Ranks, spares, and those that have joined: all but places that nobody has had yet. */
size_t even_job_ranks_known(const even_job_setup *setup);
even_status even_job_command(const even_job_options *options, size_t count, char **words,
                             even_job_setup *setup) EVEN_MUST_USE;
/* Whether --name, where given, can name a folder. */
even_status even_job_check_name(const even_job_options *options) EVEN_MUST_USE;
/* Makes the run folder: a new one, or with --resume the one that is there. A folder of that name without --resume is
 * moved to NAME.1 (.2 …) first; one that a living job uses is EVEN_ERR_IN_USE: of this host at once, of another one
 * that sees it (os/lease.h) after seconds; what such a one left is taken half a minute later. */
even_status even_job_run_folder(const even_job_options *options, const char *script,
                                even_job_setup *setup) EVEN_MUST_USE;
/* It is another job's to have from now on; where another agent of this one follows (even_legacy_has_asked), its own
 * alone, without a moment in between. */
void even_job_leave_folder(even_job_setup *setup);
/* EVENSTEP_RUN_SIGN, the run folder as seen from the root, where other hosts see its sign: who writes checkpoints looks
 * before whether that is the job's still. */
even_status even_job_set_sign(even_job_setup *setup) EVEN_MUST_USE;
/* That the job runs although jobs of other hosts do not see it, and why. */
void even_job_tell_unseen(const even_job_setup *setup, const char *why, void (*tell)(void *context, const char *text),
                          void *context);

#endif
