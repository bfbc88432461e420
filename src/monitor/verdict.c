/* The verdict: the first cause on the way down that takes enough of the step to matter. */
#include "monitor/verdict.h"

#include "balancer/scatter.h"
#include "monitor/straggler.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Below these fractions of the step a cause is not worth a change. */
static const double IMBALANCE_MATTERS = 0.10;
static const double DATA_MATTERS = 0.20;
static const double COMMUNICATION_MATTERS = 0.15;
static const double CHECKPOINT_MATTERS = 0.10;
static const double SPEEDS_DIFFER = 1.15;

typedef struct facts {
  int slowest; /* the rank that sets the pace: longest busy */
  int waiting; /* the one that waits most for it, what it may wait on purpose taken off */
  int strongest;
  int weakest; /* by samples per busy second */
} facts;

const char *even_verdict_name(even_verdict_kind kind) {
  static const char *const names[] = {"starting",      "warming-up", "stalled",  "imbalance", "data",
                                      "communication", "checkpoint", "balanced", "ended"};
  return names[kind];
}

static void say(char *out, size_t bytes, const char *format, ...) EVEN_PRINTF(3, 4);
static void say(char *out, size_t bytes, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(out, bytes, format, arguments);
  va_end(arguments);
}

/* "rank 1 (cpu:1)" */
static const char *name(const even_measure *measure, int rank, char out[64]) {
  const char *device = measure->rank[rank].device;
  if (device != NULL && device[0] != '\0') {
    (void)snprintf(out, 64, "rank %d (%s)", rank, device);
  } else {
    (void)snprintf(out, 64, "rank %d", rank);
  }
  return out;
}

static bool adapts(const even_measure *measure) {
  static const char *const followers[] = {"auto", "hybrid", "dynamic"};
  for (size_t i = 0; measure->policy != NULL && i < sizeof followers / sizeof followers[0]; i++) {
    if (strcmp(measure->policy, followers[i]) == 0) {
      return true;
    }
  }
  return false;
}

/* Seconds a step that a rank is free while the slowest works, beyond what the balancer may leave a slow rank on purpose
 * (docs/balancing.md, headroom). */
static double idle(const even_measure *measure, int slowest, int rank) {
  const even_measure_rank *pace = &measure->rank[slowest];
  const even_measure_rank *at = &measure->rank[rank];
  double gap = pace->busy_seconds - at->busy_seconds;
  double times = pace->samples_per_busy_second / at->samples_per_busy_second;
  return adapts(measure) && isfinite(times) && times > 1
             ? gap - even_scatter_most_headroom((size_t)measure->ranks, measure->step_seconds, times)
             : gap;
}

static bool find(const even_measure *measure, facts *out) {
  *out = (facts){-1, -1, -1, -1};
  for (int r = 0; r < measure->ranks; r++) {
    const even_measure_rank *rank = &measure->rank[r];
    if (!isfinite(rank->busy_seconds)) {
      continue;
    }
    if (out->slowest < 0 || rank->busy_seconds > measure->rank[out->slowest].busy_seconds) {
      out->slowest = r;
    }
    double speed = rank->samples_per_busy_second;
    if (isfinite(speed) && speed > 0) {
      if (out->strongest < 0 || speed > measure->rank[out->strongest].samples_per_busy_second) {
        out->strongest = r;
      }
      if (out->weakest < 0 || speed < measure->rank[out->weakest].samples_per_busy_second) {
        out->weakest = r;
      }
    }
  }
  for (int r = 0; out->slowest >= 0 && r < measure->ranks; r++) {
    if (isfinite(measure->rank[r].busy_seconds) &&
        (out->waiting < 0 || idle(measure, out->slowest, r) > idle(measure, out->slowest, out->waiting))) {
      out->waiting = r;
    }
  }
  return out->slowest >= 0 && measure->step_seconds > 0;
}

static double slower_by(const even_measure *measure, const facts *found) {
  if (found->weakest < 0) {
    return 1;
  }
  return measure->rank[found->strongest].samples_per_busy_second /
         measure->rank[found->weakest].samples_per_busy_second;
}

/* A sample moved from the slowest rank to the waiting one would take that one as long as it waits now. */
static bool coarse(const even_measure *measure, const facts *found, double gap) {
  const even_measure_rank *from = &measure->rank[found->slowest];
  const even_measure_rank *to = &measure->rank[found->waiting];
  double sample =
      fmax(from->busy_seconds / fmax(1, from->share_samples), to->busy_seconds / fmax(1, to->share_samples));
  return gap <= 1.5 * sample;
}

static bool imbalance(const even_measure *measure, const facts *found, even_verdict *out) {
  char slow[64];
  char wait[64];
  even_straggler why;
  const even_measure_rank *slowest = &measure->rank[found->slowest];
  double gap = slowest->busy_seconds - measure->rank[found->waiting].busy_seconds;
  if (idle(measure, found->slowest, found->waiting) < IMBALANCE_MATTERS * measure->step_seconds) {
    return false;
  }
  bool equal = measure->policy != NULL && strcmp(measure->policy, "equal") == 0;
  even_straggler_find(measure, found->slowest, found->waiting, &why);
  bool others = why.cause != EVEN_STRAGGLER_UNKNOWN && why.cause != EVEN_STRAGGLER_QUOTA;
  bool whole = !equal && !measure->shares_moving && !others && coarse(measure, found, gap);
  out->kind = EVEN_VERDICT_IMBALANCE;
  say(out->limit, sizeof out->limit, "%s: %s waits %.0f%% of each step for %s%s",
      equal                    ? "equal shares"
      : measure->shares_moving ? "the shares still move"
      : whole                  ? "one sample more would take too long"
                               : "the shares do not fit the speeds",
      name(measure, found->waiting, wait), 100 * measure->rank[found->waiting].wait_fraction,
      name(measure, found->slowest, slow), why.words);
  out->cause = why.cause;
  out->rank = found->slowest;
  double gain = measure->best_samples_per_second / measure->samples_per_second;
  bool known = isfinite(gain) && gain > 1; /* not where a rank has ended, or has not worked long enough */
  if (equal && known) {
    say(out->advice, sizeof out->advice, "use --policy auto: up to %.1f times as fast", gain);
  } else if (equal) {
    say(out->advice, sizeof out->advice, "use --policy auto");
  } else if (measure->shares_moving) {
    say(out->advice, sizeof out->advice, "wait some steps: the balancer is on its way");
  } else if (others) {
    say(out->advice, sizeof out->advice, "%s", why.advice);
  } else if (whole && known) {
    say(out->advice, sizeof out->advice,
        "the batch of %.0f cannot be split more finely: a larger one gains up to %.1f times", measure->batch, gain);
  } else if (whole) {
    say(out->advice, sizeof out->advice, "the batch of %.0f cannot be split more finely", measure->batch);
  } else {
    say(out->advice, sizeof out->advice, "%s",
        adapts(measure) ? "the speeds change faster than the shares follow: look for what disturbs the slower rank"
                        : "use --policy auto, or measure the devices anew with `evenstep profile`");
  }
  return true;
}

static bool data(const even_measure *measure, const facts *found, even_verdict *out) {
  char slow[64];
  double fraction = measure->rank[found->slowest].spans[EVEN_SPAN_DATA] / measure->step_seconds;
  if (!(fraction >= DATA_MATTERS)) {
    return false;
  }
  out->kind = EVEN_VERDICT_DATA;
  out->cause = EVEN_STRAGGLER_DATA;
  out->rank = found->slowest;
  say(out->limit, sizeof out->limit, "data loading takes %.0f%% of %s's step", 100 * fraction,
      name(measure, found->slowest, slow));
  say(out->advice, sizeof out->advice, "raise num_workers of the DataLoader, or make each sample cheaper to load");
  return true;
}

static bool communication(const even_measure *measure, const facts *found, even_verdict *out) {
  char slow[64];
  even_straggler why;
  const even_measure_rank *slowest = &measure->rank[found->slowest];
  double open = 1 - slowest->busy_seconds / measure->step_seconds;
  if (measure->ranks < 2 || open < COMMUNICATION_MATTERS) {
    return false;
  }
  out->kind = EVEN_VERDICT_COMMUNICATION;
  if (isfinite(slowest->communication_bytes) && slowest->communication_bytes > 0) {
    say(out->limit, sizeof out->limit,
        "communication: every rank stands still %.0f%% of each step while %.1f MB of gradients are exchanged",
        100 * open, slowest->communication_bytes / 1e6);
  } else {
    say(out->limit, sizeof out->limit, "communication: every rank stands still %.0f%% of each step", 100 * open);
  }
  if (measure->link != NULL) {
    out->cause = EVEN_STRAGGLER_LINK;
    out->rank = measure->link_rank;
    say(out->advice, sizeof out->advice, "%s; look at its cable, its switch and who else uses it", measure->link);
    return true;
  }
  for (int r = 0; r < measure->ranks; r++) {
    even_straggler_find(measure, r, r, &why);
    if (why.words[0] != '\0') { /* the exchange needs CPU time too */
      out->cause = why.cause;
      out->rank = r;
      say(out->advice, sizeof out->advice, "%s takes part slowly%s; a larger batch makes exchanges rarer",
          name(measure, r, slow), why.words);
      return true;
    }
  }
  say(out->advice, sizeof out->advice, "a larger batch or gradient accumulation makes exchanges rarer");
  return true;
}

static bool checkpoint(const even_measure *measure, const facts *found, even_verdict *out) {
  double fraction = measure->rank[found->slowest].spans[EVEN_SPAN_CHECKPOINT] / measure->step_seconds;
  if (!(fraction >= CHECKPOINT_MATTERS)) {
    return false;
  }
  out->kind = EVEN_VERDICT_CHECKPOINT;
  say(out->limit, sizeof out->limit, "checkpoints take %.0f%% of the time", 100 * fraction);
  say(out->advice, sizeof out->advice, "write them more rarely: --checkpoint-every");
  return true;
}

static void balanced(const even_measure *measure, const facts *found, even_verdict *out) {
  char weak[64];
  even_straggler why;
  double ratio = slower_by(measure, found);
  double most = 0;
  for (int r = 0; r < measure->ranks; r++) {
    most = fmax(most, isfinite(measure->rank[r].wait_fraction) ? measure->rank[r].wait_fraction : 0);
  }
  out->kind = EVEN_VERDICT_BALANCED;
  int slow = measure->ranks > 1 && found->weakest >= 0 ? found->weakest : 0;
  int fast = measure->ranks > 1 && found->weakest >= 0 ? found->strongest : 0;
  even_straggler_find(measure, slow, fast, &why);
  if (measure->ranks == 1 || ratio >= SPEEDS_DIFFER) {
    out->cause = why.cause;
    out->rank = slow;
  }
  if (measure->ranks == 1) {
    say(out->limit, sizeof out->limit, "one rank does all the work, busy %.0f%% of the time%s", 100 * (1 - most),
        why.words);
    say(out->advice, sizeof out->advice, "more devices would share it: `evenstep run -n N`");
  } else if (ratio >= SPEEDS_DIFFER) {
    say(out->limit, sizeof out->limit,
        "%s is %.1f times slower%s, and its share of %.3g in %.0f fits: no rank waits more than %.0f%%, the run makes "
        "%.0f%% of what the devices can do together",
        name(measure, found->weakest, weak), ratio, why.words, measure->rank[found->weakest].share_samples,
        measure->batch, 100 * most, 100 * fmin(1, measure->efficiency));
  } else {
    say(out->limit, sizeof out->limit,
        "the %d ranks are equally fast and share the work evenly: no rank waits more than %.0f%%, the run makes %.0f%% "
        "of what the devices can do together",
        measure->ranks, 100 * most, 100 * fmin(1, measure->efficiency));
  }
}

void even_verdict_find(const even_measure *measure, even_verdict *out) {
  facts found;
  memset(out, 0, sizeof *out);
  out->rank = -1;
  if (measure->phase == EVEN_PHASE_STARTING) {
    out->kind = EVEN_VERDICT_STARTING;
    say(out->limit, sizeof out->limit, "starting: no rank has made a step yet");
  } else if (measure->phase == EVEN_PHASE_WARMING) {
    out->kind = EVEN_VERDICT_WARMING;
    say(out->limit, sizeof out->limit, "warming up: the first %d steps say little", EVEN_WARM_STEPS);
  } else if (measure->phase == EVEN_PHASE_STALLED) {
    out->kind = EVEN_VERDICT_STALLED;
    say(out->limit, sizeof out->limit, "no step for %.0f s; a step took %.3g s before%s%s", measure->silent_seconds,
        measure->step_seconds, measure->hang != NULL ? ": " : "", measure->hang != NULL ? measure->hang : "");
    say(out->advice, sizeof out->advice, "%s",
        measure->hang != NULL ? "its stacks are in logs/hang-rank-N.txt; --on-hang restart goes on by itself"
                              : "see logs/rank-N.log in the run's folder for what the ranks do");
  } else if (!find(measure, &found)) {
    out->kind = EVEN_VERDICT_ENDED;
    say(out->limit, sizeof out->limit, "the run ended before enough steps were measured");
  } else if (!imbalance(measure, &found, out) && !data(measure, &found, out) && !communication(measure, &found, out) &&
             !checkpoint(measure, &found, out)) {
    balanced(measure, &found, out);
  }
}
