/* Restarts that count: those in a row since the job has last come further. */
#include "orchestrator/restarts.h"

#include "orchestrator/job.h"
#include "orchestrator/legacy.h"
#include "orchestrator/pace.h"
#include "os/clock.h"

#include "job_fixture.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static void only_what_is_further_counts_anew(void **state) {
  even_restarts restarts = {.made = 0};
  (void)state;
  assert_false(even_restarts_reach(&restarts, 0, -1));
  assert_false(even_restarts_reach(&restarts, 0, 0));
  assert_true(even_restarts_reach(&restarts, 0, 100)); /* what the job begins from */
  assert_int_equal(even_restarts_count(&restarts, 3), 3);
  assert_false(even_restarts_reach(&restarts, 3, 100)); /* made again */
  assert_false(even_restarts_reach(&restarts, 3, 90));  /* the newest was damaged */
  assert_false(even_restarts_reach(&restarts, 3, -1));
  assert_true(even_restarts_reach(&restarts, 3, 101));
  assert_int_equal(even_restarts_count(&restarts, 3), 0);
  assert_int_equal(even_restarts_count(&restarts, 4), 1);
}

static void a_restart_is_named_by_its_row_and_by_all(void **state) {
  even_restarts restarts = {.made = 0};
  char words[96];
  (void)state;
  even_restarts_name(&restarts, 2, 3, words, sizeof words);
  assert_string_equal(words, "restart 2 of 3");
  static const struct {
    int made;
    const char *words;
  } cases[] = {{2, "restart 1 of 3, the 2nd in all,"},   {3, "restart 1 of 3, the 3rd in all,"},
               {9, "restart 1 of 3, the 9th in all,"},   {11, "restart 1 of 3, the 11th in all,"},
               {21, "restart 1 of 3, the 21st in all,"}, {112, "restart 1 of 3, the 112th in all,"}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    restarts.made = cases[i].made - 1;
    even_restarts_name(&restarts, cases[i].made, 3, words, sizeof words);
    assert_string_equal(words, cases[i].words);
  }
}

static void what_fails_early_again_and_again_is_paused(void **state) {
  const uint64_t second_ns = 1000000000u;
  static const uint64_t pauses[] = {0, 1, 2, 4, 8, 16, 32, 60, 60};
  even_restarts restarts = {.made = 0};
  (void)state;
  for (size_t i = 0; i < sizeof pauses / sizeof pauses[0]; i++) {
    assert_true(even_restarts_pause_ns(&restarts, i * second_ns) == pauses[i] * second_ns);
    (void)even_restarts_reach(&restarts, (int)i, (int64_t)i); /* also where each of them comes further */
  }
  restarts.short_lived = 2000000000;
  assert_true(even_restarts_pause_ns(&restarts, 0) == 60 * second_ns);
  assert_true(even_restarts_pause_ns(&restarts, 60 * second_ns) == 0);
  assert_true(even_restarts_pause_ns(&restarts, 0) == 0); /* again the first */
  assert_true(even_restarts_pause_ns(&restarts, 0) == second_ns);
}

/* What rank 1 says it has written is there before it goes on. */
static void write_checkpoint(job_fixture *job, int rank, const char *text) {
  char name[64];
  char at[64];
  int step = 0;
  if (rank != 1 || sscanf(text, "at %d", &step) != 1) {
    return;
  }
  (void)snprintf(name, sizeof name, "checkpoints/step-%d", step);
  (void)snprintf(at, sizeof at, "{\"step\": %d}", step);
  job_fixture_write_checkpoint_in(job, name, at);
  (void)snprintf(name, sizeof name, "go-%d", step);
  job_fixture_touch(job, name);
}

/* Attempts 0 to 3 come to steps 1 to 4 and are killed; all that follow come no further. */
static void a_job_that_comes_further_is_restarted_again_and_again(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->max_restarts = 2;
  job->on_line = write_checkpoint;
  const char *script =
      "n=$((TORCHELASTIC_RESTART_COUNT + 1)); [ $n -gt 9 ] && exit 0; [ $RANK = 0 ] && exec sleep 600; "
      "[ $n -lt 5 ] && { mkdir -p $FOLDER/checkpoints; echo at $n; until [ -e $FOLDER/go-$n ]; do sleep 0.01; done; }; "
      "kill -9 $$";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 128 + SIGKILL);
  assert_true(job_fixture_saw(job, "attempt 5|"));
  assert_false(job_fixture_saw(job, "attempt 6|"));
  int firsts = 0;
  for (const char *at = job->seen.data; (at = strstr(at, "notice restart 1 of 2")) != NULL; at++) {
    firsts++;
  }
  assert_int_equal(firsts, 4);
  assert_true(job_fixture_saw(job, "notice restart 1 of 2 from "));
  assert_true(job_fixture_saw(job, "notice restart 1 of 2, the 4th in all, from "));
  assert_true(job_fixture_saw(job, "notice restart 2 of 2, the 5th in all, from "));
  assert_true(job_fixture_saw(job, "notice no restart is left (--max-restarts 2)"));
}

/* Its last attempt fails when the checkpoint that it began from is no more. */
static void where_no_restart_is_left_the_rank_ends_the_job(void **state) {
  job_fixture *job = *state;
  char named[96];
  int code = -1;
  job_fixture_write_checkpoint(job, "named");
  (void)snprintf(named, sizeof named, "%s/named", job->folder);
  job->resume = named;
  job->max_restarts = 1;
  const char *script =
      "[ $RANK = 0 ] && exec sleep 600; [ $TORCHELASTIC_RESTART_COUNT = 1 ] && rm -r $FOLDER/named; kill -9 $$";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 128 + SIGKILL);
  assert_true(job_fixture_saw(job, "notice restart 1 of 1"));
  assert_true(
      job_fixture_saw(job, "notice no restart is left (--max-restarts 1), and no newer checkpoint was found: "));
}

static void keep_notice(void *context, const char *text) {
  (void)snprintf(context, 160, "%s", text);
}

static void an_announced_end_of_this_machine_ends_a_pause(void **state) {
  char told[160] = "";
  even_agent_params params = {
      .notice_seconds = 60, .notice_from = "exec:echo 42", .observer = {.context = told, .notice = keep_notice}};
  even_job job = {.params = &params, .guardian = {.pid = -1, .pipe = -1}, .pause_ns = 600000000000u};
  int code = -1;
  (void)state;
  assert_int_equal(even_loop_open(&job.loop), EVEN_OK);
  assert_int_equal(even_pace_wait(&job), EVEN_ERR_INTERRUPTED);
  even_job_drain_close(&job);
  even_guardian_stop(&job.guardian); /* of the command that was asked */
  even_loop_close(&job.loop);
  assert_non_null(strstr(told, "exec announces the machine's end (exit code 0): no ranks run, and the training has "));
  assert_true(even_job_ended_between(&job, &code));
  assert_int_equal(code, EVEN_SAVED_AND_ENDED);
}

static void a_pause_is_told_and_ends_with_the_job(void **state) {
  char told[160] = "";
  even_agent_params params = {.observer = {.context = told, .notice = keep_notice}};
  even_job job = {.params = &params};
  sigset_t ending;
  sigset_t before;
  int number = 0;
  (void)state;
  even_pace_begin(&job);
  for (int i = 0; i < 4; i++) {
    even_pace_restart(&job); /* tests, and whoever did not ask for it, do not wait */
    assert_int_equal(job.pause_ns, 0);
  }
  params.paced = true;
  even_pace_restart(&job);
  assert_int_equal(job.pause_ns, 0);
  assert_string_equal(told, "");
  even_pace_restart(&job);
  assert_int_equal(job.pause_ns, 1000000000);
  assert_non_null(strstr(told, "the next one begins in 1 s"));
  job.pause_ns = 1000000;
  uint64_t since = even_clock_ns();
  assert_int_equal(even_pace_wait(&job), EVEN_OK);
  assert_true(even_clock_ns() - since >= 1000000);
  assert_int_equal(job.pause_ns, 0);
  (void)sigemptyset(&ending);
  (void)sigaddset(&ending, SIGTERM);
  assert_int_equal(sigprocmask(SIG_BLOCK, &ending, &before), 0);
  assert_int_equal(raise(SIGTERM), 0);
  job.pause_ns = UINT64_MAX / 4;
  assert_int_equal(even_pace_wait(&job), EVEN_ERR_INTERRUPTED);
  assert_int_equal(sigwait(&ending, &number), 0); /* it is still there for who ends the job */
  assert_int_equal(sigprocmask(SIG_SETMASK, &before, NULL), 0);
}

/* With no checkpoint, of which a script's own error would be none; told apart by its words alone. */
static void an_error_of_the_place_is_worth_a_restart(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->max_restarts = 1;
  const char *script =
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; [ $RANK = 0 ] && exec sleep 600; "
      "echo 'Traceback (most recent call last):' >&2; echo '  File \"train.py\", line 3, in <module>' >&2; "
      "echo 'torch.AcceleratorError: CUDA error: an illegal memory access was encountered' >&2; exit 1";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_true(job_fixture_saw(job, "notice restart 1 of 1"));
}

/* In the process that starts agents, which knows what the killed one has seen. */
static void agents_count_anew_where_the_training_went_on(void **state) {
  even_legacy legacy;
  even_job job = {.attempt = 3, .planned = 1, .restarts = {.since = 100}};
  even_rank_progress ranks[2] = {{.stepped = true, .last_step = 120, .saved = 100},
                                 {.stepped = true, .last_step = 119}};
  even_progress progress = {.ranks = ranks, .count = 2};
  (void)state;
  assert_int_equal(even_legacy_open(&legacy), EVEN_OK);
  assert_int_equal(even_legacy_leave(&legacy, &job), EVEN_OK);
  assert_false(even_legacy_advanced(&legacy, true));
  even_legacy_progress(&legacy, &progress);
  assert_true(even_legacy_advanced(&legacy, true));
  assert_false(even_legacy_advanced(&legacy, true));
  assert_int_equal(even_legacy_restarts(&legacy), 2); /* the checkpoint is the one that it began from */
  ranks[1].last_step = 130;
  even_legacy_progress(&legacy, &progress);
  assert_false(even_legacy_advanced(&legacy, false)); /* its ranks are gone, and what they made with them */
  ranks[0].saved = 125;
  even_legacy_progress(&legacy, &progress);
  assert_true(even_legacy_advanced(&legacy, false));
  assert_int_equal(even_legacy_restarts(&legacy), 0);
  even_legacy_close(&legacy);
}

int main(void) {
#define JOB_TEST(test) cmocka_unit_test_setup_teardown(test, job_fixture_setup, job_fixture_teardown)
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(only_what_is_further_counts_anew),
      cmocka_unit_test(a_restart_is_named_by_its_row_and_by_all),
      cmocka_unit_test(what_fails_early_again_and_again_is_paused),
      cmocka_unit_test(agents_count_anew_where_the_training_went_on),
      cmocka_unit_test(an_announced_end_of_this_machine_ends_a_pause),
      cmocka_unit_test(a_pause_is_told_and_ends_with_the_job),
      JOB_TEST(where_no_restart_is_left_the_rank_ends_the_job),
      JOB_TEST(a_job_that_comes_further_is_restarted_again_and_again),
      JOB_TEST(an_error_of_the_place_is_worth_a_restart),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
