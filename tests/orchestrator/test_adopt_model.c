/* Ranks that outlast their leader, in every order: no two groups of ranks train that know nothing of one another's
 * steps.
 *
 * Four hosts with a rank each. The leader of the hosts' agents makes generations of those ranks that live; each host
 * hears of them when it likes. Agents and ranks die, connections to the first leader break; another host is elected by
 * most of the members that the log has, hears from whatever hosts come what they know, and goes on with their ranks.
 * The log (which hosts are members) changes by word of its leader, with most of the members: test_leadership_model.c. A
 * generation trains once all its members know of it; what it commits is known to them alone. */
#include "state_search.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { HOSTS = 4, GENERATIONS = 5, LOSSES = 3, ALL = (1 << HOSTS) - 1 };

/* Rules that are broken on purpose. */
enum { LOG_IS_NOT_ASKED = 1, NEXT_DOES_NOT_ASK_THE_LOG = 2, HOSTS_OF_TWO_LEADERS_MEET = 3 };

typedef struct world {
  unsigned char agents; /* that live: masks of hosts, */
  unsigned char ranks;
  unsigned char cut;     /* from the first leader's agent */
  unsigned char obeys;   /* the newest leader: who does not obeys the first, or nobody */
  unsigned char voted;   /* for another leader than the first */
  unsigned char members; /* as the log has them */
  unsigned char leader;
  unsigned char leads_ranks; /* it has taken them over, or is the first */
  unsigned char losses;
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
  for (int host = 0; host < HOSTS && now->losses < LOSSES; host++) {
    world next = *now;
    next.losses++;
    if (has(now->agents, host)) { /* its guardian ends its ranks */
      next.agents &= (unsigned char)~bit(host);
      next.ranks &= (unsigned char)~bit(host);
      follow(all, &next);
    }
    next = *now;
    next.losses++;
    if (has(now->ranks, host)) {
      next.ranks &= (unsigned char)~bit(host);
      follow(all, &next);
    }
    next = *now;
    next.losses++;
    if (host != 0 && !has(now->cut, host)) {
      next.cut |= bit(host);
      follow(all, &next);
    }
  }
}

/* Whom the leader can reach: the first one over connections that may be cut; a later one those that serve it. */
static unsigned char reached(const world *now) {
  return now->leader == 0 ? (unsigned char)(now->agents & ~now->cut & ~now->obeys)
                          : (unsigned char)(now->agents & now->obeys);
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
  unsigned char hears = leader == now->leader ? reached(now) : (unsigned char)(now->agents & ~now->cut & ~now->obeys);
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

static void tell(state_search *all, const world *now, unsigned char leader) {
  unsigned char hears = leader == now->leader ? reached(now) : (unsigned char)(now->agents & ~now->cut & ~now->obeys);
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

/* Of those that come it learns the newest generation; whose rank is dead holds nothing, and begins anew. */
static void adopt(state_search *all, const world *now) {
  unsigned char leader = now->leader;
  if (leader == 0 || now->leads_ranks != 0 || !has(now->agents & now->ranks, leader)) {
    return;
  }
  for (unsigned char came = 0; came <= ALL; came++) {
    world next = *now;
    if (!has(came, leader) || has(came, 0) || (came & now->agents) != came) {
      continue;
    }
    bool same = true;
    for (int host = 0; host < HOSTS; host++) {
      same = same && (!has(came, host) || now->led[host] == now->led[leader]);
      if (has(came, host) && now->depth[now->board[host]] > now->depth[next.board[leader]]) {
        next.board[leader] = now->board[host];
      }
    }
    if (!same && all->broken != HOSTS_OF_TWO_LEADERS_MEET) {
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
  if (now->leader != 0 && now->leads_ranks != 0) {
    make_generation(all, now, now->leader);
    tell(all, now, now->leader);
  }
}

static void run(state_search *all) {
  world first;
  memset(&first, 0, sizeof first);
  first.agents = first.ranks = first.members = ALL;
  first.leads_ranks = 1;
  first.count = 1;
  first.who[0] = ALL;
  first.trained[0] = 1;
  all->bytes = sizeof first;
  state_search_run(all, &first, moves);
}

static void nobody_trains_without_what_was_trained(void **state) {
  state_search all = {.broken = 0};
  (void)state;
  run(&all);
  if (all.wrong != NULL) {
    fail_msg("%s", all.wrong);
  }
  assert_true(all.met > 0);
  print_message("%zu states\n", all.count);
}

static void each_rule_is_needed(void **state) {
  (void)state;
  for (int rule = LOG_IS_NOT_ASKED; rule <= HOSTS_OF_TWO_LEADERS_MEET; rule++) {
    state_search all = {.broken = rule};
    run(&all);
    assert_non_null(all.wrong);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(nobody_trains_without_what_was_trained),
      cmocka_unit_test(each_rule_is_needed),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
