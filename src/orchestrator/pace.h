/* How fast a job's attempts follow one another: one that fails early, again and again, is not started again at once. */
#ifndef EVEN_ORCHESTRATOR_PACE_H
#define EVEN_ORCHESTRATOR_PACE_H

#include "orchestrator/job.h"

/* An attempt begins. */
void even_pace_begin(even_job *job);
/* It has failed, and another one follows: after which pause (even_restarts_pause_ns), which is told. */
void even_pace_restart(even_job *job);
/* Waits for as long. The other hosts are heard. Nothing of an attempt runs. EVEN_ERR_INTERRUPTED: the user ends the job
 * meanwhile, and the signal is still pending; or this machine's end is announced (`draining`). The error says nothing.
 */
even_status even_pace_wait(even_job *job) EVEN_MUST_USE;

#endif
