/* Links that are slow: each is an event when it begins and one when it ends, in the state, the history, and for the
 * terminal. */
#ifndef EVEN_MONITOR_SLOW_LINKS_H
#define EVEN_MONITOR_SLOW_LINKS_H

#include "monitor/links.h"
#include "monitor/parts.h"

/* All with the lock held, or where the server does not run. */

/* Once a second. */
void even_slow_links_look(even_monitor *monitor, uint64_t now_ns);
/* Other processes are about to meet, or the run ends: what lasted is over. */
void even_slow_links_end(even_monitor *monitor);

#endif
