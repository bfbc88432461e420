/* Stops told from slowness, from rare stalls and from stalls that are usual. */
#include "balancer/stops.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

enum { STEPS = 32 };

/* Thirty-two steps of two ranks: rank 1 takes ten times as long in every `every`-th; a step waits for the slower. */
static bool found(double second, int every, double usual) {
  even_stops stops;
  double sum = 0.0;
  assert_int_equal(even_stops_open(&stops, 2), EVEN_OK);
  for (int again = 0; again < 2; again++) { /* what an earlier trial saw is forgotten */
    even_stops_begin(&stops);
    sum = 0.0;
    for (int step = 1; step <= STEPS; step++) {
      double slow = step % every == 0 ? 10.0 * second : second;
      const even_step_timing timings[2] = {{8, 1.0}, {8, slow}};
      even_stops_take(&stops, timings);
      sum += slow > 1.0 ? slow : 1.0;
    }
  }
  bool out = even_stops_of(&stops, 1, sum / (double)STEPS, usual);
  assert_false(even_stops_of(&stops, 0, sum / (double)STEPS, usual));
  even_stops_close(&stops);
  return out;
}

static void stops_are_told_from_stalls(void **context) {
  (void)context;
  assert_true(found(0.5, 5, 0.0));
  assert_true(found(0.5, 8, 0.0));
  assert_false(found(0.5, 9, 0.0)); /* three of thirty-two: any machine stalls so often now and then */
  assert_true(found(0.5, 5, 0.09));
  assert_false(found(0.5, 5, 0.1));         /* about as often as ever */
  assert_false(found(2.0, STEPS + 1, 0.0)); /* slow in every step */
  assert_false(found(2.0, 5, 0.0));         /* slow, and stalls: no time is left over */
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(stops_are_told_from_stalls),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
