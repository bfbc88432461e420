/* The folder in which a checkpoint grows: locked while its writer lives, removed when it does not. */
#ifndef EVEN_CHECKPOINT_PARTIAL_H
#define EVEN_CHECKPOINT_PARTIAL_H

#include <evenstep/status.h>

typedef struct even_partial {
  char *path; /* NULL: there is none */
  int lock;   /* of the folder; -1: none */
  int sign;   /* the file in it by which other hosts may see that its writer lives; -1: none */
} even_partial;

#define EVEN_PARTIAL_NONE ((even_partial){.path = NULL, .lock = -1, .sign = -1})

/* Makes and locks the folder in which the checkpoint `folder` grows, in place of one that a dead writer left. Where the
 * writer of one that is there may live on another host, it gets another name. EVEN_ERR_IN_USE where a writer that is
 * known to live has it. Give it back with even_partial_free. */
even_status even_partial_make(const char *folder, even_partial *out) EVEN_MUST_USE;
/* The same, empty: for a folder that is to be renamed there. */
even_status even_partial_reserve(const char *folder, even_partial *out) EVEN_MUST_USE;
/* EVEN_ERR_STATE where it is not the caller's any more, having been taken for a dead writer's (where no locks reach,
 * after ten minutes without a sign of life): another's may have the name. */
even_status even_partial_check(const even_partial *partial) EVEN_MUST_USE;
/* All that belongs into it is: takes away what does not. Errors as above. */
even_status even_partial_complete(even_partial *partial) EVEN_MUST_USE;
/* The folder has another name now, or is another one: nobody's work. */
void even_partial_release(even_partial *partial);
/* Removes the folder and releases; what cannot be removed the next writer's sweep does. */
void even_partial_discard(even_partial *partial);
void even_partial_free(even_partial *partial);

/* Removes the unfinished checkpoints of dead writers in `parent`, and ends replacements that were cut short
 * (placing.h). Only those of this user: a folder may be shared. own: a folder that was made there just now; its time
 * tells what time it is there. What cannot be removed stays for the next time. Keeps the thread's last error. */
void even_partial_sweep(const char *parent, const even_partial *own);

#endif
