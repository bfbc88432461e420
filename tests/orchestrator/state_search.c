/* States are told apart by 64 bits of a hash. */
#include "state_search.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

/* Of whole words: a search makes it for every move. */
static uint64_t hash_of(const void *state, size_t bytes) {
  uint64_t hash = 0x9e3779b97f4a7c15u;
  uint64_t words[STATE_SEARCH_BYTES / sizeof(uint64_t)] = {0};
  memcpy(words, state, bytes);
  for (size_t i = 0; i * sizeof words[0] < bytes; i++) {
    hash = (hash ^ words[i]) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
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
