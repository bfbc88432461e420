/* Links that have become slower than they were, of hosts that were never there: who is named, and who is not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "monitor/links.h"

#include <math.h>
#include <string.h>

enum { HOSTS = 4, TRANSFERS = 10 };

/* What a transfer from one host to another takes, in µs. */
static double way[HOSTS][HOSTS];
static int hosts;
static uint64_t bytes;
static even_links *links;
static bool holds_up[HOSTS];

static int set_up(void **state) {
  (void)state;
  for (int from = 0; from < HOSTS; from++) {
    holds_up[from] = false;
    for (int to = 0; to < HOSTS; to++) {
      way[from][to] = 500;
    }
  }
  hosts = 3;
  bytes = 65536;
  return even_links_open(&links) == EVEN_OK ? 0 : -1;
}

static int tear_down(void **state) {
  (void)state;
  even_links_close(links);
  return 0;
}

/* Two ranks a host: the second one speaks for it. */
/* Transfers take 0.5 ms usually, and 4 ms where a link is slow. */
static double excused(const void *context, int rank) {
  (void)context;
  return holds_up[rank / 2] ? 0.0036 : 0;
}

/* A second: what all hosts told of it, and a look. */
static bool second(even_link_news *news) {
  for (int own = 0; own < hosts; own++) {
    for (int peer = 0; peer < hosts; peer++) {
      const even_leg_record record = {
          .own = 100 + (uint32_t)own,
          .peer = 100 + (uint32_t)peer,
          .transfers = TRANSFERS,
          .bytes = TRANSFERS * bytes,
          .ns = (uint64_t)(1e3 * (double)TRANSFERS * way[peer][own]),
      };
      if (own != peer) {
        even_links_take(links, 2 * own + 1, &record);
      }
    }
  }
  return even_links_look(links, 200e-6, excused, NULL, news);
}

/* So many seconds in which nothing is told. */
static void quiet(int seconds) {
  even_link_news news;
  for (int i = 0; i < seconds; i++) {
    assert_false(second(&news));
  }
}

static even_link_news told_within(int seconds) {
  even_link_news news = {.rank = -1};
  for (int i = 0; i < seconds; i++) {
    if (second(&news)) {
      return news;
    }
  }
  fail_msg("nothing is told in %d seconds", seconds);
  return news;
}

static void slow_down(int host, double times, bool out, bool in) {
  for (int other = 0; other < hosts; other++) {
    way[host][other] *= other != host && out ? times : 1;
    way[other][host] *= other != host && in ? times : 1;
  }
}

static void the_host_is_named_all_of_whose_ways_are_slow(void **state) {
  (void)state;
  quiet(30);
  slow_down(1, 8, true, true);
  quiet(EVEN_LINK_LOOKS - 1); /* once is nothing */
  even_link_news news = told_within(1);
  assert_int_equal(news.rank, 3);
  assert_int_equal(news.other, -1);
  assert_false(news.over || news.all);
  assert_true(news.factor > 7.9 && news.factor < 8.1);
  assert_true(news.usual_seconds > 0.00049 && news.usual_seconds < 0.00051 && news.seconds > 0.0039);
  assert_true(even_links_lasts(links, &news));
  quiet(50); /* told once, and not learnt as usual */
  slow_down(1, 1.0 / 8, true, true);
  news = told_within(3);
  assert_true(news.over && news.rank == 3 && news.factor > 7.9);
  assert_false(even_links_lasts(links, &news));
  quiet(20);
}

static void one_direction_is_enough(void **state) {
  (void)state;
  quiet(10);
  slow_down(2, 5, true, false);
  assert_int_equal(told_within(4).rank, 5);
  slow_down(2, 0.2, true, false);
  assert_true(told_within(4).over);
  slow_down(0, 5, false, true);
  assert_int_equal(told_within(4).rank, 1);
}

static void of_two_hosts_both_are_named(void **state) {
  (void)state;
  hosts = 2;
  quiet(10);
  slow_down(1, 4, true, true);
  even_link_news news = told_within(4);
  assert_true((news.rank == 1 && news.other == 3) || (news.rank == 3 && news.other == 1));
}

static void what_slows_all_is_no_ones(void **state) {
  (void)state;
  hosts = 4;
  quiet(10);
  for (int from = 0; from < HOSTS; from++) {
    slow_down(from, 4, true, false);
  }
  assert_true(told_within(4).all);
}

/* Another factor and another time than the usual ones; and none at all. */
static void what_is_slow_may_be_said(void **state) {
  (void)state;
  even_links_limit(links, 6, 5);
  quiet(10);
  slow_down(1, 5, true, true);
  quiet(20);
  slow_down(1, 2, true, true);
  quiet(4);
  assert_int_equal(told_within(1).rank, 3);
  slow_down(1, 0.1, true, true);
  assert_true(told_within(5).over);
  even_links_forget(links); /* other processes: the limit stays */
  quiet(10);
  slow_down(1, 5, true, true);
  quiet(20);
  even_links_forget(links);
  even_links_limit(links, (double)INFINITY, 0);
  slow_down(1, 0.2, true, true);
  quiet(10);
  slow_down(1, 1000, true, true);
  quiet(20);
}

/* A second is enough for both, and what is slow for longer is told once. */
static void one_second_may_be_enough(void **state) {
  (void)state;
  even_links_limit(links, 3, 1);
  quiet(10);
  slow_down(1, 8, true, true);
  even_link_news news = told_within(1);
  assert_true(news.rank == 3 && !news.over);
  quiet(20);
  slow_down(1, 1.0 / 8, true, true);
  assert_true(told_within(1).over);
  quiet(20);
}

/* One way between two of four: neither is slow to the others. */
static void a_single_way_names_nobody(void **state) {
  (void)state;
  hosts = 4;
  quiet(10);
  way[1][2] *= 10;
  quiet(20);
}

static void who_has_no_processor_is_excused(void **state) {
  (void)state;
  quiet(10);
  holds_up[1] = true;
  slow_down(1, 8, true, true);
  quiet(20);
  slow_down(1, 2, true, true); /* but not for everything */
  assert_int_equal(told_within(4).rank, 3);
}

static void what_is_too_little_is_not_told(void **state) {
  (void)state;
  for (int from = 0; from < HOSTS; from++) {
    for (int to = 0; to < HOSTS; to++) {
      way[from][to] = 20;
    }
  }
  quiet(10);
  slow_down(1, 8, true, true); /* 140 µs more */
  quiet(20);
}

/* Other transfers, over the same links. */
static void larger_transfers_take_longer(void **state) {
  (void)state;
  quiet(10);
  bytes *= 8;
  for (int from = 0; from < HOSTS; from++) {
    slow_down(from, 8, true, false);
  }
  quiet(20);
}

static void other_processes_learn_anew(void **state) {
  (void)state;
  quiet(10);
  even_links_forget(links);
  slow_down(1, 8, true, true);
  quiet(30);
}

static void noise_of_hosts_that_are_none_does_no_harm(void **state) {
  (void)state;
  even_link_news news;
  for (uint32_t mark = 0; mark < 1000; mark++) {
    const even_leg_record record = {
        .own = mark, .peer = mark + mark % 7, .transfers = UINT32_MAX, .bytes = mark, .ns = UINT64_MAX};
    even_links_take(links, (int)mark, &record);
    (void)even_links_look(links, 0, excused, NULL, &news);
  }
}

#define LINK_TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {
      LINK_TEST(the_host_is_named_all_of_whose_ways_are_slow),
      LINK_TEST(one_direction_is_enough),
      LINK_TEST(of_two_hosts_both_are_named),
      LINK_TEST(what_slows_all_is_no_ones),
      LINK_TEST(what_is_slow_may_be_said),
      LINK_TEST(one_second_may_be_enough),
      LINK_TEST(a_single_way_names_nobody),
      LINK_TEST(who_has_no_processor_is_excused),
      LINK_TEST(what_is_too_little_is_not_told),
      LINK_TEST(larger_transfers_take_longer),
      LINK_TEST(other_processes_learn_anew),
      LINK_TEST(noise_of_hosts_that_are_none_does_no_harm),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
