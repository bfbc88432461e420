/* A host is drained (`evenstep drain HOST [--to …]`): its ranks get places on other hosts, and the processes of the
 * attempt that follows are started there, and wait in es.prepare, before the training is asked to save its state. Until
 * then nothing of the job is touched: what goes wrong ends the draining, not the job.
 *
 *   REACHES: agents of hosts that are new are started, and compared
 *   STARTS:  each host chooses devices for the ranks that it is to have, and starts their processes
 *   ASKED:   the ranks save their state and end; the rest is that of any change of hosts (elastic.h) */
#ifndef EVEN_ORCHESTRATOR_DRAIN_MOVE_H
#define EVEN_ORCHESTRATOR_DRAIN_MOVE_H

#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"
#include "os/port.h"

typedef enum even_move_stage { EVEN_MOVE_NONE, EVEN_MOVE_REACHES, EVEN_MOVE_STARTS, EVEN_MOVE_ASKED } even_move_stage;

typedef struct even_move {
  even_move_stage stage;
  char from[EVEN_HOSTS_NAME]; /* the host that is drained */
  char plan[400];             /* to be said to who typed the command; "": it was */
  int64_t number;             /* of this draining, which its answers repeat */
  bool warm;                  /* processes are started beforehand */
  uint64_t since_ns;          /* of the stage */
  even_error failure;         /* of a new host; EVEN_OK: none */
  /* Of the attempt that follows, as its processes have been told. */
  int port;
  even_port_held port_held; /* until the attempt begins */
  int attempt;
  int era;
} even_move;

/* Whether one is under way, and the training has not been asked to end yet. */
bool even_move_prepares(const even_job *job);
/* The command, whose words are "to" (a list of {"host","ranks"}), "stay" (no rank goes elsewhere) and "cold". While
 * another one is under way it is kept until that is done (drain_queue.h). */
even_status even_move_begin(even_job *job, even_host_agent *from, const json_t *command) EVEN_MUST_USE;
/* About ten times a second, while an attempt runs. */
void even_move_tick(even_job *job);
/* A host says what it is asked (PLACED). What is wrong with that ends the draining, not the host. */
void even_move_hear(even_host_agent *agent, const json_t *content);
/* A host that is reached for it cannot be had, for the last error. */
void even_move_failed(even_hosts *hosts);
/* Between two attempts: one that has not come so far is given up. */
void even_move_settle(even_job *job);
/* The hosts have changed: what was prepared holds from now on. */
void even_move_done(even_hosts *hosts);
/* Ranks that a host has in the next attempt, once the training was asked to save its state for it; before, and where
 * nothing shall change, those of this one. 0: this host. */
size_t even_move_ranks(const even_job *job, size_t host);

#endif
