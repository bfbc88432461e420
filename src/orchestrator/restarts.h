/* Which of a job's restarts count among --max-restarts: those in a row since it has last come further, that is, since
 * an attempt began from a checkpoint of a later step than any before. Pure. */
#ifndef EVEN_ORCHESTRATOR_RESTARTS_H
#define EVEN_ORCHESTRATOR_RESTARTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct even_restarts {
  int made;        /* of those that began for a failure so many count no more */
  int64_t since;   /* the furthest step that an attempt began, or may begin, from */
  int short_lived; /* attempts in a row that ended within a minute */
} even_restarts;

/* Of `made` restarts for a failure in the job's whole life those that count. */
int even_restarts_count(const even_restarts *restarts, int made);
/* The next attempt may begin from a checkpoint of this step: whether that is further than before; then the `made`
 * restarts until now count no more. A negative step is not known, and none is further. */
bool even_restarts_reach(even_restarts *restarts, int made, int64_t step);
/* "restart 1 of 3", of so many that are allowed in a row; where it is another one of the job's whole life: "restart 1
 * of 3, the 9th in all,". */
void even_restarts_name(const even_restarts *restarts, int made, int most, char *out, size_t bytes);
/* An attempt that lasted so long has failed: how long to wait before the next one. Nothing after the first in a row
 * that lasted less than a minute, then 1 s, 2 s, 4 s … up to a minute. */
uint64_t even_restarts_pause_ns(even_restarts *restarts, uint64_t lasted_ns);

#endif
