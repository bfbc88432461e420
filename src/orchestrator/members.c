/* One change at a time, as Raft makes them. */
#include "orchestrator/members.h"

#include "orchestrator/leadership.h"

static bool is_wanted(uint64_t id, const uint64_t *wanted, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (wanted[i] == id) {
      return true;
    }
  }
  return false;
}

static bool is_there(uint64_t id, const even_member_place *now, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (now[i].id == id) {
      return true;
    }
  }
  return false;
}

static even_member_change assign(const even_member_place *place, even_member_role role) {
  return (even_member_change){.kind = EVEN_MEMBER_ASSIGN, .id = place->id, .role = role};
}

even_member_change even_members_next(const even_member_place *now, size_t count, const uint64_t *wanted,
                                     size_t wanted_count, uint64_t self) {
  unsigned voters = 0;
  unsigned aim = even_leadership_voters((unsigned)wanted_count);
  const even_member_place *riser = NULL;  /* the first that could vote too, */
  const even_member_place *faller = NULL; /* the last that could vote no more, */
  const even_member_place *spare = NULL;  /* and one that gets nothing yet */
  for (size_t i = 0; i < count; i++) {
    if (now[i].id != self && !is_wanted(now[i].id, wanted, wanted_count)) {
      return (even_member_change){.kind = EVEN_MEMBER_REMOVE, .id = now[i].id};
    }
    if (now[i].role == EVEN_MEMBER_VOTER) {
      voters++;
      faller = now[i].id != self ? &now[i] : faller;
    } else {
      riser = riser == NULL || now[i].id == self ? &now[i] : riser;
      spare = now[i].role == EVEN_MEMBER_SPARE ? &now[i] : spare;
    }
  }
  for (size_t i = 0; i < wanted_count; i++) {
    if (!is_there(wanted[i], now, count)) {
      return (even_member_change){.kind = EVEN_MEMBER_ADD, .id = wanted[i]};
    }
  }
  if (riser != NULL && (voters < aim || riser->id == self)) {
    return assign(riser, EVEN_MEMBER_VOTER);
  }
  if (faller != NULL && voters > aim) {
    return assign(faller, EVEN_MEMBER_LISTENER);
  }
  if (spare != NULL) {
    return assign(spare, EVEN_MEMBER_LISTENER);
  }
  return (even_member_change){.kind = EVEN_MEMBER_KEEP};
}

unsigned even_members_after(const even_member_place *now, size_t count, uint64_t self, uint64_t leader) {
  bool passed = false;
  unsigned after = 0;
  for (size_t i = 0; i < count; i++) {
    bool votes = now[i].role == EVEN_MEMBER_VOTER;
    after += votes && now[i].id != self && (passed || now[i].id == leader) ? 1 : 0;
    passed = passed || (votes && now[i].id == self);
  }
  return passed && self != leader ? after : 0;
}
