/* Asks from time to time whether the end of this machine is announced (--notice-from), in the agent's own loop and
 * without ever waiting: connections are on their way, answers come in pieces, each with a limit of time and of bytes,
 * and a command is a child. Proxies are not asked (http_proxy): a metadata service is the machine's own. A service that
 * cannot be asked is told once, and asked on. An end that is farther away than 120 s, and than --notice says, is told,
 * and taken as notice when it is as near. */
#ifndef EVEN_ORCHESTRATOR_ANNOUNCER_H
#define EVEN_ORCHESTRATOR_ANNOUNCER_H

#include "orchestrator/announcement.h"
#include "os/loop.h"
#include "os/process.h"

#include <evenstep/status.h>

typedef struct even_announcer even_announcer;

typedef struct even_announcer_params {
  const char *place;    /* as notice_place.h has it; it is copied */
  even_loop *loop;      /* outlives the announcer */
  double seconds;       /* that are left where an announcement does not say it */
  double every_seconds; /* between two questions; 0: 2 */
  void (*tell)(void *context, const char *words);
  void (*session)(void *context, pid_t leader, bool begins); /* of a command; `begins` false: it is no more. May be
                                                                NULL */
  void *context;
} even_announcer_params;

/* EVEN_ERR_USAGE: it is no place. *out is NULL for "off". */
even_status even_announcer_open(const even_announcer_params *params, even_announcer **out) EVEN_MUST_USE;
/* Fine for NULL; a command that runs is ended, which takes a second at most. Not in a call of the loop. */
void even_announcer_close(even_announcer *announcer);
/* Asks when it is time, and gives up what takes too long: several times a second. */
void even_announcer_tick(even_announcer *announcer);
/* Whether this machine ends soon: in so many seconds, more than 0, and in words ("aws announces the machine's end
 * (terminate)"). An end that was to be more than 10 minutes ago is none. */
bool even_announcer_due(even_announcer *announcer, double *seconds, char what[EVEN_ANNOUNCEMENT_WORDS * 2]);
/* A child of this process was reaped: whether it was the announcer's command. */
bool even_announcer_took_end(even_announcer *announcer, const even_process_end *end);
/* The session of the command that runs; 0: none does. */
pid_t even_announcer_session(const even_announcer *announcer);

#endif
