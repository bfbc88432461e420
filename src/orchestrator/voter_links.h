/* The connections of a voter (voter.h): each member calls those with lower numbers, where one of the two votes (and
 * when it calls others: call_others in voter.c); and whoever it misses. */
#ifndef EVEN_ORCHESTRATOR_VOTER_LINKS_H
#define EVEN_ORCHESTRATOR_VOTER_LINKS_H

#include "orchestrator/link.h"
#include "orchestrator/voter.h"

/* What members tell of themselves: when they meet, with each change, and when they are asked. */
typedef struct even_voter_word {
  uint64_t id;
  even_leadership newest;
  uint64_t port;    /* of the leader, 0: not known */
  uint64_t term;    /* of Raft's, at this moment */
  uint64_t asks;    /* the teller's clock: this is a question; 0: it is none */
  uint64_t answers; /* the clock of who asked; 0: this is no answer */
} even_voter_word;

typedef struct even_voter_link {
  even_link link;
  struct even_voter_links *all;
  uint64_t id;    /* 0: it has not said it */
  bool called;    /* by this member, which knows the other's id by its address */
  bool told;      /* it has sent its word */
  bool delivered; /* the other host has this member's newest word: see even_voter_links_delivered */
  bool over;
  char address[EVEN_VOTER_ADDRESS]; /* where it listens, "" where that is not known */
  uint64_t answered_ns;             /* when (even_clock_boot_ns) the newest question was sent that it has answered, */
  uint64_t answered_term;           /* and in which term */
  uint64_t since_ns;
  struct even_voter_link *next;
} even_voter_link;

/* A member whose connection broke without a word: it may be cut off, and come back. It is called, for it may have been
 * left out meanwhile, and then nobody else names it; until it answers, or its host says that it is no more: who listens
 * there now is nobody, or another member. So is one that stands still. One whose connection was closed has ended, or
 * has given that connection up: it is called, too, for some seconds, in which a host that is there says which of the
 * two it is. One that is connected otherwise is not missed, nor one whose host has the word of the job's end. */
typedef struct even_voter_missing {
  uint64_t id; /* 0: none */
  uint64_t since_ns;
  bool closed;
  char address[EVEN_VOTER_ADDRESS]; /* "": it is not known, and cannot be called */
} even_voter_missing;

/* A member whose host, or a firewall in its name, has said, whenever it was called since then, that nobody listens
 * there. */
typedef struct even_voter_refusal {
  uint64_t id; /* 0: none */
  uint64_t since_ns;
} even_voter_refusal;

enum { EVEN_VOTER_MISSING = 8, EVEN_VOTER_REFUSALS = 64 };

typedef struct even_voter_links {
  even_loop *loop;
  even_loop_watch watch; /* of the listener */
  int listener;
  unsigned char key[EVEN_TLS_KEY_BYTES];
  even_voter_word own;
  even_voter_link *open;
  even_voter_link *gone;                            /* closed, to be freed after the turn of the loop */
  even_voter_missing missing[EVEN_VOTER_MISSING];   /* the latest */
  even_voter_refusal refusals[EVEN_VOTER_REFUSALS]; /* as many as there is room for */
  uint64_t alone_ns;                                /* since when no member is connected; 0: one is */
  size_t unknown;                                   /* open ones that others made, and have not said who they are */
  bool rests;                                       /* see even_voter_links_rest */
  uint64_t awaited;    /* the member whose host was seen last to take a call that nobody answers, */
  uint64_t awaited_ns; /* and when */
  bool closed;         /* a connection was, since the owner looked: whoever that was shall be called at once */
  void *context;
  uint64_t (*term)(void *context); /* of Raft's, now */
  void (*word)(void *context, const even_voter_word *word);
  even_status (*raft)(void *context, uint64_t from, const unsigned char *bytes, size_t count);
  /* Where a member listens; it writes nothing where that is not known. NULL: nobody knows. */
  void (*where)(void *context, uint64_t id, char address[EVEN_VOTER_ADDRESS]);
  /* Where the job's leader takes hosts that join; false: that is not known. NULL: nobody is told. */
  bool (*leader)(void *context, char address[EVEN_VOTER_ADDRESS], int *port);
} even_voter_links;

/* For one whose `loop`, `listener`, `key`, `own` and calls are set; the rest is zero. */
even_status even_voter_links_open(even_voter_links *links) EVEN_MUST_USE;
void even_voter_links_close(even_voter_links *links);
/* Signs of life, ends; after each turn of the loop. */
void even_voter_links_tick(even_voter_links *links, uint64_t now_ns);
/* From now on it takes part in nothing, or does so again: connections are closed, and who calls meanwhile finds that
 * this member is there, with the key, and says nothing: so it misses one that stands still, and not one that has ended.
 */
void even_voter_links_rest(even_voter_links *links, bool rests);
/* Calls a member, where there is no connection to it that is open, or on its way. */
void even_voter_links_call(even_voter_links *links, uint64_t id, const char *address);
/* Calls those that are missing, whichever of two members has the lower number: who was left out while it was cut off
 * knows no newer ones, nor where they listen. */
void even_voter_links_call_missing(even_voter_links *links);
/* The latest that is missing, of those that may be cut off before those whose connection was closed; NULL: none is. */
const even_voter_missing *even_voter_links_missing(const even_voter_links *links);
/* Since when the hosts of all these, but for this member itself, have said that nobody listens there, and nobody is
 * connected; 0: not so, or there are none, or too many. */
uint64_t even_voter_links_deserted(const even_voter_links *links, const uint64_t *ids, size_t count);
/* Whether the hosts of all that are connected have what they were told last: of one that is cut off, but not known to
 * be yet, nothing else says so. */
bool even_voter_links_delivered(even_voter_links *links);
/* The connection to a member whose word came; NULL: none. */
even_voter_link *even_voter_links_find(even_voter_links *links, uint64_t id);
/* Of one that is not connected: whether its host took the last call for it, and nobody has answered that yet. Where its
 * agent stands still, or was killed beside a process that keeps its listener (outlast.h), that is so. It is called each
 * `call_ns`. */
bool even_voter_links_awaits(even_voter_links *links, uint64_t id, uint64_t now_ns, uint64_t call_ns);
bool even_voter_links_send(even_voter_links *links, uint64_t id, const void *bytes, size_t count);
/* Tells all what `own` says now. */
void even_voter_links_tell(even_voter_links *links);

/* Asks a member for its word, to be answered at once. `now_ns`: even_clock_boot_ns. */
void even_voter_links_ask(even_voter_link *link, uint64_t now_ns);

/* A number of 64 bits as it travels, and lies in the log: little-endian. */
void even_voter_write_number(unsigned char *bytes, uint64_t value);
uint64_t even_voter_read_number(const unsigned char *bytes);

#endif
