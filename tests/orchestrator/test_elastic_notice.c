/* A host has notice while no ranks run: it leaves before the next attempt, or all end as soon as that one runs. An
 * agent here is what stands of it in the list of hosts. */
#include "orchestrator/elastic.h"

#include "an_agent.h"
#include "base/alloc.h"
#include "base/fail.h"
#include "os/clock.h"

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

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(who_has_notice_between_two_attempts_has_no_part_in_the_next, open_scene,
                                      close_scene),
      cmocka_unit_test_setup_teardown(what_comes_while_an_attempt_ends_is_kept, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(without_whom_the_job_cannot_go_on_it_ends, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(an_announcement_is_kept_as_it_came, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(whose_time_is_over_when_ranks_run_has_it_once_more, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(notice_of_an_agent_is_none_of_the_next_one, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(nor_of_one_that_is_waited_for_again, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(what_is_no_notice_is_not_kept, open_scene, close_scene),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
