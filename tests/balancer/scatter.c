/* Scatter between ranks, and the headroom that it gives to slow ones. */
#include "balancer/scatter.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "balancer/state.h"

enum { RANKS = 3, STEPS = 400 };

/* Steps of ranks that are believed to take 10, 20 and 40 ms; `off` says by what factor each differs in a step. */
static even_scatter after(double (*off)(int step, size_t rank)) {
  even_rank_model models[RANKS] = {0};
  even_scatter out = {0};
  for (int step = 0; step < STEPS; step++) {
    even_step_timing timings[RANKS];
    for (size_t r = 0; r < RANKS; r++) {
      models[r].known = true;
      models[r].seconds_per_sample = 0.001 * (double)(1 << r);
      timings[r] = (even_step_timing){.samples = 10, .busy_seconds = 0.01 * (double)(1 << r) * off(step, r)};
    }
    even_scatter_take(&out, models, timings, RANKS);
  }
  return out;
}

static double not_at_all(int step, size_t rank) {
  (void)step;
  (void)rank;
  return 1.0;
}

/* The whole machine is slower now and then. */
static double together(int step, size_t rank) {
  (void)rank;
  return step % 7 < 3 ? 1.3 : 1.0;
}

/* A tenth to either side, each rank by itself: in no two steps of three do two ranks go together. */
static double apart(int step, size_t rank) {
  return (step >> rank) % 2 == 0 ? 0.9 : 1.1;
}

static double stopped(int step, size_t rank) {
  return rank == 2 && step % 3 == 0 ? 8.0 : 1.0;
}

static void slow_ranks_get_headroom_for_what_they_scatter_alone(void **context) {
  (void)context;
  even_scatter scatter = after(not_at_all);
  assert_true(even_scatter_headroom(even_scatter_seconds(even_scatter_square(&scatter), RANKS, 1.0), 4.0) < 1e-9);
  scatter = after(together);
  assert_true(even_scatter_headroom(even_scatter_seconds(even_scatter_square(&scatter), RANKS, 1.0), 4.0) < 1e-9);
  scatter = after(stopped); /* by a quota: trials find what is best for it */
  assert_true(even_scatter_headroom(even_scatter_seconds(even_scatter_square(&scatter), RANKS, 1.0), 4.0) < 1e-9);
  scatter = after(apart);
  double scale = 0.1 / sqrt(2.0 * log(RANKS));
  static const double slower[] = {1.5, 2.0, 3.7, 10.0, 99.0};
  for (size_t i = 0; i < sizeof slower / sizeof slower[0]; i++) {
    double headroom = even_scatter_headroom(even_scatter_seconds(even_scatter_square(&scatter), RANKS, 2.0), slower[i]);
    assert_true(fabs(headroom / (2.0 * scale * log(slower[i])) - 1.0) < 0.05);
  }
  assert_true(even_scatter_headroom(even_scatter_seconds(even_scatter_square(&scatter), RANKS, 1.0), 1.0) <
              1e-9); /* the fastest */
  assert_true(even_scatter_headroom(even_scatter_seconds(even_scatter_square(&scatter), 2, 1.0), 4.0) >
              even_scatter_headroom(even_scatter_seconds(even_scatter_square(&scatter), 1024, 1.0), 4.0));
}

static void a_rank_alone_or_unknown_scatters_from_nobody(void **context) {
  even_rank_model models[2] = {{.known = true, .seconds_per_sample = 0.001}, {.known = false}};
  even_scatter scatter = {0};
  (void)context;
  for (int step = 0; step < STEPS; step++) {
    const even_step_timing timings[2] = {{10, 0.01 * (1 + step % 2)}, {10, 0.5}};
    even_scatter_take(&scatter, models, timings, 2);
    even_scatter_take(&scatter, models, timings, 1);
  }
  assert_int_equal(scatter.steps, 0);
  assert_true(even_scatter_headroom(even_scatter_seconds(even_scatter_square(&scatter), 2, 1.0), 4.0) < 1e-9);
}

static void observe(even_balancer *b, int steps, double off) {
  for (int i = 0; i < steps; i++) {
    const even_step_timing timings[2] = {{10, 0.01 * (1.0 + off * (double)(i % 2))}, {10, 0.04}};
    assert_int_equal(even_balancer_observe(b, timings), EVEN_OK);
  }
}

/* Many ask for it in one step. */
static void it_is_measured_once_a_step(void **context) {
  even_balancer *b = NULL;
  const even_balancer_params params = {.size = sizeof params, .policy = EVEN_POLICY_DYNAMIC, .ranks = 2, .batch = 20};
  (void)context;
  assert_int_equal(even_balancer_open(&params, &b), EVEN_OK);
  observe(b, 20, 0.1);
  even_balancer_believe(b, 20);
  double first = b->scatters[1];
  assert_true(first > 1e-5);
  for (int i = 0; i < EVEN_REPLAY_STEPS; i++) {
    b->replay.seconds[2 * i] = i % 2 == 0 ? 0.01 : 0.013;
  }
  even_balancer_believe(b, 20);
  assert_memory_equal(&b->scatters[1], &first, sizeof first);
  observe(b, 1, 0.0);
  even_balancer_believe(b, 20);
  assert_true(b->scatters[1] > 2.0 * first);
  even_balancer_close(b);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(slow_ranks_get_headroom_for_what_they_scatter_alone),
      cmocka_unit_test(a_rank_alone_or_unknown_scatters_from_nobody),
      cmocka_unit_test(it_is_measured_once_a_step),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
