/* Where libraft 0.15 does otherwise than Raft says, what makes up for it. Raft is Ongaro and Ousterhout's In Search of
 * an Understandable Consensus Algorithm, its changes of members those of chapter 4 of Ongaro's Consensus: Bridging
 * Theory and Practice. (That it counts copies of earlier terms' entries is seen to in leadership.h.) One thread. */
#ifndef EVEN_ORCHESTRATOR_RAFT_RULES_H
#define EVEN_ORCHESTRATOR_RAFT_RULES_H

#include "orchestrator/raft_store.h"

#include <raft.h>
#include <stdint.h>

/* A leader takes the answer to its message for how much of its log the member has (figure 2: up to the last entry of
 * that message). libraft says how long the member's log is, also to a message without entries: with an entry of a
 * leader before, which the new one never had, it counts as a copy of the new one's entry of that number, which may be
 * committed by it, and is never sent again. So a message's end is kept, what it says is committed does not go beyond
 * it, and neither does its answer. */
uint64_t even_raft_rules_hear(struct raft_append_entries *says);
void even_raft_rules_answer(struct raft_append_entries_result *answer, uint64_t end);

/* Members are those of the newest such entry in the log, whether it is committed or not; one that is undone leaves
 * those of the one before. libraft takes all that it has read at its start for committed, and does not go back. After
 * its start, and after a part of the log was undone. Of one that follows: a candidate counts the votes of the members
 * with which it began, a leader the copies. RAFT_BUSY: it does not follow, RAFT_NOMEM: members are as before;
 * RAFT_MALFORMED. */
int even_raft_rules_members(struct raft *raft, const even_raft_store *store);

/* A member votes for whoever asks, also where its log does not say yet that it has a vote, unless it has heard from a
 * leader within an election's time. libraft's does not, and takes a leader that it heard of last for one as long as it
 * has no vote: one that was killed as it gave another one a vote, before that knew of it, would never be elected again.
 *
 * And it votes once in a term. libraft's votes again, for the one to whom it has given the log, where that asks late: a
 * leader that has stepped down meanwhile, and has voted for another one, would make a second leader of that term.
 *
 * While a request for a vote is heard, its role is one that votes, and it gives the log to nobody; what was so before
 * is so again with `end`. */
typedef struct even_raft_rules_vote {
  int role; /* -1: it is no member */
  struct raft_transfer *transfer;
} even_raft_rules_vote;

even_raft_rules_vote even_raft_rules_vote_begin(struct raft *raft);
void even_raft_rules_vote_end(struct raft *raft, const even_raft_rules_vote *before);

/* Who asks whether it would be elected (dissertation, 9.6), in a term that is over, hears of the newer one. libraft
 * answers in the term that was asked for, so that the one whose log is the newest would ask in vain for ever where
 * another one whose vote it needs has seen a later term. */
void even_raft_rules_refuse(struct raft_request_vote_result *answer, uint64_t term);

#endif
