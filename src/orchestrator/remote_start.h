/* What a host is told to start its part of an attempt: written by the leader, read by the host's agent. */
#ifndef EVEN_ORCHESTRATOR_REMOTE_START_H
#define EVEN_ORCHESTRATOR_REMOTE_START_H

#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"

#include <jansson.h>

typedef struct even_remote_start {
  char job[33];
  int attempt;
  int max_restarts;
  char master_address[64];
  int master_port;
  int world;
  int first; /* of its ranks */
  int count;
  int first_spare; /* of processes of this host that begin outside */
  int spares;
  int all_spares; /* of all hosts: the last of `world` */
  int group;      /* among the hosts */
  int groups;
  int most_groups; /* and how many may come into the attempt */
  int era;
  char **command;
  char **environment; /* also those of the leader's own variables that ranks everywhere get */
  char *run_folder;
  char *resume;    /* NULL: anew */
  double *quota;   /* of all ranks, NAN where it has none; NULL: of no rank */
  bool *shown;     /* of all ranks: whether the leader wants its lines, */
  bool shows_main; /* and those of whoever is the main one, once rank 0 is lost */
  size_t *used;    /* of the devices that it has for the job, a number for each of its ranks; NULL: as before */
  double hang_seconds;
  double notice_seconds;
  char *notice_from; /* whom this host asks for its own; NULL: nobody */
  double notice_every_seconds;
  double outlast_seconds; /* for so long ranks outlast the leader's agent (follower_wait.c); 0: they do not */
  double gpu_seconds;     /* INFINITY: its GPUs are not watched */
  bool restart_hung;
  bool unpinned;
  bool shrink;  /* ranks that are lost end nobody else, */
  bool replace; /* and others may join, in their places or in such as nobody had */
  bool late;    /* the attempt runs: processes are to take the places of this host, and none is started at once */
  int rings;    /* at least one a rank */
  bool telemetry;
  bool calls; /* records of calls are wanted */
} even_remote_start;

/* Whether other hosts take a command with these words behind its script, or so many, as even_remote_start_read does:
 * EVEN_ERR_USAGE. */
even_status even_remote_check_words(const char *const *words, size_t count) EVEN_MUST_USE;
/* `its`: the agent of that host, with spares; NULL: of an attempt that is planned, and has none. Whether all of it went
 * into `out` is for even_text_status to say. */
void even_remote_start_write(const even_job *job, size_t group, size_t first, size_t count, const even_host_agent *its,
                             even_text *out);
/* EVEN_ERR_INPUT where it is not whole. Free it with even_remote_start_free, also after a failure. */
even_status even_remote_start_read(const char *json, size_t bytes, even_remote_start *out) EVEN_MUST_USE;
even_status even_remote_start_of(const json_t *object, even_remote_start *out) EVEN_MUST_USE;
void even_remote_start_free(even_remote_start *start);
/* For at least so long ranks wait for one of another host that nobody sees (even_peers_bear_silence), where another
 * host takes the leader's place: from when a leader that stands still has its ranks held (guard_ns, leadership.h) until
 * it is replaced. 0: this agent leads no such job, and says nothing of it. */
double even_remote_unseen_seconds(const even_job *job);
/* Whether ranks on other hosts get this variable ("NAME=value") of the leader's. */
bool even_remote_passes_on(const char *line);

#endif
