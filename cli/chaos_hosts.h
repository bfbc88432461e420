/* evenstep chaos on hosts of the user's own: a part of it runs on each other host, over the same way as the job's
 * agents, and does what it is asked (chaos_act.h) to processes there. It ends with the connection, and then lets go of
 * all that it holds. */
#ifndef EVEN_CLI_CHAOS_HOSTS_H
#define EVEN_CLI_CHAOS_HOSTS_H

#include "cli/chaos.h"
#include "cli/chaos_act.h"
#include "cli/job.h"
#include "os/dialogue.h"

#include <signal.h>

enum { EVEN_CHAOS_HOST_NAME = 256 };

/* One of the other hosts. */
typedef struct even_chaos_place {
  char name[EVEN_CHAOS_HOST_NAME];
  even_dialogue part;
  bool open;
  char why[160]; /* it is not any more */
} even_chaos_place;

/* A fault there that goes on for a while: lack of memory, a second process. */
typedef struct even_chaos_going {
  even_chaos_done *of; /* NULL: none */
  even_chaos_kind kind;
  int host;
  int number; /* there */
  int rank;
  pid_t pid;
  uint64_t until_ns;
  uint64_t asked_ns; /* last: not at each look, which is often */
} even_chaos_going;

enum { EVEN_CHAOS_MOST_GOING = 2 };

struct even_chaos_hosts {
  even_chaos_place *of;
  size_t count; /* of the others; as hosts they are 1 … count, this one is 0 */
  int ranks;    /* of all, as the list has it; 0: it does not say */
  even_chaos_going going[EVEN_CHAOS_MOST_GOING];
  bool pipes_ignored; /* SIGPIPE is, whichever of the parts is lost first */
  struct sigaction pipe_before;
};

/* The hosts of `--hosts a,b:2,…`, this one first; `ranks`: -n, 0 where that was not given. Close also after a failure.
 * EVEN_ERR_USAGE: that is no such list. */
even_status even_chaos_hosts_read(const even_job_options *options, int ranks, even_chaos_hosts *out) EVEN_MUST_USE;
/* Starts the parts, and waits until all have answered. EVEN_ERR_PEER_LOST: one cannot be reached, or has another
 * version of this program. */
even_status even_chaos_hosts_open(const even_job_options *options, even_chaos_hosts *hosts) EVEN_MUST_USE;
/* Ends the parts, which let go of what they hold first; they may be started again. The second forgets the hosts, too.
 */
void even_chaos_hosts_end(even_chaos_hosts *hosts);
void even_chaos_hosts_close(even_chaos_hosts *hosts);

/* On which host the rank is, by the history; 0: on this one, also where all are. */
int even_chaos_host_of(const even_chaos_job *job, int rank);
/* Whether the rank is on that host; also of --namespaces. */
bool even_chaos_rank_is_on(const even_chaos_job *job, int rank, int host);
/* How that host is called; also of --namespaces. Not of the first. */
const char *even_chaos_host_called(const even_chaos_job *job, int host);
/* Injects the fault under way, whose victim is on another host, or leaves it for later. */
even_status even_chaos_inject_there(even_chaos_job *job, const even_process_stat *rank) EVEN_MUST_USE;
/* The same of the agent of a host. Whether it was killed; `words`: which one. */
bool even_chaos_kill_agent_there(even_chaos_job *job, int host, char *words, size_t bytes);
/* SIGKILL to the rank, wherever it is: whether it was sent. */
bool even_chaos_kill_victim(even_chaos_job *job, const even_process_stat *rank);
/* Whether a process of the job lives on another host. */
bool even_chaos_lives_there(const even_chaos_job *job, int host, pid_t pid);
/* Whether a second process of a rank runs anywhere. */
bool even_chaos_has_twin(const even_chaos_job *job);
/* At each look: what is over; `all`: everything is. */
void even_chaos_hosts_relent(even_chaos_job *job, bool all);

/* ---- the part itself (chaos_part.c) ---- */

/* Reads acts on standard input until it ends, and answers. Returns the exit code. */
int even_chaos_serve(void);

/* Does the act at once, as the job without a history has it that stands for this host. */
even_status even_chaos_part_act(even_chaos_job *job, const even_chaos_act *act, even_chaos_answer *out) EVEN_MUST_USE;
/* A job for that; close it also after a failure, which lets go of everything. */
even_status even_chaos_part_open(even_chaos_job *out) EVEN_MUST_USE;
void even_chaos_part_close(even_chaos_job *job);

#endif
