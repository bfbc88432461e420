/* Another program (srun, mpirun, Kubernetes) has started this one once on each host of a job: which place this process
 * has among them, and how the others are found. */
#ifndef EVEN_ORCHESTRATOR_LAUNCHED_H
#define EVEN_ORCHESTRATOR_LAUNCHED_H

#include "base/text.h"
#include "orchestrator/hostlist.h"
#include "os/tls.h"

#include <stdbool.h>

enum { EVEN_KEY_DIGITS = 2 * EVEN_TLS_KEY_BYTES };

typedef struct even_launched {
  const char *by; /* "Slurm", "Open MPI", …: a static string */
  int place;      /* of this process, from 0; that of 0 leads */
  int count;
  char job[96];        /* what all of them, and no others, call their job; "": nobody gave it a name */
  bool returns;        /* a process that ended may be started again */
  even_hostlist hosts; /* their names in order, as far as they are known: empty, or `count` */
} even_launched;

/* From the environment, asked for by `variable` (getenv): EVENSTEP_HOST_RANK, Open MPI's, PMI's, Slurm's.
 * EVEN_ERR_USAGE: nothing of that is there, or no place that could be, or that of a shell of srun's (--pty), which has
 * no others. Free it with even_launched_free, also after a
 * failure. */
even_status even_launched_find(char *(*variable)(const char *name), even_launched *out) EVEN_MUST_USE;
void even_launched_free(even_launched *launched);
/* Takes what was said to this process alone out of its environment: its ranks are none of the launcher's. */
void even_launched_forget(void);

/* The key that the user gave to all hosts, from EVENSTEP_JOB_KEY (which is taken out of the environment) or the file
 * that EVENSTEP_JOB_KEY_FILE names; "" where there is neither. EVEN_ERR_INPUT: it is none; EVEN_ERR_PERMISSION: others
 * may read the file. */
even_status even_job_key_read(char digits[EVEN_KEY_DIGITS + 1]) EVEN_MUST_USE;

/* ---- where they meet ---- */

typedef struct even_rendezvous {
  even_text path;    /* of a file that the leader writes and the others read; "": none */
  char address[256]; /* or name of the leader, where no file is needed; "": there is one */
  int port;
} even_rendezvous;

/* `where`: "10.0.0.1:7000", "trainer-0.jobs:7000", else a folder that all hosts see. EVEN_ERR_USAGE: an address that is
 * none, or one without a key that all have. */
even_status even_rendezvous_open(const char *where, const even_launched *launched, bool has_key,
                                 even_rendezvous *out) EVEN_MUST_USE;
void even_rendezvous_free(even_rendezvous *rendezvous);
/* The leader: before it says anything. EVEN_ERR_IN_USE: a job that has no name finds another one's file. */
even_status even_rendezvous_check(const even_rendezvous *rendezvous, const even_launched *launched) EVEN_MUST_USE;
/* Writes the leader's words there, for its user alone, whole or not at all. `unnamed`: a file that is there is not
 * replaced. EVEN_ERR_IN_USE: there is one. */
even_status even_rendezvous_write(const char *path, const even_text *words, bool unnamed) EVEN_MUST_USE;
/* Removes it; what holds other words is another job's, and stays. */
even_status even_rendezvous_remove(const char *path, const even_text *words) EVEN_MUST_USE;
/* The invitation for this process, one line; `key`: "" where it is in the file. EVEN_ERR_NOT_FOUND: the leader has not
 * written the file yet, or its name has no address yet. EVEN_ERR_PERMISSION: others could have. */
even_status even_rendezvous_read(const even_rendezvous *rendezvous, const even_launched *launched, const char *key,
                                 even_text *out) EVEN_MUST_USE;

#endif
