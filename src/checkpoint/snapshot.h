/* A whole checkpoint in memory, laid out as its files will be, in a segment that may outlive the process that filled
 * it: whoever holds the segment writes it to the disk. */
#ifndef EVEN_CHECKPOINT_SNAPSHOT_H
#define EVEN_CHECKPOINT_SNAPSHOT_H

#include "base/text.h"

#include <evenstep/checkpoint.h>
#include <stdbool.h>

#define EVEN_SNAPSHOT_LABEL "evenstep-snapshot" /* of the memory file, as /proc shows it */

/* Whether something lies in the memory file `fd` that the process that took it had not written. True also where that
 * cannot be seen: even_snapshot_finish says why. */
bool even_snapshot_is_left(int fd);
/* Writes what lies in the memory file `fd` (it stays the caller's) and was not written by the process that took it,
 * which has ended: its folder is put into *folder, which stays empty where there is nothing to write. A checkpoint that
 * has its name already is left as it is. Errors: EVEN_ERR_CORRUPT (no snapshot), those of the writer; one that failed
 * stays in memory. */
even_status even_snapshot_finish(int fd, even_text *folder) EVEN_MUST_USE;

#endif
