/* Copies of checkpoints on other hosts while training goes on, so that the loss of this host, or of its disk, loses no
 * more than what came since: on their disks (--checkpoint-copies N: each whole one that the job writes, under the same
 * path), and in their memory (--checkpoint-memory K: the newest, whether that lies in this host's memory or on its
 * disk). A host keeps the newest that is whole there; the one before until that is. */
#ifndef EVEN_ORCHESTRATOR_COPIES_H
#define EVEN_ORCHESTRATOR_COPIES_H

#include "orchestrator/job.h"

typedef struct even_copies even_copies;

/* A copy on another host's disk. */
typedef struct even_copy {
  even_text host;
  even_text folder; /* there */
  even_text order;  /* info.order of it */
} even_copy;

/* Of the leader: looks whether there is a new one, and sends it where the last is there. Several times a second. */
void even_copies_tick(even_job *job);
/* The newest that this leader's agent has sent, valid until the next tick; NULL: it knows of none. What an agent or a
 * leader before it has sent it does not know, nor what a host had already: that may be the leader's own folder. */
const even_copy *even_copies_newest(even_job *job);
/* The order of what is on its way to hosts now, NULL: nothing is. `copies` NULL is allowed. */
const char *even_copies_coming(const even_copies *copies);
/* A restart goes on from another one, which takes its place there. */
void even_copies_forget(even_job *job);
/* The hosts are others, or have other numbers, from now on. NULL is allowed. */
void even_copies_renew(even_copies *copies);
/* The job has ended: says what was sent, where anything was. */
void even_copies_tell(even_job *job);
void even_copies_close(even_copies *copies);

#endif
