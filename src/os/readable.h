/* Waiting for a descriptor. */
#ifndef EVEN_OS_READABLE_H
#define EVEN_OS_READABLE_H

#include <stdint.h>

/* Returns once there is something to read at `fd`, after limit_ns (rounded up to a millisecond), or after a signal. */
void even_readable_wait(int fd, uint64_t limit_ns);

#endif
