/* The live view of a run in a terminal. */
#ifndef EVEN_MONITOR_VIEW_H
#define EVEN_MONITOR_VIEW_H

#include "monitor/state.h"

/* Lines of at most `columns` characters, each ended by a newline. */
void even_view_draw(even_state *state, uint64_t now_ns, int columns, bool colour, even_text *out);

#endif
