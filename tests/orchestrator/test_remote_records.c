/* Telemetry of another host's ranks on its way to a leader whose agent is killed: what nobody has read is sent again to
 * the next one, and what was read is not. The hosts are two segments here, messages texts, and ranks 1 and 2 there. */
#include "base/fail.h"
#include "base/json_reader.h"
#include "orchestrator/remote.h"
#include "os/pipe.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS = 3, MOST = 64 };

typedef struct scene {
  /* there: the ranks' rings, and who forwards them */
  int there;
  even_telemetry *rings[RANKS];
  even_telemetry_reader *forwards;
  /* the leader's, which outlasts its agent, and who reads it */
  int here;
  even_telemetry_reader *reads;
  /* the leader's agent */
  even_job job;
  even_hosts hosts;
  even_host_agent agents[2];
  even_link link;
  even_telemetry *copies[RANKS];
} scene;

static void start_leader(scene *at) {
  at->job = (even_job){.count = RANKS, .hosts = &at->hosts};
  at->hosts = (even_hosts){.job = &at->job, .agents = at->agents, .count = 2, .rings = at->copies};
  at->link = (even_link){.fd = -1};
  at->agents[1] = (even_host_agent){.hosts = &at->hosts, .index = 1, .link = &at->link, .first = 1, .count = 2};
  for (int i = 1; i < RANKS; i++) {
    assert_int_equal(even_telemetry_open(at->here, i, &at->copies[i]), EVEN_OK);
  }
}

static void kill_leader(scene *at) {
  for (int i = 1; i < RANKS; i++) {
    even_telemetry_close(at->copies[i]);
    at->copies[i] = NULL;
  }
}

static void start_host(scene *at) {
  assert_int_equal(even_telemetry_create_segment(RANKS, 0, &at->there), EVEN_OK);
  for (int i = 1; i < RANKS; i++) {
    assert_int_equal(even_telemetry_open(at->there, i, &at->rings[i]), EVEN_OK);
  }
  assert_int_equal(even_telemetry_reader_open(at->there, &at->forwards), EVEN_OK);
}

static void end_host(scene *at) {
  for (int i = 1; i < RANKS; i++) {
    even_telemetry_close(at->rings[i]);
  }
  even_telemetry_reader_close(at->forwards);
  even_pipe_close(at->there);
}

static int begin(void **state) {
  static scene at;
  at = (scene){.there = -1};
  start_host(&at);
  assert_int_equal(even_telemetry_create_segment(RANKS, 0, &at.here), EVEN_OK);
  assert_int_equal(even_telemetry_reader_open(at.here, &at.reads), EVEN_OK);
  start_leader(&at);
  *state = &at;
  return 0;
}

static int end(void **state) {
  scene *at = *state;
  kill_leader(at);
  end_host(at);
  even_telemetry_reader_close(at->reads);
  even_pipe_close(at->here);
  return 0;
}

static void make_step(scene *at, int rank, uint32_t step) {
  even_telemetry_step(at->rings[rank], &(even_step_record){.step = step, .end_ns = 1000 + step});
}

/* All that is new there; `arrives`: the leader's agent reads it. */
static void forward(scene *at, bool arrives) {
  even_record records[MOST];
  even_text text = EVEN_TEXT_EMPTY;
  size_t got = even_telemetry_reader_drain(at->forwards, records, MOST, NULL);
  even_remote_write_places(at->forwards, records, got, &text);
  assert_int_equal(even_text_status(&text), EVEN_OK);
  const even_message message = {.kind = EVEN_MESSAGE_RECORDS,
                                .json = text.data,
                                .json_bytes = text.length,
                                .data = (const unsigned char *)records,
                                .data_bytes = got * sizeof records[0]};
  if (arrives) {
    assert_int_equal(even_remote_take_records(&at->job, &at->agents[1], &message), EVEN_OK);
  }
  even_text_free(&text);
}

static void go_on(void *context, int rank, uint64_t place) {
  even_telemetry_reader_go_on(context, rank, place);
}

/* The next agent says that the attempt goes on. */
static void adopt(scene *at) {
  even_text text = EVEN_TEXT_EMPTY;
  json_t *content = NULL;
  even_remote_write_adopt(&at->job, &at->agents[1], &text);
  assert_int_equal(even_text_status(&text), EVEN_OK);
  assert_int_equal(even_json_parse("it", text.data, text.length, &content), EVEN_OK);
  assert_int_equal(json_integer_value(json_object_get(content, "host")), 1);
  even_remote_each_place(json_object_get(content, "places"), go_on, at->forwards);
  json_decref(content);
  even_text_free(&text);
}

/* The steps of both ranks up to `last` are there, each once, and nothing else since this was asked before. */
static void expect_steps(scene *at, uint32_t from, uint32_t last) {
  even_record records[MOST];
  uint32_t next[RANKS] = {0, from, from};
  uint64_t lost = 0;
  size_t got = even_telemetry_reader_drain(at->reads, records, MOST, &lost);
  for (size_t i = 0; i < got; i++) {
    assert_in_range(records[i].rank, 1, 2);
    assert_int_equal(records[i].kind, EVEN_RECORD_STEP);
    assert_int_equal(records[i].as.step.step, next[records[i].rank]++);
  }
  assert_int_equal(next[1], last + 1);
  assert_int_equal(next[2], last + 1);
  assert_int_equal(lost, 0);
}

static void make_steps(scene *at, uint32_t from, uint32_t last) {
  for (uint32_t step = from; step <= last; step++) {
    make_step(at, 1, step);
    make_step(at, 2, step);
  }
}

static void what_a_killed_leader_did_not_read_is_sent_again(void **state) {
  scene *at = *state;
  make_steps(at, 0, 4);
  forward(at, true);
  expect_steps(at, 0, 4);
  make_steps(at, 5, 9);
  forward(at, false); /* in the connection, when the agent is killed */
  kill_leader(at);
  make_steps(at, 10, 12);
  start_leader(at);
  adopt(at);
  forward(at, true);
  expect_steps(at, 5, 12);
}

static void what_it_has_read_is_not_sent_again(void **state) {
  scene *at = *state;
  make_steps(at, 0, 4);
  forward(at, true);
  kill_leader(at);
  start_leader(at);
  adopt(at);
  make_steps(at, 5, 6);
  forward(at, true);
  expect_steps(at, 0, 6);
}

/* Of the first batch, too. */
static void what_comes_before_any_was_read_is_sent_again(void **state) {
  scene *at = *state;
  make_steps(at, 0, 4);
  forward(at, false);
  kill_leader(at);
  start_leader(at);
  adopt(at);
  make_steps(at, 5, 6);
  forward(at, true);
  expect_steps(at, 0, 6);
}

/* An agent that was started in a lost one's place has other rings, and what was taken is no place in them. */
static void of_another_agents_ranks_nothing_was_taken(void **state) {
  scene *at = *state;
  make_steps(at, 0, 4);
  forward(at, true);
  expect_steps(at, 0, 4);
  end_host(at);
  start_host(at);
  even_remote_begin_places(&at->agents[1]);
  make_steps(at, 0, 2);
  forward(at, false);
  kill_leader(at);
  start_leader(at);
  adopt(at);
  make_steps(at, 3, 6);
  forward(at, true);
  expect_steps(at, 0, 6);
}

static void places_that_are_none_change_nothing(void **state) {
  scene *at = *state;
  static const char words[] = "{\"places\":[[7,1],[-1,1],[4096,1],[1],1,[1,-5],[1,\"1\"],[0,1],[1,1000000]]}";
  json_t *content = NULL;
  make_steps(at, 0, 4);
  forward(at, true);
  assert_int_equal(even_json_parse("it", words, strlen(words), &content), EVEN_OK);
  even_remote_each_place(json_object_get(content, "places"), go_on, at->forwards);
  json_decref(content);
  const even_message strange = {.kind = EVEN_MESSAGE_RECORDS, .json = words, .json_bytes = strlen(words)};
  assert_int_equal(even_remote_take_records(&at->job, &at->agents[1], &strange), EVEN_OK);
  adopt(at);
  make_steps(at, 5, 6);
  forward(at, true);
  expect_steps(at, 0, 6);
  const even_message torn = {.kind = EVEN_MESSAGE_RECORDS, .json = "{", .json_bytes = 1};
  assert_int_equal(even_remote_take_records(&at->job, &at->agents[1], &torn), EVEN_ERR_INPUT);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(what_a_killed_leader_did_not_read_is_sent_again, begin, end),
      cmocka_unit_test_setup_teardown(what_it_has_read_is_not_sent_again, begin, end),
      cmocka_unit_test_setup_teardown(what_comes_before_any_was_read_is_sent_again, begin, end),
      cmocka_unit_test_setup_teardown(of_another_agents_ranks_nothing_was_taken, begin, end),
      cmocka_unit_test_setup_teardown(places_that_are_none_change_nothing, begin, end),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
