/* This host's memory for checkpoints (--checkpoint-memory): a folder of a memory file system that an agent has for
 * itself. What its ranks keep there outlives them, and it goes with the agent, however that ends. */
#ifndef EVEN_ORCHESTRATOR_HOST_MEMORY_H
#define EVEN_ORCHESTRATOR_HOST_MEMORY_H

#include "base/text.h"
#include "os/keeper.h"

#include <stdbool.h>

typedef struct even_host_memory {
  even_text folder; /* absolute */
  int lock;         /* by which another agent sees that this one lives; -1: the file system has no locks */
  even_keeper keeper;
} even_host_memory;

#define EVEN_HOST_MEMORY_PLACE "/dev/shm" /* or EVENSTEP_MEMORY_DIR */

/* Makes the folder, of mode 0700, and removes those of this user's agents that have died with all that would have.
 * Errors: those of the file system. Main thread. */
even_status even_host_memory_open(even_host_memory **out) EVEN_MUST_USE;
/* The one that an agent before had, which was killed: its lock (-1: none) and its keeper are this one's, also after a
 * failure. */
even_status even_host_memory_take(const char *folder, int lock, const even_keeper *keeper,
                                  even_host_memory **out) EVEN_MUST_USE;
/* Removes it. NULL is allowed. */
void even_host_memory_close(even_host_memory *memory);
/* Whether this path lies in it. NULL: in none. */
bool even_host_memory_has(const even_host_memory *memory, const char *path);

#endif
