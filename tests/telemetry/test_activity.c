/* What a rank says that it is at, as the agent reads it. */
#include <evenstep/telemetry.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#include <cmocka.h>

static void an_activity_is_seen_with_its_past(void **state) {
  even_telemetry *ring = NULL;
  even_telemetry_reader *reader = NULL;
  even_rank_activity at;
  int segment = -1;
  const even_step_record step = {.step = 7};
  (void)state;
  assert_int_equal(even_telemetry_create_segment(2, 16, &segment), EVEN_OK);
  assert_int_equal(even_telemetry_open(segment, 1, &ring), EVEN_OK);
  assert_int_equal(even_telemetry_reader_open(segment, &reader), EVEN_OK);
  even_telemetry_reader_activity(reader, 1, &at);
  assert_true(at.count == 0 && !at.stepped && !at.ended && at.activity == EVEN_ACTIVITY_SCRIPT);
  even_telemetry_enter(ring, EVEN_ACTIVITY_DATA);
  even_telemetry_reader_activity(reader, 1, &at);
  assert_true(at.activity == EVEN_ACTIVITY_DATA && at.count == 1 && !at.ended && !at.stepped);
  even_telemetry_step(ring, &step);
  even_telemetry_enter(ring, EVEN_ACTIVITY_COMPILE);
  even_telemetry_reader_activity(reader, 1, &at);
  assert_true(at.activity == EVEN_ACTIVITY_COMPILE && at.count == 2 && !at.ended && at.stepped);
  even_telemetry_enter(ring, EVEN_ACTIVITY_DATA);
  even_telemetry_reader_activity(reader, 1, &at);
  assert_true(at.activity == EVEN_ACTIVITY_DATA && at.count == 3 && at.ended);
  even_telemetry_reader_activity(reader, 0, &at);
  assert_int_equal(at.count, 0);
  even_telemetry_reader_activity(reader, 2, &at); /* there is no such rank */
  assert_int_equal(at.count, 0);
  even_telemetry_close(ring);
  /* another process, in the next attempt: nothing of what it is at has been ended, and the count goes on */
  assert_int_equal(even_telemetry_open(segment, 1, &ring), EVEN_OK);
  even_telemetry_enter(ring, EVEN_ACTIVITY_DATA);
  even_telemetry_reader_activity(reader, 1, &at);
  assert_true(at.count == 4 && !at.ended && !at.stepped);
  even_telemetry_enter(NULL, EVEN_ACTIVITY_DATA);
  even_telemetry_close(ring);
  even_telemetry_reader_close(reader);
  assert_int_equal(close(segment), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(an_activity_is_seen_with_its_past)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
