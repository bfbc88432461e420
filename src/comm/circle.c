/* Who of those that wait for one another never gets on.
 *
 * A process gets on when one of its threads does; a thread in a collective when all whom it waits for have got on, one
 * that receives from any rank when one of them has. Begin with all that are known to wait, and take away, until nothing
 * changes, those that can get on: what is left never will. */
#include "comm/circle.h"

void even_circle_need(even_circle_wait *wait, uint64_t process, uint64_t change) {
  if (wait->whoms < EVEN_WAITS_WHOM) {
    wait->at[wait->whoms] = change;
    wait->whom[wait->whoms++] = process;
    return;
  }
  if (wait->any != 0) {
    wait->whom[0] = 0; /* not all of them are told */
    return;
  }
  for (uint32_t i = 0; process != 0 && i < wait->whoms; i++) {
    if (wait->whom[i] == 0) { /* one of which nothing is known proves nothing */
      wait->at[i] = change;
      wait->whom[i] = process;
      return;
    }
  }
}

int even_circle_find(const even_circle_process *of, size_t count, uint64_t process, uint64_t change) {
  for (size_t i = 0; process != 0 && change != 0 && i < count; i++) {
    if (of[i].process == process && of[i].change == change) {
      return (int)i;
    }
  }
  return -1;
}

static int find_stuck(const even_circle_process *of, size_t count, const even_circle_wait *wait, uint32_t number) {
  int one = even_circle_find(of, count, wait->whom[number], wait->at[number]);
  return one >= 0 && of[one].stuck ? one : -1;
}

static bool gets_on(const even_circle_process *of, size_t count, const even_circle_wait *wait) {
  uint32_t stuck = 0;
  for (uint32_t i = 0; i < wait->whoms; i++) {
    stuck += find_stuck(of, count, wait, i) >= 0;
  }
  return wait->any != 0 ? stuck < wait->whoms || stuck == 0 : stuck == 0;
}

void even_circle_search(even_circle_process *of, size_t count) {
  for (size_t i = 0; i < count; i++) {
    of[i].stuck = of[i].waits > 0;
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = 0; i < count; i++) {
      for (uint32_t wait = 0; wait < of[i].waits && of[i].stuck; wait++) {
        of[i].stuck = !gets_on(of, count, &of[i].wait[wait]);
        changed = changed || !of[i].stuck;
      }
    }
  }
}

int even_circle_next(const even_circle_process *of, size_t count, size_t one) {
  const even_circle_wait *wait = &of[one].wait[0];
  for (uint32_t i = 0; i < wait->whoms; i++) {
    int next = find_stuck(of, count, wait, i);
    if (next >= 0) {
      return next;
    }
  }
  return -1;
}

bool even_circle_has(const even_circle_members *members, uint64_t process, uint64_t *change) {
  for (uint32_t i = 0; i < members->count; i++) {
    if (members->process[i] == process) {
      *change = members->change[i];
      return true;
    }
  }
  return false;
}

void even_circle_add(even_circle_members *members, uint64_t process, uint64_t change) {
  if (members->count < EVEN_CIRCLE_MEMBERS) {
    members->process[members->count] = process;
    members->change[members->count++] = change;
  }
}

void even_circle_bound_wait(even_circle_wait *wait) {
  wait->whoms = wait->whoms < EVEN_WAITS_WHOM ? wait->whoms : EVEN_WAITS_WHOM;
}

void even_circle_bound_members(even_circle_members *members) {
  members->count = members->count < EVEN_CIRCLE_MEMBERS ? members->count : EVEN_CIRCLE_MEMBERS;
}
