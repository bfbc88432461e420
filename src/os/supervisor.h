/* A process that starts another one, of this same program, and waits for its end in its stead: whoever started the
 * first keeps one process to wait for and to signal, whatever becomes of the second, which can be started anew. */
#ifndef EVEN_OS_SUPERVISOR_H
#define EVEN_OS_SUPERVISOR_H

#include "os/custody.h"
#include "os/process.h"
#include "os/signals.h"

#include <evenstep/status.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct even_supervisor {
  even_signals signals;
  even_custody custody; /* of what its child leaves to the next one; in a child: what it was left */
  uint64_t limit;       /* the soft limit on open files that its children begin with; 0: as this one's */
  pid_t child;          /* -1: none */
  int asked;            /* the first of INT, TERM and HUP that has come, 0: none */
  uint64_t missed;      /* which came while there was no child: the next one is told (a bit each) */
} even_supervisor;

/* From now on signals are watched, and orphans below this process are its own to reap. Of a process with one thread,
 * and no children. */
even_status even_supervisor_open(even_supervisor *out) EVEN_MUST_USE;
/* Forks: *is_child true in the new process, which goes on where it was called, in the same session and group. It is
 * killed when its parent ends; the signals that jobs handle are blocked in it (even_signals_block), and those that
 * reach both count once there. */
even_status even_supervisor_start(even_supervisor *supervisor, bool *is_child) EVEN_MUST_USE;
/* Passes on to the child what comes, and tells it how those end that it watches, until it has ended. */
even_status even_supervisor_wait(even_supervisor *supervisor, even_process_end *end) EVEN_MUST_USE;
/* Keeps nothing any more of what the child has left, and waits until all processes that it has left behind have ended,
 * too, at most `limit_ns`: *clear says whether they have. */
even_status even_supervisor_clear(even_supervisor *supervisor, uint64_t limit_ns, bool *clear) EVEN_MUST_USE;
/* Waits so long, or until it is asked to end. */
even_status even_supervisor_pause(even_supervisor *supervisor, uint64_t pause_ns) EVEN_MUST_USE;
/* Of the parent. A child that lives still lives on until this process ends. */
void even_supervisor_close(even_supervisor *supervisor);

#endif
