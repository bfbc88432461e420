/* An agent of another host than the leader's is killed: what it leaves to the next one there, and whom the leader takes
 * for that one. Agents are numbers here, and connections pipes, or none. */
#include "orchestrator/outlast_part.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "orchestrator/follower_agent.h"
#include "orchestrator/outlast.h"
#include "orchestrator/place.h"
#include "os/pipe.h"
#include "os/shared_memory.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- what is left ---- */

/* The process that starts agents, and the one that lives. */
typedef struct keepers {
  even_custody first;
  even_custody agent;
  even_outlast_part part;
} keepers;

static void start_agent(keepers *of) {
  int child = -1;
  assert_int_equal(even_custody_begin(&of->first, &child), EVEN_OK);
  even_custody_join(&of->agent, child);
  even_outlast_part_open(&of->part);
}

/* What it asked for before is done. */
static void kill_agent(keepers *of) {
  even_custody_hear(&of->first);
  even_outlast_part_close(&of->part);
  (void)close(of->agent.socket);
  of->agent.socket = -1;
}

static int open_keepers(void **state) {
  static keepers of;
  even_custody_open(&of.first);
  even_custody_open(&of.agent);
  start_agent(&of);
  *state = &of;
  return 0;
}

static int close_keepers(void **state) {
  keepers *of = *state;
  fault_reset();
  kill_agent(of);
  even_custody_close(&of->first);
  return 0;
}

static void leave(keepers *of, const char *words, size_t ranks) {
  even_text text = EVEN_TEXT_EMPTY;
  even_text_add(&text, words);
  assert_int_equal(even_outlast_part_leave(&of->part, &of->agent, &text, ranks), EVEN_OK);
  even_text_free(&text);
}

/* As one that was forked has what its parent keeps. */
static even_status take(keepers *of, const char **words) {
  even_custody_item items[8];
  even_custody_hear(&of->first);
  assert_true(of->first.count <= 8);
  even_custody copy = {.socket = -1, .items = items, .count = of->first.count};
  for (size_t i = 0; i < copy.count; i++) {
    items[i] = of->first.items[i];
    items[i].fd = fcntl(items[i].fd, F_DUPFD_CLOEXEC, 0);
    assert_true(items[i].fd >= 0);
  }
  even_status status = even_outlast_part_take(&of->part, &copy, words);
  for (size_t i = 0; i < copy.count; i++) {
    even_pipe_close(items[i].fd);
  }
  return status;
}

static void the_next_agent_has_the_last_words(void **state) {
  keepers *of = *state;
  const char *words = NULL;
  leave(of, "{\"first\":1}", 3);
  leave(of, "{\"second\":2}", 5);
  kill_agent(of);
  start_agent(of);
  assert_int_equal(take(of, &words), EVEN_OK);
  assert_string_equal(words, "{\"second\":2}");
}

static void without_words_nothing_is_gone_on_with(void **state) {
  keepers *of = *state;
  const char *words = NULL;
  even_shared_memory other;
  assert_int_equal(take(of, &words), EVEN_ERR_STATE);
  assert_int_equal(even_shared_memory_create("else", 100, &other), EVEN_OK);
  assert_int_equal(even_custody_keep(&of->agent, EVEN_OUTLAST_PART, 0, other.fd), EVEN_OK);
  even_shared_memory_close(&other);
  assert_int_equal(take(of, &words), EVEN_ERR_STATE);
  assert_non_null(strstr(even_error_last()->what, "is not whole"));
}

static void what_cannot_be_kept_is_an_error(void **state) {
  keepers *of = *state;
  even_text words = EVEN_TEXT_EMPTY;
  even_text_add(&words, "{}");
  fault_os_from(FAULT_sendmsg, 1, ENOBUFS);
  assert_int_not_equal(even_outlast_part_leave(&of->part, &of->agent, &words, 1), EVEN_OK);
  fault_reset();
  assert_int_equal(even_outlast_part_link(&of->part, &of->agent, 0), EVEN_OK); /* then nothing is */
  even_custody_hear(&of->first);
  assert_int_equal(of->first.count, 0);
  even_text_free(&words);
}

/* Whether anybody holds the writing end. */
static bool is_open(int reading) {
  struct pollfd watch = {.fd = reading, .events = POLLIN};
  assert_true(poll(&watch, 1, 0) >= 0);
  return (watch.revents & POLLHUP) == 0;
}

/* A connection is a pipe whose other end, the leader's, is returned. */
static int connect_one(keepers *of) {
  int ends[2];
  assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
  assert_int_equal(even_outlast_part_link(&of->part, &of->agent, ends[1]), EVEN_OK);
  (void)close(ends[1]);
  even_custody_hear(&of->first);
  return ends[0];
}

static void a_connection_outlasts_its_agent_until_the_leader_knows_another(void **state) {
  keepers *of = *state;
  const char *words = NULL;
  leave(of, "{}", 1);
  int first = connect_one(of);
  assert_int_equal(even_outlast_part_known(&of->part, &of->agent), EVEN_OK);
  kill_agent(of);
  assert_true(is_open(first));
  int second[2];
  for (int i = 0; i < 2; i++) { /* one that is killed before the leader knows it, and one after */
    start_agent(of);
    assert_int_equal(take(of, &words), EVEN_OK);
    second[i] = connect_one(of);
    if (i == 1) {
      assert_true(is_open(first) && is_open(second[0]));
      assert_int_equal(even_outlast_part_known(&of->part, &of->agent), EVEN_OK);
    }
    kill_agent(of);
  }
  assert_false(is_open(first) || is_open(second[0]));
  assert_true(is_open(second[1]));
  even_custody_release(&of->first); /* no other agent is started */
  assert_false(is_open(second[1]));
  (void)close(first);
  (void)close(second[0]);
  (void)close(second[1]);
}

static void a_connection_that_an_agent_has_ended_ends(void **state) {
  keepers *of = *state;
  leave(of, "{}", 1);
  int leader = connect_one(of);
  assert_int_equal(even_outlast_part_unlink(&of->part, &of->agent), EVEN_OK);
  even_custody_hear(&of->first);
  assert_false(is_open(leader));
  (void)close(leader);
}

static void telemetry_goes_on_where_it_was_passed_on(void **state) {
  keepers *of = *state;
  const char *words = NULL;
  int fd = -1;
  even_telemetry *ring = NULL;
  even_telemetry_reader *reader = NULL;
  even_record records[8];
  const even_event_record event = {.event = 1, .at_ns = 1};
  assert_int_equal(even_telemetry_create_segment(2, 0, &fd), EVEN_OK);
  assert_int_equal(even_telemetry_open(fd, 1, &ring), EVEN_OK);
  leave(of, "{}", 2);
  for (size_t i = 0; i < 3; i++) {
    even_telemetry_event(ring, &event);
  }
  assert_int_equal(even_telemetry_reader_open(fd, &reader), EVEN_OK);
  assert_int_equal(even_telemetry_reader_drain(reader, records, 8, NULL), 3);
  even_outlast_part_note(&of->part, reader);
  even_telemetry_reader_close(reader);
  even_telemetry_event(ring, &event);
  kill_agent(of);
  start_agent(of);
  assert_int_equal(take(of, &words), EVEN_OK);
  assert_int_equal(even_telemetry_reader_open(fd, &reader), EVEN_OK);
  even_outlast_part_go_on(&of->part, reader);
  assert_int_equal(even_telemetry_reader_drain(reader, records, 8, NULL), 1);
  even_telemetry_reader_close(reader);
  even_telemetry_close(ring);
  even_pipe_close(fd);
}

/* ---- whom the leader takes for the next one ---- */

typedef struct leading {
  even_agent_params params;
  even_job job;
  even_hosts hosts;
  even_host_agent agents[2];
} leading;

static even_link *new_link(void) {
  even_link *link = NULL;
  assert_int_equal(EVEN_NEW(&link), EVEN_OK);
  link->fd = -1;
  return link;
}

static void lead(leading *at) {
  *at = (leading){.job = {.count = 4, .attempt = 2, .stage = EVEN_JOB_RUNS, .id = "ab"}};
  at->job.params = &at->params;
  at->job.hosts = &at->hosts;
  at->hosts = (even_hosts){.job = &at->job, .agents = at->agents, .count = 2};
  at->agents[1] = (even_host_agent){.hosts = &at->hosts,
                                    .index = 1,
                                    .name = "there",
                                    .link = new_link(),
                                    .fits = true,
                                    .busy = true,
                                    .first = 1,
                                    .count = 3};
}

static void let_go(leading *at) {
  even_free(at->agents[1].link);
  json_decref(at->agents[1].runs);
  while (at->hosts.gone != NULL) {
    even_link *link = at->hosts.gone;
    at->hosts.gone = link->next;
    even_free(link);
  }
}

static json_t *read_json(const char *text) {
  json_t *content = NULL;
  assert_int_equal(even_json_parse("it", text, strlen(text), &content), EVEN_OK);
  return content;
}

static bool comes(const leading *at, const char *greeting) {
  json_t *content = read_json(greeting);
  bool so = even_outlast_hosts_comes_anew(&at->agents[1], content);
  json_decref(content);
  return so;
}

static const char HOLDS[] = "{\"host\":1,\"holds\":true,\"job\":\"ab\",\"attempt\":2}";

static void only_who_holds_ranks_of_this_attempt_comes_in_its_place(void **state) {
  leading at;
  (void)state;
  lead(&at);
  assert_true(comes(&at, HOLDS));
  assert_false(comes(&at, "{\"host\":1,\"holds\":false,\"job\":\"ab\",\"attempt\":2}"));
  assert_false(comes(&at, "{\"host\":1,\"holds\":true,\"job\":\"ab\",\"attempt\":1}"));
  assert_false(comes(&at, "{\"host\":1,\"holds\":true,\"job\":\"cd\",\"attempt\":2}"));
  assert_false(comes(&at, "{\"host\":1,\"holds\":true}"));
  at.agents[1].busy = false; /* its part has ended */
  assert_false(comes(&at, HOLDS));
  at.agents[1].busy = true;
  at.agents[1].lost = true; /* it is missed: its ranks are not waited for any more */
  assert_false(comes(&at, HOLDS));
  at.agents[1].lost = false;
  at.params.shrink = at.params.replace = true;
  assert_true(comes(&at, HOLDS));
  at.params.grows = true; /* hosts may come meanwhile */
  assert_false(comes(&at, HOLDS));
  at.params.grows = false;
  at.hosts.job = NULL;
  assert_false(comes(&at, HOLDS));
  let_go(&at);
}

static void it_goes_on_once_it_has_said_what_runs(void **state) {
  leading at;
  (void)state;
  lead(&at);
  even_link *next = new_link();
  assert_int_equal(even_outlast_hosts_renew(&at.agents[1], next), EVEN_OK);
  assert_ptr_equal(at.agents[1].link, next);
  assert_true(at.agents[1].renewed && !at.agents[1].fits && at.agents[1].busy && !at.agents[1].lost);
  assert_true(comes(&at, HOLDS)); /* it was killed before it said so */
  next = new_link();
  assert_int_equal(even_outlast_hosts_renew(&at.agents[1], next), EVEN_OK);
  json_t *runs = read_json("{\"first\":1,\"count\":3,\"world\":4,\"attempt\":2}");
  assert_int_equal(even_outlast_hosts_take(&at.agents[1], runs), EVEN_OK);
  assert_true(at.agents[1].fits && !at.agents[1].renewed && at.agents[1].busy);
  let_go(&at);
}

static void other_ranks_than_it_had_are_not_gone_on_with(void **state) {
  static const char *const wrong[] = {"{\"first\":0,\"count\":3,\"world\":4,\"attempt\":2}",
                                      "{\"first\":1,\"count\":2,\"world\":4,\"attempt\":2}",
                                      "{\"first\":1,\"count\":3,\"world\":5,\"attempt\":2}",
                                      "{\"first\":1,\"count\":3,\"world\":4,\"attempt\":3}", "{}"};
  (void)state;
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    leading at;
    lead(&at);
    assert_int_equal(even_outlast_hosts_renew(&at.agents[1], new_link()), EVEN_OK);
    assert_int_equal(even_outlast_hosts_take(&at.agents[1], read_json(wrong[i])), EVEN_ERR_PEER_LOST);
    assert_false(at.agents[1].fits);
    let_go(&at);
  }
}

/* Spares are no obstacle as long as each has a process, and nobody is about to join. */
static void who_waits_for_a_place_may_go_on_waiting(void **state) {
  leading at;
  even_job_rank ranks[4] = {{.alive = true}, {.alive = true}, {.alive = true}, {.alive = true}};
  struct even_job_place places[4] = {{.outside = false}};
  (void)state;
  lead(&at);
  at.params.replace = true;
  at.job.ranks = ranks;
  at.job.places = places;
  at.job.local = 1;
  assert_true(even_outlast_hosts_have_state(&at.job));
  places[3].outside = true;
  assert_false(even_outlast_hosts_have_state(&at.job)); /* it is to join */
  at.params.spares = 1;
  assert_true(even_outlast_hosts_have_state(&at.job));
  ranks[3].alive = false; /* its process has ended, and another one is asked for */
  assert_false(even_outlast_hosts_have_state(&at.job));
  ranks[3].alive = true;
  ranks[1].alive = false; /* a member is lost: it is about to join */
  assert_false(even_outlast_hosts_have_state(&at.job));
  places[1].outside = true; /* the others go on without it */
  assert_false(even_outlast_hosts_have_state(&at.job));
  places[3].outside = false; /* it has joined them, */
  ranks[1].alive = true;     /* and another process waits in the lost one's place */
  assert_true(even_outlast_hosts_have_state(&at.job));
  let_go(&at);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(the_next_agent_has_the_last_words, open_keepers, close_keepers),
      cmocka_unit_test_setup_teardown(without_words_nothing_is_gone_on_with, open_keepers, close_keepers),
      cmocka_unit_test_setup_teardown(what_cannot_be_kept_is_an_error, open_keepers, close_keepers),
      cmocka_unit_test_setup_teardown(a_connection_outlasts_its_agent_until_the_leader_knows_another, open_keepers,
                                      close_keepers),
      cmocka_unit_test_setup_teardown(a_connection_that_an_agent_has_ended_ends, open_keepers, close_keepers),
      cmocka_unit_test_setup_teardown(telemetry_goes_on_where_it_was_passed_on, open_keepers, close_keepers),
      cmocka_unit_test(only_who_holds_ranks_of_this_attempt_comes_in_its_place),
      cmocka_unit_test(it_goes_on_once_it_has_said_what_runs),
      cmocka_unit_test(who_waits_for_a_place_may_go_on_waiting),
      cmocka_unit_test(other_ranks_than_it_had_are_not_gone_on_with),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
