/* The collective in which a process waits, or its last one, by the flight records of its groups (evenstep/flight.h):
 * of a process of this host, in groups that keep a record. */
#ifndef EVEN_ORCHESTRATOR_LAST_CALL_H
#define EVEN_ORCHESTRATOR_LAST_CALL_H

#include <evenstep/flight.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

typedef struct even_last_call {
  bool known; /* else all is zero */
  bool waits; /* it is in that collective; else in none that is known, and this one began last */
  int ranks;  /* of the group */
  even_flight_call call;
  char reached[400]; /* what each rank of the group reached, as far as is known here (even_flight_summary) */
} even_last_call;

void even_last_call_read(pid_t pid, even_last_call *out);
/* "call 17 (all_reduce of 1000 F32 elements with SUM) of a group of 4 ranks, at train.py:41"; "" where none is known.
 */
void even_last_call_describe(const even_last_call *last, char *text, size_t bytes);

#endif
