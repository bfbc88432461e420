/* Ranks that are stopped or hang while others wait for them, without agents: rank 1 is a real process, rank 3 another
 * host's. */
#include "orchestrator/boards.h"

#include "base/fail.h"
#include "orchestrator/job_attempt.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/guardian.h"
#include "os/process.h"
#include "os/process_stat.h"

#include "job_alone.h"

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum { RANKS = 4, STOPPED = 1, THERE = 3 };

typedef struct bench {
  even_job job;
  even_agent_params params;
  even_job_rank ranks[RANKS];
  int snapshots[RANKS];
  size_t order[RANKS];
  even_device each_device[RANKS];
  even_device_list devices;
  even_hosts hosts;
  even_host_agent agents[2];
  even_link link;
  even_generation *view;
  even_text said; /* to the user: "text|text|" */
} bench;

static bench own;
static pid_t child;
static pid_t killed; /* a process group; 0: none */

static void note(void *context, const char *text) {
  even_text_format(context, "%s|", text);
}

static int note_kill(pid_t pid, int number) {
  killed = number == SIGKILL && pid < 0 ? -pid : killed;
  return pid == -child || pid == child ? even_os_real.kill(child, number) : 0;
}

static bool stands(void) {
  even_process_stat facts;
  return even_process_stat_read(child, &facts) == 0 && facts.state == 'T';
}

static void stop(void) {
  assert_int_equal(kill(child, SIGSTOP), 0);
  while (!stands()) {
  }
}

static even_status open_bench(void) {
  even_text_free(&own.said);
  memset(&own, 0, sizeof own);
  own.devices = (even_device_list){.items = own.each_device, .count = RANKS};
  own.params = (even_agent_params){.shrink = true,
                                   .stop_grace_seconds = 1e-9,
                                   .stop_seconds = 1e-9,
                                   .devices = &own.devices,
                                   .observer = {.context = &own.said, .notice = note}};
  own.link = (even_link){.fd = -1, .peer = "10.79.0.2"};
  own.agents[1] =
      (even_host_agent){.index = 1, .name = "there", .link = &own.link, .first = THERE, .count = 1, .busy = true};
  own.hosts = (even_hosts){.agents = own.agents, .count = 2};
  own.job = (even_job){.params = &own.params,
                       .ranks = own.ranks,
                       .count = RANKS,
                       .local = THERE,
                       .alive = RANKS,
                       .order = own.order,
                       .host = "here",
                       .groups = 2,
                       .most_groups = 2,
                       .master_address = "10.79.0.1",
                       .hosts = &own.hosts,
                       .snapshots = own.snapshots,
                       .generation_fd = -1,
                       .oom = {.kernel_log = -1}};
  for (size_t i = 0; i < RANKS; i++) {
    own.ranks[i].alive = true;
    own.ranks[i].elsewhere = i >= THERE;
  }
  own.ranks[STOPPED].pid = child;
  return job_alone_begin(&own.job, -1, &own.view);
}

static int set_up(void **state) {
  (void)state;
  killed = 0;
  child = fork();
  if (child == 0) {
    for (;;) {
      (void)pause();
    }
  }
  even_os.kill = note_kill;
  return child > 0 && open_bench() == EVEN_OK ? 0 : -1;
}

static int tear_down(void **state) {
  (void)state;
  even_os = even_os_real;
  (void)kill(child, SIGKILL);
  (void)waitpid(child, NULL, 0);
  even_generation_close(own.view);
  even_job_generations_close(&own.job);
  even_progress_close(&own.job.progress);
  even_link_close(&own.link);
  even_text_free(&own.said);
  return 0;
}

static const char *said(void) {
  return even_text_string(&own.said);
}

static void turn(int times) {
  for (int i = 0; i < times; i++) {
    even_job_shrink_tick(&own.job);
  }
}

static void a_stopped_rank_is_ended_when_others_wait_for_it(void **state) {
  (void)state;
  stop();
  turn(3);
  assert_int_equal(killed, 0); /* nobody waits for it */
  even_generation_doubt(own.view, 0, 0);
  turn(3);
  assert_int_equal(killed, child);
  assert_true(own.ranks[STOPPED].stood_still);
  assert_non_null(strstr(said(), "rank 1 still stands, and the others wait for it: it is ended"));
  assert_int_equal(own.job.stage, EVEN_JOB_RUNS);
  const even_process_end end = {.pid = child, .signal = SIGKILL};
  even_job_rank_ended(&own.job, &own.ranks[STOPPED], &end);
  assert_int_equal(even_generation_number(own.view), 1);
  assert_false(even_generation_has(own.view, STOPPED, 1));
  assert_true(even_job_facts(&own.job, STOPPED).stood_still);
}

static void it_has_its_time(void **state) {
  (void)state;
  own.params.stop_seconds = 1e6;
  stop();
  even_generation_doubt(own.view, 0, 0);
  turn(20);
  assert_int_equal(killed, 0);
  assert_true(own.ranks[STOPPED].awaited_ns != 0);
}

/* Rank 0 waits between two steps, where no call fails; then one has failed, for another reason. */
static void nobody_is_ended_whose_grace_is_for_ever(void **state) {
  (void)state;
  stop();
  even_generation_stand(own.view, 0, 0);
  own.params.stop_grace_seconds = 1e6;
  turn(3);
  assert_int_equal(killed, 0);
  own.params.stop_grace_seconds = (double)INFINITY;
  own.ranks[STOPPED].awaited_ns = 1; /* as long as the machine runs */
  turn(3);
  assert_int_equal(killed, 0);
  even_generation_doubt(own.view, 0, 0);
  turn(3);
  assert_int_equal(killed, 0);
  assert_false(even_generation_refused(own.view));
  own.params.stop_grace_seconds = 1e-9;
  turn(3);
  assert_int_equal(killed, child);
}

static void who_goes_on_in_time_is_not_lost(void **state) {
  even_process_end end = {.pid = -1};
  bool any = true;
  (void)state;
  own.params.stop_seconds = 1e6;
  stop();
  while (even_process_reap(&end, &any) == EVEN_OK && !any) {
  }
  assert_true(end.stopped && end.pid == child);
  even_job_rank_stopped(&own.job, &own.ranks[STOPPED], end.signal);
  even_generation_doubt(own.view, 0, 0);
  turn(2);
  assert_int_equal(kill(child, SIGCONT), 0);
  do {
    assert_int_equal(even_process_reap(&end, &any), EVEN_OK);
  } while (!any);
  assert_true(end.continued && !end.stopped && end.pid == child);
  even_job_rank_continues(&own.job, &own.ranks[STOPPED]);
  turn(2);
  assert_int_equal(killed, 0);
  assert_int_equal(even_generation_number(own.view), 1); /* once */
  for (int i = 0; i < RANKS; i++) {
    assert_true(even_generation_has(own.view, i, 1));
  }
  assert_non_null(
      strstr(said(), "generation 1: the stopped rank goes on, and the step under way is made again by all|"));
}

static void who_was_ended_and_is_not_buried_yet_does_not_go_on(void **state) {
  even_process_stat facts;
  (void)state;
  stop();
  even_job_rank_stopped(&own.job, &own.ranks[STOPPED], SIGSTOP);
  even_generation_doubt(own.view, 0, 0);
  turn(3);
  assert_int_equal(killed, child);
  do {
    assert_int_equal(even_process_stat_read(child, &facts), 0);
  } while (facts.state != 'Z');
  turn(2);
  assert_int_equal(even_generation_number(own.view), 0);
  assert_null(strstr(said(), "goes on"));
}

static void a_failed_call_alone_changes_nothing(void **state) {
  (void)state;
  even_generation_doubt(own.view, 0, 0); /* nobody stands, nor has stood: the ranks give up by themselves */
  turn(5);
  assert_int_equal(even_generation_number(own.view), 0);
  assert_int_equal(killed, 0);
  assert_false(even_generation_refused(own.view));
}

static void where_they_cannot_go_on_they_hear_so(void **state) {
  (void)state;
  even_generation_say(own.view, 2, "its data set is a stream");
  stop();
  even_generation_doubt(own.view, 0, 0);
  turn(3);
  assert_int_equal(killed, 0);
  assert_true(even_generation_refused(own.view));
  assert_non_null(strstr(said(), "cannot go on without the rank that stands still: rank 2: its data set is a stream|"));
}

/* As others wait in a call before es.prepare. */
static void all_but_one_wait_early(int not_yet) {
  for (int i = 0; i < RANKS; i++) {
    even_generation_say_early(own.view, i, i == not_yet ? 0 : 1);
    own.job.progress.ranks[i].joined = true;
  }
}

static void they_hear_at_once_of_one_in_its_own_code_before_prepare(void **state) {
  (void)state;
  all_but_one_wait_early(STOPPED);
  stop();
  even_generation_doubt(own.view, 0, 0);
  turn(1);
  assert_int_equal(killed, 0);
  assert_true(own.ranks[STOPPED].awaited_ns != 0);
  turn(1); /* stopped as it is it says nothing more */
  assert_int_equal(killed, 0);
  assert_true(even_generation_refused(own.view));
  assert_non_null(strstr(said(), "without the rank that stands still: rank 1: it was in the script's own code"));
}

static void who_says_nothing_of_it_is_not_waited_for_for_ever(void **state) {
  (void)state;
  all_but_one_wait_early(2);
  stop();
  even_generation_doubt(own.view, 0, 0);
  turn(3);
  assert_int_equal(killed, 0);
  assert_false(even_generation_refused(own.view)); /* rank 2 may come to the call, too */
  own.ranks[STOPPED].awaited_ns = 1;               /* long ago */
  turn(1);
  assert_int_equal(killed, 0);
  assert_true(even_generation_refused(own.view));
  assert_non_null(strstr(said(), "without the rank that stands still: rank 2: it is not training yet"));
}

static void the_least_count_who_would_be_left(void **state) {
  (void)state;
  own.params.least_ranks = RANKS;
  stop();
  even_generation_doubt(own.view, 0, 0);
  turn(3);
  assert_int_equal(killed, 0);
  assert_true(even_generation_refused(own.view));
  assert_non_null(strstr(said(), "3 are left, and --min-ranks is 4|"));
  assert_true(own.ranks[STOPPED].alive);
}

static void another_host_ends_its_own(void **state) {
  (void)state;
  own.params.stop_seconds = 1e6;
  even_job_rank_stopped(&own.job, &own.ranks[THERE], SIGSTOP); /* as its agent says */
  even_generation_doubt(own.view, 0, 0);
  turn(2);
  assert_true(own.ranks[THERE].awaited_ns != 0);
  own.params.stop_seconds = 1e-9;
  turn(1);
  assert_int_equal(killed, 0);
  assert_true(own.ranks[THERE].awaited_ns == 0 &&
              own.ranks[THERE].alive); /* asked: its end, or that it goes on, comes */
  assert_non_null(strstr(said(), "rank 3 still stands, and the others wait for it: it is ended"));
  even_job_rank_continues(&own.job, &own.ranks[THERE]); /* it went on meanwhile there */
  turn(1);
  assert_int_equal(even_generation_number(own.view), 1);
  assert_true(even_generation_has(own.view, THERE, 1));
}

static void who_is_to_be_ended_and_goes_on_lives(void **state) {
  (void)state;
  even_job_end_alone(&own.job, STOPPED, true); /* the leader's word came too late */
  assert_int_equal(killed, 0);
  stop();
  even_job_end_alone(&own.job, STOPPED, true);
  assert_int_equal(killed, child);
}

/* Rank 0 waits for all to come together; the others have not come. */
static void one_waits_for_all(void) {
  own.job.progress.ranks[0].joining = true;
  even_job_rank_stopped(&own.job, &own.ranks[STOPPED], SIGSTOP);
}

static void who_stands_before_all_have_come_is_ended_when_others_wait(void **state) {
  (void)state;
  stop();
  even_job_rank_stopped(&own.job, &own.ranks[STOPPED], SIGSTOP);
  even_job_stands_at_start(&own.job);
  even_job_stands_at_start(&own.job);
  assert_int_equal(killed, 0); /* nobody waits */
  one_waits_for_all();
  own.params.stop_seconds = 1e6;
  even_job_stands_at_start(&own.job);
  assert_int_equal(killed, 0); /* it has its time */
  own.params.stop_seconds = 1e-9;
  even_job_stands_at_start(&own.job);
  assert_int_equal(killed, child);
  assert_non_null(
      strstr(said(), "rank 1 still stands, and the others wait for all ranks to come together: it is ended|"));
  const even_process_end end = {.pid = child, .signal = SIGKILL};
  even_generation_say(own.view, 2, "it has not come");
  even_job_rank_ended(&own.job, &own.ranks[STOPPED], &end);
  assert_int_equal(own.job.stage, EVEN_JOB_TERMINATED);
  assert_true(even_job_facts(&own.job, STOPPED).stood_still); /* what it was ended for */
}

/* Rank 0 waits in torch's init_process_group for all. */
static void one_opens(int64_t time) {
  own.job.progress.ranks[0].opening = time;
  own.job.progress.ranks[0].opened = time - 1;
}

static void who_stands_before_a_group_of_the_scripts_own_is_ended_when_others_wait(void **state) {
  (void)state;
  own.params.stop_seconds = own.params.stop_grace_seconds = 1e-9;
  own.ranks[STOPPED].stands = true; /* as it was seen once: it goes on, and is slow */
  one_opens(1);
  for (int times = 0; times < 3; times++) {
    even_job_stands_at_start(&own.job);
  }
  assert_int_equal(killed, 0);
  stop();
  own.job.progress.ranks[STOPPED].opening = own.job.progress.ranks[STOPPED].opened = 1;
  even_job_rank_stopped(&own.job, &own.ranks[STOPPED], SIGSTOP);
  even_job_stands_at_start(&own.job);
  even_job_stands_at_start(&own.job);
  assert_int_equal(killed, 0); /* it has been there */
  one_opens(2);
  own.job.progress.ranks[0].opened = 2;
  even_job_stands_at_start(&own.job);
  even_job_stands_at_start(&own.job);
  assert_int_equal(killed, 0); /* nobody waits any more */
  one_opens(2);
  even_job_stands_at_start(&own.job);
  even_job_stands_at_start(&own.job);
  assert_int_equal(killed, child);
  assert_non_null(
      strstr(said(), "rank 1 still stands, and the others wait for all ranks to come together: it is ended|"));
}

/* With recovery and without: before its grace no call of the others would fail for it. */
static void its_grace_comes_first_at_the_start(void **state) {
  (void)state;
  stop();
  one_waits_for_all();
  for (int times = 0; times < 2; times++) {
    own.params.stop_grace_seconds = 1e6;
    even_job_stands_at_start(&own.job);
    even_job_stands_at_start(&own.job);
    assert_int_equal(killed, 0);
    own.params.stop_grace_seconds = (double)INFINITY;
    own.ranks[STOPPED].missed_ns = 1; /* as long as the machine runs */
    even_job_stands_at_start(&own.job);
    assert_int_equal(killed, 0);
    even_job_generations_close(&own.job);
  }
  own.params.stop_grace_seconds = 1e-9;
  even_job_stands_at_start(&own.job);
  assert_int_equal(killed, child);
}

static void nor_without_recovery_is_it_waited_for(void **state) {
  (void)state;
  even_job_generations_close(&own.job);
  stop();
  one_waits_for_all();
  even_job_stands_at_start(&own.job);
  even_job_stands_at_start(&own.job);
  assert_int_equal(killed, child);
}

static void who_has_come_or_goes_on_is_not_ended_at_the_start(void **state) {
  (void)state;
  one_waits_for_all(); /* by what was seen, but it goes on already */
  even_job_stands_at_start(&own.job);
  even_job_stands_at_start(&own.job);
  assert_int_equal(killed, 0);
  stop();
  own.job.progress.ranks[STOPPED].joined = true; /* the others, too, in a moment */
  even_job_stands_at_start(&own.job);
  even_job_stands_at_start(&own.job);
  assert_int_equal(killed, 0);
  own.job.progress.ranks[STOPPED].joined = false;
  own.job.progress.ranks[0].joined = true;
  even_job_stands_at_start(&own.job);
  even_job_stands_at_start(&own.job);
  assert_int_equal(killed, 0);
}

/* Ctrl-Z, and its end has not reached all of them yet. */
static void a_job_that_was_stopped_whole_waits_for_nobody(void **state) {
  (void)state;
  stop();
  one_waits_for_all();
  own.ranks[0].pid = child;
  even_job_stands_at_start(&own.job);
  even_job_stands_at_start(&own.job);
  assert_int_equal(killed, 0);
}

static void only_who_hangs_is_ended(void **state) {
  (void)state;
  own.ranks[STOPPED].hung = true;
  own.ranks[THERE].hung = true;
  even_job_end_hung(&own.job);
  assert_int_equal(own.job.stage, EVEN_JOB_RUNS);
  assert_int_equal(killed, child);
  const even_process_end end = {.pid = child, .signal = SIGKILL};
  even_job_rank_ended(&own.job, &own.ranks[STOPPED], &end);
  even_job_rank_ended(&own.job, &own.ranks[THERE], &end);
  assert_int_equal(even_generation_number(own.view), 2);
  assert_non_null(strstr(said(), "generation 2: ranks 0 and 2 go on without rank 3|"));
}

static void where_all_hang_all_are_ended(void **state) {
  (void)state;
  for (size_t i = 0; i < RANKS; i++) {
    own.ranks[i].hung = true;
  }
  even_job_end_hung(&own.job);
  assert_int_equal(own.job.stage, EVEN_JOB_TERMINATED);
  assert_non_null(strstr(said(), "the others cannot go on without the rank that hangs: nobody is left|"));
}

static void await_guardian(const even_guardian *guardian, bool holds) {
  uint64_t held = 0;
  uint64_t until = even_clock_ns() + 120000000000u;
  while (even_guardian_holds(guardian, &held) != holds) {
    assert_true(even_clock_ns() < until);
    even_clock_sleep_ns(1000000);
  }
}

/* This agent stood still itself: it acts again before its guardian has let all ranks go. */
static void who_is_held_by_the_guardian_is_not_ended(void **state) {
  (void)state;
  assert_int_equal(even_guardian_start("EVENSTEP_JOB=of nobody", &own.job.guardian), EVEN_OK);
  assert_int_equal(even_guardian_limit(&own.job.guardian, even_clock_boot_ns(), UINT64_MAX), EVEN_OK);
  await_guardian(&own.job.guardian, true);
  stop();
  even_generation_doubt(own.view, 0, 0);
  turn(5);
  assert_int_equal(killed, 0);
  assert_int_equal(even_guardian_limit(&own.job.guardian, 0, 0), EVEN_OK);
  await_guardian(&own.job.guardian, false);
  turn(3);
  assert_int_equal(killed, child); /* that one somebody else stopped */
  even_guardian_stop(&own.job.guardian);
}

static int kill_in_vain(pid_t pid, int number) {
  (void)pid;
  killed += number == SIGKILL ? 1 : 0;
  return 0;
}

/* What /proc says of a process, but that it waits in the kernel, and hears no signal. */
static ssize_t read_asleep(int fd, void *out, size_t bytes) {
  ssize_t got = even_os_real.read(fd, out, bytes);
  char *behind = got > 0 ? memmem(out, (size_t)got, ") ", 2) : NULL;
  if (behind != NULL && behind + 2 < (char *)out + got) {
    behind[2] = 'D';
  }
  return got;
}

static time_t seconds;

static int stopped_clock(clockid_t clock, struct timespec *out) {
  (void)clock;
  *out = (struct timespec){.tv_sec = seconds};
  return 0;
}

/* A wait for a disk that does not answer, for one. */
static void who_does_not_end_when_killed_is_told_once(void **state) {
  char wanted[100];
  (void)state;
  even_os.kill = kill_in_vain;
  even_os.read = read_asleep;
  even_os.clock_gettime = stopped_clock;
  seconds = 1000;
  even_job_end_ranks(&own.job, SIGKILL, true);
  for (seconds = 1001; seconds < 1005; seconds++) {
    even_job_check_deadline(&own.job);
    assert_null(strstr(said(), "has not ended"));
  }
  killed = 0;
  seconds = 1010;
  even_job_check_deadline(&own.job);
  assert_true(killed > 0); /* it is tried on */
  (void)snprintf(wanted, sizeof wanted, "rank 1 (process %ld) was killed 10 s ago and has not ended: thread %ld (",
                 (long)child, (long)child);
  const char *line = strstr(said(), wanted);
  assert_non_null(line);
  assert_non_null(strstr(line, "): state D, "));
  size_t length = own.said.length;
  seconds = 1030;
  even_job_check_deadline(&own.job);
  assert_int_equal(own.said.length, length);
}

int main(void) {
#define STANDS_TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
  const struct CMUnitTest tests[] = {
      STANDS_TEST(a_stopped_rank_is_ended_when_others_wait_for_it),
      STANDS_TEST(it_has_its_time),
      STANDS_TEST(nobody_is_ended_whose_grace_is_for_ever),
      STANDS_TEST(who_goes_on_in_time_is_not_lost),
      STANDS_TEST(who_was_ended_and_is_not_buried_yet_does_not_go_on),
      STANDS_TEST(a_failed_call_alone_changes_nothing),
      STANDS_TEST(where_they_cannot_go_on_they_hear_so),
      STANDS_TEST(they_hear_at_once_of_one_in_its_own_code_before_prepare),
      STANDS_TEST(who_says_nothing_of_it_is_not_waited_for_for_ever),
      STANDS_TEST(the_least_count_who_would_be_left),
      STANDS_TEST(another_host_ends_its_own),
      STANDS_TEST(who_is_to_be_ended_and_goes_on_lives),
      STANDS_TEST(who_stands_before_all_have_come_is_ended_when_others_wait),
      STANDS_TEST(who_stands_before_a_group_of_the_scripts_own_is_ended_when_others_wait),
      STANDS_TEST(its_grace_comes_first_at_the_start),
      STANDS_TEST(nor_without_recovery_is_it_waited_for),
      STANDS_TEST(who_has_come_or_goes_on_is_not_ended_at_the_start),
      STANDS_TEST(a_job_that_was_stopped_whole_waits_for_nobody),
      STANDS_TEST(only_who_hangs_is_ended),
      STANDS_TEST(where_all_hang_all_are_ended),
      STANDS_TEST(who_is_held_by_the_guardian_is_not_ended),
      STANDS_TEST(who_does_not_end_when_killed_is_told_once),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
