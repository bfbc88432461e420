/* Agreement of members: every interleaving of ranks that train, die, go on and are joined, with deaths at every point,
 * also while others recover or somebody joins, and two at once. The ranks follow evenstep/generations.py: a vote, the
 * exchange of gradients, the meeting that commits, the optimizer, and a call of the script's after each pass. */
#include "agree_search.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS = 4, GENERATIONS = 12, STEPS = 2, TURNS = 2 };
/* OUT: not a member yet, see `joiner`. STAND: between two steps, until there is a newer generation. */
enum phase { BEGIN, VOTE, FINISH, COMMIT, APPLY, CALL, STAND, RECOVER, OPEN, DONE, OUT };
enum { TWICE = 255 };
enum group { CONTROL, GRADIENTS, GROUPS };

typedef struct model_rank {
  uint8_t phase;
  uint8_t waits;  /* has arrived at the meeting of its phase */
  uint8_t failed; /* in RECOVER and OPEN: the phase that it was in */
  uint8_t generation;
  uint8_t tried;
  uint8_t committed, passes, calls;
  uint8_t void_passes;
  uint8_t pass, turn;             /* of the script's loop; steps of optimizers that are behind it in it */
  uint8_t done, over;             /* of these committed; the same when the pass began again: they are passed over */
  uint8_t void_seen;              /* one that is behind it is void: the pass comes again */
  uint8_t stands_next;            /* the last vote said so */
  uint8_t failing;                /* calls that it has not come to, and that fail there */
  uint8_t made, failed_calls;     /* calls that are behind it; a bit for each of the first eight that failed */
  uint8_t offers;                 /* OUT: it could join */
  uint8_t shared_in;              /* generation among whose members the batch under way was shared out */
  uint8_t summed_in;              /* of the gradients that it holds */
  uint8_t applied[STEPS * TURNS]; /* 1 + that generation */
} model_rank;

typedef struct model {
  model_rank rank[RANKS];
  uint8_t dead, seen_dead, done, seen_done; /* masks; seen: by the agent */
  uint8_t number;
  uint8_t members[GENERATIONS];
  uint8_t arrivals[GENERATIONS][GROUPS][RANKS];
  uint8_t opened[GENERATIONS];
  uint8_t wish[GENERATIONS]; /* what the first member said in the last vote */
  struct {
    uint8_t committed, passes, calls, stands, asks;
  } told[GENERATIONS][RANKS];
} model;

/* Of whole words: a search makes it for every move. */
static uint64_t print_of(const model *state) {
  uint64_t hash = 0x9e3779b97f4a7c15u;
  uint64_t words[(sizeof *state + sizeof(uint64_t) - 1) / sizeof(uint64_t)] = {0};
  memcpy(words, state, sizeof *state);
  for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
    hash = (hash ^ words[i]) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
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
  search->moves++;
  if (!insert(search, print_of(state))) {
    return;
  }
  if (search->height == search->stack_room) {
    search->stack_room *= 2;
    model *grown = realloc(search->stack, search->stack_room * sizeof *search->stack);
    assert_non_null(grown);
    search->stack = grown;
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
  bool last = rank->committed == search->steps * search->turns;
  return last ? search->call_last : search->calls;
}

static bool is_joiner_outside(const exploration *search, const model *state, int index) {
  return index == search->joiner && state->rank[index].phase == OUT;
}

static int first_member(const exploration *search, const model *state, uint8_t generation) {
  int first = 0;
  while (first < search->ranks && !has(state->members[generation], first)) {
    first++;
  }
  return first;
}

/* What the agent wants now. */
static bool somebody_can_join(const exploration *search, const model *state) {
  int joiner = search->joiner;
  return joiner >= 0 && is_joiner_outside(search, state, joiner) && state->rank[joiner].offers != 0 &&
         !has(state->seen_dead, joiner) && !has(state->members[state->number], joiner);
}

static void turn_is_over(const exploration *search, model_rank *rank) {
  rank->turn++;
  rank->phase = rank->turn < search->turns ? VOTE : CALL;
}

static void apply(const exploration *search, model_rank *rank) {
  uint8_t *applied = &rank->applied[rank->pass * search->turns + rank->turn];
  *applied = *applied == 0 ? (uint8_t)(1 + rank->summed_in) : TWICE;
  turn_is_over(search, rank);
}

static void call_is_over(model_rank *rank, bool failed) {
  if (failed && rank->made < 8) {
    rank->failed_calls |= (uint8_t)(1u << rank->made);
  }
  rank->made++;
}

/* Runs a rank from where it is to the next meeting, and into it, or to where it stands. */
static void advance(const exploration *search, model *state, int index) {
  model_rank *rank = &state->rank[index];
  for (;;) {
    if (rank->phase == BEGIN) {
      if (rank->void_seen) {
        rank->passes++;
        rank->over = search->forgets_over ? 0 : rank->done;
        rank->turn = rank->void_seen = 0;
      } else if (rank->turn > 0) {
        rank->pass++;
        rank->turn = rank->done = rank->over = 0;
      }
      if (rank->stands_next) {
        rank->stands_next = 0;
        rank->phase = STAND;
        return;
      }
      if (rank->pass == search->steps) {
        end(search, state, index);
        return;
      }
      rank->shared_in = rank->generation;
      rank->phase = VOTE;
    }
    if (rank->phase <= COMMIT && is_void(rank)) {
      rank->void_seen = 1;
      turn_is_over(search, rank);
      continue;
    }
    if (rank->phase == COMMIT && rank->turn < rank->over) {
      turn_is_over(search, rank);
      continue;
    }
    if (rank->phase == APPLY) {
      apply(search, rank);
      continue;
    }
    if (rank->phase != CALL) {
      break;
    }
    if (makes_a_call(search, rank)) {
      if (rank->failing == 0) {
        break;
      }
      rank->failing--;
      call_is_over(rank, true);
    }
    rank->phase = BEGIN;
  }
  rank->waits = 1;
  state->arrivals[rank->generation][group_of(rank->phase)][index]++;
  if (rank->phase == VOTE && index == first_member(search, state, rank->generation)) {
    state->wish[rank->generation] = somebody_can_join(search, state) ? 1 : 0;
  }
}

static void come_out(exploration *search, model *state, int index) {
  model_rank *rank = &state->rank[index];
  rank->waits = 0;
  switch (rank->phase) {
    case VOTE:
      rank->stands_next = state->wish[rank->generation];
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
      rank->done++;
      rank->passes = rank->void_passes = 0;
      rank->phase = APPLY;
      break;
    default:
      rank->calls++;
      call_is_over(rank, false);
      rank->phase = BEGIN;
      break;
  }
}

/* Recovery._go_on */
static void go_on(exploration *search, model *state, int index) {
  model_rank *rank = &state->rank[index];
  even_position positions[RANKS];
  even_agreement agreed;
  size_t count = 0;
  for (int i = 0; i < search->ranks; i++) {
    if (has(state->members[rank->tried], i)) {
      positions[count++] = (even_position){.committed = state->told[rank->tried][i].committed,
                                           .passes = state->told[rank->tried][i].passes,
                                           .calls = state->told[rank->tried][i].calls,
                                           .stands = state->told[rank->tried][i].stands != 0,
                                           .asks = state->told[rank->tried][i].asks != 0};
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
  rank->phase = rank->failed == STAND ? BEGIN : rank->failed;
  rank->stands_next = 0;
  if (agreed.committed > rank->committed) {
    rank->committed = (uint8_t)agreed.committed;
    rank->done++;
    rank->passes = 0;
    apply(search, rank); /* now, before what is void */
  }
  rank->void_passes = (uint8_t)agreed.voids;
  rank->waits = 0;
  bool in_it = rank->failed == CALL && agreed.calls == rank->calls;
  if (agreed.calls > rank->calls) {
    come_out(search, state, index);
  }
  if (agreed.fails) {
    rank->calls++;
    search->failed++;
    if (in_it) {
      call_is_over(rank, true);
      rank->phase = BEGIN;
    } else if (!search->forgets_failing) {
      rank->failing++;
    }
  }
  search->recovered++;
  search->joined += index == search->joiner ? 1 : 0;
}

static void hears_of_a_newer_one(model *next, int index, enum phase failed) {
  model_rank *rank = &next->rank[index];
  rank->failed = (uint8_t)failed;
  rank->phase = RECOVER;
  rank->waits = 0;
  rank->tried = rank->generation;
}

/* A process that is no member: it offers itself, and takes the state that the first of those that stand gives, where
 * that one has come to the new generation and lives. */
static void steps_of_joiner(exploration *search, const model *state, int index) {
  model next = *state;
  model_rank *rank = &next.rank[index];
  uint8_t number = state->number;
  if (!rank->offers) {
    rank->offers = 1;
    push(search, &next);
    return;
  }
  if (!has(state->members[number], index)) {
    return;
  }
  if (state->members[number] == 1u << index) { /* nobody is left who could give: it ends with an error */
    next.dead |= (uint8_t)(1u << index);
    push(search, &next);
    return;
  }
  int giver = 0;
  while (giver == index || !has(state->members[number], giver)) {
    giver++;
  }
  if (!has(state->opened[number], giver) || has(state->dead, giver)) {
    return;
  }
  const model_rank *its = &state->rank[giver];
  if (!state->told[number][giver].stands || has(state->members[its->generation], index)) {
    search->wrong = "a rank that joins was given a state in the middle of a step";
    return;
  }
  rank->committed = state->told[number][giver].committed;
  rank->pass = its->pass;
  rank->calls = state->told[number][giver].calls;
  rank->made = its->made;
  rank->failed_calls = its->failed_calls;
  memcpy(rank->applied, its->applied, sizeof rank->applied);
  rank->generation = (uint8_t)(number - 1);
  hears_of_a_newer_one(&next, index, STAND);
  push(search, &next);
}

static void steps_of_rank(exploration *search, const model *state, int index) {
  const model_rank *rank = &state->rank[index];
  model next = *state;
  if (rank->phase == OUT) {
    steps_of_joiner(search, state, index);
    return;
  }
  if (rank->phase == RECOVER) {
    if (state->number > rank->tried) {
      model_rank *moved = &next.rank[index];
      moved->tried = state->number;
      moved->phase = OPEN;
      next.opened[state->number] |= (uint8_t)(1u << index);
      next.told[state->number][index].committed = rank->committed;
      next.told[state->number][index].passes = rank->passes;
      next.told[state->number][index].calls = rank->calls;
      next.told[state->number][index].stands = rank->failed == STAND ? 1 : 0;
      next.told[state->number][index].asks = search->asks && rank->failed == CALL ? 1 : 0;
      push(search, &next);
    }
    return;
  }
  if (rank->phase == STAND) {
    if (state->number > rank->generation) {
      hears_of_a_newer_one(&next, index, STAND);
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
    hears_of_a_newer_one(&next, index, rank->phase);
    push(search, &next);
  }
}

/* What ranks say in the memory that they share with the agent stays there when they die. */
static bool stands_in_newest(const model *state, int index) {
  return state->rank[index].phase == STAND && state->rank[index].generation == state->number;
}

/* even_job_replace_tick */
static void agent_lets_join(exploration *search, const model *state) {
  model next = *state;
  bool any = false;
  bool all = true;
  for (int i = 0; i < search->ranks; i++) {
    if (has(state->members[state->number], i)) {
      any = any || stands_in_newest(state, i);
      all = all && stands_in_newest(state, i);
    }
  }
  bool can = somebody_can_join(search, state);
  if ((can && all) || (!can && any)) { /* else nobody comes any more: they go on as they are */
    next.number++;
    next.members[next.number] = (uint8_t)(state->members[state->number] | (can ? 1u << search->joiner : 0u));
    push(search, &next);
  }
}

/* even_job_goes_on_without, one ended process after the other. */
static void steps_of_agent(exploration *search, const model *state) {
  uint8_t members = state->members[state->number];
  for (int i = 0; i < search->ranks; i++) {
    model next = *state;
    bool died = has(state->dead & (uint8_t)~state->seen_dead, i);
    bool ended = has(state->done & (uint8_t)~state->seen_done, i);
    if (!died && !ended) {
      continue;
    }
    next.seen_dead |= (uint8_t)(died ? 1u << i : 0);
    next.seen_done |= (uint8_t)(ended ? 1u << i : 0);
    uint8_t left = (uint8_t)(members & ~(unsigned)(next.seen_dead | next.seen_done));
    if (has(members, i) && (died || state->number > 0) && left != 0) {
      next.number++;
      next.members[next.number] = left;
    }
    push(search, &next);
  }
  if ((members & (uint8_t)~(state->seen_dead | state->seen_done)) != 0) {
    agent_lets_join(search, state);
  } else if (search->joiner >= 0 && is_joiner_outside(search, state, search->joiner) &&
             !has(state->dead, search->joiner)) { /* nobody is left whom it could join, or who could give to it */
    model next = *state;
    next.dead |= (uint8_t)(1u << search->joiner);
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
    for (int step = 0; step < search->steps * search->turns; step++) {
      if (rank->applied[step] == TWICE) {
        search->wrong = "a step was applied twice";
      }
      if (rank->applied[step] == 0) {
        search->wrong = "a step was never applied";
      }
      /* without a last meeting a rank may be gone with its last step before the others know whether it stands */
      bool known = search->call_last || step + 1 < search->steps * search->turns;
      if (first != NULL && known && rank->applied[step] != first->applied[step]) {
        search->wrong = "survivors applied different gradients";
      }
    }
    /* who has come out of the last call may be gone before another hears that it failed */
    uint8_t known_calls = (uint8_t)((1u << (rank->made > 0 ? rank->made - 1 : 0)) - 1);
    if (first != NULL && search->call_last &&
        (((rank->failed_calls ^ first->failed_calls) & known_calls) != 0 || rank->made != first->made)) {
      search->wrong = "a call failed on one survivor and not on another";
    }
    first = first == NULL ? rank : first;
  }
}

void explore(exploration *search) {
  model start;
  memset(&start, 0, sizeof start);
  start.members[0] = (uint8_t)((1u << search->ranks) - 1);
  if (search->joiner >= 0) {
    start.members[0] &= (uint8_t)~(1u << search->joiner);
    start.rank[search->joiner].phase = OUT;
  }
  search->room = 1u << 16;
  search->seen = calloc(search->room, sizeof *search->seen);
  search->stack_room = 1024;
  search->stack = malloc(search->stack_room * sizeof *search->stack);
  assert_non_null(search->seen);
  assert_non_null(search->stack);
  push(search, &start);
  while (search->height > 0 && search->wrong == NULL) {
    model state = search->stack[--search->height];
    search->moves = 0;
    for (int i = 0; i < search->ranks; i++) {
      if (!has(state.dead | state.done, i)) {
        steps_of_rank(search, &state, i);
      }
    }
    steps_of_agent(search, &state);
    if (search->moves == 0) { /* nothing is left to do but to die */
      check_end(search, &state);
    }
    for (int i = 0; i < search->ranks; i++) {
      if (!has(state.dead | state.done, i) && bits(state.dead) < search->deaths) {
        model next = state;
        next.dead |= (uint8_t)(1u << i);
        push(search, &next);
      }
    }
  }
  free(search->seen);
  free(search->stack);
}
