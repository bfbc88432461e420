/* Jobs whose agent is disturbed: its guardian is killed, its calls fail, a signal comes while it reads. */
#include "base/stop.h"
#include "job_fixture.h"
#include "orchestrator/job.h"
#include "os/calls.h"
#include "os/signals.h"
#include "support/fault.h"

#include <errno.h>
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { MOST_FORKS = 64 };
static pid_t forked[MOST_FORKS]; /* the guardian is the first */
static size_t forks;
static job_fixture *current;

static pid_t remember(void) {
  pid_t pid = even_os_real.fork();
  if (pid > 0 && forks < MOST_FORKS) {
    forked[forks++] = pid;
  }
  return pid;
}

static int open_job(void **state) {
  (void)job_fixture_setup(state);
  current = *state;
  forks = 0;
  even_os.fork = remember;
  return 0;
}

/* It has ended, and the agent has not heard of it yet. */
static void kill_unheard(pid_t pid) {
  siginfo_t facts;
  assert_int_equal(kill(pid, SIGKILL), 0);
  assert_int_equal(waitid(P_PID, (id_t)pid, &facts, WEXITED | WNOWAIT), 0);
}

static void kill_the_first(job_fixture *job, int rank, const char *text) {
  (void)job;
  (void)rank;
  if (strcmp(text, "up") == 0) {
    assert_int_equal(kill(forked[0], SIGKILL), 0);
  }
}

static void let_go_on_when_told(job_fixture *job) {
  if (job_fixture_saw(job, "another one watches now") || job_fixture_saw(job, "notice a busy neighbour of rank 1 ")) {
    job_fixture_touch(job, "told");
  }
}

#define UNTIL_TOLD "echo up; until [ -e $FOLDER/told ]; do sleep 0.01; done; "

static void a_guardian_that_is_killed_is_replaced(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->max_restarts = 1;
  job->on_line = kill_the_first;
  job->on_tick = let_go_on_when_told;
  const char *script =
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; [ $RANK = 1 ] && exec sleep 600; " UNTIL_TOLD "kill -9 $$";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_true(job_fixture_saw(job, "attempt 1|"));
}

static void kill_it_before_the_restart(job_fixture *job, int attempt) {
  (void)job;
  if (attempt == 1) {
    kill_unheard(forked[0]);
  }
}

static void a_guardian_that_is_gone_at_a_restart_is_replaced(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->max_restarts = 1;
  job->on_attempt = kill_it_before_the_restart;
  const char *script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; kill -9 $$";
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_true(job_fixture_saw(job, "another one watches now"));
}

static void a_job_goes_on_where_no_guardian_can_be_had(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->max_restarts = 1;
  job->on_attempt = kill_it_before_the_restart;
  /* the pipes of the two ranks of attempt 0 and of its guardian; then the replacement's */
  const char *script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; kill -9 $$";
  fault_os(FAULT_pipe2, 1 + 3 * 2 + 3 + 1, EMFILE);
  even_os.fork = remember;
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_true(job_fixture_saw(job, "there is no other (a pipe could not be made: Too many open files)"));
}

/* That of two ranks, whose guardian was the first; the next two tries to replace it. */
static pid_t refuse_two_others(void) {
  enum { STARTED = 3, REFUSED = 2 };
  static int tries;
  if (forks == 0) {
    tries = 0;
  }
  if (forks == STARTED && tries < REFUSED) {
    tries++;
    errno = EAGAIN;
    return -1;
  }
  return remember();
}

static void let_go_on_when_guarded(job_fixture *job) {
  if (job_fixture_saw(job, "notice the job has a guardian again (process ")) {
    job_fixture_touch(job, "told");
  }
}

/* A second between any two looks: what is done now and then is done each time. */
static int leaping_clock(clockid_t clock, struct timespec *out) {
  static time_t leap;
  int result = even_os_real.clock_gettime(clock, out);
  out->tv_sec += ++leap;
  return result;
}

/* No process is started, nor agent, that would have one: it is tried again by the clock. */
static void a_guardian_that_could_not_be_replaced_is_tried_again(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->on_line = kill_the_first;
  job->on_tick = let_go_on_when_guarded;
  even_os.fork = refuse_two_others;
  even_os.clock_gettime = leaping_clock;
  assert_int_equal(job_fixture_run(job, "[ $RANK = 1 ] || { " UNTIL_TOLD "}; exit 0", &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_true(job_fixture_saw(job, "there is no other ("));
  assert_true(job_fixture_saw(job, "notice the job has a guardian again (process "));
}

static pid_t fork_nothing(void) {
  errno = EAGAIN;
  return -1;
}

/* Whose ranks stand, since nobody may say that they run: who comes late lets them go in its turn. */
static void a_guardian_that_comes_late_holds_what_was_held(void **state) {
  const even_agent_params params = {.observer = {.notice = NULL}};
  even_job job = {.params = &params, .loop = {.fd = -1}};
  struct sigaction before;
  (void)state;
  assert_int_equal(even_signals_pipe_ignore(&before), EVEN_OK);
  assert_int_equal(even_guardian_start("EVENSTEP_TEST_MARK=none-such", &job.guardian), EVEN_OK);
  assert_int_equal(even_guardian_limit(&job.guardian, 1, UINT64_MAX), EVEN_OK);
  while (!even_job_guardian_holds(&job)) {
    (void)sched_yield();
  }
  const even_process_end end = {.pid = job.guardian.pid, .signal = SIGKILL};
  kill_unheard(end.pid);
  even_os.fork = fork_nothing;
  even_job_guard_ended(&job, &end);
  assert_int_equal(job.guardian.pid, -1);
  even_job_guard_again(&job);
  assert_int_equal(job.guardian.pid, -1);
  even_os.fork = even_os_real.fork;
  even_job_guard_again(&job);
  assert_true(job.guardian.pid >= 0);
  assert_true(even_job_guardian_holds(&job));
  even_job_guard_close(&job);
  even_signals_pipe_restore(&before);
}

static int fails_beside_a_dead_guardian(int epoll, struct epoll_event *events, int count, int timeout_ms) {
  (void)epoll;
  (void)events;
  (void)count;
  (void)timeout_ms;
  kill_unheard(forked[0]);
  errno = EIO;
  return -1;
}

static void the_error_is_known_after_the_cleaning_up(void **state) {
  job_fixture *job = *state;
  int code = -1;
  even_os.epoll_wait = fails_beside_a_dead_guardian;
  assert_int_equal(job_fixture_run(job, "exec sleep 600", &code), EVEN_ERR_SYSTEM);
  assert_int_equal(even_error_last()->status, EVEN_ERR_SYSTEM);
  assert_non_null(strstr(even_error_last()->what, "Input/output error"));
}

static pid_t reaps_nothing(pid_t pid, int *status, int options, struct rusage *usage) {
  if (pid == -1) {
    errno = EINVAL;
    return -1;
  }
  return even_os_real.wait4(pid, status, options, usage);
}

static void clear_the_record(job_fixture *job) {
  (void)job;
  even_error_clear(); /* as the monitor does, whose looks may fail */
}

static void the_error_is_known_after_a_tick(void **state) {
  job_fixture *job = *state;
  int code = -1;
  job->on_tick = clear_the_record;
  even_os.wait4 = reaps_nothing;
  even_os.clock_gettime = leaping_clock;
  assert_int_equal(job_fixture_run(job, "[ $RANK = 1 ] && exit 1; exec sleep 600", &code), EVEN_ERR_SYSTEM);
  assert_int_equal(even_error_last()->status, EVEN_ERR_SYSTEM);
  assert_non_null(strstr(even_error_last()->what, "children could not be waited for"));
}

static bool signalled;

/* SIGTERM comes while the checkpoints are read for a restart. */
static bool asks(void) {
  if (!signalled && job_fixture_saw(current, "ended 1 ")) {
    signalled = true;
    assert_int_equal(raise(SIGTERM), 0);
  }
  return even_signals_end_pending() != 0;
}

static void a_signal_while_a_restart_reads_ends_as_that_signal(void **state) {
  job_fixture *job = *state;
  int code = -1;
  signalled = false;
  job->max_restarts = 1;
  job_fixture_write_checkpoint(job, "step-9");
  const char *script =
      "[ $RANK = 0 ] && exec sleep 600; mkdir $FOLDER/checkpoints; mv $FOLDER/step-9 $FOLDER/checkpoints; kill -9 $$";
  even_stop_when(asks);
  assert_int_equal(job_fixture_run(job, script, &code), EVEN_OK);
  even_stop_when(NULL);
  assert_true(signalled);
  assert_int_equal(code, 128 + SIGTERM);
  assert_false(job_fixture_saw(job, "attempt 1|"));
  assert_int_equal(even_signals_end_pending(), 0);
}

static int makes_no_groups(const char *path, mode_t mode) {
  if (strstr(path, "-rank-") != NULL) {
    errno = EACCES;
    return -1;
  }
  return even_os_real.mkdir(path, mode);
}

static void kill_the_neighbour(job_fixture *job, int rank, const char *text) {
  (void)job;
  (void)rank;
  if (strcmp(text, "up") == 0) {
    assert_int_equal(kill(forked[1], SIGKILL), 0);
  }
}

static size_t strangers_hit;

static int watched_kill(pid_t pid, int number) {
  strangers_hit += pid == forked[1];
  return even_os_real.kill(pid, number);
}

/* Its number may be another's once it was reaped. */
static void a_neighbour_that_ends_is_told_and_forgotten(void **state) {
  job_fixture *job = *state;
  int code = -1;
  double quota[] = {(double)NAN, 0.5};
  int32_t cpu = sched_getcpu();
  job->quota = quota;
  job->devices[1].cpus = &cpu;
  job->devices[1].cpu_count = 1;
  job->on_line = kill_the_neighbour;
  job->on_tick = let_go_on_when_told;
  strangers_hit = 0;
  even_os.mkdir = makes_no_groups;
  even_os.kill = watched_kill;
  assert_int_equal(job_fixture_run(job, "[ $RANK = 0 ] || { " UNTIL_TOLD "}", &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_int_equal(strangers_hit, 0);
}

enum { MANY = 24 };

static even_status run_many(const job_fixture *job, const char *script, even_agent_observer observer, int *code) {
  even_device devices[MANY];
  const even_device_list list = {devices, MANY};
  char *const command[] = {(char *)"sh", (char *)"-c", (char *)(uintptr_t)script, NULL};
  for (int i = 0; i < MANY; i++) {
    devices[i] = job->devices[0];
  }
  const even_agent_params params = {.size = sizeof params,
                                    .devices = &list,
                                    .command = command,
                                    .run_folder = job->run_folder,
                                    .telemetry_fd = -1,
                                    .observer = observer};
  return even_agent_run(&params, code);
}

static void count_lines(void *context, int rank, bool error, const char *text, size_t length) {
  (void)rank;
  (void)error;
  *(int *)context += length == 2 && strncmp(text, "40", 2) == 0;
}

/* The agent's limit is raised where the ranks need it; they themselves have the one that was. */
static void many_ranks_fit_below_a_low_limit(void **state) {
  struct rlimit before;
  int code = -1;
  int lines = 0;
  assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
  const struct rlimit low = {.rlim_cur = 40, .rlim_max = before.rlim_max};
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
  const even_agent_observer observer = {.context = &lines, .line = count_lines};
  even_status status = run_many(*state, "ulimit -n", observer, &code);
  struct rlimit after;
  assert_int_equal(getrlimit(RLIMIT_NOFILE, &after), 0);
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
  assert_int_equal(status, EVEN_OK);
  assert_int_equal(code, 0);
  assert_int_equal(lines, MANY);
  assert_int_equal(after.rlim_cur, 40);
}

static int hard_limit_of_64(int resource, struct rlimit *out) {
  int result = even_os_real.getrlimit(resource, out);
  out->rlim_cur = 40;
  out->rlim_max = 64;
  return result;
}

static void ranks_that_cannot_fit_are_refused_at_once(void **state) {
  int code = -1;
  even_os.getrlimit = hard_limit_of_64;
  assert_int_equal(run_many(*state, "true", (even_agent_observer){.context = NULL}, &code), EVEN_ERR_SYSTEM);
  assert_non_null(strstr(even_error_last()->what, "24 ranks: "));
  assert_non_null(strstr(even_error_last()->what, "no more than 64"));
  assert_non_null(strstr(even_error_last()->fix, "ulimit -Hn"));
  assert_int_equal(forks, 0);
}

static struct rlimit low_limit = {.rlim_cur = 40, .rlim_max = 180};

static int get_low_limit(int resource, struct rlimit *out) {
  (void)resource;
  *out = low_limit;
  return 0;
}

static int set_low_limit(int resource, const struct rlimit *limit) {
  (void)resource;
  low_limit.rlim_cur = limit->rlim_cur;
  return 0;
}

static void count_tight_notices(void *context, const char *text) {
  *(int *)context += strstr(text, "leaves little room beside 24 ranks") != NULL;
}

/* The hard limit holds the ranks, and not all that the page may take beside them. */
static void ranks_that_just_fit_run_with_a_notice(void **state) {
  int code = -1;
  int notices = 0;
  even_os.getrlimit = get_low_limit;
  even_os.setrlimit = set_low_limit;
  const even_agent_observer observer = {.context = &notices, .notice = count_tight_notices};
  assert_int_equal(run_many(*state, "true", observer, &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_int_equal(notices, 1);
  assert_int_equal(low_limit.rlim_cur, 40);
}

int main(void) {
#define JOB_TEST(test) cmocka_unit_test_setup_teardown(test, open_job, job_fixture_teardown)
  const struct CMUnitTest tests[] = {
      JOB_TEST(a_guardian_that_is_killed_is_replaced),
      JOB_TEST(a_guardian_that_is_gone_at_a_restart_is_replaced),
      JOB_TEST(a_job_goes_on_where_no_guardian_can_be_had),
      JOB_TEST(a_guardian_that_could_not_be_replaced_is_tried_again),
      JOB_TEST(a_guardian_that_comes_late_holds_what_was_held),
      JOB_TEST(the_error_is_known_after_the_cleaning_up),
      JOB_TEST(the_error_is_known_after_a_tick),
      JOB_TEST(a_signal_while_a_restart_reads_ends_as_that_signal),
      JOB_TEST(a_neighbour_that_ends_is_told_and_forgotten),
      JOB_TEST(many_ranks_fit_below_a_low_limit),
      JOB_TEST(ranks_that_cannot_fit_are_refused_at_once),
      JOB_TEST(ranks_that_just_fit_run_with_a_notice),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
