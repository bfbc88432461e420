/* The limits and the decision. */
#include "orchestrator/silence.h"

#include <stdlib.h>
#include <string.h>

void even_silence_begin(even_silence *silence, const even_rank_activity *now, uint64_t calls, uint64_t now_ns) {
  memset(silence, 0, sizeof *silence);
  silence->count = now->count;
  silence->calls = calls;
  silence->since_ns = silence->quiet_ns = now_ns;
}

static void keep(even_silence_durations *durations, uint64_t ns) {
  durations->seconds[durations->count++ % EVEN_SILENCE_KEPT] = (float)((double)ns * 1e-9);
}

bool even_silence_look(even_silence *silence, const even_rank_activity *now, uint64_t calls, uint64_t now_ns) {
  bool entered = now->count != silence->count;
  if (!entered && calls == silence->calls) {
    return false;
  }
  if (entered) {
    if (silence->spoke) {
      keep(&silence->ended[silence->activity], now_ns - silence->since_ns);
    }
    silence->spoke = true;
    silence->activity = now->activity;
    silence->stepped = now->stepped;
    silence->ended_before = now->ended;
    silence->since_ns = now_ns;
  }
  silence->count = now->count;
  silence->calls = calls;
  silence->quiet_ns = now_ns;
  return true;
}

void even_silence_sign(even_silence *silence, uint64_t now_ns) {
  if (!even_silence_known(silence)) {
    silence->quiet_ns = now_ns;
  }
}

void even_silence_shift(even_silence *silence, uint64_t ns) {
  silence->since_ns += ns;
  silence->quiet_ns += ns;
}

bool even_silence_known(const even_silence *silence) {
  return silence->stepped && silence->activity != EVEN_ACTIVITY_SCRIPT && silence->ended_before;
}

static int ascending(const void *a, const void *b) {
  float one = *(const float *)a;
  float other = *(const float *)b;
  return (one > other) - (one < other);
}

double even_silence_p99(const even_silence *silence) {
  const even_silence_durations *durations = &silence->ended[silence->activity];
  float sorted[EVEN_SILENCE_KEPT];
  size_t count = durations->count < EVEN_SILENCE_KEPT ? (size_t)durations->count : EVEN_SILENCE_KEPT;
  if (count == 0) {
    return 0;
  }
  memcpy(sorted, durations->seconds, count * sizeof sorted[0]);
  qsort(sorted, count, sizeof sorted[0], ascending);
  return (double)sorted[(count * 99 + 99) / 100 - 1];
}

uint64_t even_silence_limit_ns(const even_silence *silence, uint64_t least_ns) {
  double by_p99 = (double)EVEN_SILENCE_TIMES_P99 * even_silence_p99(silence) * 1e9;
  uint64_t least = even_silence_known(silence) ? least_ns : EVEN_SILENCE_TIMES_UNKNOWN * least_ns;
  return by_p99 > (double)least ? (uint64_t)by_p99 : least;
}

size_t even_silence_decide(const even_silence_rank *ranks, size_t count, bool *hangs) {
  size_t found = 0;
  bool all_wait = true;
  for (size_t i = 0; i < count; i++) {
    const even_silence_rank *rank = &ranks[i];
    hangs[i] = rank->alive && !rank->held && rank->late && !rank->in_collective;
    found += hangs[i] ? 1 : 0;
    all_wait = all_wait && (!rank->alive || (rank->late && rank->in_collective && !rank->held));
  }
  for (size_t i = 0; found == 0 && all_wait && i < count; i++) {
    hangs[i] = ranks[i].alive;
  }
  if (found == 0 && all_wait) {
    for (size_t i = 0; i < count; i++) {
      found += hangs[i] ? 1 : 0;
    }
  }
  return found;
}
