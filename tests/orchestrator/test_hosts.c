/* A leader and agents that are none: this program itself, started as the shell that reaches a host, plays them. */
#include "orchestrator/hosts.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "base/stop.h"
#include "orchestrator/elastic.h"
#include "orchestrator/follower_agent.h"
#include "orchestrator/legacy.h"
#include "orchestrator/link.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/socket.h"
#include "support/descriptors.h"
#include "support/fault.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- what the shell starts ---- */

typedef struct made_up_agent {
  even_link link;
  even_loop loop;
  const char *kind;
  bool over;
} made_up_agent;

static void say(made_up_agent *agent, even_message_kind kind, const char *json) {
  if (even_link_send(&agent->link, kind, json, NULL, 0) != EVEN_OK) {
    agent->over = true;
  }
}

static void on_ready(void *context, even_link *link) {
  made_up_agent *agent = context;
  (void)link;
  if (strcmp(agent->kind, "old") == 0) {
    say(agent, EVEN_MESSAGE_GREET, "{\"evenstep\":\"0.0.1\",\"protocol\":1,\"record_bytes\":1,\"host\":1}");
  } else if (strcmp(agent->kind, "odd") == 0) {
    say(agent, EVEN_MESSAGE_FACTS, "{}");
  } else if (strcmp(agent->kind, "stranger") == 0) {
    say(agent, EVEN_MESSAGE_GREET, "{\"evenstep\":\"0.0.1\",\"host\":7}");
  }
}

/* A refusal is printed, as a true agent does. */
static even_status on_message(void *context, even_link *link, const even_message *message) {
  made_up_agent *agent = context;
  (void)link;
  (void)fprintf(stderr, "heard %d: %.*s\n", (int)message->kind, (int)message->json_bytes, message->json);
  agent->over = true;
  return EVEN_OK;
}

static void on_ended(void *context, even_link *link) {
  (void)link;
  ((made_up_agent *)context)->over = true;
}

/* A true agent that another one of its number has come before: the leader does not wait for it. */
static int come_second(char *line) {
  char *number = strstr(line, "\"host\":1");
  bool met = true;
  int code = 0;
  if (number == NULL) {
    return 1;
  }
  number[strlen("\"host\":")] = '7';
  even_status status = even_hosts_serve(line, NULL, &met, NULL, NULL, &code);
  (void)fprintf(stderr, "%s, %s\n", met ? "met" : "not met", even_status_name(status));
  return 1;
}

static int play(const char *kind) {
  made_up_agent agent = {.kind = kind};
  const even_link_calls calls = {.context = &agent, .ready = on_ready, .message = on_message, .ended = on_ended};
  unsigned char key[EVEN_TLS_KEY_BYTES];
  char line[4096];
  json_t *invitation = NULL;
  int fd = -1;
  if (strcmp(kind, "none") == 0) {
    (void)fprintf(stderr, "ssh: connect to host there port 22: No route to host\n");
    return 255;
  }
  if (strcmp(kind, "unknown") == 0 || strcmp(kind, "spaced") == 0) {
    (void)fprintf(stderr, "No ED25519 host key is known for there.\r\nHost key verification failed.\r\n");
    return 255;
  }
  if (strcmp(kind, "denied") == 0) {
    (void)fprintf(stderr, "me@there: Permission denied (publickey).\r\n");
    return 255;
  }
  if (strcmp(kind, "kept") == 0) { /* a child that keeps what its parent printed to, until it is killed with it */
    (void)fprintf(stderr, "mux_client_request_session: read from master failed\n");
    if (fork() == 0) {
      (void)pause();
    }
    return 255;
  }
  if (strcmp(kind, "asleep") == 0) { /* as ssh waits for a host that does not answer */
    return pause();
  }
  if (fgets(line, sizeof line, stdin) == NULL) {
    return 1;
  }
  if (strcmp(kind, "second") == 0) {
    return come_second(line);
  }
  if (even_json_parse("invitation", line, strlen(line), &invitation) != EVEN_OK ||
      even_tls_key_read(json_string_value(json_object_get(invitation, "key")), key) != EVEN_OK ||
      even_loop_open(&agent.loop) != EVEN_OK ||
      even_socket_connect("127.0.0.1", (int)json_integer_value(json_object_get(invitation, "port")), 5000, &fd) !=
          EVEN_OK ||
      even_link_open(&agent.link, &agent.loop, fd, false, key, &calls) != EVEN_OK) {
    return 1;
  }
  while (!agent.over && even_loop_turn(&agent.loop, 100) == EVEN_OK) {
    even_link_tick(&agent.link, false);
  }
  even_link_close(&agent.link);
  json_decref(invitation);
  return 0;
}

/* ---- the leader ---- */

static even_status lead_after(const char *kind, double patience_seconds, const even_legacy *before, even_lost_host lost,
                              even_hosts **out) {
  static const even_host_wish wishes[] = {{.name = "here", .ranks = 1}, {.name = "there", .ranks = 1}};
  char program[] = "/proc/self/exe";
  char word[16];
  char option[] = "-o";
  char value[256] = "BatchMode=yes"; /* as ssh's */
  char together[] = "-oBatchMode=yes";
  char spaced[] = "-i it's my key";
  char *shell[] = {program, word, option, value, together, spaced, NULL};
  if (strcmp(kind, "spaced") != 0) {
    shell[4] = NULL;
  }
  (void)snprintf(word, sizeof word, "%s", kind);
  memset(value, 'x', strcmp(kind, "denied") == 0 ? sizeof value - 1 : 0);
  const even_hosts_params params = {.size = sizeof params,
                                    .hosts = wishes,
                                    .count = 2,
                                    .shell = shell,
                                    .program = "/usr/bin/evenstep",
                                    .folder = "/",
                                    .patience_seconds = patience_seconds,
                                    .lost = lost,
                                    .before = before};
  return even_hosts_open(&params, out);
}

static even_status lead(const char *kind, double patience_seconds) {
  even_hosts *hosts = NULL;
  even_status status = lead_after(kind, patience_seconds, NULL, EVEN_LOST_GO_ON, &hosts);
  assert_null(hosts);
  return status;
}

static void another_version_is_refused(void **state) {
  (void)state;
  assert_int_equal(lead("old", 100), EVEN_ERR_UNSUPPORTED);
  assert_non_null(strstr(even_error_last()->what, "host there has evenstep 0.0.1, this one "));
  assert_non_null(strstr(even_error_last()->fix, "/usr/bin/evenstep"));
}

static void a_shell_that_fails_is_quoted(void **state) {
  (void)state;
  assert_int_equal(lead("none", 100), EVEN_ERR_PEER_LOST);
  assert_string_equal(even_error_last()->what,
                      "host there: its agent ended before it came here: ssh: connect to host "
                      "there port 22: No route to host");
  assert_non_null(
      strstr(even_error_last()->fix, "try `/proc/self/exe none -o BatchMode=yes there /usr/bin/evenstep --version`"));
}

/* What an agent leaves that had one other host, or two with one that was left out. */
static void leave_hosts(even_legacy *out, even_host_agent *agents, size_t count, even_elastic *elastic) {
  even_hosts hosts = {.agents = agents, .count = count, .elastic = elastic};
  even_job job = {.hosts = &hosts};
  assert_int_equal(even_legacy_open(out), EVEN_OK);
  assert_int_equal(even_legacy_leave(out, &job), EVEN_OK);
}

static void after_a_killed_agent_no_host_is_started_that_it_did_without(void **state) {
  even_host_agent agents[1] = {{.name = "here"}};
  even_elastic elastic = {.left = {{.name = "there", .ranks = 3}}, .left_count = 1};
  (void)state;
  for (int drained = 0; drained <= 1; drained++) {
    even_hosts *hosts = NULL;
    even_legacy legacy;
    elastic.left_count = drained ? 0 : 1;
    leave_hosts(&legacy, agents, 1, &elastic);
    assert_int_equal(lead_after("none", 100, &legacy, EVEN_LOST_END, &hosts), EVEN_OK);
    assert_int_equal(even_hosts_count(hosts), 1);
    assert_int_equal(hosts->elastic->left_count, drained ? 0 : 1);
    assert_int_equal(even_hosts_absent_ranks(hosts), drained ? 0 : 3);
    if (!drained) {
      assert_string_equal(hosts->elastic->left[0].name, "there");
      assert_int_equal(hosts->elastic->left[0].ranks, 3);
      assert_false(hosts->elastic->left[0].in);
      assert_true(hosts->elastic->left[0].next_ns > even_clock_ns());
    }
    even_hosts_close(hosts);
    even_legacy_close(&legacy);
  }
}

static void after_a_killed_agent_a_host_that_does_not_come_ends_nothing(void **state) {
  even_host_agent agents[2] = {{.name = "here"}, {.name = "there", .wish = 1, .count = 2}};
  even_elastic elastic = {.left_count = 0};
  even_hosts *hosts = NULL;
  even_legacy legacy;
  even_job job;
  even_agent_params params;
  (void)state;
  memset(&job, 0, sizeof job);
  memset(&params, 0, sizeof params);
  leave_hosts(&legacy, agents, 2, &elastic);
  assert_int_equal(lead_after("none", 100, &legacy, EVEN_LOST_END, &hosts), EVEN_ERR_PEER_LOST);
  assert_null(hosts);
  assert_int_equal(lead_after("old", 100, &legacy, EVEN_LOST_GO_ON, &hosts), EVEN_ERR_UNSUPPORTED); /* it did come */
  assert_null(hosts);
  assert_int_equal(lead_after("none", 100, &legacy, EVEN_LOST_GO_ON, &hosts), EVEN_OK);
  assert_int_equal(hosts->count, 2);
  assert_int_equal(hosts->agents[1].lacked, 2);
  assert_int_equal(even_hosts_absent_ranks(hosts), 2);
  assert_int_equal(even_hosts_devices(hosts, 1)->count, 0);
  job.hosts = hosts;
  job.params = &params;
  hosts->params.least_ranks = 1;
  assert_true(even_elastic_begins_without(&job));
  assert_false(even_elastic_begins_without(&job)); /* once */
  assert_true(hosts->agents[1].leaves && hosts->agents[1].away && hosts->agents[1].count == 2);
  assert_non_null(strstr(hosts->agents[1].lost_words, "No route to host"));
  job.local = 1;
  assert_false(even_elastic_lacks(&job));
  hosts->params.least_ranks = 0;
  hosts->params.lost = EVEN_LOST_WAIT;
  assert_true(even_elastic_lacks(&job));
  even_hosts_close(hosts);
  even_legacy_close(&legacy);
}

static void what_ssh_says_has_its_fix(void **state) {
  (void)state;
  assert_int_equal(lead("unknown", 100), EVEN_ERR_PEER_LOST);
  assert_string_equal(even_error_last()->what,
                      "host there: its agent ended before it came here: Host key verification failed.");
  assert_non_null(strstr(even_error_last()->fix, "`/proc/self/exe unknown there true` here asks once"));
  assert_int_equal(lead("spaced", 100), EVEN_ERR_PEER_LOST);
  assert_non_null(
      strstr(even_error_last()->fix, "`/proc/self/exe spaced '-i it'\\''s my key' there true` here asks once"));
  assert_int_equal(lead("denied", 100), EVEN_ERR_PEER_LOST);
  assert_non_null(strstr(even_error_last()->what, "me@there: Permission denied (publickey)."));
  assert_non_null(strstr(even_error_last()->fix, "`ssh-copy-id there`"));
  /* a long command is not cut up */
  assert_non_null(strstr(even_error_last()->fix, "try `/proc/self/exe … there true`"));
}

/* What is not the greeting of a host that is waited for ends that connection, and nothing else. */
static void odd_words_let_nobody_in(void **state) {
  (void)state;
  assert_int_equal(lead("odd", 100), EVEN_ERR_PEER_LOST);
  assert_non_null(strstr(even_error_last()->what, "ended before it came here"));
  assert_int_equal(lead("stranger", 100), EVEN_ERR_PEER_LOST);
}

/* It may try again: a host that was lost is waited for anew only once the leader knows that it was. */
static void who_is_not_waited_for_was_not_met(void **state) {
  (void)state;
  assert_int_equal(lead("second", 100), EVEN_ERR_PEER_LOST);
  const char *what = even_error_last()->what;
  bool may_come = strstr(what, "not met, EVEN_ERR_PEER_LOST") != NULL; /* all of which are tried again */
  may_come = may_come || strstr(what, "not met, EVEN_ERR_SYSTEM") != NULL;
  may_come = may_come || strstr(what, "not met, EVEN_ERR_TIMEOUT") != NULL;
  if (!may_come || strstr(what, "ended before it came here: ") == NULL) {
    fail_msg("%s", what);
  }
}

static void who_says_nothing_is_not_waited_for_long(void **state) {
  (void)state;
  assert_int_equal(lead("mute", 0.3), EVEN_ERR_TIMEOUT);
  assert_non_null(strstr(even_error_last()->what, "host there: its agent did not come here within 0.3 s"));
}

static void a_shell_has_ended_also_where_another_holds_its_pipes(void **state) {
  (void)state;
  assert_int_equal(lead("kept", 100), EVEN_ERR_PEER_LOST);
  assert_non_null(strstr(even_error_last()->what, "ended before it came here: mux_client_request_session: read"));
}

/* ---- Ctrl-C while hosts are waited for ---- */

static bool connects; /* an agent, which is waited for; */
static bool is_there; /* it has */
static int turns;     /* of the loop, since Ctrl-C */

static bool user_asks(void) {
  return is_there || !connects;
}

static int accept_it(int fd, struct sockaddr *address, socklen_t *bytes, int flags) {
  int made = even_os_real.accept4(fd, address, bytes, flags);
  is_there = is_there || made >= 0;
  return made;
}

static int count_turn(int fd, struct epoll_event *events, int most, int timeout_ms) {
  turns += user_asks() ? 1 : 0;
  return even_os_real.epoll_wait(fd, events, most, timeout_ms);
}

static void who_has_not_come_when_the_user_ends_it_is_not_waited_for(void **state) {
  static const char *const kinds[] = {"asleep", "mute"};
  (void)state;
  for (size_t i = 0; i < 2; i++) {
    connects = i == 1;
    is_there = false;
    turns = 0;
    even_os.accept4 = accept_it;
    even_os.epoll_wait = count_turn;
    even_stop_when(user_asks);
    even_status status = lead(kinds[i], 100);
    even_stop_when(NULL);
    even_os = even_os_real;
    assert_int_equal(status, EVEN_ERR_INTERRUPTED);
    assert_int_equal(turns, 0);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* nor is it left */
  }
}

static uint64_t full_until_ns;
static int refusals;

static int accept_without_descriptors(int fd, struct sockaddr *address, socklen_t *bytes, int flags) {
  full_until_ns = refusals == 0 ? even_clock_ns() + 500000000u : full_until_ns;
  if (even_clock_ns() < full_until_ns) {
    refusals++;
    errno = EMFILE;
    return -1;
  }
  return even_os_real.accept4(fd, address, bytes, flags);
}

static void without_descriptors_a_connection_waits_and_the_loop_does_not_spin(void **state) {
  (void)state;
  refusals = 0;
  even_os.accept4 = accept_without_descriptors;
  even_status status = lead("old", 100);
  even_os = even_os_real;
  assert_int_equal(status, EVEN_ERR_UNSUPPORTED);
  assert_in_range(refusals, 1, 50); /* about one a tick */
}

/* ---- each call to the kernel, and each allocation, failing once ---- */

enum { MOST_FAULTS = 2000 };

/* Whatever fails, here or in the child between fork and exec: the opening ends, for that reason or with the refusal of
 * another version, which is as far as such an agent comes; nothing stays open, and no memory is left. */
static void each_fault_ends_the_opening_and_leaves_nothing(void **state) {
  (void)state;
  int before = open_descriptors();
  long nth = 0;
  bool whole = false;
  while (!whole && nth < MOST_FAULTS) {
    fault_reset();
    fault_allocation(0);
    fault_os_any(++nth, EIO);
    even_status status = lead("old", 100);
    whole = fault_os_calls(FAULT_CALL_COUNT) < nth && status == EVEN_ERR_UNSUPPORTED;
    long left = fault_live_blocks();
    fault_reset();
    if (status == EVEN_OK || status == EVEN_ERR_TIMEOUT) { /* who cannot go on says so at once */
      fail_msg("with call %ld failing: %s", nth, even_error_last()->what);
    }
    if (left != 0 || open_descriptors() != before) {
      fail_msg("with call %ld failing, %ld blocks and %d descriptors were left", nth, left,
               open_descriptors() - before);
    }
  }
  assert_in_range(nth, 20, MOST_FAULTS - 1);
}

static void each_lack_of_memory_ends_the_opening(void **state) {
  (void)state;
  int before = open_descriptors();
  long nth = 0;
  bool whole = false;
  while (!whole && nth < MOST_FAULTS) {
    fault_reset();
    fault_allocation(++nth);
    even_status status = lead("old", 100);
    whole = fault_allocations() < nth;
    long left = fault_live_blocks();
    fault_reset();
    if (status != EVEN_ERR_MEMORY && status != EVEN_ERR_UNSUPPORTED && status != EVEN_ERR_PEER_LOST) {
      fail_msg("with allocation %ld failing: %s: %s", nth, even_status_name(status), even_error_last()->what);
    }
    if (left != 0 || open_descriptors() != before) {
      fail_msg("with allocation %ld failing, %ld blocks and %d descriptors were left", nth, left,
               open_descriptors() - before);
    }
  }
  assert_in_range(nth, 10, MOST_FAULTS - 1);
}

/* A GPU of these may be gone: for new ranks others would be chosen. */
static void who_takes_ranks_over_knows_what_they_run_on(void **state) {
  int32_t cpus[] = {4, 5};
  even_device all[] = {{.name = "elsewhere"}, {.name = "cuda:0"}, {.name = "cpu:4-5", .cpus = cpus, .cpu_count = 2}};
  const even_device_list devices = {all, 3};
  const even_agent_params params = {.devices = &devices};
  static even_follower follower;
  even_estate estate = {.holds = &follower};
  const even_hosts hosts = {.params = {.estate = &estate}, .adopts = true};
  even_device_list held;
  (void)state;
  follower.job = (even_job){.params = &params, .first = 1, .local = 2, .count = 3};
  assert_int_equal(even_hosts_held_devices(&hosts, &held), EVEN_OK);
  assert_int_equal(held.count, 2);
  assert_string_equal(held.items[0].name, "cuda:0");
  assert_string_equal(held.items[1].name, "cpu:4-5");
  assert_ptr_not_equal(held.items[1].cpus, cpus);
  assert_memory_equal(held.items[1].cpus, cpus, sizeof cpus);
  even_device_list_free(&held);
}

/* Whoever has left the job since. */
static void who_was_launched_is_known_by_its_place(void **state) {
  char *shell[] = {NULL};
  even_host_agent agents[3] = {{.name = "here"}, {.name = "c", .place = 2}, {.name = "d", .place = 3}};
  even_hosts hosts = {.agents = agents, .count = 3};
  (void)state;
  assert_int_equal(even_hosts_index_of(&hosts, 1), -1);
  assert_int_equal(even_hosts_index_of(&hosts, 2), 1);
  assert_int_equal(even_hosts_index_of(&hosts, 3), 2);
  hosts.params.shell = shell; /* started from here, each has its number among the hosts */
  agents[1].place = agents[2].place = 0;
  assert_int_equal(even_hosts_index_of(&hosts, 1), 1);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(another_version_is_refused),
      cmocka_unit_test(a_shell_that_fails_is_quoted),
      cmocka_unit_test(after_a_killed_agent_no_host_is_started_that_it_did_without),
      cmocka_unit_test(after_a_killed_agent_a_host_that_does_not_come_ends_nothing),
      cmocka_unit_test(what_ssh_says_has_its_fix),
      cmocka_unit_test(odd_words_let_nobody_in),
      cmocka_unit_test(who_is_not_waited_for_was_not_met),
      cmocka_unit_test(who_says_nothing_is_not_waited_for_long),
      cmocka_unit_test(a_shell_has_ended_also_where_another_holds_its_pipes),
      cmocka_unit_test(who_has_not_come_when_the_user_ends_it_is_not_waited_for),
      cmocka_unit_test(without_descriptors_a_connection_waits_and_the_loop_does_not_spin),
      cmocka_unit_test(who_takes_ranks_over_knows_what_they_run_on),
      cmocka_unit_test(each_fault_ends_the_opening_and_leaves_nothing),
      cmocka_unit_test(each_lack_of_memory_ends_the_opening),
      cmocka_unit_test(who_was_launched_is_known_by_its_place),
  };
  return argc > 4 ? play(argv[1]) : cmocka_run_group_tests(tests, NULL, NULL);
}
