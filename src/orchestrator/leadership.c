/* The rules of leading. */
#include "orchestrator/leadership.h"

#include <stdlib.h>

bool even_leadership_apply(even_leadership *state, const even_leadership *entry) {
  if (entry->generation != state->generation + 1 || entry->leader == 0 || even_leadership_ended(state)) {
    return false;
  }
  *state = *entry;
  return true;
}

bool even_leadership_hear(even_leadership *state, const even_leadership *told) {
  if (told->generation <= state->generation || told->leader == 0) {
    return false;
  }
  *state = *told;
  return true;
}

bool even_leadership_ended(const even_leadership *state) {
  return state->leader == EVEN_LEADERSHIP_NOBODY;
}

bool even_leadership_superseded(const even_leadership *newest, uint64_t generation) {
  return newest->generation > generation + (even_leadership_ended(newest) ? 1 : 0);
}

bool even_leadership_log_apply(even_leadership_log *log, const even_leadership_entry *entry, uint64_t term) {
  uint64_t before = log->sure.generation;
  if (entry->says.generation != 0) {
    (void)even_leadership_apply(&log->applied, &entry->says);
  }
  if (entry->term == term) {
    log->sure = log->applied;
    log->sure_term = term;
  }
  return log->sure.generation != before;
}

even_leadership_times even_leadership_times_of(int silence_ms) {
  static const uint64_t least_margin_ns = 500000000u; /* a guardian looks each quarter second */
  const uint64_t silence = (uint64_t)silence_ms * 1000000u;
  const uint64_t pace = silence < 20000000000u ? silence : 20000000000u;
  const uint64_t margin = silence / 8 > least_margin_ns ? silence / 8 : least_margin_ns;
  const uint64_t lease = silence / 4 * 3;
  return (even_leadership_times){.gone_ns = silence / 8 * 3,
                                 .silent_ns = silence / 2 * 5,
                                 .lease_ns = lease,
                                 .guard_ns = lease + margin,
                                 .wait_ns = lease + 2 * margin,
                                 .kill_ns = 5 * silence,
                                 .election_ns = pace / 4,
                                 .heartbeat_ns = pace / 80 * 3,
                                 .heard_ns = pace / 2,
                                 .ask_ns = pace / 80 * 3,
                                 .call_ns = pace / 8};
}

static bool leader_is_lost(const even_leadership_view *view) {
  uint64_t since = view->now_ns - view->leader_ns;
  bool may_speak = view->leader_linked || view->leader_awaited;
  return since > (may_speak ? view->times.silent_ns : view->times.gone_ns);
}

static bool has_lease(const even_leadership_view *view) {
  return view->now_ns < view->lease_ns || view->now_ns - view->lease_ns <= view->times.lease_ns;
}

even_leadership_move even_leadership_next(const even_leadership_view *view) {
  if (!view->raft_leads || view->proposed) {
    return EVEN_LEADERSHIP_REST; /* what is on its way comes first */
  }
  if (!view->raft_own) {
    return EVEN_LEADERSHIP_CONFIRM;
  }
  if (view->applied != view->newest.generation || even_leadership_ended(&view->newest)) {
    return EVEN_LEADERSHIP_REST;
  }
  if (view->newest.generation == 0) { /* by itself, and once it has a lease: it acts from then on */
    return view->first != view->self ? (view->leader_linked ? EVEN_LEADERSHIP_YIELD : EVEN_LEADERSHIP_REST)
           : has_lease(view)         ? EVEN_LEADERSHIP_FIRST
                                     : EVEN_LEADERSHIP_REST;
  }
  if (view->newest.leader == view->self) {
    return view->ends ? EVEN_LEADERSHIP_END : view->hands ? EVEN_LEADERSHIP_HAND : EVEN_LEADERSHIP_REST;
  }
  if (leader_is_lost(view)) {
    return view->witness ? EVEN_LEADERSHIP_PASS : EVEN_LEADERSHIP_SUCCEED;
  }
  return view->leader_linked ? EVEN_LEADERSHIP_YIELD : EVEN_LEADERSHIP_REST;
}

bool even_leadership_acts(const even_leadership_view *view) {
  return view->newest.generation > 0 && view->newest.leader == view->self && has_lease(view);
}

static int later_first(const void *one, const void *other) {
  uint64_t a = *(const uint64_t *)one;
  uint64_t b = *(const uint64_t *)other;
  return a > b ? -1 : a < b ? 1 : 0;
}

uint64_t even_leadership_answered(uint64_t *times, size_t count) {
  if (count == 0) {
    return 0;
  }
  qsort(times, count, sizeof *times, later_first);
  return times[count / 2];
}

unsigned even_leadership_voters(unsigned members) {
  return members < 3 ? 1 : members < 5 ? 3 : 5;
}

bool even_leadership_spares(unsigned voters, unsigned staying) {
  unsigned needed = even_leadership_voters(staying) > 1 ? 1 : 0;
  return staying > needed && staying - needed > voters / 2;
}
