/* A whole folder gets the name of a checkpoint, also where another one has it. */
#ifndef EVEN_CHECKPOINT_PLACING_H
#define EVEN_CHECKPOINT_PLACING_H

#include <evenstep/status.h>
#include <stdbool.h>

/* Behind the name of a whole checkpoint that is being replaced, where two folders cannot be swapped in one step. After
 * a cut it may be the only one: who looks for checkpoints takes it for one, and the next writer gives it its name back.
 */
#define EVEN_CHECKPOINT_REPLACED ".evenstep.replaced"

/* `partial`, whole and synced, becomes `folder`, which is another checkpoint; that one has the name `partial` then
 * (*older_here), or is another writer's to remove: whatever is called `partial` from then on is not the caller's. On
 * failure `folder` is one of the two, or the older one has the name above; `partial` is as it was. */
even_status even_placing_replace(const char *partial, const char *parent, const char *folder,
                                 bool *older_here) EVEN_MUST_USE;
/* Ends a replacement of `folder` that was cut short: the older one gets its name back where that is free, and goes
 * where the newer one has it. Nothing where there is none, or it is another user's. */
even_status even_placing_settle(const char *folder) EVEN_MUST_USE;

/* The name of `folder` with `end` behind it, as a string of the caller's (even_free). */
even_status even_placing_name(const char *folder, const char *end, char **out) EVEN_MUST_USE;

#endif
