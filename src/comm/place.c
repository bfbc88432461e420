/* Where a wait is, as the user knows it: the group, and the line of the program. */
#include "comm/group.h"
#include "comm/waits.h"

#include <stdio.h>
#include <string.h>

even_wait_place even_waits_place(even_comm *comm) {
  even_wait_place place = {.group = comm, .rank = even_comm_rank(comm), .ranks = even_comm_ranks(comm)};
  if (even_comm_engine_of(comm)->place != NULL) {
    even_comm_engine_of(comm)->place(comm, &place);
  }
  return place;
}

bool even_waits_read_site(const even_wait_place *place, even_waiting *waiting) {
  const even_flight_writer *flight = place->flight;
  if (flight == NULL) {
    return false;
  }
  even_flight_site_of(flight, flight->rank, flight->number, waiting->site, sizeof waiting->site);
  if (waiting->site[0] != '\0') {
    memmove(waiting->site, waiting->site + strlen(" at "), strlen(waiting->site + strlen(" at ")) + 1);
  }
  return waiting->site[0] != '\0';
}

void even_waits_ask_site(const even_wait_place *place, even_waiting *waiting, bool collective) {
  even_flight_writer *flight = place->flight;
  waiting->asked = true;
  if (collective && flight != NULL) { /* it is in the flight record, too, from now on */
    even_flight_say(flight);
    if (even_waits_read_site(place, waiting)) {
      return;
    }
  }
  if (flight == NULL || flight->ask == NULL || !flight->ask(flight->context, waiting->site, sizeof waiting->site)) {
    waiting->site[0] = '\0';
  }
}

void even_waits_name_group(const even_comm *comm, const even_wait_place *place, char *text, size_t bytes) {
  const char *name = even_comm_base_of(comm)->name;
  if (name[0] != '\0') {
    (void)snprintf(text, bytes, "group %.*s", (int)bytes - 7, name);
  } else {
    (void)snprintf(text, bytes, "a group of %d ranks", place->ranks);
  }
}
