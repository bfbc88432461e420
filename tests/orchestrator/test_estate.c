/* What a leader leaves to the one that takes its place, as that reads it. */
#include "orchestrator/estate.h"

#include "orchestrator/copies.h"
#include "orchestrator/host_agent.h"
#include "os/calls.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

/* Under another leader, which numbers the ranks anew. */
static void a_rank_has_the_quota_of_the_one_in_its_place(void **state) {
  even_estate estate = {.self = 2,
                        .content = json_pack("{s:[{s:s,s:i},{s:s,s:i,s:[f,f]},{s:s,s:i,s:[f]}]}", "hosts", "name", "a",
                                             "member", 1, "name", "b", "member", 2, "cpu_quota", 0.5, 0.0, "name", "c",
                                             "member", 3, "cpu_quota", 0.25)};
  (void)state;
  assert_non_null(estate.content);
  assert_string_equal(even_estate_own_name(&estate), "b");
  assert_true(even_estate_quota(&estate, "b", 0) == 0.5);
  assert_true(isnan(even_estate_quota(&estate, "b", 1)));
  assert_true(isnan(even_estate_quota(&estate, "b", 2)));
  assert_true(even_estate_quota(&estate, "c", 0) == 0.25);
  assert_true(isnan(even_estate_quota(&estate, "a", 0)));
  assert_true(isnan(even_estate_quota(&estate, "x", 0)));
  json_decref(estate.content);
}

static uint64_t clock_ns;

static int clock_of_test(clockid_t clock, struct timespec *out) {
  (void)clock;
  *out = (struct timespec){(time_t)(clock_ns / 1000000000u), (long)(clock_ns % 1000000000u)};
  return 0;
}

/* By the next leader's own clock, from when it was told; how often each was set aside, too. What is odd in what was
 * left counts for nothing. */
static void places_that_were_set_aside_are_left_to_the_next_leader(void **state) {
  enum { SECOND = 1000000000 };
  even_device devices[] = {{.name = "cpu:0"}};
  const even_device_list list = {devices, 1};
  even_host_agent agents[] = {{.name = "a", .count = 1}};
  even_hosts hosts = {.agents = agents, .count = 1, .self = 1};
  even_aside aside = {.items = {{"c", 1, "cpu:1", 1, 160 * (uint64_t)SECOND}, {"b", 0, "cuda:0", 3, 0}}, .count = 2};
  const even_agent_params params = {.devices = &list, .checkpoint_folder = "/c", .aside = &aside};
  even_job left = {.params = &params, .hosts = &hosts, .id = "0123456789abcdef0123456789abcdef"};
  even_estate estate = {.self = 2, .left_ns = 7 * (uint64_t)SECOND};
  even_aside next = {.count = 0};
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  even_text_add(&left.run_folder, "/runs/a");
  clock_ns = 100 * (uint64_t)SECOND;
  even_os.clock_gettime = clock_of_test;
  assert_int_equal(even_estate_write(&left, &text), EVEN_OK);
  even_os.clock_gettime = even_os_real.clock_gettime;
  assert_int_equal(even_estate_read(text.data, text.length, &estate.content), EVEN_OK);
  json_t *odd = json_object_get(estate.content, "aside");
  static const char *const odd_ones[] = {
      "{\"host\": \"b\", \"place\": 0, \"device\": \"x\", \"times\": 1, \"seconds\": 3601}",
      "{\"host\": \"b\", \"place\": 0, \"device\": \"x\", \"times\": 1, \"seconds\": -1}",
      "{\"host\": \"b\", \"place\": 0, \"device\": \"x\", \"seconds\": 1}", "{\"place\": 0, \"times\": 1}", "7"};
  for (size_t i = 0; i < sizeof odd_ones / sizeof odd_ones[0]; i++) {
    assert_int_equal(json_array_append_new(odd, json_loads(odd_ones[i], JSON_DECODE_ANY, NULL)), 0);
  }
  even_estate_aside(&estate, &next);
  assert_int_equal(next.count, 2);
  assert_true(even_aside_has(&next, "c", 1) && !even_aside_has(&next, "b", 0) && !even_aside_has(&next, "c", 0));
  assert_string_equal(next.items[0].device, "cpu:1");
  assert_int_equal(next.items[0].until_ns, 67 * (uint64_t)SECOND);
  assert_int_equal(next.items[0].times, 1);
  assert_int_equal(next.items[1].times, 3);
  assert_null(even_aside_return(&next, 67 * (uint64_t)SECOND - 1));
  assert_ptr_equal(even_aside_return(&next, 67 * (uint64_t)SECOND), &next.items[0]);
  even_text_free(&text);
  even_text_free(&left.run_folder);
  json_decref(estate.content);
}

/* Who ran out of memory under the old leader has as little under the next one; what is odd in what was left counts for
 * nothing. */
static void what_ranks_lack_and_restarts_are_left_to_the_next_leader(void **state) {
  even_device devices[] = {{.name = "cpu:0"}};
  const even_device_list list = {devices, 1};
  even_host_agent agents[] = {{.name = "a", .count = 1}};
  even_hosts hosts = {.agents = agents, .count = 1, .self = 1};
  const even_agent_params params = {.devices = &list, .checkpoint_folder = "/c", .max_restarts = 3};
  even_job left = {.params = &params,
                   .hosts = &hosts,
                   .id = "0123456789abcdef0123456789abcdef",
                   .attempt = 9,
                   .planned = 2,
                   .shares = true,
                   .restarts = {.made = 6, .since = 4000}};
  even_job next = {.params = &params};
  even_estate estate = {.self = 1};
  const even_shortage *one = NULL;
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  even_text_add(&left.run_folder, "/runs/a");
  even_shortages_note(&left.shortages, "b", "cpu:1", 25, 64, &one);
  even_shortages_note(&left.shortages, "c", "cpu:0", 0, 0, &one);
  assert_int_equal(even_estate_write(&left, &text), EVEN_OK);
  assert_int_equal(even_estate_read(text.data, text.length, &estate.content), EVEN_OK);
  json_t *odd = json_object_get(estate.content, "shortages");
  assert_int_equal(
      json_array_append_new(odd, json_pack("{s:s,s:i,s:i,s:i}", "place", "d cpu:0", "most", 9, "batch", 8, "part", 1)),
      0);
  assert_int_equal(json_array_append_new(odd, json_pack("{s:i,s:I}", "place", 3, "part", (json_int_t)1 << 40)), 0);
  assert_int_equal(even_estate_take(&estate, &next), EVEN_OK);
  assert_int_equal(next.attempt - next.planned, 8);
  assert_int_equal(even_restarts_count(&next.restarts, 8), 2); /* of all, those since step 4000 */
  assert_int_equal(next.restarts.since, 4000);
  assert_true(next.shares);
  assert_int_equal(next.shortages.count, 2);
  for (size_t i = 0; i < 2; i++) {
    assert_string_equal(next.shortages.items[i].place, left.shortages.items[i].place);
    assert_int_equal(next.shortages.items[i].most, left.shortages.items[i].most);
    assert_int_equal(next.shortages.items[i].batch, left.shortages.items[i].batch);
    assert_int_equal(next.shortages.items[i].part, i + 1);
  }
  even_text_free(&text);
  even_text_free(&left.run_folder);
  even_text *const texts[] = {&next.resume, &next.foreign, &next.lineage, &next.began};
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
    even_text_free(texts[i]);
  }
  json_decref(estate.content);
}

/* Of a lost host's copies another leader knows, too. */
static void copies_on_other_hosts_are_left_to_the_next_leader(void **state) {
  even_device devices[] = {{.name = "cpu:0"}};
  const even_device_list list = {devices, 1};
  even_host_agent agents[] = {{.name = "a", .count = 1}};
  even_host_agent of_next[] = {{.name = "b", .count = 1}};
  even_hosts hosts = {.agents = agents, .count = 1, .self = 1, .params = {.copies = 2}};
  even_hosts next_hosts = {.agents = of_next, .count = 1, .self = 2, .params = {.copies = 2}};
  const even_agent_params params = {.devices = &list, .checkpoint_folder = "/c"};
  even_job job = {.params = &params, .hosts = &hosts, .id = "0123456789abcdef0123456789abcdef"};
  even_job next = {.params = &params, .hosts = &next_hosts};
  static const even_copies_left held = {
      .held = {{.host = "b", .folder = "/c/one", .order = "1"}, {.host = "c", .folder = "/c/one", .order = "1"}}};
  even_estate estate = {.self = 2};
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  even_text_add(&job.run_folder, "/runs/a");
  assert_int_equal(even_copies_take(&job, &held), EVEN_OK);
  assert_int_equal(even_estate_write(&job, &text), EVEN_OK);
  assert_int_equal(even_estate_read(text.data, text.length, &estate.content), EVEN_OK);
  assert_int_equal(even_estate_take(&estate, &next), EVEN_OK);
  assert_null(even_copies_of(&next, "b")); /* it is its own by now */
  assert_non_null(even_copies_of(&next, "c"));
  even_copies_close(hosts.copies);
  even_copies_close(next_hosts.copies);
  even_text_free(&text);
  even_text_free(&job.run_folder);
  even_text *const texts[] = {&next.resume, &next.foreign, &next.lineage, &next.began};
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
    even_text_free(texts[i]);
  }
  json_decref(estate.content);
}

static void leave(const even_job *job, uint64_t to, bool handed, const char *hosts) {
  even_estate estate = {.self = to};
  even_text text = EVEN_TEXT_EMPTY;
  even_text list = EVEN_TEXT_EMPTY;
  assert_int_equal(even_estate_write(job, &text), EVEN_OK);
  assert_int_equal(even_estate_read(text.data, text.length, &estate.content), EVEN_OK);
  assert_int_equal(even_estate_is_handed(&estate), handed);
  assert_int_equal(even_estate_hosts(&estate, &list), EVEN_OK);
  assert_string_equal(list.data, hosts);
  even_text_free(&text);
  even_text_free(&list);
  json_decref(estate.content);
}

/* The leader is to be drained, and c is, too. While the attempt runs yet, who is left it counts a restart. */
static void who_leaves_has_no_part_under_the_leader_that_it_is_handed_to(void **state) {
  even_host_agent agents[] = {{.name = "a"},
                              {.name = "b", .member = 2},
                              {.name = "c", .member = 3, .leaves = true},
                              {.name = "d", .member = 4}};
  even_hosts hosts = {.agents = agents, .count = 4, .self = 1, .hands_over = true};
  even_device_list none = {NULL, 0};
  const even_agent_params params = {.devices = &none, .checkpoint_folder = "/c"};
  even_job left = {.params = &params, .hosts = &hosts, .id = "0123456789abcdef0123456789abcdef"};
  (void)state;
  even_text_add(&left.run_folder, "/runs/a");
  leave(&left, 2, false, "b,c,d");
  hosts.handed = true;
  leave(&left, 2, true, "b,d");
  leave(&left, 3, true, "c,b,d"); /* where it leads itself */
  even_text_free(&left.run_folder);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_rank_has_the_quota_of_the_one_in_its_place),
      cmocka_unit_test(places_that_were_set_aside_are_left_to_the_next_leader),
      cmocka_unit_test(what_ranks_lack_and_restarts_are_left_to_the_next_leader),
      cmocka_unit_test(copies_on_other_hosts_are_left_to_the_next_leader),
      cmocka_unit_test(who_leaves_has_no_part_under_the_leader_that_it_is_handed_to),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
