/* A rank's own part of the exchange; see exchange.h. Medians: what is there in most steps counts, and noise does
 * not. */
#include "balancer/exchange.h"

#include "balancer/state.h"
#include "base/alloc.h"
#include "base/fail.h"

#include <math.h>
#include <string.h>

enum {
  LEAST = 24, /* steps before it counts */
  LOOK_EVERY = 8
};

/* Of a step's longest busy time: what is less, beyond the rank with the least, is none. */
static const double least_part = 0.01;
/* Standard errors that are no chance: there are many ranks, which are looked at often. */
static const double certain = 5.0;
/* Nobody's part is longer. */
static const double longest_seconds = 1e9;

even_status even_exchange_open(even_exchange *e, size_t ranks) {
  e->ranks = ranks;
  EVEN_TRY(even_alloc(ranks, EVEN_EXCHANGE_STEPS * sizeof *e->seconds, (void **)&e->seconds));
  EVEN_TRY(EVEN_NEW_ARRAY(&e->counted, ranks));
  return EVEN_NEW_ARRAY(&e->timings, ranks);
}

void even_exchange_close(even_exchange *e) {
  even_free(e->seconds);
  even_free(e->counted);
  even_free(e->timings);
}

/* Whether it is time to look at what was told. */
static bool remember(even_exchange *e, const even_step_timing *timings, const double *seconds) {
  size_t at = (size_t)(e->taken % EVEN_EXCHANGE_STEPS);
  bool any = false;
  for (size_t r = 0; seconds != NULL && r < e->ranks; r++) {
    any = any || seconds[r] > 0.0;
  }
  if (!any && e->told == 0) {
    return false; /* nobody ever had one */
  }
  e->longest[at] = 0.0;
  for (size_t r = 0; r < e->ranks; r++) {
    double own = seconds != NULL ? seconds[r] : 0.0;
    e->seconds[at * e->ranks + r] = own < longest_seconds ? own : longest_seconds;
    e->longest[at] = timings[r].busy_seconds > e->longest[at] ? timings[r].busy_seconds : e->longest[at];
  }
  e->taken++;
  e->told = any ? e->taken : e->told;
  bool quiet = e->taken - e->told >= EVEN_EXCHANGE_STEPS;
  return !quiet && e->taken >= LEAST && e->taken % LOOK_EVERY == 0;
}

static int remembered(const even_exchange *e) {
  return e->taken < EVEN_EXCHANGE_STEPS ? (int)e->taken : EVEN_EXCHANGE_STEPS;
}

/* The rank's part of each step, less that of `least` (ranks: nobody's), in order. */
static void sort(const even_exchange *e, size_t rank, size_t least, double *sorted) {
  for (int i = 0; i < remembered(e); i++) {
    const double *step = e->seconds + (size_t)i * e->ranks;
    double value = step[rank] - (least < e->ranks ? step[least] : 0.0);
    int at = i;
    for (; at > 0 && sorted[at - 1] > value; at--) {
      sorted[at] = sorted[at - 1];
    }
    sorted[at] = value;
  }
}

static size_t rank_with_least(const even_exchange *e) {
  double sorted[EVEN_EXCHANGE_STEPS] = {0};
  size_t least = 0;
  double median = 0.0;
  for (size_t r = 0; r < e->ranks; r++) {
    sort(e, r, e->ranks, sorted);
    if (r == 0 || sorted[remembered(e) / 2] < median) {
      least = r;
      median = sorted[remembered(e) / 2];
    }
  }
  return least;
}

/* Standard error of the median of `count` values, were they normal. */
static double error_of(const double *values, int count) {
  double mean = 0.0;
  double squares = 0.0;
  for (int i = 0; i < count; i++) {
    mean += values[i] / count;
  }
  for (int i = 0; i < count; i++) {
    squares += (values[i] - mean) * (values[i] - mean);
  }
  return 1.2533 * sqrt(squares / (count - 1) / count);
}

/* What is to count of the rank's part: the median beyond `least`, once it is more than chance makes it and three
 * quarters of the steps had more than the least that counts, until it is half of that; and as it is where the
 * difference would not count by itself. */
static double counts(const even_exchange *e, size_t rank, size_t least) {
  double sorted[EVEN_EXCHANGE_STEPS] = {0};
  double step = 0.0;
  int steps = remembered(e);
  for (int i = 0; i < steps; i++) {
    step += e->longest[i] / steps;
  }
  sort(e, rank, least, sorted);
  double median = sorted[steps / 2];
  double error = certain * error_of(sorted, steps);
  double shown = error > least_part * step ? error : least_part * step;
  double now = e->counted[rank];
  if (!(now > 0.0)) {
    return median > shown && sorted[steps / 4] > least_part * step ? median : 0.0;
  }
  if (median < least_part * step / 2.0) {
    return 0.0;
  }
  double off = median > now ? median - now : now - median;
  return off > shown ? median : now;
}

static void look(even_balancer *b) {
  even_exchange *e = &b->exchange;
  size_t least = rank_with_least(e);
  bool moved = false;
  for (size_t r = 0; r < e->ranks; r++) {
    double more = counts(e, r, least) - e->counted[r];
    if (more < 0.0 || more > 0.0) {
      e->counted[r] += more;
      even_model_shift(&b->models[r], more);
      even_replay_shift(&b->replay, r, b->ranks, more);
      even_guard_shift(&b->guard, r, more);
      moved = true;
    }
  }
  if (moved) {
    even_guard_begin_anew(b);
  }
}

const even_step_timing *even_exchange_take(even_balancer *b, const even_step_timing *timings, const double *seconds) {
  even_exchange *e = &b->exchange;
  if (remember(e, timings, seconds)) {
    look(b);
  }
  memcpy(e->timings, timings, e->ranks * sizeof *timings);
  for (size_t r = 0; r < e->ranks; r++) {
    if (timings[r].samples > 0 || timings[r].busy_seconds > 0.0) { /* else it took no part */
      e->timings[r].busy_seconds += e->counted[r];
    }
  }
  return e->timings;
}
