/* How far ranks have come, from their rings. */
#include "orchestrator/progress.h"
#include "os/clock.h"
#include "support/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <unistd.h>

#include <cmocka.h>

static int segment = -1;
static even_telemetry *rings[2];
static even_progress progress;

static int open_all(void **state) {
  (void)state;
  assert_int_equal(even_telemetry_create_segment(2, 16, &segment), EVEN_OK);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(even_telemetry_open(segment, i, &rings[i]), EVEN_OK);
  }
  assert_int_equal(even_progress_open(segment, 2, &progress), EVEN_OK);
  even_progress_begin(&progress);
  return 0;
}

static int close_all(void **state) {
  (void)state;
  even_progress_close(&progress);
  for (int i = 0; i < 2; i++) {
    even_telemetry_close(rings[i]);
  }
  return close(segment);
}

static void event_of(int rank, even_event which, int64_t value, uint64_t at) {
  const even_event_record record = {.event = (uint32_t)which, .value = value, .at_ns = at};
  even_telemetry_event(rings[rank], &record);
}

static void event(int rank, even_event which, uint64_t at) {
  event_of(rank, which, 0, at);
}

static void step(int rank, uint32_t number, uint64_t at) {
  const even_step_record record = {.step = number, .end_ns = at};
  even_telemetry_step(rings[rank], &record);
}

static void joins_and_steps_are_seen(void **state) {
  (void)state;
  event(0, EVEN_EVENT_JOINING, even_clock_ns());
  event(1, EVEN_EVENT_MESSAGE, even_clock_ns());
  even_progress_read(&progress);
  assert_true(progress.ranks[0].joining && !progress.ranks[0].joined);
  assert_false(progress.ranks[1].joining || progress.ranks[1].joined || progress.ranks[1].stepped);
  event(0, EVEN_EVENT_JOINED, even_clock_ns());
  step(1, 41, even_clock_ns());
  even_progress_read(&progress);
  assert_true(progress.ranks[0].joined && !progress.ranks[0].stepped);
  assert_true(progress.ranks[1].joined && progress.ranks[1].stepped);
  assert_int_equal(progress.ranks[1].last_step, 41);
}

/* es.prepare without a loader: each rank has a batch of its own, and of all there is none. */
static void steps_with_a_global_batch_are_told_from_others(void **state) {
  const even_step_record with = {.step = 1, .end_ns = even_clock_ns(), .samples = 4, .batch = 8};
  (void)state;
  event(0, EVEN_EVENT_JOINED, even_clock_ns());
  even_progress_read(&progress);
  assert_false(even_progress_steps(&progress) || even_progress_shares(&progress));
  step(1, 0, even_clock_ns());
  even_progress_read(&progress);
  assert_true(even_progress_steps(&progress) && !even_progress_shares(&progress));
  even_telemetry_step(rings[0], &with);
  step(0, 2, even_clock_ns()); /* one of its steps has none */
  even_progress_read(&progress);
  assert_true(even_progress_shares(&progress));
  even_progress_begin(&progress);
  assert_false(even_progress_steps(&progress) || even_progress_shares(&progress));
}

static void calls_of_init_process_group_are_counted(void **state) {
  (void)state;
  event_of(0, EVEN_EVENT_OPENING, 1, even_clock_ns());
  even_progress_read(&progress);
  assert_true(progress.ranks[0].opening == 1 && progress.ranks[0].opened == 0);
  event_of(0, EVEN_EVENT_OPENED, 1, even_clock_ns());
  event_of(0, EVEN_EVENT_OPENING, 2, even_clock_ns());
  event_of(1, EVEN_EVENT_OPENED, 1, even_clock_ns()); /* its beginning was overwritten */
  even_progress_read(&progress);
  assert_true(progress.ranks[0].opening == 2 && progress.ranks[0].opened == 1);
  assert_true(progress.ranks[1].opening == 1 && progress.ranks[1].opened == 1);
  step(0, 0, even_clock_ns()); /* so it has come out of it: that record was overwritten */
  even_progress_read(&progress);
  assert_int_equal(progress.ranks[0].opened, 2);
  assert_false(progress.ranks[1].joining || progress.ranks[1].joined);
}

/* A ring holds 16: who wrote spans and steps has joined, whatever was overwritten. */
static void what_was_overwritten_is_not_missed(void **state) {
  (void)state;
  event(0, EVEN_EVENT_JOINING, even_clock_ns());
  event(0, EVEN_EVENT_JOINED, even_clock_ns());
  for (uint32_t i = 0; i < 300; i++) {
    const even_span_record span = {.step = i, .span = EVEN_SPAN_DATA, .start_ns = even_clock_ns()};
    even_telemetry_span(rings[0], &span);
    step(1, i, even_clock_ns());
  }
  even_progress_read(&progress);
  assert_true(progress.ranks[0].joined);
  assert_true(progress.ranks[1].joined);
  assert_int_equal(progress.ranks[1].last_step, 299);
}

static void an_attempt_before_does_not_count(void **state) {
  uint64_t before = even_clock_ns();
  const even_span_record span = {.span = EVEN_SPAN_DATA, .start_ns = before};
  (void)state;
  event(0, EVEN_EVENT_JOINING, before);
  event(0, EVEN_EVENT_JOINED, before);
  step(1, 7, before);
  even_telemetry_span(rings[1], &span);
  do {
    even_progress_begin(&progress);
  } while (progress.since_ns <= before);
  even_progress_read(&progress);
  assert_false(progress.ranks[0].joining || progress.ranks[0].joined);
  assert_false(progress.ranks[1].stepped || progress.ranks[1].joined);
}

static void without_rings_nothing_is_known(void **state) {
  even_progress nothing;
  (void)state;
  assert_int_equal(even_progress_open(-1, 3, &nothing), EVEN_OK);
  even_progress_begin(&nothing);
  even_progress_read(&nothing);
  assert_false(nothing.ranks[2].joined || nothing.ranks[2].joining);
  even_progress_close(&nothing);
  assert_int_equal(even_progress_open(segment, 3, &nothing), EVEN_ERR_ARGUMENT);
  even_progress_close(&nothing);
}

static even_status open_and_close(void *context) {
  even_progress other;
  (void)context;
  even_status status = even_progress_open(segment, 2, &other);
  even_progress_close(&other);
  return status;
}

static void survives_every_fault(void **state) {
  (void)state;
  assert_true(fault_each_allocation(open_and_close, NULL) >= 2);
  assert_true(fault_each_os(open_and_close, NULL, ENOMEM) >= 1);
}

int main(void) {
#define PROGRESS_TEST(test) cmocka_unit_test_setup_teardown(test, open_all, close_all)
  const struct CMUnitTest tests[] = {
      PROGRESS_TEST(joins_and_steps_are_seen),
      PROGRESS_TEST(calls_of_init_process_group_are_counted),
      PROGRESS_TEST(steps_with_a_global_batch_are_told_from_others),
      PROGRESS_TEST(what_was_overwritten_is_not_missed),
      PROGRESS_TEST(an_attempt_before_does_not_count),
      PROGRESS_TEST(without_rings_nothing_is_known),
      PROGRESS_TEST(survives_every_fault),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
