/* Counts anew from each progress on; how fast they follow one another does not. */
#include "orchestrator/restarts.h"
#include "orchestrator/pauses.h"

#include <stdio.h>

static const uint64_t SECOND_NS = 1000000000u;
enum { LONG_S = 60, LONGEST_PAUSE_S = 60 };

int even_restarts_count(const even_restarts *restarts, int made) {
  return made - restarts->made;
}

bool even_restarts_reach(even_restarts *restarts, int made, int64_t step) {
  if (step <= restarts->since) {
    return false;
  }
  restarts->since = step;
  restarts->made = made;
  return true;
}

static const char *ending_of(int number) {
  static const char *const endings[] = {"th", "st", "nd", "rd"};
  int last = number % 100 / 10 == 1 ? 0 : number % 10;
  return endings[last > 3 ? 0 : last];
}

void even_restarts_name(const even_restarts *restarts, int made, int most, char *out, size_t bytes) {
  int count = even_restarts_count(restarts, made);
  if (count == made) {
    (void)snprintf(out, bytes, "restart %d of %d", count, most);
  } else {
    (void)snprintf(out, bytes, "restart %d of %d, the %d%s in all,", count, most, made, ending_of(made));
  }
}

uint64_t even_restarts_pause_ns(even_restarts *restarts, uint64_t lasted_ns) {
  if (lasted_ns >= LONG_S * SECOND_NS) {
    restarts->short_lived = 0;
    return 0;
  }
  return even_pause_after(SECOND_NS, LONGEST_PAUSE_S * SECOND_NS, (unsigned)restarts->short_lived++);
}
