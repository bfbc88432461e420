/* What the kernel says of the threads of another process: for one that hangs and cannot tell itself. */
#ifndef EVEN_OS_PROCESS_THREADS_H
#define EVEN_OS_PROCESS_THREADS_H

#include "base/text.h"

#include <stdbool.h>
#include <sys/types.h>

/* Appends a line a thread of `pid` (128 at most): its name, state, where in the kernel it waits (wchan) and in what
 * system call, as far as /proc tells this user. A process that is gone adds nothing. */
void even_process_threads_describe(pid_t pid, even_text *out);
/* Whether it stands still, or a debugger or tracer holds it. */
bool even_process_is_held(pid_t pid);
/* CPU time of all processes of a session, and of the children that they have waited for; 0 where /proc cannot be read.
 */
double even_process_session_cpu(pid_t session);

#endif
