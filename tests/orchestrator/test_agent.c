/* Whole jobs: their ends, restarts and leftovers. */
#include "base/fail.h"
#include "job_fixture.h"
#include "orchestrator/aside.h"
#include "os/listener.h"
#include "os/signals.h"
#include "support/clock_ahead.h"
#include "support/fault.h"

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static void all_well_is_zero(void **state) {
  job_fixture *job = *state;
  int code = -1;
  assert_int_equal(job_fixture_run(job, "echo rank $RANK of $WORLD_SIZE", &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_true(job_fixture_saw(job, "line 0 rank 0 of 2|"));
  assert_true(job_fixture_saw(job, "line 1 rank 1 of 2|"));
  assert_true(job_fixture_saw(job, "ended 0 0 0 rank 0 (cpu:0 on "));
  assert_int_equal(strncmp(job->seen.data, "attempt 0|started 0|", 20), 0);
}

static void the_first_failure_ends_the_others(void **state) {
  job_fixture *job = *state;
  int code = -1;
  assert_int_equal(job_fixture_run(job, "[ $RANK = 1 ] && { echo boom >&2; exit 9; }; sleep 600", &code), EVEN_OK);
  assert_int_equal(code, 9);
  const char *cause = strstr(job->seen.data, "ended 1 0 9 ");
  const char *other = strstr(job->seen.data, "ended 0 3 15 "); /* EVEN_RANK_STOPPED_BY_AGENT, SIGTERM */
  assert_true(cause != NULL && other != NULL && cause < other);
  assert_non_null(strstr(cause, "exited with code 9: boom"));
}

static even_status refuse_once_started(void *context) {
  const job_fixture *job = context;
  return job_fixture_saw(job, "line 1 up|") ? even_fail(EVEN_ERR_IN_USE, "the folder is another's") : EVEN_OK;
}

static void who_runs_it_may_end_it_by_an_error(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->check = refuse_once_started;
  job->max_restarts = 3;
  job->hang_seconds = 600; /* whoever looks for hangs is told of each line, until the last */
  const char *script = "trap '' TERM; printf half >&2; echo up; while :; do sleep 1; done";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_ERR_IN_USE);
  assert_string_equal(even_error_last()->what, "the folder is another's");
  assert_true(job_fixture_saw(job, "line 1 half|"));
  assert_false(job_fixture_saw(job, "attempt 1|")); /* and no rank is left: the fixture looks */
}

static const job_fixture *with_unending;
static bool held;
static bool waited_without_end;

static int kill_not_the_first(pid_t pid, int signal) {
  if (pid == -with_unending->pids[0] && signal == SIGKILL) {
    held = true;
    return 0;
  }
  return even_os_real.kill(pid, signal);
}

static int no_descriptor_of_the_first(pid_t pid, unsigned flags) {
  if (held && pid == with_unending->pids[0]) {
    errno = ENOSYS;
    return -1;
  }
  return even_os_real.pidfd_open(pid, flags);
}

static pid_t wait_and_see(pid_t pid, int *status, int options, struct rusage *usage) {
  if (held && pid == with_unending->pids[0] && (options & WNOHANG) == 0) {
    waited_without_end = true;
    (void)even_os_real.kill(pid, SIGKILL);
  } else if (held && pid == with_unending->pids[0]) {
    clock_ahead_add(1000000000u);
  }
  return even_os_real.wait4(pid, status, options, usage);
}

/* As one does that waits for a file server which is gone: the others are killed all the same, and the agent ends. */
static void a_rank_that_cannot_be_ended_holds_up_nobody(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->check = refuse_once_started;
  with_unending = job;
  even_os.kill = kill_not_the_first;
  even_os.pidfd_open = no_descriptor_of_the_first;
  even_os.wait4 = wait_and_see;
  const char *script = "trap '' TERM; echo up; while :; do sleep 1; done";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_ERR_IN_USE);
  assert_true(held);
  assert_false(waited_without_end);
  assert_true(job_fixture_saw(job, "has not ended: ") && job_fixture_saw(job, ": evenstep ends without it|"));
}

static void a_signal_is_128_and_more(void **state) {
  job_fixture *job = *state;
  int code = -1;
  assert_int_equal(job_fixture_run(job, "[ $RANK = 0 ] && kill -SEGV $$; sleep 600", &code), EVEN_OK);
  assert_int_equal(code, 128 + SIGSEGV);
  assert_true(job_fixture_saw(job, "ended 0 1 11 "));
}

static void a_rank_that_ignores_sigterm_is_killed(void **state) {
  job_fixture *job = *state;
  int code = -1;
  const char *script =
      "if [ $RANK = 1 ]; then trap '' TERM; : > $FOLDER/ready; while :; do sleep 1; done; fi; "
      "until [ -e $FOLDER/ready ]; do sleep 0.01; done; exit 4";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 4);
  assert_true(job_fixture_saw(job, "ended 1 3 9 "));
}

/* Attempt 0 begins anew and is killed behind a checkpoint; attempt 1 resumes from the newest whole one. */
static void restarts_from_the_newest_whole_checkpoint(void **state) {
  job_fixture *job = *state;
  char command[256];
  int code = -1;
  job->max_restarts = 3;
  job_fixture_write_checkpoint(job, "step-9");
  job_fixture_write_checkpoint(job, "step-10");
  job_fixture_write_checkpoint(job, "step-11");
  (void)snprintf(command, sizeof command, ": > %s/step-11/model.safetensors", job->folder); /* damaged */
  assert_int_equal(system(command), 0);
  const char *script =
      "echo resume=${EVENSTEP_RESUME##*/} count=$TORCHELASTIC_RESTART_COUNT; "
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; "
      "[ $RANK = 0 ] && sleep 600; "
      "mkdir $FOLDER/checkpoints; mv $FOLDER/step-* $FOLDER/checkpoints; kill -9 $$";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_true(job_fixture_saw(job, "line 1 resume= count=0|"));
  assert_true(job_fixture_saw(job, "line 0 resume=step-10 count=1|"));
  assert_true(job_fixture_saw(job, "notice restart 1 of 3 from "));
  assert_true(job_fixture_saw(job, "attempt 1|"));
}

/* Attempt 0 says who it is and waits to be told to die. */
static const char *const dies_when_told =
    "echo resume=${EVENSTEP_RESUME##*/}; [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; [ $RANK = 0 ] && sleep 600; "
    "echo id=$EVENSTEP_JOB; until [ -e $FOLDER/go ]; do sleep 0.01; done; kill -9 $$";

static void others_write_into_the_folder(job_fixture *job, int rank, const char *line) {
  (void)rank;
  if (strncmp(line, "id=", 3) == 0) {
    job_fixture_write_checkpoint_of(job, "checkpoints/step-10", "loaded by the script", line + 3);
    job_fixture_write_checkpoint_of(job, "checkpoints/step-300", "another", "another job");
    job_fixture_touch(job, "go");
  }
}

static void a_restart_takes_no_other_jobs_checkpoint(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->max_restarts = 1;
  job->on_line = others_write_into_the_folder;
  assert_int_equal(mkdir(job->checkpoints, 0777), 0);
  assert_int_equal(job_fixture_run(job, dies_when_told, &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_true(job_fixture_saw(job, "line 1 resume=|"));
  assert_true(job_fixture_saw(job, "line 1 resume=step-10|"));
}

static void others_go_on_from_the_same(job_fixture *job, int rank, const char *line) {
  (void)rank;
  if (strncmp(line, "id=", 3) == 0) {
    job_fixture_write_checkpoint_of(job, "checkpoints/step-300", "another", "another job");
    job_fixture_write_checkpoint_of(job, "checkpoints/step-7", "mine", "a job that went on from it, too");
    job_fixture_touch(job, "go");
  }
}

static void a_restart_after_auto_takes_what_its_training_had(void **state) {
  job_fixture *job = *state;
  char command[320];
  int code = -1;
  job->max_restarts = 1;
  job->resume = "auto";
  job->on_line = others_go_on_from_the_same;
  assert_int_equal(mkdir(job->checkpoints, 0777), 0);
  job_fixture_write_checkpoint_of(job, "checkpoints/step-4", "mine", "the job before");
  job_fixture_write_checkpoint_of(job, "checkpoints/step-200", "another", "another job");
  job_fixture_write_checkpoint_of(job, "checkpoints/step-5", "mine", "the job before");
  assert_int_equal(job_fixture_run(job, dies_when_told, &code), EVEN_OK);
  assert_int_equal(code, 0);
  const char *second = strstr(job->seen.data, "attempt 1|");
  assert_non_null(second);
  assert_non_null(strstr(second, "line 0 resume=step-5|"));
  (void)snprintf(command, sizeof command, "notice training begins from %s/step-5 (--resume)|", job->checkpoints);
  assert_true(job_fixture_saw(job, command));
  /* and where nothing was there, a restart begins anew rather than from another's */
  (void)snprintf(command, sizeof command, "rm -r %s/go %s/*", job->folder, job->checkpoints);
  assert_int_equal(system(command), 0);
  even_text_clear(&job->seen);
  assert_int_equal(job_fixture_run(job, dies_when_told, &code), EVEN_OK);
  (void)snprintf(command, sizeof command, "notice training begins anew: --resume auto found no checkpoint in %s|",
                 job->checkpoints);
  assert_true(job_fixture_saw(job, command));
  second = strstr(job->seen.data, "attempt 1|");
  assert_non_null(second);
  assert_non_null(strstr(second, "line 0 resume=|"));
}

static void resumes_from_what_the_user_named(void **state) {
  job_fixture *job = *state;
  char path[128];
  int code = -1;
  job->max_restarts = 1;
  job_fixture_write_checkpoint(job, "step-5");
  (void)snprintf(path, sizeof path, "%s/step-5", job->folder);
  job->resume = path;
  const char *script = "echo from ${EVENSTEP_RESUME##*/}; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || kill -9 $$";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 0);
  const char *second = strstr(job->seen.data, "attempt 1|");
  assert_non_null(second);
  assert_non_null(strstr(second, "from step-5")); /* nothing newer was written: the restart begins there again */
  job->resume = "auto";
  assert_int_equal(job_fixture_run(job, "echo nothing=$EVENSTEP_RESUME", &code), EVEN_OK);
  assert_true(job_fixture_saw(job, "line 0 nothing=|"));
  job->resume = "/no/such/checkpoint";
  assert_int_equal(job_fixture_run(job, "true", &code), EVEN_ERR_NOT_FOUND);
}

static void a_damaged_newest_checkpoint_is_passed_over_and_told(void **state) {
  job_fixture *job = *state;
  char command[256];
  int code = -1;
  (void)snprintf(command, sizeof command, "mkdir %s", job->checkpoints);
  assert_int_equal(system(command), 0);
  job_fixture_write_checkpoint(job, "checkpoints/step-5");
  job_fixture_write_checkpoint(job, "checkpoints/step-6");
  (void)snprintf(command, sizeof command, "printf X | dd of=%s/step-6/model.safetensors seek=40 bs=1 conv=notrunc",
                 job->checkpoints);
  assert_int_equal(system(command), 0);
  job->resume = "auto";
  assert_int_equal(job_fixture_run(job, "echo from ${EVENSTEP_RESUME##*/}", &code), EVEN_OK);
  assert_true(job_fixture_saw(job, "line 0 from step-5|"));
  assert_true(job_fixture_saw(job, "notice passed over: checkpoint "));
  assert_true(job_fixture_saw(job, "step-6 is damaged: chunk 0 of model.safetensors"));
  even_text_clear(&job->seen);
  (void)snprintf(command, sizeof command, "rm -r %s/step-5", job->checkpoints);
  assert_int_equal(system(command), 0);
  assert_int_equal(job_fixture_run(job, "echo ran", &code), EVEN_ERR_CORRUPT);
  assert_non_null(strstr(even_error_last()->what, "step-6 is damaged: chunk 0 of model.safetensors"));
  assert_non_null(strstr(even_error_last()->fix, "--resume"));
  assert_false(job_fixture_saw(job, "started"));
}

static int thief = -1;       /* listens where the first attempt's ranks were to meet */
static int meeting_ports[2]; /* of the attempts */

static void takes_the_first_port(job_fixture *job, int rank, const char *line) {
  const char *blank = strchr(line, ' ');
  int attempt = (int)strtol(line, NULL, 10);
  if (rank != 0 || blank == NULL || attempt < 0 || attempt > 1) {
    return;
  }
  meeting_ports[attempt] = (int)strtol(blank, NULL, 10);
  int port = meeting_ports[attempt];
  if (attempt == 0) {
    assert_int_equal(even_listener_open("127.0.0.1", &port, &thief), EVEN_OK);
    job_fixture_touch(job, "taken");
  }
}

/* The ranks fail where somebody has their port, and find another one in the next attempt. */
static void a_stolen_port_costs_one_attempt(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->max_restarts = 1;
  job->restart_always = true;
  job->on_line = takes_the_first_port;
  const char *script =
      "echo $TORCHELASTIC_RESTART_COUNT $MASTER_PORT; [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; "
      "until [ -e $FOLDER/taken ]; do sleep 0.01; done; [ $RANK = 0 ] || sleep 600; echo EADDRINUSE >&2; exit 1";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  even_listener_close(thief);
  assert_int_equal(code, 0);
  assert_true(job_fixture_saw(job, "attempt 1|"));
  assert_true(meeting_ports[0] > 0 && meeting_ports[1] > 0);
  assert_int_not_equal(meeting_ports[0], meeting_ports[1]);
}

static void restarts_end(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->max_restarts = 2;
  assert_int_equal(job_fixture_run(job, "kill -9 $$", &code), EVEN_OK);
  assert_int_equal(code, 128 + SIGKILL);
  assert_true(job_fixture_saw(job, "attempt 2|"));
  assert_false(job_fixture_saw(job, "attempt 3|"));
  assert_true(job_fixture_saw(job, "no restart is left"));
  even_text_clear(&job->seen);
  assert_int_equal(job_fixture_run(job, "exit 3", &code), EVEN_OK); /* a restart would end the same way */
  assert_false(job_fixture_saw(job, "attempt 1|"));
  job->restart_always = true;
  assert_int_equal(job_fixture_run(job, "exit 3", &code), EVEN_OK);
  assert_true(job_fixture_saw(job, "attempt 2|"));
}

static void interrupt_once(job_fixture *job, int rank, const char *text) {
  (void)job;
  (void)rank;
  if (strcmp(text, "up") == 0) {
    assert_int_equal(kill(getpid(), SIGINT), 0);
  }
}

static void an_interrupt_is_130_and_no_restart(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->max_restarts = 3;
  job->on_line = interrupt_once;
  assert_int_equal(
      job_fixture_run(job, "trap 'echo saved; exit 0' INT; [ $RANK = 0 ] && echo up; sleep 600 & wait", &code),
      EVEN_OK);
  assert_int_equal(code, 130);
  assert_false(job_fixture_saw(job, "attempt 1|"));
}

static void interrupt_each_time(job_fixture *job, int rank, const char *text) {
  (void)job;
  (void)rank;
  if (strcmp(text, "up") == 0 || strcmp(text, "stubborn") == 0) {
    assert_int_equal(kill(getpid(), SIGINT), 0);
  }
}

static void a_second_interrupt_kills(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->on_line = interrupt_each_time;
  const char *script =
      "[ $RANK = 1 ] && exec sleep 600; trap 'echo stubborn' INT; trap '' TERM; echo up; "
      "while :; do sleep 1; done";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 130);
  assert_true(job_fixture_saw(job, "killing the ranks"));
  assert_true(job_fixture_saw(job, "ended 0 3 9 "));
}

/* Descendants in sessions of their own, without environment, reparented: all gone when the job is over. */
static void nothing_is_left(void **state) {
  job_fixture *job = *state;
  int code = -1;
  const char *script =
      "setsid sleep 601 & a=$!; env -i /bin/sleep 602 & b=$!; "
      "(setsid sh -c 'echo $$ > $FOLDER/'$RANK'; exec sleep 603' &); "
      "until [ -s $FOLDER/$RANK ]; do sleep 0.01; done; echo pids $a $b $(cat $FOLDER/$RANK)";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 0);
  int checked = 0;
  for (char *at = strstr(job->seen.data, "pids "); at != NULL; at = strstr(at + 1, "pids ")) {
    int pids[3] = {0, 0, 0};
    assert_int_equal(sscanf(at, "pids %d %d %d", &pids[0], &pids[1], &pids[2]), 3);
    for (int i = 0; i < 3; i++) {
      char path[64];
      struct stat facts;
      (void)snprintf(path, sizeof path, "/proc/%d", pids[i]);
      while (waitpid(pids[i], NULL, WNOHANG) > 0) { /* adopted orphans that the sweep killed last */
      }
      assert_int_equal(stat(path, &facts), -1);
      checked++;
    }
  }
  assert_int_equal(checked, 6);
  while (waitpid(-1, NULL, WNOHANG) > 0) {
  }
}

static void a_program_that_cannot_start_is_an_error(void **state) {
  job_fixture *job = *state;
  int code = -1;
  char *const command[] = {(char *)"/no/such/interpreter", NULL};
  const even_agent_params params = {.size = sizeof params,
                                    .devices = &job->list,
                                    .command = command,
                                    .run_folder = job->run_folder,
                                    .telemetry_fd = -1};
  assert_int_equal(even_agent_run(&params, &code), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->what, "rank 0 on cpu:0"));
  const even_agent_params nothing = {.size = sizeof nothing};
  assert_int_equal(even_agent_run(&nothing, &code), EVEN_ERR_ARGUMENT);
}

/* The start of a job with each call failing once: an error or a job that ran, and nothing left. */
static void survives_every_fault(void **state) {
  job_fixture *job = *state;
  double quota[] = {(double)NAN, 0.9};
  job->quota = quota;
  for (long nth = 1; nth < 90; nth++) {
    int code = -1;
    fault_allocation(0);
    fault_os_any(nth, EAGAIN);
    even_status status = job_fixture_run(job, "exit 0", &code);
    long blocks = fault_live_blocks();
    fault_reset();
    even_text_free(&job->seen);
    job->seen = (even_text)EVEN_TEXT_EMPTY;
    assert_true(status != EVEN_OK || code >= 0);
    assert_true(blocks <= 1); /* the observer's own text */
    while (waitpid(-1, NULL, 0) > 0) {
    }
  }
  for (long nth = 1; nth < 400; nth += 7) {
    int code = -1;
    fault_allocation(nth);
    even_status status = job_fixture_run(job, "exit 0", &code);
    fault_reset();
    even_text_free(&job->seen);
    job->seen = (even_text)EVEN_TEXT_EMPTY;
    assert_true(status == EVEN_OK || status == EVEN_ERR_MEMORY);
    while (waitpid(-1, NULL, 0) > 0) {
    }
  }
  job->quota = NULL;
}

static void a_signal_before_the_ranks_start_starts_none(void **state) {
  job_fixture *job = *state;
  int code = 0;
  sigset_t before;
  assert_int_equal(sigprocmask(SIG_SETMASK, NULL, &before), 0);
  assert_int_equal(even_signals_block(), EVEN_OK);
  assert_int_equal(even_signals_end_pending(), 0);
  assert_int_equal(raise(SIGTERM), 0); /* as while a checkpoint is read */
  assert_int_equal(even_signals_end_pending(), SIGTERM);
  assert_int_equal(job_fixture_run(job, "exit 0", &code), EVEN_OK);
  assert_int_equal(code, 128 + SIGTERM);
  assert_false(job_fixture_saw(job, "started"));
  assert_int_equal(even_signals_end_pending(), 0);
  assert_int_equal(sigprocmask(SIG_SETMASK, &before, NULL), 0);
}

static void interrupt_once_aside(job_fixture *job, const char *text) {
  (void)job;
  if (strstr(text, "is set aside") != NULL) {
    assert_int_equal(raise(SIGINT), 0); /* it is not read any more */
  }
}

/* Between two calls of the agent, for the places that take part to change. */
static void a_signal_while_the_job_is_opened_anew_is_not_lost(void **state) {
  job_fixture *job = *state;
  even_aside aside = {.count = 0};
  int code = 0;
  sigset_t before;
  assert_int_equal(sigprocmask(SIG_SETMASK, NULL, &before), 0);
  assert_int_equal(even_signals_block(), EVEN_OK);
  job->aside = &aside;
  job->max_restarts = 3;
  job->on_notice = interrupt_once_aside;
  assert_int_equal(job_fixture_run(job, "[ $RANK = 1 ] && kill -BUS $$; exec sleep 600", &code), EVEN_OK);
  assert_true(aside.changed);
  assert_int_equal(even_signals_end_pending(), SIGINT);
  aside.changed = false;
  job->list.count = 1;
  assert_int_equal(job_fixture_run(job, "exit 0", &code), EVEN_OK);
  assert_int_equal(code, 128 + SIGINT);
  assert_int_equal(even_signals_end_pending(), 0);
  even_aside_close(&aside);
  assert_int_equal(sigprocmask(SIG_SETMASK, &before, NULL), 0);
}

int main(void) {
#define JOB_TEST(test) cmocka_unit_test_setup_teardown(test, job_fixture_setup, job_fixture_teardown)
  const struct CMUnitTest tests[] = {
      JOB_TEST(all_well_is_zero),
      JOB_TEST(the_first_failure_ends_the_others),
      JOB_TEST(who_runs_it_may_end_it_by_an_error),
      JOB_TEST(a_rank_that_cannot_be_ended_holds_up_nobody),
      JOB_TEST(a_signal_is_128_and_more),
      JOB_TEST(a_rank_that_ignores_sigterm_is_killed),
      JOB_TEST(restarts_from_the_newest_whole_checkpoint),
      JOB_TEST(a_restart_takes_no_other_jobs_checkpoint),
      JOB_TEST(a_restart_after_auto_takes_what_its_training_had),
      JOB_TEST(resumes_from_what_the_user_named),
      JOB_TEST(a_damaged_newest_checkpoint_is_passed_over_and_told),
      JOB_TEST(a_stolen_port_costs_one_attempt),
      JOB_TEST(restarts_end),
      JOB_TEST(an_interrupt_is_130_and_no_restart),
      JOB_TEST(a_signal_before_the_ranks_start_starts_none),
      JOB_TEST(a_signal_while_the_job_is_opened_anew_is_not_lost),
      JOB_TEST(a_second_interrupt_kills),
      JOB_TEST(nothing_is_left),
      JOB_TEST(a_program_that_cannot_start_is_an_error),
      JOB_TEST(survives_every_fault),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
