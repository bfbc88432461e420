/* A disk whose power is cut: what was written through the table of calls (os/calls.h) since the model began, and what
 * of it a disk may hold if the power goes at a call.
 *
 * A file holds what it held at its last fsync, or anything between that and what was written since: the kernel writes
 * back when it likes, in any order, and tears. So each block is of now, or of then (zeros where there was none), and
 * the length is either. A folder's changes since its last fsync are there up to any of them; or any of them are, each
 * whole, but none without those before it of the same names. Folders are independent of each other. */
#ifndef EVEN_TESTS_CHECKPOINT_DISK_MODEL_H
#define EVEN_TESTS_CHECKPOINT_DISK_MODEL_H

#include <stdbool.h>

/* What the file system says of itself: that it gains by writes past the page cache; that it is another host's, and
 * cannot swap folders; that it shares extents, and gains by such writes, as XFS. */
typedef enum disk_kind { DISK_USUAL, DISK_DIRECT, DISK_NFS, DISK_SHARING } disk_kind;

/* Watches all calls below `root` from now on; what lies there now counts as safe. The root must hold folders and files
 * alone. */
void disk_model_begin(const char *root, disk_kind kind);
/* All calls are real again. */
void disk_model_end(void);
/* How many calls changed or synced something since disk_model_begin. */
long disk_model_calls(void);
/* Called before each such call and once after the last by disk_model_end. */
extern void (*disk_model_before)(long call);

typedef enum disk_outcome { DISK_SAFE_ONLY, DISK_ALL, DISK_MIXED } disk_outcome;

/* Makes the folder `into`, which must not exist, as the root may be found after a cut at this moment. `seed`: which of
 * the mixed ones. */
void disk_model_cut(const char *into, disk_outcome outcome, unsigned seed);

#endif
