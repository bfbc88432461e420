/* Processes of a job's next attempt that are started while this one still runs: they run the script up to es.prepare,
 * and wait there until the others have ended (python/evenstep/successor.py). What they cannot know before they hear
 * then: the checkpoint, and this agent's memory for them. Those that nobody takes are killed.
 *
 * A process gets EVENSTEP_AWAITS=GO,READY, two pipes: it says that it waits by a byte in the one, and reads a line of
 * JSON from the other: {"set":{NAME:VALUE,…},"open":{NAME:PATH,…}}, variables, and such whose value is a descriptor,
 * of what lies at the path. The end of that pipe: it is not needed. */
#ifndef EVEN_ORCHESTRATOR_WARM_H
#define EVEN_ORCHESTRATOR_WARM_H

#include "base/text.h"
#include "orchestrator/environment.h"
#include "os/loop.h"
#include "os/process.h"

typedef struct even_warm even_warm;

typedef struct even_warm_params {
  even_loop *loop;             /* outlives it, and the job */
  even_rank_place place;       /* of the first of them: all that is known beforehand, no devices, and no descriptor */
  const even_device_list *own; /* of these ranks, one each */
  size_t world;                /* of all hosts */
  char *const *command;
  char *const *environment; /* as that of ranks; EVENSTEP_SPEEDS is left out of it, which is told at the end */
  bool unpinned;
  uint64_t descriptors; /* as of even_process_params, as what follows */
  int ignored;
} even_warm_params;

/* Starts the processes of place.local ranks, from place.first on. An error is that of the one that could not be
 * started; none is left then. */
even_status even_warm_start(const even_warm_params *params, even_warm **out) EVEN_MUST_USE;
/* NULL is allowed, here and below: there are none. Kills those that were not taken. */
void even_warm_close(even_warm *warm);
/* How many of them wait, or have ended. */
size_t even_warm_settled(const even_warm *warm);
/* How many have ended. */
size_t even_warm_lost(const even_warm *warm);

/* A process with its streams, and what it printed meanwhile. */
typedef struct even_warm_process {
  even_process process;
  even_text said[2]; /* the caller frees them */
} even_warm_process;

/* Gives the process of a rank out, where there is one that was started for just this place (all but descriptors and
 * checkpoint compared) and that lives, and tells it the rest: `extra` as in even_environment_of_rank. */
bool even_warm_take(even_warm *warm, const even_rank_place *place, char *const *extra, even_warm_process *out);
/* A child was reaped: whether it was one of these. */
bool even_warm_reaped(even_warm *warm, pid_t pid);

#endif
