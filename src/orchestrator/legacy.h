/* What an agent leaves to the one that is started in its place once it was killed (cli/job_restart.c), in memory that
 * both, and the process that starts them, share: which job it is, and where that stands. */
#ifndef EVEN_ORCHESTRATOR_LEGACY_H
#define EVEN_ORCHESTRATOR_LEGACY_H

#include "orchestrator/aside_rests.h"
#include "orchestrator/hosts.h"
#include "orchestrator/progress.h"
#include "orchestrator/restarts.h"
#include "orchestrator/shortages.h"
#include "orchestrator/voter.h"
#include "os/custody.h"
#include "os/shared_memory.h"
#include "os/sweep.h"

#include <evenstep/status.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct even_aside;
struct even_job;

enum { EVEN_LEGACY_NAME = 256, EVEN_LEGACY_TEXT = 512, EVEN_LEGACY_HOSTS = EVEN_HOSTS_MOST + 16, EVEN_LEGACY_KEY = 80 };

/* A host of the job, other than this one. One that was drained is none. */
typedef struct even_legacy_host {
  char name[EVEN_HOSTS_NAME];
  int wish;     /* as even_host_wish.ranks */
  int place;    /* the number that what started its agent has told that (launched.h); 0: none has */
  size_t ranks; /* that it has, or had */
  bool away;    /* it was left out, and is looked for */
} even_legacy_host;

typedef struct even_legacy_job {
  char id[33];
  int group;   /* of this host */
  int attempt; /* that began last */
  int planned;
  even_restarts restarts;
  int groups; /* as those of the job, */
  int era;
  int64_t turn;
  even_shortages shortages;
  even_aside_rests rests; /* the places that the attempt does without, and what is counted of them */
  even_legacy_host hosts[EVEN_LEGACY_HOSTS];
  size_t host_count;
  char foreign[EVEN_LEGACY_TEXT];
  char lineage[EVEN_LEGACY_TEXT];
  char began[EVEN_LEGACY_TEXT];
} even_legacy_job;

/* The voters' group of a leader whose place another host may take (succession.h), as it is while `whole` is so. */
typedef struct even_legacy_votes {
  size_t count;                                 /* of its members; 0: there is none */
  even_voter_member members[EVEN_LEGACY_HOSTS]; /* the leader's own first, then those of the hosts */
  uint64_t generation;
  uint64_t next_member;
  int port;
  pid_t guardian; /* of the ranks here, which the leader's member tells until when they may run; -1: none */
  char folder[EVEN_LEGACY_TEXT]; /* in which they keep their logs */
} even_legacy_votes;

typedef struct even_legacy_page {
  _Atomic bool named;
  char run_name[EVEN_LEGACY_NAME];
  _Atomic uint32_t left; /* how often; the last one lies in jobs[left % 2]: who is killed while it writes spoils none */
  even_legacy_job jobs[2];
  uint64_t furthest;         /* how many steps the ranks had made when one was seen last, */
  _Atomic uint64_t advances; /* and how often that was seen to change */
  _Atomic int64_t saved;     /* the furthest step of which it has seen a checkpoint be whole */
  _Atomic bool shares;       /* ranks were seen to step with a global batch */
  char key[EVEN_LEGACY_KEY]; /* of a job of several hosts: its digits */
  bool again;                /* this agent cannot go on with the ranks that run: another one begins without them */
  _Atomic bool whole;        /* the next agent can go on with the ranks that run (outlast.h) */
  even_legacy_votes votes;
  _Atomic bool alone;       /* of a leader whose place another host may take: none does, for this one alone votes */
  bool taken;               /* an agent that does not lead was taken by its leader */
  _Atomic uint64_t signals; /* that it has passed on to its ranks in this attempt, of those that its leader forwards */
  _Atomic int over;         /* 1 + the job's exit code: it is over, and only its clearing up is left; 0: it is not */
  pid_t keeper;             /* of the folder in which they keep checkpoints in memory; */
  char memory[EVEN_LEGACY_TEXT]; /* "": there is none */
} even_legacy_page;

typedef struct even_legacy {
  even_shared_memory memory;
  even_legacy_page *page;
  even_custody *custody; /* of what else is left; NULL: of nothing, */
  even_custody *folder;  /* and of the run folder's lock, also where no rank outlasts its agent; NULL: nobody's */
  long starter;          /* the process that starts agents; 0: it cannot be told */
  uint64_t starter_start;
  uint64_t since_ns; /* when the job began */
  uint64_t advances; /* as it was when even_legacy_advanced was asked last, */
  int64_t saved;     /* and how far its checkpoints were */
} even_legacy;

/* Before the first agent is started, in the process that starts them. */
even_status even_legacy_open(even_legacy *out) EVEN_MUST_USE;
void even_legacy_close(even_legacy *legacy);

/* The name of the run folder, which there is from now on. */
void even_legacy_name(even_legacy *legacy, const char *run_name);
/* That folder's lock, which nobody else has from now on until the job is over, also while there is no agent: whoever
 * starts agents has the same open file, which this one must not unlock where another one follows it. `legacy` NULL:
 * nobody keeps it. */
void even_legacy_keep_lock(const even_legacy *legacy, int lock);
/* The one that an agent before this one had, the caller's from now on; -1: there is none. `legacy` may be NULL. */
int even_legacy_lock(const even_legacy *legacy);
/* NULL: there is no folder yet. */
const char *even_legacy_run_name(const even_legacy *legacy);
/* Of the job's attempts so far those that count among --max-restarts: none where a checkpoint that is further was
 * written since the last began. */
int even_legacy_restarts(const even_legacy *legacy);
/* The number of the attempt that began last. */
int even_legacy_attempt(const even_legacy *legacy);
/* The id of the job; NULL: no attempt has begun. */
const char *even_legacy_job_id(const even_legacy *legacy);
/* By its number the processes of an agent are told from those of another agent that the job has on the same host: who
 * starts agents, one after the other, else this process. `legacy` may be NULL. */
pid_t even_legacy_keeper(const even_legacy *legacy);
/* What this host's processes of that attempt are known by (even_environment_mark). False: none has begun. */
bool even_legacy_mark(const even_legacy *legacy, char out[EVEN_SWEEP_MARK]);
/* Whether an attempt has begun. */
bool even_legacy_is_left(const even_legacy *legacy);
/* The hosts of the attempt that began last: *count, in the order of the job. Not those that joined by themselves, which
 * nobody here can start. NULL: none has begun. */
const even_legacy_host *even_legacy_hosts(const even_legacy *legacy, size_t *count);

/* The places that the attempt that began last does, or did, without: those of `out` from now on. None has begun:
 * nothing. */
void even_legacy_aside(const even_legacy *legacy, struct even_aside *out);

/* At the beginning of each attempt. `legacy` NULL: nobody is started in this one's place. */
even_status even_legacy_leave(even_legacy *legacy, const struct even_job *job) EVEN_MUST_USE;
/* The same of an agent that serves a leader, which alone counts restarts. */
even_status even_legacy_leave_part(even_legacy *legacy, const struct even_job *job) EVEN_MUST_USE;
/* Before a host is told to leave: whoever is started in this one's place has it no more, or, where it is `away` (left
 * out, and looked for), among those that are looked for. `legacy` NULL, or no attempt has begun: nothing. */
void even_legacy_part(even_legacy *legacy, const char *host, bool away);
/* Some times a second: how far the ranks are. */
void even_legacy_progress(even_legacy *legacy, const even_progress *progress);
/* Whether the training has come further since this was asked last: by a checkpoint or, where its ranks live on, by any
 * step; of an agent that does not lead, whether its leader has taken it. */
bool even_legacy_advanced(even_legacy *legacy, bool lives);
/* Makes `job` the same one, at its next attempt. */
even_status even_legacy_take(const even_legacy *legacy, struct even_job *job) EVEN_MUST_USE;
/* The same at the attempt that it is at. */
even_status even_legacy_continue(const even_legacy *legacy, struct even_job *job) EVEN_MUST_USE;
/* Whether the attempt's ranks could be gone on with, were this agent killed now. */
void even_legacy_whole(even_legacy *legacy, bool whole);
/* Of several hosts' ranks some cannot be gone on with, for the reason that this agent ends with: none can then, and
 * another agent begins as if the one before had left none. */
void even_legacy_ask_again(const even_legacy *legacy);
/* Whether the agent that has ended asked for that; once. */
bool even_legacy_asks_again(even_legacy *legacy);
/* Whether this one has: what is the job's, and not its own, is left to the next one. `legacy` may be NULL. */
bool even_legacy_has_asked(const even_legacy *legacy);
/* Whether nobody takes this leader's place, where another host could before: never said while one still may. `legacy`
 * may be NULL. */
void even_legacy_alone(const even_legacy *legacy, bool alone);
bool even_legacy_is_alone(const even_legacy *legacy);
/* Of an agent that does not lead: where it notes that its leader has taken it. */
bool *even_legacy_taken(even_legacy *legacy);
/* The job is over, whatever ends this agent from now on. `legacy` may be NULL. */
void even_legacy_finish(even_legacy *legacy, int exit_code);
/* Whether it is, and with which exit code. */
bool even_legacy_is_over(const even_legacy *legacy, int *exit_code);
bool even_legacy_is_whole(const even_legacy *legacy);

#endif
