/* Who hangs, by numbers alone. */
#include "orchestrator/silence.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static const uint64_t SECOND = 1000000000u;
static const uint64_t LEAST = 30 * UINT64_C(1000000000);

static even_silence silence;
static even_rank_activity ring;
static uint64_t now;

static int begin(void **state) {
  (void)state;
  now = 1000 * SECOND;
  ring = (even_rank_activity){.activity = EVEN_ACTIVITY_SCRIPT, .count = 5};
  even_silence_begin(&silence, &ring, 0, now);
  return 0;
}

static void enter(even_activity activity, double after) {
  now += (uint64_t)(after * 1e9);
  ring.activity = activity;
  ring.count++;
  assert_true(even_silence_look(&silence, &ring, silence.calls, now));
}

static void before_the_first_step_nothing_is_known(void **state) {
  (void)state;
  assert_false(silence.spoke);
  assert_false(even_silence_look(&silence, &ring, 0, now + SECOND));
  enter(EVEN_ACTIVITY_DATA, 1);
  assert_true(silence.spoke);
  enter(EVEN_ACTIVITY_FORWARD, 1);
  ring.ended = true;
  enter(EVEN_ACTIVITY_DATA, 1);
  assert_false(even_silence_known(&silence)); /* it may have ended it, but not made a step */
  assert_int_equal(even_silence_limit_ns(&silence, LEAST), 10 * LEAST);
  ring.stepped = true;
  enter(EVEN_ACTIVITY_DATA, 1);
  assert_true(even_silence_known(&silence));
  assert_int_equal(even_silence_limit_ns(&silence, LEAST), LEAST);
}

static void what_it_never_ended_and_the_scripts_own_code_are_given_more_time(void **state) {
  (void)state;
  ring.stepped = true;
  enter(EVEN_ACTIVITY_CHECKPOINT, 1);
  assert_int_equal(even_silence_limit_ns(&silence, LEAST), 10 * LEAST);
  ring.ended = true;
  enter(EVEN_ACTIVITY_SCRIPT, 1);
  assert_int_equal(even_silence_limit_ns(&silence, LEAST), 10 * LEAST);
  even_silence_sign(&silence, now + 5 * SECOND); /* a line of output */
  assert_int_equal(silence.quiet_ns, now + 5 * SECOND);
  enter(EVEN_ACTIVITY_DATA, 1);
  even_silence_sign(&silence, now + 5 * SECOND);
  assert_int_equal(silence.quiet_ns, now); /* here it is known how long it takes */
}

static void ten_times_the_p99_of_the_same_activity(void **state) {
  (void)state;
  ring.stepped = ring.ended = true;
  enter(EVEN_ACTIVITY_FORWARD, 1);
  for (int i = 0; i < 127; i++) { /* one of 128 took 60 s, the others 4 s: above their p99 */
    enter(EVEN_ACTIVITY_DATA, i == 64 ? 60 : 4);
    enter(EVEN_ACTIVITY_FORWARD, 0.2);
  }
  enter(EVEN_ACTIVITY_DATA, 4);
  assert_true(even_silence_p99(&silence) > 0.19 && even_silence_p99(&silence) < 0.21);
  assert_int_equal(even_silence_limit_ns(&silence, LEAST), LEAST);
  enter(EVEN_ACTIVITY_FORWARD, 0.2);
  assert_true(even_silence_p99(&silence) > 3.9 && even_silence_p99(&silence) < 4.1);
  uint64_t limit = even_silence_limit_ns(&silence, LEAST);
  assert_true(limit > 39 * SECOND && limit < 41 * SECOND);
}

static void few_durations_count_whole(void **state) {
  (void)state;
  ring.stepped = ring.ended = true;
  enter(EVEN_ACTIVITY_COMPILE, 1);
  enter(EVEN_ACTIVITY_FORWARD, 300);
  enter(EVEN_ACTIVITY_COMPILE, 1);
  assert_true(even_silence_p99(&silence) > 299);
  assert_true(even_silence_limit_ns(&silence, LEAST) > 2990 * SECOND);
}

static void calls_are_progress_and_lost_time_is_not_silence(void **state) {
  (void)state;
  ring.stepped = ring.ended = true;
  enter(EVEN_ACTIVITY_COLLECTIVE, 1);
  assert_false(even_silence_look(&silence, &ring, 0, now + 20 * SECOND));
  assert_true(even_silence_look(&silence, &ring, 1, now + 20 * SECOND));
  assert_int_equal(silence.quiet_ns, now + 20 * SECOND);
  even_silence_shift(&silence, 7 * SECOND);
  assert_int_equal(silence.quiet_ns, now + 27 * SECOND);
}

static void decided(const even_silence_rank *ranks, const char *expected) {
  bool hangs[4];
  size_t count = strlen(expected);
  size_t found = 0;
  size_t told = even_silence_decide(ranks, count, hangs);
  for (size_t i = 0; i < count; i++) {
    assert_int_equal(hangs[i], expected[i] == '1');
    found += hangs[i] ? 1 : 0;
  }
  assert_int_equal(told, found);
}

static void who_waits_for_another_does_not_hang(void **state) {
  const even_silence_rank works = {.alive = true};
  const even_silence_rank gone = {.alive = false};
  const even_silence_rank hung = {.alive = true, .late = true};
  const even_silence_rank held = {.alive = true, .late = true, .held = true};
  const even_silence_rank joins = {.alive = true, .in_collective = true};
  const even_silence_rank waits = {.alive = true, .late = true, .in_collective = true};
  (void)state;
  decided((even_silence_rank[]){waits, hung, waits}, "010");
  decided((even_silence_rank[]){works, works, works}, "000");
  decided((even_silence_rank[]){waits, works, waits}, "000"); /* it is slow, and not yet late */
  decided((even_silence_rank[]){waits, held, waits}, "000");  /* told as stopped, elsewhere */
  decided((even_silence_rank[]){waits, joins, waits}, "000"); /* one came just now */
  decided((even_silence_rank[]){waits, waits, waits}, "111"); /* for one another */
  decided((even_silence_rank[]){waits, gone, waits}, "101");
  decided((even_silence_rank[]){hung, hung, waits, works}, "1100");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup(before_the_first_step_nothing_is_known, begin),
      cmocka_unit_test_setup(what_it_never_ended_and_the_scripts_own_code_are_given_more_time, begin),
      cmocka_unit_test_setup(ten_times_the_p99_of_the_same_activity, begin),
      cmocka_unit_test_setup(few_durations_count_whole, begin),
      cmocka_unit_test_setup(calls_are_progress_and_lost_time_is_not_silence, begin),
      cmocka_unit_test(who_waits_for_another_does_not_hang),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
