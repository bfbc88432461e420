/* An agent's way to the leader that started it, and wrote it a line: where it listens, and the job's key. */
#ifndef EVEN_ORCHESTRATOR_INVITATION_H
#define EVEN_ORCHESTRATOR_INVITATION_H

#include "orchestrator/link.h"

/* Reads the invitation, *host: the number of this one among the job's, and connects to the leader, whose addresses are
 * tried one by one; a leader that does not answer is tried again, for as long as the invitation says. `link` is up
 * then: calls->ready was called. Of connections that came to nothing calls->ended may have been called, too; all of
 * them are closed, also where this fails. EVEN_ERR_INPUT: no invitation. */
even_status even_invitation_accept(const char *line, even_loop *loop, const even_link_calls *calls, even_link *link,
                                   int *host) EVEN_MUST_USE;

#endif
