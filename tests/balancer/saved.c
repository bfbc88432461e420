/* What a balancer has learned, saved and taken up by another one: the same shares from there on, to the bit; and
 * damaged bytes, which are refused or harmless. Invented ranks, fixed seeds, no clock. */
#include "base/alloc.h"

#include <evenstep/balancer.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "balancer/cluster.h"
#include "balancer/state.h"

#include "late.h"

enum { BATCH = 64, MOST_BYTES = 1 << 17, ON = 200 };

static uint8_t saved[MOST_BYTES];
static uint8_t other[MOST_BYTES];

static size_t save(even_balancer *balancer, uint8_t *bytes) {
  size_t size = even_balancer_save(balancer, NULL, 0);
  assert_in_range(size, 1, MOST_BYTES);
  assert_int_equal(even_balancer_save(balancer, bytes, MOST_BYTES), size);
  return size;
}

/* One step with the balancer's shares; what each rank needs for the exchange by itself, and micro-batches, where there
 * are any. */
static void step(even_balancer *balancer, even_cluster *ranks, int64_t *shares) {
  even_step_timing timings[EVEN_CLUSTER_RANKS];
  bool spared[EVEN_CLUSTER_RANKS];
  assert_int_equal(even_balancer_shares(balancer, BATCH, shares), EVEN_OK);
  for (size_t r = 0; r < ranks->ranks; r++) {
    spared[r] = shares[r] == 0;
  }
  (void)even_cluster_step(ranks, shares, timings);
  assert_int_equal(even_balancer_observe_waits(balancer, timings, spared, ranks->exchange, ranks->pass), EVEN_OK);
}

/* Both go on with the same ranks: the same shares in each step, and the same bytes in the end. */
static void expect_alike(even_balancer *one, even_balancer *two, const even_cluster *ranks, int steps) {
  even_cluster of[2] = {*ranks, *ranks};
  for (int i = 0; i < steps; i++) {
    int64_t shares[2][EVEN_CLUSTER_RANKS];
    step(one, &of[0], shares[0]);
    step(two, &of[1], shares[1]);
    assert_memory_equal(shares[0], shares[1], ranks->ranks * sizeof shares[0][0]);
  }
  size_t size = save(one, saved);
  assert_int_equal(save(two, other), size);
  assert_memory_equal(saved, other, size);
}

static even_cluster unequal(size_t ranks) {
  even_cluster c = {.ranks = ranks, .first_step = 3.0, .state = 7919};
  for (size_t r = 0; r < ranks; r++) {
    double slow = 1.0 + 2.0 * (double)r;
    c.rank[r] = (even_cluster_rank){.fixed = 0.002 * slow, .per_sample = 0.001 * slow, .lognormal = 0.05};
  }
  return c;
}

static even_cluster meeting(void) {
  even_cluster c = unequal(3);
  c.meetings = 12;
  c.uneven = 3.0;
  c.parts = 0.1;
  for (size_t r = 0; r < c.ranks; r++) {
    c.rank[r].meets = 0.0016 * (1.0 + (double)r);
  }
  return c;
}

static even_cluster stopped(void) {
  even_cluster c = unequal(2);
  c.rank[1] = c.rank[0];
  c.rank[1].quota = 0.25;
  c.rank[1].period = 0.1;
  return c;
}

static even_cluster tiled(void) {
  even_cluster c = unequal(3);
  for (size_t r = 0; r < c.ranks; r++) {
    c.rank[r].tile = 8;
    c.rank[r].wander = 0.1;
    c.rank[r].own = r == 1 ? 0.02 : 0.0;
  }
  return c;
}

static even_cluster many(void) {
  even_cluster c = unequal(20); /* more than are replayed */
  c.idles = true;
  return c;
}

static even_cluster without_samples(void) {
  even_cluster c = unequal(3);
  c.dummy = 0.5;
  c.rank[2].per_sample *= 20.0;
  c.rank[2].wander = 0.5; /* its dummy batches tell that it became another */
  return c;
}

static even_cluster apart(void) {
  even_cluster c = unequal(2);
  c.tilt = 4.0; /* equal shares are faster than the models say */
  c.change = 0.05;
  c.rank[1].outliers = 0.02;
  return c;
}

static void goes_on_as_if_nothing_had_been(void **context) {
  (void)context;
  const even_cluster all[] = {meeting(), stopped(), tiled(), many(), apart(), without_samples()};
  const int64_t buckets[EVEN_CLUSTER_RANKS] = {4, 0, 4};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    even_cluster ranks = all[i];
    even_balancer_params params = late_params(EVEN_POLICY_AUTO, ranks.ranks, BATCH);
    params.buckets = i == 2 ? buckets : NULL;
    even_balancer *balancer = late_balancer(&params);
    for (int saves = 0; saves < 24; saves++) {
      int64_t shares[EVEN_CLUSTER_RANKS];
      for (int steps = 0; steps < 17 * saves; steps++) {
        step(balancer, &ranks, shares);
      }
      even_balancer *next = late_balancer(&params);
      size_t size = save(balancer, saved);
      assert_int_equal(even_balancer_restore(next, saved, size), EVEN_OK);
      even_balancer *twin = late_balancer(&params);
      assert_int_equal(even_balancer_restore(twin, saved, size), EVEN_OK);
      even_balancer_close(twin);
      even_cluster ahead = ranks;
      even_balancer *first = late_balancer(&params); /* so that `balancer` itself goes on from where it was */
      assert_int_equal(even_balancer_restore(first, saved, size), EVEN_OK);
      (void)save(first, other);
      assert_memory_equal(saved, other, size);
      expect_alike(balancer, next, &ahead, ON);
      even_balancer_close(balancer);
      even_balancer_close(next);
      balancer = first;
    }
    even_balancer_close(balancer);
  }
}

static even_balancer *trained(const even_balancer_params *params, even_cluster *ranks, int steps) {
  int64_t shares[EVEN_CLUSTER_RANKS];
  even_balancer *balancer = late_balancer(params);
  for (int i = 0; i < steps; i++) {
    step(balancer, ranks, shares);
  }
  return balancer;
}

static void what_is_another_balancers_is_refused(void **context) {
  (void)context;
  even_cluster ranks = meeting();
  const int64_t buckets[3] = {1, 2, 1};
  const even_balancer_params own = late_params(EVEN_POLICY_AUTO, 3, BATCH);
  even_balancer_params others[4] = {own, own, own, own};
  even_balancer *balancer = trained(&own, &ranks, 100);
  size_t size = save(balancer, saved);
  others[0].policy = EVEN_POLICY_DYNAMIC;
  others[1].ranks = 2;
  others[2].batch = BATCH + 1;
  others[3].buckets = buckets;
  for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
    even_balancer *next = late_balancer(&others[i]);
    size_t before = save(next, other);
    assert_int_equal(even_balancer_restore(next, saved, size), EVEN_ERR_ARGUMENT);
    uint8_t *after = malloc(before);
    assert_int_equal(even_balancer_save(next, after, before), before);
    assert_memory_equal(other, after, before);
    free(after);
    even_balancer_close(next);
  }
  saved[8]++; /* the version */
  assert_int_equal(even_balancer_restore(balancer, saved, size), EVEN_ERR_UNSUPPORTED);
  even_balancer_close(balancer);
}

/* Memory that holds less by now than it did. */
static void caps_of_now_count(void **context) {
  (void)context;
  even_cluster ranks = unequal(2);
  even_balancer_params params = late_params(EVEN_POLICY_AUTO, 2, BATCH);
  const int64_t caps[2] = {40, -1};
  int64_t shares[2];
  even_balancer *balancer = trained(&params, &ranks, 60);
  assert_int_equal(even_balancer_shares(balancer, BATCH, shares), EVEN_OK);
  assert_true(shares[0] > caps[0]);
  size_t size = save(balancer, saved);
  params.caps = caps;
  even_balancer *next = late_balancer(&params);
  assert_int_equal(even_balancer_restore(next, saved, size), EVEN_OK);
  assert_int_equal(even_balancer_set_caps(balancer, caps), EVEN_OK);
  expect_alike(balancer, next, &ranks, ON);
  assert_int_equal(even_balancer_shares(next, BATCH, shares), EVEN_OK);
  assert_int_equal(shares[0], caps[0]);
  even_balancer_close(balancer);
  even_balancer_close(next);
}

/* Of a rank whose steps were bursty and are steady by now: an entry began as one of two steps. */
static void an_entry_may_have_begun_as_a_longer_one(void **context) {
  (void)context;
  even_cluster ranks = unequal(2);
  const even_balancer_params params = late_params(EVEN_POLICY_AUTO, 2, BATCH);
  int64_t shares[2];
  even_balancer *balancer = trained(&params, &ranks, 100);
  even_rank_model *model = &balancer->models[0];
  model->block = 2;
  step(balancer, &ranks, shares);
  even_model_learn(model);
  assert_int_equal(model->block, 1);
  assert_int_equal(model->pending, 1);
  size_t size = save(balancer, saved);
  even_balancer *next = late_balancer(&params);
  assert_int_equal(even_balancer_restore(next, saved, size), EVEN_OK);
  expect_alike(balancer, next, &ranks, ON);
  even_balancer_close(balancer);
  even_balancer_close(next);
}

static even_status as_proposed(void *context, const even_policy_view *view, int64_t *shares) {
  (void)context;
  memcpy(shares, view->proposed, view->ranks * sizeof *shares);
  return EVEN_OK;
}

/* Of a policy of the caller's. */
static void shares_drawn_before_a_cap_fell_are_sound(void **context) {
  (void)context;
  even_cluster ranks = unequal(2);
  even_balancer_params params = late_params(EVEN_POLICY_CALLBACK, 2, BATCH);
  const int64_t caps[2] = {40, -1};
  even_step_timing timings[EVEN_CLUSTER_RANKS];
  int64_t drawn[2];
  params.choose = as_proposed;
  even_balancer *balancer = trained(&params, &ranks, 60);
  assert_int_equal(even_balancer_shares(balancer, BATCH, drawn), EVEN_OK);
  assert_true(drawn[0] > caps[0]);
  assert_int_equal(even_balancer_set_caps(balancer, caps), EVEN_OK);
  (void)even_cluster_step(&ranks, drawn, timings);
  assert_int_equal(even_balancer_observe(balancer, timings), EVEN_OK);
  size_t size = save(balancer, saved);
  params.caps = caps;
  even_balancer *next = late_balancer(&params);
  assert_int_equal(even_balancer_restore(next, saved, size), EVEN_OK);
  expect_alike(balancer, next, &ranks, ON);
  balancer->current[0]++; /* no split of the batch */
  size = save(balancer, saved);
  assert_int_equal(even_balancer_restore(next, saved, size), EVEN_ERR_CORRUPT);
  even_balancer_close(balancer);
  even_balancer_close(next);
}

static void cut_ones_are_refused(void **context) {
  (void)context;
  even_cluster ranks = meeting();
  const even_balancer_params params = late_params(EVEN_POLICY_AUTO, 3, BATCH);
  even_balancer *balancer = trained(&params, &ranks, 90);
  size_t size = save(balancer, saved);
  assert_int_equal(even_balancer_restore(balancer, NULL, size), EVEN_ERR_CORRUPT);
  for (size_t cut = 0; cut < size; cut += cut < 64 ? 1 : 61) {
    uint8_t *bytes = malloc(cut + 1); /* so that whoever reads further is seen */
    memcpy(bytes, saved, cut);
    assert_int_not_equal(even_balancer_restore(balancer, bytes, cut), EVEN_OK);
    free(bytes);
  }
  assert_int_equal(even_balancer_restore(balancer, saved, size + 1), EVEN_ERR_CORRUPT);
  assert_int_equal(save(balancer, other), size);
  assert_memory_equal(saved, other, size);
  even_balancer_close(balancer);
}

/* Each number in turn is another one: refused, or a balancer that gives splits of the batch. */
static void damaged_numbers_do_no_harm(void **context) {
  (void)context;
  const uint64_t wrong[] = {UINT64_MAX, UINT64_C(0x7ff8000000000000), UINT64_C(0x7fe0000000000000), 1,
                            UINT64_C(1) << 40};
  even_cluster ranks = meeting();
  const even_balancer_params params = late_params(EVEN_POLICY_AUTO, 3, BATCH);
  even_balancer *balancer = trained(&params, &ranks, 90);
  size_t size = save(balancer, saved);
  int refused = 0;
  for (size_t at = 0; at + sizeof wrong[0] <= size; at += sizeof wrong[0]) {
    uint64_t bytes = wrong[at / sizeof bytes % (sizeof wrong / sizeof wrong[0])];
    even_cluster of = ranks;
    memcpy(other, saved, size);
    memcpy(other + at, &bytes, sizeof bytes);
    even_balancer *next = late_balancer(&params);
    refused += even_balancer_restore(next, other, size) != EVEN_OK;
    for (int i = 0; i < 4; i++) {
      int64_t shares[EVEN_CLUSTER_RANKS];
      step(next, &of, shares);
      assert_true(shares[0] >= 0 && shares[1] >= 0 && shares[2] >= 0);
      assert_int_equal(shares[0] + shares[1] + shares[2], BATCH);
    }
    even_balancer_close(next);
  }
  assert_true(refused > 100);
  even_balancer_close(balancer);
}

static int allowed;

static void *allocate(size_t bytes) {
  return allowed-- <= 0 ? NULL : malloc(bytes);
}

static void every_allocation_may_fail(void **context) {
  (void)context;
  even_cluster ranks = meeting();
  const even_balancer_params params = late_params(EVEN_POLICY_AUTO, 3, BATCH);
  even_balancer *balancer = trained(&params, &ranks, 90);
  size_t size = save(balancer, saved);
  int failures = 0;
  const even_allocator usual = even_allocator_current;
  even_allocator_current = (even_allocator){allocate, realloc, free};
  for (allowed = 0; even_balancer_restore(balancer, saved, size) == EVEN_ERR_MEMORY; allowed = ++failures) {
  }
  even_allocator_current = usual;
  assert_true(failures >= 10);
  assert_int_equal(save(balancer, other), size);
  assert_memory_equal(saved, other, size);
  even_balancer_close(balancer);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(goes_on_as_if_nothing_had_been),
      cmocka_unit_test(what_is_another_balancers_is_refused),
      cmocka_unit_test(caps_of_now_count),
      cmocka_unit_test(an_entry_may_have_begun_as_a_longer_one),
      cmocka_unit_test(shares_drawn_before_a_cap_fell_are_sound),
      cmocka_unit_test(cut_ones_are_refused),
      cmocka_unit_test(damaged_numbers_do_no_harm),
      cmocka_unit_test(every_allocation_may_fail),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
