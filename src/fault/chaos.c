/* Plans of faults. */
#include "fault/chaos.h"

#include "base/fail.h"
#include "base/nearest.h"

#include <stdbool.h>
#include <string.h>

static const char *const all[EVEN_CHAOS_KINDS] = {"kill",          "stop",    "slow",      "agent",    "bit-flip",
                                                  "torn-write",    "garbage", "full-disk", "clock",    "stolen-port",
                                                  "out-of-memory", "nan",     "twin",      "partition"};

const char *even_chaos_name(even_chaos_kind kind) {
  return all[kind];
}

static even_status kind_named(const char *word, size_t length, uint32_t *kinds) {
  const char *names[EVEN_CHAOS_KINDS + 1] = {NULL};
  char copy[32];
  for (size_t i = 0; i < EVEN_CHAOS_KINDS; i++) {
    names[i] = all[i];
    if (strlen(all[i]) == length && memcmp(all[i], word, length) == 0) {
      *kinds |= (uint32_t)1 << i;
      return EVEN_OK;
    }
  }
  length = length < sizeof copy ? length : sizeof copy - 1;
  memcpy(copy, word, length);
  copy[length] = '\0';
  const char *nearest = even_nearest(copy, names, EVEN_CHAOS_KINDS);
  (void)even_fail(EVEN_ERR_USAGE, "there is no fault of the kind \"%s\"", copy);
  return nearest != NULL ? even_error_fix("did you mean %s?", nearest)
                         : even_error_fix(
                               "kill, stop, slow, agent, bit-flip, torn-write, garbage, full-disk, "
                               "clock, stolen-port, out-of-memory, nan, twin, partition, or all");
}

even_status even_chaos_parse(const char *list, uint32_t *kinds) {
  *kinds = 0;
  if (strcmp(list, "all") == 0) {
    *kinds = ((uint32_t)1 << EVEN_CHAOS_KINDS) - 1;
    return EVEN_OK;
  }
  for (const char *word = list;; word++) {
    size_t length = strcspn(word, ",");
    EVEN_TRY(kind_named(word, length, kinds));
    word += length;
    if (*word == '\0') {
      return EVEN_OK;
    }
  }
}

/* Of the training: before, there is no checkpoint yet; after, a restart has nothing left to show. */
static const double EARLIEST = 0.1;
static const double LATEST = 0.9;
/* What lacks then is there again when the last checkpoint is written. */
static const double LATEST_LACK = 0.7;
/* A second process has time to start, and to be refused. */
static const double LATEST_TWIN = 0.5;

static double latest_of(even_chaos_kind kind) {
  switch (kind) {
    case EVEN_CHAOS_DISK:
    case EVEN_CHAOS_MEMORY:
      return LATEST_LACK;
    case EVEN_CHAOS_TWIN:
      return LATEST_TWIN;
    default:
      return LATEST;
  }
}

/* SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). */
static uint64_t next(uint64_t *state) {
  uint64_t mixed = *state += 0x9e3779b97f4a7c15u;
  mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
  return mixed ^ mixed >> 31;
}

/* One of the kinds that have not come in this turn. */
static even_chaos_kind draw(uint64_t *state, uint32_t kinds, uint32_t *left) {
  *left = *left == 0 ? kinds : *left;
  uint64_t skip = next(state) % (uint64_t)__builtin_popcount(*left);
  int kind = 0;
  for (;; kind++) {
    if ((*left >> kind & 1u) != 0 && skip-- == 0) {
      break;
    }
  }
  *left &= ~((uint32_t)1 << kind);
  return (even_chaos_kind)kind;
}

void even_chaos_plan(uint64_t seed, uint32_t kinds, int ranks, size_t count, even_chaos_fault *out) {
  uint64_t state = seed;
  uint32_t left = 0;
  for (size_t i = 0; i < count; i++) {
    even_chaos_fault fault = {.kind = draw(&state, kinds, &left)};
    fault.rank = (int)(next(&state) % (uint64_t)ranks);
    double latest = latest_of(fault.kind);
    fault.when = EARLIEST + (latest - EARLIEST) * (double)(next(&state) >> 11) / (double)((uint64_t)1 << 53);
    fault.dice = next(&state);
    size_t at = i;
    for (; at > 0 && out[at - 1].when > fault.when; at--) {
      out[at] = out[at - 1];
    }
    out[at] = fault;
  }
}
