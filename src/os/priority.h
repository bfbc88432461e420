/* Being heard soon where others compute: a thread that hardly works, and must act at once when it is woken. */
#ifndef EVEN_OS_PRIORITY_H
#define EVEN_OS_PRIORITY_H

#include <stdbool.h>

/* Gives the calling thread a greater weight (nice -10), which no process or thread that it starts has
 * (SCHED_RESET_ON_FORK). False, and nothing is changed, where that is not permitted (sched(7): CAP_SYS_NICE,
 * RLIMIT_NICE), or somebody has chosen a priority for it already. */
bool even_priority_raise(void);
/* Takes it back; where the former returned true. */
void even_priority_lower(void);

#endif
