/* Threads that stay out of the way of the program's signals. */
#ifndef EVEN_OS_THREAD_H
#define EVEN_OS_THREAD_H

#include <evenstep/status.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* Blocks all signals in the calling thread, so that threads started meanwhile (by a library too) take none. */
void even_thread_signals_block(sigset_t *before);
void even_thread_signals_restore(const sigset_t *before);
/* Starts a thread with all signals blocked: they go on to the threads that the program made. */
even_status even_thread_start(void *(*body)(void *), void *argument, pthread_t *out) EVEN_MUST_USE;
/* The number of this process, also in a child of a fork. */
pid_t even_own_process(void);
/* A number, never 0, that is another in each child that this process forks. Costs no call to the kernel. */
uint32_t even_process_mark(void);
/* Has each child that this process forks call it first; false where it will not (there is no memory). */
bool even_process_fork_calls(void (*call)(void));
/* Waits for the thread's end. */
void even_thread_join(pthread_t thread);

#endif
