/* Jobs whose machine's end is announced: what follows is what follows from SIGTERM with notice. */
#include "job_fixture.h"
#include "orchestrator/announcer.h"
#include "orchestrator/job.h"

#include <poll.h>
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

static char place[256];
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

/* Other notice came before; what was announced meanwhile was asked for all the same. */
static void signal_as_asked(job_fixture *job) {
  static int next;
  char asked[96];
  (void)snprintf(asked, sizeof asked, "%s/asked", job->folder);
  if (!signalled && job_fixture_saw(job, "started 1|")) {
    signalled = true;
    next = SIGTERM;
    assert_int_equal(kill(getpid(), SIGUSR1), 0);
  } else if (next == 0) {
    job_fixture_touch(job, signalled ? "go" : "waits");
  } else if (access(asked, F_OK) == 0) {
    next = 0;
    assert_int_equal(kill(getpid(), SIGTERM), 0);
  } else if (job_fixture_saw(job, "SIGUSR1: the training saves")) {
    job_fixture_touch(job, "ending");
  }
}

static void nor_does_it_where_other_notice_came_first(void **state) {
  job_fixture *job = *state;
  int code = -1;
  /* the second question comes once the first was answered */
  (void)snprintf(place, sizeof place, "exec:cd %s; [ -e ending ] && { [ ! -e first ] || : >asked; : >first; }",
                 job->folder);
  job->on_tick = signal_as_asked;
  assert_int_equal(job_fixture_run(job, SAVES, &code), EVEN_OK);
  assert_int_equal(code, EVEN_SAVED_AND_ENDED);
}

static void say_nothing(void *context, const char *words) {
  (void)context;
  (void)words;
}

/* Whoever sweeps up after an attempt reaps all children. */
static void a_command_that_ends_while_an_attempt_is_swept_up_is_heard(void **state) {
  even_agent_params params = {.notice_seconds = 60};
  even_job job = {.params = &params, .loop = {.fd = -1}, .guardian = {.pid = -1, .pipe = -1}};
  char what[EVEN_ANNOUNCEMENT_WORDS * 2];
  double seconds = 0;
  (void)state;
  (void)snprintf(job.id, sizeof job.id, "none-such");
  assert_int_equal(even_loop_open(&job.loop), EVEN_OK);
  const even_announcer_params asks = {.place = "exec:echo 42", .loop = &job.loop, .seconds = 60, .tell = say_nothing};
  assert_int_equal(even_announcer_open(&asks, &job.announcer), EVEN_OK);
  even_announcer_tick(job.announcer);
  assert_true(even_announcer_session(job.announcer) > 1);
  even_process_await(even_announcer_session(job.announcer), 60000000000u);
  even_job_sweep(&job);
  assert_true(even_announcer_due(job.announcer, &seconds, what));
  assert_int_equal(even_announcer_session(job.announcer), 0);
  even_announcer_close(job.announcer);
  even_loop_close(&job.loop);
}

static pid_t sleeper(void) {
  char *const words[] = {(char *)(uintptr_t)"sleep", (char *)(uintptr_t)"600", NULL};
  char *const none[] = {NULL};
  even_process process;
  assert_int_equal(even_process_start(&(even_process_params){.arguments = words, .environment = none}, &process),
                   EVEN_OK);
  (void)close(process.output);
  (void)close(process.error);
  return process.pid;
}

/* It hears of the last command that it was not told of in time, and of none that has begun meanwhile. */
static void a_guardian_that_stands_still_is_not_waited_for(void **state) {
  even_job job = {.guardian = {.pid = -1, .pipe = -1}};
  (void)state;
  assert_int_equal(even_guardian_start("EVENSTEP_TEST_MARK=none-such", &job.guardian), EVEN_OK);
  pid_t before = sleeper();
  pid_t meanwhile = sleeper();
  pid_t later = sleeper();
  even_job_guard_command(&job, before, true);
  assert_int_equal(job.guarded_command, before);
  assert_int_equal(kill(job.guardian.pid, SIGSTOP), 0);
  while (even_guardian_has_room(&job.guardian)) {
    assert_int_equal(even_guardian_drop_session(&job.guardian, meanwhile), EVEN_OK);
  }
  even_job_guard_command(&job, before, false);
  even_job_guard_command(&job, meanwhile, true);
  even_job_guard_command(&job, meanwhile, false);
  assert_int_equal(job.guarded_command, before);
  assert_int_equal(kill(job.guardian.pid, SIGCONT), 0);
  struct pollfd room = {.fd = job.guardian.pipe, .events = POLLOUT};
  assert_int_equal(poll(&room, 1, 60000), 1);
  even_job_guard_command(&job, later, true);
  assert_int_equal(job.guarded_command, later);
  even_guardian_stop(&job.guardian);
  assert_int_equal(even_process_end_signal(later), SIGKILL);
  assert_false(even_process_has_ended(before));
  assert_false(even_process_has_ended(meanwhile));
  assert_int_equal(kill(before, SIGKILL) + kill(meanwhile, SIGKILL), 0);
  even_process_wait(before);
  even_process_wait(meanwhile);
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
      JOB_TEST(what_is_announced_is_notice),
      JOB_TEST(its_first_sigterm_says_nothing_new),
      JOB_TEST(its_second_ends_it_without_waiting),
      JOB_TEST(who_does_not_end_in_time_is_ended),
      JOB_TEST(nor_does_it_where_other_notice_came_first),
      JOB_TEST(a_command_that_ends_while_an_attempt_is_swept_up_is_heard),
      JOB_TEST(a_guardian_that_stands_still_is_not_waited_for),
      JOB_TEST(a_service_that_fails_ends_nothing),
      JOB_TEST(nonsense_is_told_and_ends_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
