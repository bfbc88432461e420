/* Who leads a job of several hosts, and who may act: pure, no clocks, no sockets, no Raft. The voters' log (voter.h)
 * says "in generation G member L leads"; of each generation the first such entry counts, so no two members lead in one.
 *
 * A member acts as the leader only while the newest generation that it has heard of is its own, and a majority of
 * voters was heard lately (its lease). Agents obey only the newest generation that they have heard of. */
#ifndef EVEN_ORCHESTRATOR_LEADERSHIP_H
#define EVEN_ORCHESTRATOR_LEADERSHIP_H

#include <stdbool.h>
#include <stdint.h>

/* generation 0: nobody leads yet. Members have numbers from 1 on. */
typedef struct even_leadership {
  uint64_t generation;
  uint64_t leader;
} even_leadership;

/* An entry of the log is committed: it counts where it is of the next generation, else it came too late, and nobody may
 * take it for true. Every member gets the same entries in the same order. */
bool even_leadership_apply(even_leadership *state, const even_leadership *entry);
/* Another member says what was committed there, which may be newer than what came here. */
bool even_leadership_hear(even_leadership *state, const even_leadership *told);

/* What a voter sees. Times in nanoseconds, all of one clock. */
typedef struct even_leadership_view {
  even_leadership newest; /* that it has heard of, by the log or otherwise */
  uint64_t applied;       /* the generation that the log says here */
  uint64_t self;
  uint64_t first;     /* the member that leads at first */
  bool raft_leads;    /* it leads the log: it alone can add to it */
  bool quorum;        /* it hears a majority, or the log's leader, which does */
  uint64_t quorum_ns; /* when it did last */
  bool leader_linked; /* there is a connection to the member that leads; before any does, to the first */
  uint64_t leader_ns; /* when anything came from it last, or since when there is no connection */
  bool proposed;      /* an entry of its own is on its way */
  uint64_t now_ns;
} even_leadership_view;

typedef enum even_leadership_move {
  EVEN_LEADERSHIP_REST,
  EVEN_LEADERSHIP_FIRST,   /* propose generation 1 for the first member */
  EVEN_LEADERSHIP_SUCCEED, /* propose the next generation for itself */
  EVEN_LEADERSHIP_YIELD    /* give the log to the member that leads the job */
} even_leadership_move;

/* A leader without connection for so long is lost, as is one that says nothing at all though there is one. */
#define EVEN_LEADERSHIP_GONE_NS 1500000000u
#define EVEN_LEADERSHIP_SILENT_NS 10000000000u
/* Without a majority for so long the leader acts no more. Less than what the others take to see that it is gone, where
 * it is cut off: 4 s until the kernel gives its connections up (os/socket.h), and EVEN_LEADERSHIP_GONE_NS. */
#define EVEN_LEADERSHIP_LEASE_NS 3000000000u

even_leadership_move even_leadership_next(const even_leadership_view *view);
/* Whether this member may act as the job's leader. */
bool even_leadership_acts(const even_leadership_view *view);

/* How many of so many members vote: one of one or two, three of three or four, five of more. */
unsigned even_leadership_voters(unsigned members);

#endif
