/* The rules of leading. */
#include "orchestrator/leadership.h"

bool even_leadership_apply(even_leadership *state, const even_leadership *entry) {
  if (entry->generation != state->generation + 1 || entry->leader == 0) {
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

static bool leader_is_lost(const even_leadership_view *view) {
  uint64_t since = view->now_ns - view->leader_ns;
  return since > (view->leader_linked ? EVEN_LEADERSHIP_SILENT_NS : EVEN_LEADERSHIP_GONE_NS);
}

even_leadership_move even_leadership_next(const even_leadership_view *view) {
  if (!view->raft_leads || view->proposed || view->applied != view->newest.generation) {
    return EVEN_LEADERSHIP_REST; /* what is on its way comes first */
  }
  if (view->newest.generation == 0) {
    bool there = view->first == view->self || view->leader_linked;
    return there ? EVEN_LEADERSHIP_FIRST : EVEN_LEADERSHIP_REST;
  }
  if (view->newest.leader == view->self) {
    return EVEN_LEADERSHIP_REST;
  }
  return leader_is_lost(view) ? EVEN_LEADERSHIP_SUCCEED
                              : (view->leader_linked ? EVEN_LEADERSHIP_YIELD : EVEN_LEADERSHIP_REST);
}

bool even_leadership_acts(const even_leadership_view *view) {
  return view->newest.generation > 0 && view->newest.leader == view->self &&
         (view->quorum || view->now_ns - view->quorum_ns <= EVEN_LEADERSHIP_LEASE_NS);
}

unsigned even_leadership_voters(unsigned members) {
  return members < 3 ? 1 : members < 5 ? 3 : 5;
}
