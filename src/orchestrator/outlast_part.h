/* What an agent that serves a leader leaves besides (outlast.h), so that the one that is started in its place, where
 * it is killed, serves the same leader with the same ranks: its part of the attempt in words (follower_resume.c), how
 * far the ranks' telemetry was passed on, and the connection.
 *
 * The connection is kept open, and read by nobody: that its other end hears nothing of the agent's end is what tells
 * the leader that another one may come. Where none does, the process that keeps it lets it go, or ends itself, and the
 * connection closes, as it would have at once; else the leader waits as for an agent that stands still
 * (even_link_silence_ns). Who comes greets over a connection of its own, and the leader has the host by that one then
 * (outlast_hosts.c); the old one is let go once it has said so. */
#ifndef EVEN_ORCHESTRATOR_OUTLAST_PART_H
#define EVEN_ORCHESTRATOR_OUTLAST_PART_H

#include "base/text.h"
#include "os/custody.h"
#include "os/shared_memory.h"

#include <evenstep/telemetry.h>

/* Connections that are kept at a time: of agents that were killed one after the other before the leader knew them. */
enum { EVEN_OUTLAST_LINKS = 4 };

typedef struct even_outlast_part {
  even_shared_memory memory;
  int links[EVEN_OUTLAST_LINKS]; /* of agents before this one, -1: none */
} even_outlast_part;

void even_outlast_part_open(even_outlast_part *out);
void even_outlast_part_close(even_outlast_part *part);

/* Has these words kept, in place of those before; what was passed on stays noted. */
even_status even_outlast_part_leave(even_outlast_part *part, even_custody *custody, const even_text *words,
                                    size_t ranks) EVEN_MUST_USE;
/* What the agent before has left: *words live as long as `part` is open. EVEN_ERR_STATE: nothing that is whole. */
even_status even_outlast_part_take(even_outlast_part *part, even_custody *custody, const char **words) EVEN_MUST_USE;

/* All that the reader has handed out was passed on; `reader` NULL: there is none. */
void even_outlast_part_note(even_outlast_part *part, const even_telemetry_reader *reader);
/* The reader goes on from there. */
void even_outlast_part_go_on(const even_outlast_part *part, even_telemetry_reader *reader);

/* There is another connection to the leader, which is kept beside those before, */
even_status even_outlast_part_link(even_outlast_part *part, even_custody *custody, int fd) EVEN_MUST_USE;
/* and it is the one by which the leader knows this host: those before are not kept any more. */
even_status even_outlast_part_known(even_outlast_part *part, even_custody *custody) EVEN_MUST_USE;
/* It has ended, and this agent lives: none is kept. */
even_status even_outlast_part_unlink(even_outlast_part *part, even_custody *custody) EVEN_MUST_USE;

#endif
