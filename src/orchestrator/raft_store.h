/* What a member must not forget (Raft's paper, figure 2): its term, its vote, its log. In memory, and in a file of a
 * folder of its own, which is replaced and synced before anybody hears of what is in it; so a member that is started
 * again is the same one, and not a new one. One thread. */
#ifndef EVEN_ORCHESTRATOR_RAFT_STORE_H
#define EVEN_ORCHESTRATOR_RAFT_STORE_H

#include "base/text.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { EVEN_RAFT_STORE_MOST = 64 << 20 };

typedef struct even_raft_kept {
  uint64_t term;
  unsigned type; /* as raft numbers them */
  size_t bytes;
  unsigned char *data;
} even_raft_kept;

typedef struct even_raft_store {
  even_text folder; /* "": in memory alone */
  int lock;         /* -1: none */
  uint64_t member;
  uint64_t term;
  uint64_t vote; /* 0: none in this term */
  even_raft_kept *entries;
  size_t count;
} even_raft_store;

/* `folder`: "…/members"; the member's own is made in it, and locked for as long as the store is open, so that one
 * member is one process. NULL, or one that cannot be made or has no locks: in memory alone. *known: the file of an
 * earlier process of this member was there, and is what the store holds now. EVEN_ERR_IN_USE: that process lives.
 * EVEN_ERR_CORRUPT: the file is not whole. */
even_status even_raft_store_open(even_raft_store *store, const char *folder, uint64_t member,
                                 bool *known) EVEN_MUST_USE;
/* `forget`: the member is needed no more, and its folder goes. One that was never opened is allowed, if zeroed. */
void even_raft_store_close(even_raft_store *store, bool forget);

/* Each is durable when it returns. Where the file cannot be written any more it is removed and the member goes on in
 * memory alone: one that is started again is another one then. Where not even that can be, or there is no memory, an
 * error: the store holds what it held before. */
even_status even_raft_store_term(even_raft_store *store, uint64_t term) EVEN_MUST_USE;
even_status even_raft_store_vote(even_raft_store *store, uint64_t member) EVEN_MUST_USE;
/* Entries are copied. */
even_status even_raft_store_append(even_raft_store *store, const even_raft_kept *entries, size_t count) EVEN_MUST_USE;
/* Drops all entries from `index` (of the first: 1) on. */
even_status even_raft_store_truncate(even_raft_store *store, uint64_t index) EVEN_MUST_USE;

/* The file: pure. */
even_status even_raft_store_write(const even_raft_store *store, even_text *out) EVEN_MUST_USE;
/* Into a store that holds nothing. EVEN_ERR_CORRUPT: these bytes are no file of `store->member`'s. */
even_status even_raft_store_read(even_raft_store *store, const char *bytes, size_t count) EVEN_MUST_USE;

#endif
