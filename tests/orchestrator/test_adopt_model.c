/* Ranks that outlast their leader, in every order: no two groups of ranks train that know nothing of one another's
 * steps.
 *
 * Four hosts with a rank each. The leader of the hosts' agents makes generations of those ranks that live; each host
 * hears of them when it likes. Agents and ranks die, connections to the first leader break; another host is elected by
 * most of the members that the log has, hears from whatever hosts come what they know, and goes on with their ranks.
 * The log (which hosts are members) changes by word of its leader, with most of the members: test_leadership_model.c. A
 * generation trains once all its members know of it; what it commits is known to them alone.
 *
 * The same of three hosts that a fourth one joins meanwhile, under the first leader or another one: the members' ranks
 * go on with its rank, whether the log has that host yet or not. */
#include "state_search.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { HOSTS = 4, GENERATIONS = 5, LOSSES = 3, LOSSES_OF_GROWING = 2, ALL = (1 << HOSTS) - 1, GUEST = HOSTS - 1 };

/* Rules that are broken on purpose. */
enum {
  LOG_IS_NOT_ASKED = 1,
  NEXT_DOES_NOT_ASK_THE_LOG = 2,
  HOSTS_OF_TWO_LEADERS_MEET = 3,
  GROWTH_LEAVES_OUT = 4,
  LEADER_IS_NO_MEMBER = 5
};

typedef struct world {
  unsigned char agents; /* that live: masks of hosts, */
  unsigned char ranks;
  unsigned char there;   /* all, but for one that has not joined yet */
  unsigned char cut;     /* from the first leader's agent */
  unsigned char obeys;   /* the newest leader: who does not obeys the first, or nobody */
  unsigned char voted;   /* for another leader than the first */
  unsigned char members; /* as the log has them */
  unsigned char named;   /* all that ever were members: who was left out is none again */
  unsigned char once;    /* see hears_first */
  unsigned char leader;
  unsigned char leads_ranks;  /* it has taken them over, or is the first */
  unsigned char losses;       /* that may still come */
  unsigned char count;        /* of generations */
  unsigned char board[HOSTS]; /* the newest generation that is known there */
  unsigned char led[HOSTS];   /* by whom it was told, or taken over */
  unsigned char who[GENERATIONS];
  unsigned char parent[GENERATIONS];
  unsigned char depth[GENERATIONS];
  unsigned char trained[GENERATIONS];
} world;

static unsigned char bit(int host) {
  return (unsigned char)(1u << host);
}

static bool has(unsigned char mask, int host) {
  return (mask >> host & 1u) != 0;
}

static int size_of(unsigned char mask) {
  int size = 0;
  for (int host = 0; host < HOSTS; host++) {
    size += has(mask, host) ? 1 : 0;
  }
  return size;
}

static bool is_majority(unsigned char some, unsigned char members) {
  return 2 * size_of(some & members) > size_of(members);
}

static bool descends(const world *now, unsigned char one, unsigned char other) {
  while (one != other && one != 0) {
    one = now->parent[one];
  }
  return one == other;
}

/* Trains what can, and looks whether it takes up all that was trained. */
static void follow(state_search *all, world *next) {
  for (unsigned char one = 0; one < next->count; one++) {
    bool met = true;
    for (int host = 0; host < HOSTS; host++) {
      met = met && (!has(next->who[one], host) || (has(next->ranks, host) && next->board[host] == one));
    }
    if (!met || next->trained[one] != 0 || next->who[one] == 0) {
      continue;
    }
    next->trained[one] = 1;
    all->met += next->leader != 0 && next->leads_ranks != 0 ? 1 : 0;
    for (unsigned char other = 0; other < next->count; other++) {
      if (next->trained[other] != 0 && !descends(next, one, other)) {
        all->wrong = "ranks train that do not know what others have trained";
      }
    }
  }
  state_search_visit(all, next);
}

static void lose_something(state_search *all, const world *now) {
  for (int host = 0; host < HOSTS && now->losses > 0; host++) {
    world next = *now;
    if (!has(now->there, host)) {
      continue;
    }
    next.losses--;
    if (has(now->agents, host)) { /* its guardian ends its ranks */
      next.agents &= (unsigned char)~bit(host);
      next.ranks &= (unsigned char)~bit(host);
      follow(all, &next);
    }
    next = *now;
    next.losses--;
    if (has(now->ranks, host)) {
      next.ranks &= (unsigned char)~bit(host);
      follow(all, &next);
    }
    next = *now;
    next.losses--;
    if (host != 0 && !has(now->cut, host)) {
      next.cut |= bit(host);
      follow(all, &next);
    }
  }
}

/* Over connections that may be cut; who serves another one hears it no more; nor does, if `once`, who has done so.
 * (Agents never do. Where nobody joins it is safe even if they did.) */
static unsigned char hears_first(const world *now) {
  unsigned char hears = (unsigned char)(now->agents & now->there & ~now->cut & ~now->obeys);
  for (int host = 1; host < HOSTS; host++) {
    hears &= (unsigned char)(now->led[host] == 0 || now->once == 0 ? ALL : ALL & ~bit(host));
  }
  return hears;
}

/* Whom the leader can reach; a later one those that serve it. */
static unsigned char reached(const world *now) {
  return now->leader == 0 ? hears_first(now) : (unsigned char)(now->agents & now->obeys);
}

/* The same of the first one that does not know yet that there is another. */
static unsigned char heard_by(const world *now, unsigned char leader) {
  return leader == now->leader ? reached(now) : hears_first(now);
}

/* Whether the leader can have something written: most of the members answer it. The first one is answered by none that
 * has voted for another. */
static bool can_write(const world *now, unsigned char leader, unsigned char members) {
  unsigned char answer = leader == 0 ? (unsigned char)(now->agents & ~now->cut & ~now->voted) : reached(now);
  return (leader == now->leader || leader == 0) && (leader != 0 || now->leader == 0) && is_majority(answer, members);
}

/* `leader` says who is a member no more: those that are lost. */
static void write_log(state_search *all, const world *now) {
  for (int host = 0; host < HOSTS; host++) {
    world next = *now;
    bool lost = host != now->leader && has(now->members, host) && !has(reached(now), host);
    next.members &= (unsigned char)~bit(host);
    if (lost && has(now->agents, now->leader) && can_write(now, now->leader, next.members)) {
      follow(all, &next);
    }
  }
}

/* A generation of those that live, as far as `leader` knows. The first one may still do so when there is another. */
static void make_generation(state_search *all, const world *now, unsigned char leader) {
  world next = *now;
  unsigned char hears = heard_by(now, leader);
  unsigned char from = now->board[leader];
  unsigned char lost = (unsigned char)(now->who[from] & ~hears);
  unsigned char left = (unsigned char)(now->who[from] & hears & now->ranks);
  bool logged = (lost & now->members) == 0 && (leader == now->leader || lost == 0);
  if (all->broken == LOG_IS_NOT_ASKED || (all->broken == NEXT_DOES_NOT_ASK_THE_LOG && leader != 0)) {
    logged = true;
  }
  if (!has(now->agents, leader) || left == now->who[from] || left == 0 || !logged || now->count == GENERATIONS) {
    return;
  }
  next.who[now->count] = left;
  next.parent[now->count] = from;
  next.depth[now->count] = (unsigned char)(now->depth[from] + 1);
  next.board[leader] = now->count;
  next.count++;
  follow(all, &next);
}

/* A host comes to `leader`, and begins with the generation that the others are at. Of no log it is a member yet. */
static void take_in(state_search *all, const world *now, unsigned char leader) {
  world next = *now;
  if (has(now->there, GUEST) || !has(now->agents, leader)) {
    return;
  }
  next.there |= bit(GUEST);
  next.obeys |= leader != 0 ? bit(GUEST) : 0;
  next.board[GUEST] = now->board[leader];
  next.led[GUEST] = leader;
  follow(all, &next);
}

/* The leader has it written that it is a member, too. */
static void add_member(state_search *all, const world *now) {
  world next = *now;
  next.members |= bit(GUEST);
  next.named |= bit(GUEST);
  if (!has(now->named, GUEST) && has(reached(now), GUEST) && has(now->agents, now->leader) &&
      can_write(now, now->leader, now->members)) {
    follow(all, &next);
  }
}

/* Its process joins once: in its place another one would have to come. */
static bool has_joined(const world *now) {
  for (unsigned char one = 0; one < now->count; one++) {
    if (has(now->who[one], GUEST)) {
      return true;
    }
  }
  return false;
}

/* A generation of all that were in the one before, whether they live or not, and of who has come: one that lives gives
 * it the state of training. */
static void grow(state_search *all, const world *now, unsigned char leader) {
  world next = *now;
  unsigned char hears = heard_by(now, leader);
  unsigned char from = now->board[leader];
  unsigned char givers = (unsigned char)(now->who[from] & hears & now->ranks);
  unsigned char others = all->broken == GROWTH_LEAVES_OUT ? givers : now->who[from];
  if (!has(now->there, GUEST) || has_joined(now) || !has(hears & now->ranks, GUEST) || !has(now->agents, leader) ||
      givers == 0 || now->count == GENERATIONS) {
    return;
  }
  next.who[now->count] = others | bit(GUEST);
  next.parent[now->count] = from;
  next.depth[now->count] = (unsigned char)(now->depth[from] + 1);
  next.board[leader] = now->count;
  next.count++;
  follow(all, &next);
}

static void tell(state_search *all, const world *now, unsigned char leader) {
  unsigned char hears = heard_by(now, leader);
  for (int host = 0; host < HOSTS && has(now->agents, leader); host++) {
    world next = *now;
    if (host != leader && has(hears, host) && now->depth[now->board[host]] < now->depth[now->board[leader]]) {
      next.board[host] = now->board[leader];
      next.led[host] = leader;
      follow(all, &next);
    }
  }
}

static void elect(state_search *all, const world *now) {
  for (int host = 1; host < HOSTS; host++) {
    bool may = has(now->agents & now->members, host) && host > now->leader &&
               (now->leader == 0 || !has(now->agents, now->leader));
    for (unsigned char voters = 0; may && voters <= ALL; voters++) {
      world next = *now;
      if (!has(voters, host) || (voters & now->agents) != voters || !is_majority(voters, now->members)) {
        continue;
      }
      next.leader = (unsigned char)host;
      next.leads_ranks = 0;
      next.voted |= voters;
      next.obeys = bit(host);
      follow(all, &next);
    }
  }
}

/* Of those that come it learns the newest generation; whose rank is dead holds nothing, and begins anew. So does one
 * whose rank is no member of that: others may have trained on without its host's knowledge. */
static void adopt(state_search *all, const world *now) {
  unsigned char leader = now->leader;
  if (leader == 0 || now->leads_ranks != 0 || !has(now->agents & now->ranks, leader)) {
    return;
  }
  for (unsigned char came = 0; came <= ALL; came++) {
    world next = *now;
    if (!has(came, leader) || has(came, 0) || (came & now->agents & now->there) != came) {
      continue;
    }
    bool same = true;
    for (int host = 0; host < HOSTS; host++) {
      same = same && (!has(came, host) || now->led[host] == now->led[leader]);
      if (has(came, host) && now->depth[now->board[host]] > now->depth[next.board[leader]]) {
        next.board[leader] = now->board[host];
      }
    }
    bool member = has(now->who[next.board[leader]], leader) || all->broken == LEADER_IS_NO_MEMBER;
    if (!member || (!same && all->broken != HOSTS_OF_TWO_LEADERS_MEET)) {
      continue; /* all begin anew */
    }
    for (int host = 0; host < HOSTS; host++) {
      next.led[host] = has(came, host) ? leader : now->led[host];
    }
    next.obeys = came;
    next.leads_ranks = 1;
    follow(all, &next);
  }
}

static void moves(state_search *all, const void *state) {
  const world *now = state;
  lose_something(all, now);
  write_log(all, now);
  elect(all, now);
  adopt(all, now);
  make_generation(all, now, 0); /* the first one, also where another leads by now */
  tell(all, now, 0);
  take_in(all, now, 0);
  add_member(all, now);
  grow(all, now, 0);
  if (now->leader != 0 && now->leads_ranks != 0) {
    make_generation(all, now, now->leader);
    tell(all, now, now->leader);
    take_in(all, now, now->leader);
    grow(all, now, now->leader);
  }
}

static void run(state_search *all, bool grows) {
  world first;
  memset(&first, 0, sizeof first);
  first.agents = first.ranks = ALL;
  first.there = first.members = (unsigned char)(grows ? ALL & ~bit(GUEST) : ALL);
  first.named = first.members;
  first.once = grows ? 1 : 0;
  first.losses = grows ? LOSSES_OF_GROWING : LOSSES;
  first.leads_ranks = 1;
  first.count = 1;
  first.who[0] = first.there;
  first.trained[0] = 1;
  all->bytes = sizeof first;
  state_search_run(all, &first, moves);
}

static void nobody_trains_without_what_was_trained(void **state) {
  state_search all = {.broken = 0};
  (void)state;
  run(&all, false);
  if (all.wrong != NULL) {
    fail_msg("%s", all.wrong);
  }
  assert_true(all.met > 0);
  print_message("%zu states\n", all.count);
}

static void nor_where_a_host_joins(void **state) {
  state_search all = {.broken = 0};
  (void)state;
  run(&all, true);
  if (all.wrong != NULL) {
    fail_msg("%s", all.wrong);
  }
  assert_true(all.met > 0);
  print_message("%zu states\n", all.count);
}

static void each_rule_is_needed(void **state) {
  (void)state;
  for (int rule = LOG_IS_NOT_ASKED; rule <= LEADER_IS_NO_MEMBER; rule++) {
    state_search all = {.broken = rule};
    run(&all, rule >= GROWTH_LEAVES_OUT);
    assert_non_null(all.wrong);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(nobody_trains_without_what_was_trained),
      cmocka_unit_test(nor_where_a_host_joins),
      cmocka_unit_test(each_rule_is_needed),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
