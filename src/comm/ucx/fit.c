/* Parts of an all-reduce by the speeds of the links: a slow link gets a smaller part, or none, so that no more than the
 * data themselves have to pass it in each direction. The speeds are measured in large calls, the first and now and
 * then: one rank after the other exchanges some data with all others. */
#include "comm/ucx/reduce.h"

#include "base/fail.h"
#include "os/clock.h"

#include <string.h>

/* So much passes the link that is measured, in each direction. */
#define PROBE_BYTES ((size_t)1 << 20)
#define LEAST_PROBE ((size_t)4 << 10)
#define REPEATS 2 /* the faster counts: other work makes links slower, nothing makes them faster */
/* Large calls from one measurement to the next. */
#define PERIOD 256u
/* What fitting has to save of the time of equal parts. */
#define WORTH 0.07

/* ---- what to make of the speeds ---- */

/* What all links take together where none may take longer than `time`: the sum of their parts is to be 1. */
static double parts_within(const double *speeds, int ranks, double time) {
  double sum = 0;
  for (int rank = 0; rank < ranks; rank++) {
    double part = (time * speeds[rank] - 1) / (ranks - 2);
    sum += part > 0 ? part : 0;
  }
  return sum;
}

/* The least time in which every link has passed on 1 + (ranks - 2) f of the data, the parts f adding up to 1; equal
 * parts take `most`. */
static double least_time(const double *speeds, int ranks, double slowest, double most) {
  double below = 1 / slowest; /* the data themselves pass every link */
  double above = most;
  if (parts_within(speeds, ranks, below) >= 1) {
    return below;
  }
  for (int i = 0; i < 50; i++) {
    double middle = (below + above) / 2;
    if (parts_within(speeds, ranks, middle) >= 1) {
      above = middle;
    } else {
      below = middle;
    }
  }
  return above;
}

bool even_ucx_fit_parts(const uint64_t *times, int ranks, uint32_t *ends) {
  double speeds[EVEN_UCX_FIT_RANKS];
  double fastest = 0;
  double slowest = 0;
  if (ranks < 3 || ranks > EVEN_UCX_FIT_RANKS) {
    return false;
  }
  for (int rank = 0; rank < ranks; rank++) {
    speeds[rank] = 1 / (double)(times[rank] > 0 ? times[rank] : 1);
    fastest = rank == 0 || speeds[rank] > fastest ? speeds[rank] : fastest;
    slowest = rank == 0 || speeds[rank] < slowest ? speeds[rank] : slowest;
  }
  for (int rank = 0; rank < ranks; rank++) {
    speeds[rank] /= fastest;
  }
  slowest /= fastest;
  double equal = (1 + (double)(ranks - 2) / ranks) / slowest;
  double time = least_time(speeds, ranks, slowest, equal);
  if (time > equal * (1 - WORTH)) {
    return false;
  }
  double sum = parts_within(speeds, ranks, time);
  double end = 0;
  for (int rank = 0; rank < ranks; rank++) {
    double part = (time * speeds[rank] - 1) / (ranks - 2);
    end += part > 0 ? part / sum : 0;
    ends[rank] = (uint32_t)(end * EVEN_UCX_FIT_WHOLE + 0.5);
  }
  ends[ranks - 1] = EVEN_UCX_FIT_WHOLE; /* whatever rounding says */
  return true;
}

uint32_t even_ucx_fit_widest(const even_ucx_group *group) {
  uint32_t widest = 1;
  uint32_t begin = 0;
  for (int rank = 0; rank < group->ranks; rank++) {
    uint32_t part = group->fit.ends[rank] - begin;
    widest = part > widest ? part : widest;
    begin = group->fit.ends[rank];
  }
  return widest;
}

/* ---- measuring ---- */

static size_t probe_bytes(const even_ucx_group *group) {
  size_t bytes = PROBE_BYTES / (size_t)(group->ranks - 1);
  size_t most = even_ucx_chunk_bytes(group->ranks);
  return bytes < LEAST_PROBE ? LEAST_PROBE : bytes > most ? most : bytes;
}

/* The tags of round `round`: who is measured says that it begins, and data go both ways. */
enum { WORD, OUT, IN, TAGS };
static uint64_t tag_of(const even_ucx_group *group, int sender, uint64_t round, uint64_t what) {
  return even_ucx_call_tag(group, sender, EVEN_UCX_FIT_STEP + round * TAGS + what);
}

static even_status be_measured(even_ucx_group *group, uint64_t round, uint64_t *took) {
  size_t bytes = probe_bytes(group);
  size_t count = 0;
  int own = group->rank;
  uint64_t began = even_clock_ns();
  (void)pthread_mutex_lock(&group->lock);
  for (int rank = 0; rank < group->ranks; rank++) {
    if (rank != own) {
      even_ucx_transfer *transfers = &group->transfers[count];
      even_ucx_send(group, &transfers[WORD], rank, tag_of(group, own, round, WORD), group->fit.times,
                    sizeof group->fit.times[0]);
      even_ucx_receive(group, &transfers[IN], rank, tag_of(group, rank, round, IN), even_ucx_staging_of(group, rank, 0),
                       bytes);
      even_ucx_send(group, &transfers[OUT], rank, tag_of(group, own, round, OUT), even_ucx_staging_of(group, own, 1),
                    bytes);
      count += TAGS;
    }
  }
  (void)pthread_mutex_unlock(&group->lock);
  EVEN_TRY(even_ucx_wait(group, group->transfers, count));
  *took = even_clock_ns() - began;
  return EVEN_OK;
}

static even_status help_measure(even_ucx_group *group, int other, uint64_t round) {
  size_t bytes = probe_bytes(group);
  int own = group->rank;
  even_ucx_transfer *transfers = group->transfers;
  (void)pthread_mutex_lock(&group->lock);
  even_ucx_receive(group, &transfers[1], other, tag_of(group, other, round, OUT), even_ucx_staging_of(group, other, 0),
                   bytes);
  even_ucx_receive(group, &transfers[0], other, tag_of(group, other, round, WORD), &group->fit.word,
                   sizeof group->fit.word);
  (void)pthread_mutex_unlock(&group->lock);
  EVEN_TRY(even_ucx_wait(group, transfers, 1));
  (void)pthread_mutex_lock(&group->lock);
  even_ucx_send(group, &transfers[0], other, tag_of(group, own, round, IN), even_ucx_staging_of(group, own, 1), bytes);
  (void)pthread_mutex_unlock(&group->lock);
  return even_ucx_wait(group, transfers, 2);
}

/* Every rank in turn; the best of this one's in `times`. */
static even_status measure_all(even_ucx_group *group) {
  uint64_t *times = group->fit.times;
  times[group->rank] = UINT64_MAX;
  for (uint64_t round = 0; round < REPEATS * (uint64_t)group->ranks; round++) {
    int rank = (int)(round % (uint64_t)group->ranks);
    uint64_t took = UINT64_MAX;
    EVEN_TRY(rank == group->rank ? be_measured(group, round, &took) : help_measure(group, rank, round));
    times[group->rank] = took < times[group->rank] ? took : times[group->rank];
  }
  return EVEN_OK;
}

/* Where equal parts are to stay, no part ends anywhere. */
static void decide(even_ucx_group *group) {
  bool asked_for = group->fit.ways.choice.forced == 0;
  bool refused = group->fit.ways.choice.forced > 0;
  if (refused || (!even_ucx_fit_parts(group->fit.times, group->ranks, group->fit.ends) && !asked_for)) {
    memset(group->fit.ends, 0, (size_t)group->ranks * sizeof *group->fit.ends);
  } else if (group->fit.ends[group->ranks - 1] == 0) { /* asked for, and the links are equal */
    for (int rank = 0; rank < group->ranks; rank++) {
      group->fit.ends[rank] = (uint32_t)(EVEN_UCX_FIT_WHOLE * (uint64_t)(rank + 1) / (uint64_t)group->ranks);
    }
  }
}

/* Rank 0 has all times, and all have its verdict. */
static even_status agree(even_ucx_group *group) {
  uint64_t round = REPEATS * (uint64_t)group->ranks;
  size_t ends_bytes = (size_t)group->ranks * sizeof *group->fit.ends;
  size_t count = 0;
  int own = group->rank;
  (void)pthread_mutex_lock(&group->lock);
  if (own != 0) {
    even_ucx_send(group, &group->transfers[count++], 0, tag_of(group, own, round, IN), &group->fit.times[own],
                  sizeof group->fit.times[0]);
    even_ucx_receive(group, &group->transfers[count++], 0, tag_of(group, 0, round, OUT), group->fit.ends, ends_bytes);
  }
  for (int rank = 1; own == 0 && rank < group->ranks; rank++) {
    even_ucx_receive(group, &group->transfers[count++], rank, tag_of(group, rank, round, IN), &group->fit.times[rank],
                     sizeof group->fit.times[0]);
  }
  (void)pthread_mutex_unlock(&group->lock);
  EVEN_TRY(even_ucx_wait(group, group->transfers, count));
  if (own == 0) {
    decide(group);
    (void)pthread_mutex_lock(&group->lock);
    for (int rank = 1; rank < group->ranks; rank++) {
      even_ucx_send(group, &group->transfers[rank - 1], rank, tag_of(group, 0, round, OUT), group->fit.ends,
                    ends_bytes);
    }
    (void)pthread_mutex_unlock(&group->lock);
    EVEN_TRY(even_ucx_wait(group, group->transfers, (size_t)group->ranks - 1));
  }
  group->fit.unequal = group->fit.ends[group->ranks - 1] != 0;
  return EVEN_OK;
}

even_status even_ucx_fit_measure(even_ucx_group *group, bool *measured) {
  *measured = group->ranks <= EVEN_UCX_FIT_RANKS && group->fit.calls++ % PERIOD == 0;
  if (!*measured) {
    return EVEN_OK;
  }
  EVEN_TRY(measure_all(group));
  return agree(group);
}
