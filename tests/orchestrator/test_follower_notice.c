/* A host has notice while nobody leads, or ranks that somebody stopped, or let go on: whoever leads next is told. And
 * what the leader forwards it says again to whoever comes in a killed agent's place. The leader is the other end of a
 * link here, and the ranks are numbers. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "orchestrator/boards.h"
#include "orchestrator/follower_agent.h"
#include "orchestrator/job_attempt.h"
#include "orchestrator/remote.h"
#include "os/clock.h"
#include "os/listener.h"
#include "os/socket.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { MOST_TURNS = 20000 };

static const unsigned char KEY[EVEN_TLS_KEY_BYTES] = {1, 2, 3};

typedef struct scene {
  even_follower follower;
  even_link leader;
  even_loop_watch listening;
  int listener;
  bool ready; /* the follower's end is */
  int drains; /* that came, */
  int signal; /* and the last one */
  double seconds;
  int stops;         /* that were told of ranks, */
  int stopped_by[3]; /* and the last of each; 0: it goes on */
  int signals;       /* that were forwarded, */
  json_int_t serial; /* and the last one's number, */
  uint64_t least;    /* of what was passed on, after each */
  int generations;   /* that were told */
} scene;

static void on_ready(void *context, even_link *link) {
  scene *at = context;
  at->ready = at->ready || link == &at->follower.link;
}

static void take_stop(scene *at, const json_t *content) {
  json_int_t rank = json_integer_value(json_object_get(content, "rank"));
  assert_true(rank >= 0 && rank < 3);
  at->stopped_by[rank] = (int)json_integer_value(json_object_get(content, "signal"));
  at->stops++;
}

static void take_drain(scene *at, const json_t *content) {
  at->drains++;
  at->signal = (int)json_integer_value(json_object_get(content, "signal"));
  at->seconds = json_number_value(json_object_get(content, "seconds"));
}

static even_status take_signal(scene *at, even_link *link, const even_message *message) {
  json_t *content = NULL;
  assert_int_equal(even_json_parse("it", message->json, message->json_bytes, &content), EVEN_OK);
  at->serial = json_integer_value(json_object_get(content, "serial"));
  at->signals++;
  json_decref(content);
  EVEN_TRY(even_follower_hear(&at->follower, link, message));
  uint64_t passed = atomic_load(even_follower_signals(&at->follower));
  at->least = passed < at->least ? passed : at->least;
  return EVEN_OK;
}

static even_status on_message(void *context, even_link *link, const even_message *message) {
  scene *at = context;
  json_t *content = NULL;
  if (link == &at->follower.link && message->kind == EVEN_MESSAGE_SIGNAL) {
    return take_signal(at, link, message);
  }
  at->generations += link == &at->follower.link && message->kind == EVEN_MESSAGE_GENERATION;
  if (link != &at->leader || (message->kind != EVEN_MESSAGE_DRAIN && message->kind != EVEN_MESSAGE_STOPPED)) {
    return EVEN_OK;
  }
  EVEN_TRY(even_json_parse("it", message->json, message->json_bytes, &content));
  (message->kind == EVEN_MESSAGE_DRAIN ? take_drain : take_stop)(at, content);
  json_decref(content);
  return EVEN_OK;
}

static void on_ended(void *context, even_link *link) {
  (void)context;
  (void)link;
}

static void on_connection(void *context, int fd) {
  scene *at = context;
  const even_link_calls calls = {.context = at, .ready = on_ready, .message = on_message, .ended = on_ended};
  int made = -1;
  assert_int_equal(even_socket_accept(fd, &made), EVEN_OK);
  if (made >= 0) {
    assert_int_equal(even_link_open(&at->leader, &at->follower.loop, made, true, KEY, &calls), EVEN_OK);
  }
}

static void turn(scene *at) {
  assert_int_equal(even_loop_turn(&at->follower.loop, 1), EVEN_OK);
  even_link_tick(&at->follower.link, false);
  if (at->leader.fd >= 0) {
    even_link_tick(&at->leader, false);
  }
}

static void turn_until_drains(scene *at, int count) {
  for (int i = 0; i < MOST_TURNS && at->drains < count; i++) {
    turn(at);
  }
  assert_int_equal(at->drains, count);
}

/* Two ranks run here, and a link leads to a leader. */
static int open_scene(void **state) {
  scene *at = NULL;
  int port = 0;
  int fd = -1;
  assert_int_equal(EVEN_NEW(&at), EVEN_OK);
  even_follower *follower = &at->follower;
  follower->calls = (even_link_calls){.context = at, .ready = on_ready, .message = on_message, .ended = on_ended};
  follower->start.outlast_seconds = 60;
  follower->params.notice_seconds = 60;
  follower->running = true;
  follower->invitation = "{}";
  follower->telemetry_fd = -1;
  follower->job = (even_job){.params = &follower->params, .follower = follower, .alive = 2, .stage = EVEN_JOB_RUNS};
  at->leader.fd = -1;
  assert_int_equal(even_loop_open(&follower->loop), EVEN_OK);
  assert_int_equal(even_listener_open("127.0.0.1", &port, &at->listener), EVEN_OK);
  assert_int_equal(even_loop_add(&follower->loop, &at->listening, at->listener, on_connection, at), EVEN_OK);
  assert_int_equal(even_socket_connect("127.0.0.1", port, 60000, &fd), EVEN_OK);
  assert_int_equal(even_link_open(&follower->link, &follower->loop, fd, false, KEY, &follower->calls), EVEN_OK);
  for (int i = 0; i < MOST_TURNS && !at->ready; i++) {
    turn(at);
  }
  assert_true(at->ready);
  *state = at;
  return 0;
}

static int close_scene(void **state) {
  scene *at = *state;
  even_link_close(&at->follower.link);
  even_link_close(&at->leader);
  even_loop_remove(&at->follower.loop, &at->listening);
  (void)close(at->listener);
  even_loop_close(&at->follower.loop);
  even_free(at);
  return 0;
}

static bool has_notice(scene *at, int signal) {
  return even_job_drain(&at->follower.job, &(even_notice){.signal = signal, .what = ""}, "");
}

static void the_leader_is_told_at_once_and_once(void **state) {
  scene *at = *state;
  assert_true(has_notice(at, SIGTERM));
  turn_until_drains(at, 1);
  assert_int_equal(at->signal, SIGTERM);
  assert_true(at->seconds <= 0); /* those of --notice, which it knows */
  even_job_drain_tick(&at->follower.job);
  assert_true(has_notice(at, SIGUSR1));
  assert_false(has_notice(at, SIGTERM)); /* without waiting */
  for (int i = 0; i < 20; i++) {
    turn(at);
  }
  assert_int_equal(at->drains, 1);
}

static void while_nobody_leads_it_is_kept_and_the_next_one_told(void **state) {
  scene *at = *state;
  even_job *job = &at->follower.job;
  at->follower.gone = at->follower.held = true;
  assert_true(has_notice(at, SIGUSR1));
  assert_int_equal(job->draining, 0);
  even_job_drain_tick(job);
  assert_int_equal(job->draining, 0);
  assert_true(even_follower_may_wait(&at->follower)); /* its ranks are not ended for that */
  job->own_notice.at_ns -= 20000000000u;
  at->follower.gone = at->follower.held = false; /* as even_follower_adopted does */
  even_job_drain_tick(job);
  turn_until_drains(at, 1);
  assert_int_equal(at->signal, SIGUSR1);
  assert_true(at->seconds > 0 && at->seconds <= 40);
  assert_int_equal(job->draining, SIGUSR1);
}

/* Between two attempts, for as long as the leader waits for other hosts. */
static void an_announced_end_is_said_while_no_ranks_run(void **state) {
  scene *at = *state;
  even_job *job = &at->follower.job;
  at->follower.running = false;
  at->follower.params.notice_from = "exec:echo 42";
  job->alive = 0;
  job->guardian = (even_guardian){.pid = -1, .pipe = -1};
  assert_int_equal(even_loop_open(&job->loop), EVEN_OK);
  for (int i = 0; i < MOST_TURNS && at->drains == 0; i++) {
    even_job_drain_tick(job);
    assert_int_equal(even_loop_turn(&job->loop, 0), EVEN_OK);
    even_job_reap(job); /* as the loop does for SIGCHLD */
    turn(at);
  }
  even_job_drain_close(job);
  even_loop_close(&job->loop);
  assert_int_equal(at->drains, 1);
  assert_int_equal(at->signal, EVEN_DRAIN_ANNOUNCED);
  assert_true(at->seconds > 0 && at->seconds <= 42);
}

/* The leader was gone already, which was not known here. */
static void what_a_leader_that_is_gone_was_told_the_next_one_is(void **state) {
  scene *at = *state;
  even_job *job = &at->follower.job;
  assert_true(has_notice(at, SIGTERM));
  at->follower.gone = true;
  assert_true(even_follower_may_wait(&at->follower));
  assert_int_equal(even_follower_wait(&at->follower), EVEN_OK);
  assert_true(at->follower.held);
  assert_int_equal(job->draining, 0);
  assert_int_equal(job->own_notice.signal, SIGTERM);
  at->follower.held = false;
  even_job_drain_tick(job);
  assert_int_equal(job->draining, SIGTERM);
}

/* One that has ended was asked to: the leader knew. */
static void ranks_that_end_for_it_are_not_held(void **state) {
  scene *at = *state;
  assert_true(has_notice(at, SIGTERM));
  at->follower.gone = true;
  at->follower.job.ended = 1;
  assert_false(even_follower_may_wait(&at->follower));
}

/* It is of the host, not of the attempt. */
static void another_attempt_does_not_forget_it_untold(void **state) {
  scene *at = *state;
  even_job *job = &at->follower.job;
  at->follower.held = true;
  assert_true(has_notice(at, SIGTERM));
  even_job_drain_forget(job);
  assert_int_equal(job->own_notice.signal, SIGTERM);
  at->follower.held = false;
  even_job_drain_tick(job);
  even_job_drain_forget(job);
  assert_int_equal(job->own_notice.signal, 0);
}

static void where_this_host_leads_next_its_ranks_are_asked(void **state) {
  scene *at = *state;
  even_job *job = &at->follower.job;
  int fd = -1;
  at->follower.held = true;
  assert_true(has_notice(at, SIGTERM));
  job->own_notice.at_ns -= 20000000000u;
  job->follower = NULL;
  even_job_drain_tick(job);
  assert_int_equal(job->draining, 0); /* nobody can be asked yet */
  assert_int_equal(even_telemetry_create_segment(2, 64, &fd), EVEN_OK);
  assert_int_equal(even_telemetry_reader_open(fd, &job->progress.reader), EVEN_OK);
  even_job_drain_tick(job);
  assert_int_equal(job->draining, SIGTERM);
  assert_true(job->drain_until_ns <= even_clock_ns() + 40000000000u);
  assert_int_equal(job->own_notice.signal, 0);
  even_telemetry_reader_close(job->progress.reader);
  (void)close(fd);
}

/* The leader may have heard of one before, and not that it was let go on while no agent was here. */
static void the_next_one_hears_who_stands_and_who_goes_on(void **state) {
  scene *at = *state;
  even_job *job = &at->follower.job;
  even_job_rank ranks[3] = {{.pid = 11, .alive = true},
                            {.pid = 12, .alive = true, .stands = true, .stopped_by = SIGTSTP},
                            {.pid = 13, .alive = true, .stands = true}}; /* held by the guardian */
  at->stopped_by[0] = at->stopped_by[1] = at->stopped_by[2] = -1;
  job->ranks = ranks;
  job->count = job->local = 3;
  even_follower_say_ranks(&at->follower);
  for (int i = 0; i < MOST_TURNS && at->stops < 2; i++) {
    turn(at);
  }
  assert_int_equal(at->stops, 2);
  assert_int_equal(at->stopped_by[0], 0);
  assert_int_equal(at->stopped_by[1], SIGTSTP);
  assert_int_equal(at->stopped_by[2], -1);
}

static void turn_until_signals(scene *at, int count, json_int_t serial) {
  for (int i = 0; i < MOST_TURNS && at->signals < count; i++) {
    turn(at);
  }
  assert_int_equal(at->signals, count);
  assert_int_equal(at->serial, serial);
}

static void what_was_not_passed_on_is_said_again(void **state) {
  scene *at = *state;
  even_host_agent agents[2] = {{.name = "here"}, {.name = "there", .link = &at->leader, .busy = true}};
  even_hosts hosts = {.agents = agents, .count = 2};
  even_job job = {.hosts = &hosts};
  agents[1].hosts = &hosts;
  for (int i = 0; i < MOST_TURNS && !even_link_is_up(&at->leader); i++) {
    turn(at);
  }
  for (int i = 0; i < EVEN_HOSTS_SIGNALS + 8; i++) {
    even_job_hosts_signal(&job, SIGUSR1, false, false);
  }
  turn_until_signals(at, EVEN_HOSTS_SIGNALS + 8, EVEN_HOSTS_SIGNALS + 8);
  assert_int_equal(atomic_load(even_follower_signals(&at->follower)), EVEN_HOSTS_SIGNALS + 8);
  at->signals = 0;
  at->least = UINT64_MAX;
  assert_int_equal(even_hosts_say_signals(&agents[1], EVEN_HOSTS_SIGNALS + 6), EVEN_OK);
  turn_until_signals(at, 2, EVEN_HOSTS_SIGNALS + 8);
  at->signals = 0;
  assert_int_equal(even_hosts_say_signals(&agents[1], 0), EVEN_OK); /* the last of them */
  turn_until_signals(at, EVEN_HOSTS_SIGNALS, EVEN_HOSTS_SIGNALS + 8);
  assert_int_equal(at->least, EVEN_HOSTS_SIGNALS + 8); /* it had them: none is passed on twice */
  even_hosts_note_signals(&hosts, 99);                 /* the leader before this one has said so many */
  at->signals = 0;
  assert_int_equal(even_hosts_say_signals(&agents[1], 98), EVEN_OK);
  even_job_hosts_signal(&job, SIGUSR2, false, false);
  turn_until_signals(at, 1, 100);
  assert_int_equal(atomic_load(even_follower_signals(&at->follower)), 100);
  at->signals = 0;
  agents[1].renewed = true; /* what it has passed on is not known here yet */
  even_job_hosts_signal(&job, SIGUSR1, false, false);
  agents[1].renewed = false;
  even_job_hosts_signal(&job, SIGUSR2, false, false);
  turn_until_signals(at, 1, 102);
  at->signals = 0;
  agents[1].renewed = true;
  even_job_hosts_signal(&job, SIGKILL, true, true); /* is not said again */
  turn_until_signals(at, 1, 0);
}

static void who_comes_in_a_killed_ones_place_catches_up_first(void **state) {
  scene *at = *state;
  even_agent_params params = {.shrink = true};
  even_job_rank ranks[2] = {{.alive = true}, {.alive = true, .elsewhere = true}};
  even_host_agent agents[2] = {
      {.name = "here"},
      {.name = "there", .link = &at->leader, .busy = true, .follows = true, .renewed = true, .first = 1, .count = 1}};
  even_hosts hosts = {.agents = agents, .count = 2};
  even_job job = {.params = &params,
                  .ranks = ranks,
                  .count = 2,
                  .local = 1,
                  .alive = 2,
                  .groups = 2,
                  .most_groups = 2,
                  .hosts = &hosts,
                  .generation_fd = -1};
  agents[1].hosts = &hosts;
  for (int i = 0; i < MOST_TURNS && !even_link_is_up(&at->leader); i++) {
    turn(at);
  }
  assert_int_equal(even_job_generations_open(&job), EVEN_OK);
  assert_int_equal(even_job_generations_begin(&job), EVEN_OK);
  even_generation_ask(job.generation, EVEN_WISH_SAVE);
  even_boards_turn(&job); /* all are told, but for this one */
  agents[1].renewed = false;
  assert_int_equal(even_boards_catch_up(&job, &agents[1], 0), EVEN_OK);
  even_job_hosts_signal(&job, SIGUSR1, false, false);
  turn_until_signals(at, 1, 1);
  assert_int_equal(at->generations, 1);
  even_job_generations_close(&job);
}

int main(void) {
#define SCENE_TEST(test) cmocka_unit_test_setup_teardown(test, open_scene, close_scene)
  const struct CMUnitTest tests[] = {
      SCENE_TEST(the_leader_is_told_at_once_and_once),
      SCENE_TEST(while_nobody_leads_it_is_kept_and_the_next_one_told),
      SCENE_TEST(an_announced_end_is_said_while_no_ranks_run),
      SCENE_TEST(what_a_leader_that_is_gone_was_told_the_next_one_is),
      SCENE_TEST(ranks_that_end_for_it_are_not_held),
      SCENE_TEST(another_attempt_does_not_forget_it_untold),
      SCENE_TEST(where_this_host_leads_next_its_ranks_are_asked),
      SCENE_TEST(the_next_one_hears_who_stands_and_who_goes_on),
      SCENE_TEST(what_was_not_passed_on_is_said_again),
      SCENE_TEST(who_comes_in_a_killed_ones_place_catches_up_first),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
