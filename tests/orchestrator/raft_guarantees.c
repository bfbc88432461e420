/* Sums of logs, and who led. */
#include "orchestrator/raft_guarantees.h"

#include "orchestrator/voter_links.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { MEMBERS = 8, TERMS = 4096, ENTRIES = 2048, AT_ONE_PLACE = 16 };

/* Of one place in all logs: what stood there, by term, and the sum of all up to it. */
typedef struct place {
  size_t count;
  uint64_t terms[AT_ONE_PLACE];
  uint64_t sums[AT_ONE_PLACE];
  uint64_t committed; /* its sum; 0: not yet */
} place;

/* As it was when it was seen last: its log, and what it had applied. */
typedef struct seen {
  uint64_t count;
  uint64_t last_term;
  uint64_t term;
  uint64_t applied;
} seen;

static struct {
  uint64_t leaders[TERMS]; /* 0: none was seen */
  place places[ENTRIES];
  seen members[MEMBERS];
} all;

void raft_guarantees_begin(void) {
  memset(&all, 0, sizeof all);
}

static uint64_t add(uint64_t sum, const void *bytes, size_t count) {
  const unsigned char *at = bytes;
  for (size_t i = 0; i < count; i++) {
    sum = (sum ^ at[i]) * 1099511628211u;
  }
  return sum;
}

/* Of members as raft_rules.c reads them: what libraft fills them up with, to whole words, is anything. */
static size_t bytes_of(const even_raft_kept *entry) {
  size_t at = 9;
  if (entry->type != RAFT_CHANGE) {
    return entry->bytes;
  }
  for (uint64_t left = even_voter_read_number(entry->data + 1); left > 0; left--) {
    at += 8 + strlen((const char *)entry->data + at + 8) + 2;
  }
  assert_true(at <= entry->bytes);
  return at;
}

static uint64_t add_entry(uint64_t sum, const even_raft_kept *entry) {
  sum = add(sum, &entry->term, sizeof entry->term);
  sum = add(sum, &entry->type, sizeof entry->type);
  return add(sum, entry->data, bytes_of(entry));
}

/* Whether it is the same as with all others that had an entry of this term there. */
static bool note(place *at, uint64_t term, uint64_t sum) {
  for (size_t i = 0; i < at->count; i++) {
    if (at->terms[i] == term) {
      return at->sums[i] == sum;
    }
  }
  assert_true(at->count < AT_ONE_PLACE);
  at->terms[at->count] = term;
  at->sums[at->count++] = sum;
  return true;
}

/* Up to which place Raft says that all is committed: the last entry of this term that was applied. */
static uint64_t find_committed(const even_voter_log *log) {
  const even_raft_store *store = &log->memory.store;
  uint64_t last = log->raft.last_applied < store->count ? log->raft.last_applied : store->count;
  while (last > 0 && store->entries[last - 1].term != log->raft.current_term) {
    last--;
  }
  return last;
}

static const char *see_log(const even_voter_log *log) {
  const even_raft_store *store = &log->memory.store;
  const uint64_t committed = find_committed(log);
  uint64_t sum = 14695981039346656037u;
  assert_true(store->count < ENTRIES);
  for (size_t i = 0; i < store->count; i++) {
    place *at = &all.places[i];
    sum = add_entry(sum, &store->entries[i]);
    if (!note(at, store->entries[i].term, sum)) {
      return "two logs differ before an entry that both have";
    }
    if (i < committed && at->committed != 0 && at->committed != sum) {
      return "two members have committed different entries";
    }
    at->committed = i < committed ? sum : at->committed;
  }
  return NULL;
}

const char *raft_guarantees_see(size_t i, const even_voter_log *log) {
  const even_raft_store *store = &log->memory.store;
  const seen now = {.count = store->count,
                    .last_term = store->count == 0 ? 0 : store->entries[store->count - 1].term,
                    .term = log->raft.current_term,
                    .applied = log->raft.last_applied};
  assert_true(i < MEMBERS && now.term < TERMS);
  if (even_voter_log_gave_up(log) != NULL) {
    return even_voter_log_gave_up(log)->what;
  }
  if (raft_state((struct raft *)&log->raft) == RAFT_LEADER) {
    uint64_t *leader = &all.leaders[now.term];
    if (*leader != 0 && *leader != log->raft.id) {
      return "two members lead the log in one term";
    }
    *leader = log->raft.id;
  }
  if (memcmp(&now, &all.members[i], sizeof now) == 0) {
    return NULL;
  }
  all.members[i] = now;
  return see_log(log);
}

void raft_guarantees_describe(const even_voter_log *log) {
  print_error("raft state %d, term %llu, log of %zu, %llu committed, voters %u, changing %d\n", log->raft.state,
              (unsigned long long)log->raft.current_term, log->memory.store.count,
              (unsigned long long)log->raft.commit_index, even_voter_log_voters(log), log->changing);
}
