/* Who of those that wait for one another never gets on, by what they have told: cases, and made-up worlds whose ranks
 * ask one another while they run. Answers are late, come in any order, twice or never, and speak of moments long ago.
 */
#include "base/alloc.h"
#include "comm/circle.h"
#include "comm/waits.h"
#include "support/search.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* ---- cases ---- */

static even_circle_process waiting(uint64_t process, uint64_t change, uint64_t whom, uint64_t at) {
  return (even_circle_process){
      .process = process, .change = change, .waits = 1, .wait = {{.whoms = 1, .whom = {whom}, .at = {at}}}};
}

static void need(even_circle_process *one, uint64_t whom, uint64_t at) {
  even_circle_wait *wait = &one->wait[0];
  wait->at[wait->whoms] = at;
  wait->whom[wait->whoms++] = whom;
}

static void two_that_wait_for_each_other_are_stuck(void **state) {
  even_circle_process of[] = {waiting(7, 3, 8, 5), waiting(8, 5, 7, 3)};
  (void)state;
  even_circle_search(of, 2);
  assert_true(of[0].stuck && of[1].stuck);
  assert_int_equal(even_circle_next(of, 2, 0), 1);
  assert_int_equal(even_circle_next(of, 2, 1), 0);
}

static void one_that_has_gone_on_since_is_not(void **state) {
  even_circle_process of[] = {waiting(7, 3, 8, 5), waiting(8, 6, 7, 3), waiting(7, 4, 8, 6)};
  (void)state;
  even_circle_search(of, 2);
  assert_false(of[0].stuck || of[1].stuck);
  even_circle_search(of, 3); /* its words of then stay, and are of no harm */
  assert_false(of[0].stuck || of[1].stuck || of[2].stuck);
}

static void one_that_may_receive_from_another_is_not(void **state) {
  even_circle_process of[] = {waiting(7, 3, 8, 5), waiting(8, 5, 7, 3), waiting(9, 1, 7, 3)};
  (void)state;
  of[0].wait[0].any = 1;
  need(&of[0], 9, 2); /* which has gone on: it is at change 1 here */
  even_circle_search(of, 3);
  assert_false(of[0].stuck || of[1].stuck || of[2].stuck);
  of[2].change = 2;
  even_circle_search(of, 3);
  assert_true(of[0].stuck && of[1].stuck && of[2].stuck);
  of[0].wait[0].whom[1] = 0; /* of one of them nothing is known */
  even_circle_search(of, 3);
  assert_false(of[0].stuck || of[1].stuck || of[2].stuck);
}

static void one_whose_other_thread_gets_on_is_not(void **state) {
  even_circle_process of[] = {waiting(7, 3, 8, 5), waiting(8, 5, 7, 3)};
  (void)state;
  of[0].waits = 2;
  of[0].wait[1] = (even_circle_wait){.whoms = 1, .whom = {11}, .at = {1}};
  even_circle_search(of, 2);
  assert_false(of[0].stuck || of[1].stuck);
}

static void who_waits_for_one_in_a_circle_is_stuck_too(void **state) {
  even_circle_process of[] = {waiting(6, 1, 7, 3), waiting(7, 3, 8, 5), waiting(8, 5, 7, 3), waiting(9, 9, 10, 1)};
  (void)state;
  even_circle_search(of, 4);
  assert_true(of[0].stuck && !of[3].stuck);
}

static void what_is_on_its_way_is_not_lacked(void **state) {
  even_circle_answer answer = {.process = 7, .change = 3, .calls = 5, .steps = 2, .sent = 9};
  (void)state;
  assert_true(even_circle_lacks_call(&answer, 6) && !even_circle_lacks_call(&answer, 5));
  assert_true(even_circle_lacks_step(&answer, 5, 2) && !even_circle_lacks_step(&answer, 5, 1));
  assert_true(even_circle_lacks_step(&answer, 6, 0) && !even_circle_lacks_step(&answer, 4, 7)); /* that call is over */
  assert_true(even_circle_lacks_message(&answer, 9) && !even_circle_lacks_message(&answer, 8));
  answer.change = 0; /* it goes on */
  assert_false(even_circle_lacks_call(&answer, 6) || even_circle_lacks_step(&answer, 5, 2) ||
               even_circle_lacks_message(&answer, 9));
}

/* What another host sends may hold anything. */
static void counts_are_bounded(void **state) {
  static even_far_known far;
  even_far_waits words;
  even_circle_found found;
  (void)state;
  memset(&far, 0, sizeof far);
  for (uint64_t process = 1; process < 1200; process++) {
    memset(&words, 0xff, sizeof words);
    words.process = process % 600;
    words.change = process % 3 == 0 ? UINT64_MAX : process;
    even_waits_keep(&far, 5, &words, 1000);
  }
  assert_int_equal(far.count, EVEN_FAR_KNOWN);
  for (size_t i = 0; i < far.count; i++) {
    assert_true(far.of[i].process != 0 && far.of[i].process != 5 && far.of[i].waits <= EVEN_WAITS);
    assert_true(far.of[i].wait[0].whoms <= EVEN_WAITS_WHOM && strlen(far.of[i].doing) < sizeof words.doing);
    assert_true(strlen(far.of[i].group) < sizeof words.group && strlen(far.of[i].site) < sizeof words.site);
    assert_true(strlen(far.of[i].host) < sizeof words.host);
  }
  memset(&found, 0xff, sizeof found);
  even_circle_bound_members(&found.members);
  assert_int_equal(found.members.count, EVEN_CIRCLE_MEMBERS);
  even_waits_hear_found(&found);
  even_waits_hear(&words);
}

/* An older word of a process, which was longer on its way, does not stand for a later one. */
static void later_words_stay(void **state) {
  static even_far_known far;
  even_far_waits words = {.process = 9, .change = 4, .waits = 1};
  (void)state;
  memset(&far, 0, sizeof far);
  even_waits_keep(&far, 5, &words, 1000);
  words.change = 3;
  even_waits_keep(&far, 5, &words, 1000);
  assert_int_equal(far.of[0].change, 4);
  assert_int_equal(far.count, 1);
}

/* Of more than a wait can name, those are named whose words prove something. */
static void known_ones_take_the_place_of_unknown_ones(void **state) {
  even_circle_wait all = {.whoms = 0};
  even_circle_wait any = {.any = 1};
  (void)state;
  for (int late = 0; late < 2 * EVEN_WAITS_WHOM; late++) {
    even_circle_need(&all, late == 10 ? 7 : 0, late == 10 ? 3 : 0);
    even_circle_need(&any, late == 10 ? 7 : 8, 3);
  }
  assert_true(all.whoms == EVEN_WAITS_WHOM && all.whom[0] == 7 && all.at[0] == 3 && all.whom[1] == 0);
  assert_true(any.whoms == EVEN_WAITS_WHOM && any.whom[0] == 0);
}

/* ---- a ring of more than one answer can tell of ---- */

#define RING 40

static void say_in_ring(uint64_t process, uint64_t now_ns, even_process_words *out) {
  *out = (even_process_words){.process = process, .change = 1, .whole_ns = 1, .whole_seen_ns = now_ns, .waits = 1};
  out->wait[0] = (even_wait_words){.since_ns = 1, .seen_ns = now_ns};
  even_circle_need(&out->wait[0].needs, process == 1 ? RING : process - 1, 1);
}

/* Each asks the one for which it waits, and that one alone. */
static void a_long_ring_is_found(void **state) {
  even_far_known *far = NULL;
  even_far_waits known[EVEN_FAR_WAITS];
  even_process_words words;
  even_circle_found found;
  uint64_t now_ns = 10 * (uint64_t)1000000000u;
  bool is = false;
  (void)state;
  assert_int_equal(even_alloc(RING, sizeof *far, (void **)&far), 0);
  for (uint64_t turn = 0; turn < 4 * RING && !is; turn++) {
    for (uint64_t process = 1; process <= RING; process++) {
      uint64_t other = process == 1 ? RING : process - 1;
      say_in_ring(other, now_ns, &words);
      size_t told = even_waits_gather(NULL, &words, &far[other - 1], now_ns, turn, known);
      assert_true(told >= 1 && told <= EVEN_FAR_WAITS && known[0].process == other);
      for (size_t i = 0; i < told; i++) {
        even_waits_keep(&far[process - 1], process, &known[i], now_ns);
      }
    }
    say_in_ring(RING / 2, now_ns, &words);
    is = even_waits_look_for_circle(NULL, &words, &far[RING / 2 - 1], now_ns, &found);
  }
  assert_true(is && strstr(found.why.what, ", and 37 more") != NULL);
  even_free(far);
}

/* ---- made-up worlds ---- */

#define RANKS 5
#define GROUPS 4
#define STEPS 6
#define MAIL 24
#define SECOND ((uint64_t)1000000000u)

typedef enum deed { MEET, SEND, RECEIVE, RECEIVE_ANY } deed;

typedef struct step {
  deed does;
  int with; /* a group, or a rank */
} step;

typedef struct rank_state {
  step program[STEPS];
  int at;
  uint64_t change;
  uint64_t since_ns;
  uint64_t met[GROUPS];         /* calls to which it has come */
  bool meets;                   /* it has said so of the call that it waits in */
  uint64_t sent[RANKS];         /* messages, */
  uint64_t on_way[RANKS];       /* of those to it, which have not come yet, */
  uint64_t heard[RANKS];        /* which have, */
  uint64_t taken[RANKS];        /* and which it has received */
  bool lies[GROUPS][RANKS];     /* whose word of the group's call that it is in is on its way to it */
  uint64_t said[GROUPS][RANKS]; /* as far as has come: up to which call it is */
  even_circle_answer answers[GROUPS + 1][RANKS];
  even_far_known *far;
} rank_state;

typedef struct letter {
  bool full;
  int to;
  int from;
  int group;
  even_circle_answer answer;
  size_t count;
  even_far_waits known[EVEN_FAR_WAITS];
} letter;

typedef struct world {
  uint64_t seed;
  uint64_t now_ns;
  bool member[GROUPS][RANKS];
  rank_state rank[RANKS];
  letter *mail;
} world;

static uint64_t draw(world *of, uint64_t below) {
  of->seed = of->seed * 6364136223846793005u + 1442695040888963407u; /* Knuth's, as in MMIX */
  return (of->seed >> 33) % below;
}

static const step *step_of(const rank_state *rank) {
  return rank->at < STEPS ? &rank->program[rank->at] : NULL;
}

/* Whether all that it waits for has come to it. */
static bool can_go_on(const world *of, int own, int *from) {
  const rank_state *rank = &of->rank[own];
  const step *does = step_of(rank);
  if (does == NULL) {
    return false;
  }
  for (int other = 0; other < RANKS; other++) {
    bool asked = does->does == RECEIVE_ANY ? other != own : does->does == RECEIVE && other == does->with;
    if (asked && rank->heard[other] > rank->taken[other]) {
      *from = other;
      return true;
    }
    if (does->does == MEET && other != own && of->member[does->with][other] &&
        rank->said[does->with][other] < rank->met[does->with] + (rank->meets ? 0 : 1)) {
      return false;
    }
  }
  return does->does == SEND || (does->does == MEET && rank->meets);
}

static void begin(world *of, int own) {
  rank_state *rank = &of->rank[own];
  const step *does = step_of(rank);
  if (does != NULL && does->does == MEET && !rank->meets) {
    rank->meets = true;
    rank->met[does->with]++;
  }
  rank->since_ns = of->now_ns;
}

static void go_on(world *of, int own) {
  int from = -1;
  rank_state *rank = &of->rank[own];
  if (!can_go_on(of, own, &from)) {
    return;
  }
  const step *does = step_of(rank);
  if (does->does == SEND) {
    rank->sent[does->with]++;
    of->rank[does->with].on_way[own]++;
  } else if (from >= 0) {
    rank->taken[from]++;
  }
  rank->change++;
  rank->meets = false;
  rank->at++;
  begin(of, own);
}

/* Something that is on its way comes. */
static void carry(world *of, int to, int from) {
  rank_state *rank = &of->rank[to];
  if (rank->on_way[from] > 0) {
    rank->on_way[from]--;
    rank->heard[from]++;
  }
  for (int group = 0; group < GROUPS; group++) {
    if (rank->said[group][from] < of->rank[from].met[group]) {
      rank->said[group][from]++;
    }
  }
}

static void say_waits(const world *of, int own, even_process_words *words) {
  const rank_state *rank = &of->rank[own];
  const step *does = step_of(rank);
  int from = -1;
  memset(words, 0, sizeof *words);
  words->process = (uint64_t)own + 1;
  words->change = rank->change;
  words->rank = own;
  if (does == NULL || does->does == SEND || can_go_on(of, own, &from)) {
    return; /* it goes on, or has done all */
  }
  words->whole_ns = rank->since_ns;
  words->whole_seen_ns = of->now_ns;
  words->waits = 1;
  even_wait_words *wait = &words->wait[0];
  wait->since_ns = rank->since_ns;
  wait->seen_ns = of->now_ns;
  wait->needs.any = does->does == RECEIVE_ANY;
  for (int other = 0; other < RANKS; other++) {
    const even_circle_answer *answer = &rank->answers[does->does == MEET ? does->with : GROUPS][other];
    bool meets =
        does->does == MEET && of->member[does->with][other] && rank->said[does->with][other] < rank->met[does->with];
    bool lacks = meets ? even_circle_lacks_call(answer, rank->met[does->with])
                       : even_circle_lacks_message(answer, rank->heard[other]);
    if (other != own && (meets || does->does == RECEIVE_ANY || (does->does == RECEIVE && other == does->with))) {
      even_circle_need(&wait->needs, lacks ? answer->process : 0, lacks ? answer->change : 0);
    }
  }
}

static void ask(world *of, int own, int whom) {
  const rank_state *rank = &of->rank[own];
  const step *does = step_of(rank);
  even_process_words words;
  letter *at = &of->mail[draw(of, MAIL)];
  if (does == NULL || whom == own) {
    return; /* the place of one that is lost is taken by another */
  }
  int group = does->does == MEET ? does->with : GROUPS;
  const rank_state *other = &of->rank[whom];
  say_waits(of, whom, &words);
  at->full = true;
  at->to = own;
  at->from = whom;
  at->group = group;
  at->count = even_waits_gather(NULL, &words, other->far, of->now_ns, draw(of, 3), at->known);
  at->answer = (even_circle_answer){.process = words.process,
                                    .change = at->count > 0 ? words.change : 0,
                                    .calls = group < GROUPS ? other->met[group] : 0,
                                    .sent = other->sent[own]};
}

static void deliver(world *of, letter *at) {
  rank_state *rank = &of->rank[at->to];
  if (!at->full) {
    return;
  }
  rank->answers[at->group][at->from] = at->answer;
  for (size_t i = 0; i < at->count; i++) {
    even_waits_keep(rank->far, (uint64_t)at->to + 1, &at->known[i], of->now_ns);
  }
  at->full = draw(of, 4) == 0; /* it comes again */
}

static bool finds_a_circle(const world *of, int own) {
  even_process_words words;
  even_circle_found found;
  say_waits(of, own, &words);
  return even_waits_look_for_circle(NULL, &words, of->rank[own].far, of->now_ns, &found);
}

/* Runs a copy of the world, in some order, until nothing goes on: whether that rank does. */
static bool gets_on(const world *of, int own, uint64_t seed) {
  world copy = *of;
  copy.seed = seed;
  for (int rests = 0; rests < 12 * RANKS * RANKS; rests++) {
    int rank = (int)draw(&copy, RANKS);
    uint64_t change = copy.rank[rank].change;
    carry(&copy, rank, (int)draw(&copy, RANKS));
    go_on(&copy, rank);
    rests = copy.rank[rank].change != change ? 0 : rests;
  }
  return copy.rank[own].change != of->rank[own].change;
}

static void make(world *of, uint64_t seed, even_far_known *far, letter *mail) {
  memset(of, 0, sizeof *of);
  memset(far, 0, RANKS * sizeof *far);
  memset(mail, 0, MAIL * sizeof *mail);
  of->seed = seed;
  of->now_ns = 1000 * SECOND;
  of->mail = mail;
  for (int group = 0; group < GROUPS; group++) {
    int one = (int)draw(of, RANKS);
    of->member[group][one] = of->member[group][(one + 1 + (int)draw(of, RANKS - 1)) % RANKS] = true;
    of->member[group][draw(of, RANKS)] = true;
  }
  for (int rank = 0; rank < RANKS; rank++) {
    of->rank[rank].change = 1;
    of->rank[rank].far = &far[rank];
    for (int at = 0; at < STEPS; at++) {
      step *does = &of->rank[rank].program[at];
      *does = (step){.does = SEND, .with = (rank + 1 + (int)draw(of, RANKS - 1)) % RANKS};
      uint64_t kind = draw(of, 8);
      int group = (int)draw(of, GROUPS);
      if (kind < 5 && of->member[group][rank]) {
        *does = (step){.does = MEET, .with = group};
      } else if (kind >= 6) {
        does->does = kind == 6 ? RECEIVE : RECEIVE_ANY;
      }
    }
    begin(of, rank);
  }
}

/* While the world runs. Returns how many circles were found. */
static int live(world *of, int moments) {
  int circles = 0;
  for (int moment = 0; moment < moments; moment++) {
    int rank = (int)draw(of, RANKS);
    int other = (int)draw(of, RANKS);
    of->now_ns += draw(of, 3) * SECOND;
    switch (draw(of, 5)) {
      case 0:
        go_on(of, rank);
        break;
      case 1:
        carry(of, rank, other);
        break;
      case 2:
        deliver(of, &of->mail[draw(of, MAIL)]);
        break;
      default:
        ask(of, rank, other);
        break;
    }
    if (finds_a_circle(of, rank)) {
      circles++;
      for (uint64_t seed = 0; seed < 8; seed++) {
        assert_false(gets_on(of, rank, seed));
      }
    }
  }
  return circles;
}

static void no_circle_is_found_where_there_is_none(void **state) {
  even_far_known *far = NULL;
  letter *mail = NULL;
  static world of;
  int circles = 0;
  (void)state;
  assert_int_equal(even_alloc(RANKS, sizeof *far, (void **)&far), 0);
  assert_int_equal(even_alloc(MAIL, sizeof *mail, (void **)&mail), 0);
  for (uint64_t seed = 1; seed <= 600; seed += SEARCH_STRIDE) {
    make(&of, seed, far, mail);
    circles += live(&of, 500);
  }
  assert_true(circles > 0);
  even_free(far);
  even_free(mail);
}

/* Once nothing goes on, and all have been asked often enough, whoever is stuck behind others that are, and by nothing
 * else, knows it. */
static void every_circle_is_found_in_the_end(void **state) {
  even_far_known *far = NULL;
  letter *mail = NULL;
  static world of;
  int stuck = 0;
  (void)state;
  assert_int_equal(even_alloc(RANKS, sizeof *far, (void **)&far), 0);
  assert_int_equal(even_alloc(MAIL, sizeof *mail, (void **)&mail), 0);
  for (uint64_t seed = 1; seed <= 200; seed += SEARCH_STRIDE) {
    make(&of, seed, far, mail);
    (void)live(&of, 200);
    for (int round = 0; round < 300 * RANKS; round++) {
      carry(&of, round % RANKS, (int)draw(&of, RANKS));
      go_on(&of, round % RANKS);
    }
    of.now_ns += 10 * SECOND;
    memset(mail, 0, MAIL * sizeof *mail);
    for (int round = 0; round < 2 * RANKS + 2; round++) {
      of.now_ns += SECOND;
      for (int pair = 0; pair < RANKS * RANKS; pair++) {
        memset(mail, 0, MAIL * sizeof *mail);
        ask(&of, pair / RANKS, pair % RANKS);
        for (int i = 0; i < MAIL; i++) {
          deliver(&of, &mail[i]);
        }
      }
    }
    /* All that have not done their program wait; whoever waits for one that has done it waits for ever, too, but in no
     * circle. */
    bool none_done = true;
    for (int rank = 0; rank < RANKS; rank++) {
      none_done = none_done && of.rank[rank].at < STEPS;
    }
    for (int rank = 0; rank < RANKS && none_done; rank++) {
      stuck++;
      assert_true(finds_a_circle(&of, rank));
    }
  }
  assert_true(stuck > 0);
  even_free(far);
  even_free(mail);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(two_that_wait_for_each_other_are_stuck),
      cmocka_unit_test(one_that_has_gone_on_since_is_not),
      cmocka_unit_test(one_that_may_receive_from_another_is_not),
      cmocka_unit_test(one_whose_other_thread_gets_on_is_not),
      cmocka_unit_test(who_waits_for_one_in_a_circle_is_stuck_too),
      cmocka_unit_test(what_is_on_its_way_is_not_lacked),
      cmocka_unit_test(counts_are_bounded),
      cmocka_unit_test(later_words_stay),
      cmocka_unit_test(known_ones_take_the_place_of_unknown_ones),
      cmocka_unit_test(a_long_ring_is_found),
      cmocka_unit_test(no_circle_is_found_where_there_is_none),
      cmocka_unit_test(every_circle_is_found_in_the_end),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
