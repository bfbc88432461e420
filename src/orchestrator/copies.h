/* Copies of checkpoints on other hosts while training goes on, so that the loss of this host, or of its disk, loses no
 * more than what came since: on their disks (--checkpoint-copies N: each whole one that the job writes, under the same
 * path), and in their memory (--checkpoint-memory K: the newest, whether that lies in this host's memory or on its
 * disk). A host keeps the newest that is whole there; the one before until that is. */
#ifndef EVEN_ORCHESTRATOR_COPIES_H
#define EVEN_ORCHESTRATOR_COPIES_H

#include "orchestrator/job.h"

typedef struct even_copies even_copies;

/* Of the leader: looks whether there is a new one, and sends it where the last is there. Several times a second. */
void even_copies_tick(even_job *job);
/* The job has ended: says what was sent, where anything was. */
void even_copies_tell(even_job *job);
void even_copies_close(even_copies *copies);

#endif
