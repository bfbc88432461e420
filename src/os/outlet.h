/* Output to a reader that may pause: text is taken at once and written by a thread of its own, so that whoever prints
 * never stands in write(2). What does not fit any more is refused, never waited for longer than the caller said. */
#ifndef EVEN_OS_OUTLET_H
#define EVEN_OS_OUTLET_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct even_outlet even_outlet;

/* An outlet to `fd` (the caller's, left open, its flags untouched) that holds at most `limit_bytes` not yet written. */
even_status even_outlet_open(int fd, size_t limit_bytes, even_outlet **out) EVEN_MUST_USE;
/* Takes all of the text, or nothing of it: false when there is no room, also after `patience_ns` in which the reader
 * was waited for. A file whose disk is full is a reader that pauses. One that is gone for good takes everything. One
 * thread calls. */
bool even_outlet_add(even_outlet *outlet, const char *text, size_t length, uint64_t patience_ns);
/* Bytes taken that the kernel has not taken yet. */
size_t even_outlet_waiting(even_outlet *outlet);
/* Waits until all is written, at most `patience_ns`; whether it is. */
bool even_outlet_drain(even_outlet *outlet, uint64_t patience_ns);
/* Ends an outlet that has drained. One whose reader still pauses is left to the end of the process: nothing ends a
 * write that another thread stands in. NULL is allowed. */
void even_outlet_close(even_outlet *outlet);

/* Whether both descriptors lead to the same file, pipe or terminal. */
bool even_outlet_same(int one, int other);

#endif
