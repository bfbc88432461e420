/* Members of the voters' group as somebody has named them, and where each listens. */
#ifndef EVEN_ORCHESTRATOR_MEMBER_LIST_H
#define EVEN_ORCHESTRATOR_MEMBER_LIST_H

#include "orchestrator/voter.h"

typedef struct even_member_list {
  even_voter_member *items;
  size_t count; /* 0: nobody has said */
} even_member_list;

/* A copy of its own. EVEN_ERR_ARGUMENT: they are none, or too many. */
even_status even_member_list_copy(const even_voter_member *members, size_t count, even_member_list *out) EVEN_MUST_USE;
void even_member_list_free(even_member_list *list);
/* Where the member listens; nothing is written where the list does not name it. */
void even_member_list_find(const even_member_list *list, uint64_t id, char address[EVEN_VOTER_ADDRESS]);

#endif
