/* What the agent that leads leaves of copies on other hosts to the one that goes on with the ranks where it is killed:
 * what has come to its end is not sent again, what was under way is, and what is known of it stays known. Nobody
 * answers here: of a copy under way no host is heard. */
#include "orchestrator/copies.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "checkpoint/scratch.h"
#include "orchestrator/bring.h"
#include "orchestrator/host_agent.h"
#include "support/clock_ahead.h"
#include "support/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

typedef struct leading {
  even_agent_params params;
  even_job job;
  even_hosts hosts;
  even_host_agent agents[EVEN_COPIES_HELD + 3];
  even_link link; /* of each: nothing goes out */
} leading;

static leading at;
static even_copies_left left;

static void lead(void) {
  at = (leading){.job = {.count = 2, .alive = 2}};
  at.params.checkpoint_folder = scratch;
  at.job.params = &at.params;
  at.job.hosts = &at.hosts;
  at.hosts = (even_hosts){.job = &at.job, .agents = at.agents, .count = 2, .params = {.copies = 1}};
  at.agents[1] = (even_host_agent){.hosts = &at.hosts, .index = 1, .name = "there"};
}

static void end(void) {
  even_copies_close(at.hosts.copies);
}

static int set_up(void **state) {
  lead();
  return scratch_make(state);
}

static int tear_down(void **state) {
  end();
  return scratch_remove(state);
}

/* The agent is killed, and the next one goes on. */
static void go_on(void) {
  even_copies_leave(&at.job, &left);
  end();
  lead();
  assert_int_equal(even_copies_take(&at.job, &left), EVEN_OK);
}

static void what_has_ended_is_not_begun_anew(void **state) {
  (void)state;
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  even_copies_tick(&at.job); /* begins */
  even_copies_leave(&at.job, &left);
  assert_string_equal(left.kinds[0].newest, ""); /* as long as it is not known to have come, it is begun anew */
  even_copies_tick(&at.job);                     /* ends: there is nobody to have it */
  even_copies_leave(&at.job, &left);
  assert_string_equal(left.kinds[0].newest, scratch_path("one"));
  go_on();
  even_copies_tick(&at.job); /* looks, and finds nothing that is new */
  even_copies_leave(&at.job, &left);
  assert_string_equal(left.kinds[0].newest, scratch_path("one"));
}

static void another_agent_of_the_host_gets_it_anew(void **state) {
  (void)state;
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  even_copies_anew(&at.agents[1]); /* before there are any */
  even_copies_tick(&at.job);
  even_copies_tick(&at.job);
  go_on();
  even_copies_anew(&at.agents[1]);
  even_copies_leave(&at.job, &left);
  assert_string_equal(left.kinds[0].newest, "");
  at.agents[1].renewed = true; /* it would not answer: it has not said yet what runs there */
  even_copies_tick(&at.job);
  even_copies_tick(&at.job);
  even_copies_leave(&at.job, &left);
  assert_string_equal(left.kinds[0].newest, "");
  at.agents[1].renewed = false;
  even_copies_tick(&at.job); /* begins */
  even_copies_leave(&at.job, &left);
  assert_string_equal(left.kinds[0].newest, "");
  even_copies_tick(&at.job);
  even_copies_leave(&at.job, &left);
  assert_string_equal(left.kinds[0].newest, scratch_path("one"));
}

/* Reading all manifests takes its time. */
static void what_is_gone_is_looked_for_once(void **state) {
  long calls[2];
  (void)state;
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  even_copies_tick(&at.job);
  even_copies_tick(&at.job);
  go_on();
  even_copies_anew(&at.agents[1]);
  at.params.checkpoint_folder = scratch_path("one"); /* in which there is none */
  for (size_t i = 0; i < 2; i++) {
    fault_os_any(0, 0);
    clock_ahead_set((i + 1) * 60000000000u); /* it looks each half second */
    even_copies_tick(&at.job);
    calls[i] = fault_os_calls(FAULT_CALL_COUNT);
    fault_reset();
  }
  assert_true(calls[1] > 0 && calls[1] < calls[0]); /* names alone */
}

static void what_is_known_stays_known(void **state) {
  (void)state;
  left = (even_copies_left){.held[0] = {.host = "there", .folder = "/there/one", .order = "0001"},
                            .held[1] = {.host = "elsewhere", .folder = "/there/two", .order = "0002"},
                            .sent = 3,
                            .sent_bytes = 7};
  left.kinds[0].told = left.kinds[1].failed = left.kinds[1].failure_told = true;
  assert_int_equal(even_copies_take(&at.job, &left), EVEN_OK);
  go_on();
  const even_copy *held = even_copies_newest(&at.job);
  assert_non_null(held);
  assert_string_equal(even_text_string(&held->host), "elsewhere");
  assert_string_equal(even_text_string(&held->folder), "/there/two");
  assert_string_equal(even_text_string(&held->order), "0002");
  assert_ptr_equal(even_copies_of(&at.job, "elsewhere"), held);
  even_copies_leave(&at.job, &left);
  assert_true(left.kinds[0].told && left.kinds[1].failed && left.kinds[1].failure_told && !left.kinds[0].failed);
  assert_int_equal(left.sent, 3);
  assert_int_equal(left.sent_bytes, 7);
}

/* Each host has its own: what one has no more another one may have. */
static void what_a_host_has_no_more_is_known_of_the_others(void **state) {
  (void)state;
  left = (even_copies_left){.held[0] = {.host = "there", .folder = "/there/one", .order = "0001"},
                            .held[1] = {.host = "elsewhere", .folder = "/there/two", .order = "0002"}};
  even_copies_miss(&at.job, "there"); /* before there are any */
  assert_int_equal(even_copies_take(&at.job, &left), EVEN_OK);
  assert_null(even_copies_of(&at.job, "nowhere"));
  even_copies_miss(&at.job, "nowhere");
  even_copies_miss(&at.job, "elsewhere");
  assert_null(even_copies_of(&at.job, "elsewhere"));
  assert_string_equal(even_text_string(&even_copies_newest(&at.job)->host), "there");
  go_on();
  assert_string_equal(even_text_string(&even_copies_newest(&at.job)->host), "there");
  assert_null(even_copies_newer(&at.job, "0001"));
  assert_string_equal(even_text_string(&even_copies_newer(&at.job, "0000")->host), "there");
  even_copies_miss(&at.job, "there");
  assert_null(even_copies_newest(&at.job));
  assert_null(even_copies_newer(&at.job, ""));
}

/* Host `i` says that it holds what was asked for last. */
static void holds(size_t i, const char *folder) {
  char text[128];
  json_t *content = NULL;
  (void)snprintf(text, sizeof text, "{\"serial\":%llu,\"holds\":true,\"folder\":\"%s\",\"came\":true}",
                 (unsigned long long)(at.hosts.brought + i - (at.hosts.count - 1)), folder);
  assert_int_equal(even_json_parse("it", text, strlen(text), &content), EVEN_OK);
  assert_int_equal(even_bring_hear(&at.agents[i], content), EVEN_OK);
  assert_int_equal(even_bring_state(&at.agents[i], NULL), EVEN_BRING_HOLDS);
  json_decref(content);
}

static void of_more_hosts_than_are_known_those_with_the_newest_are(void **state) {
  (void)state;
  at.hosts.count = EVEN_COPIES_HELD + 3;
  at.hosts.params.copies = EVEN_COPIES_HELD + 2;
  at.link.fd = -1;
  for (size_t i = 1; i < at.hosts.count; i++) {
    at.agents[i] = (even_host_agent){.hosts = &at.hosts, .index = i, .link = &at.link};
    (void)snprintf(at.agents[i].name, sizeof at.agents[i].name, "host%zu", i);
  }
  assert_int_equal(save_sample(scratch_path("one"), false, 1), EVEN_OK);
  even_copies_tick(&at.job);
  for (size_t i = 1; i < at.hosts.count; i++) {
    holds(i, "/there/one");
  }
  assert_string_equal(even_text_string(&even_copies_newest(&at.job)->host), "host1");
  assert_non_null(even_copies_of(&at.job, "host8"));
  assert_null(even_copies_of(&at.job, "host9"));
  even_copies_tick(&at.job); /* it has come to its end */
  assert_int_equal(save_sample(scratch_path("two"), false, 2), EVEN_OK);
  clock_ahead_set(60000000000u); /* it looks each half second */
  even_copies_tick(&at.job);
  holds(10, "/there/two");
  holds(2, "/there/two");
  const even_copy *newest = even_copies_newest(&at.job);
  assert_string_equal(even_text_string(&newest->folder), "/there/two");
  assert_non_null(even_copies_of(&at.job, "host10")); /* in the place of one of the others */
  assert_string_equal(even_text_string(&even_copies_of(&at.job, "host2")->folder), "/there/two");
  size_t known = 0;
  for (size_t i = 1; i < at.hosts.count; i++) {
    known += even_copies_of(&at.job, at.agents[i].name) != NULL;
    even_bring_drop(&at.agents[i]);
  }
  assert_int_equal(known, EVEN_COPIES_HELD);
}

/* Whoever leads next knows it, but for what came to itself. */
static void another_leader_knows_what_was_sent(void **state) {
  static const char *const strange[] = {"{}", "7", "[7,[],{\"host\":\"b\"},{\"host\":\"\",\"folder\":\"/b\"}]",
                                        "[{\"host\":\"b\",\"folder\":\"here\",\"order\":\"1\"}]"};
  (void)state;
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  json_t *content = NULL;
  left = (even_copies_left){.held[0] = {.host = "there", .folder = "/there/one", .order = "0001"},
                            .held[1] = {.host = "elsewhere", .folder = "/there/two", .order = "0002"}};
  assert_int_equal(even_copies_take(&at.job, &left), EVEN_OK);
  even_json_object(&json, NULL);
  even_copies_write(&at.job, &json);
  even_json_object_end(&json);
  assert_int_equal(even_text_status(&text), EVEN_OK);
  end();
  lead();
  (void)snprintf(at.agents[0].name, sizeof at.agents[0].name, "there");
  assert_int_equal(even_json_parse("it", text.data, text.length, &content), EVEN_OK);
  assert_int_equal(even_copies_read(&at.job, json_object_get(content, "copies")), EVEN_OK);
  json_decref(content);
  even_text_free(&text);
  assert_null(even_copies_of(&at.job, "there"));
  const even_copy *other = even_copies_of(&at.job, "elsewhere");
  assert_string_equal(even_text_string(&other->folder), "/there/two");
  assert_string_equal(even_text_string(&other->order), "0002");
  for (size_t i = 0; i < sizeof strange / sizeof strange[0]; i++) {
    json_t *list = json_loads(strange[i], JSON_DECODE_ANY, NULL);
    assert_non_null(list);
    assert_int_equal(even_copies_read(&at.job, list), EVEN_OK);
    json_decref(list);
  }
  assert_null(even_copies_of(&at.job, "b"));
  at.hosts.params.copies = 0;
  assert_int_equal(even_copies_read(&at.job, NULL), EVEN_OK);
}

static void what_is_damaged_is_not_known(void **state) {
  (void)state;
  memset(&left, 'x', sizeof left);
  for (size_t i = 0; i < 2; i++) { /* the bytes of a truth are 0 or 1 */
    left.kinds[i].told = left.kinds[i].failed = left.kinds[i].failure_told = true;
  }
  assert_int_equal(even_copies_take(&at.job, &left), EVEN_OK);
  assert_null(even_copies_newest(&at.job));
  even_copies_leave(&at.job, &left);
  assert_string_equal(left.kinds[0].newest, "");
  assert_string_equal(left.held[0].host, "");
}

static void without_memory_nothing_is_taken(void **state) {
  (void)state;
  left = (even_copies_left){.held[0] = {.host = "there", .folder = "/there/one", .order = "0001"}};
  fault_allocation(1);
  assert_int_equal(even_copies_take(&at.job, &left), EVEN_ERR_MEMORY);
  fault_reset();
  json_t *list = json_loads("[{\"host\":\"b\",\"folder\":\"/b\",\"order\":\"1\"}]", 0, NULL);
  fault_allocation(1); /* of the list of copies, where there was none */
  even_copies_close(at.hosts.copies);
  at.hosts.copies = NULL;
  assert_int_equal(even_copies_read(&at.job, list), EVEN_ERR_MEMORY);
  fault_reset();
  json_decref(list);
}

int main(void) {
#define COPIES_TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
  const struct CMUnitTest tests[] = {
      COPIES_TEST(what_has_ended_is_not_begun_anew),
      COPIES_TEST(another_agent_of_the_host_gets_it_anew),
      COPIES_TEST(what_is_known_stays_known),
      COPIES_TEST(what_is_damaged_is_not_known),
      COPIES_TEST(without_memory_nothing_is_taken),
      COPIES_TEST(what_is_gone_is_looked_for_once),
      COPIES_TEST(of_more_hosts_than_are_known_those_with_the_newest_are),
      COPIES_TEST(another_leader_knows_what_was_sent),
      COPIES_TEST(what_a_host_has_no_more_is_known_of_the_others),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
