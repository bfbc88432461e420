/* A host has notice while no ranks run: it leaves before the next attempt, or at once where that is waited for, or all
 * end as soon as that one runs. An
 * agent here is what stands of it in the list of hosts. */
#include "orchestrator/elastic.h"

#include "an_agent.h"
#include "base/alloc.h"
#include "base/fail.h"
#include "base/stop.h"
#include "os/clock.h"
#include "os/signals.h"

#include <evenstep/telemetry.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct scene {
  even_hosts hosts;
  even_job job;
  even_agent_params params;
  even_device device;
  even_device_list devices;
  int telemetry_fd;
  char told[2048]; /* "text|text|" */
} scene;

static void keep_notice(void *context, const char *text) {
  scene *at = context;
  size_t length = strlen(at->told);
  (void)snprintf(at->told + length, sizeof at->told - length, "%s|", text);
}

/* A job on `here`, x and y, between two attempts. */
static int open_scene(void **state) {
  static const char *const names[] = {"here", "x", "y"};
  scene *at = NULL;
  assert_int_equal(EVEN_NEW(&at), EVEN_OK);
  at->devices = (even_device_list){&at->device, 1};
  at->params = (even_agent_params){
      .devices = &at->devices, .notice_seconds = 60, .observer = {.context = at, .notice = keep_notice}};
  at->job = (even_job){.params = &at->params, .hosts = &at->hosts, .local = 1};
  at->hosts = (even_hosts){.count = 3,
                           .room = 3,
                           .job = &at->job,
                           .listener = -1,
                           .listen_ns = UINT64_MAX,
                           .listener_watch = {.fd = -1},
                           .params = {.patience_seconds = 600, .least_seconds = (double)NAN}};
  assert_int_equal(even_telemetry_create_segment(1, 64, &at->telemetry_fd), EVEN_OK);
  assert_int_equal(even_telemetry_reader_open(at->telemetry_fd, &at->job.progress.reader), EVEN_OK);
  assert_int_equal(even_loop_open(&at->hosts.loop), EVEN_OK);
  assert_int_equal(even_elastic_open(&at->hosts), EVEN_OK);
  assert_int_equal(EVEN_NEW_ARRAY(&at->hosts.agents, 3), EVEN_OK);
  for (size_t i = 0; i < 3; i++) {
    at->hosts.agents[i] = an_agent(&at->hosts, i, names[i]);
  }
  assert_int_equal(even_hosts_open_parcels(&at->hosts), EVEN_OK);
  *state = at;
  return 0;
}

static int close_scene(void **state) {
  scene *at = *state;
  even_elastic_close(&at->hosts);
  even_free(at->hosts.elastic);
  even_parcels_close(at->hosts.parcels);
  even_free(at->hosts.agents);
  even_loop_close(&at->hosts.loop);
  even_telemetry_reader_close(at->job.progress.reader);
  (void)close(at->telemetry_fd);
  even_free(at);
  return 0;
}

static bool was_told(const scene *at, const char *words) {
  return strstr(at->told, words) != NULL;
}

static even_host_agent *host(scene *at, const char *name) {
  for (size_t i = 0; i < at->hosts.count; i++) {
    if (strcmp(at->hosts.agents[i].name, name) == 0) {
      return &at->hosts.agents[i];
    }
  }
  return NULL;
}

static void has_notice(scene *at, const char *name, int signal) {
  even_elastic_notice(&at->job, host(at, name), &(even_notice){.signal = signal, .what = ""});
}

static void who_has_notice_between_two_attempts_has_no_part_in_the_next(void **state) {
  scene *at = *state;
  bool changed = false;
  at->hosts.params.least_ranks = 1;
  has_notice(at, "x", SIGTERM);
  assert_true(was_told(at, "host x: SIGTERM: no ranks run now, and it is heeded before the next ones do|"));
  assert_non_null(host(at, "x"));
  assert_int_equal(at->job.draining, 0);
  assert_int_equal(even_elastic_settle(&at->job, &changed), EVEN_OK);
  assert_true(changed);
  assert_null(host(at, "x"));
  assert_non_null(host(at, "y"));
  assert_int_equal(at->hosts.count, 2);
  assert_true(was_told(at, "host x has notice: the job goes on with 2 ranks without that host|"));
  assert_int_equal(even_elastic_settle(&at->job, &changed), EVEN_OK); /* once */
  assert_false(changed);
}

/* While its leader looks for a checkpoint to begin with. */
static void what_comes_before_the_job_is_there_is_kept(void **state) {
  static const char text[] = "{\"signal\":15,\"seconds\":20,\"what\":\"\"}";
  const even_message message = {.kind = EVEN_MESSAGE_DRAIN, .json = text, .json_bytes = sizeof text - 1};
  scene *at = *state;
  bool changed = false;
  at->hosts.params.least_ranks = 1;
  for (int heeds = 0; heeds <= 1; heeds++) { /* without --notice nobody does */
    at->hosts.job = NULL;
    assert_int_equal(even_hosts_job_message(host(at, "x"), &message), EVEN_OK);
    at->hosts.job = &at->job;
    at->params.notice_seconds = heeds ? 60 : 0;
    assert_int_equal(even_elastic_settle(&at->job, &changed), EVEN_OK);
    assert_int_equal(changed, heeds);
  }
  assert_null(host(at, "x"));
  assert_true(was_told(at, "host x has notice: the job goes on with 2 ranks without that host|"));
}

/* So it is, too, where the ranks of an attempt are being ended. */
static void what_comes_while_an_attempt_ends_is_kept(void **state) {
  scene *at = *state;
  bool changed = false;
  at->hosts.params.least_ranks = 1;
  at->job.alive = 2;
  at->job.stage = EVEN_JOB_TERMINATED;
  has_notice(at, "y", SIGUSR1);
  assert_false(host(at, "y")->leaves || at->job.changing);
  at->job.alive = 0;
  assert_int_equal(even_elastic_settle(&at->job, &changed), EVEN_OK);
  assert_true(changed);
  assert_null(host(at, "y"));
}

/* Without --min-ranks, or where too few would be left, the next attempt saves its state and ends. */
static void without_whom_the_job_cannot_go_on_it_ends(void **state) {
  scene *at = *state;
  for (int least = 0; least <= 3; least += 3) {
    bool changed = true;
    at->hosts.params.least_ranks = least;
    uint64_t before = even_clock_ns();
    has_notice(at, "x", SIGTERM);
    uint64_t after = even_clock_ns();
    assert_int_equal(even_elastic_settle(&at->job, &changed), EVEN_OK);
    assert_false(changed);
    assert_int_equal(at->hosts.count, 3);
    even_elastic_tick(&at->job); /* nothing runs yet */
    assert_int_equal(at->job.draining, 0);
    at->job.alive = 3;
    even_elastic_tick(&at->job);
    assert_int_equal(at->job.draining, SIGTERM);
    assert_in_range(at->job.drain_until_ns, before + 60000000000u, after + 60000000000u); /* from when it came */
    assert_true(was_told(at, "host x: SIGTERM: the training saves its state after the step under way and ends"));
    assert_int_equal(host(at, "x")->notice.signal, 0);
    at->job.alive = 0;
    at->job.draining = 0;
    at->told[0] = '\0';
  }
}

/* What was announced is kept with its words and its time. */
static void an_announcement_is_kept_as_it_came(void **state) {
  scene *at = *state;
  char words[] = "its machine ends at noon";
  const even_notice notice = {.signal = EVEN_DRAIN_ANNOUNCED, .seconds = 20, .what = words};
  uint64_t before = even_clock_ns();
  even_elastic_notice(&at->job, host(at, "y"), &notice);
  uint64_t after = even_clock_ns();
  words[0] = '?'; /* they are the caller's */
  at->job.alive = 3;
  even_elastic_tick(&at->job);
  assert_true(was_told(at, "host y: its machine ends at noon: the training saves its state"));
  assert_in_range(at->job.drain_until_ns, before + 20000000000u, after + 20000000000u);
}

/* A pause may last longer than the notice: who was just started is not ended for that. */
static void whose_time_is_over_when_ranks_run_has_it_once_more(void **state) {
  scene *at = *state;
  has_notice(at, "x", SIGTERM);
  host(at, "x")->notice.at_ns -= 60000000000u;
  at->job.alive = 3;
  uint64_t before = even_clock_ns();
  even_elastic_tick(&at->job);
  assert_int_equal(at->job.draining, SIGTERM);
  assert_true(at->job.drain_until_ns >= before + 60000000000u);
  assert_false(even_job_drain_late(&at->job));
}

/* Its next agent, on another machine perhaps, has none. */
static void notice_of_an_agent_is_none_of_the_next_one(void **state) {
  scene *at = *state;
  bool changed = true;
  has_notice(at, "x", SIGTERM);
  host(at, "x")->lost = true;
  even_elastic_tick(&at->job);
  even_host_agent_drop(host(at, "x"));
  host(at, "x")->lost = false; /* as it is started again */
  host(at, "x")->fits = true;
  at->hosts.params.least_ranks = 1;
  assert_int_equal(even_elastic_settle(&at->job, &changed), EVEN_OK);
  assert_false(changed);
  at->job.alive = 3;
  even_elastic_tick(&at->job);
  assert_int_equal(at->job.draining, 0);
  assert_false(host(at, "x")->leaves || at->job.changing);
}

/* So it is where what started its agent starts another. */
static void nor_of_one_that_is_waited_for_again(void **state) {
  scene *at = *state;
  at->hosts.params.returns = true;
  even_text_add(&at->hosts.announced, "there");
  has_notice(at, "x", SIGTERM);
  host(at, "x")->lost = true;
  assert_int_equal(even_host_agent_launch(host(at, "x")), EVEN_OK);
  assert_int_equal(host(at, "x")->notice.signal, 0);
  even_text_free(&at->hosts.announced);
}

/* Nor of a job that knows no notice, nor is a signal that is none kept. */
static void what_is_no_notice_is_not_kept(void **state) {
  scene *at = *state;
  has_notice(at, "x", SIGHUP);
  at->params.notice_seconds = 0;
  has_notice(at, "y", SIGTERM);
  assert_int_equal(host(at, "x")->notice.signal, 0);
  assert_int_equal(host(at, "y")->notice.signal, 0);
  assert_string_equal(at->told, "");
}

/* ---- while the job waits for ranks ---- */

enum { MOST_LOOKS = 1000 }; /* each up to 50 ms */
static int looks;           /* until the user ends the waiting */

static bool user_ends_it(void) {
  return --looks < 0;
}

/* y is lost, and three ranks are to be there; for so many turns. */
static even_status await_ranks(scene *at, int turns) {
  at->hosts.params.least_ranks = 3;
  host(at, "y")->leaves = host(at, "y")->lost = true;
  host(at, "y")->away = at->hosts.params.shell != NULL;
  host(at, "y")->back_ns = UINT64_MAX;
  looks = turns;
  even_stop_when(user_ends_it);
  even_status status = even_elastic_await_ranks(&at->job);
  even_stop_when(NULL);
  return status;
}

static char *const shell[] = {(char *)(uintptr_t)"/nonexistent/shell", NULL};

static void who_has_notice_while_ranks_are_waited_for_leaves_at_once(void **state) {
  scene *at = *state;
  at->hosts.params.shell = shell;
  has_notice(at, "x", SIGTERM);
  uint64_t came = host(at, "x")->notice.at_ns;
  assert_int_equal(await_ranks(at, 1), EVEN_ERR_INTERRUPTED);
  assert_true(host(at, "x")->leaves && host(at, "x")->lost && host(at, "x")->away);
  assert_true(host(at, "x")->back_ns == came + 60000000000u); /* when its machine may be there again */
  assert_int_equal(host(at, "x")->notice.signal, 0);
  assert_true(was_told(at, "host x is left out: it has notice (SIGTERM)|"));
  assert_int_equal(at->job.draining, 0);
}

static void without_whom_nobody_is_left_to_come_it_ends(void **state) {
  scene *at = *state;
  has_notice(at, "x", SIGUSR1);
  assert_int_equal(await_ranks(at, 1), EVEN_ERR_PEER_LOST);
  assert_true(host(at, "x")->leaves && !host(at, "x")->away);
}

static void take_back(int number) {
  sigset_t one;
  const struct timespec now = {0, 0};
  (void)sigemptyset(&one);
  (void)sigaddset(&one, number);
  assert_int_equal(sigtimedwait(&one, NULL, &now), number);
}

static void a_signal_here_ends_a_job_that_waits_and_is_saved(void **state) {
  scene *at = *state;
  int code = 0;
  at->hosts.params.shell = shell;
  assert_int_equal(even_signals_block(), EVEN_OK);
  assert_int_equal(raise(SIGUSR1), 0);
  at->params.notice_seconds = 0;
  assert_int_equal(await_ranks(at, 1), EVEN_ERR_INTERRUPTED);
  assert_false(even_job_ended_between(&at->job, &code)); /* it was none */
  at->params.notice_seconds = 60;
  even_text_add(&at->job.resume, "step-00000007");
  assert_int_equal(await_ranks(at, 1), EVEN_ERR_INTERRUPTED);
  take_back(SIGUSR1);
  assert_true(
      was_told(at, "SIGUSR1: no ranks run, and the training is saved in step-00000007: the job ends (--notice)"));
  assert_true(even_job_ended_between(&at->job, &code));
  assert_int_equal(code, EVEN_SAVED_AND_ENDED);
  even_text_free(&at->job.resume);
}

/* Of a host that has come to lead. */
static void notice_of_before_ends_it_too(void **state) {
  scene *at = *state;
  at->hosts.params.shell = shell;
  at->job.own_notice = (even_host_notice){.signal = SIGTERM, .at_ns = even_clock_ns()};
  assert_int_equal(await_ranks(at, 1), EVEN_ERR_INTERRUPTED);
  assert_int_equal(at->job.draining, SIGTERM);
  assert_true(was_told(at, "SIGTERM: no ranks run, and the training has saved nothing yet: the job ends (--notice)"));
}

/* Nobody's turn of the loop, or of an attempt, hears it. */
static void an_announced_end_of_this_machine_ends_it_too(void **state) {
  scene *at = *state;
  at->hosts.params.shell = shell;
  at->params.notice_from = "exec:echo 42";
  at->job.guardian = (even_guardian){.pid = -1, .pipe = -1};
  assert_int_equal(even_loop_open(&at->job.loop), EVEN_OK);
  assert_int_equal(await_ranks(at, MOST_LOOKS), EVEN_ERR_INTERRUPTED);
  even_job_drain_close(&at->job);
  even_loop_close(&at->job.loop);
  assert_int_equal(at->job.draining, EVEN_DRAIN_ANNOUNCED);
  assert_true(was_told(at,
                       "exec announces the machine's end (exit code 0): no ranks run, and the training has saved "
                       "nothing yet: the job ends (--notice-from)"));
}

/* One that had joined, and was asked to leave it by Ctrl-C while nobody led. */
static void what_is_none_does_not_end_it(void **state) {
  scene *at = *state;
  at->hosts.params.shell = shell;
  at->job.own_notice = (even_host_notice){.signal = SIGINT, .at_ns = even_clock_ns()};
  assert_int_equal(await_ranks(at, 1), EVEN_ERR_INTERRUPTED); /* the user's word, below */
  assert_int_equal(at->job.draining, 0);
  at->params.notice_seconds = 0;
  assert_int_equal(await_ranks(at, 1), EVEN_ERR_INTERRUPTED);
  assert_int_equal(at->job.draining, 0);
}

/* While a majority of the hosts is waited for, or a lost one. */
static void sigterm_here_ends_a_job_that_is_interrupted_between_attempts(void **state) {
  scene *at = *state;
  int code = 0;
  assert_int_equal(even_signals_block(), EVEN_OK);
  assert_int_equal(raise(SIGTERM), 0);
  even_text_add(&at->job.resume, "step-00000007");
  assert_true(even_job_ended_between(&at->job, &code));
  assert_int_equal(code, EVEN_SAVED_AND_ENDED);
  assert_true(was_told(at, "SIGTERM: no ranks run, and the training is saved in step-00000007: the job ends"));
  assert_int_equal(at->job.interrupted, 0);
  at->job.draining = 0;
  at->params.notice_seconds = 0;
  assert_true(even_job_ended_between(&at->job, &code));
  take_back(SIGTERM);
  assert_int_equal(code, 128 + SIGTERM);
  assert_int_equal(at->job.interrupted, SIGTERM);
  even_text_free(&at->job.resume);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(who_has_notice_between_two_attempts_has_no_part_in_the_next, open_scene,
                                      close_scene),
      cmocka_unit_test_setup_teardown(what_comes_before_the_job_is_there_is_kept, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(what_comes_while_an_attempt_ends_is_kept, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(without_whom_the_job_cannot_go_on_it_ends, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(an_announcement_is_kept_as_it_came, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(whose_time_is_over_when_ranks_run_has_it_once_more, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(notice_of_an_agent_is_none_of_the_next_one, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(nor_of_one_that_is_waited_for_again, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(what_is_no_notice_is_not_kept, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(who_has_notice_while_ranks_are_waited_for_leaves_at_once, open_scene,
                                      close_scene),
      cmocka_unit_test_setup_teardown(without_whom_nobody_is_left_to_come_it_ends, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(a_signal_here_ends_a_job_that_waits_and_is_saved, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(notice_of_before_ends_it_too, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(an_announced_end_of_this_machine_ends_it_too, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(what_is_none_does_not_end_it, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(sigterm_here_ends_a_job_that_is_interrupted_between_attempts, open_scene,
                                      close_scene),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
