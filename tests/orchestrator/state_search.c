/* States are told apart by 64 bits of a hash. */
#include "state_search.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static uint64_t hash_of(const void *state, size_t bytes) {
  const unsigned char *at = state;
  uint64_t hash = 1469598103934665603u;
  for (size_t i = 0; i < bytes; i++) {
    hash = (hash ^ at[i]) * 1099511628211u;
  }
  return hash == 0 ? 1 : hash;
}

void state_search_visit(state_search *all, const void *next) {
  uint64_t hash = hash_of(next, all->bytes);
  size_t slot = hash % STATE_SEARCH_SLOTS;
  while (all->seen[slot] != 0 && all->seen[slot] != hash) {
    slot = (slot + 1) % STATE_SEARCH_SLOTS;
  }
  if (all->seen[slot] != 0) {
    return;
  }
  assert_true(all->count < STATE_SEARCH_MOST);
  all->seen[slot] = hash;
  all->count++;
  if (all->height == all->room) {
    all->room = all->room == 0 ? 4096 : 2 * all->room;
    all->stack = test_realloc(all->stack, all->room * all->bytes);
  }
  memcpy(all->stack + all->height++ * all->bytes, next, all->bytes);
}

void state_search_run(state_search *all, const void *first, void (*moves)(state_search *all, const void *now)) {
  _Alignas(max_align_t) unsigned char now[STATE_SEARCH_BYTES];
  assert_true(all->bytes <= sizeof now);
  all->seen = test_calloc(STATE_SEARCH_SLOTS, sizeof *all->seen);
  state_search_visit(all, first);
  while (all->height > 0 && all->wrong == NULL) {
    memcpy(now, all->stack + --all->height * all->bytes, all->bytes);
    moves(all, now);
  }
  test_free(all->seen);
  test_free(all->stack);
}
