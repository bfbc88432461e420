/* Who leads a job of several hosts, and who may act: pure, no clocks, no sockets, no Raft. The voters' log (voter.h)
 * says "in generation G member L leads"; of each generation the first such entry counts, so no two members lead in one.
 * The last generation of a job is nobody's: it has ended.
 *
 * A member acts as the leader only while the newest generation that it has heard of is its own, and for a time (its
 * lease) after it sent what a majority of voters has answered. Agents obey only the newest generation that they have
 * heard of. */
#ifndef EVEN_ORCHESTRATOR_LEADERSHIP_H
#define EVEN_ORCHESTRATOR_LEADERSHIP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Who leads when a job has ended: no member has this number. */
#define EVEN_LEADERSHIP_NOBODY UINT64_MAX

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
/* Whether the job has ended. */
bool even_leadership_ended(const even_leadership *state);
/* Whether one that serves, or is, the leader of `generation` has another one by now. That this leader has ended the
 * job is no such news: it is obeyed until it is gone. */
bool even_leadership_superseded(const even_leadership *newest, uint64_t generation);

/* An entry as it lies in the log: who leads, generation 0 for one that says nothing; and in which term of Raft's it was
 * added. */
typedef struct even_leadership_entry {
  even_leadership says;
  uint64_t term;
} even_leadership_entry;

/* What the log says here. libraft takes an entry of an earlier term for committed once it has counted enough copies,
 * and a later leader of the log may undo such a one (Ongaro and Ousterhout, In Search of an Understandable Consensus
 * Algorithm, 5.4.2 and figure 8). So all that came is sure only when an entry was committed in the term in which it was
 * added; whoever begins to lead the log adds one. */
typedef struct even_leadership_log {
  even_leadership applied; /* by all entries that came */
  even_leadership sure;
  uint64_t sure_term; /* of the entry that made it so */
} even_leadership_log;

/* `term`: Raft's, of this member, when the entry is committed here. Whether what is sure has changed. */
bool even_leadership_log_apply(even_leadership_log *log, const even_leadership_entry *entry, uint64_t term);

/* How long what takes, by the silence S after which hosts are lost (os/socket.h), which is the same on all. */
typedef struct even_leadership_times {
  uint64_t gone_ns;   /* a leader without connection for so long is lost: 3/8 S, */
  uint64_t silent_ns; /* as is one that says nothing at all for so long though there is one, or is awaited: 2.5 S */
  uint64_t lease_ns;  /* for so long after it sent what a majority has answered, the leader acts: 3/4 S */
  uint64_t guard_ns;  /* then its guardian (os/guardian.h) holds its ranks (SIGSTOP), for the leader has not said by now
                         that it may act: S/8 after the lease, at least 0.5 s. When it says so again, they go on; */
  uint64_t wait_ns;   /* for so long after it came to lead the log, the next one starts no rank: as long again, in which
                         the old one's are held, whatever clocks differ */
  uint64_t kill_ns;   /* and the guardian kills them: another one leads by then, or nobody can: 5 S */
  uint64_t election_ns;  /* Raft's, and how often who leads the log says so there: S/4 and S/27; */
  uint64_t heartbeat_ns; /* these and what follows at most five times as long as with 4 s */
  uint64_t heard_ns;     /* as long as an election may take to begin */
  uint64_t ask_ns;       /* between two questions of the leader's */
  uint64_t call_ns;      /* and two tries to reach a member */
} even_leadership_times;

/* What they are by a silence of so many milliseconds. Members with different ones must not be in one group: one's lease
 * may be longer than another one waits. */
even_leadership_times even_leadership_times_of(int silence_ms);

/* What a voter sees. Times in nanoseconds, all of one clock, which goes on while the machine sleeps. */
typedef struct even_leadership_view {
  even_leadership_times times;
  even_leadership newest; /* that it has heard of, by the log or otherwise */
  uint64_t applied;       /* the generation that the log surely says here */
  uint64_t self;
  uint64_t first;      /* the member that leads at first */
  bool witness;        /* it votes, and cannot lead the job */
  bool raft_leads;     /* it leads the log: it alone can add to it, */
  bool raft_own;       /* and an entry of its term is committed */
  bool leader_linked;  /* there is a connection to the member that leads; before any does, to the first */
  bool leader_awaited; /* there is none, and its host takes calls for it, which nobody answers yet: its agent was
                          killed, and another one may come in its place, as the same member */
  uint64_t leader_ns;  /* when anything came from it last, or since when there is no connection */
  uint64_t lease_ns;   /* see even_leadership_answered */
  bool proposed;       /* an entry of its own is on its way */
  bool ends;           /* its agent ends the job, */
  bool hands;          /* or has another one lead it from now on */
  uint64_t now_ns;
} even_leadership_view;

typedef enum even_leadership_move {
  EVEN_LEADERSHIP_REST,
  EVEN_LEADERSHIP_CONFIRM, /* propose an entry that says nothing: what is before it is sure then */
  EVEN_LEADERSHIP_FIRST,   /* propose generation 1 for itself, the first member */
  EVEN_LEADERSHIP_SUCCEED, /* propose the next generation for itself */
  EVEN_LEADERSHIP_HAND,    /* propose the next generation for another one, that can lead the job */
  EVEN_LEADERSHIP_END,     /* propose the next generation for nobody */
  EVEN_LEADERSHIP_YIELD,   /* give the log to the member that leads the job, or shall */
  EVEN_LEADERSHIP_PASS     /* give the log to another one, that can lead the job */
} even_leadership_move;

even_leadership_move even_leadership_next(const even_leadership_view *view);
/* Whether this member may act as the job's leader. */
bool even_leadership_acts(const even_leadership_view *view);

/* The newest time for which holds: a majority of voters has answered what was sent then, or later. `times`: of each
 * voter, the newest that it has answered in this term of Raft's (of this member itself: now); it is sorted.
 *
 * Why two never act at once: of the majority that answered in term T at or after `time`, and of the one that voted for
 * another leader of the log in a later term, one member is in both, and it answered before it voted. So whoever can add
 * a later generation began to lead the log after `time`; it waits for longer than the old leader acts. */
uint64_t even_leadership_answered(uint64_t *times, size_t count);

/* How many of so many members vote: one of one or two, three of three or four, five of more. */
unsigned even_leadership_voters(unsigned members);
/* Whether members may go although they vote still: of so many voters in the log `staying` stay, and are there. These
 * must be a majority, and, where another one is to lead after the leader of so many, without that one, too. */
bool even_leadership_spares(unsigned voters, unsigned staying);

#endif
