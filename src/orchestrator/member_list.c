/* The list. */
#include "orchestrator/member_list.h"

#include "base/alloc.h"
#include "base/fail.h"

#include <string.h>

even_status even_member_list_copy(const even_voter_member *members, size_t count, even_member_list *out) {
  if (count == 0 || count > EVEN_VOTER_MOST) {
    return even_fail(EVEN_ERR_ARGUMENT, "a group of %zu members", count);
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&out->items, count));
  memcpy(out->items, members, count * sizeof *members);
  out->count = count;
  return EVEN_OK;
}

void even_member_list_free(even_member_list *list) {
  even_free(list->items);
  *list = (even_member_list){NULL, 0};
}

void even_member_list_find(const even_member_list *list, uint64_t id, char address[EVEN_VOTER_ADDRESS]) {
  for (size_t i = 0; i < list->count; i++) {
    if (list->items[i].id == id) {
      memcpy(address, list->items[i].address, EVEN_VOTER_ADDRESS);
    }
  }
}
