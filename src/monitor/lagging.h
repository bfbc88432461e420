/* Ranks that become slower than they were while the run lives, and catch up again (balancer/lag.h): each is an event
 * when it begins and one when it ends, with its cause, in the state, the history, and for the terminal. */
#ifndef EVEN_MONITOR_LAGGING_H
#define EVEN_MONITOR_LAGGING_H

#include "base/json_writer.h"
#include "monitor/parts.h"

typedef struct even_lagging even_lagging;

/* All with the lock held, or where the server does not run. */

/* From which factor, and after how many seconds, a rank is told: 0: as balancer/lag.h has it. */
even_status even_lagging_open(int ranks, double factor, double seconds, even_lagging **out) EVEN_MUST_USE;
/* There are more ranks from now on, beside those that run: what lasts with these goes on. EVEN_ERR_MEMORY. */
even_status even_lagging_grow(even_lagging *lagging, int ranks) EVEN_MUST_USE;
/* NULL is allowed. */
void even_lagging_close(even_lagging *lagging);
/* A rank's step. */
void even_lagging_step(even_monitor *monitor, int rank, const even_step_record *record);
/* In each tick. `looked`: the ranks' usage was just looked at, so that causes may be seen. */
void even_lagging_look(even_monitor *monitor, uint64_t now_ns, bool looked);
/* Whether it is told to be slower than it was, and is. */
bool even_lagging_lasts(const even_monitor *monitor, int rank);
/* The rank's process has ended, or another one begins: what lasted is over. */
void even_lagging_end(even_monitor *monitor, int rank);
void even_lagging_end_all(even_monitor *monitor);

/* Of a history that is gone on with: the last steps tell what is usual, and stragglers of this attempt that were told
 * as lasting do so on; the others are over. How many last. */
int even_lagging_go_on(even_monitor *monitor);

/* "rank 1 (cpu:1 on there) was 3.1x slower from step 120 to 480 (12 s): CPU quota" */
void even_lagging_words(const even_state_straggler *told, char *out, size_t bytes);
/* Two blanks before each; the last few of many. */
void even_lagging_lines(const even_state *state, even_text *out);
/* A member "stragglers": [{attempt, rank, host, device, cause, factor, begin_step, begin_seconds, end_step,
 * end_seconds, lasts, words}]: the last 64. */
void even_lagging_json(even_json *json, const even_state *state);

#endif
