/* Lack of memory in another process: a limit on its address space (RLIMIT_AS). */
#ifndef EVEN_OS_MEMORY_LIMIT_H
#define EVEN_OS_MEMORY_LIMIT_H

#include <evenstep/status.h>
#include <stdint.h>
#include <sys/types.h>

/* From now on the process gets no more than `room_bytes` beside what it has; *before is what its limit was. Errors:
 * EVEN_ERR_NOT_FOUND (no such process), EVEN_ERR_PERMISSION, EVEN_ERR_SYSTEM. */
even_status even_memory_limit_set(pid_t pid, uint64_t room_bytes, uint64_t *before) EVEN_MUST_USE;
/* Its limit as it was. One that has ended is fine. */
even_status even_memory_limit_restore(pid_t pid, uint64_t before) EVEN_MUST_USE;

#endif
