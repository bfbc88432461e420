/* A history that outlives its agent: what the next one needs is kept with each batch, and taken from there. Records of
 * the rings are counted by their places in them, so that each comes once into state and history, whenever the agent was
 * killed. */
#ifndef EVEN_MONITOR_TAKEOVER_H
#define EVEN_MONITOR_TAKEOVER_H

#include "monitor/parts.h"

/* All with the lock held, or where the server does not run. */

/* Into the batch that is about to be committed: how far the rings were read, spans that are still being summed, and how
 * many records were lost; what has changed of it. */
void even_takeover_note(even_monitor *monitor);
/* A batch is lost: all is noted again with the next one. */
void even_takeover_note_again(even_monitor *monitor);

/* Opens the run's history to go on with it: the monitor's database, its state (in place of the one that it has; of a
 * history that takes too long to read, its beginning alone), its spans and rings stand where the last batch left them.
 * What the killed agent watched and told as lasting is watched on (stragglers, the loss), or told as over. An error
 * leaves the monitor as it was: EVEN_ERR_MEMORY, and those of even_database_continue and even_history_open. */
even_status even_takeover_open(even_monitor *monitor, const char *path, const even_database_limits *limits,
                               const even_monitor_params *params) EVEN_MUST_USE;

#endif
