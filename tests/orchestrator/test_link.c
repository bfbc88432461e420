/* Two ends of a link in this process, on one loop: what they say to one another, the way of an agent to its leader, and
 * every call to the kernel, and every allocation, failing once. */
#include "orchestrator/link.h"

#include "base/fail.h"
#include "orchestrator/invitation.h"
#include "orchestrator/leadership.h"
#include "orchestrator/pauses.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/listener.h"
#include "os/pipe.h"
#include "os/signals.h"
#include "os/socket.h"
#include "support/clock_ahead.h"
#include "support/descriptors.h"
#include "support/fault.h"

#include <errno.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* Of what the agent sends: more than the kernel takes at once. */
enum { DATA = 1 << 20, TURN_MS = 20, MOST_TURNS = 3000, MOST_TOLD = 64 << 20 };

static const unsigned char KEY[EVEN_TLS_KEY_BYTES] = "one key for this job, 32 bytes.";
static const unsigned char OTHER_KEY[EVEN_TLS_KEY_BYTES] = "another one, of another job....";
static const char START[] = "{\"attempt\":1}";
static unsigned char data[DATA];

struct meeting;

typedef struct side {
  struct meeting *meeting;
  even_link link;
  bool up;
  bool heard; /* all that the other one has to say */
  bool ended;
  even_status status; /* of a send of its own */
} side;

typedef struct meeting {
  even_loop loop;
  even_loop_watch listening;
  int listener;
  int port;
  const unsigned char *leader_key;
  side leader;
  side agent;
  even_status status; /* of what no side has */
  int taken;          /* connections */
} meeting;

/* ---- what both do ---- */

static void leader_ready(void *context, even_link *link) {
  (void)link;
  ((side *)context)->up = true;
}

static even_status leader_hears(void *context, even_link *link, const even_message *message) {
  side *self = context;
  even_text text = EVEN_TEXT_EMPTY;
  assert_int_equal(message->kind, EVEN_MESSAGE_RECORDS);
  assert_int_equal(message->data_bytes, sizeof data);
  assert_memory_equal(message->data, data, sizeof data);
  self->heard = true;
  even_text_add(&text, START);
  return even_link_send_text(link, EVEN_MESSAGE_START, &text, NULL, 0);
}

static void agent_ready(void *context, even_link *link) {
  side *self = context;
  self->up = true;
  self->status = even_link_send(link, EVEN_MESSAGE_RECORDS, "{}", data, sizeof data);
}

static even_status agent_hears(void *context, even_link *link, const even_message *message) {
  (void)link;
  assert_int_equal(message->kind, EVEN_MESSAGE_START);
  assert_int_equal(message->json_bytes, strlen(START));
  assert_memory_equal(message->json, START, strlen(START));
  ((side *)context)->heard = true;
  return EVEN_OK;
}

static void on_ended(void *context, even_link *link) {
  (void)link;
  ((side *)context)->ended = true;
}

static even_link_calls calls_of(side *self) {
  bool leads = self == &self->meeting->leader;
  return (even_link_calls){.context = self,
                           .ready = leads ? leader_ready : agent_ready,
                           .message = leads ? leader_hears : agent_hears,
                           .ended = on_ended};
}

static void take_connection(void *context, int fd) {
  meeting *at = context;
  const even_link_calls calls = calls_of(&at->leader);
  int made = -1;
  even_status status = even_socket_accept(fd, &made);
  if (status == EVEN_OK && made >= 0) {
    at->taken++;
    even_link_close(&at->leader.link); /* of an agent that tries again */
    status = even_link_open(&at->leader.link, &at->loop, made, true, at->leader_key, &calls);
  }
  at->status = at->status == EVEN_OK ? status : at->status;
}

static void prepare(meeting *at) {
  *at = (meeting){.loop = {.fd = -1}, .listening = {.fd = -1}, .listener = -1, .leader_key = KEY};
  at->leader = (side){.meeting = at, .link = {.fd = -1}};
  at->agent = (side){.meeting = at, .link = {.fd = -1}};
}

static even_status open_listener(meeting *at) {
  EVEN_TRY(even_loop_open(&at->loop));
  EVEN_TRY(even_listener_open("127.0.0.1", &at->port, &at->listener));
  return even_loop_add(&at->loop, &at->listening, at->listener, take_connection, at);
}

static even_status call_leader(meeting *at, const unsigned char *key) {
  const even_link_calls calls = calls_of(&at->agent);
  int fd = -1;
  EVEN_TRY(even_socket_connect("127.0.0.1", at->port, 5000, &fd));
  return even_link_open(&at->agent.link, &at->loop, fd, false, key, &calls);
}

/* Of several errors that one which is no consequence of the other side's. */
static even_status worst(const meeting *at) {
  const even_status all[] = {
      at->status,
      at->leader.status,
      at->agent.status,
      at->leader.ended ? even_link_why(&at->leader.link)->status : EVEN_OK,
      at->agent.ended ? even_link_why(&at->agent.link)->status : EVEN_OK,
  };
  even_status found = EVEN_OK;
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    if (all[i] != EVEN_OK && (found == EVEN_OK || found == EVEN_ERR_PEER_LOST)) {
      found = all[i];
    }
  }
  return found;
}

/* Until each has heard the other, or something has gone wrong. */
static even_status talk(meeting *at) {
  for (int turns = 0; turns < MOST_TURNS; turns++) {
    EVEN_TRY(even_loop_turn(&at->loop, TURN_MS));
    even_link_tick(&at->leader.link, false);
    even_link_tick(&at->agent.link, false);
    if ((at->leader.heard && at->agent.heard) || worst(at) != EVEN_OK) {
      return worst(at);
    }
  }
  return even_fail(EVEN_ERR_TIMEOUT, "nobody heard the other, and nobody said why");
}

static void part(meeting *at) {
  even_link_close(&at->agent.link);
  even_link_close(&at->leader.link);
  even_loop_remove(&at->loop, &at->listening);
  if (at->listener >= 0) {
    even_listener_close(at->listener);
  }
  even_loop_close(&at->loop);
}

static even_status meet(void *context) {
  meeting *at = context;
  prepare(at);
  even_status status = open_listener(at);
  if (status == EVEN_OK) {
    status = call_leader(at, KEY);
  }
  if (status == EVEN_OK) {
    status = talk(at);
  }
  part(at);
  return status;
}

static int setup(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof data; i++) {
    data[i] = (unsigned char)(i * 7 + i / 256);
  }
  return 0;
}

static int teardown(void **state) {
  (void)state;
  fault_reset();
  return 0;
}

/* ---- what is asserted ---- */

static void call_with(meeting *at, const unsigned char *key) {
  prepare(at);
  assert_int_equal(open_listener(at), EVEN_OK);
  assert_int_equal(call_leader(at, key), EVEN_OK);
}

static void both_hear_one_another_also_in_small_pieces(void **state) {
  meeting at;
  (void)state;
  assert_int_equal(meet(&at), EVEN_OK);
  fault_os_short(1013);
  assert_int_equal(meet(&at), EVEN_OK);
}

static void who_has_another_key_is_not_heard(void **state) {
  meeting at;
  (void)state;
  call_with(&at, OTHER_KEY);
  assert_int_equal(talk(&at), EVEN_ERR_PERMISSION);
  assert_false(at.leader.up || at.agent.up || at.leader.heard || at.agent.heard);
  part(&at);
}

static void each_fault_of_the_kernel_ends_a_link_or_nothing(void **state) {
  static const int errors[] = {EIO, EINTR, ECONNRESET};
  meeting at;
  (void)state;
  int before = open_descriptors();
  for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
    assert_true(fault_each_os(meet, &at, errors[i]) > 10);
  }
  assert_int_equal(open_descriptors(), before);
}

static void each_lack_of_memory_ends_a_link(void **state) {
  meeting at;
  (void)state;
  int before = open_descriptors();
  assert_true(fault_each_allocation(meet, &at) > 5);
  assert_int_equal(open_descriptors(), before);
}

static void a_watched_link_ends_when_nothing_comes_for_long(void **state) {
  meeting at;
  (void)state;
  call_with(&at, KEY);
  assert_int_equal(talk(&at), EVEN_OK);
  clock_ahead_set(even_link_silence_ns() + 1000000000u);
  even_link_tick(&at.leader.link, false); /* nobody waits for anything: silence is allowed */
  assert_false(at.leader.ended);
  even_link_tick(&at.leader.link, true);
  assert_true(at.leader.ended);
  assert_int_equal(even_link_why(&at.leader.link)->status, EVEN_ERR_TIMEOUT);
  part(&at);
}

static int silent_ms; /* what the kernel says of how long ago anything came */

static int say_silent(int fd, int level, int option, void *value, socklen_t *bytes) {
  int result = even_os_real.getsockopt(fd, level, option, value, bytes);
  if (level == IPPROTO_TCP && option == TCP_INFO) {
    ((struct tcp_info *)value)->tcpi_last_ack_recv = (uint32_t)silent_ms;
    ((struct tcp_info *)value)->tcpi_last_data_recv = (uint32_t)silent_ms;
  }
  return result;
}

/* The kernel's own limit begins late where it has come to wait for long in a cut before. */
static void a_link_ends_when_nothing_comes_from_the_other_host(void **state) {
  meeting at;
  (void)state;
  call_with(&at, KEY);
  even_os.getsockopt = say_silent;
  silent_ms = INT_MAX;
  even_link_tick(&at.agent.link, false); /* not up yet: the kernel's figure means nothing */
  assert_false(at.agent.ended);
  silent_ms = 0;
  assert_int_equal(talk(&at), EVEN_OK);
  at.agent.heard = false;
  assert_int_equal(even_link_send(&at.leader.link, EVEN_MESSAGE_START, START, NULL, 0), EVEN_OK);
  silent_ms = EVEN_SOCKET_SILENCE_MS + 500; /* its own probes and our signs of life may be late by so much */
  even_link_tick(&at.leader.link, false);
  assert_false(at.leader.ended);
  silent_ms++;
  even_link_tick(&at.leader.link, false);
  assert_true(at.leader.ended);
  assert_int_equal(even_link_why(&at.leader.link)->system_error, ETIMEDOUT);
  assert_non_null(strstr(even_link_why(&at.leader.link)->what, "nothing came back for 4 s"));
  assert_false(at.agent.heard);
  even_link_tick(&at.agent.link, false); /* it stood still, and hears what was said before */
  assert_true(at.agent.heard && at.agent.ended);
  part(&at);
}

/* Both ways: with each silence of hosts some signs of life may be lost, and an agent that stands still is waited for
 * longer than another leader is. */
static void signs_of_life_follow_the_silence(void **state) {
  static const int said[] = {EVEN_SOCKET_SHORTEST_SILENCE_MS, 4000, 9000, 20000, EVEN_SOCKET_LONGEST_SILENCE_MS};
  static const int beats_ms[] = {250, 500, 1125, 2500, 5000};
  static const int stands_ms[] = {15000, 30000, 30000, 60000, 1800000};
  (void)state;
  for (size_t i = 0; i < sizeof said / sizeof said[0]; i++) {
    even_socket_silence_set(said[i]);
    even_link_leaders_change(false);
    assert_int_equal(even_link_silence_ns(), (uint64_t)(said[i] < 30000 ? 30000 : said[i]) * 1000000u);
    even_link_leaders_change(true);
    assert_int_equal(even_link_beat_ns(), (uint64_t)beats_ms[i] * 1000000u);
    assert_int_equal(even_link_silence_ns(), (uint64_t)stands_ms[i] * 1000000u);
    assert_true(even_link_silence_ns() > even_leadership_times_of(said[i]).silent_ns);
  }
  even_socket_silence_set(0);
  even_link_leaders_change(false);
}

/* Whose ranks train on: however often it happened before, and though it has said nothing for some time. */
static void the_next_agent_comes_before_it_is_given_up(void **state) {
  static const int pauses_s[] = {0, 0, 2, 4, 8, 15, 15, 15};
  static const int without_ranks_s[] = {0, 1, 2, 4, 8, 16, 32, 60};
  (void)state;
  for (unsigned soon = 0; soon < sizeof pauses_s / sizeof pauses_s[0]; soon++) {
    int pause_s = even_pause_of_agent_s(soon, true);
    assert_int_equal(pause_s, pauses_s[soon]);
    assert_true((uint64_t)pause_s * 1000000000u + even_link_beat_ns() < even_link_silence_ns() * 2 / 3);
    assert_int_equal(even_pause_of_agent_s(soon, false), without_ranks_s[soon]);
  }
}

static void a_link_that_is_closed_has_nothing_waiting(void **state) {
  meeting at;
  (void)state;
  call_with(&at, KEY);
  assert_int_equal(talk(&at), EVEN_OK);
  for (int i = 0; i < 32 && even_link_waiting(&at.agent.link) == 0; i++) { /* more than the kernel takes */
    assert_int_equal(even_link_send(&at.agent.link, EVEN_MESSAGE_RECORDS, "{}", data, sizeof data), EVEN_OK);
  }
  assert_true(even_link_waiting(&at.agent.link) > 0);
  even_link_close(&at.agent.link);
  assert_int_equal(even_link_waiting(&at.agent.link), 0);
  part(&at);
}

/* One that always has more to say than the network takes, as where a checkpoint goes to a host. */
static void a_link_keeps_no_more_than_what_waits(void **state) {
  meeting at;
  size_t most = 0;
  uint64_t told = 0;
  (void)state;
  call_with(&at, KEY);
  assert_int_equal(talk(&at), EVEN_OK);
  while (told < MOST_TOLD) {
    if (even_link_waiting(&at.agent.link) < 8 * sizeof data) { /* never none */
      assert_int_equal(even_link_send(&at.agent.link, EVEN_MESSAGE_RECORDS, "{}", data, sizeof data), EVEN_OK);
      told += sizeof data;
      continue;
    }
    most = at.agent.link.out.length > most ? at.agent.link.out.length : most;
    assert_int_equal(even_loop_turn(&at.loop, TURN_MS), EVEN_OK);
  }
  assert_true(at.leader.heard);
  assert_false(at.leader.link.failed || at.agent.link.failed || at.agent.link.broken);
  assert_true(most < 24 * sizeof data);
  part(&at);
}

/* ---- an agent's way to its leader ---- */

static even_status accept_invitation(meeting *at, const char *addresses) {
  const even_link_calls calls = calls_of(&at->agent);
  char line[512];
  int host = 0;
  even_text key = EVEN_TEXT_EMPTY;
  for (size_t i = 0; i < EVEN_TLS_KEY_BYTES; i++) {
    even_text_format(&key, "%02x", KEY[i]);
  }
  (void)snprintf(line, sizeof line, "{\"key\":\"%s\",\"host\":3,\"port\":%d,\"addresses\":%s}", even_text_string(&key),
                 at->port, addresses);
  even_text_free(&key);
  even_status status = even_invitation_accept(line, &at->loop, &calls, &at->agent.link, &host);
  assert_int_equal(host, 3);
  return status;
}

static void notes_beat(void *context, even_link *link) {
  (void)link;
  ((side *)context)->up = true;
}

/* The other end has said something, and closed; this one stood still meanwhile, and writes before it reads. */
static void what_was_said_before_the_end_is_heard(void **state) {
  meeting at;
  (void)state;
  prepare(&at);
  assert_int_equal(open_listener(&at), EVEN_OK);
  const even_link_calls calls = {.context = &at.agent, .ready = notes_beat, .message = agent_hears, .ended = on_ended};
  int fd = -1;
  assert_int_equal(even_socket_connect("127.0.0.1", at.port, 5000, &fd), EVEN_OK);
  assert_int_equal(even_link_open(&at.agent.link, &at.loop, fd, false, KEY, &calls), EVEN_OK);
  for (int turn = 0; turn < MOST_TURNS && !(at.leader.up && at.agent.up); turn++) {
    assert_int_equal(even_loop_turn(&at.loop, TURN_MS), EVEN_OK);
  }
  assert_true(at.leader.up && at.agent.up);
  assert_int_equal(even_link_send(&at.leader.link, EVEN_MESSAGE_START, START, NULL, 0), EVEN_OK);
  even_link_close(&at.leader.link);
  uint64_t until = even_clock_ns() + 120000000000u;
  while (!at.agent.link.broken) { /* the first that is sent is answered by a reset, of which the next one fails */
    assert_true(even_clock_ns() < until);
    assert_int_equal(even_link_send(&at.agent.link, EVEN_MESSAGE_RECORDS, "{}", data, 64), EVEN_OK);
  }
  assert_false(at.agent.heard);
  assert_false(even_link_is_up(&at.agent.link));
  even_link_tick(&at.agent.link, false);
  assert_true(at.agent.heard);
  assert_true(at.agent.ended);
  assert_true(even_link_why(&at.agent.link)->system_error == EPIPE ||
              even_link_why(&at.agent.link)->system_error == ECONNRESET);
  assert_int_equal(even_link_why(&at.agent.link)->status, EVEN_ERR_PEER_LOST);
  part(&at);
}

static void the_leader_is_found_behind_an_address_where_it_is_not(void **state) {
  meeting at;
  (void)state;
  prepare(&at);
  assert_int_equal(open_listener(&at), EVEN_OK);
  assert_int_equal(accept_invitation(&at, "[\"127.0.0.2\",\"127.0.0.1\"]"), EVEN_OK);
  assert_true(at.agent.up);
  assert_int_equal(talk(&at), EVEN_OK);
  part(&at);
}

/* A turn of the loop that fails is the end of that try, and of its connection. */
static void a_try_that_fails_leaves_no_connection(void **state) {
  meeting at;
  (void)state;
  prepare(&at);
  assert_int_equal(open_listener(&at), EVEN_OK);
  int before = open_descriptors();
  fault_os(FAULT_epoll_wait, 1, EIO);
  assert_int_equal(accept_invitation(&at, "[\"127.0.0.1\"]"), EVEN_ERR_SYSTEM);
  assert_non_null(strstr(even_error_last()->what, "the leader at 127.0.0.1: "));
  assert_int_equal(at.agent.link.fd, -1);
  assert_null(at.agent.link.tls);
  assert_int_equal(open_descriptors(), before);
  fault_os(FAULT_epoll_wait, 1, EIO); /* the second try of the same address goes well */
  assert_int_equal(accept_invitation(&at, "[\"127.0.0.1\",\"127.0.0.1\"]"), EVEN_OK);
  fault_reset();
  assert_int_equal(talk(&at), EVEN_OK);
  assert_int_equal(at.taken, 3);
  part(&at);
}

static void what_is_no_invitation_is_refused(void **state) {
  meeting at;
  const even_link_calls calls = {.context = NULL};
  int host = 0;
  (void)state;
  prepare(&at);
  assert_int_equal(open_listener(&at), EVEN_OK);
  assert_int_equal(even_invitation_accept("hello", &at.loop, &calls, &at.agent.link, &host), EVEN_ERR_INPUT);
  assert_int_equal(even_invitation_accept("{\"key\":\"12\"}", &at.loop, &calls, &at.agent.link, &host), EVEN_ERR_INPUT);
  assert_int_equal(accept_invitation(&at, "[]"), EVEN_ERR_INPUT);
  assert_int_equal(at.taken, 0);
  part(&at);
}

int main(void) {
  struct sigaction pipe_before;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(both_hear_one_another_also_in_small_pieces, teardown),
      cmocka_unit_test_teardown(who_has_another_key_is_not_heard, teardown),
      cmocka_unit_test_teardown(each_fault_of_the_kernel_ends_a_link_or_nothing, teardown),
      cmocka_unit_test_teardown(each_lack_of_memory_ends_a_link, teardown),
      cmocka_unit_test_teardown(a_watched_link_ends_when_nothing_comes_for_long, teardown),
      cmocka_unit_test_teardown(a_link_ends_when_nothing_comes_from_the_other_host, teardown),
      cmocka_unit_test(signs_of_life_follow_the_silence),
      cmocka_unit_test(the_next_agent_comes_before_it_is_given_up),
      cmocka_unit_test_teardown(a_link_that_is_closed_has_nothing_waiting, teardown),
      cmocka_unit_test_teardown(a_link_keeps_no_more_than_what_waits, teardown),
      cmocka_unit_test(what_was_said_before_the_end_is_heard),
      cmocka_unit_test_teardown(the_leader_is_found_behind_an_address_where_it_is_not, teardown),
      cmocka_unit_test_teardown(a_try_that_fails_leaves_no_connection, teardown),
      cmocka_unit_test_teardown(what_is_no_invitation_is_refused, teardown),
  };
  if (even_signals_pipe_ignore(&pipe_before) != EVEN_OK) {
    return 1;
  }
  return cmocka_run_group_tests(tests, setup, NULL);
}
