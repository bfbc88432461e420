/* Ranks that end with code 0 while others need them, and such as nobody needs any more. */
#include "job_fixture.h"
#include "os/clock.h"
#include "os/process_stat.h"
#include "support/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* In a script: what another rank does when it ends; then waiting for that end, and until the agent has looked twice. */
#define END "echo $$ > $FOLDER/pid; exit 0; "
#define SEE_IT_END                                                                                   \
  "until [ -s $FOLDER/pid ] && ! kill -0 $(cat $FOLDER/pid) 2>&-; do sleep 0.01; done; echo alone; " \
  "until [ -e $FOLDER/looked ]; do sleep 0.01; done; "

static int ticks;

static int open_job(void **state) {
  ticks = -1;
  return job_fixture_setup(state);
}

static int close_job(void **state) {
  job_fixture_close(*state);
  free(*state);
  return 0;
}

/* "joining", "joined" and "opening" on a line become the event; then the rank finds the file that it waits for. */
static void write_events(job_fixture *job, int rank, const char *text) {
  if (strcmp(text, "joining") == 0) {
    job_fixture_event(job, rank, EVEN_EVENT_JOINING);
    job_fixture_touch(job, rank == 0 ? "joining-0" : "joining-1");
  } else if (strcmp(text, "joined") == 0) {
    job_fixture_event(job, rank, EVEN_EVENT_JOINED);
    job_fixture_touch(job, rank == 0 ? "joined-0" : "joined-1");
  } else if (strcmp(text, "opening") == 0) {
    job_fixture_event_of(job, rank, EVEN_EVENT_OPENING, 1);
    job_fixture_touch(job, rank == 0 ? "opening-0" : "opening-1");
  } else if (strcmp(text, "alone") == 0) {
    ticks = 0;
  }
}

/* The agent has looked twice since a rank saw that it is alone. */
static void count_ticks(job_fixture *job) {
  if (ticks >= 0 && ++ticks == 3) {
    job_fixture_touch(job, "looked");
  }
}

static void one_that_others_wait_for_in_prepare_is_named(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->max_restarts = 1; /* it would end the same way */
  job->on_line = write_events;
  const char *script =
      "if [ $RANK = 0 ]; then echo joining; exec sleep 600; fi; until [ -e $FOLDER/joining-0 ]; do sleep 0.01; done";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 7);
  const char *cause = strstr(job->seen.data, "ended 1 4 0 rank 1 (cpu:1 on ");
  assert_non_null(cause);
  assert_non_null(strstr(cause, "ended with code 0 without es.prepare, where the other ranks wait for it"));
  assert_true(cause < strstr(job->seen.data, "ended 0 3 15 "));
  assert_true(job_fixture_saw(job, "notice not restarted"));
}

static void so_is_one_that_never_came_to_init_process_group(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->on_line = write_events;
  const char *script =
      "if [ $RANK = 0 ]; then echo opening; exec sleep 600; fi; until [ -e $FOLDER/opening-0 ]; do sleep 0.01; done";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 7);
  const char *cause = strstr(job->seen.data, "ended 1 4 0 rank 1 (cpu:1 on ");
  assert_non_null(cause);
  assert_non_null(strstr(cause, "ended with code 0 without init_process_group, where the other ranks wait for it"));
}

/* It ended before the other came to es.prepare: found out when the other comes. */
static void it_may_have_ended_long_before(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->on_line = write_events;
  job->on_tick = count_ticks;
  const char *script = "if [ $RANK = 1 ]; then " END "fi; " SEE_IT_END "echo joining; exec sleep 600";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 7);
  assert_true(job_fixture_saw(job, "ended 1 4 0 rank 1 "));
}

/* Ranks that end at different times, after es.prepare or without it: as under torchrun, all is well. */
static void one_that_nobody_waits_for_may_end(void **state) {
  static const char *const scripts[] = {
      /* neither comes to es.prepare */
      "[ $RANK = 1 ] && { " END "}; ",
      /* both were there: one is done */
      "echo joining; until [ -e $FOLDER/joining-0 -a -e $FOLDER/joining-1 ]; do sleep 0.01; done; echo joined; "
      "until [ -e $FOLDER/joined-0 -a -e $FOLDER/joined-1 ]; do sleep 0.01; done; "
      "[ $RANK = 1 ] && { " END "}; ",
      /* one is a moment late in seeing that all have come */
      "echo joining; until [ -e $FOLDER/joining-0 -a -e $FOLDER/joining-1 ]; do sleep 0.01; done; "
      "[ $RANK = 1 ] && { echo joined; until [ -e $FOLDER/joined-1 ]; do sleep 0.01; done; " END "}; "};
  static const char rest[] = SEE_IT_END "echo whole";
  for (size_t i = 0; i < sizeof scripts / sizeof scripts[0]; i++) {
    int code = -1;
    char script[1024];
    if (i > 0) {
      (void)close_job(state);
      (void)open_job(state);
    }
    job_fixture *job = *state;
    job->on_line = write_events;
    job->on_tick = count_ticks;
    (void)snprintf(script, sizeof script, "%s%s", scripts[i], rest);
    assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
    assert_int_equal(code, 0);
    assert_true(job_fixture_saw(job, "line 0 whole|"));
    assert_true(job_fixture_saw(job, "ended 1 0 0 "));
    /* who watches knows at once that it runs no longer, and why when all have ended */
    const char *gone = strstr(job->seen.data, "gone 1|");
    assert_true(gone != NULL && gone < strstr(job->seen.data, "line 0 alone|"));
  }
}

/* What the ranks of an attempt before wrote is no news of this one. */
static void another_attempt_does_not_count(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->max_restarts = 1;
  job->on_line = write_events;
  job->on_tick = count_ticks;
  const char *script =
      "if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then [ $RANK = 0 ] || exec sleep 600; echo joining; "
      "until [ -e $FOLDER/joining-0 ]; do sleep 0.01; done; kill -9 $$; fi; "
      "[ $RANK = 1 ] && { " END
      "}; "
      "until [ -s $FOLDER/pid ] && ! kill -0 $(cat $FOLDER/pid) 2>&-; do sleep 0.01; done; echo alone; "
      "until [ -e $FOLDER/looked ]; do sleep 0.01; done";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_true(job_fixture_saw(job, "attempt 1|"));
  assert_int_equal(code, 0);
}

#define LOST(words)                                                                        \
  "printf 'Traceback (most recent call last):\\n  File \"t.py\", line 1, in main\\n" words \
  " (EVEN_ERR_PEER_LOST)\\n' >&2; exit 1; "

/* Rank 0 notices first, and ends first: rank 1, slow to end, is let end by itself. */
static void one_that_left_a_step_is_named_though_it_ends_last(void **state) {
  job_fixture *job = *state;
  int code = -1;
  const char *script =
      "echo $$ > $FOLDER/pid-$RANK; until [ -s $FOLDER/pid-0 -a -s $FOLDER/pid-1 ]; do sleep 0.01; done; "
      "if [ $RANK = 0 ]; then " LOST("EvenstepError: rank 1 (process '$(cat $FOLDER/pid-1)') died") "fi; "
      "while kill -0 $(cat $FOLDER/pid-0) 2>&-; do sleep 0.01; done; exit 0";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 7);
  const char *cause = strstr(job->seen.data, "ended 1 4 0 rank 1 (cpu:1 on ");
  assert_non_null(cause);
  assert_non_null(strstr(cause, "ended with code 0 while the others were still training"));
  assert_true(cause < strstr(job->seen.data, "ended 0 0 1 "));
}

static void one_that_failed_is_named_though_it_ends_last(void **state) {
  job_fixture *job = *state;
  int code = -1;
  const char *script =
      "echo $$ > $FOLDER/pid-$RANK; until [ -s $FOLDER/pid-0 -a -s $FOLDER/pid-1 ]; do sleep 0.01; done; "
      "if [ $RANK = 0 ]; then " LOST("RuntimeError: Connection closed by peer") "fi; "
      "while kill -0 $(cat $FOLDER/pid-0) 2>&-; do sleep 0.01; done; exit 9";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 9);
  assert_true(job_fixture_saw(job, "ended 1 0 9 rank 1 "));
}

/* Nobody is at fault that can be seen: the wait for one has an end. */
static void the_wait_for_the_guilty_ends(void **state) {
  job_fixture *job = *state;
  int code = -1;
  const char *script = "if [ $RANK = 0 ]; then " LOST("RuntimeError: Connection closed by peer") "fi; exec sleep 600";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 1);
  assert_true(job_fixture_saw(job, "ended 1 3 15 "));
}

/* Rank 1 is stopped; rank 0 says "failing", waits for that and fails for lack of it. */
#define STANDS                                                                                         \
  "if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then exit 0; fi; "                                          \
  "if [ $RANK = 1 ]; then echo $$ > $FOLDER/pid; kill -STOP $$; exec sleep 600; fi; echo failing $$; " \
  "until [ -s $FOLDER/pid ] && grep -q 'State:.T' /proc/$(cat $FOLDER/pid)/status; "                   \
  "do sleep 0.01; done; " LOST("RuntimeError: rank 1 (process 5) was stopped and stands still")

static void run_with_one_that_stands(job_fixture *job) {
  int code = -1;
  job->max_restarts = 1; /* a stop is worth a restart */
  assert_int_equal(job_fixture_run(job, STANDS, &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_true(job_fixture_saw(job, "notice rank 1 (process "));
  const char *cause = strstr(job->seen.data, "ended 1 ");
  assert_non_null(cause);
  assert_non_null(strstr(cause, "was stopped (SIGSTOP, SIGTSTP), sent from outside, and stood still"));
  assert_true(cause < strstr(job->seen.data, "ended 0 "));
  assert_true(job_fixture_saw(job, "attempt 1|"));
}

/* Nobody waits for the one that stands to end by itself. */
static void one_that_stands_still_is_named(void **state) {
  run_with_one_that_stands(*state);
}

/* The agent looks away until both have come to pass. */
static void wait_for_the_end(job_fixture *job, int rank, const char *text) {
  even_process_stat facts = {.state = 'R'};
  (void)job;
  if (rank == 0 && strncmp(text, "failing ", 8) == 0) {
    pid_t pid = (pid_t)strtol(text + 8, NULL, 10);
    while (even_process_stat_read(pid, &facts) == 0 && facts.state != 'Z') {
      even_clock_sleep_ns(1000000);
    }
  }
}

/* Then the kernel tells of rank 0 first, and of rank 1's stop afterwards. */
static void one_whose_stop_is_told_late_is_named(void **state) {
  job_fixture *job = *state;
  job->on_line = wait_for_the_end;
  run_with_one_that_stands(job);
}

int main(void) {
#define JOB_TEST(test) cmocka_unit_test_setup_teardown(test, open_job, close_job)
  const struct CMUnitTest tests[] = {
      JOB_TEST(one_that_others_wait_for_in_prepare_is_named),
      JOB_TEST(so_is_one_that_never_came_to_init_process_group),
      JOB_TEST(it_may_have_ended_long_before),
      JOB_TEST(one_that_nobody_waits_for_may_end),
      JOB_TEST(another_attempt_does_not_count),
      JOB_TEST(one_that_left_a_step_is_named_though_it_ends_last),
      JOB_TEST(one_that_failed_is_named_though_it_ends_last),
      JOB_TEST(the_wait_for_the_guilty_ends),
      JOB_TEST(one_that_stands_still_is_named),
      JOB_TEST(one_whose_stop_is_told_late_is_named),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
