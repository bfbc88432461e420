/* The C stacks of this process's own threads: each is asked by a signal to take its own, another thread writes them
 * down. For a process that hangs: nothing here waits for a lock that it may hold, but for what backtrace(3) and
 * dladdr(3) take themselves (the loader's, while a library is loaded). */
#ifndef EVEN_OS_THREAD_STACKS_H
#define EVEN_OS_THREAD_STACKS_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A real-time signal that nobody handles, with a handler that does nothing from now on, so that it can never end the
 * process. EVEN_ERR_IN_USE: all are taken. */
even_status even_signal_reserve(int *number) EVEN_MUST_USE;
/* Has this thread, which takes no other, receive the signal now, where somebody handles it. */
void even_signal_raise_here(int number);

/* Installs the handler, on a signal of even_signal_reserve. Once a process; EVEN_ERR_UNSUPPORTED where libc has no
 * backtrace(3). */
even_status even_thread_stacks_open(void) EVEN_MUST_USE;
/* Appends the stacks of all threads but the calling one to the NUL-terminated `text` of `*length`, up to `bytes`; waits
 * for `limit_ns` at most until they have taken them. Threads that block the signal, do not answer, or are more than 128
 * are named without one. The threads' system calls are restarted (SA_RESTART), but for those that never are (signal(7):
 * poll, nanosleep …), which end with EINTR. One thread at a time; takes no memory. */
void even_thread_stacks_write(char *text, size_t bytes, size_t *length, uint64_t limit_ns);

#endif
