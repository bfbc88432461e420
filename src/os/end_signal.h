/* SIGTERM to all processes of a job, as schedulers send it (scancel, preemption, srun --signal), which ends the
 * program that has started them, and not them at once. */
#ifndef EVEN_OS_END_SIGNAL_H
#define EVEN_OS_END_SIGNAL_H

#include <evenstep/status.h>
#include <stdbool.h>

/* From now on SIGTERM ends this process, and those that it forks, only where its parent sends it, or it does
 * itself, or who speaks for its parent (even_process_signal_as_parent). A handler of its own, or that it is ignored, is
 * left as it is, unless `always`. Programs that it executes begin with the default again. */
even_status even_end_signal_hold(bool always) EVEN_MUST_USE;

#endif
