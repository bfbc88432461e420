/* Agreement of survivors: every interleaving of ranks that train, die and go on, with deaths at every point, also while
 * others recover, and two at once. The ranks follow evenstep/generations.py: a vote, the exchange of gradients, the
 * meeting that commits, the optimizer, and a call of the script's after each pass. */
#include "fault/agree.h"

#include "base/fail.h"
#include "support/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS = 4, GENERATIONS = 7, STEPS = 2 };
enum phase { BEGIN, VOTE, FINISH, COMMIT, APPLY, CALL, RECOVER, OPEN, DONE };
enum group { CONTROL, GRADIENTS, GROUPS };

typedef struct model_rank {
  uint8_t phase;
  uint8_t waits;  /* has arrived at the meeting of its phase */
  uint8_t failed; /* in RECOVER and OPEN: the phase that it was in */
  uint8_t generation;
  uint8_t tried;
  uint8_t committed, passes, calls;
  uint8_t void_passes;
  uint8_t shared_in;      /* generation among whose members the batch under way was shared out */
  uint8_t summed_in;      /* of the gradients that it holds */
  uint8_t applied[STEPS]; /* 1 + that generation */
} model_rank;

typedef struct model {
  model_rank rank[RANKS];
  uint8_t dead, seen_dead, done, seen_done; /* masks; seen: by the agent */
  uint8_t number;
  uint8_t members[GENERATIONS];
  uint8_t arrivals[GENERATIONS][GROUPS][RANKS];
  uint8_t opened[GENERATIONS];
  struct {
    uint8_t committed, passes, calls;
  } told[GENERATIONS][RANKS];
} model;

typedef even_status agree_call(const even_position *positions, size_t count, even_agreement *out);

typedef struct exploration {
  int ranks, steps, deaths;
  bool calls;     /* after each pass */
  bool call_last; /* the script ends with one */
  agree_call *agree;
  uint64_t *seen;
  size_t room, count;
  model *stack;
  size_t height, stack_room;
  const char *wrong; /* NULL: nothing was found */
  size_t recovered;  /* states in which all that are left went on */
} exploration;

static uint64_t print_of(const model *state) {
  const unsigned char *bytes = (const unsigned char *)state;
  uint64_t hash = 0x9e3779b97f4a7c15u;
  for (size_t i = 0; i < sizeof *state; i++) {
    hash = (hash ^ bytes[i]) * 0x100000001b3u;
    hash ^= hash >> 29;
  }
  return hash | 1u;
}

static bool insert(exploration *search, uint64_t print) {
  if (search->count * 2 >= search->room) {
    uint64_t *before = search->seen;
    size_t room = search->room;
    search->room = room * 2;
    search->seen = calloc(search->room, sizeof *search->seen);
    assert_non_null(search->seen);
    search->count = 0;
    for (size_t i = 0; i < room; i++) {
      if (before[i] != 0) {
        (void)insert(search, before[i]);
      }
    }
    free(before);
  }
  size_t at = (size_t)(print % search->room);
  while (search->seen[at] != 0) {
    if (search->seen[at] == print) {
      return false;
    }
    at = (at + 1) % search->room;
  }
  search->seen[at] = print;
  search->count++;
  return true;
}

static void push(exploration *search, const model *state) {
  if (!insert(search, print_of(state))) {
    return;
  }
  if (search->height == search->stack_room) {
    search->stack_room *= 2;
    search->stack = realloc(search->stack, search->stack_room * sizeof *search->stack);
    assert_non_null(search->stack);
  }
  search->stack[search->height++] = *state;
}

static bool has(uint8_t mask, int rank) {
  return (mask >> rank & 1u) != 0;
}

static enum group group_of(enum phase phase) {
  return phase == FINISH ? GRADIENTS : CONTROL;
}

static bool all_have_come(const exploration *search, const model *state, int rank) {
  const model_rank *own = &state->rank[rank];
  enum group group = group_of(own->phase);
  const uint8_t *arrivals = state->arrivals[own->generation][group];
  for (int i = 0; i < search->ranks; i++) {
    if (has(state->members[own->generation], i) && arrivals[i] < arrivals[rank]) {
      return false;
    }
  }
  return true;
}

/* Whether the meeting that a rank is in may fail: a member of its generation has died, or has heard of it and revoked,
 * or has ended well and never came. */
static bool broken(const exploration *search, const model *state, int rank) {
  const model_rank *own = &state->rank[rank];
  bool opens = own->phase == OPEN;
  uint8_t generation = opens ? own->tried : own->generation;
  const uint8_t *arrivals = state->arrivals[generation][group_of(own->phase)];
  for (int i = 0; i < search->ranks; i++) {
    bool came = opens ? has(state->opened[generation], i) : arrivals[i] >= arrivals[rank];
    bool gone = has(state->dead, i) || state->rank[i].tried > generation || (has(state->done, i) && !came);
    if (has(state->members[generation], i) && gone) {
      return true;
    }
  }
  return false;
}

static bool is_void(const model_rank *rank) {
  return rank->passes < rank->void_passes;
}

static void end(const exploration *search, model *state, int index) {
  (void)search;
  state->rank[index].phase = DONE;
  state->done |= (uint8_t)(1u << index);
}

static bool makes_a_call(const exploration *search, const model_rank *rank) {
  bool last = rank->committed == search->steps;
  return last ? search->call_last : search->calls;
}

/* Runs a rank from where it is to the next meeting, and into it. */
static void advance(const exploration *search, model *state, int index) {
  model_rank *rank = &state->rank[index];
  for (;;) {
    if (rank->phase == BEGIN) {
      if (rank->committed == search->steps) {
        end(search, state, index);
        return;
      }
      rank->shared_in = rank->generation;
      rank->phase = VOTE;
    }
    if (rank->phase <= COMMIT && is_void(rank)) {
      rank->passes++;
      rank->phase = CALL;
    }
    if (rank->phase == APPLY) {
      rank->applied[rank->committed - 1] = (uint8_t)(1 + rank->summed_in);
      rank->phase = CALL;
    }
    if (rank->phase != CALL || makes_a_call(search, rank)) {
      break;
    }
    rank->phase = BEGIN;
  }
  rank->waits = 1;
  state->arrivals[rank->generation][group_of(rank->phase)][index]++;
}

static void come_out(exploration *search, model *state, int index) {
  model_rank *rank = &state->rank[index];
  rank->waits = 0;
  switch (rank->phase) {
    case VOTE:
      rank->phase = FINISH;
      break;
    case FINISH:
      if (rank->shared_in != rank->generation) {
        search->wrong = "a share of the batch was lost";
      }
      rank->summed_in = rank->generation;
      rank->phase = COMMIT;
      break;
    case COMMIT:
      rank->committed++;
      rank->passes = rank->void_passes = 0;
      rank->phase = APPLY;
      break;
    default:
      rank->calls++;
      rank->phase = BEGIN;
      break;
  }
}

/* Recovery.go_on */
static void go_on(exploration *search, model *state, int index) {
  model_rank *rank = &state->rank[index];
  even_position positions[RANKS];
  even_agreement agreed;
  size_t count = 0;
  for (int i = 0; i < search->ranks; i++) {
    if (has(state->members[rank->tried], i)) {
      positions[count++] = (even_position){.committed = state->told[rank->tried][i].committed,
                                           .passes = state->told[rank->tried][i].passes,
                                           .calls = state->told[rank->tried][i].calls};
    }
  }
  if (search->agree(positions, count, &agreed) != EVEN_OK) {
    search->wrong = "ranks that make the same calls were too far apart";
    return;
  }
  if ((agreed.committed > rank->committed && rank->failed != COMMIT) ||
      (agreed.calls > rank->calls && rank->failed != CALL)) {
    search->wrong = "a rank is behind in what it is not in";
    return;
  }
  rank->generation = rank->tried;
  rank->phase = rank->failed;
  if (agreed.committed > rank->committed) {
    rank->committed = (uint8_t)agreed.committed;
    rank->passes = 0;
    rank->phase = APPLY;
    /* it applies now, before what is void */
    rank->applied[rank->committed - 1] = (uint8_t)(1 + rank->summed_in);
    rank->phase = CALL;
  }
  rank->void_passes = (uint8_t)(agreed.passes + 1);
  rank->waits = 0;
  if (agreed.calls > rank->calls) {
    come_out(search, state, index);
  }
  search->recovered++;
}

static void steps_of_rank(exploration *search, const model *state, int index) {
  const model_rank *rank = &state->rank[index];
  model next = *state;
  if (rank->phase == RECOVER) {
    if (state->number > rank->tried) {
      model_rank *moved = &next.rank[index];
      moved->tried = state->number;
      moved->phase = OPEN;
      next.opened[state->number] |= (uint8_t)(1u << index);
      next.told[state->number][index].committed = rank->committed;
      next.told[state->number][index].passes = rank->passes;
      next.told[state->number][index].calls = rank->calls;
      push(search, &next);
    }
    return;
  }
  if (rank->phase == OPEN) {
    if ((state->opened[rank->tried] & state->members[rank->tried]) == state->members[rank->tried]) {
      go_on(search, &next, index);
      push(search, &next);
      next = *state;
    }
    if (broken(search, state, index)) {
      next.rank[index].phase = RECOVER;
      push(search, &next);
    }
    return;
  }
  if (!rank->waits) {
    advance(search, &next, index);
    push(search, &next);
    return;
  }
  if (all_have_come(search, state, index)) {
    come_out(search, &next, index);
    push(search, &next);
    next = *state;
  }
  if (broken(search, state, index)) {
    next.rank[index].failed = rank->phase;
    next.rank[index].phase = RECOVER;
    next.rank[index].waits = 0;
    next.rank[index].tried = rank->generation;
    push(search, &next);
  }
}

/* even_job_goes_on_without, one ended process after the other. */
static void steps_of_agent(exploration *search, const model *state) {
  for (int i = 0; i < search->ranks; i++) {
    model next = *state;
    bool died = has(state->dead & (uint8_t)~state->seen_dead, i);
    bool ended = has(state->done & (uint8_t)~state->seen_done, i);
    if (!died && !ended) {
      continue;
    }
    next.seen_dead |= (uint8_t)(died ? 1u << i : 0);
    next.seen_done |= (uint8_t)(ended ? 1u << i : 0);
    uint8_t left = (uint8_t)(((1u << search->ranks) - 1) & ~(unsigned)(next.seen_dead | next.seen_done));
    if ((died || state->number > 0) && left != 0) {
      next.number++;
      next.members[next.number] = left;
    }
    push(search, &next);
  }
}

static int bits(uint8_t mask) {
  int count = 0;
  for (; mask != 0; mask &= (uint8_t)(mask - 1)) {
    count++;
  }
  return count;
}

static void check_end(exploration *search, const model *state) {
  const model_rank *first = NULL;
  uint8_t all = (uint8_t)((1u << search->ranks) - 1);
  if ((state->dead | state->done) != all) {
    search->wrong = "ranks wait for ever";
    return;
  }
  for (int i = 0; i < search->ranks; i++) {
    const model_rank *rank = &state->rank[i];
    if (!has(state->done, i)) {
      continue;
    }
    for (int step = 0; step < search->steps; step++) {
      if (rank->applied[step] == 0) {
        search->wrong = "a step was never applied";
      }
      /* without a last meeting a rank may be gone with its last step before the others know whether it stands */
      bool known = search->call_last || step + 1 < search->steps;
      if (first != NULL && known && rank->applied[step] != first->applied[step]) {
        search->wrong = "survivors applied different gradients";
      }
    }
    first = first == NULL ? rank : first;
  }
}

/* Whether nothing is left to do but to die. */
static bool nothing_moves(const exploration *search, const model *state) {
  for (int i = 0; i < search->ranks; i++) {
    const model_rank *rank = &state->rank[i];
    bool moves = false;
    if (has(state->dead | state->done, i)) {
      moves = !has(state->seen_dead | state->seen_done, i);
    } else if (rank->phase == RECOVER) {
      moves = state->number > rank->tried;
    } else if (rank->phase == OPEN) {
      uint8_t members = state->members[rank->tried];
      moves = (state->opened[rank->tried] & members) == members || broken(search, state, i);
    } else {
      moves = !rank->waits || all_have_come(search, state, i) || broken(search, state, i);
    }
    if (moves) {
      return false;
    }
  }
  return true;
}

static void explore(exploration *search) {
  model start;
  memset(&start, 0, sizeof start);
  start.members[0] = (uint8_t)((1u << search->ranks) - 1);
  search->room = 1u << 16;
  search->seen = calloc(search->room, sizeof *search->seen);
  search->stack_room = 1024;
  search->stack = malloc(search->stack_room * sizeof *search->stack);
  assert_non_null(search->seen);
  assert_non_null(search->stack);
  push(search, &start);
  while (search->height > 0 && search->wrong == NULL) {
    model state = search->stack[--search->height];
    for (int i = 0; i < search->ranks; i++) {
      if (has(state.dead | state.done, i)) {
        continue;
      }
      steps_of_rank(search, &state, i);
      if (bits(state.dead) < search->deaths) {
        model next = state;
        next.dead |= (uint8_t)(1u << i);
        push(search, &next);
      }
    }
    steps_of_agent(search, &state);
    if (nothing_moves(search, &state)) {
      check_end(search, &state);
    }
  }
  free(search->seen);
  free(search->stack);
}

static void assert_right(int ranks, int steps, int deaths, bool calls, bool call_last) {
  exploration search = {
      .ranks = ranks, .steps = steps, .deaths = deaths, .calls = calls, .call_last = call_last, .agree = even_agree};
  explore(&search);
  if (search.wrong != NULL) {
    fail_msg("%d ranks, %d steps, %d deaths: %s", ranks, steps, deaths, search.wrong);
  }
  assert_true(search.recovered > 0);
  print_message("%d ranks, %d steps, %d deaths: %zu states\n", ranks, steps, deaths, search.count);
}

static void two_ranks(void **state) {
  (void)state;
  for (int i = 0; i < 4; i++) {
    assert_right(2, 2, 1, (i & 1) != 0, (i & 2) != 0);
  }
}

static void three_ranks_of_which_two_die(void **state) {
  (void)state;
  assert_right(3, 2, 2, true, true);
  assert_right(3, 2, 2, false, true);
  assert_right(3, 2, 2, false, false);
}

static void four_ranks_of_which_two_die(void **state) {
  (void)state;
  assert_right(4, 1, 2, false, true);
}

/* Whoever has not come out of the commit does not apply. */
static even_status takes_the_least(const even_position *positions, size_t count, even_agreement *out) {
  EVEN_TRY(even_agree(positions, count, out));
  for (size_t i = 0; i < count; i++) {
    out->committed = positions[i].committed < out->committed ? positions[i].committed : out->committed;
  }
  return EVEN_OK;
}

/* Each redoes what it was in. */
static even_status forgets_passes(const even_position *positions, size_t count, even_agreement *out) {
  EVEN_TRY(even_agree(positions, count, out));
  out->passes = 0;
  return EVEN_OK;
}

/* Calls are made again by all that are in one. */
static even_status forgets_calls(const even_position *positions, size_t count, even_agreement *out) {
  EVEN_TRY(even_agree(positions, count, out));
  for (size_t i = 0; i < count; i++) {
    out->calls = positions[i].calls < out->calls ? positions[i].calls : out->calls;
  }
  return EVEN_OK;
}

static void the_search_finds_wrong_agreements(void **state) {
  agree_call *const wrong[] = {takes_the_least, forgets_passes, forgets_calls};
  (void)state;
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    exploration search = {.ranks = 3, .steps = 2, .deaths = 2, .calls = i == 2, .call_last = true, .agree = wrong[i]};
    explore(&search);
    if (search.wrong == NULL) {
      fail_msg("nothing is wrong with agreement %zu, it says after %zu states", i, search.count);
    }
  }
}

static void says_what_cannot_be(void **state) {
  even_agreement agreed;
  const even_position far[] = {{.committed = 3}, {.committed = 5}};
  const even_position calls[] = {{.calls = 7}, {.calls = 9}};
  (void)state;
  assert_int_equal(even_agree(far, 0, &agreed), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_agree(far, 2, &agreed), EVEN_ERR_MISMATCH);
  assert_int_equal(even_agree(calls, 2, &agreed), EVEN_ERR_MISMATCH);
}

static void the_furthest_counts(void **state) {
  even_agreement agreed;
  const even_position positions[] = {{.committed = 4, .passes = 2, .calls = 9},
                                     {.committed = 5, .calls = 8},
                                     {.committed = 5, .passes = 1, .calls = 9}};
  (void)state;
  assert_int_equal(even_agree(positions, 3, &agreed), EVEN_OK);
  assert_int_equal(agreed.committed, 5);
  assert_int_equal(agreed.passes, 1); /* those of the step that stands do not count */
  assert_int_equal(agreed.calls, 9);
  assert_int_equal(agreed.giver, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_furthest_counts),
      cmocka_unit_test(says_what_cannot_be),
      cmocka_unit_test(two_ranks),
      cmocka_unit_test(three_ranks_of_which_two_die),
      cmocka_unit_test(four_ranks_of_which_two_die),
      cmocka_unit_test(the_search_finds_wrong_agreements),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
