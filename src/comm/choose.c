/* Choosing by costs: what a group's rank 0 is told, and what is measured at first use. */
#include "comm/engine.h"
#include "comm/pieces.h"
#include "comm/ways.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/params.h"
#include "os/clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Every way that some engine has, for the error about one that none has. */
static const char known_ways[] =
    "parts, whole, fitted, direct, pairs (of ucx and hosts), turns, overlap, lanes (of hosts), chain, past-caches, "
    "through-caches, pieces-SIZE like pieces-256K (of shm)";

/* What rank 0 tells the others. */
typedef struct verdict {
  int32_t status;
  uint64_t lacking; /* even_comm_engine.follow's, 0 where nothing is to be measured */
  char what[480];
  char fix[256];
} verdict;

static bool is_known(const char *way) {
  static const char *const words[] = {"parts",   "whole", "fitted", "direct",      "pairs",         "turns",
                                      "overlap", "lanes", "chain",  "past-caches", "through-caches"};
  bool known = even_pieces_named(way) != 0;
  for (size_t i = 0; !known && i < sizeof words / sizeof words[0]; i++) {
    known = strcmp(way, words[i]) == 0;
  }
  return known;
}

static even_status follow(even_comm *comm, const even_comm_choosing *params, size_t *lacking) {
  const even_comm_engine *engine = even_comm_engine_of(comm);
  even_comm_following by = {.costs = params->costs, .shape = params->shape, .engine = engine->name, .way = params->way};
  if (by.way != NULL && !is_known(by.way)) {
    (void)even_fail(EVEN_ERR_ARGUMENT, "'%.40s' is no way of any engine", by.way);
    return even_error_fix("choose one of %s", known_ways);
  }
  if (by.costs != NULL) {
    const even_comm_cost_key key = {
        .collective = "all_reduce", .shape = by.shape, .engine = engine->name, .way = "call", .bytes = 1};
    EVEN_TRY(even_comm_costs_check(&key));
  }
  if (engine->follow == NULL) {
    return EVEN_OK;
  }
  even_status status = engine->follow(comm, &by, lacking);
  if (status == EVEN_ERR_NOT_FOUND) { /* it is another engine's */
    by.way = NULL;
    status = engine->follow(comm, &by, lacking);
  }
  return status;
}

/* Rank 0's outcome, on all ranks. */
static even_status agree(even_comm *comm, verdict *word, even_status status) {
  if (even_comm_base_of(comm)->rank == 0 && status != EVEN_OK) {
    const even_error *why = even_error_last();
    word->status = (int32_t)status;
    (void)snprintf(word->what, sizeof word->what, "%.*s", (int)sizeof word->what - 1, why->what);
    (void)snprintf(word->fix, sizeof word->fix, "%.*s", (int)sizeof word->fix - 1, why->fix);
  }
  EVEN_TRY(even_comm_broadcast(comm, word, sizeof *word, 0));
  if (word->status == EVEN_OK) {
    return EVEN_OK;
  }
  (void)even_fail((even_status)word->status, "%s", word->what);
  return word->fix[0] == '\0' ? (even_status)word->status : even_error_fix("%s", word->fix);
}

/* Memory that every rank has, or none measures. NULL without an error: measuring is not worth one. */
static even_status shared_room(even_comm *comm, size_t bytes, float **out) {
  int32_t has = 1;
  *out = NULL;
  if (even_alloc(bytes, 1, (void **)out) != EVEN_OK) {
    has = 0;
  }
  even_status status = even_comm_all_reduce(comm, &has, 1, EVEN_I32, EVEN_MIN);
  if (status != EVEN_OK || has == 0) {
    even_free(*out);
    *out = NULL;
  }
  return status;
}

/* Whether rank 0 still has time. */
static even_status goes_on(even_comm *comm, uint64_t until_ns, bool *out) {
  unsigned char word = even_clock_ns() < until_ns;
  even_status status = even_comm_broadcast(comm, &word, 1, 0);
  *out = word != 0;
  return status;
}

static uint64_t limit_of(double seconds) {
  return even_clock_ns() + (seconds > 0 ? (uint64_t)((seconds < 60 ? seconds : 60) * 1e9) : 0);
}

/* Calls of each size that may have a choice, as many as the ways need to be told apart; the calls do the measuring. */
static even_status drive_trials(even_comm *comm, size_t largest, double seconds) {
  uint64_t until = limit_of(seconds);
  float *values = NULL;
  bool more = true;
  even_status status = shared_room(comm, largest, &values);
  for (size_t i = 0; i < EVEN_WAYS_SIZES && even_ways_sizes[i] <= largest && values != NULL && more; i++) {
    for (int call = 0; call < EVEN_WAYS_TRIAL && status == EVEN_OK; call++) {
      status = even_comm_all_reduce(comm, values, even_ways_sizes[i] / sizeof *values, EVEN_F32, EVEN_SUM);
    }
    if (status != EVEN_OK) {
      break;
    }
    status = goes_on(comm, until, &more);
  }
  even_free(values);
  return status;
}

/* What an engine's ranks keep alike of the choice. */
static even_status share_choice(even_comm *comm) {
  const even_comm_engine *engine = even_comm_engine_of(comm);
  size_t bytes = 0;
  void *choice = NULL;
  for (int number = 0; engine->choice != NULL; number++) {
    choice = engine->choice(comm, number, &bytes);
    if (choice == NULL) {
      break;
    }
    EVEN_TRY(even_comm_broadcast(comm, choice, bytes, 0));
  }
  return EVEN_OK;
}

even_status even_comm_choose(even_comm *comm, const even_comm_choosing *params) {
  verdict word = {.status = EVEN_OK};
  even_status status = EVEN_OK;
  double seconds = 0;
  if (even_comm_base_of(comm)->rank == 0) {
    size_t lacking = 0;
    even_comm_choosing own = {0};
    status = EVEN_TAKE_PARAMS(even_comm_choosing, &own, params);
    status = status == EVEN_OK ? follow(comm, &own, &lacking) : status;
    seconds = own.measure_seconds;
    word.lacking = status == EVEN_OK && own.costs != NULL && seconds > 0 ? lacking : 0;
  }
  EVEN_TRY(agree(comm, &word, status));
  EVEN_TRY(share_choice(comm));
  return word.lacking == 0 ? EVEN_OK : drive_trials(comm, (size_t)word.lacking, seconds);
}

/* ---- whole calls ---- */

enum { MEASURED_CALLS = 7 };

static int by_time(const void *left, const void *right) {
  double a = *(const double *)left;
  double b = *(const double *)right;
  return (a > b) - (a < b);
}

/* The median of a few calls, each begun together. */
static even_status time_calls(even_comm *comm, float *values, size_t bytes, double *median) {
  double seconds[MEASURED_CALLS + 1];
  for (int call = 0; call <= MEASURED_CALLS; call++) {
    EVEN_TRY(even_comm_barrier(comm));
    uint64_t began = even_clock_ns();
    EVEN_TRY(even_comm_all_reduce(comm, values, bytes / sizeof *values, EVEN_F32, EVEN_SUM));
    seconds[call] = (double)(even_clock_ns() - began) * 1e-9;
  }
  qsort(seconds + 1, MEASURED_CALLS, sizeof seconds[0], by_time); /* the first one warms up */
  *median = seconds[1 + MEASURED_CALLS / 2];
  return EVEN_OK;
}

even_status even_comm_measure(even_comm *comm, even_comm_costs *costs, const char *shape, double seconds) {
  static const size_t sizes[] = {1 << 10, 64 << 10, 1 << 20, 4 << 20};
  enum { SIZES = sizeof sizes / sizeof sizes[0] };
  uint64_t until = limit_of(seconds);
  verdict word = {.status = EVEN_OK};
  even_status kept = EVEN_OK;
  float *values = NULL;
  bool more = true;
  even_status status = shared_room(comm, sizes[SIZES - 1], &values);
  for (size_t i = 0; i < SIZES && values != NULL && more && status == EVEN_OK; i++) {
    double median = 0;
    status = time_calls(comm, values, sizes[i], &median);
    if (costs != NULL && status == EVEN_OK && kept == EVEN_OK) {
      const even_comm_cost_key key = {.collective = "all_reduce",
                                      .shape = shape,
                                      .engine = even_comm_engine_name(comm),
                                      .way = "call",
                                      .bytes = sizes[i]};
      kept = even_comm_costs_add(costs, &key, median > 0 ? median : 1e-9);
    }
    if (i > 0 && status == EVEN_OK) { /* two sizes, whatever the clock says: latency and speed */
      status = goes_on(comm, until, &more);
    }
  }
  even_free(values);
  return status == EVEN_OK ? agree(comm, &word, kept) : status;
}

bool even_comm_costs_step(even_comm_costs *costs, const char *shape, const char *engine, double *seconds) {
  static const struct {
    size_t bytes;
    double calls;
  } step[] = {{1 << 10, 20}, {64 << 10, 4}, {4 << 20, 2}};
  *seconds = 0;
  for (size_t i = 0; i < sizeof step / sizeof step[0]; i++) {
    const even_comm_cost_key key = {
        .collective = "all_reduce", .shape = shape, .engine = engine, .way = "call", .bytes = step[i].bytes};
    double each = 0;
    if (!even_comm_costs_find(costs, &key, &each)) {
      return false;
    }
    *seconds += step[i].calls * each;
  }
  return true;
}
