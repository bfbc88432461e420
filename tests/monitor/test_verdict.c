/* The verdict over situations as they were measured on real runs, or as issue and manual describe them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "monitor/verdict.h"

#include <math.h>
#include <string.h>

static even_measure_rank ranks[3];

/* Two ranks: shares, busy seconds; the rest as usual. */
static even_measure situation(const char *policy, double step, double share_0, double busy_0, double share_1,
                              double busy_1) {
  even_measure made = {.phase = EVEN_PHASE_TRAINING,
                       .policy = policy,
                       .step = 100,
                       .total = 200,
                       .window_steps = 60,
                       .batch = share_0 + share_1,
                       .step_seconds = step,
                       .samples_per_second = (share_0 + share_1) / step,
                       .ranks = 2,
                       .rank = ranks};
  memset(ranks, 0, sizeof ranks);
  for (int r = 0; r < 3; r++) {
    ranks[r].throttled_fraction = NAN;
    ranks[r].cpu_cores = NAN;
    ranks[r].communication_bytes = NAN;
    for (int span = 0; span < EVEN_SPAN_COUNT; span++) {
      ranks[r].spans[span] = NAN;
    }
  }
  ranks[0].device = "cpu:0";
  ranks[1].device = "cpu:1";
  ranks[0].share_samples = share_0;
  ranks[0].busy_seconds = busy_0;
  ranks[1].share_samples = share_1;
  ranks[1].busy_seconds = busy_1;
  even_measure_derive(&made);
  return made;
}

static void expect(const even_measure *measure, even_verdict_kind kind, const char *limit, const char *advice) {
  even_verdict verdict;
  even_verdict_find(measure, &verdict);
  assert_int_equal(verdict.kind, kind);
  if (strstr(verdict.limit, limit) == NULL || strstr(verdict.advice, advice) == NULL) {
    fail_msg("\"%s\" or \"%s\" not in \"%s\"; \"%s\"", limit, advice, verdict.limit, verdict.advice);
  }
}

static void equal_shares_on_unequal_ranks(void **state) {
  (void)state;
  even_measure measure = situation("equal", 0.41, 8, 0.1, 8, 0.4);
  ranks[1].throttled_fraction = 0.75;
  expect(&measure, EVEN_VERDICT_IMBALANCE,
         "equal shares: rank 0 (cpu:0) waits 76% of each step for rank 1 (cpu:1), stopped by its CPU quota 75% of the "
         "time",
         "use --policy auto: up to 2.6 times as fast");
  measure.best_samples_per_second = NAN;
  expect(&measure, EVEN_VERDICT_IMBALANCE, "equal shares", "use --policy auto");
  even_verdict verdict;
  even_verdict_find(&measure, &verdict);
  assert_null(strstr(verdict.advice, "nan"));
}

static void shares_that_fit(void **state) {
  (void)state;
  even_measure measure = situation("hybrid", 0.166, 13, 0.1625, 3, 0.15);
  expect(&measure, EVEN_VERDICT_BALANCED,
         "rank 1 (cpu:1) is 4.0 times slower, and its share of 3 in 16 fits: no rank waits more than 10%", "");
  measure = situation("hybrid", 0.102, 8, 0.1, 8, 0.1);
  expect(&measure, EVEN_VERDICT_BALANCED, "the 2 ranks are equally fast", "");
}

static void shares_that_move_or_cannot_fit(void **state) {
  (void)state;
  even_measure measure = situation("hybrid", 0.41, 8, 0.1, 8, 0.4);
  measure.shares_moving = true;
  expect(&measure, EVEN_VERDICT_IMBALANCE, "the shares still move", "wait some steps");
  measure = situation("hybrid", 0.41, 3, 0.3, 1, 0.4); /* 4 samples: the slow rank cannot have less than one */
  expect(&measure, EVEN_VERDICT_IMBALANCE, "one sample more would take too long: rank 0 (cpu:0) waits",
         "the batch of 4 cannot be split more finely");
  measure = situation("hybrid", 0.2, 10, 0.195, 1, 0.11); /* a second sample would take the slow rank 0.22 s */
  expect(&measure, EVEN_VERDICT_IMBALANCE, "one sample more would take too long: rank 1 (cpu:1) waits",
         "the batch of 11 cannot be split more finely");
  measure = situation("hybrid", 0.41, 24, 0.1, 8, 0.4);
  expect(&measure, EVEN_VERDICT_IMBALANCE, "the shares do not fit", "change faster than the shares follow");
  ranks[1].throttled_fraction = 0;
  ranks[1].cpu_cores = 0.3;
  expect(&measure, EVEN_VERDICT_IMBALANCE, "the shares do not fit",
         "other programs take its CPU (it had 30% of one while it was busy 98% of the time)");
  measure = situation("proportional", 0.41, 24, 0.1, 8, 0.4);
  expect(&measure, EVEN_VERDICT_IMBALANCE, "the shares do not fit", "evenstep profile");
}

/* Times scatter, so the slower rank is planned to end earlier. */
static void headroom_is_no_fault(void **state) {
  (void)state;
  even_measure measure = situation("hybrid", 1, 80, 0.98, 20, 0.78); /* 3.2 times slower */
  expect(&measure, EVEN_VERDICT_BALANCED, "its share of 20 in 100 fits: no rank waits more than 22%", "");
  measure = situation("hybrid", 1, 20, 0.78, 80, 0.98); /* the other way round in rank order */
  expect(&measure, EVEN_VERDICT_BALANCED, "its share of 20 in 100 fits", "");
  measure = situation("proportional", 1, 80, 0.98, 20, 0.78); /* gives no headroom */
  expect(&measure, EVEN_VERDICT_IMBALANCE, "the shares do not fit", "use --policy auto");
  measure = situation("hybrid", 1, 80, 0.78, 20, 0.98); /* it is the fast rank that waits */
  expect(&measure, EVEN_VERDICT_IMBALANCE, "the shares do not fit", "change faster");
  measure = situation("hybrid", 1, 80, 0.98, 20, 0.6); /* more than headroom */
  expect(&measure, EVEN_VERDICT_IMBALANCE, "the shares do not fit", "change faster");
}

/* One rank's excuse is no other's. */
static void a_third_rank_that_waits_is_seen(void **state) {
  (void)state;
  even_measure measure = situation("hybrid", 1, 80, 0.98, 20, 0.78);
  ranks[2].device = "cpu:2";
  ranks[2].share_samples = 64;
  ranks[2].busy_seconds = 0.79;
  measure.ranks = 3;
  measure.batch = 164;
  even_measure_derive(&measure);
  expect(&measure, EVEN_VERDICT_IMBALANCE, "rank 2 (cpu:2) waits 21% of each step for rank 0 (cpu:0)", "change faster");
}

static void the_loader(void **state) {
  (void)state;
  even_measure measure = situation("hybrid", 0.41, 8, 0.4, 8, 0.395);
  ranks[0].spans[EVEN_SPAN_DATA] = 0.164;
  expect(&measure, EVEN_VERDICT_DATA, "data loading takes 40% of rank 0 (cpu:0)'s step", "num_workers");
}

static void communication_in_the_open(void **state) {
  (void)state;
  even_measure measure = situation("hybrid", 0.5, 8, 0.4, 8, 0.395);
  ranks[0].communication_bytes = 12.5e6;
  expect(&measure, EVEN_VERDICT_COMMUNICATION,
         "every rank stands still 20% of each step while 12.5 MB of gradients are exchanged", "accumulation");
  ranks[1].throttled_fraction = 0.4;
  expect(&measure, EVEN_VERDICT_COMMUNICATION, "20% of each step",
         "rank 1 (cpu:1) takes part slowly, stopped by its CPU quota 40% of the time");
  measure.ranks = 1;
  expect(&measure, EVEN_VERDICT_BALANCED, "one rank does all the work, busy 80% of the time", "evenstep run -n");
}

static void checkpoints(void **state) {
  (void)state;
  even_measure measure = situation("hybrid", 0.41, 8, 0.4, 8, 0.395);
  ranks[0].spans[EVEN_SPAN_CHECKPOINT] = 0.1;
  expect(&measure, EVEN_VERDICT_CHECKPOINT, "checkpoints take 24% of the time", "--checkpoint-every");
}

static void runs_without_steps(void **state) {
  (void)state;
  even_measure measure = situation("hybrid", NAN, NAN, NAN, NAN, NAN);
  measure.phase = EVEN_PHASE_STARTING;
  expect(&measure, EVEN_VERDICT_STARTING, "no rank has made a step", "");
  measure.phase = EVEN_PHASE_WARMING;
  expect(&measure, EVEN_VERDICT_WARMING, "warming up", "");
  measure.phase = EVEN_PHASE_FAILED;
  expect(&measure, EVEN_VERDICT_ENDED, "ended before", "");
  measure = situation("hybrid", 0.1, 8, 0.1, 8, 0.1);
  measure.phase = EVEN_PHASE_STALLED;
  measure.silent_seconds = 44;
  expect(&measure, EVEN_VERDICT_STALLED, "no step for 44 s; a step took 0.1 s before", "logs/rank-N.log");
  measure.hang = "rank 1 hangs: no progress for 30 s in data";
  expect(&measure, EVEN_VERDICT_STALLED, "0.1 s before: rank 1 hangs: no progress for 30 s in data",
         "logs/hang-rank-N");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(equal_shares_on_unequal_ranks),
      cmocka_unit_test(shares_that_fit),
      cmocka_unit_test(shares_that_move_or_cannot_fit),
      cmocka_unit_test(headroom_is_no_fault),
      cmocka_unit_test(a_third_rank_that_waits_is_seen),
      cmocka_unit_test(the_loader),
      cmocka_unit_test(communication_in_the_open),
      cmocka_unit_test(checkpoints),
      cmocka_unit_test(runs_without_steps),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
