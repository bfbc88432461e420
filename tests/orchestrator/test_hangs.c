/* Jobs in which a rank stops making progress: the ranks are shells, this test writes what they are at. */
#include "job_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static even_telemetry *rings[2];

static int open_job(void **state) {
  (void)job_fixture_setup(state);
  job_fixture *job = *state;
  for (int i = 0; i < 2; i++) {
    assert_int_equal(even_telemetry_open(job->telemetry_fd, i, &rings[i]), EVEN_OK);
  }
  job->hang_seconds = 0.5;
  return 0;
}

static int close_job(void **state) {
  for (int i = 0; i < 2; i++) {
    even_telemetry_close(rings[i]);
  }
  return job_fixture_teardown(state);
}

static void make_a_step(int rank) {
  const even_step_record step = {.step = 1};
  static const even_activity way[] = {EVEN_ACTIVITY_DATA, EVEN_ACTIVITY_FORWARD, EVEN_ACTIVITY_COLLECTIVE,
                                      EVEN_ACTIVITY_OPTIMIZER, EVEN_ACTIVITY_SCRIPT};
  for (size_t i = 0; i < sizeof way / sizeof way[0]; i++) {
    even_telemetry_enter(rings[rank], way[i]);
  }
  even_telemetry_step(rings[rank], &step);
}

static char logs[4096];

static const char *stacks_of_rank_1(const job_fixture *job) {
  char path[160];
  (void)snprintf(path, sizeof path, "%s/logs/hang-rank-1.txt", job->run_folder);
  FILE *file = fopen(path, "r");
  assert_non_null(file);
  size_t got = fread(logs, 1, sizeof logs - 1, file);
  logs[got] = '\0';
  assert_int_equal(fclose(file), 0);
  return logs;
}

static int goes_on_after;

/* Rank 0 comes to a collective and waits; rank 1 stays in forward. */
static void on_tick_of_the_slow(job_fixture *job) {
  static const char told[] = "notice rank 1 (cpu:1, process ";
  if (!job_fixture_saw(job, "line 1 here|") || !job_fixture_saw(job, "line 0 here|")) {
    return;
  }
  if (goes_on_after == 0) {
    make_a_step(0);
    make_a_step(1);
    even_telemetry_enter(rings[0], EVEN_ACTIVITY_COLLECTIVE);
    even_telemetry_enter(rings[1], EVEN_ACTIVITY_FORWARD);
    goes_on_after = 1;
  } else if (goes_on_after == 1 && job_fixture_saw(job, told) && job_fixture_saw(job, "stacks of rank 1")) {
    even_telemetry_enter(rings[1], EVEN_ACTIVITY_COLLECTIVE);
    goes_on_after = 2;
  } else if (goes_on_after == 2 && job_fixture_saw(job, "rank 1 goes on")) {
    job_fixture_touch(job, "end");
    goes_on_after = 3;
  }
  if (goes_on_after == 3) { /* however long the shells take to see it */
    make_a_step(0);
    make_a_step(1);
  }
}

static void a_hang_is_told_and_its_end_too(void **state) {
  job_fixture *job = *state;
  int code = -1;
  goes_on_after = 0;
  job->on_tick = on_tick_of_the_slow;
  assert_int_equal(job_fixture_run(job, "echo here; until [ -e $FOLDER/end ]; do sleep 0.05; done", &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_int_equal(goes_on_after, 3);
  assert_true(job_fixture_saw(job, "hangs: no progress for 0."));
  assert_true(job_fixture_saw(job, "hang 1 0 rank 1 hangs: no progress for 0."));
  assert_true(job_fixture_saw(job, "hang 1 1 rank 1 goes on: it was slow, and did not hang|"));
  assert_true(job_fixture_saw(job, "s in compute (forward) (limit 0.5 s"));
  assert_true(job_fixture_saw(job, "; 1 rank waits for it|"));
  assert_false(job_fixture_saw(job, "rank 0 (cpu:0, process ")); /* who waits does not hang */
  assert_non_null(strstr(stacks_of_rank_1(job), "has not imported evenstep"));
  assert_non_null(strstr(logs, "Threads, as the kernel sees them:\nthread "));
}

static int attempts;

static void on_attempt_of_two(job_fixture *job, int attempt) {
  (void)job;
  attempts = attempt + 1;
}

static void on_tick_of_the_hung(job_fixture *job) {
  static int entered;
  if (attempts == 2) {
    job_fixture_touch(job, "end");
  } else if (entered == 0 && job_fixture_saw(job, "line 1 here|") && job_fixture_saw(job, "line 0 here|")) {
    make_a_step(1);
    even_telemetry_enter(rings[1], EVEN_ACTIVITY_DATA);
    entered = 1;
  } else if (entered == 1) {
    make_a_step(0); /* this one goes on */
  }
}

static void a_hung_rank_is_ended_and_the_job_restarted(void **state) {
  job_fixture *job = *state;
  int code = -1;
  attempts = 0;
  job->restart_hung = true;
  job->max_restarts = 1;
  job->on_attempt = on_attempt_of_two;
  job->on_tick = on_tick_of_the_hung;
  assert_int_equal(job_fixture_run(job, "echo here; until [ -e $FOLDER/end ]; do sleep 0.05; done", &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_int_equal(attempts, 2);
  assert_true(job_fixture_saw(job, "ended 1 1 15 rank 1 (cpu:1 on "));
  assert_true(job_fixture_saw(job, "hung, and was ended for it: no progress for 0."));
  assert_true(job_fixture_saw(job, "notice restart 1 of 1 from the beginning"));
}

/* Shells that never say what they are at are no training: nobody is told of. */
static void on_tick_of_the_quiet(job_fixture *job) {
  static int ticks;
  if (++ticks == 12) { /* 1.2 s and more: over twice the limit */
    job_fixture_touch(job, "end");
  }
}

static void a_script_without_evenstep_is_let_be(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->hang_seconds = 0.05; /* ten times this where nothing is known */
  job->on_tick = on_tick_of_the_quiet;
  assert_int_equal(job_fixture_run(job, "until [ -e $FOLDER/end ]; do sleep 0.05; done", &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_false(job_fixture_saw(job, "hangs"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_hang_is_told_and_its_end_too, open_job, close_job),
      cmocka_unit_test_setup_teardown(a_hung_rank_is_ended_and_the_job_restarted, open_job, close_job),
      cmocka_unit_test_setup_teardown(a_script_without_evenstep_is_let_be, open_job, close_job),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
