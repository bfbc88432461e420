/* What the rules of leading rest on, in every order: a log whose leaders count copies of earlier terms' entries, as
 * libraft does; and the time for which an old leader acts, and a new one waits. */
#include "orchestrator/leadership.h"
#include "state_search.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* ---- the log ----
 * Raft among three, but that its leader takes an entry of any term for committed once a majority has it. A leader adds
 * what even_leadership_next asks for: an entry that says nothing, then one for itself. An election is one step, as is
 * sending one entry; a member that would have to undo what it was told is committed stands still for ever, as one of
 * libraft's does. */

enum { NODES = 3, LENGTH = 4, TERMS = 4, GENERATIONS = 2 };

typedef struct node {
  unsigned char term;
  unsigned char leads;
  unsigned char length;
  unsigned char commit;
  unsigned char applied;
  unsigned char stuck;
  unsigned char match[NODES];
  unsigned char terms[LENGTH];
  unsigned char generations[LENGTH];
  unsigned char leaders[LENGTH];
  unsigned char said[2]; /* applied: generation, leader */
  unsigned char sure[2]; /* and what is sure of it */
  unsigned char sure_term;
} node;

typedef struct cluster {
  node nodes[NODES];
  unsigned char led[GENERATIONS + 1]; /* who leads in a generation, by anybody's word: 0: nobody said */
} cluster;

static void apply_all(state_search *all, cluster *now, node *one) {
  while (one->applied < one->commit) {
    size_t at = one->applied++;
    even_leadership_log log = {
        .applied = {one->said[0], one->said[1]}, .sure = {one->sure[0], one->sure[1]}, .sure_term = one->sure_term};
    const even_leadership_entry entry = {{one->generations[at], one->leaders[at]}, one->terms[at]};
    /* broken: what is committed is taken for true */
    bool changed = even_leadership_log_apply(&log, &entry, all->broken != 0 ? entry.term : one->term);
    one->said[0] = (unsigned char)log.applied.generation;
    one->said[1] = (unsigned char)log.applied.leader;
    one->sure[0] = (unsigned char)log.sure.generation;
    one->sure[1] = (unsigned char)log.sure.leader;
    one->sure_term = (unsigned char)log.sure_term;
    if (changed) {
      unsigned char *led = &now->led[log.sure.generation];
      all->met += log.sure.generation == GENERATIONS ? 1 : 0;
      if (*led != 0 && *led != log.sure.leader) {
        all->wrong = "two members lead in one generation";
      }
      *led = (unsigned char)log.sure.leader;
    }
  }
}

static bool votes_for(const node *voter, const node *candidate) {
  unsigned char own = voter->length == 0 ? 0 : voter->terms[voter->length - 1];
  unsigned char its = candidate->length == 0 ? 0 : candidate->terms[candidate->length - 1];
  return !voter->stuck && (its > own || (its == own && candidate->length >= voter->length));
}

static void elect(state_search *all, const cluster *now, int i, int other) {
  cluster next = *now;
  node *winner = &next.nodes[i];
  node *voter = &next.nodes[other];
  unsigned char term = (unsigned char)((winner->term > voter->term ? winner->term : voter->term) + 1);
  if (term > TERMS || winner->stuck || !votes_for(voter, winner)) {
    return;
  }
  winner->term = voter->term = term;
  winner->leads = 1;
  voter->leads = 0;
  memset(winner->match, 0, sizeof winner->match);
  state_search_visit(all, &next);
}

static void add(state_search *all, const cluster *now, int i) {
  cluster next = *now;
  node *one = &next.nodes[i];
  const even_leadership_times times = even_leadership_times_of(4000);
  const even_leadership_view view = {
      .times = times,
      .newest = {one->sure[0], one->sure[1]},
      .applied = one->sure[0],
      .self = (uint64_t)i + 1,
      .first = (uint64_t)i + 1,
      .raft_leads = one->leads != 0,
      .raft_own = one->sure_term == one->term,
      .proposed = one->length > 0 && one->terms[one->length - 1] == one->term && one->applied < one->length,
      .lease_ns = 2 * times.silent_ns,
      .now_ns = 2 * times.silent_ns}; /* whoever leads may be lost */
  even_leadership_move move = even_leadership_next(&view);
  bool says = move == EVEN_LEADERSHIP_FIRST || move == EVEN_LEADERSHIP_SUCCEED;
  if (one->stuck || one->length == LENGTH || (!says && move != EVEN_LEADERSHIP_CONFIRM) ||
      (says && one->sure[0] == GENERATIONS)) {
    return;
  }
  one->terms[one->length] = one->term;
  one->generations[one->length] = says ? (unsigned char)(one->sure[0] + 1) : 0;
  one->leaders[one->length] = says ? (unsigned char)(i + 1) : 0;
  one->length++;
  state_search_visit(all, &next);
}

static size_t agree(const node *one, const node *other) {
  size_t at = 0;
  while (at < one->length && at < other->length && one->terms[at] == other->terms[at]) {
    at++;
  }
  return at;
}

static void send(state_search *all, const cluster *now, int i, int k) {
  cluster next = *now;
  node *leader = &next.nodes[i];
  node *other = &next.nodes[k];
  if (!leader->leads || leader->stuck || other->stuck || other->term > leader->term) {
    return;
  }
  size_t at = agree(leader, other);
  other->term = leader->term;
  other->leads = 0;
  if (at < leader->length) {
    if (at < other->commit) {
      other->stuck = 1; /* it would undo what is committed */
      state_search_visit(all, &next);
      return;
    }
    memset(other->terms + at, 0, LENGTH - at);
    memset(other->generations + at, 0, LENGTH - at);
    memset(other->leaders + at, 0, LENGTH - at);
    other->terms[at] = leader->terms[at];
    other->generations[at] = leader->generations[at];
    other->leaders[at] = leader->leaders[at];
    other->length = (unsigned char)++at;
  }
  leader->match[k] = (unsigned char)at;
  size_t known = leader->commit < at ? leader->commit : at; /* as the leader knew when it sent */
  other->commit = known > other->commit ? (unsigned char)known : other->commit;
  if (leader->match[k] > leader->commit) { /* it and this one are a majority of three */
    leader->commit = leader->match[k];
  }
  apply_all(all, &next, leader);
  apply_all(all, &next, other);
  state_search_visit(all, &next);
}

static void moves_of_log(state_search *all, const void *state) {
  const cluster *now = state;
  for (int i = 0; i < NODES; i++) {
    add(all, now, i);
    for (int k = 0; k < NODES; k++) {
      if (k != i) {
        elect(all, now, i, k);
        send(all, now, i, k);
      }
    }
  }
}

static void run_log(state_search *all) {
  cluster first;
  memset(&first, 0, sizeof first);
  first.nodes[0].term = first.nodes[1].term = 1; /* one is the first that leads, and one has voted for it */
  first.nodes[0].leads = 1;
  all->bytes = sizeof first;
  state_search_run(all, &first, moves_of_log);
}

static void what_is_sure_is_never_undone(void **state) {
  state_search all = {.broken = 0};
  (void)state;
  run_log(&all);
  if (all.wrong != NULL) {
    fail_msg("%s", all.wrong);
  }
  assert_true(all.met > 0);
  print_message("%zu states\n", all.count);
}

static void what_was_counted_may_be_undone(void **state) {
  state_search all = {.broken = 1};
  (void)state;
  run_log(&all);
  assert_non_null(all.wrong);
}

/* ---- the lease ----
 * The old leader, of term 1, asks two others each half second (of 4 s after which hosts are lost: an eighth); they
 * answer when they like, and their answers come when they like. They vote for one of them in term 2 when they like;
 * from then on they answer in that term. The old leader's agent may stand still (SIGSTOP) and go on when it likes; when
 * it does not, it looks each half second whether it acts, and where it does tells its guardian until when its ranks may
 * run: that one holds them then, and lets them go when it is told a later time. The new leader starts ranks as soon as
 * it may, or later.
 *
 * Broken: 1: it waits for no longer than a lease; 2: whoever wakes lets its ranks go, by the lease that it had. */

enum { TIMES = 20 };

static int silence_ms = 4000;

typedef struct moment {
  unsigned char time;
  unsigned char stands;   /* the old leader's agent */
  unsigned char lived;    /* when it did not last */
  unsigned char ranks;    /* the old leader's: 1: they run, 2: its guardian holds them */
  unsigned char begun;    /* the new leader's run */
  unsigned char guard_at; /* the lease that the guardian was told */
  unsigned char reply;    /* the newest question that one of the others has answered in term 1, */
  unsigned char heard;    /* and that whose answer came: of three, it and the one that asks are the majority */
  unsigned char votes;    /* in term 2 */
  unsigned char elected;  /* when both others had voted; 0: they have not */
} moment;

static uint64_t ns(unsigned char time) {
  return (uint64_t)time * (uint64_t)silence_ms * 125000u;
}

static void look(const state_search *all, moment *now) {
  uint64_t times[] = {ns(now->time), 0, ns(now->heard)};
  const even_leadership_view view = {.times = even_leadership_times_of(silence_ms),
                                     .newest = {1, 1},
                                     .self = 1,
                                     .lease_ns = even_leadership_answered(times, 3),
                                     .now_ns = ns(now->time)};
  now->lived = now->time;
  if (even_leadership_acts(&view)) {
    now->guard_at = now->heard;
    now->ranks = 1;
  } else if (all->broken == 2) {
    now->ranks = 1;
  }
}

static void answers_of_time(state_search *all, const moment *now) {
  if (now->votes < 2) {
    moment next = *now;
    next.votes++;
    next.elected = next.votes == 2 ? now->time : 0;
    state_search_visit(all, &next);
  }
  if (now->votes < 2 && now->reply < now->lived) {
    moment next = *now;
    next.reply = now->lived; /* the newest that was asked; an older one is what was answered before */
    state_search_visit(all, &next);
  }
  if (!now->stands && now->heard < now->reply) {
    moment next = *now;
    next.heard = now->reply;
    state_search_visit(all, &next);
  }
}

static void moves_of_time(state_search *all, const void *state) {
  const moment *now = state;
  const even_leadership_times times = even_leadership_times_of(silence_ms);
  uint64_t wait_ns = all->broken == 1 ? times.lease_ns : times.wait_ns;
  if (now->begun && now->ranks == 1) {
    all->wrong = "ranks of two leaders run";
    return;
  }
  if (!now->begun && now->elected != 0 && ns(now->time) >= ns(now->elected) + wait_ns) {
    moment next = *now;
    all->met++;
    next.begun = 1;
    state_search_visit(all, &next);
  }
  answers_of_time(all, now);
  moment next = *now;
  next.stands = !now->stands;
  state_search_visit(all, &next);
  if (now->time < TIMES) {
    next = *now;
    next.time++;
    if (!now->stands) {
      look(all, &next);
    }
    if (ns(next.time) >= ns(next.guard_at) + times.guard_ns &&
        (all->broken != 2 || next.ranks != 1 || now->ranks == 1)) {
      next.ranks = 2;
    }
    state_search_visit(all, &next);
  }
}

static void run_time(state_search *all) {
  moment first;
  memset(&first, 0, sizeof first);
  first.time = first.lived = first.ranks = first.guard_at = first.reply = first.heard = 1;
  all->bytes = sizeof first;
  state_search_run(all, &first, moves_of_time);
}

/* With each silence that hosts may have. */
static void no_rank_starts_while_an_old_one_runs(void **state) {
  static const int silences_ms[] = {2000, 3000, 60000, 600000, 4000};
  (void)state;
  for (size_t i = 0; i < sizeof silences_ms / sizeof silences_ms[0]; i++) {
    state_search all = {.broken = 0};
    silence_ms = silences_ms[i];
    run_time(&all);
    if (all.wrong != NULL) {
      fail_msg("%s, of %d ms", all.wrong, silence_ms);
    }
    assert_true(all.met > 0);
    print_message("%d ms: %zu states\n", silence_ms, all.count);
  }
}

static void a_shorter_wait_is_too_short(void **state) {
  state_search all = {.broken = 1};
  (void)state;
  run_time(&all);
  assert_non_null(all.wrong);
}

static void who_wakes_may_not_let_its_ranks_go(void **state) {
  state_search all = {.broken = 2};
  (void)state;
  run_time(&all);
  assert_non_null(all.wrong);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(what_is_sure_is_never_undone),         cmocka_unit_test(what_was_counted_may_be_undone),
      cmocka_unit_test(no_rank_starts_while_an_old_one_runs), cmocka_unit_test(a_shorter_wait_is_too_short),
      cmocka_unit_test(who_wakes_may_not_let_its_ranks_go),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
