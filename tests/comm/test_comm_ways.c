/* The way of a collective follows what calls cost, what is known of them beforehand, and what is asked for. */
#include "comm/ways.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { PARTS, WHOLE };
static const char *const names[] = {"parts", "whole"};

#define SMALL ((size_t)20000)
#define LARGE ((size_t)900000)

/* Invented costs: what begins a call, and each byte, in each way. */
typedef struct network {
  double begin_ns[2];
  double byte_ns[2];
} network;

/* The larger the data, the more counts that "whole" sends more of them. */
static const network crossing = {.begin_ns = {60000, 30000}, .byte_ns = {0.5, 0.8}};
static const network slow_whole = {.begin_ns = {60000, 3000000}, .byte_ns = {0.5, 8}};

static uint64_t clock_ns = 1;

static int one_call(even_ways *ways, const network *on, size_t bytes, double held_up_ns) {
  int way = even_ways_next(ways, bytes);
  even_ways_call_begins(ways, clock_ns);
  assert_int_equal(even_ways_next(ways, bytes), way);
  clock_ns += (uint64_t)(on->begin_ns[way] + on->byte_ns[way] * (double)bytes + held_up_ns);
  even_ways_call_ends(ways, bytes, clock_ns);
  return way;
}

/* How many of `calls` calls went that way. */
static int calls_in(even_ways *ways, const network *on, int calls, size_t bytes, int way) {
  int found = 0;
  for (int i = 0; i < calls; i++) {
    found += one_call(ways, on, bytes, 0) == way;
  }
  return found;
}

static void small_calls_may_begin_with_another_way(void **state) {
  even_ways ways;
  (void)state;
  even_ways_start(&ways, "broadcast", names, 2);
  even_ways_begin_small(&ways, (size_t)256 << 10, WHOLE);
  assert_int_equal(even_ways_next(&ways, SMALL), WHOLE);
  assert_int_equal(even_ways_next(&ways, ((size_t)256 << 10) - 1), WHOLE);
  assert_int_equal(even_ways_next(&ways, (size_t)256 << 10), PARTS);
  /* the trial is as any other: half of it each way, and the better one stays */
  assert_int_equal(calls_in(&ways, &crossing, EVEN_WAYS_TRIAL, SMALL, WHOLE), EVEN_WAYS_TRIAL / 2);
  assert_int_equal(even_ways_next(&ways, SMALL), WHOLE);
  even_ways_follow(&ways, NULL, NULL, "");
  assert_int_equal(even_ways_next(&ways, SMALL), WHOLE);
  (void)calls_in(&ways, &slow_whole, EVEN_WAYS_TRIAL, SMALL, WHOLE);
  assert_int_equal(even_ways_next(&ways, SMALL), PARTS);
  even_ways_end(&ways);
}

static void each_size_finds_its_way(void **state) {
  even_ways ways;
  (void)state;
  even_ways_start(&ways, "all_reduce", names, 2);
  assert_int_equal(even_ways_next(&ways, SMALL), PARTS);
  assert_false(even_ways_known(&ways, SMALL));
  assert_int_equal(even_ways_lacking(&ways, 1 << 20), 1 << 20);
  assert_int_equal(even_ways_lacking(&ways, 600000), 512 << 10);
  assert_int_equal(even_ways_lacking(&ways, 1000), 0);
  (void)calls_in(&ways, &crossing, EVEN_WAYS_TRIAL, SMALL, WHOLE);
  (void)calls_in(&ways, &crossing, EVEN_WAYS_TRIAL, LARGE, WHOLE);
  assert_true(even_ways_known(&ways, SMALL) && even_ways_known(&ways, LARGE));
  assert_true(calls_in(&ways, &crossing, 300, SMALL, WHOLE) >= 280);
  assert_true(calls_in(&ways, &crossing, 300, LARGE, PARTS) >= 280);
  char text[512] = "UCX";
  even_ways_describe(&ways, text, sizeof text);
  assert_non_null(strstr(text, "UCX; all_reduce by cost: 32 KB whole ("));
  assert_non_null(strstr(text, " 512 KB parts ("));
  for (size_t room = 4; room < sizeof text; room++) { /* cut wherever it has to be */
    char cut[512] = "UCX";
    even_ways_describe(&ways, cut, room);
    assert_true(strlen(cut) < room);
  }
}

static void it_follows_a_change(void **state) {
  even_ways ways;
  (void)state;
  even_ways_start(&ways, "all_reduce", names, 2);
  (void)calls_in(&ways, &crossing, 2000, SMALL, WHOLE);
  (void)calls_in(&ways, &slow_whole, 3000, SMALL, WHOLE);
  assert_true(calls_in(&ways, &slow_whole, 1000, SMALL, PARTS) == 1000); /* hopeless: not even tried */
}

static void one_call_that_is_held_up_decides_nothing(void **state) {
  even_ways ways;
  (void)state;
  for (int held = 0; held < EVEN_WAYS_TRIAL; held++) {
    even_ways_start(&ways, "all_reduce", names, 2);
    for (int call = 0; call < EVEN_WAYS_TRIAL; call++) {
      (void)one_call(&ways, &crossing, SMALL, call == held ? 1e9 : 0);
    }
    assert_int_equal(even_ways_next(&ways, SMALL), WHOLE);
  }
}

static void what_is_known_is_not_measured_again(void **state) {
  even_comm_costs *costs = NULL;
  even_ways ways;
  (void)state;
  assert_int_equal(even_comm_costs_open(&costs), EVEN_OK);
  even_ways_start(&ways, "all_reduce", names, 2);
  even_ways_follow(&ways, costs, "two hosts", "ucx");
  (void)calls_in(&ways, &crossing, EVEN_WAYS_TRIAL, SMALL, WHOLE);
  (void)calls_in(&ways, &crossing, EVEN_WAYS_TRIAL, LARGE, WHOLE);
  even_ways_end(&ways);
  even_comm_cost_key key = {
      .collective = "all_reduce", .shape = "two hosts", .engine = "ucx", .way = "whole", .bytes = 32768};
  double seconds = 0;
  assert_true(even_comm_costs_find(costs, &key, &seconds));
  double wanted = (30000 + 0.8 * (double)SMALL) * 1e-9 * 32768 / (double)SMALL;
  assert_true(fabs(seconds / wanted - 1) < 0.01);

  even_ways_start(&ways, "all_reduce", names, 2);
  even_ways_follow(&ways, costs, "two hosts", "ucx");
  assert_int_equal(even_ways_lacking(&ways, 1 << 20), 0);
  assert_int_equal(calls_in(&ways, &crossing, 100, SMALL, WHOLE), 100);
  assert_int_equal(calls_in(&ways, &crossing, 100, LARGE, PARTS), 100);
  even_ways_follow(&ways, costs, "three hosts", "ucx"); /* of which nothing is known */
  even_ways_end(&ways);
  even_ways_start(&ways, "all_reduce", names, 2);
  even_ways_follow(&ways, costs, "three hosts", "ucx");
  assert_int_equal(even_ways_lacking(&ways, 1 << 20), 1 << 20);
  even_ways_end(&ways);
  even_comm_costs_close(costs);
}

/* What a table has of a busy day is looked at again, but not for ever. */
static void what_was_found_once_does_not_stand_for_good(void **state) {
  even_comm_costs *costs = NULL;
  even_ways ways;
  even_comm_cost_key key = {
      .collective = "all_reduce", .shape = "two hosts", .engine = "ucx", .way = "whole", .bytes = 32768};
  (void)state;
  for (int slow = 0; slow < 2; slow++) {
    const network *on = slow ? &slow_whole : &crossing;
    assert_int_equal(even_comm_costs_open(&costs), EVEN_OK);
    key.way = "whole";
    assert_int_equal(even_comm_costs_add(costs, &key, 1.0), EVEN_OK);
    key.way = "parts";
    assert_int_equal(even_comm_costs_add(costs, &key, 1e-4), EVEN_OK);
    even_ways_start(&ways, "all_reduce", names, 2);
    even_ways_follow(&ways, costs, "two hosts", "ucx");
    assert_int_equal(even_ways_next(&ways, SMALL), PARTS);
    (void)calls_in(&ways, on, 4000, SMALL, WHOLE);
    assert_int_equal(calls_in(&ways, on, 3000, SMALL, WHOLE) > 2900, !slow);
    assert_true(!slow || calls_in(&ways, on, 3000, SMALL, PARTS) == 3000);
    even_ways_end(&ways);
    even_comm_costs_close(costs);
  }
}

static void what_is_asked_for_is_taken(void **state) {
  even_ways ways;
  char text[64] = "UCX";
  (void)state;
  even_ways_start(&ways, "all_reduce", names, 2);
  assert_int_equal(even_ways_named(&ways, "whole"), WHOLE);
  assert_int_equal(even_ways_named(&ways, "sideways"), -1);
  even_ways_force(&ways, WHOLE);
  assert_int_equal(calls_in(&ways, &slow_whole, 500, LARGE, WHOLE), 500);
  assert_int_equal(even_ways_lacking(&ways, 1 << 20), 0);
  even_ways_describe(&ways, text, sizeof text);
  assert_string_equal(text, "UCX; all_reduce: whole, as asked for");
}

static void only_sizes_that_have_ways_are_named(void **state) {
  even_comm_costs *costs = NULL;
  even_ways ways;
  char text[1024] = "UCX";
  (void)state;
  assert_int_equal(even_comm_costs_open(&costs), EVEN_OK);
  for (int way = 0; way < 2; way++) {
    const even_comm_cost_key key = {
        .collective = "all_reduce", .shape = "two hosts", .engine = "ucx", .way = names[way], .bytes = SMALL};
    assert_int_equal(even_comm_costs_add(costs, &key, 1e-4 * (way + 1)), EVEN_OK);
  }
  even_ways_start(&ways, "all_reduce", names, 2);
  even_ways_follow(&ways, costs, "two hosts", "ucx");
  even_ways_describe(&ways, text, sizeof text);
  assert_non_null(strstr(text, "UCX; all_reduce by cost: 8 KB "));
  assert_non_null(strstr(text, " 2 MB "));
  assert_null(strstr(text, " 8 MB "));
  even_ways_end(&ways);
  even_comm_costs_close(costs);
}

static void one_way_is_no_choice(void **state) {
  even_ways ways;
  (void)state;
  even_ways_start(&ways, "all_reduce", names, 1);
  assert_int_equal(calls_in(&ways, &crossing, 100, SMALL, PARTS), 100);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(each_size_finds_its_way),
      cmocka_unit_test(small_calls_may_begin_with_another_way),
      cmocka_unit_test(it_follows_a_change),
      cmocka_unit_test(one_call_that_is_held_up_decides_nothing),
      cmocka_unit_test(what_is_known_is_not_measured_again),
      cmocka_unit_test(what_was_found_once_does_not_stand_for_good),
      cmocka_unit_test(what_is_asked_for_is_taken),
      cmocka_unit_test(only_sizes_that_have_ways_are_named),
      cmocka_unit_test(one_way_is_no_choice),
  };
  return cmocka_run_group_tests_name("comm_ways", tests, NULL, NULL);
}
