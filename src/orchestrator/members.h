/* Which members of a job vote, and the next change on the way there: pure. */
#ifndef EVEN_ORCHESTRATOR_MEMBERS_H
#define EVEN_ORCHESTRATOR_MEMBERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* In the order in which a member rises. */
typedef enum even_member_role {
  EVEN_MEMBER_SPARE,    /* it is known, and gets nothing */
  EVEN_MEMBER_LISTENER, /* it gets the log */
  EVEN_MEMBER_VOTER
} even_member_role;

typedef struct even_member_place {
  uint64_t id;
  even_member_role role;
} even_member_place;

typedef enum even_member_change_kind {
  EVEN_MEMBER_KEEP, /* all is as it shall be */
  EVEN_MEMBER_ADD,
  EVEN_MEMBER_REMOVE,
  EVEN_MEMBER_ASSIGN /* `role` to a member that is there */
} even_member_change_kind;

typedef struct even_member_change {
  even_member_change_kind kind;
  uint64_t id;
  even_member_role role;
} even_member_change;

/* The next single change from `now` to a group of exactly `wanted`, of whom as many vote as even_leadership_voters
 * says, `self` (the leader, in both lists) among them. First those go that are lost, so that what follows needs no vote
 * of theirs. */
even_member_change even_members_next(const even_member_place *now, size_t count, const uint64_t *wanted,
                                     size_t wanted_count, uint64_t self);

/* Of the voters but `self` how many have a later turn than this one where all do something one after the other: in the
 * order of `now`, the leader last. 0: `self` does not vote. */
unsigned even_members_after(const even_member_place *now, size_t count, uint64_t self, uint64_t leader);

#endif
