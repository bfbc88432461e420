/* Pauses that double. Pure. */
#ifndef EVEN_ORCHESTRATOR_PAUSES_H
#define EVEN_ORCHESTRATOR_PAUSES_H

#include <stdint.h>

/* After so many failures in a row: the first, twice as long after each more, up to the longest; 0 after none. */
static inline uint64_t even_pause_after(uint64_t first_ns, uint64_t longest_ns, unsigned failures) {
  uint64_t pause_ns = failures > 0 ? first_ns : 0;
  for (unsigned i = 1; i < failures && pause_ns < longest_ns; i++) {
    pause_ns *= 2;
  }
  return pause_ns < longest_ns ? pause_ns : longest_ns;
}

#endif
