/* An agent that is to be a member, and what it answers: over a link between two ends in this process. */
#include "orchestrator/candidate.h"

#include "base/json_reader.h"
#include "base/json_writer.h"
#include "os/clock.h"
#include "os/listener.h"
#include "os/signals.h"
#include "os/socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static const char INVITATION[] = "{\"key\":\"00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff\"}";
static const unsigned char KEY[EVEN_TLS_KEY_BYTES] = "of the link, not of the members.";
static const uint64_t LIMIT_NS = 120000000000u;

typedef struct meeting {
  even_loop loop;
  even_link leader;
  even_link agent;
  even_candidate candidate;
  char folder[40];
  int answers;
  json_int_t number; /* that it says again */
  uint64_t member;
  bool trouble; /* the newest answer says so */
  int port;
} meeting;

static void on_ready(void *context, even_link *link) {
  (void)context;
  (void)link;
}

static even_status on_message(void *context, even_link *link, const even_message *message) {
  meeting *at = context;
  json_t *content = NULL;
  (void)link;
  assert_int_equal(message->kind, EVEN_MESSAGE_VOTES);
  assert_int_equal(even_json_parse("an answer", message->json, message->json_bytes, &content), EVEN_OK);
  at->member = (uint64_t)json_integer_value(json_object_get(content, "member"));
  at->number = json_integer_value(json_object_get(content, "number"));
  at->trouble = json_is_string(json_object_get(content, "trouble"));
  at->port = (int)json_integer_value(json_object_get(content, "port"));
  at->answers++;
  json_decref(content);
  return EVEN_OK;
}

static void on_ended(void *context, even_link *link) {
  (void)context;
  fail_msg("the link has ended: %s", even_link_why(link)->what);
}

static void turn(meeting *at) {
  assert_int_equal(even_loop_turn(&at->loop, 20), EVEN_OK);
  even_link_tick(&at->leader, false);
  even_link_tick(&at->agent, false);
}

static void meet(meeting *at, const char *invitation) {
  const even_link_calls calls = {.context = at, .ready = on_ready, .message = on_message, .ended = on_ended};
  int listener = -1;
  int port = 0;
  int called = -1;
  int taken = -1;
  uint64_t until = even_clock_ns() + LIMIT_NS;
  *at = (meeting){.loop = {.fd = -1}, .leader = {.fd = -1}, .agent = {.fd = -1}, .folder = "/tmp/evenstep-XXXXXX"};
  assert_non_null(mkdtemp(at->folder));
  assert_int_equal(even_loop_open(&at->loop), EVEN_OK);
  assert_int_equal(even_listener_open("127.0.0.1", &port, &listener), EVEN_OK);
  assert_int_equal(even_socket_connect("127.0.0.1", port, 60000, &called), EVEN_OK);
  while (taken < 0 && even_clock_ns() < until) {
    assert_int_equal(even_socket_accept(listener, &taken), EVEN_OK);
  }
  even_listener_close(listener);
  assert_int_equal(even_link_open(&at->leader, &at->loop, taken, true, KEY, &calls), EVEN_OK);
  assert_int_equal(even_link_open(&at->agent, &at->loop, called, false, KEY, &calls), EVEN_OK);
  while (!even_link_is_up(&at->leader) || !even_link_is_up(&at->agent)) {
    assert_true(even_clock_ns() < until);
    turn(at);
  }
  even_candidate_open(&at->candidate, invitation);
}

static void part(meeting *at) {
  char path[80];
  even_candidate_close(&at->candidate);
  even_link_close(&at->agent);
  even_link_close(&at->leader);
  even_loop_close(&at->loop);
  (void)snprintf(path, sizeof path, "rm -r %s", at->folder);
  assert_int_equal(system(path), 0); /* NOLINT(cert-env33-c, concurrency-mt-unsafe): a folder of this test */
}

/* What the leader says of member `self`; `how`: "begins", "joins", "returns", "" of one that is a member. */
static even_status say_all(meeting *at, uint64_t self, const char *how, int silence_ms,
                           const even_voter_member *members, size_t count) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_unsigned(&json, "self", self);
  even_json_integer(&json, "number", at->answers + 5);
  even_json_integer(&json, "silence_ms", silence_ms);
  even_json_unsigned(&json, "first", 1);
  even_json_unsigned(&json, "generation", 1);
  even_json_string(&json, "folder", at->folder);
  if (how[0] != '\0') {
    even_json_bool(&json, how, true);
  }
  even_json_array(&json, "members");
  for (size_t i = 0; i < count; i++) {
    even_json_object(&json, NULL);
    even_json_unsigned(&json, "id", members[i].id);
    even_json_string(&json, "address", members[i].address);
    even_json_object_end(&json);
  }
  even_json_array_end(&json);
  even_json_object_end(&json);
  assert_int_equal(even_text_status(&text), EVEN_OK);
  const even_message message = {.kind = EVEN_MESSAGE_MEMBERS, .json = text.data, .json_bytes = text.length};
  even_status status = even_candidate_take(&at->candidate, &at->agent, &message);
  even_text_free(&text);
  return status;
}

static even_status say_members(meeting *at, uint64_t self, const char *how, int silence_ms) {
  const even_voter_member members[] = {{1, "127.0.0.1:1"}, {self, "127.0.0.1:2"}}; /* nobody plays the leader */
  return say_all(at, self, how, silence_ms, members, 2);
}

/* Whether it is one, by its answer. */
static bool is_member(meeting *at, uint64_t self, const char *how) {
  uint64_t until = even_clock_ns() + LIMIT_NS;
  int before = at->answers;
  assert_int_equal(say_members(at, self, how, EVEN_SOCKET_SILENCE_MS), EVEN_OK);
  while (at->answers == before) {
    assert_true(even_clock_ns() < until);
    turn(at);
  }
  assert_int_equal(at->member, self);
  assert_int_equal(at->number, before + 5);
  return !at->trouble;
}

/* With a log that it made anew it would vote a second time in a term in which it has voted. */
static void who_has_forgotten_its_log_is_another_member(void **state) {
  meeting at;
  (void)state;
  meet(&at, INVITATION);
  assert_false(is_member(&at, 3, "returns"));
  assert_null(at.candidate.voter);
  assert_true(at.port > 0); /* it listens for the next try */
  assert_false(is_member(&at, 3, ""));
  assert_false(is_member(&at, 3, "begins"));
  assert_false(is_member(&at, 3, "joins"));
  assert_false(is_member(&at, 3, "returns"));
  assert_null(at.candidate.voter);
  assert_true(is_member(&at, 7, "joins"));
  assert_non_null(at.candidate.voter);
  assert_true(is_member(&at, 7, ""));
  assert_int_equal(at.port, at.candidate.port);
  /* its leader has lost count of it: a new number is a new member, and a word for another one is none for it */
  assert_false(is_member(&at, 8, ""));
  assert_int_equal(at.candidate.self, 7);
  assert_true(is_member(&at, 9, "joins"));
  assert_int_equal(at.candidate.self, 9);
  part(&at);
}

static void only_one_that_begins_makes_a_log(void **state) {
  meeting at;
  (void)state;
  meet(&at, INVITATION);
  assert_false(is_member(&at, 2, ""));
  assert_null(at.candidate.voter);
  assert_true(is_member(&at, 2, "begins"));
  assert_non_null(at.candidate.voter);
  part(&at);
}

static void who_cannot_vote_says_so(void **state) {
  meeting at;
  (void)state;
  meet(&at, "{}");
  assert_false(is_member(&at, 2, "begins"));
  assert_false(is_member(&at, 3, "joins"));
  part(&at);
  meet(&at, INVITATION);
  even_candidate_settle(&at.candidate); /* an attempt began without it */
  assert_int_equal(at.candidate.listener, -1);
  assert_true(is_member(&at, 3, "joins"));
  part(&at);
}

/* Before it votes: with another time it could be elected while the leader acts. */
static void who_votes_bears_silence_as_its_leader_does(void **state) {
  meeting at;
  int borne_ms = 0;
  socklen_t bytes = sizeof borne_ms;
  (void)state;
  meet(&at, INVITATION);
  assert_int_equal(say_members(&at, 2, "begins", EVEN_SOCKET_SHORTEST_SILENCE_MS - 1), EVEN_ERR_INPUT);
  assert_int_equal(say_members(&at, 2, "begins", EVEN_SOCKET_LONGEST_SILENCE_MS + 1), EVEN_ERR_INPUT);
  assert_null(at.candidate.voter);
  assert_int_equal(even_socket_silence(), EVEN_SOCKET_SILENCE_MS);
  assert_int_equal(say_members(&at, 2, "begins", 90000), EVEN_OK);
  assert_non_null(at.candidate.voter);
  assert_int_equal(even_socket_silence(), 90000);
  assert_int_equal(getsockopt(at.agent.fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &borne_ms, &bytes), 0);
  assert_int_equal(borne_ms, 90000);
  part(&at);
  even_socket_silence_set(0);
}

static even_voter *begin_other(const even_voter_member *members, size_t i, int listener, const meeting *at) {
  even_voter *voter = NULL;
  even_voter_params params = {.size = sizeof params,
                              .self = members[i].id,
                              .listener = listener,
                              .members = members,
                              .count = 3,
                              .first = 1,
                              .silence_ms = EVEN_SOCKET_SHORTEST_SILENCE_MS};
  memcpy(params.key, at->candidate.key, sizeof params.key);
  assert_int_equal(even_voter_open(&params, &voter), EVEN_OK);
  return voter;
}

/* Its link came back after the job had ended, and the leader has gone: it could wait for a majority for minutes. */
static void who_finds_that_all_others_have_ended_ends_too(void **state) {
  meeting at;
  even_voter_member members[3] = {{.id = 1}, {.id = 2}, {.id = 3}};
  even_voter *others[3] = {NULL, NULL, NULL};
  int listeners[3] = {-1, -1, -1};
  even_link link = {.fd = -1};
  even_candidate_turn turns = EVEN_CANDIDATE_SERVE;
  even_voter_view view = {.port = 0};
  uint64_t until = even_clock_ns() + LIMIT_NS;
  (void)state;
  meet(&at, INVITATION);
  for (size_t i = 0; i < 3; i++) {
    int port = at.candidate.port;
    if (i != 1) {
      port = 0;
      assert_int_equal(even_listener_open("127.0.0.1", &port, &listeners[i]), EVEN_OK);
    }
    (void)snprintf(members[i].address, sizeof members[i].address, "127.0.0.1:%d", port);
  }
  assert_int_equal(say_all(&at, 2, "begins", EVEN_SOCKET_SHORTEST_SILENCE_MS, members, 3), EVEN_OK);
  others[0] = begin_other(members, 0, listeners[0], &at);
  others[2] = begin_other(members, 2, listeners[2], &at);
  while (view.newest.generation != 1) {
    assert_true(even_clock_ns() < until);
    turn(&at);
    even_voter_look(at.candidate.voter, &view);
  }
  at.candidate.estate = json_object(); /* it could lead, and waits for as long as its leader has said */
  at.candidate.patience_ns = 2 * LIMIT_NS;
  even_voter_close(others[2], true);
  even_voter_close(others[0], true);
  assert_int_equal(even_candidate_await(&at.candidate, &at.loop, NULL, &link, &turns), EVEN_OK);
  assert_int_equal(turns, EVEN_CANDIDATE_END);
  even_voter_look(at.candidate.voter, &view);
  assert_int_equal(view.newest.generation, 1); /* nobody has told it */
  assert_true(even_clock_ns() < until);
  part(&at);
  even_socket_silence_set(0);
}

int main(void) {
  struct sigaction before;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(who_has_forgotten_its_log_is_another_member),
      cmocka_unit_test(only_one_that_begins_makes_a_log),
      cmocka_unit_test(who_cannot_vote_says_so),
      cmocka_unit_test(who_votes_bears_silence_as_its_leader_does),
      cmocka_unit_test(who_finds_that_all_others_have_ended_ends_too),
  };
  if (even_signals_pipe_ignore(&before) != EVEN_OK) {
    return 1;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
