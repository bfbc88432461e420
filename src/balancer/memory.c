/* Caps from measured peaks of memory, and of ranks that share one. */
#include <evenstep/balancer.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

/* samples times samples do not fit 64 bits in all legal cases */
__extension__ typedef unsigned __int128 wide;

/* Above this whole numbers are not all doubles: nobody has so many samples. */
static const double most_samples = 0x1p53;

static void insert(even_memory_curve *curve, int at, int64_t samples, double bytes) {
  size_t behind = (size_t)(curve->sizes - at);
  memmove(&curve->samples[at + 1], &curve->samples[at], behind * sizeof *curve->samples);
  memmove(&curve->bytes[at + 1], &curve->bytes[at], behind * sizeof *curve->bytes);
  curve->samples[at] = samples;
  curve->bytes[at] = bytes;
  curve->sizes++;
}

static void erase(even_memory_curve *curve, int at) {
  size_t behind = (size_t)(curve->sizes - at - 1);
  memmove(&curve->samples[at], &curve->samples[at + 1], behind * sizeof *curve->samples);
  memmove(&curve->bytes[at], &curve->bytes[at + 1], behind * sizeof *curve->bytes);
  curve->sizes--;
}

/* The inner size whose neighbours are nearest to one another, seen from the smaller: without it least is missing. */
static int dispensable(const even_memory_curve *curve) {
  int found = 1;
  double least = INFINITY;
  for (int i = 1; i + 1 < curve->sizes; i++) {
    double apart = (double)curve->samples[i + 1] / (double)curve->samples[i - 1];
    if (apart < least) {
      least = apart;
      found = i;
    }
  }
  return found;
}

void even_memory_curve_take(even_memory_curve *curve, int64_t samples, double peak_bytes) {
  if (samples < 1 || !isfinite(peak_bytes) || peak_bytes <= 0.0) {
    return;
  }
  int at = 0;
  while (at < curve->sizes && curve->samples[at] < samples) {
    at++;
  }
  bool known = at < curve->sizes && curve->samples[at] == samples;
  if (!known && curve->sizes == EVEN_MEMORY_SIZES) {
    int gone = dispensable(curve);
    erase(curve, gone);
    at -= gone < at ? 1 : 0;
  }
  if (!known) {
    insert(curve, at, samples, peak_bytes);
  }
  curve->bytes[at] = fmax(curve->bytes[at], peak_bytes);
  for (int i = 1; i < curve->sizes; i++) {
    curve->bytes[i] = fmax(curve->bytes[i], curve->bytes[i - 1]);
  }
}

static int64_t whole(double samples) {
  return samples < most_samples ? (int64_t)samples : (int64_t)most_samples;
}

/* Bytes a sample on the steepest line from a smaller size to the largest; 0 where memory did not grow. */
static double steepest(const even_memory_curve *curve) {
  int last = curve->sizes - 1;
  double slope = last == 0 ? curve->bytes[0] / (double)curve->samples[0] : 0.0;
  for (int i = 0; i < last; i++) {
    slope = fmax(slope, (curve->bytes[last] - curve->bytes[i]) / (double)(curve->samples[last] - curve->samples[i]));
  }
  return slope;
}

int64_t even_memory_curve_cap(const even_memory_curve *curve, double limit_bytes) {
  int within = 0; /* sizes that fit */
  if (curve->sizes == 0) {
    return -1;
  }
  while (within < curve->sizes && curve->bytes[within] <= limit_bytes) {
    within++;
  }
  if (within == 0) {
    double part = limit_bytes > 0.0 ? limit_bytes / curve->bytes[0] : 0.0;
    return whole((double)curve->samples[0] * part);
  }
  int base = within - 1;
  double left = limit_bytes - curve->bytes[base];
  double slope = within == curve->sizes ? steepest(curve)
                                        : (curve->bytes[within] - curve->bytes[base]) /
                                              (double)(curve->samples[within] - curve->samples[base]);
  return whole((double)curve->samples[base] + (slope > 0.0 ? left / slope : most_samples));
}

double even_memory_curve_bytes(const even_memory_curve *curve, int64_t samples) {
  int last = curve->sizes - 1;
  int beyond = 0; /* sizes that are not larger */
  if (curve->sizes == 0) {
    return NAN;
  }
  while (beyond < curve->sizes && curve->samples[beyond] <= samples) {
    beyond++;
  }
  if (beyond == 0) {
    return curve->bytes[0] * ((double)(samples > 0 ? samples : 0) / (double)curve->samples[0]);
  }
  int base = beyond - 1;
  double slope = base == last ? steepest(curve)
                              : (curve->bytes[beyond] - curve->bytes[base]) /
                                    (double)(curve->samples[beyond] - curve->samples[base]);
  return curve->bytes[base] + slope * (double)(samples - curve->samples[base]);
}

static int64_t at_least_zero(int64_t number) {
  return number > 0 ? number : 0;
}

/* A sum of what is >= 0, at most INT64_MAX. */
static int64_t added(int64_t one, int64_t other) {
  return one <= INT64_MAX - other ? one + other : INT64_MAX;
}

/* What the pool of `rank` holds; -1: unknown. *wanted: what its ranks would have without caps. */
static int64_t pool_holds(const even_memory_report *reports, size_t ranks, size_t rank, const int64_t *wants,
                          int64_t *wanted) {
  int64_t had = 0;
  int64_t room = 0;
  bool known = false;
  *wanted = 0;
  for (size_t r = 0; r < ranks; r++) {
    if (reports[r].pool != reports[rank].pool) {
      continue;
    }
    had = added(had, at_least_zero(reports[r].samples));
    *wanted = added(*wanted, at_least_zero(wants[r]));
    if (reports[r].room != EVEN_ROOM_UNKNOWN && (!known || reports[r].room > room)) {
      room = reports[r].room;
      known = true;
    }
  }
  return !known ? -1 : (room >= 0 ? added(had, room) : at_least_zero(had + room));
}

/* Of one pool, in proportion; by the rounded sums up to a rank, so that nothing is lost or given twice. */
static void deal_out(const even_memory_report *reports, size_t ranks, size_t first, int64_t holds, const int64_t *wants,
                     int64_t wanted, int64_t *caps) {
  uint64_t members = 0;
  for (size_t r = first; r < ranks; r++) {
    members += reports[r].pool == reports[first].pool ? 1 : 0;
  }
  wide whole = wanted > 0 ? (wide)wanted : (wide)members;
  wide before = 0;
  for (size_t r = first; r < ranks; r++) {
    if (reports[r].pool == reports[first].pool) {
      uint64_t weight = wanted > 0 ? (uint64_t)at_least_zero(wants[r]) : 1;
      wide after = before + weight;
      after = after < whole ? after : whole;
      caps[r] = (int64_t)((wide)holds * after / whole - (wide)holds * before / whole);
      before = after;
    }
  }
}

static bool first_of_its_pool(const even_memory_report *reports, size_t rank) {
  for (size_t r = 0; r < rank; r++) {
    if (reports[r].pool == reports[rank].pool) {
      return false;
    }
  }
  return true;
}

void even_memory_caps(const even_memory_report *reports, size_t ranks, int64_t batch, const int64_t *wanted,
                      int64_t *caps) {
  for (size_t r = 0; r < ranks; r++) {
    int64_t pool_wanted = 0;
    if (!first_of_its_pool(reports, r)) {
      continue;
    }
    int64_t holds = pool_holds(reports, ranks, r, wanted, &pool_wanted);
    if (holds >= 0 && holds < batch) {
      deal_out(reports, ranks, r, holds, wanted, pool_wanted, caps);
      continue;
    }
    for (size_t other = r; other < ranks; other++) {
      caps[other] = reports[other].pool == reports[r].pool ? holds : caps[other];
    }
  }
  for (size_t r = 0; r < ranks; r++) {
    bool own = reports[r].cap >= 0 && (caps[r] < 0 || reports[r].cap < caps[r]);
    caps[r] = own ? reports[r].cap : caps[r];
  }
}
