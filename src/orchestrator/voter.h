/* A member of a job of several hosts, in a thread of its own: it keeps the replicated log of who leads (Raft, by
 * libraft) with the other members, over connections of its own (TLS with the job's key), however busy the agent is with
 * its ranks. At most five members vote; the others listen. Rules: leadership.h, members.h; docs/hosts.md tells the
 * whole.
 *
 * Calls: any thread of the process, but for open and close. */
#ifndef EVEN_ORCHESTRATOR_VOTER_H
#define EVEN_ORCHESTRATOR_VOTER_H

#include "orchestrator/leadership.h"
#include "os/tls.h"

#include <evenstep/status.h>
#include <stddef.h>

typedef struct even_voter even_voter;

enum { EVEN_VOTER_ADDRESS = 64, EVEN_VOTER_MOST = 512 };

typedef struct even_voter_member {
  uint64_t id;                      /* from 1 on; one that is started again is another one, with another id */
  char address[EVEN_VOTER_ADDRESS]; /* "10.0.0.1:4711": where it listens */
} even_voter_member;

typedef struct even_voter_params {
  size_t size; /* sizeof(even_voter_params) */
  unsigned char key[EVEN_TLS_KEY_BYTES];
  uint64_t self;
  int listener;                     /* of this member (os/listener.h); it is taken over */
  const even_voter_member *members; /* this one among them. The same on all that begin together */
  size_t count;
  uint64_t first; /* of them, the one that leads first */
  bool joins;     /* the others have begun, and the one that leads adds this one (even_voter_want) */
} even_voter_params;

typedef struct even_voter_view {
  even_leadership newest;           /* of all generations that were heard of; 0: nobody leads yet */
  int port;                         /* where that leader takes agents, 0: it has not said it */
  char address[EVEN_VOTER_ADDRESS]; /* of its host, "" where it is not known */
  bool acts;                        /* this member leads, and may act */
  bool quorum;                      /* a majority of voters is heard */
  bool linked;                      /* there is a connection to the leader, or this is it */
  unsigned voters;                  /* as far as this member knows */
} even_voter_view;

/* "libraft 0.15.0"; a static string. NULL where the program was built without it: then open is EVEN_ERR_UNSUPPORTED. */
const char *even_voter_library(void);
/* Starts the thread. On failure the listener is closed, too. */
even_status even_voter_open(const even_voter_params *params, even_voter **out) EVEN_MUST_USE;
/* Ends it at once: for the others this member is gone. NULL is allowed. */
void even_voter_close(even_voter *voter);
/* What is known now. */
void even_voter_look(even_voter *voter, even_voter_view *out);
/* Where the agents of others reach this one while it leads. */
void even_voter_announce(even_voter *voter, int port);
/* Of the one that leads: who shall belong to the job from now on, this one among them; others are left out, new ones
 * added, and as many vote as shall. */
even_status even_voter_want(even_voter *voter, const even_voter_member *members, size_t count) EVEN_MUST_USE;

#endif
