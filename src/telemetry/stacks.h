/* The stacks of a rank, told when the agent asks: a thread of the rank's own sleeps on a page that both map, and needs
 * neither the interpreter's lock nor any that the rank's other threads may hold to write them there. */
#ifndef EVEN_TELEMETRY_STACKS_H
#define EVEN_TELEMETRY_STACKS_H

#include "base/text.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* ---- the rank's side ---- */
typedef struct even_stacks even_stacks;

/* Starts the thread. *signal and *fd: for whoever can write the stacks of an interpreter to a descriptor from a signal
 * handler, on whatever thread (Python: faulthandler.register); the signal has a handler that does nothing until then,
 * and is raised on the thread alone. The descriptor belongs to *out. Errors: those of memory, threads and signals. */
even_status even_stacks_open(int *signal, int *fd, even_stacks **out) EVEN_MUST_USE;
/* Ends the thread; NULL is allowed. Handlers stay. Not in a child of a fork. */
void even_stacks_close(even_stacks *stacks);

/* ---- the agent's side ---- */
typedef struct even_stacks_request {
  void *page; /* NULL: nothing is asked for */
  size_t bytes;
  uint32_t number;
} even_stacks_request;

/* Asks process `pid` of the same user for its stacks. EVEN_ERR_NOT_FOUND: it has no page. */
even_status even_stacks_ask(pid_t pid, even_stacks_request *out) EVEN_MUST_USE;
/* Whether they are there. */
bool even_stacks_told(const even_stacks_request *request);
/* Appends what has been told (nothing before that), with only printable characters; ends the request. */
void even_stacks_take(even_stacks_request *request, even_text *out);

#endif
