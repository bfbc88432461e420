/* A job on several hosts: the agent that the user started (the leader, on the first host, that of rank 0) starts
 * `evenstep agent` on each other one, checks that all have what the script needs, and has them start, watch and end
 * their part of each attempt. docs/hosts.md has the protocol.
 *
 * Secrets: a key of 256 bits is made for each job. A host's agent gets it over its standard input, never in its
 * arguments or its environment; both ends of each connection prove that they have it (os/tls.h). */
#ifndef EVEN_ORCHESTRATOR_HOSTS_H
#define EVEN_ORCHESTRATOR_HOSTS_H

#include "device/device.h"

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct even_hosts even_hosts;
struct even_legacy;

enum { EVEN_HOSTS_MOST = 512, EVEN_HOSTS_NAME = 128 };

/* Whether these are the characters of a host's name. Names go to ssh as words of their own: none may be taken for an
 * option, or be a word of a remote shell. */
bool even_hosts_is_name(const char *text, size_t length);

typedef struct even_host_wish {
  char name[EVEN_HOSTS_NAME]; /* as ssh takes it */
  int ranks;                  /* 0: one a GPU, or without any one a NUMA node */
  bool witness;               /* no ranks: its agent only votes on who leads; the last of the list, if any */
} even_host_wish;

/* A host is lost, and its agent cannot be started again. */
typedef enum even_lost_host {
  EVEN_LOST_GO_ON, /* the others go on without it where es.prepare keeps the global batch; else they wait for it */
  EVEN_LOST_WAIT,
  EVEN_LOST_END /* the job ends */
} even_lost_host;

typedef struct even_hosts_params {
  size_t size;                 /* sizeof(even_hosts_params) */
  const even_host_wish *hosts; /* the first is this one */
  size_t count;                /* 2 … EVEN_HOSTS_MOST; 1 where others may join */
  char *const *shell;          /* {"ssh", …, NULL}: runs a program on a host, given the name and the command; NULL: */
  const char *rendezvous;      /* the agents are there already, and find this one by this file; NULL: they know where */
  bool returns;                /* one that is lost is started again by what started it, */
  bool restarts;               /* or, where its host is not lost, by the process there that started it */
  const char *key;             /* its digits, where all hosts have it; NULL: a new one is made */
  int port;                    /* to listen at; 0: any */
  const char *program;         /* the path of evenstep on every host */
  const char *address;         /* where the leader is reached; NULL: any of its addresses */
  const char *folder;          /* absolute: the working folder of all ranks */
  const char *script;          /* compared with its folder's *.py; NULL: those of the working folder */
  const char *python;          /* compared with its packages; NULL: the ranks are no Python */
  const char *profile;      /* of each host's own devices, if it has that file (even_profile_strengths); NULL: none */
  const char *const *words; /* behind the script: files and folders that they name are compared */
  size_t word_count;
  bool unnamed;               /* the file's name is not this job's alone: one that is there is not replaced */
  double patience_seconds;    /* for all to be there */
  double majority_seconds;    /* how long is waited for a majority of hosts that replace a leader */
  double silence_seconds;     /* after which a host that is silent is lost (2 to 600); 0: 4 */
  bool replaces_leader;       /* of three and more, another one takes the leader's place when it is lost; */
  bool replaces_unasked;      /* the user did not say so, and hears how it is turned off */
  int copies;                 /* other hosts that get a copy of each checkpoint */
  int memory_copies;          /* other hosts that have the newest in their memory */
  int least_ranks;            /* with so many left a job goes on without a host that is lost; 0: as `lost` says */
  even_lost_host lost;        /* without least_ranks: what becomes of the job then */
  double least_seconds;       /* how long it waits with fewer; NAN: nobody says; 0: it ends */
  int most_ranks;             /* up to so many, hosts join while the job runs; 0: none does */
  struct even_estate *estate; /* of the leader whose place this one takes: agents come by themselves; NULL: none */
  /* Of the agents of this job before this one: where one has begun an attempt, its other hosts are begun with instead
   * of those in `hosts`, one that it left out is looked for, and one that does not come now is left out, or waited for,
   * as `lost` and `least_ranks` say. NULL: there was none. */
  const struct even_legacy *before;
} even_hosts_params;

/* Starts the agents and returns when all are there and have what they need, each with its devices chosen.
 * EVEN_ERR_TIMEOUT, EVEN_ERR_PEER_LOST: a host did not come, with the last that its shell said. EVEN_ERR_UNSUPPORTED:
 * another version of evenstep there. EVEN_ERR_MISMATCH: files, Python or torch are others there: which, where, and the
 * fix. EVEN_ERR_USAGE: more words than hosts take. EVEN_ERR_INTERRUPTED: the thread's question (base/stop.h). Main
 * thread. */
even_status even_hosts_open(const even_hosts_params *params, even_hosts **out) EVEN_MUST_USE;
/* Ends the agents that are still there, and waits for their shells. NULL is allowed. */
void even_hosts_close(even_hosts *hosts);

size_t even_hosts_count(const even_hosts *hosts);
const char *even_hosts_name(const even_hosts *hosts, size_t host);
/* How many ranks there may be besides, of hosts that an agent before this one had and that are not there (`before`).
 * NULL: none. */
size_t even_hosts_absent_ranks(const even_hosts *hosts);
/* Of a host other than the first: its devices, one a rank; `cpus` is empty, for they are its own. */
const even_device_list *even_hosts_devices(const even_hosts *hosts, size_t host);
/* Of a job that goes on with ranks of another leader: the first rank of a host; -1: ranks are numbered by their hosts.
 */
long even_hosts_first_rank(const even_hosts *hosts, size_t host);
/* Of such a job: for how many ranks it has places, those that are kept for hosts that may join among them; else 0. */
size_t even_hosts_held_places(const even_hosts *hosts);
/* How many of these, the last, are of processes that wait to take a place, or kept for hosts that may join. */
size_t even_hosts_held_spares(const even_hosts *hosts);
/* The host on which the process of that number waits to take a place; -1: none does. */
int even_hosts_held_spare(const even_hosts *hosts, size_t number);
/* Of such a job: a copy of the devices that this host's ranks run on, which may not all be there for new ones. */
even_status even_hosts_held_devices(const even_hosts *hosts, even_device_list *out) EVEN_MUST_USE;

/* Whether this host's own devices are others since its hosts changed: *out, the caller's, has them then; it asks once.
 */
bool even_hosts_own_devices(even_hosts *hosts, even_device_list *out);
/* Whether even_agent_run returned for its hosts to change, which they have: it wants the devices of those that there
 * are now, and goes on with the job (elastic.h). */
bool even_hosts_changed(const even_hosts *hosts);
/* "10.0.0.1:4711": where hosts join. */
void even_hosts_where(const even_hosts *hosts, char *out, size_t bytes);

/* A host that joins a job that runs already, by itself. */
typedef struct even_join_wish {
  int ranks; /* 0: one a device */
  void *context;
  void (*taken)(void *context, const char *words); /* it has a part in the job from now on: a line for the user */
} even_join_wish;

/* `evenstep agent`: serves the leader that `invitation` (one line of JSON) names until that has ended the job, or is
 * gone: then ends its ranks. Where another host takes that leader's place, it serves that one; where this one does,
 * *estate is what it needs for that (estate.h), else NULL; `estate` NULL: this one is no candidate. `joins` NULL: it
 * was waited for. *met: the leader waited for this one, and has taken it. `legacy`: of the agents of this host, in
 * which it leaves its ranks, where the leader has them outlast agents; where the one before has (even_outlast_due) they
 * are gone on with, and the invitation is not read. NULL: nobody starts another one. *exit_code: 0 where the job was
 * ended by the leader, whatever became of it. Main thread, signals blocked (even_signals_block). */
even_status even_hosts_serve(const char *invitation, const even_join_wish *joins, bool *met,
                             struct even_estate **estate, struct even_legacy *legacy, int *exit_code) EVEN_MUST_USE;

#endif
