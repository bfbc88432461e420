/* Copies of checkpoints on other hosts (--checkpoint-copies N): each whole one that the job writes is sent to N of them
 * while training goes on, and lies there under the same path, so that the loss of this host's disk, or of this host,
 * loses no more than what came since. A host keeps the newest that is whole there; the one before until that is. */
#ifndef EVEN_ORCHESTRATOR_COPIES_H
#define EVEN_ORCHESTRATOR_COPIES_H

#include "orchestrator/job.h"

typedef struct even_copies even_copies;

/* Of the leader: looks whether there is a new one, and sends it where the last is there. Several times a second. */
void even_copies_tick(even_job *job);
void even_copies_close(even_copies *copies);

#endif
