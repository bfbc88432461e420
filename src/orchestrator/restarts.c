/* Counts anew from each progress on. */
#include "orchestrator/restarts.h"

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
