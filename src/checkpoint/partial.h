/* The folder in which a checkpoint grows: locked while its writer lives, removed when it does not. */
#ifndef EVEN_CHECKPOINT_PARTIAL_H
#define EVEN_CHECKPOINT_PARTIAL_H

#include <evenstep/status.h>

/* Makes and locks folder `partial`, in place of one that a dead writer left. *lock is -1 where the file system has no
 * locks. EVEN_ERR_IN_USE where a living writer has it. */
even_status even_partial_make(const char *partial, int *lock) EVEN_MUST_USE;
/* Removes the unfinished checkpoints of dead writers in `parent`. Only those of this
 * user: a folder may be shared. What cannot be removed stays for the next time. Keeps the thread's last error. */
void even_partial_sweep(const char *parent);

#endif
