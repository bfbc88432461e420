/* Raft's rules, beside libraft's. */
#include "orchestrator/raft_rules.h"

#include "orchestrator/voter_links.h"

#include <string.h>

uint64_t even_raft_rules_hear(struct raft_append_entries *says) {
  const uint64_t end = says->prev_log_index + says->n_entries;
  says->leader_commit = says->leader_commit < end ? says->leader_commit : end;
  return end;
}

void even_raft_rules_answer(struct raft_append_entries_result *answer, uint64_t end) {
  if (answer->rejected == 0 && answer->last_log_index > end) {
    answer->last_log_index = end;
  }
}

/* ---- members ---- */

/* The newest entry of members up to number `last`; 0: there is none. Entries are numbered from 1 on. */
static uint64_t find_members(const even_raft_store *store, uint64_t last) {
  uint64_t index = last < store->count ? last : store->count;
  while (index > 0 && store->entries[index - 1].type != RAFT_CHANGE) {
    index--;
  }
  return index;
}

/* As raft_configuration_encode writes them: a byte (1), how many, and of each its number, its address with a zero at
 * its end, its role. */
static int read_members(const even_raft_kept *entry, struct raft_configuration *out) {
  const unsigned char *at = entry->data;
  const unsigned char *const end = at + entry->bytes;
  if (entry->bytes < 9 || *at != 1) {
    return RAFT_MALFORMED;
  }
  uint64_t count = even_voter_read_number(at + 1);
  at += 9;
  for (uint64_t i = 0; i < count; i++) {
    const unsigned char *zero = end - at < 8 ? NULL : memchr(at + 8, 0, (size_t)(end - at) - 8);
    if (zero == NULL || end - zero < 2) {
      return RAFT_MALFORMED;
    }
    int failed = raft_configuration_add(out, even_voter_read_number(at), (const char *)at + 8, zero[1]);
    if (failed != 0) {
      return failed == RAFT_NOMEM ? RAFT_NOMEM : RAFT_MALFORMED;
    }
    at = zero + 2;
  }
  return 0;
}

int even_raft_rules_members(struct raft *raft, const even_raft_store *store) {
  struct raft_configuration members;
  const uint64_t newest = find_members(store, UINT64_MAX);
  if (newest == 0) {
    return 0; /* it joins, and has none yet */
  }
  if (raft->state != RAFT_FOLLOWER) {
    return RAFT_BUSY;
  }
  raft_configuration_init(&members);
  int failed = read_members(&store->entries[newest - 1], &members);
  if (failed != 0) {
    raft_configuration_close(&members);
    return failed;
  }
  raft_configuration_close(&raft->configuration);
  raft->configuration = members;
  const bool sure = newest <= raft->commit_index || find_members(store, newest - 1) == 0;
  raft->configuration_index = sure ? newest : find_members(store, newest - 1);
  raft->configuration_uncommitted_index = sure ? 0 : newest;
  return 0;
}

/* ---- votes ---- */

static struct raft_server *own_server(struct raft *raft) {
  for (unsigned i = 0; i < raft->configuration.n; i++) {
    if (raft->configuration.servers[i].id == raft->id) {
      return &raft->configuration.servers[i];
    }
  }
  return NULL;
}

even_raft_rules_vote even_raft_rules_vote_begin(struct raft *raft) {
  struct raft_server *self = own_server(raft);
  const even_raft_rules_vote before = {.role = self == NULL ? -1 : self->role, .transfer = raft->transfer};
  raft->transfer = NULL;
  if (self == NULL) {
    return before;
  }
  if (self->role != RAFT_VOTER && raft->state == RAFT_FOLLOWER &&
      raft->io->time(raft->io) >= raft->election_timer_start + raft->election_timeout) {
    raft->follower_state.current_leader.id = 0;
  }
  self->role = RAFT_VOTER;
  return before;
}

void even_raft_rules_vote_end(struct raft *raft, const even_raft_rules_vote *before) {
  struct raft_server *self = own_server(raft);
  raft->transfer = before->transfer;
  if (self != NULL && before->role >= 0) {
    self->role = before->role;
  }
}

void even_raft_rules_refuse(struct raft_request_vote_result *answer, uint64_t term) {
  if (answer->pre_vote == raft_tribool_true && !answer->vote_granted && answer->term < term) {
    answer->term = term;
  }
}
