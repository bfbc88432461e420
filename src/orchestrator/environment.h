/* The environment of a rank: what torchrun sets, and EVENSTEP_*. */
#ifndef EVEN_ORCHESTRATOR_ENVIRONMENT_H
#define EVEN_ORCHESTRATOR_ENVIRONMENT_H

#include "device/device.h"
#include "os/sweep.h"

#include <evenstep/status.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* "NAME=value" strings, NULL-terminated, each name once. */
typedef struct even_environment {
  char **lines;
  size_t count;
} even_environment;

/* Numbers of agents in EVENSTEP_AGENT, for each leader of a job. */
enum { EVEN_ERA_GROUPS = 1000 };

typedef struct even_rank_place {
  int rank;
  const even_device_list *devices; /* of all ranks; their number, without spares, is the world's size */
  int spares;
  int first_spare;            /* of this host's */
  bool joins;                 /* it is to take a place among ranks that train already */
  int first;                  /* rank of this host, */
  int local;                  /* and how many there are, without spares; 0: all ranks are here */
  int group;                  /* number of this host, */
  int groups;                 /* and how many there are; 0: one */
  int era;                    /* of the leader: EVENSTEP_AGENT tells its ranks from those that an earlier one had, */
  pid_t keeper;               /* and those of this host's agent from another's (even_legacy_keeper) */
  const char *master_address; /* NULL: 127.0.0.1 */
  const char *interface;      /* over which hosts reach one another; NULL, "": not known */
  int master_port;
  int attempt;
  int64_t turn;          /* of the attempt (job.h), 0: not to be told */
  int silence_ms;        /* after which the job's hosts are lost (os/socket.h), 0: not to be told; */
  double unseen_seconds; /* for at least so long ranks of others are waited for that nobody sees, 0: not to be told */
  int max_restarts;
  int telemetry_fd;     /* -1: none */
  int snapshot_fd;      /* memory for its checkpoints, -1: none */
  int generation_fd;    /* -1 or 0: none */
  int standing_fd;      /* the same */
  pid_t agent;          /* the process that starts it, 0: not to be told; */
  uint64_t agent_start; /* and since when that runs (os/process_stat.h) */
  const char *job;
  const char *run_folder; /* absolute */
  bool sign_seen;         /* the job's sign (os/lease.h) was seen on this host, where it keeps one */
  const char *resume;     /* folder of a checkpoint, NULL: none */
  const char *shortages;  /* even_shortages_add's words of all ranks, NULL: none */
  const char *memory;     /* this host's folder for checkpoints in memory, NULL: none */
} even_rank_place;

/* `inherited`, then the rank's own variables, then `extra` (may be NULL); later ones replace earlier ones. Of the
 * hosts' silence and what is reckoned with it counts what the agent knows alone. */
even_status even_environment_of_rank(const even_rank_place *place, char *const *inherited, char *const *extra,
                                     even_environment *out) EVEN_MUST_USE;
/* What all processes of the job's attempt on a host have in their environment, and no others: of several hosts those of
 * each can be told from the others', also where one machine plays several; `era` and `keeper` as in even_rank_place, of
 * which `job`, `group` and `groups` count, too. */
void even_environment_mark(const even_rank_place *place, char out[EVEN_SWEEP_MARK]);
/* How that of the host's processes begins, whichever agent's they are; for several hosts alone. */
void even_environment_mark_of_any(const even_rank_place *place, char out[EVEN_SWEEP_MARK]);
/* Whether a variable ("NAME=value") is a rank's own, so that ranks of another job do not inherit it. */
bool even_environment_is_of_a_rank(const char *line);
/* Adds a line "NAME=value", or replaces it. */
even_status even_environment_put(even_environment *environment, const char *line) EVEN_MUST_USE;
/* Adds NAME=value, or replaces it. */
even_status even_environment_set(even_environment *environment, const char *name, const char *value) EVEN_MUST_USE;
void even_environment_free(even_environment *environment);
/* The value of `name` among lines "NAME=value" that end with NULL (`lines` NULL: none), NULL when it is not there. */
const char *even_environment_value(char *const *lines, const char *name);
/* The same of an environment. */
const char *even_environment_get(const even_environment *environment, const char *name);

#endif
