/* Policies: auto, which measures what runs; a function of the caller's; caps that change; changes that cost. */
#include "base/fail.h"

#include <evenstep/balancer.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "late.h"

enum { BATCH = 64 };

/* Ranks of speeds 1 and 0.7 that suit one split alone: the further from it, the slower are both. */
static even_cluster suited(int64_t first, double tilt) {
  even_cluster c = {.ranks = 2, .first_step = 3.0, .tilt = tilt, .state = 7, .centre = {first, BATCH - first}};
  c.rank[0] = (even_cluster_rank){.per_sample = 0.001, .lognormal = 0.03};
  c.rank[1] = (even_cluster_rank){.per_sample = 0.001 / 0.7, .lognormal = 0.03};
  return c;
}

static void auto_runs_what_was_measured_fastest(void **context) {
  (void)context;
  const double speeds[2] = {3.0, 1.0};
  const struct {
    int64_t centre;
    double tilt;
    even_policy choice;
    int64_t least, most; /* of rank 0 in the end */
  } cases[] = {{48, 2.0, EVEN_POLICY_PROPORTIONAL, 48, 48},
               {32, 4.0, EVEN_POLICY_EQUAL, 32, 32},
               {0, 0.0, EVEN_POLICY_HYBRID, 35, 39}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const even_balancer_params params = {
        .size = sizeof params, .policy = EVEN_POLICY_AUTO, .ranks = 2, .batch = BATCH, .speeds = speeds};
    const even_cluster c = suited(cases[i].centre, cases[i].tilt);
    late_job job;
    int64_t shares[2];
    double seconds = -1.0;
    double other = -1.0;
    late_open(&job, &params, &c, c.state);
    assert_int_equal(even_balancer_shares(job.balancer, BATCH, shares), EVEN_OK);
    assert_int_equal(shares[0], 48); /* by the profile, to begin with */
    assert_int_equal(even_balancer_choice(job.balancer, &seconds, &other), EVEN_POLICY_HYBRID);
    assert_float_equal(seconds, 0.0, 0.0);
    late_steps(&job, 1500);
    assert_int_equal(even_balancer_choice(job.balancer, &seconds, &other), cases[i].choice);
    assert_int_equal(even_balancer_on_equal(job.balancer, NULL, NULL), cases[i].choice == EVEN_POLICY_EQUAL);
    if (cases[i].choice != EVEN_POLICY_HYBRID) {
      assert_true(seconds > 0.0 && seconds < other);
    }
    assert_int_equal(even_balancer_shares(job.balancer, BATCH, shares), EVEN_OK);
    assert_true(shares[0] >= cases[i].least && shares[0] <= cases[i].most);
    if (cases[i].choice ==
        EVEN_POLICY_PROPORTIONAL) { /* a smaller last batch in the same proportion; then all changes */
      assert_int_equal(even_balancer_shares(job.balancer, 8, shares), EVEN_OK);
      assert_int_equal(shares[0], 6);
      job.ranks.tilt = job.twin.tilt = 0.0;
      late_steps(&job, 4000);
      assert_int_equal(even_balancer_choice(job.balancer, NULL, NULL), EVEN_POLICY_HYBRID);
    }
    late_close(&job);
  }
}

/* The profile's split is not tried where nobody asked for it. */
static void other_policies_report_themselves(void **context) {
  (void)context;
  const double speeds[2] = {3.0, 1.0};
  const even_policy policies[] = {EVEN_POLICY_EQUAL, EVEN_POLICY_PROPORTIONAL, EVEN_POLICY_DYNAMIC, EVEN_POLICY_HYBRID};
  for (size_t i = 0; i < sizeof policies / sizeof policies[0]; i++) {
    const even_balancer_params params = {
        .size = sizeof params, .policy = policies[i], .ranks = 2, .batch = BATCH, .speeds = speeds};
    const even_cluster c = suited(48, 2.0);
    late_job job;
    late_open(&job, &params, &c, c.state);
    late_steps(&job, 1500);
    even_policy choice = even_balancer_choice(job.balancer, NULL, NULL);
    bool follows = policies[i] == EVEN_POLICY_DYNAMIC || policies[i] == EVEN_POLICY_HYBRID;
    assert_true(follows ? choice == EVEN_POLICY_HYBRID || choice == EVEN_POLICY_EQUAL : choice == policies[i]);
    late_close(&job);
  }
}

/* ---- a function of the caller's ---- */

typedef struct own {
  int calls;
  int64_t first; /* what rank 0 gets */
  int64_t second;
  bool as_proposed;
  even_status status;
  even_policy_view seen;
  int64_t proposed[2];
  double predicted;
  int64_t last;
} own;

static even_status choose(void *context, const even_policy_view *view, int64_t *shares) {
  own *o = context;
  o->calls++;
  o->seen = *view;
  o->proposed[0] = view->proposed[0];
  o->proposed[1] = view->proposed[1];
  o->predicted = view->fixed_seconds[1] + 10.0 * view->seconds_per_sample[1];
  o->last = view->last != NULL ? view->last[1].samples : -1;
  shares[0] = o->as_proposed ? view->proposed[0] : o->first;
  shares[1] = o->as_proposed ? view->proposed[1] : o->second;
  return o->status;
}

static void callers_policy_is_asked_and_told(void **context) {
  (void)context;
  own o = {.first = 40, .second = 24};
  const int64_t caps[2] = {50, -1};
  const double speeds[2] = {3.0, 1.0};
  const even_balancer_params params = {.size = sizeof params,
                                       .policy = EVEN_POLICY_CALLBACK,
                                       .ranks = 2,
                                       .batch = BATCH,
                                       .caps = caps,
                                       .speeds = speeds,
                                       .choose = choose,
                                       .choose_context = &o};
  const even_cluster c = suited(0, 0.0);
  late_job job;
  int64_t shares[2];
  late_open(&job, &params, &c, c.state);
  assert_int_equal(even_balancer_choice(job.balancer, NULL, NULL), EVEN_POLICY_CALLBACK);
  assert_int_equal(even_balancer_shares(job.balancer, BATCH, shares), EVEN_OK);
  assert_int_equal(shares[0], 40);
  assert_int_equal(shares[1], 24);
  assert_int_equal(o.seen.size, sizeof o.seen);
  assert_int_equal(o.seen.ranks, 2);
  assert_int_equal(o.seen.batch, BATCH);
  assert_int_equal(o.seen.steps, 0);
  assert_int_equal(o.proposed[0], 48);
  assert_int_equal(o.last, -1);
  assert_true(isnan(o.predicted));
  late_steps(&job, 50);
  assert_int_equal(o.calls, 54);
  assert_int_equal(even_balancer_shares(job.balancer, BATCH, shares), EVEN_OK);
  assert_int_equal(o.seen.steps, 50);
  assert_int_equal(o.last, 24);
  assert_true(fabs(o.predicted - even_balancer_predict(job.balancer, 1, 10)) < 1e-12);
  assert_true(o.proposed[0] >= 35 && o.proposed[0] <= 39); /* what is measured says 37.6 */
  o.as_proposed = true;
  assert_int_equal(even_balancer_shares(job.balancer, 10, shares), EVEN_OK);
  assert_int_equal(o.seen.batch, 10);
  assert_int_equal(shares[0] + shares[1], 10);
  assert_true(shares[0] == 6 || shares[0] == 5);
  late_close(&job);
}

static void nonsense_of_the_callers_policy_is_refused(void **context) {
  (void)context;
  own o = {0};
  const int64_t caps[2] = {50, -1};
  const even_balancer_params params = {.size = sizeof params,
                                       .policy = EVEN_POLICY_CALLBACK,
                                       .ranks = 2,
                                       .batch = BATCH,
                                       .caps = caps,
                                       .choose = choose,
                                       .choose_context = &o};
  const struct {
    int64_t first, second;
    const char *part;
  } cases[] = {{32, 31, "1 samples fewer than the batch of 64"},
               {33, 32, "more than the batch of 64"},
               {-1000, 1064, "rank 0 -1000 samples"},
               {51, 13, "rank 0 51 samples, more than its cap of 50"},
               {INT64_MAX, INT64_MAX, "rank 0"},
               {1, INT64_MAX, "more than the batch"}};
  even_balancer *balancer = late_balancer(&params);
  int64_t shares[2];
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    o.first = cases[i].first;
    o.second = cases[i].second;
    even_error_clear();
    assert_int_equal(even_balancer_shares(balancer, BATCH, shares), EVEN_ERR_ARGUMENT);
    if (strstr(even_error_last()->what, cases[i].part) == NULL) {
      fail_msg("\"%s\" not in \"%s\"", cases[i].part, even_error_last()->what);
    }
    assert_non_null(strstr(even_error_last()->fix, "add up to the batch"));
  }
  o = (own){.first = 32, .second = 32, .status = EVEN_ERR_STATE};
  assert_int_equal(even_balancer_shares(balancer, BATCH, shares), EVEN_ERR_STATE);
  assert_int_equal(even_error_last()->status, EVEN_ERR_STATE); /* the function recorded none */
  assert_string_equal(even_error_last()->what, even_status_text(EVEN_ERR_STATE));
  (void)even_fail(EVEN_ERR_STATE, "of long ago");
  assert_int_equal(even_balancer_shares(balancer, BATCH, shares), EVEN_ERR_STATE);
  assert_string_equal(even_error_last()->what, even_status_text(EVEN_ERR_STATE));
  o.status = EVEN_OK;
  (void)even_fail(EVEN_ERR_STATE, "of long ago");
  assert_int_equal(even_balancer_shares(balancer, BATCH, shares), EVEN_OK); /* nothing is broken by it */
  assert_string_equal(even_error_last()->what, "of long ago");              /* until the next failing call */
  even_balancer_close(balancer);
  even_balancer_params wrong = params;
  wrong.choose = NULL;
  assert_int_equal(even_balancer_open(&wrong, &balancer), EVEN_ERR_ARGUMENT);
  wrong = params;
  wrong.policy = EVEN_POLICY_AUTO;
  assert_int_equal(even_balancer_open(&wrong, &balancer), EVEN_ERR_ARGUMENT);
}

/* ---- caps and buckets ---- */

static void caps_may_change_while_training(void **context) {
  (void)context;
  const even_policy policies[] = {EVEN_POLICY_EQUAL, EVEN_POLICY_PROPORTIONAL, EVEN_POLICY_HYBRID, EVEN_POLICY_AUTO};
  const double speeds[2] = {3.0, 1.0};
  for (size_t i = 0; i < sizeof policies / sizeof policies[0]; i++) {
    const even_balancer_params params = {
        .size = sizeof params, .policy = policies[i], .ranks = 2, .batch = BATCH, .speeds = speeds};
    const even_cluster c = suited(0, 0.0);
    late_job job;
    int64_t before[2];
    int64_t shares[2];
    late_open(&job, &params, &c, c.state);
    late_steps(&job, 100);
    assert_int_equal(even_balancer_shares(job.balancer, BATCH, before), EVEN_OK);
    const int64_t small[2] = {20, -1};
    assert_int_equal(even_balancer_set_caps(job.balancer, small), EVEN_OK);
    for (int step = 0; step < 300; step++) { /* trials too */
      assert_int_equal(even_balancer_shares(job.balancer, BATCH, shares), EVEN_OK);
      assert_int_equal(shares[0], 20);
      late_steps(&job, 1);
    }
    double seconds = 0.0;
    int64_t free_split[2];
    assert_int_equal(even_balancer_without_caps(job.balancer, free_split, &seconds), EVEN_OK);
    assert_true(free_split[0] - before[0] >= -3 &&
                free_split[0] - before[0] <= 3); /* what the caps keep from running */
    assert_true(free_split[0] + free_split[1] == BATCH && seconds > 0.0);
    const int64_t none[2] = {20, 30};
    even_error_clear();
    assert_int_equal(even_balancer_set_caps(job.balancer, none), EVEN_ERR_ARGUMENT);
    assert_non_null(strstr(even_error_last()->what, "14 fewer than the batch of 64"));
    assert_non_null(strstr(even_error_last()->fix, "accumulate over 2 batches of 32 samples"));
    assert_int_equal(even_balancer_shares(job.balancer, BATCH, shares), EVEN_OK);
    assert_int_equal(shares[0], 20);
    assert_int_equal(even_balancer_set_caps(job.balancer, NULL), EVEN_OK);
    late_steps(&job, 100);
    assert_int_equal(even_balancer_shares(job.balancer, BATCH, shares), EVEN_OK);
    assert_true(shares[0] - before[0] >= -2 && shares[0] - before[0] <= 2);
    late_close(&job);
  }
}

/* A rank that computes whole tiles of 16 samples gets whole tiles. */
static void bucketed_ranks_get_whole_buckets(void **context) {
  (void)context;
  const int64_t buckets[2] = {16, 0};
  const even_balancer_params params = {
      .size = sizeof params, .policy = EVEN_POLICY_HYBRID, .ranks = 2, .batch = BATCH, .buckets = buckets};
  even_balancer *balancer = late_balancer(&params);
  int64_t shares[2];
  for (int step = 0; step < 60; step++) {
    assert_int_equal(even_balancer_shares(balancer, BATCH, shares), EVEN_OK);
    double tiles = ceil((double)shares[0] / 16.0);
    const even_step_timing timings[2] = {{shares[0], 0.002 + 0.016 * tiles},
                                         {shares[1], 0.002 + 0.002 * (double)shares[1]}};
    assert_int_equal(even_balancer_observe(balancer, timings), EVEN_OK);
  }
  assert_int_equal(shares[0], 48); /* 50 and 34 ms; 49 to 64 samples would take it 66 */
  assert_true(fabs(even_balancer_predict(balancer, 0, 33) - even_balancer_predict(balancer, 0, 48)) < 1e-9);
  even_balancer_close(balancer);
  const int64_t wrong[2] = {-1, 0};
  even_balancer_params refused = params;
  refused.buckets = wrong;
  assert_int_equal(even_balancer_open(&refused, &balancer), EVEN_ERR_ARGUMENT);
}

/* ---- changes that cost ---- */

/* Each change costs a rank ten steps' time, as where a compiler runs for every new size: gains of some percent do not
 * pay for one until the shares have held for long; a rank four times slower does at once. */
static void changes_that_cost_more_than_they_gain_are_not_made(void **context) {
  (void)context;
  for (uint64_t seed = 1; seed <= 5; seed++) {
    const even_balancer_params params = late_params(EVEN_POLICY_HYBRID, 4, BATCH);
    even_cluster c = {.ranks = 4, .first_step = 3.0, .change = 0.3};
    for (size_t r = 0; r < 4; r++) {
      c.rank[r] = (even_cluster_rank){.per_sample = 0.001 * (1.0 + (double)r), .fixed = 0.002, .noise = 0.2};
    }
    late_job job;
    late_open(&job, &params, &c, seed * 7919);
    late_steps(&job, 40);
    int before = job.changes;
    late_steps(&job, 1000);
    assert_true(job.changes - before <= 8); /* 20 and more where a change is thought to be free; trials are some */
    job.ranks.rank[0].slower = job.twin.rank[0].slower = 4.0;
    before = job.changes;
    late_steps(&job, 12);
    assert_true(job.changes - before >= 1);
    late_close(&job);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(auto_runs_what_was_measured_fastest),
      cmocka_unit_test(other_policies_report_themselves),
      cmocka_unit_test(callers_policy_is_asked_and_told),
      cmocka_unit_test(nonsense_of_the_callers_policy_is_refused),
      cmocka_unit_test(caps_may_change_while_training),
      cmocka_unit_test(bucketed_ranks_get_whole_buckets),
      cmocka_unit_test(changes_that_cost_more_than_they_gain_are_not_made),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
