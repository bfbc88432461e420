/* Ranks that run out of memory: what the next attempt is told. */
#include "job_fixture.h"
#include "orchestrator/shortages.h"
#include "os/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void half_of_what_it_had_and_always_less(void **state) {
  even_shortages list = {.count = 0};
  even_text words = EVEN_TEXT_EMPTY;
  const even_shortage *one = NULL;
  (void)state;
  even_shortages_note(&list, "a", "cpu:1", 25, 64, &one);
  assert_non_null(one);
  assert_int_equal(one->most, 12);
  even_shortages_note(&list, "a", "cpu:1", 0, 0, &one); /* before its first step: it had no more than it may */
  assert_int_equal(one->most, 6);
  even_shortages_note(&list, "a", "cpu:1", 25, 64, &one); /* by an attempt before */
  assert_int_equal(one->most, 3);
  assert_int_equal(one->batch, 64);
  even_shortages_note(&list, "a", "cpu:1", 4, 128, &one); /* accumulated: two batches */
  assert_int_equal(one->most, 2);
  assert_int_equal(one->batch, 128);
  even_shortages_note(&list, "b", "cpu:1", 0, 0, &one);
  even_shortages_note(&list, "b", "cpu:1", 0, 0, &one);
  assert_int_equal(one->part, 4);
  even_shortages_add(&list, "a", "cpu:1", 7, &words);
  even_shortages_add(&list, "a", "cpu:0", 8, &words);
  even_shortages_add(&list, "b", "cpu:1", 9, &words);
  assert_string_equal(even_text_string(&words), "7:2/128,9:/4");
  even_text_free(&words);
}

static void one_sample_is_the_least(void **state) {
  even_shortages list = {.count = 0};
  const even_shortage *one = NULL;
  (void)state;
  even_shortages_note(&list, "a", "cpu:1", 1, 8, &one);
  assert_null(one);
  assert_int_equal(list.count, 0);
  for (size_t i = 0; i < EVEN_SHORTAGES_MOST; i++) {
    char device[16];
    (void)snprintf(device, sizeof device, "cpu:%zu", i);
    even_shortages_note(&list, "a", device, 8, 8, &one);
    assert_non_null(one);
  }
  even_shortages_note(&list, "b", "cpu:0", 8, 8, &one);
  assert_null(one);
}

/* As rank 1 would write it after a step. */
static void write_step(job_fixture *job, int rank, const char *text) {
  even_telemetry *ring = NULL;
  const even_step_record record = {.step = 4, .end_ns = even_clock_ns(), .samples = 10, .batch = 16};
  if (strcmp(text, "stepped") != 0) {
    return;
  }
  assert_int_equal(even_telemetry_open(job->telemetry_fd, rank, &ring), EVEN_OK);
  even_telemetry_step(ring, &record);
  even_telemetry_close(ring);
  job_fixture_touch(job, "stepped");
}

/* In attempt 0 after a step, in attempt 1 before its first. */
static void a_rank_that_ran_out_has_less_in_the_next_attempt(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->max_restarts = 2;
  job->on_line = write_step;
  const char *script =
      "echo caps=$EVENSTEP_MEMORY_CAPS; [ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0; "
      "told=$FOLDER/told-$TORCHELASTIC_RESTART_COUNT; [ $RANK = 0 ] && { : > $told; exec sleep 600; }; "
      "until [ -e $told ]; do sleep 0.01; done; "
      "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && { echo stepped; until [ -e $FOLDER/stepped ]; do sleep 0.01; done; }; "
      "echo 'Traceback (most recent call last):' >&2; echo '  File \"train.py\", line 3, in <module>' >&2; "
      "echo 'torch.OutOfMemoryError: CUDA out of memory.' >&2; exit 1";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_true(job_fixture_saw(job, "line 0 caps=|"));
  assert_true(job_fixture_saw(job, "line 0 caps=1:5/16|"));
  assert_true(job_fixture_saw(job, "line 1 caps=1:2/16|"));
  assert_true(job_fixture_saw(job, "notice rank 1 (cpu:1) ran out of memory: it has at most 5 of 16 samples a step"));
  assert_true(job_fixture_saw(job, "notice restart 2 of 2")); /* an error of the script's own, and no checkpoint */
}

static void another_error_is_none_of_it(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->max_restarts = 1;
  const char *script =
      "echo caps=$EVENSTEP_MEMORY_CAPS; [ $RANK = 0 ] && exec sleep 600; "
      "echo 'Traceback (most recent call last):' >&2; echo '  File \"train.py\", line 3, in <module>' >&2; "
      "echo 'ValueError: memory' >&2; exit 1";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 1);
  assert_false(job_fixture_saw(job, "ran out of memory"));
  assert_true(job_fixture_saw(job, "notice not restarted"));
}

int main(void) {
#define JOB_TEST(test) cmocka_unit_test_setup_teardown(test, job_fixture_setup, job_fixture_teardown)
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(half_of_what_it_had_and_always_less),
      cmocka_unit_test(one_sample_is_the_least),
      JOB_TEST(a_rank_that_ran_out_has_less_in_the_next_attempt),
      JOB_TEST(another_error_is_none_of_it),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
