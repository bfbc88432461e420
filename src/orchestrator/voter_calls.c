/* What other threads ask of a member, and tell it. */
#include "base/fail.h"
#include "orchestrator/voter_thread.h"
#include "os/clock.h"

#include <string.h>

void even_voter_look(even_voter *voter, even_voter_view *out) {
  (void)pthread_mutex_lock(&voter->lock);
  *out = voter->view;
  const even_leadership_view view = {.times = voter->times, /* as is its number, for ever */
                                     .newest = out->newest,
                                     .self = voter->links.own.id, /* it never changes */
                                     .lease_ns = voter->lease_ns,
                                     .now_ns = even_clock_boot_ns()};
  (void)pthread_mutex_unlock(&voter->lock);
  out->acts = even_leadership_acts(&view);
  out->acts_until_ns = out->acts ? view.lease_ns + view.times.lease_ns : 0;
  out->answered_ns = out->acts ? view.lease_ns : 0;
}

void even_voter_announce(even_voter *voter, int port) {
  (void)pthread_mutex_lock(&voter->lock);
  voter->announced = port;
  (void)pthread_mutex_unlock(&voter->lock);
}

void even_voter_turns(even_voter *voter, bool begins) {
  even_voter_watch_note(&voter->watch, begins ? even_clock_boot_ns() : 0);
}

bool even_voter_gave_up(even_voter *voter, char why[EVEN_VOTER_WHY]) {
  (void)pthread_mutex_lock(&voter->lock);
  bool gave_up = voter->gave_up;
  voter->gave_up = false;
  memcpy(why, voter->why, EVEN_VOTER_WHY);
  (void)pthread_mutex_unlock(&voter->lock);
  return gave_up;
}

void even_voter_lead(even_voter *voter) {
  (void)pthread_mutex_lock(&voter->lock);
  voter->waits = false;
  (void)pthread_mutex_unlock(&voter->lock);
}

void even_voter_guard(even_voter *voter, even_guardian *guardian) {
  (void)pthread_mutex_lock(&voter->lock);
  voter->guardian = guardian;
  (void)pthread_mutex_unlock(&voter->lock);
}

void even_voter_hand_over(even_voter *voter, const uint64_t *heirs, size_t count) {
  (void)pthread_mutex_lock(&voter->lock);
  voter->heir_count = count < EVEN_VOTER_MOST ? count : EVEN_VOTER_MOST;
  memcpy(voter->heirs, heirs, voter->heir_count * sizeof *heirs);
  voter->hands = true;
  (void)pthread_mutex_unlock(&voter->lock);
}

void even_voter_finish(even_voter *voter) {
  (void)pthread_mutex_lock(&voter->lock);
  voter->ends = true;
  (void)pthread_mutex_unlock(&voter->lock);
}

static even_status replace_list(even_voter *voter, even_member_list *list, const even_voter_member *members,
                                size_t count) {
  even_member_list copy = {NULL, 0};
  EVEN_TRY(even_member_list_copy(members, count, &copy));
  (void)pthread_mutex_lock(&voter->lock);
  even_member_list before = *list;
  *list = copy;
  (void)pthread_mutex_unlock(&voter->lock);
  even_member_list_free(&before);
  return EVEN_OK;
}

even_status even_voter_know(even_voter *voter, const even_voter_member *members, size_t count) {
  return replace_list(voter, &voter->known, members, count);
}

even_status even_voter_want(even_voter *voter, const even_voter_member *members, size_t count) {
  EVEN_TRY(replace_list(voter, &voter->wanted, members, count));
  (void)pthread_mutex_lock(&voter->lock);
  voter->view.exact = voter->view.settled = false; /* what was said was of the list before */
  voter->view.staying = 0;
  (void)pthread_mutex_unlock(&voter->lock);
  return EVEN_OK;
}
