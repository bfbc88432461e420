/* A host that takes a leader's place, and hosts that come to it: a member that votes alone, and agents that are none,
 * each a child of this program. */
#include "orchestrator/succession.h"

#include "base/json_reader.h"
#include "orchestrator/link.h"
#include "os/clock.h"
#include "os/listener.h"
#include "os/signals.h"
#include "os/socket.h"

#include <evenstep/version.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { SELF = 2, TURN_MS = 20 };

static const char KEY[] = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
static const char LEFT[] =
    "{\"members_folder\":\"/nonexistent\",\"hosts\":["
    "{\"name\":\"old\",\"member\":1,\"devices\":[\"cpu:0\"]},{\"name\":\"here\",\"member\":2,\"devices\":[\"cpu:0\"]},"
    "{\"name\":\"there\",\"member\":3,\"devices\":[\"cpu:0\",\"cpu:1\"]},"
    "{\"name\":\"beyond\",\"member\":4,\"devices\":[\"cpu:0\"]}]}";

/* ---- an agent ---- */

typedef struct made_up_agent {
  even_link link;
  even_loop loop;
  int member;
  bool leaves; /* when it is asked what its host has */
  bool over;
} made_up_agent;

static void say(made_up_agent *agent, even_message_kind kind, const char *json) {
  agent->over = agent->over || even_link_send(&agent->link, kind, json, NULL, 0) != EVEN_OK;
}

static void greet(void *context, even_link *link) {
  made_up_agent *agent = context;
  char text[256];
  (void)link;
  (void)snprintf(text, sizeof text,
                 "{\"evenstep\":\"%s\",\"protocol\":%d,\"record_bytes\":%zu,\"member\":%d,\"voter_port\":1}",
                 even_version(), EVEN_MESSAGE_PROTOCOL, sizeof(even_record), agent->member);
  say(agent, EVEN_MESSAGE_GREET, text);
}

static even_status hear(void *context, even_link *link, const even_message *message) {
  even_device own = {.name = "cpu:0", .cores = 1};
  const even_device_list devices = {&own, 1};
  const even_host_needs needs = {.folder = "/"};
  made_up_agent *agent = context;
  even_text text = EVEN_TEXT_EMPTY;
  (void)link;
  if (message->kind != EVEN_MESSAGE_CHECK || agent->leaves) {
    agent->over = true;
    return EVEN_OK;
  }
  if (even_host_facts_read(&needs, &devices, &text) == EVEN_OK) {
    say(agent, EVEN_MESSAGE_FACTS, even_text_string(&text));
  }
  even_text_free(&text);
  return EVEN_OK;
}

static void hear_end(void *context, even_link *link) {
  (void)link;
  ((made_up_agent *)context)->over = true;
}

static int play(made_up_agent *agent, int port) {
  const even_link_calls calls = {.context = agent, .ready = greet, .message = hear, .ended = hear_end};
  unsigned char key[EVEN_TLS_KEY_BYTES];
  int fd = -1;
  if (even_tls_key_read(KEY, key) != EVEN_OK || even_loop_open(&agent->loop) != EVEN_OK ||
      even_socket_connect("127.0.0.1", port, 60000, &fd) != EVEN_OK ||
      even_link_open(&agent->link, &agent->loop, fd, false, key, &calls) != EVEN_OK) {
    return 1;
  }
  while (!agent->over && even_loop_turn(&agent->loop, TURN_MS) == EVEN_OK) {
    even_link_tick(&agent->link, false);
  }
  even_link_close(&agent->link);
  even_loop_close(&agent->loop);
  return 0;
}

/* It hears over the pipe where the leader listens. */
static pid_t start_agent(int member, bool leaves, const int ends[2]) {
  pid_t pid = fork();
  if (pid == 0) {
    made_up_agent agent = {.link = {.fd = -1}, .loop = {.fd = -1}, .member = member, .leaves = leaves};
    int port = 0;
    (void)close(ends[1]);
    _exit(read(ends[0], &port, sizeof port) == (ssize_t)sizeof port ? play(&agent, port) : 1);
  }
  return pid;
}

/* ---- the leader ---- */

typedef struct telling {
  even_voter *voter;
  int pipe;
  int agents;
} telling;

static void *tell_agents(void *context) {
  const telling *own = context;
  even_voter_view view;
  for (even_voter_look(own->voter, &view); view.port == 0; even_voter_look(own->voter, &view)) {
    even_clock_sleep_ns(1000000);
  }
  for (int i = 0; i < own->agents; i++) {
    (void)!write(own->pipe, &view.port, sizeof view.port);
  }
  return NULL;
}

static void open_voter(even_estate *estate) {
  even_voter_member self = {.id = SELF};
  even_voter_params params = {.size = sizeof params, .self = SELF, .members = &self, .count = 1, .first = SELF};
  assert_int_equal(even_listener_open("127.0.0.1", &estate->voter_port, &params.listener), EVEN_OK);
  (void)snprintf(self.address, sizeof self.address, "127.0.0.1:%d", estate->voter_port);
  assert_int_equal(even_voter_open(&params, &estate->voter), EVEN_OK);
}

static even_status take(even_estate *estate, even_lost_host lost, even_hosts **out) {
  static const even_host_wish wishes[] = {{.name = "here"}, {.name = "there"}, {.name = "beyond"}};
  static char *const shell[] = {(char *)(uintptr_t)"/nonexistent/shell", NULL};
  const even_hosts_params params = {.size = sizeof params,
                                    .hosts = wishes,
                                    .count = 3,
                                    .shell = shell,
                                    .program = "/usr/bin/evenstep",
                                    .folder = "/",
                                    .patience_seconds = 100,
                                    .lost = lost,
                                    .estate = estate};
  return even_hosts_open(&params, out);
}

/* It has come, and is lost while it is asked what it has: it is missed like one that is lost at another time. */
static void who_comes_and_is_lost_again_does_not_end_the_job(void **state) {
  (void)state;
  for (int ends_it = 0; ends_it <= 1; ends_it++) {
    even_estate estate = {.self = SELF, .generation = 1};
    even_hosts *hosts = NULL;
    pthread_t thread;
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    const pid_t agents[] = {start_agent(3, true, ends), start_agent(4, false, ends)};
    memcpy(estate.key_digits, KEY, sizeof KEY);
    assert_int_equal(even_json_parse("what was left", LEFT, strlen(LEFT), &estate.content), EVEN_OK);
    open_voter(&estate);
    telling own = {.voter = estate.voter, .pipe = ends[1], .agents = 2};
    assert_int_equal(pthread_create(&thread, NULL, tell_agents, &own), 0);
    even_status status = take(&estate, ends_it ? EVEN_LOST_END : EVEN_LOST_GO_ON, &hosts);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(status, ends_it ? EVEN_ERR_PEER_LOST : EVEN_OK);
    if (!ends_it) {
      assert_int_equal(hosts->count, 3);
      assert_true(hosts->agents[1].lost);
      assert_int_equal(hosts->agents[1].lacked, 2);
      assert_int_equal(even_hosts_devices(hosts, 1)->count, 0);
      assert_true(hosts->agents[2].fits);
      assert_int_equal(even_hosts_devices(hosts, 2)->count, 1);
    }
    even_hosts_close(hosts);
    for (size_t i = 0; i < 2; i++) {
      assert_int_equal(waitpid(agents[i], NULL, 0), agents[i]);
    }
    even_voter_close(estate.voter, true);
    json_decref(estate.content);
    (void)close(ends[0]);
    (void)close(ends[1]);
  }
}

int main(void) {
  struct sigaction before;
  const struct CMUnitTest tests[] = {cmocka_unit_test(who_comes_and_is_lost_again_does_not_end_the_job)};
  if (even_signals_pipe_ignore(&before) != EVEN_OK) {
    return 1;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
