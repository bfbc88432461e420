/* Memory that processes of one host share. Segments are memfds, or files without a name where there are none:
 * the kernel frees them with the last process that holds them, whatever its end. */
#ifndef EVEN_OS_SHARED_MEMORY_H
#define EVEN_OS_SHARED_MEMORY_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct even_shared_memory {
  int fd;        /* -1 when not open */
  void *address; /* page-aligned, NULL when not mapped */
  size_t bytes;
} even_shared_memory;

/* A new zeroed segment, mapped read-write, its fd close-on-exec, its size sealed. `label` shows in /proc.
 * Pages are taken when first written. Where the kernel gives no memfd it is a file, all of it taken at once
 * (shared_file.h). Errors: EVEN_ERR_NO_SPACE, _MEMORY, _PERMISSION, _SYSTEM. */
even_status even_shared_memory_create(const char *label, size_t bytes, even_shared_memory *out) EVEN_MUST_USE;
/* A segment of no bytes, whose size is open: even_shared_memory_grow. */
even_status even_shared_memory_begin(const char *label, even_shared_memory *out) EVEN_MUST_USE;
/* The same of one that another process began; owns the fd from then on, also on failure. */
even_status even_shared_memory_take(int fd, even_shared_memory *out) EVEN_MUST_USE;
/* Maps at least `bytes` of a segment that was begun, or taken; where it lies may change, what it holds stays. Who has
 * it mapped elsewhere sees as much as it had. On failure it is not mapped, or as it was. */
even_status even_shared_memory_grow(even_shared_memory *memory, size_t bytes) EVEN_MUST_USE;
/* How large the segment behind `fd` is. */
even_status even_shared_memory_bytes(int fd, size_t *bytes) EVEN_MUST_USE;
/* Whether `fd` is open and a segment of that label. */
bool even_shared_memory_has_label(int fd, const char *label);
/* Whether the memory behind `fd` is a file, for lack of a memfd (shared_file.h): then its folder. */
bool even_shared_memory_is_file(int fd, char *folder, size_t bytes);
/* Maps the segment behind `fd` (whole), and owns the fd from then on, also on failure. */
even_status even_shared_memory_adopt(int fd, even_shared_memory *out) EVEN_MUST_USE;
/* The same for a duplicate of `fd`: the caller keeps its own. */
even_status even_shared_memory_duplicate(int fd, even_shared_memory *out) EVEN_MUST_USE;
/* Maps segment `fd` of process `pid` through /proc. EVEN_ERR_PERMISSION where it is not this user's. */
even_status even_shared_memory_open_peer(pid_t pid, int fd, even_shared_memory *out) EVEN_MUST_USE;
/* Calls `each` for every segment with that label that process `pid`, of the same user, holds, with a descriptor of it
 * (closed after the call) and what tells segments apart, until it returns false. */
even_status even_shared_memory_each(pid_t pid, const char *label,
                                    bool (*each)(void *context, int fd, uint64_t identity),
                                    void *context) EVEN_MUST_USE;
/* What it holds is this process's own from here on, at the same address, and nobody else's. `was` is the segment,
 * mapped elsewhere: for a last word to the others; close it. On failure it is shared as before, and `was` is not open.
 * `said_at`: where in the segment the others see how many bytes are copied, a uint64_t, which is nothing but that. */
even_status even_shared_memory_leave(even_shared_memory *memory, size_t said_at, even_shared_memory *was) EVEN_MUST_USE;
/* Writes through `fd` begin at the segment's start again. */
void even_shared_memory_rewind(const even_shared_memory *memory);
void even_shared_memory_close(even_shared_memory *memory);

#endif
