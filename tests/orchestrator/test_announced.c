/* Jobs whose machine's end is announced: what follows is what follows from SIGTERM with notice. */
#include "job_fixture.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* Ranks that save their state, of which a shell knows nothing: they end as such do when the test says so. */
static const char SAVES[] =
    "while [ ! -e $FOLDER/go ]; do [ -e $FOLDER/over ] && exit 0; sleep 0.02; done; "
    "exit 75";

static char place[128];
static bool signalled;

static int open_job(void **state) {
  int outcome = job_fixture_setup(state);
  job_fixture *job = *state;
  (void)snprintf(place, sizeof place, "exec:test -e %s/ending", job->folder);
  signalled = false;
  job->notice_seconds = 120;
  job->notice_from = place;
  job->notice_every_seconds = 0.05;
  return outcome;
}

static void go_when_announced(job_fixture *job) {
  if (job_fixture_saw(job, "announces the machine's end")) {
    job_fixture_touch(job, "go");
  } else if (job_fixture_saw(job, "started 1|")) {
    job_fixture_touch(job, "ending");
  }
}

static void what_is_announced_is_notice(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->on_tick = go_when_announced;
  assert_int_equal(job_fixture_run(job, SAVES, &code), EVEN_OK);
  assert_int_equal(code, EVEN_SAVED_AND_ENDED);
  assert_true(job_fixture_saw(job,
                              "notice exec announces the machine's end (exit code 0): the training saves its state "
                              "after the step under way and ends, within 120 s (--notice-from)|"));
  assert_true(job_fixture_saw(job, "notice the training is saved"));
}

/* As a machine does that is shut down meanwhile. */
static void signal_once_announced(job_fixture *job) {
  if (job_fixture_saw(job, "announces the machine's end") && !signalled) {
    signalled = true;
    assert_int_equal(kill(getpid(), SIGTERM), 0);
  } else {
    go_when_announced(job);
  }
}

static void its_first_sigterm_says_nothing_new(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->on_tick = signal_once_announced;
  assert_int_equal(job_fixture_run(job, SAVES, &code), EVEN_OK);
  assert_int_equal(code, EVEN_SAVED_AND_ENDED);
}

static void signal_again_and_again(job_fixture *job) {
  if (job_fixture_saw(job, "announces the machine's end")) {
    assert_int_equal(kill(getpid(), SIGTERM), 0);
  } else {
    go_when_announced(job);
  }
}

static void its_second_ends_it_without_waiting(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->on_tick = signal_again_and_again;
  assert_int_equal(job_fixture_run(job, "exec sleep 600", &code), EVEN_OK);
  assert_int_equal(code, 128 + SIGTERM);
}

static void who_does_not_end_in_time_is_ended(void **state) {
  job_fixture *job = *state;
  int code = -1;
  (void)snprintf(place, sizeof place, "exec:echo 0.1");
  assert_int_equal(job_fixture_run(job, "exec sleep 600", &code), EVEN_OK);
  assert_int_equal(code, 128 + SIGTERM);
  assert_true(job_fixture_saw(job, "within 0.1 s (--notice-from)|"));
  assert_true(job_fixture_saw(job, "notice the time of --notice is over"));
}

static void end_once_told(job_fixture *job) {
  if (job_fixture_saw(job, "cannot be asked whether this machine ends soon")) {
    job_fixture_touch(job, "over");
  }
}

static void a_service_that_fails_ends_nothing(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->on_tick = end_once_told;
  (void)snprintf(place, sizeof place, "http://127.0.0.1:1/"); /* tcpmux, which nobody has */
  assert_int_equal(job_fixture_run(job, SAVES, &code), EVEN_OK);
  assert_int_equal(code, 0);
}

static void nonsense_is_told_and_ends_nothing(void **state) {
  job_fixture *job = *state;
  int code = -1;
  (void)snprintf(place, sizeof place, "nowhere");
  assert_int_equal(job_fixture_run(job, "sleep 0.5", &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_true(job_fixture_saw(job, "notice nobody is asked whether this machine ends soon: "));
}

int main(void) {
#define JOB_TEST(test) cmocka_unit_test_setup_teardown(test, open_job, job_fixture_teardown)
  const struct CMUnitTest tests[] = {
      JOB_TEST(what_is_announced_is_notice),        JOB_TEST(its_first_sigterm_says_nothing_new),
      JOB_TEST(its_second_ends_it_without_waiting), JOB_TEST(who_does_not_end_in_time_is_ended),
      JOB_TEST(a_service_that_fails_ends_nothing),  JOB_TEST(nonsense_is_told_and_ends_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
