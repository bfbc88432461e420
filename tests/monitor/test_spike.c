/* Losses that jump, and those that only look so. */
#include "monitor/spike.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static uint64_t state_of_noise;

/* Between -1 and 1: xorshift64*, the same in every run. */
static double noise(void) {
  state_of_noise ^= state_of_noise >> 12;
  state_of_noise ^= state_of_noise << 25;
  state_of_noise ^= state_of_noise >> 27;
  return (double)(state_of_noise * UINT64_C(2685821657736338717) >> 11) / (double)(UINT64_C(1) << 52) - 1;
}

static int begin(void **state) {
  (void)state;
  state_of_noise = 88172645463325252u;
  return 0;
}

/* Feeds steps [from, until) of a falling, noisy loss; how often something was said. */
static int feed(even_spikes *spikes, uint32_t from, uint32_t until) {
  int said = 0;
  for (uint32_t step = from; step < until; step++) {
    said += even_spikes_take(spikes, step, 2 + 6 * exp(-(double)step / 300.0) + 0.2 * noise()) ? 1 : 0;
  }
  return said;
}

static void a_noisy_course_has_none(void **state) {
  even_spikes spikes = {.count = 0};
  (void)state;
  assert_int_equal(feed(&spikes, 0, 20000), 0);
}

static void one_that_jumps_is_told_once_and_its_end(void **state) {
  even_spikes spikes = {.count = 0};
  (void)state;
  assert_int_equal(feed(&spikes, 0, 500), 0);
  assert_true(even_spikes_take(&spikes, 500, 9.0));
  assert_true(spikes.inside);
  assert_int_equal(spikes.since, 500);
  assert_true(spikes.median > 3 && spikes.median < 4 && spikes.limit < 9);
  assert_false(even_spikes_take(&spikes, 501, 8.0));
  assert_true(even_spikes_take(&spikes, 502, 3.2));
  assert_false(spikes.inside);
  assert_int_equal(feed(&spikes, 503, 2000), 0); /* and it has not spoiled what is usual */
}

static void how_far_it_must_jump_is_for_the_user_to_say(void **state) {
  even_spikes near = {.deviations = 2};
  even_spikes off = {.deviations = (double)INFINITY};
  (void)state;
  assert_int_equal(feed(&near, 0, 500), 0);
  even_spikes_take(&near, 500, 4.4);
  assert_true(near.inside); /* which ten deviations would pass over */
  even_spikes_forget(&near);
  assert_true(near.deviations > 1.9 && near.deviations < 2.1 && near.count == 0);
  assert_int_equal(feed(&off, 0, 500), 0);
  assert_false(even_spikes_take(&off, 500, 1e9));
}

static void a_new_level_becomes_the_usual_one(void **state) {
  even_spikes spikes = {.count = 0};
  (void)state;
  assert_int_equal(feed(&spikes, 0, 1000), 0);
  assert_true(even_spikes_take(&spikes, 1000, 20.0));
  uint32_t step = 1001;
  while (!even_spikes_take(&spikes, step, 20.0 + 0.1 * noise())) {
    step++;
    assert_true(step < 1000 + EVEN_SPIKE_WINDOW);
  }
  assert_true(step >= 1000 + EVEN_SPIKE_WINDOW / 2 - 8);
}

static void small_losses_are_no_jumps(void **state) {
  even_spikes spikes = {.count = 0};
  (void)state;
  for (uint32_t step = 0; step < 200; step++) { /* the same again and again: any noise is many deviations */
    assert_false(even_spikes_take(&spikes, step, 0.5));
  }
  assert_false(even_spikes_take(&spikes, 200, 0.54));
  assert_true(even_spikes_take(&spikes, 201, 0.56));
}

static void the_first_losses_say_nothing(void **state) {
  even_spikes spikes = {.count = 0};
  (void)state;
  for (uint32_t step = 0; step < EVEN_SPIKE_LEAST; step++) {
    assert_false(even_spikes_take(&spikes, step, step % 2 == 0 ? 1.0 : 1000.0));
  }
  assert_false(even_spikes_take(&spikes, 99, (double)NAN));
  assert_false(even_spikes_take(&spikes, 99, (double)INFINITY));
  even_spikes_forget(&spikes);
  assert_int_equal(spikes.count, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup(a_noisy_course_has_none, begin),
      cmocka_unit_test_setup(one_that_jumps_is_told_once_and_its_end, begin),
      cmocka_unit_test_setup(how_far_it_must_jump_is_for_the_user_to_say, begin),
      cmocka_unit_test_setup(a_new_level_becomes_the_usual_one, begin),
      cmocka_unit_test_setup(small_losses_are_no_jumps, begin),
      cmocka_unit_test_setup(the_first_losses_say_nothing, begin),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
