/* Whether long work should end early: whoever starts it says how to find out, for its own thread, and what takes long
 * asks now and then. */
#ifndef EVEN_BASE_STOP_H
#define EVEN_BASE_STOP_H

#include <stdbool.h>

/* From now on the calling thread's long work asks `asked`; NULL: it is never stopped (as at first). */
void even_stop_when(bool (*asked)(void));
/* Whether to stop: the work then fails with EVEN_ERR_INTERRUPTED. */
bool even_stop_asked(void);

#endif
