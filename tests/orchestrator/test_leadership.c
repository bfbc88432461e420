/* The rules of leading, in every order in which a log can grow and be heard of; and the changes of members. */
#include "orchestrator/leadership.h"
#include "orchestrator/members.h"
#include "state_search.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* ---- every order ----
 * Three members and a log, which alone is taken for right: whoever leads it at a moment (any member, at any moment:
 * that is more than Raft allows) appends what even_leadership_next says; an entry is on its way for as long as it
 * likes, comes in any order, and is committed then. One that leads the job may have another one lead it (HAND). Each
 * member applies the log at its own pace, and hears of others' news or not. */

enum { MEMBERS = 3, ENTRIES = 3, SILENCE_MS = 4000 };

typedef struct member {
  even_leadership applied;
  even_leadership newest;
  unsigned char at;       /* entries of the log that it has applied */
  unsigned char proposed; /* the generation of its entry that is on its way, 0: none */
  unsigned char whom;     /* and who leads by it */
} member;

typedef struct world {
  member members[MEMBERS];
  unsigned char log_generation[ENTRIES];
  unsigned char log_leader[ENTRIES];
  unsigned char length;
  unsigned char acting[ENTRIES + 1]; /* who has acted in a generation, 0: nobody */
} world;

static even_leadership_view view_of(const world *now, size_t i, bool leads_log, bool leader_lost) {
  const member *one = &now->members[i];
  return (even_leadership_view){.times = even_leadership_times_of(SILENCE_MS),
                                .newest = one->newest,
                                .applied = one->applied.generation,
                                .self = i + 1,
                                .first = 1,
                                .raft_leads = leads_log,
                                .raft_own = true,
                                .lease_ns = 100000000000u,
                                .leader_linked = !leader_lost,
                                .leader_ns = leader_lost ? 0 : 100000000000u,
                                .proposed = one->proposed != 0,
                                .now_ns = 100000000000u};
}

/* It does something as the leader, where the rules let it. */
static void act(state_search *all, world *now, size_t i) {
  const even_leadership_view view = view_of(now, i, false, false);
  const member *one = &now->members[i];
  if (!even_leadership_acts(&view)) {
    return;
  }
  uint64_t generation = one->newest.generation;
  if (now->acting[generation] != 0 && now->acting[generation] != i + 1) {
    all->wrong = "two act in one generation";
  }
  now->acting[generation] = (unsigned char)(i + 1);
}

/* Its host is drained: the next one in a circle leads. */
static void hand_over(state_search *all, const world *now, size_t i) {
  const member *one = &now->members[i];
  even_leadership_view view = view_of(now, i, true, false);
  view.hands = true;
  if (even_leadership_next(&view) == EVEN_LEADERSHIP_HAND && one->applied.generation < ENTRIES) {
    world next = *now;
    next.members[i].proposed = (unsigned char)(one->applied.generation + 1);
    next.members[i].whom = (unsigned char)((i + 1) % MEMBERS + 1);
    state_search_visit(all, &next);
  }
}

static void moves_of(state_search *all, const world *now, size_t i) {
  const member *one = &now->members[i];
  hand_over(all, now, i);
  for (int lost = 0; lost < 2; lost++) { /* it leads the log at this moment */
    const even_leadership_view view = view_of(now, i, true, lost == 1);
    even_leadership_move move = even_leadership_next(&view);
    if ((move == EVEN_LEADERSHIP_FIRST || move == EVEN_LEADERSHIP_SUCCEED) && one->applied.generation < ENTRIES) {
      world next = *now;
      next.members[i].proposed = (unsigned char)(one->applied.generation + 1);
      next.members[i].whom = (unsigned char)(move == EVEN_LEADERSHIP_FIRST ? 1 : i + 1);
      state_search_visit(all, &next);
    }
  }
  if (one->proposed != 0) {
    world next = *now;
    next.members[i].proposed = 0; /* it is lost, */
    state_search_visit(all, &next);
    if (now->length < ENTRIES) { /* or committed */
      next.log_generation[next.length] = one->proposed;
      next.log_leader[next.length] = one->whom;
      next.length++;
      state_search_visit(all, &next);
    }
  }
  if (one->at < now->length) {
    world next = *now;
    member *same = &next.members[i];
    const even_leadership entry = {now->log_generation[one->at], now->log_leader[one->at]};
    same->at++;
    if (even_leadership_apply(&same->applied, &entry)) {
      (void)even_leadership_hear(&same->newest, &same->applied);
      all->met += entry.generation > 1 ? 1 : 0;
    }
    state_search_visit(all, &next);
  }
  for (size_t k = 0; k < MEMBERS; k++) { /* another one tells what it knows */
    world next = *now;
    if (all->broken != 0) {
      next.members[i].newest = now->members[k].newest;
    } else {
      (void)even_leadership_hear(&next.members[i].newest, &now->members[k].newest);
    }
    if (next.members[i].newest.generation < one->newest.generation) {
      all->wrong = "an older leader is obeyed after a newer one";
    }
    state_search_visit(all, &next);
  }
  world next = *now;
  act(all, &next, i);
  state_search_visit(all, &next);
}

static void moves_of_all(state_search *all, const void *now) {
  for (size_t i = 0; i < MEMBERS; i++) {
    moves_of(all, now, i);
  }
}

static void explore(state_search *all) {
  world first;
  memset(&first, 0, sizeof first);
  all->bytes = sizeof first;
  state_search_run(all, &first, moves_of_all);
}

static void no_two_act_in_one_generation(void **state) {
  state_search all = {.broken = 0};
  (void)state;
  explore(&all);
  if (all.wrong != NULL) {
    fail_msg("%s", all.wrong);
  }
  assert_true(all.met > 0);
  print_message("%zu states\n", all.count);
}

/* Broken: a member takes what is told for true whatever it knows. */
static void the_search_finds_what_is_broken(void **state) {
  state_search all = {.broken = 1};
  (void)state;
  explore(&all);
  assert_non_null(all.wrong);
}

/* ---- single rules ---- */

static even_leadership_view usual(void) {
  return (even_leadership_view){.times = even_leadership_times_of(SILENCE_MS),
                                .newest = {3, 2},
                                .applied = 3,
                                .self = 1,
                                .first = 1,
                                .raft_leads = true,
                                .raft_own = true,
                                .lease_ns = 50000000000u,
                                .leader_linked = true,
                                .leader_ns = 50000000000u,
                                .now_ns = 50000000000u};
}

static void slow_is_not_lost(void **state) {
  even_leadership_view view = usual();
  (void)state;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_YIELD);
  view.now_ns += view.times.silent_ns;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_YIELD);
  view.now_ns++;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_SUCCEED);
  view.proposed = true;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_REST);
  view = usual();
  view.leader_linked = false;
  view.now_ns += view.times.gone_ns;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_REST);
  view.now_ns++;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_SUCCEED);
  view.raft_leads = false;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_REST);
  view = usual();
  view.newest = (even_leadership){4, 1}; /* told, and not applied here yet */
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_REST);
}

/* Another agent may come in a killed one's place: for as long as one that stands still it leads. */
static void one_that_is_awaited_is_not_lost(void **state) {
  even_leadership_view view = usual();
  (void)state;
  view.leader_linked = false;
  view.leader_awaited = true;
  view.now_ns += view.times.silent_ns;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_REST); /* nobody is there to be given the log */
  view.now_ns++;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_SUCCEED);
  view.now_ns -= view.times.silent_ns - view.times.gone_ns;
  view.leader_awaited = false; /* nobody listens there any more */
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_SUCCEED);
}

static void its_own_entry_comes_first(void **state) {
  even_leadership_view view = usual();
  (void)state;
  view.raft_own = false;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_CONFIRM);
  view.proposed = true;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_REST);
}

/* No other one may say that it leads: it would act without a lease. */
static void the_first_leads_by_its_own_word(void **state) {
  even_leadership_view view = usual();
  (void)state;
  view.newest = (even_leadership){0, 0};
  view.applied = 0;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_FIRST);
  view.now_ns += view.times.lease_ns + 1;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_REST);
  view.self = 2;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_YIELD);
  view.leader_linked = false;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_REST);
}

static void who_only_votes_gives_the_log_away(void **state) {
  even_leadership_view view = usual();
  (void)state;
  view.witness = true;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_YIELD);
  view.leader_linked = false;
  view.now_ns += view.times.gone_ns + 1;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_PASS);
}

/* Its leader alone ends a job, and nobody leads it afterwards. */
static void after_the_end_nobody_leads(void **state) {
  even_leadership_view view = usual();
  const even_leadership next = {5, 1};
  (void)state;
  view.ends = true;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_YIELD);
  view.self = 2;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_END);
  view.newest = (even_leadership){4, EVEN_LEADERSHIP_NOBODY};
  view.applied = 4;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_REST);
  view.self = 1;
  view.leader_linked = false;
  view.now_ns += 2 * view.times.silent_ns;
  assert_int_equal(even_leadership_next(&view), EVEN_LEADERSHIP_REST);
  assert_false(even_leadership_apply(&view.newest, &next));
  /* the leader of generation 3 is obeyed until it is gone, the one before is not */
  assert_false(even_leadership_superseded(&view.newest, 3));
  assert_true(even_leadership_superseded(&view.newest, 2));
  assert_true(even_leadership_superseded(&next, 4));
  assert_false(even_leadership_superseded(&next, 5));
}

static void a_majority_has_answered(void **state) {
  uint64_t three[] = {5, 90, 0};
  uint64_t five[] = {90, 0, 30, 0, 40};
  uint64_t four[] = {90, 80, 70, 60};
  uint64_t one[] = {90};
  (void)state;
  assert_int_equal(even_leadership_answered(three, 3), 5);
  assert_int_equal(even_leadership_answered(five, 5), 30);
  assert_int_equal(even_leadership_answered(four, 4), 70);
  assert_int_equal(even_leadership_answered(one, 1), 90);
  assert_int_equal(even_leadership_answered(NULL, 0), 0);
}

static void a_lease_ends(void **state) {
  even_leadership_view view = usual();
  (void)state;
  assert_false(even_leadership_acts(&view));
  view.self = 2;
  assert_true(even_leadership_acts(&view));
  view.now_ns += view.times.lease_ns;
  assert_true(even_leadership_acts(&view));
  view.now_ns++;
  assert_false(even_leadership_acts(&view));
}

/* Of each silence that hosts may have: no rank is started while an old one may run, whoever looks late by a guardian's
 * pause; and no leader is lost sooner than a connection that is up. */
static void times_follow_the_silence(void **state) {
  static const uint64_t look_ns = 250000000u; /* a guardian's */
  const even_leadership_times usual_times = even_leadership_times_of(4000);
  (void)state;
  assert_int_equal(usual_times.lease_ns, 3000000000u);
  assert_int_equal(usual_times.guard_ns, 3500000000u);
  assert_int_equal(usual_times.wait_ns, 4000000000u);
  assert_int_equal(usual_times.gone_ns, 1500000000u);
  assert_int_equal(usual_times.silent_ns, 10000000000u);
  assert_int_equal(usual_times.kill_ns, 20000000000u);
  assert_int_equal(usual_times.election_ns, 1000000000u);
  assert_int_equal(usual_times.heartbeat_ns, 150000000u);
  for (int ms = 2000; ms <= 600000; ms += ms < 30000 ? 250 : 9500) {
    const even_leadership_times its = even_leadership_times_of(ms);
    const uint64_t silence = (uint64_t)ms * 1000000u;
    const bool longer = ms > 4000;
    assert_true(its.lease_ns + look_ns < its.guard_ns && its.guard_ns + look_ns < its.wait_ns);
    assert_true((its.wait_ns - its.guard_ns) * 9 > its.guard_ns); /* clocks that differ by a tenth */
    assert_true(its.wait_ns < its.silent_ns && its.silent_ns > silence && its.silent_ns + silence < its.kill_ns);
    assert_true(its.heartbeat_ns * 4 < its.election_ns && its.ask_ns * 8 < its.lease_ns);
    assert_true(its.call_ns < its.gone_ns && its.heard_ns >= 2 * its.election_ns);
    assert_true(ms == 4000 ||
                ((its.lease_ns > usual_times.lease_ns) == longer && (its.wait_ns > usual_times.wait_ns) == longer &&
                 (its.gone_ns > usual_times.gone_ns) == longer && (its.silent_ns > usual_times.silent_ns) == longer &&
                 (its.kill_ns > usual_times.kill_ns) == longer &&
                 (its.election_ns > usual_times.election_ns) == longer && (its.ask_ns > usual_times.ask_ns) == longer));
  }
}

/* ---- members ---- */

static size_t voters_of(const even_member_place *places, size_t count) {
  size_t voters = 0;
  for (size_t i = 0; i < count; i++) {
    voters += places[i].role == EVEN_MEMBER_VOTER ? 1 : 0;
  }
  return voters;
}

static size_t apply(even_member_place *places, size_t count, const even_member_change *change) {
  if (change->kind == EVEN_MEMBER_ADD) {
    places[count] = (even_member_place){change->id, EVEN_MEMBER_SPARE};
    return count + 1;
  }
  for (size_t i = 0; i < count; i++) {
    if (places[i].id == change->id && change->kind == EVEN_MEMBER_ASSIGN) {
      places[i].role = change->role;
      return count;
    }
    if (places[i].id == change->id) {
      places[i] = places[count - 1];
      return count - 1;
    }
  }
  fail_msg("a change of a member that is not there");
  return count;
}

/* From every group of up to six, of whom some vote, to every other one. */
static void every_group_becomes_every_other(void **state) {
  (void)state;
  for (unsigned there = 1; there < 64; there += 2) {
    for (unsigned wanted = 1; wanted < 64; wanted += 2) {
      for (unsigned votes = 1; votes < 64; votes += 2) {
        even_member_place places[16];
        uint64_t ids[6];
        size_t count = 0;
        size_t named = 0;
        for (unsigned i = 0; i < 6; i++) {
          if ((there >> i & 1) != 0) {
            places[count++] = (even_member_place){i + 1, (votes >> i & 1) != 0 ? EVEN_MEMBER_VOTER : EVEN_MEMBER_SPARE};
          }
          if ((wanted >> i & 1) != 0) {
            ids[named++] = i + 1;
          }
        }
        bool lost_left = false;
        for (int step = 0; step < 40; step++) {
          even_member_change change = even_members_next(places, count, ids, named, 1);
          if (change.kind == EVEN_MEMBER_KEEP) {
            break;
          }
          assert_false(lost_left && change.kind == EVEN_MEMBER_REMOVE); /* those that are lost go first */
          lost_left = lost_left || change.kind != EVEN_MEMBER_REMOVE;
          assert_int_not_equal(change.kind == EVEN_MEMBER_REMOVE ? change.id : 0, 1);
          count = apply(places, count, &change);
          assert_true(voters_of(places, count) >= 1);
        }
        assert_int_equal(count, named);
        assert_int_equal(voters_of(places, count), even_leadership_voters((unsigned)named) > named
                                                       ? named
                                                       : even_leadership_voters((unsigned)named));
        for (size_t i = 0; i < count; i++) {
          assert_true((wanted >> (places[i].id - 1) & 1) != 0);
          assert_int_not_equal(places[i].role, EVEN_MEMBER_SPARE);
          assert_true(places[i].id != 1 || places[i].role == EVEN_MEMBER_VOTER);
        }
      }
    }
  }
}

/* Each voter has a turn of its own, whoever leads; and that one's is the last. */
static void each_has_its_turn_and_the_leader_the_last(void **state) {
  const even_member_place all[] = {{.id = 7, .role = EVEN_MEMBER_VOTER},    {.id = 2, .role = EVEN_MEMBER_VOTER},
                                   {.id = 9, .role = EVEN_MEMBER_LISTENER}, {.id = 4, .role = EVEN_MEMBER_VOTER},
                                   {.id = 5, .role = EVEN_MEMBER_SPARE},    {.id = 3, .role = EVEN_MEMBER_VOTER}};
  const size_t count = sizeof all / sizeof all[0];
  (void)state;
  for (size_t i = 0; i < count; i++) {
    unsigned taken = 0;
    bool votes = all[i].role == EVEN_MEMBER_VOTER;
    for (size_t own = 0; own < count; own++) {
      unsigned after = even_members_after(all, count, all[own].id, all[i].id);
      if (all[own].role != EVEN_MEMBER_VOTER) {
        assert_int_equal(after, 0);
        continue;
      }
      assert_true(after < 4 && (taken >> after & 1) == 0);
      taken |= 1u << after;
      assert_true(!votes || (own == i) == (after == 0));
    }
    assert_int_equal(taken, 15);
  }
  assert_int_equal(even_members_after(all, count, 7, 4), 3);
  assert_int_equal(even_members_after(all, count, 3, 4), 1);
  assert_int_equal(even_members_after(all, 0, 7, 4), 0);
}

/* Those that stay elect a leader, also without the one that leads, where any of as many could take its place. */
static void votes_are_missed_where_the_rest_could_elect_nobody(void **state) {
  static const struct {
    unsigned voters;
    unsigned staying;
    bool spares;
  } cases[] = {{1, 1, true}, {1, 0, false}, {2, 1, false}, {2, 2, true},  {3, 1, false},
               {3, 2, true}, {3, 3, true},  {5, 2, false}, {5, 3, false}, /* three: without the leader two of five */
               {5, 4, true}, {5, 5, true},  {4, 3, false}, {4, 2, false}};
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    assert_true(even_leadership_spares(cases[i].voters, cases[i].staying) == cases[i].spares);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(no_two_act_in_one_generation),
      cmocka_unit_test(the_search_finds_what_is_broken),
      cmocka_unit_test(slow_is_not_lost),
      cmocka_unit_test(one_that_is_awaited_is_not_lost),
      cmocka_unit_test(its_own_entry_comes_first),
      cmocka_unit_test(the_first_leads_by_its_own_word),
      cmocka_unit_test(who_only_votes_gives_the_log_away),
      cmocka_unit_test(after_the_end_nobody_leads),
      cmocka_unit_test(a_majority_has_answered),
      cmocka_unit_test(a_lease_ends),
      cmocka_unit_test(times_follow_the_silence),
      cmocka_unit_test(every_group_becomes_every_other),
      cmocka_unit_test(each_has_its_turn_and_the_leader_the_last),
      cmocka_unit_test(votes_are_missed_where_the_rest_could_elect_nobody),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
