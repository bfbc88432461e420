/* From the memory of a process's groups to its last collective. */
#include "orchestrator/last_call.h"

#include "base/fail.h"
#include "os/shared_memory.h"

#include <stdint.h>
#include <stdio.h>

typedef struct call_search {
  long process;
  even_last_call *found;
} call_search;

/* A group that is part of a larger one leaves the record to that. */
static bool look_at_group(void *context, int fd, uint64_t identity) {
  const call_search *search = context;
  even_last_call *found = search->found;
  even_flight *flight = NULL;
  (void)identity;
  if (even_flight_open(fd, &flight) != EVEN_OK) {
    return true;
  }
  for (int rank = 0; rank < even_flight_ranks(flight); rank++) {
    even_flight_call call;
    if (even_flight_process(flight, rank) == search->process && even_flight_read(flight, rank, &call, 1) == 1) {
      bool waits = call.state == EVEN_FLIGHT_BEGUN;
      if (!found->known || waits || call.began_ns > found->call.began_ns) {
        *found = (even_last_call){.known = true, .waits = waits, .ranks = even_flight_ranks(flight), .call = call};
        even_flight_summary(flight, found->reached, sizeof found->reached);
      }
    }
  }
  even_flight_close(flight);
  return !found->waits;
}

void even_last_call_read(pid_t pid, even_last_call *out) {
  call_search search = {.process = (long)pid, .found = out};
  const even_error kept = *even_error_last();
  *out = (even_last_call){.known = false};
  (void)!even_shared_memory_each(pid, "evenstep-group", look_at_group, &search); /* gone meanwhile */
  (void)even_error_restore(&kept);
}

void even_last_call_describe(const even_last_call *last, char *text, size_t bytes) {
  text[0] = '\0';
  if (last->known) {
    (void)snprintf(text, bytes, "call %llu (%s) of a group of %d ranks%s%s", (unsigned long long)last->call.number,
                   last->call.call, last->ranks, last->call.site[0] == '\0' ? "" : ", at ", last->call.site);
  }
}
