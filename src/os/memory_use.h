/* What memory this process holds, and how much more it may take: beside the host's memory, control groups limit it. */
#ifndef EVEN_OS_MEMORY_USE_H
#define EVEN_OS_MEMORY_USE_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stdint.h>

#include "os/cgroup.h"

/* Where to look, found once: the groups of a process stay the same. */
typedef struct even_memory_place {
  char root[EVEN_CGROUP_PATH];
  even_cgroup group; /* folder "": no control group has the memory controller here */
} even_memory_place;

typedef struct even_memory_use {
  uint64_t resident_bytes;           /* of this process, now */
  uint64_t peak_bytes;               /* the most since even_memory_peak_reset; where that fails, since its start */
  uint64_t available_bytes;          /* that it may take beside this, if nobody else does; without swapping */
  uint64_t limit_bytes;              /* what leaves the least of all: a control group's limit, or the host's memory */
  char limited_by[EVEN_CGROUP_PATH]; /* the folder of that group; "" for the host's memory */
  double free_part; /* the least that is free of the host's memory, and of each group's: all files that were read are */
} even_memory_use;

/* `root` is put before /proc and mount points ("" for this host). A host without control groups is no error. Errors:
 * EVEN_ERR_MEMORY, EVEN_ERR_OVERFLOW (a path that is too long). */
even_status even_memory_place_find(const char *root, even_memory_place *out) EVEN_MUST_USE;
/* From /proc/self/status, /proc/meminfo and the files of the group and those above it: memory.max, .current, .stat, and
 * for free_part .high, too (v2); memory.limit_in_bytes, .usage_in_bytes, .stat (v1). Files that were read and lie idle
 * in memory (inactive_file) count as available: the kernel drops them first. Some ten microseconds. Any thread. Errors:
 * EVEN_ERR_MEMORY, and those of reading /proc. */
even_status even_memory_use_read(const even_memory_place *place, even_memory_use *out) EVEN_MUST_USE;
/* Before much memory is taken that the kernel would give, and end a process for later: EVEN_ERR_MEMORY where this one
 * may not take `bytes` more and leave an eighth of what is free to others. `what` wants them, for the error, which
 * names the host, the bytes and what is free. `place`: NULL, found anew. Other errors are those of
 * even_memory_place_find and even_memory_use_read: nobody can say. Any thread. */
even_status even_memory_ask(const even_memory_place *place, uint64_t bytes, const char *what) EVEN_MUST_USE;
/* A new peak begins (proc(5): 5 to /proc/self/clear_refs). False where the kernel refuses. Any thread. */
bool even_memory_peak_reset(const even_memory_place *place);
/* Gives free memory that the allocator keeps back to the system (glibc's malloc_trim; elsewhere nothing). Any thread.
 */
void even_memory_give_back(void);
/* True: from now on memory that is freed stays with this process for what it allocates next. False: it goes back as
 * glibc gives it back by itself once it has seen large blocks. Of glibc's malloc alone: false where another allocator
 * or C library is at work, or refuses, and then nothing has changed. Any thread. */
bool even_memory_keep(bool keep);
/* Bytes of this process that are free in its allocator's heaps; 0 where it does not say (before glibc 2.33). */
uint64_t even_memory_kept_bytes(void);

#endif
