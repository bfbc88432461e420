/* Hosts that leave a job with voters: three members of a group, in this process, and no agents. */
#include "orchestrator/succession.h"

#include "an_agent.h"
#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/elastic.h"
#include "orchestrator/succession_members.h"
#include "os/clock.h"
#include "os/listener.h"
#include "os/signals.h"
#include "os/socket.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { COUNT = 3 };

/* Far beyond what any of it takes: a machine may be slow. */
static const uint64_t LIMIT_NS = 120000000000u;
static const char KEY[] = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

typedef struct scene {
  char folder[40];
  int ports[COUNT];
  even_voter_member members[COUNT];
  even_voter *voters[COUNT]; /* the first is the leader's, the hosts' */
  even_link links[COUNT];
  even_agent_params params;
  even_hosts hosts;
  even_job job;
  bool returns; /* the second one, once it is said that it is waited for */
  char told[1024];
} scene;

static void begin(scene *of, size_t i, bool returns) {
  even_voter_params params = {.size = sizeof params,
                              .self = of->members[i].id,
                              .members = of->members,
                              .count = COUNT,
                              .first = 1,
                              .returns = returns,
                              .folder = of->folder,
                              .silence_ms = EVEN_SOCKET_SHORTEST_SILENCE_MS};
  assert_int_equal(even_listener_open("127.0.0.1", &of->ports[i], &params.listener), EVEN_OK);
  (void)snprintf(of->members[i].address, sizeof of->members[i].address, "127.0.0.1:%d", of->ports[i]);
  assert_int_equal(even_tls_key_read(KEY, params.key), EVEN_OK);
  assert_int_equal(even_voter_open(&params, &of->voters[i]), EVEN_OK);
}

static void keep_notice(void *context, const char *text) {
  scene *of = context;
  (void)snprintf(of->told + strlen(of->told), sizeof of->told - strlen(of->told), "%s\n", text);
  if (of->returns) {
    of->returns = false;
    begin(of, 1, true);
  }
}

static bool all_stand(const scene *of) {
  bool all = true;
  for (size_t i = 0; all && i < COUNT; i++) {
    even_voter_view view;
    even_voter_look(of->voters[i], &view);
    all = view.newest.generation == 1 && view.voters == COUNT && (i > 0 || (view.acts && view.settled));
  }
  return all;
}

static void open_hosts(scene *of) {
  static const char *const names[] = {"here", "b", "c"};
  of->params.observer.context = of;
  of->params.observer.notice = keep_notice;
  of->job = (even_job){.params = &of->params, .hosts = &of->hosts, .guardian = {.pid = -1, .pipe = -1, .page_fd = -1}};
  of->hosts = (even_hosts){.count = COUNT,
                           .room = COUNT,
                           .job = &of->job,
                           .self = 1,
                           .generation = 1,
                           .voter = of->voters[0],
                           .voter_port = of->ports[0],
                           .listener = -1,
                           .listen_ns = UINT64_MAX,
                           .listener_watch = {.fd = -1},
                           .params = {.patience_seconds = 600, .majority_seconds = 100}};
  assert_int_equal(even_loop_open(&of->hosts.loop), EVEN_OK);
  assert_int_equal(even_elastic_open(&of->hosts), EVEN_OK);
  assert_int_equal(EVEN_NEW_ARRAY(&of->hosts.agents, COUNT), EVEN_OK);
  assert_int_equal(even_hosts_open_parcels(&of->hosts), EVEN_OK);
  for (size_t i = 0; i < COUNT; i++) {
    of->links[i] = (even_link){.fd = -1}; /* nothing comes by it */
    of->hosts.agents[i] = an_agent(&of->hosts, i, names[i]);
    of->hosts.agents[i].member = i + 1;
    of->hosts.agents[i].voter_port = of->ports[i];
    of->hosts.agents[i].link = i > 0 ? &of->links[i] : NULL;
  }
}

static int open_scene(void **state) {
  static scene of;
  const uint64_t until = even_clock_ns() + LIMIT_NS;
  of = (scene){.returns = false};
  (void)snprintf(of.folder, sizeof of.folder, "/tmp/evenstep-votes-XXXXXX");
  assert_non_null(mkdtemp(of.folder));
  even_socket_silence_set(EVEN_SOCKET_SHORTEST_SILENCE_MS);
  for (size_t i = 0; i < COUNT; i++) { /* where each listens all are to know */
    int fd = -1;
    of.members[i].id = i + 1;
    assert_int_equal(even_listener_open("127.0.0.1", &of.ports[i], &fd), EVEN_OK);
    (void)snprintf(of.members[i].address, sizeof of.members[i].address, "127.0.0.1:%d", of.ports[i]);
    even_listener_close(fd);
  }
  for (size_t i = 0; i < COUNT; i++) {
    begin(&of, i, false);
  }
  open_hosts(&of);
  assert_int_equal(even_succession_want(&of.hosts), EVEN_OK);
  while (!all_stand(&of)) {
    assert_true(even_clock_ns() < until);
    even_clock_sleep_ns(5000000);
  }
  *state = &of;
  return 0;
}

static int close_scene(void **state) {
  scene *of = *state;
  char command[80];
  for (size_t i = 0; i < COUNT; i++) {
    even_voter_close(of->voters[i], true); /* NULL: it is gone */
  }
  even_elastic_close(&of->hosts);
  even_free(of->hosts.elastic);
  even_parcels_close(of->hosts.parcels);
  even_free(of->hosts.agents);
  even_loop_close(&of->hosts.loop);
  (void)snprintf(command, sizeof command, "rm -rf %s", of->folder);
  return system(command) == 0 ? 0 : -1;
}

static void leave(scene *of) {
  of->hosts.agents[2].leaves = of->hosts.agents[2].cannot_vote = true;
  of->hosts.agents[2].member = 0;
}

static void it_votes_no_more_when_it_goes(void **state) {
  scene *of = *state;
  even_voter_view view;
  leave(of);
  assert_int_equal(even_succession_release(&of->job), EVEN_OK);
  even_voter_look(of->voters[0], &view);
  assert_true(view.exact);
  assert_string_equal(of->told, "");
}

/* b does not answer just then: without c's vote a alone would be left of three. */
static void it_stays_as_long_as_the_rest_could_elect_nobody(void **state) {
  scene *of = *state;
  even_voter_view view;
  even_voter_close(of->voters[1], false);
  of->voters[1] = NULL;
  of->returns = true;
  leave(of);
  assert_int_equal(even_succession_release(&of->job), EVEN_OK);
  assert_non_null(strstr(of->told, "c stays until the other hosts have agreed that it votes no more"));
  assert_non_null(of->voters[1]); /* not before */
  even_voter_look(of->voters[0], &view);
  assert_true(view.exact);
}

/* Nor is it told to go when nobody comes. */
static void it_is_waited_for_as_long_as_for_a_majority(void **state) {
  scene *of = *state;
  even_voter_close(of->voters[1], false);
  of->voters[1] = NULL;
  of->hosts.params.majority_seconds = 0.001;
  leave(of);
  assert_int_equal(even_succession_release(&of->job), EVEN_ERR_PEER_LOST);
  assert_non_null(strstr(even_error_last()->fix, "EVENSTEP_MAJORITY_PATIENCE"));
}

int main(void) {
  struct sigaction before;
#define SCENE(test) cmocka_unit_test_setup_teardown(test, open_scene, close_scene)
  const struct CMUnitTest tests[] = {
      SCENE(it_votes_no_more_when_it_goes),
      SCENE(it_stays_as_long_as_the_rest_could_elect_nobody),
      SCENE(it_is_waited_for_as_long_as_for_a_majority),
  };
  if (even_signals_pipe_ignore(&before) != EVEN_OK) {
    return 1;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
