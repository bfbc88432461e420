/* A voter's part of the members' log: libraft, the entries of who leads, and the changes of members. One thread. */
#ifndef EVEN_ORCHESTRATOR_VOTER_LOG_H
#define EVEN_ORCHESTRATOR_VOTER_LOG_H

#include "orchestrator/leadership.h"
#include "orchestrator/raft_memory.h"
#include "orchestrator/voter.h"

typedef struct even_voter_log {
  even_raft_memory memory;
  struct raft raft;
  struct raft_fsm machine;
  bool open;
  even_leadership_log says;
  bool proposed; /* an entry of its own is on its way */
  struct raft_apply apply;
  bool changing;
  struct raft_change change;
  uint64_t next_change_ns;
  bool yielding;
  struct raft_transfer transfer;
  uint64_t led_term; /* the newest term in which it has led the log, */
  uint64_t led_ns;   /* and since when, by even_clock_boot_ns */
  uint64_t claim_ns; /* of the term in which it last proposed itself: since when it led the log in it; of one that came
                        back: since when it is there again */
  void *context;
  void (*changed)(void *context); /* what it surely says has */
} even_voter_log;

/* Where the member keeps its log; *known: it has one there. EVEN_ERR_NOT_FOUND: as even_voter_open. */
even_status even_voter_log_store(const even_voter_params *params, even_raft_store *store, bool *known) EVEN_MUST_USE;
/* `log` is zeroed, but for `context` and `changed`; elections take as long as `times` says; `store` is taken over.
 * `known`: the store has a log; else it begins with `members`, or with nothing where it joins. Close it also after a
 * failure. */
even_status even_voter_log_open(even_voter_log *log, const even_voter_params *params,
                                const even_leadership_times *times, const even_raft_store *store, bool known,
                                bool (*send)(void *context, uint64_t member, const void *bytes,
                                             size_t count)) EVEN_MUST_USE;
/* Why it takes part no more (raft_memory.h): whatever follows does nothing, and nobody leads, as far as is known here.
 * NULL: it takes part. */
const even_error *even_voter_log_gave_up(const even_voter_log *log);
/* Then, with what it has kept, as a member that was killed and comes back. On failure it is as before the call. */
even_status even_voter_log_again(even_voter_log *log, const even_leadership_times *times) EVEN_MUST_USE;
/* `forget`: the member is needed no more. */
void even_voter_log_close(even_voter_log *log, bool forget);

/* Whether it leads the log now; notes since when. */
bool even_voter_log_leads(even_voter_log *log);
/* Who leads it, as far as is known here; 0: nobody. */
uint64_t even_voter_log_leader(even_voter_log *log);
/* Proposes the next generation for `leader`; 0: an entry that says nothing. */
void even_voter_log_propose(even_voter_log *log, uint64_t leader);
void even_voter_log_yield(even_voter_log *log, uint64_t leader);
/* The next change towards `wanted`, of which this one is; one that could not be done is tried again in a moment. */
void even_voter_log_change(even_voter_log *log, const even_voter_member *wanted, size_t count, uint64_t now_ns);
/* Whether the members are those, as many of them vote as shall, and nothing is on its way. */
bool even_voter_log_is(const even_voter_log *log, const even_voter_member *wanted, size_t count);
/* Whether it has no member but those, for sure. */
bool even_voter_log_has_only(const even_voter_log *log, const even_voter_member *wanted, size_t count);
/* NULL: no such member. */
const struct raft_server *even_voter_log_server(const even_voter_log *log, uint64_t id);
/* Whether this member and that one are to be connected: one of the two votes, or this one joins, or was left out. */
bool even_voter_log_connects(const even_voter_log *log, uint64_t id);
unsigned even_voter_log_voters(const even_voter_log *log);
bool even_voter_log_votes(const even_voter_log *log, uint64_t id);
/* Of the other voters how many have a later turn than this one where all do something one after the other: the job's
 * leader has the last. */
unsigned even_voter_log_after(const even_voter_log *log, uint64_t leader);

#endif
