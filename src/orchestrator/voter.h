/* A member of a job of several hosts, in a thread of its own: it keeps the replicated log of who leads (Raft, by
 * libraft) with the other members, over connections of its own (TLS with the job's key), however busy the agent is with
 * its ranks. At most five members vote; the others listen. Rules: leadership.h, members.h; docs/hosts.md tells the
 * whole.
 *
 * Calls: any thread of the process, but for open and close. */
#ifndef EVEN_ORCHESTRATOR_VOTER_H
#define EVEN_ORCHESTRATOR_VOTER_H

#include "orchestrator/leadership.h"
#include "os/guardian.h"
#include "os/tls.h"

#include <evenstep/status.h>
#include <stddef.h>

typedef struct even_voter even_voter;

enum { EVEN_VOTER_ADDRESS = 64, EVEN_VOTER_MOST = 512, EVEN_VOTER_WHY = 256 };

typedef struct even_voter_member {
  uint64_t id;                      /* from 1 on; one that has forgotten its log is another one, with another id */
  char address[EVEN_VOTER_ADDRESS]; /* "10.0.0.1:4711": where it listens now */
} even_voter_member;

typedef struct even_voter_params {
  size_t size; /* sizeof(even_voter_params) */
  unsigned char key[EVEN_TLS_KEY_BYTES];
  uint64_t self;
  int listener;                     /* of this member (os/listener.h); it is taken over */
  const even_voter_member *members; /* this one among them. The same on all that begin together */
  size_t count;
  uint64_t first;     /* of them, the one that leads first */
  bool joins;         /* the others have begun, and the one that leads adds this one (even_voter_want) */
  bool witness;       /* it only votes */
  bool waits;         /* it cannot lead, and only votes, before even_voter_lead */
  bool returns;       /* it was a member before, and goes on with the log that it kept */
  const char *folder; /* in which members keep their logs (raft_store.h); NULL: in memory */
  int silence_ms;     /* after which the job's hosts are lost, for all the same (leadership.h); 0: the usual time */
} even_voter_params;

typedef struct even_voter_view {
  even_leadership newest;           /* of all generations that were heard of; 0: nobody leads yet */
  int port;                         /* where that leader takes agents, 0: it has not said it */
  char address[EVEN_VOTER_ADDRESS]; /* of its host, "" where it is not known */
  bool acts;                        /* this member leads, and may act; the next three by even_clock_boot_ns: */
  uint64_t acts_until_ns;           /* for at least so long; */
  uint64_t answered_ns;             /* a majority has answered what it asked then */
  uint64_t starts_ns;               /* of one that leads: before this no rank of another leader's may be thought dead */
  bool quorum;                      /* a majority of voters is heard */
  bool linked;                      /* there is a connection to the leader, or this is it */
  bool exact;                       /* of one that leads: nobody is a member any more that shall be none */
  bool settled;                     /* of one that leads: all members are those that shall be, and all are there */
  unsigned staying;                 /* of these, of one that leads: those that shall be members, and are there */
  unsigned voters;                  /* as far as this member knows */
  uint64_t deserted_ns; /* since when the hosts of all others that it knows of have said, whenever these were
                           called, that nobody listens there; 0: not so */
  bool untold; /* of a job that has ended: a host that is connected has not confirmed yet that it got this word */
  uint64_t missing_ns;              /* since when a member has been missing that may only be cut off; 0: none is; */
  bool missing_closed;              /* its connection was closed: it has probably ended (voter_links.h), */
  char missing[EVEN_VOTER_ADDRESS]; /* and where it listened, "": not known */
} even_voter_view;

/* "libraft 0.15.0"; a static string. NULL where the program was built without it: then open is EVEN_ERR_UNSUPPORTED. */
const char *even_voter_library(void);
/* Starts the thread. On failure the listener is closed, too. EVEN_ERR_NOT_FOUND: it shall return, and has no log that
 * it kept, or another process has it. */
even_status even_voter_open(const even_voter_params *params, even_voter **out) EVEN_MUST_USE;
/* Ends it at once: for the others this member is gone. NULL is allowed. `forget`: it needs not come back. */
void even_voter_close(even_voter *voter, bool forget);
/* What is known now. */
void even_voter_look(even_voter *voter, even_voter_view *out);
/* Where the agents of others reach this one while it leads. */
void even_voter_announce(even_voter *voter, int port);
/* Where members listen now: those that were started again listen elsewhere. */
even_status even_voter_know(even_voter *voter, const even_voter_member *members, size_t count) EVEN_MUST_USE;
/* Of the one that leads: who shall belong to the job from now on, this one among them; others are left out, new ones
 * added, and as many vote as shall. */
even_status even_voter_want(even_voter *voter, const even_voter_member *members, size_t count) EVEN_MUST_USE;
/* A turn of the agent's loop begins, or is over. Where one takes almost as long as an agent may say nothing
 * (voter_watch.h), the agent stands in a call that does not come back, as of a disk that hangs: where others vote, this
 * member closes its connections then, and neither votes, nor stands for election, nor renews a lease, until that turn
 * is over; so others lead. Of one thread. What may take long for good reasons belongs to no turn. */
void even_voter_turns(even_voter *voter, bool begins);
/* Whether this member has given its part of the log up since this was asked last, and why: it could not keep what it
 * must not forget, or had no memory (raft_memory.h). Then it closes its connections, as one that stands still, so that
 * others can lead; after the time for which a new leader waits it goes on with what it has kept, as one that comes
 * back. */
bool even_voter_gave_up(even_voter *voter, char why[EVEN_VOTER_WHY]);
/* It has all that it needs to lead. */
void even_voter_lead(even_voter *voter);
/* While this member leads, this guardian holds the ranks where it may not act, and kills them when that lasts: the
 * thread tells it, whatever else the agent does meanwhile. The caller's, until it gives another one; NULL: none. */
void even_voter_guard(even_voter *voter, even_guardian *guardian);
/* Of the one that leads: another voter, with which it is connected, shall lead the job from now on: the first of
 * `heirs` that is one, and nobody else. The caller has no ranks, and starts none any more. `newest` says when that is
 * so. */
void even_voter_hand_over(even_voter *voter, const uint64_t *heirs, size_t count);
/* Of the one that leads: the job ends, and nobody may lead it after this one. `newest` says when that is so. */
void even_voter_finish(even_voter *voter);

#endif
