/* The members' log where the program was built without libraft: there is none, and no leader is replaced. */
#include "base/fail.h"
#include "orchestrator/voter.h"
#include "os/listener.h"

const char *even_voter_library(void) {
  return NULL;
}

even_status even_voter_open(const even_voter_params *params, even_voter **out) {
  *out = NULL;
  even_listener_close(params->listener);
  (void)even_fail(EVEN_ERR_UNSUPPORTED, "this program was built without libraft, and keeps no log of who leads");
  return even_error_fix("install libraft-dev 0.15 (Debian 12 has it) and build again, on all hosts");
}

void even_voter_close(even_voter *voter, bool forget) {
  (void)voter;
  (void)forget;
}

void even_voter_look(even_voter *voter, even_voter_view *out) {
  (void)voter;
  *out = (even_voter_view){.port = 0};
}

void even_voter_announce(even_voter *voter, int port) {
  (void)voter;
  (void)port;
}

void even_voter_finish(even_voter *voter) {
  (void)voter;
}

even_status even_voter_know(even_voter *voter, const even_voter_member *members, size_t count) {
  return even_voter_want(voter, members, count);
}

even_status even_voter_want(even_voter *voter, const even_voter_member *members, size_t count) {
  (void)voter;
  (void)members;
  (void)count;
  return even_fail(EVEN_ERR_UNSUPPORTED, "this program was built without libraft");
}

void even_voter_turns(even_voter *voter, bool begins) {
  (void)voter;
  (void)begins;
}

bool even_voter_gave_up(even_voter *voter, char why[EVEN_VOTER_WHY]) {
  (void)voter;
  (void)why;
  return false;
}

void even_voter_lead(even_voter *voter) {
  (void)voter;
}

void even_voter_guard(even_voter *voter, even_guardian *guardian) {
  (void)voter;
  (void)guardian;
}

void even_voter_hand_over(even_voter *voter, const uint64_t *heirs, size_t count) {
  (void)voter;
  (void)heirs;
  (void)count;
}
