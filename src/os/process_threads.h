/* What the kernel says of the threads of a process: of another one that hangs and cannot tell itself, and of this one.
 */
#ifndef EVEN_OS_PROCESS_THREADS_H
#define EVEN_OS_PROCESS_THREADS_H

#include "base/text.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* Appends a line a thread of `pid` (128 at most): its name, state, where in the kernel it waits (wchan) and in what
 * system call, as far as /proc tells this user. A process that is gone adds nothing. */
void even_process_threads_describe(pid_t pid, even_text *out);
/* Waits until no thread of this process that has this name (15 bytes at most; threads that it starts inherit it) runs,
 * is ready to, or waits for a disk: what it had to do is done, or waits for something else. Whether that was seen
 * within `limit_ns`, and before they used more than `busy_seconds` of CPU time: those are not about to rest. Where
 * /proc cannot be read, it is taken for seen. Any thread; the caller must hold nothing that such a thread may wait for.
 */
bool even_process_threads_rest(const char *name, uint64_t limit_ns, double busy_seconds);
/* Whether it stands still, or a debugger or tracer holds it. */
bool even_process_is_held(pid_t pid);
/* What processes have done since they began. */
typedef struct even_process_work {
  double cpu_seconds;
  double moved_bytes; /* read and written by calls (proc(5), io), read from storage for memory that is a file's, and
                         memory first touched: not every file system counts what it reads for that */
} even_process_work;

/* Of all processes of a session, and of the children that they have waited for; 0 where /proc cannot be read. What
 * comes by recv(2) is not among the bytes. */
even_process_work even_process_session_work(pid_t session);

#endif
