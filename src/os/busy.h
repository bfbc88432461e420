/* Busy neighbours: processes that take a given part of a CPU's time from whoever else runs there. */
#ifndef EVEN_OS_BUSY_H
#define EVEN_OS_BUSY_H

#include <evenstep/status.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { EVEN_BUSY_MOST = 31 };

/* How many neighbours, each of which `nice`, leave one thread beside them about `fraction` (0 < f < 1) of a CPU.
 * The scheduler shares by weight: 1024 at nice 0, divided by 1.25 a step (kernel/sched/core.c). */
int even_busy_plan(double fraction, int *nice);
/* Starts them, pinned to `cpu`, each in a session of its own, killed when the calling thread ends. All have taken their
 * place when it returns; one that cannot is an error. pids[EVEN_BUSY_MOST]; *count of them run, also after a failure.
 */
even_status even_busy_start(int32_t cpu, double fraction, pid_t *pids, size_t *count) EVEN_MUST_USE;

#endif
