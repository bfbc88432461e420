/* What sizes took: when it is believed instead of a straight line, and what it says after stalls, changes of speed and
 * sizes that are gone. */
#include "balancer/shape.h"
#include "balancer/pseudo_random.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

enum { CASES = 200 };

static double noisy(uint64_t *state, double noise) {
  return 1.0 + noise * sqrt(3.0) * (2.0 * even_pseudo_random_unit(state) - 1.0);
}

static void stay(even_shape *shape, double samples, double seconds, int steps) {
  for (int i = 0; i < steps; i++) {
    (void)even_shape_take(shape, samples, seconds);
  }
}

static double tiles_of_8(double samples) {
  return 0.002 + 0.001 * 8.0 * ceil(samples / 8.0);
}

/* Sizes up and down around two edges, as a balancer that believes in a line runs them. */
static even_shape tiled(void) {
  static const double sizes[] = {32, 29, 33, 36, 32, 33, 31, 28, 34};
  even_shape shape = {0};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    stay(&shape, sizes[i], tiles_of_8(sizes[i]), 5);
  }
  even_shape_judge(&shape, 0.002, 0.001);
  return shape;
}

static const even_size *size_of(const even_shape *shape, double samples) {
  for (int i = 0; i < shape->count; i++) {
    if (fabs(shape->size[i].samples - samples) < 0.5) {
      return &shape->size[i];
    }
  }
  return NULL;
}

/* Any line, noise up to 4 %, any sizes for any number of steps, speeds that change while a size runs, stalls. */
static void a_straight_line_stays_one(void **context) {
  (void)context;
  int mistaken = 0;
  for (uint64_t seed = 1; seed <= CASES; seed++) {
    uint64_t state = seed * 7919;
    bool bent = false;
    even_shape shape = {0};
    double noise = 0.01 + 0.03 * even_pseudo_random_unit(&state);
    double fixed = 0.02 * even_pseudo_random_unit(&state);
    double speed = 1.0;
    for (int turn = 0; turn < 40; turn++) {
      double samples = 1.0 + floor(64.0 * even_pseudo_random_unit(&state));
      int steps = 1 + (int)(60.0 * even_pseudo_random_unit(&state));
      for (int i = 0; i < steps; i++) {
        if (i == 30 && steps > 40 && turn % 8 == 7) {
          speed *= speed < 2.0 ? 4.0 : 0.25;
        }
        double stall = even_pseudo_random_unit(&state) < 0.005 ? 5.0 : 1.0;
        (void)even_shape_take(&shape, samples, (fixed + 0.001 * samples) * speed * stall * noisy(&state, noise));
      }
      even_shape_judge(&shape, fixed * speed, 0.001 * speed);
      bent = bent || shape.bent;
    }
    mistaken += bent;
  }
  assert_true(mistaken <= CASES / 100); /* in 40 looks each */
}

static void tiles_are_seen(void **context) {
  (void)context;
  even_shape shape = tiled();
  assert_true(shape.bent);
  for (double samples = 28.0; samples <= 36.0; samples += 1.0) {
    double off = size_of(&shape, samples) != NULL ? 1e-9 : 0.009;
    assert_true(fabs(even_shape_at(&shape, samples) - tiles_of_8(samples)) <= off);
  }
  /* beyond them straight, by what a sample takes on the whole */
  assert_true(even_shape_at(&shape, 72.0) > 0.06 && even_shape_at(&shape, 72.0) < 0.09);
  assert_true(even_shape_at(&shape, 8.0) > 0.0 && even_shape_at(&shape, 8.0) < 0.034);
}

static double tiles_of(double tile, double samples) {
  return 0.002 + 0.001 * tile * ceil(samples / tile);
}

/* Five sizes of a large share tell of edges that none came near, though a line is less than 3% off. */
static void the_edges_of_tiles_are_known_from_afar(void **context) {
  (void)context;
  static const double tiles[] = {8.0, 16.0, 24.0, 40.0};
  for (int i = 0; i < 4; i++) {
    even_shape shape = {0};
    double tile = tiles[i];
    double first = tile * ceil(96.0 / tile);
    for (int turn = 0; turn < 2; turn++) {
      const double sizes[] = {first + 1.0, first + 0.75 * tile, first + tile + 1.0, first + 1.75 * tile,
                              first + 2.0 * tile + 1.0};
      for (int size = 0; size < 5; size++) {
        stay(&shape, sizes[size], tiles_of(tile, sizes[size]), 16);
      }
    }
    even_shape_judge(&shape, 0.002, 0.001);
    assert_true(shape.bent && fabs(shape.tile - tile) < 0.5);
    for (double samples = first - tile; samples < first + 5.0 * tile; samples += 1.0) {
      assert_true(fabs(even_shape_at(&shape, samples) / tiles_of(tile, samples) - 1.0) < 1e-3);
    }
  }
}

/* Another kernel: what its sizes take is no staircase any more. */
static void tiles_that_are_gone_are_forgotten(void **context) {
  (void)context;
  even_shape shape = tiled();
  assert_true(fabs(shape.tile - 8.0) < 0.5);
  for (int turn = 0; turn < 4; turn++) {
    for (double samples = 28.0; samples <= 36.0; samples += 1.0) {
      stay(&shape, samples, 0.002 + 0.001 * samples, 16);
    }
  }
  even_shape_judge(&shape, 0.002, 0.001);
  assert_false(shape.bent);
}

/* Eight sizes of a flat beginning, of a bend, of a cliff: by chance alone they are a staircase's. */
static void curves_have_no_tiles(void **context) {
  (void)context;
  for (int kind = 0; kind < 3; kind++) {
    int mistaken = 0;
    for (uint64_t seed = 1; seed <= CASES; seed++) {
      uint64_t state = seed * 7919;
      even_shape shape = {0};
      double at = 30.0 + 60.0 * even_pseudo_random_unit(&state);
      for (int turn = 0; turn < 8; turn++) {
        double samples = 20.0 + floor(80.0 * even_pseudo_random_unit(&state));
        double beyond = fmax(0.0, samples - at);
        double work = kind == 0 ? at + beyond : samples + (kind == 1 ? beyond : beyond > 0.0 ? 30.0 : 0.0);
        for (int i = 0; i < 16; i++) {
          (void)even_shape_take(&shape, samples, 0.001 * work * noisy(&state, 0.01));
        }
      }
      even_shape_judge(&shape, 0.0, 0.001);
      mistaken += shape.tile > 1.0;
    }
    assert_true(mistaken <= CASES / 15);
  }
}

/* Sizes that were seen at speeds which come and go differ by these. One change is taken along by all sizes. */
static void a_rank_whose_speed_comes_and_goes_has_a_line(void **context) {
  (void)context;
  even_shape shape = tiled();
  double seconds = tiles_of_8(34.0);
  stay(&shape, 34.0, seconds, 8);
  stay(&shape, 34.0, 3.0 * seconds, 8);
  even_shape_judge(&shape, 0.006, 0.003);
  assert_true(shape.bent);
  stay(&shape, 34.0, seconds, 8);
  even_shape_judge(&shape, 0.002, 0.001);
  assert_false(shape.bent);
  stay(&shape, 34.0, seconds, 128);
  even_shape_judge(&shape, 0.002, 0.001);
  assert_true(shape.bent);
}

/* However often its speed came and went before. */
static void a_rank_that_became_calm_has_sizes(void **context) {
  (void)context;
  even_shape shape = tiled();
  double seconds = tiles_of_8(34.0);
  stay(&shape, 34.0, seconds, 8);
  for (int change = 0; change < 40; change++) {
    stay(&shape, 34.0, change % 2 == 0 ? 3.0 * seconds : seconds, 8);
  }
  stay(&shape, 34.0, seconds, 112);
  even_shape_judge(&shape, 0.002, 0.001);
  assert_false(shape.bent);
  stay(&shape, 34.0, seconds, 16);
  even_shape_judge(&shape, 0.002, 0.001);
  assert_true(shape.bent);
}

static void what_is_believed_never_falls(void **context) {
  (void)context;
  for (uint64_t seed = 1; seed <= CASES; seed++) {
    uint64_t state = seed * 104729;
    even_shape shape = {0};
    for (int turn = 0; turn < 60; turn++) {
      double samples = 1.0 + floor(60.0 * even_pseudo_random_unit(&state));
      double work = samples < 30.0 ? 0.030 : samples;
      for (int i = 0; i < 4; i++) {
        (void)even_shape_take(&shape, samples, 0.001 * work * noisy(&state, 0.05));
      }
    }
    even_shape_judge(&shape, 0.0, 0.001);
    assert_true(shape.bent);
    for (double samples = 1.0; samples < 200.0; samples += 1.0) {
      assert_true(even_shape_at(&shape, samples) <= even_shape_at(&shape, samples + 1.0));
    }
  }
}

/* Each size that never ran as fast as the next smaller one that did. */
static void hopes_are_a_staircase(void **context) {
  (void)context;
  even_shape shape = {0};
  double samples[EVEN_SHAPE_HOPES];
  double seconds[EVEN_SHAPE_HOPES];
  const double at[] = {10, 19, 20, 29, 30};
  const double took[] = {0.1, 0.1, 0.2, 0.2, 0.3};
  stay(&shape, 10, 0.1, 4);
  stay(&shape, 20, 0.2, 4);
  stay(&shape, 30, 0.3, 4);
  stay(&shape, 21, 0.25, 1); /* one step alone is no measurement */
  int points = even_shape_hopes(&shape, samples, seconds);
  assert_int_equal(points, 5);
  for (int i = 0; i < points; i++) {
    assert_true(fabs(samples[i] - at[i]) < 1e-9);
    assert_true(fabs(seconds[i] - took[i]) < 1e-9);
  }
}

static void a_stall_moves_nothing(void **context) {
  (void)context;
  even_shape shape = tiled();
  const even_shape before = shape;
  assert_true(even_shape_take(&shape, 34.0, 0.4) <= 1.0);
  stay(&shape, 34.0, tiles_of_8(34.0), 3);
  for (int i = 0; i < shape.count; i++) {
    assert_true(fabs(shape.size[i].seconds - before.size[i].seconds) < 1e-9);
    assert_false(shape.size[i].doubtful);
  }
}

/* Two steps while a size runs are enough, and say it of all sizes. */
static void a_change_of_speed_keeps_the_shape(void **context) {
  (void)context;
  even_shape shape = tiled();
  stay(&shape, 34.0, tiles_of_8(34.0), 4);
  assert_true(even_shape_take(&shape, 34.0, 3.0 * tiles_of_8(34.0)) <= 1.0);
  assert_true(fabs(even_shape_take(&shape, 34.0, 3.0 * tiles_of_8(34.0)) - 3.0) < 1e-9);
  even_shape_judge(&shape, 0.006, 0.003);
  assert_true(shape.bent);
  assert_true(fabs(even_shape_at(&shape, 32.0) - 3.0 * tiles_of_8(32.0)) < 1e-9);
  assert_true(fabs(even_shape_at(&shape, 33.0) - 3.0 * tiles_of_8(33.0)) < 1e-9);
}

/* As a size arrives, a time that a larger size did not need shows that the rank is another; until it is as before. */
static void sizes_of_another_speed_are_not_used(void **context) {
  (void)context;
  even_shape shape = tiled();
  stay(&shape, 24.0, 4.0 * tiles_of_8(24.0), 3);
  even_shape_doubt(&shape, 2);
  even_shape_judge(&shape, 0.008, 0.004);
  assert_false(shape.bent);
  assert_true(size_of(&shape, 33.0)->doubtful);
  stay(&shape, 33.0, tiles_of_8(33.0), 3);
  assert_false(size_of(&shape, 32.0)->doubtful);
  assert_true(size_of(&shape, 24.0)->doubtful); /* which cannot be true beside it */
}

static void what_a_new_size_takes_is_no_change_of_speed(void **context) {
  (void)context;
  even_shape shape = tiled();
  stay(&shape, 41.0, tiles_of_8(41.0), 3);
  even_shape_doubt(&shape, 3);
  for (int i = 0; i < shape.count; i++) {
    assert_false(shape.size[i].doubtful);
  }
}

static void the_newest_sizes_are_kept(void **context) {
  (void)context;
  even_shape shape = {0};
  for (int i = 1; i <= 1000; i++) {
    stay(&shape, (double)(i * 37 % 1009), 0.1, 2);
  }
  assert_int_equal(shape.count, EVEN_SHAPE_SIZES);
  for (int i = 1000 - EVEN_SHAPE_SIZES + 1; i <= 1000; i++) {
    assert_non_null(size_of(&shape, (double)(i * 37 % 1009)));
  }
  for (int i = 1; i < shape.count; i++) {
    assert_true(shape.size[i - 1].samples < shape.size[i].samples);
  }
}

/* Legal but absurd: what is believed stays a number. */
static void absurd_numbers_do_no_harm(void **context) {
  (void)context;
  const double times[] = {1e9, 1e-9, 1e-9, 3.0, 1e9, 1e9, 0.5};
  const double sizes[] = {1.0, 0x1p53, 7.0, 0x1p38, 2.0};
  even_shape shape = {0};
  for (int i = 0; i < 5000; i++) {
    assert_true(isfinite(even_shape_take(&shape, sizes[(i / 3) % 5], times[(i / 2) % 7])));
    if (i % 50 == 0) {
      even_shape_move(&shape, 1e-6, -1.0);
    }
    even_shape_doubt(&shape, i % 9);
    even_shape_judge(&shape, times[i % 7], times[i % 5]);
    assert_true(!shape.bent || isfinite(even_shape_at(&shape, 0x1p40)));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_straight_line_stays_one),
      cmocka_unit_test(tiles_are_seen),
      cmocka_unit_test(the_edges_of_tiles_are_known_from_afar),
      cmocka_unit_test(tiles_that_are_gone_are_forgotten),
      cmocka_unit_test(curves_have_no_tiles),
      cmocka_unit_test(a_rank_whose_speed_comes_and_goes_has_a_line),
      cmocka_unit_test(a_rank_that_became_calm_has_sizes),
      cmocka_unit_test(what_is_believed_never_falls),
      cmocka_unit_test(hopes_are_a_staircase),
      cmocka_unit_test(a_stall_moves_nothing),
      cmocka_unit_test(a_change_of_speed_keeps_the_shape),
      cmocka_unit_test(sizes_of_another_speed_are_not_used),
      cmocka_unit_test(what_a_new_size_takes_is_no_change_of_speed),
      cmocka_unit_test(the_newest_sizes_are_kept),
      cmocka_unit_test(absurd_numbers_do_no_harm),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
