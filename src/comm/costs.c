/* The table of measured costs: what goes in, how entries are refined, and what is read between them. */
#include "comm/costs.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/utf8.h"

#include <math.h>
#include <string.h>

/* A sample's weight does not fall below 1/(MOST_WEIGHT + 1): what is known stays open to change. */
#define MOST_WEIGHT 15u
/* Other work makes calls slower, by any factor; nothing makes them much faster than they are. */
#define SLOWEST 2.0
#define FASTEST 0.125
/* Samples of either side that count when two histories of one cost are joined. */
#define MOST_MERGED 64u

even_status even_comm_costs_open(even_comm_costs **out) {
  even_comm_costs *costs = NULL;
  *out = NULL;
  EVEN_TRY(EVEN_NEW(&costs));
  (void)pthread_mutex_init(&costs->lock, NULL);
  atomic_store(&costs->holders, 1u);
  *out = costs;
  return EVEN_OK;
}

even_comm_costs *even_comm_costs_hold(even_comm_costs *costs) {
  if (costs != NULL) {
    atomic_fetch_add(&costs->holders, 1u);
  }
  return costs;
}

void even_comm_costs_close(even_comm_costs *costs) {
  if (costs != NULL && atomic_fetch_sub(&costs->holders, 1u) == 1u) {
    (void)pthread_mutex_destroy(&costs->lock);
    even_free(costs->entries);
    even_free(costs);
  }
}

/* ---- keys ---- */

static even_status check_word(const char *what, const char *word, size_t room) {
  if (word == NULL || word[0] == '\0' || strlen(word) >= room) {
    return even_fail(EVEN_ERR_ARGUMENT, "the %s of a cost has %zu bytes; 1 to %zu are possible", what,
                     word == NULL ? (size_t)0 : strlen(word), room - 1);
  }
  for (const char *at = word; *at != '\0'; at++) {
    if ((unsigned char)*at < 0x20 || *at == 0x7f) {
      return even_fail(EVEN_ERR_ARGUMENT, "the %s of a cost has a control character", what);
    }
  }
  return even_utf8_valid(word) ? EVEN_OK : even_fail(EVEN_ERR_ARGUMENT, "the %s of a cost is not UTF-8", what);
}

even_status even_comm_costs_check(const even_comm_cost_key *key) {
  EVEN_TRY(check_word("collective", key->collective, EVEN_COMM_COSTS_WORD));
  EVEN_TRY(check_word("shape", key->shape, EVEN_COMM_COSTS_SHAPE));
  EVEN_TRY(check_word("engine", key->engine, EVEN_COMM_COSTS_WORD));
  EVEN_TRY(check_word("way", key->way, EVEN_COMM_COSTS_WORD));
  if (key->bytes == 0 || key->bytes > UINT64_C(1) << 50) {
    return even_fail(EVEN_ERR_ARGUMENT, "the size of a cost is %llu bytes; 1 to 2^50 are possible",
                     (unsigned long long)key->bytes);
  }
  return EVEN_OK;
}

/* The nearest power of two, by ratio. */
static uint64_t size_class(uint64_t bytes) {
  uint64_t below = 1;
  while (below <= bytes / 2) {
    below *= 2;
  }
  return (double)bytes > (double)below * 1.4142135623730951 ? below * 2 : below;
}

static bool same_line(const even_comm_cost *cost, const even_comm_cost_key *key) {
  return strcmp(cost->collective, key->collective) == 0 && strcmp(cost->way, key->way) == 0 &&
         strcmp(cost->engine, key->engine) == 0 && strcmp(cost->shape, key->shape) == 0;
}

even_comm_cost_key even_comm_cost_key_of(const even_comm_cost *cost) {
  return (even_comm_cost_key){.collective = cost->collective,
                              .shape = cost->shape,
                              .engine = cost->engine,
                              .way = cost->way,
                              .bytes = cost->bytes};
}

/* The entry of that key, NULL without one. With the lock held. */
static even_cost_entry *entry_of(even_comm_costs *costs, const even_comm_cost_key *key) {
  uint64_t bytes = size_class(key->bytes);
  for (size_t i = 0; i < costs->count; i++) {
    even_cost_entry *entry = &costs->entries[i];
    if (entry->cost.bytes == bytes && same_line(&entry->cost, key)) {
      return entry;
    }
  }
  return NULL;
}

/* ---- what goes in ---- */

/* Of those that a file has, the one longest without a sample; of the others, which are all new, the first. */
static even_cost_entry *stalest(even_comm_costs *costs) {
  even_cost_entry *found = &costs->entries[0];
  for (size_t i = 1; i < costs->count; i++) {
    even_cost_entry *entry = &costs->entries[i];
    bool older = (entry->fresh == 0) != (found->fresh == 0) ? entry->fresh == 0 : entry->cost.at < found->cost.at;
    found = older ? entry : found;
  }
  return found;
}

static even_status make_entry(even_comm_costs *costs, even_cost_entry **out) {
  if (costs->count == EVEN_COMM_COSTS_MOST) {
    *out = stalest(costs);
  } else {
    if (costs->count == costs->capacity) {
      size_t wanted = costs->capacity == 0 ? 64 : 2 * costs->capacity;
      EVEN_TRY(even_realloc((void **)&costs->entries, wanted, sizeof *costs->entries));
      costs->capacity = wanted;
    }
    *out = &costs->entries[costs->count++];
  }
  memset(*out, 0, sizeof **out);
  return EVEN_OK;
}

static even_status make_entry_of(even_comm_costs *costs, const even_comm_cost_key *key, even_cost_entry **out) {
  EVEN_TRY(make_entry(costs, out));
  even_comm_cost *cost = &(*out)->cost;
  memcpy(cost->collective, key->collective, strlen(key->collective) + 1);
  memcpy(cost->shape, key->shape, strlen(key->shape) + 1);
  memcpy(cost->engine, key->engine, strlen(key->engine) + 1);
  memcpy(cost->way, key->way, strlen(key->way) + 1);
  cost->bytes = size_class(key->bytes);
  return EVEN_OK;
}

static double between(double value, double least, double most) {
  return value < least ? least : (value > most ? most : value);
}

static void refine(even_comm_cost *cost, double seconds) {
  if (cost->samples == 0) {
    cost->seconds = seconds;
  } else {
    uint32_t weight = cost->samples < MOST_WEIGHT ? cost->samples : MOST_WEIGHT;
    double ratio = between(seconds / cost->seconds, FASTEST, SLOWEST);
    cost->seconds *= pow(ratio, 1.0 / (weight + 1));
  }
  cost->samples += cost->samples < UINT32_MAX;
}

static even_status add_locked(even_comm_costs *costs, const even_comm_cost_key *key, double seconds) {
  even_cost_entry *entry = entry_of(costs, key);
  if (entry == NULL) {
    EVEN_TRY(make_entry_of(costs, key, &entry));
  }
  refine(&entry->cost, seconds);
  entry->fresh += entry->fresh < UINT32_MAX;
  return EVEN_OK;
}

even_status even_comm_costs_add(even_comm_costs *costs, const even_comm_cost_key *key, double seconds) {
  EVEN_TRY(even_comm_costs_check(key));
  if (!(seconds > 0) || !isfinite(seconds)) {
    return even_fail(EVEN_ERR_ARGUMENT, "a cost is %g s; it is above 0", seconds);
  }
  (void)pthread_mutex_lock(&costs->lock);
  even_status status = add_locked(costs, key, seconds);
  (void)pthread_mutex_unlock(&costs->lock);
  return status;
}

static uint32_t counted(uint32_t samples) {
  return samples < MOST_MERGED ? samples : MOST_MERGED;
}

even_status even_comm_costs_merge(even_comm_costs *costs, const even_comm_cost *cost) {
  even_comm_cost_key key = even_comm_cost_key_of(cost);
  even_cost_entry *entry = entry_of(costs, &key);
  if (entry == NULL) {
    EVEN_TRY(make_entry_of(costs, &key, &entry));
  }
  even_comm_cost *known = &entry->cost;
  double mine = counted(known->samples);
  double theirs = counted(cost->samples);
  if (mine == 0) {
    known->seconds = cost->seconds;
  } else {
    known->seconds *= pow(cost->seconds / known->seconds, theirs / (mine + theirs));
  }
  known->samples = cost->samples > UINT32_MAX - known->samples ? UINT32_MAX : known->samples + cost->samples;
  known->at = cost->at > known->at ? cost->at : known->at;
  return EVEN_OK;
}

/* ---- what comes out ---- */

/* Between (or beyond) two entries of one line; either may be NULL, not both. */
static double interpolate(const even_comm_cost *below, const even_comm_cost *above, uint64_t bytes) {
  if (below == NULL) {
    return above->seconds;
  }
  if (above == NULL) {
    return below->bytes == bytes ? below->seconds : below->seconds * ((double)bytes / (double)below->bytes);
  }
  double part = log((double)bytes / (double)below->bytes) / log((double)above->bytes / (double)below->bytes);
  return below->seconds * pow(above->seconds / below->seconds, part);
}

bool even_comm_costs_find(even_comm_costs *costs, const even_comm_cost_key *key, double *seconds) {
  const even_comm_cost *below = NULL; /* or at */
  const even_comm_cost *above = NULL;
  if (even_comm_costs_check(key) != EVEN_OK) {
    return false;
  }
  (void)pthread_mutex_lock(&costs->lock);
  for (size_t i = 0; i < costs->count; i++) {
    const even_comm_cost *cost = &costs->entries[i].cost;
    if (!same_line(cost, key)) {
      continue;
    }
    if (cost->bytes <= key->bytes && (below == NULL || cost->bytes > below->bytes)) {
      below = cost;
    } else if (cost->bytes > key->bytes && (above == NULL || cost->bytes < above->bytes)) {
      above = cost;
    }
  }
  bool known = below != NULL || above != NULL;
  if (known) {
    *seconds = interpolate(below, above, key->bytes);
  }
  (void)pthread_mutex_unlock(&costs->lock);
  return known;
}

bool even_comm_costs_at(even_comm_costs *costs, size_t index, even_comm_cost *out) {
  (void)pthread_mutex_lock(&costs->lock);
  bool there = index < costs->count;
  if (there) {
    *out = costs->entries[index].cost;
  }
  (void)pthread_mutex_unlock(&costs->lock);
  return there;
}
