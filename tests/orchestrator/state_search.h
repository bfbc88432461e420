/* A search through all states of a model: each state once, from a first one, by whatever moves there are. */
#ifndef EVEN_TESTS_ORCHESTRATOR_STATE_SEARCH_H
#define EVEN_TESTS_ORCHESTRATOR_STATE_SEARCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { STATE_SEARCH_SLOTS = 1 << 23, STATE_SEARCH_MOST = 1 << 22, STATE_SEARCH_BYTES = 256 };

/* Zeroed, but for what the caller sets. */
typedef struct state_search {
  size_t bytes;      /* of a state, which has no padding that differs */
  int broken;        /* a rule is, on purpose: which; 0: none */
  size_t met;        /* of what shall be met at all */
  const char *wrong; /* ends the search */
  size_t count;      /* states seen */
  uint64_t *seen;
  unsigned char *stack;
  size_t height;
  size_t room;
} state_search;

/* A state that can follow. */
void state_search_visit(state_search *all, const void *next);
/* Until no state is left, or something is wrong. */
void state_search_run(state_search *all, const void *first, void (*moves)(state_search *all, const void *now));

#endif
