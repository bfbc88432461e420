/* Pauses that double. Pure. */
#ifndef EVEN_ORCHESTRATOR_PAUSES_H
#define EVEN_ORCHESTRATOR_PAUSES_H

#include <stdbool.h>
#include <stdint.h>

/* After so many failures in a row: the first, twice as long after each more, up to the longest; 0 after none. */
static inline uint64_t even_pause_after(uint64_t first_ns, uint64_t longest_ns, unsigned failures) {
  uint64_t pause_ns = failures > 0 ? first_ns : 0;
  for (unsigned i = 1; i < failures && pause_ns < longest_ns; i++) {
    pause_ns *= 2;
  }
  return pause_ns < longest_ns ? pause_ns : longest_ns;
}

/* Before another agent is started in a killed one's place, which was the `soon`th in a row that ended early, in
 * seconds. `lives`: its ranks train on, and who waits for it, for 20 s or more (link.h, outlast_hosts.c), must not give
 * it up. */
static inline int even_pause_of_agent_s(unsigned soon, bool lives) {
  enum { LONGEST_S = 60, LONGEST_LIVES_S = 15 };
  const uint64_t second_ns = 1000000000u;
  uint64_t longest_ns = (lives ? LONGEST_LIVES_S : LONGEST_S) * second_ns;
  return soon == 1 && lives ? 0 : (int)(even_pause_after(second_ns, longest_ns, soon) / second_ns);
}

#endif
