/* Whether the loop of a member's agent turns: the loop says when a turn of it begins, and when that is over; the
 * member's thread (voter.h) looks. Where the agent stands in a call that does not come back (a disk, a file server),
 * the thread lives on, and would renew the lease of a leader that does nothing. */
#ifndef EVEN_ORCHESTRATOR_VOTER_WATCH_H
#define EVEN_ORCHESTRATOR_VOTER_WATCH_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Zeroed: no turn is under way. */
typedef struct even_voter_watch {
  _Atomic uint64_t turn_ns; /* when the one that is under way began; 0: none is */
} even_voter_watch;

/* A turn begins at `now_ns` (even_clock_boot_ns, as leases), or is over: 0. Of one thread. */
void even_voter_watch_note(even_voter_watch *watch, uint64_t now_ns);
/* Whether the turn under way has taken so long that the agent counts as one that stands still: for as long as it may
 * say nothing (even_link_silence_ns), less the hosts' silence S, in which another one comes to lead before the others'
 * agents give this one up; at least 2 S. And less S/16, at least a quarter second, for each of `after` other voters:
 * where the disks of several hang at once, as of one file server, one after the other rests, and each knows who rests
 * already; the leader, for whom there would have to be another one, is the last. Any thread. */
bool even_voter_watch_stands(const even_voter_watch *watch, unsigned after, uint64_t now_ns);

#endif
