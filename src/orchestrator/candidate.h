/* An agent's part of replacing the leader (docs/hosts.md): it is a member of the voters' group (voter.h), keeps what
 * the leader leaves (estate.h), and when that leader is gone finds the next one, which may be itself. */
#ifndef EVEN_ORCHESTRATOR_CANDIDATE_H
#define EVEN_ORCHESTRATOR_CANDIDATE_H

#include "orchestrator/estate.h"
#include "orchestrator/link.h"

typedef struct even_candidate {
  even_voter *voter; /* NULL: it is no member, and ends with its leader */
  int listener;      /* until it is one; -1: none */
  int port;
  uint64_t self;
  uint64_t forgotten;   /* a member that it was, and cannot be again: its log is lost; 0: none */
  uint64_t generation;  /* of the leader that it serves */
  uint64_t patience_ns; /* how long it waits for another one */
  unsigned char key[EVEN_TLS_KEY_BYTES];
  char key_digits[2 * EVEN_TLS_KEY_BYTES + 1];
  /* What is done while it waits for another leader: false ends the waiting; NULL: nothing. Its ranks wait, too. */
  bool (*pause)(void *context);
  void *pause_context;
  json_t *estate;   /* NULL: the leader has left nothing yet, and it cannot lead */
  uint64_t left_ns; /* when it did */
} even_candidate;

typedef enum even_candidate_turn {
  EVEN_CANDIDATE_END,   /* nobody is there to be served */
  EVEN_CANDIDATE_SERVE, /* there is another leader: the link is up */
  EVEN_CANDIDATE_LEAD   /* it is this agent */
} even_candidate_turn;

/* Listens for other members; `invitation` has the key. Whatever fails leaves an agent that is no member. */
void even_candidate_open(even_candidate *candidate, const char *invitation);
void even_candidate_close(even_candidate *candidate);
/* The leader names no members: nobody takes its place, and nobody calls here. */
void even_candidate_settle(even_candidate *candidate);
/* What the leader says: who the members are (the answer goes out over `link`), and what it leaves. */
even_status even_candidate_take(even_candidate *candidate, even_link *link, const even_message *message) EVEN_MUST_USE;
/* Whether somebody leads a newer generation than that of the leader that it serves, which must not be obeyed then. */
bool even_candidate_superseded(const even_candidate *candidate);
/* The leader is gone, and nothing of the attempt is left here, or its ranks wait (`pause`). Waits for the next one: for
 * as long as no majority of the hosts is heard, up to what the leader said (EVEN_MAJORITY_PATIENCE), and says so in
 * logs/leader.log. `calls` and `link` as for even_invitation_accept. */
even_status even_candidate_await(even_candidate *candidate, even_loop *loop, const even_link_calls *calls,
                                 even_link *link, even_candidate_turn *turn) EVEN_MUST_USE;
/* For one that leads: what was left, and its place among the voters, which are no more the candidate's. */
even_status even_candidate_inherit(even_candidate *candidate, even_estate **out) EVEN_MUST_USE;

#endif
