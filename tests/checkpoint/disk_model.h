/* A disk whose power is cut: what was written through the table of calls (os/calls.h) since the model began, and what
 * of it a disk may hold if the power goes at a call.
 *
 * A file holds what it held at its last fsync, or anything between that and what was written since (the kernel writes
 * back when it likes, in any order, and tears). A folder's changes are there in the order in which they were made, up
 * to any of them, at least up to its last fsync; folders are independent of each other. */
#ifndef EVEN_TESTS_CHECKPOINT_DISK_MODEL_H
#define EVEN_TESTS_CHECKPOINT_DISK_MODEL_H

#include <stdbool.h>

/* Watches all calls below `root` from now on; what lies there now counts as safe. The root must hold folders of files
 * alone. direct: it says that it gains by writes past the page cache. */
void disk_model_begin(const char *root, bool direct);
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
