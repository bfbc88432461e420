/* The ranks' GPUs in the history, the state and the events. */
#ifndef EVEN_MONITOR_GPUS_H
#define EVEN_MONITOR_GPUS_H

#include "monitor/parts.h"

/* Begins to watch those that params names; none where there is no NVML. */
even_status even_monitor_gpus_open(even_monitor *monitor, const even_monitor_params *params) EVEN_MUST_USE;
/* What was sampled of a rank's GPU elsewhere; NULL: it has none. With the lock held. */
void even_monitor_gpu_told(even_monitor *monitor, int rank, const even_gpu_sample *sample);
/* Takes what was sampled and told since the last call. With the lock held. */
void even_monitor_gpus_look(even_monitor *monitor);

#endif
