/* Caps from measured peaks: never more than memory holds where memory is a line, and all of it in the end. */
#include <evenstep/balancer.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "balancer/pseudo_random.h"

static void what_is_not_known_is_no_cap(void **context) {
  (void)context;
  even_memory_curve curve = {0};
  assert_int_equal(even_memory_curve_cap(&curve, 1e9), -1);
  even_memory_curve_take(&curve, 0, 1e6);
  even_memory_curve_take(&curve, -3, 1e6);
  even_memory_curve_take(&curve, 4, NAN);
  even_memory_curve_take(&curve, 4, INFINITY);
  even_memory_curve_take(&curve, 4, 0.0);
  assert_int_equal(even_memory_curve_cap(&curve, 1e9), -1);
}

static void caps_follow_the_measured_sizes(void **context) {
  (void)context;
  even_memory_curve curve = {0};
  even_memory_curve_take(&curve, 8, 400.0);
  assert_int_equal(even_memory_curve_cap(&curve, 1000.0), 20); /* 50 a sample at most */
  assert_int_equal(even_memory_curve_cap(&curve, 100.0), 2);
  assert_int_equal(even_memory_curve_cap(&curve, -1.0), 0);
  even_memory_curve_take(&curve, 16, 480.0); /* 10 a sample, in truth, and 320 for the model */
  assert_int_equal(even_memory_curve_cap(&curve, 1000.0), 68);
  assert_int_equal(even_memory_curve_cap(&curve, 440.0), 12);
  assert_int_equal(even_memory_curve_cap(&curve, 480.0), 16);
  even_memory_curve_take(&curve, 16, 460.0); /* the largest peak of a size counts */
  assert_int_equal(even_memory_curve_cap(&curve, 1000.0), 68);
  even_memory_curve_take(&curve, 12, 700.0); /* and larger sizes need no less */
  assert_int_equal(even_memory_curve_cap(&curve, 699.0), 11);
  assert_true(even_memory_curve_cap(&curve, 700.0) >= 16);
}

/* Shares that grow as far as the cap allows, each step measured: the cap is never beyond what memory holds, and gets
 * there. With more sizes than are kept. */
static void a_growing_share_uses_all_of_memory_and_no_more(void **context) {
  (void)context;
  uint64_t state = 21;
  for (int round = 0; round < 2000; round++) {
    double fixed = 1e6 * even_pseudo_random_unit(&state);
    double per_sample = 1e4 * (0.1 + even_pseudo_random_unit(&state));
    int64_t truth = even_pseudo_random_between(&state, 4, 5000);
    double limit = fixed + per_sample * ((double)truth + 0.5);
    even_memory_curve curve = {0};
    int64_t share = even_pseudo_random_between(&state, 2, 4);
    even_memory_curve_take(&curve, 1, fixed + per_sample); /* of one size alone the fixed part is not known */
    for (int step = 0; step < 40; step++) {
      even_memory_curve_take(&curve, share, fixed + per_sample * (double)share);
      int64_t cap = even_memory_curve_cap(&curve, limit);
      assert_true(cap >= share && cap <= truth);
      share = cap < 2 * share + 1 ? cap : 2 * share + 1;
    }
    assert_int_equal(share, truth);
    assert_true(curve.sizes <= EVEN_MEMORY_SIZES);
    for (int i = 1; i < curve.sizes; i++) {
      assert_true(curve.samples[i] > curve.samples[i - 1] && curve.bytes[i] >= curve.bytes[i - 1]);
    }
  }
}

static void bytes_are_what_caps_turn_round(void **context) {
  (void)context;
  even_memory_curve curve = {0};
  assert_true(isnan(even_memory_curve_bytes(&curve, 4)));
  even_memory_curve_take(&curve, 8, 400.0);
  assert_true(even_memory_curve_bytes(&curve, 20) <= 1000.0 && even_memory_curve_bytes(&curve, 20) >= 1000.0);
  even_memory_curve_take(&curve, 16, 480.0);
  const int64_t samples[] = {-3, 0, 2, 8, 12, 16, 68};
  const double bytes[] = {0.0, 0.0, 100.0, 400.0, 440.0, 480.0, 1000.0};
  for (size_t i = 0; i < sizeof samples / sizeof samples[0]; i++) {
    assert_true(fabs(even_memory_curve_bytes(&curve, samples[i]) - bytes[i]) < 1e-9);
  }
  uint64_t state = 23;
  for (int round = 0; round < 500; round++) {
    even_memory_curve grown = {0};
    for (int i = 0; i < 12; i++) {
      even_memory_curve_take(&grown, even_pseudo_random_between(&state, 1, 1000),
                             1e6 * (0.01 + even_pseudo_random_unit(&state)));
    }
    double before = 0.0;
    for (int64_t size = 0; size < 1200; size += 7) {
      double needs = even_memory_curve_bytes(&grown, size);
      assert_true(needs >= before);
      assert_true(even_memory_curve_cap(&grown, needs * (1 + 1e-12) + 1e-6) >= size);
      before = needs;
    }
  }
}

/* Two ranks with a GPU each, of which one is small; limits of a rank's own; ranks that say nothing. */
static void memories_of_their_own_cap_their_ranks(void **context) {
  (void)context;
  const even_memory_report reports[] = {{.pool = 7, .samples = 10, .cap = -1, .room = 90},
                                        {.pool = 8, .samples = 10, .cap = -1, .room = 6},
                                        {.pool = 9, .samples = 10, .cap = 12, .room = 9},
                                        {.pool = 10, .samples = 10, .cap = 3, .room = EVEN_ROOM_UNKNOWN},
                                        {.pool = 11, .samples = 10, .cap = -1, .room = EVEN_ROOM_UNKNOWN},
                                        {.pool = 12, .samples = 10, .cap = -1, .room = -4},
                                        {.pool = 13, .samples = 10, .cap = 20, .room = -40}};
  const int64_t wanted[] = {10, 10, 10, 10, 10, 10, 10};
  const int64_t caps[] = {100, 16, 12, 3, -1, 6, 0};
  int64_t found[7];
  even_memory_caps(reports, 7, 70, wanted, found);
  assert_memory_equal(found, caps, sizeof caps);
}

/* What a host's ranks hold together is theirs in any split: caps must not keep samples from moving among them. */
static void a_shared_memory_is_dealt_out_as_wanted(void **context) {
  (void)context;
  even_memory_report reports[] = {{.pool = 1, .samples = 16, .cap = -1, .room = 30},
                                  {.pool = 2, .samples = 32, .cap = -1, .room = 900},
                                  {.pool = 1, .samples = 16, .cap = -1, .room = 8}};
  const int64_t wanted[] = {40, 14, 10};
  int64_t caps[3];
  even_memory_caps(reports, 3, 64, wanted, caps); /* 62 in all: whoever saw less looked at a peak of the other's */
  assert_int_equal(caps[0], 49);
  assert_int_equal(caps[2], 13);
  assert_int_equal(caps[1], 932);
  reports[0].room = 32; /* the whole batch: no cap matters */
  even_memory_caps(reports, 3, 64, wanted, caps);
  assert_int_equal(caps[0], 64);
  assert_int_equal(caps[2], 64);
  const int64_t nothing[] = {0, 64, 0};
  reports[0].room = 1;
  even_memory_caps(reports, 3, 64, nothing, caps);
  assert_int_equal(caps[0] + caps[2], 40);
  assert_int_equal(caps[0], 20);
}

/* Nothing is lost or given twice, and no member's wish is missed by a sample. */
static void pools_are_dealt_out_exactly(void **context) {
  (void)context;
  enum { RANKS = 40, POOLS = 5 };
  uint64_t state = 23;
  for (int round = 0; round < 2000; round++) {
    even_memory_report reports[RANKS];
    int64_t wanted[RANKS];
    int64_t caps[RANKS];
    int64_t holds[POOLS] = {0};
    int64_t wants[POOLS] = {0};
    int64_t dealt[POOLS] = {0};
    int64_t batch = INT64_C(1) << 40;
    size_t ranks = (size_t)even_pseudo_random_between(&state, 1, RANKS);
    for (size_t r = 0; r < ranks; r++) {
      int64_t pool = even_pseudo_random_between(&state, 0, POOLS - 1);
      reports[r] = (even_memory_report){.pool = (uint64_t)pool,
                                        .samples = even_pseudo_random_between(&state, 0, 1 << 20),
                                        .cap = -1,
                                        .room = 5 * pool};
      wanted[r] = even_pseudo_random_between(&state, 0, 1 << 20);
      wants[pool] += wanted[r];
      holds[pool] += reports[r].samples;
    }
    even_memory_caps(reports, ranks, batch, wanted, caps);
    for (size_t r = 0; r < ranks; r++) {
      size_t pool = (size_t)reports[r].pool;
      double part = wants[pool] > 0 ? (double)wanted[r] / (double)wants[pool] : NAN;
      double exact = (double)(holds[pool] + reports[r].room) * part;
      assert_true(isnan(part) || fabs((double)caps[r] - exact) <= 1.0);
      dealt[pool] += caps[r];
    }
    for (size_t r = 0; r < ranks; r++) {
      size_t pool = (size_t)reports[r].pool;
      assert_int_equal(dealt[pool], holds[pool] + reports[r].room);
    }
  }
}

static void absurd_reports_do_no_harm(void **context) {
  (void)context;
  const even_memory_report reports[] = {{.pool = 1, .samples = INT64_MAX, .cap = INT64_MAX, .room = INT64_MAX - 1},
                                        {.pool = 1, .samples = INT64_MAX, .cap = -1, .room = INT64_MIN},
                                        {.pool = 2, .samples = INT64_MIN, .cap = INT64_MIN, .room = INT64_MIN}};
  const int64_t wanted[] = {INT64_MAX, INT64_MAX, INT64_MIN};
  int64_t caps[3];
  even_memory_caps(reports, 3, INT64_MAX, wanted, caps);
  assert_true(caps[0] >= 0 && caps[1] >= 0);
  assert_int_equal(caps[2], 0);
}

static void absurd_numbers_do_no_harm(void **context) {
  (void)context;
  uint64_t state = 22;
  const double bytes[] = {5e-324, 1e308, 1.0, 1e-300};
  even_memory_curve curve = {0};
  for (int i = 0; i < 500; i++) {
    even_memory_curve_take(&curve, even_pseudo_random_between(&state, 1, INT64_MAX - 1),
                           bytes[even_pseudo_random_between(&state, 0, 3)]);
    assert_true(even_memory_curve_cap(&curve, bytes[even_pseudo_random_between(&state, 0, 3)]) >= 0);
    assert_true(even_memory_curve_cap(&curve, INFINITY) >= 0);
    assert_true(even_memory_curve_bytes(&curve, even_pseudo_random_between(&state, 0, INT64_MAX - 1)) >= 0.0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(what_is_not_known_is_no_cap),
      cmocka_unit_test(caps_follow_the_measured_sizes),
      cmocka_unit_test(a_growing_share_uses_all_of_memory_and_no_more),
      cmocka_unit_test(bytes_are_what_caps_turn_round),
      cmocka_unit_test(absurd_numbers_do_no_harm),
      cmocka_unit_test(memories_of_their_own_cap_their_ranks),
      cmocka_unit_test(a_shared_memory_is_dealt_out_as_wanted),
      cmocka_unit_test(pools_are_dealt_out_exactly),
      cmocka_unit_test(absurd_reports_do_no_harm),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
