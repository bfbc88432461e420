/* What a rank of another host tells of its calls: it may come by several groups, in any order, and be written by
 * several ranks of a host at once. */
#include "comm/flight.h"
#include "comm/flight_record.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS = 3, TELLER = 2 };

static even_flight_record records[RANKS];

static even_flight_writer fresh(void) {
  memset(records, 0, sizeof records);
  return (even_flight_writer){.records = records, .stride = sizeof records[0], .rank = 0, .ranks = RANKS};
}

static even_flight_report report(uint64_t number, uint32_t state, const char *site) {
  even_flight_report out = {.rank = TELLER, .state = state, .number = number, .count = 4, .said = site ? number : 0};
  (void)snprintf(out.site, sizeof out.site, "%s", site != NULL ? site : "");
  return out;
}

static void expect(const even_flight_writer *flight, uint64_t number, uint32_t state, const char *site) {
  even_flight_call call;
  assert_int_equal(even_flight_calls(flight, TELLER, &call, 1), 1);
  assert_true(call.number == number);
  assert_int_equal(call.state, state);
  assert_string_equal(call.site, site);
}

static void a_late_report_takes_nothing_back(void **state) {
  even_flight_writer flight = fresh();
  (void)state;
  const even_flight_report begun = report(5, EVEN_FLIGHT_BEGUN, NULL);
  const even_flight_report said = report(5, EVEN_FLIGHT_BEGUN, "train.py:3");
  const even_flight_report done = report(4, EVEN_FLIGHT_DONE, NULL);
  const even_flight_report next = report(6, EVEN_FLIGHT_DONE, NULL);
  const even_flight_report again = report(6, EVEN_FLIGHT_BEGUN, NULL);
  even_flight_report_keep(&flight, &begun, false);
  expect(&flight, 5, EVEN_FLIGHT_BEGUN, "");
  assert_false(even_flight_has_said(&flight, TELLER, 5));
  even_flight_report_keep(&flight, &said, false);
  expect(&flight, 5, EVEN_FLIGHT_BEGUN, "train.py:3");
  even_flight_report_keep(&flight, &begun, true); /* begun earlier, by another group */
  even_flight_report_keep(&flight, &done, true);
  expect(&flight, 5, EVEN_FLIGHT_BEGUN, "train.py:3");
  assert_true(even_flight_has_said(&flight, TELLER, 5));
  assert_true(even_flight_is_last(&flight, TELLER));
  even_flight_report_keep(&flight, &next, false);
  even_flight_report_keep(&flight, &again, false);
  expect(&flight, 6, EVEN_FLIGHT_DONE, "");
}

static void reports_of_others_are_refused(void **state) {
  even_flight_writer flight = fresh();
  even_flight_call call;
  (void)state;
  for (int rank = -1; rank <= RANKS; rank += RANKS + 1) {
    even_flight_report wrong = report(5, EVEN_FLIGHT_BEGUN, "x.c:1");
    wrong.rank = rank;
    even_flight_report_keep(&flight, &wrong, true);
  }
  even_flight_report own = report(5, EVEN_FLIGHT_BEGUN, "x.c:1");
  own.rank = 0;
  even_flight_report_keep(&flight, &own, true);
  for (int rank = 0; rank < RANKS; rank++) {
    assert_int_equal(even_flight_calls(&flight, rank, &call, 1), 0);
    assert_false(even_flight_is_last(&flight, rank));
  }
}

/* Nobody's report is lost while another rank writes: also not where that one died at it. */
static void a_report_waits_for_another_writer(void **state) {
  even_flight_writer flight = fresh();
  (void)state;
  atomic_store(&records[TELLER].taken, 1u);
  const even_flight_report said = report(5, EVEN_FLIGHT_FAILED, "train.py:3");
  even_flight_report_keep(&flight, &said, true);
  expect(&flight, 5, EVEN_FLIGHT_FAILED, "train.py:3");
  assert_true(even_flight_has_said(&flight, TELLER, 5));
}

static void *tell(void *argument) {
  const even_flight_writer *flight = argument;
  for (uint64_t number = 1; number <= 2000; number++) {
    const even_flight_report begun = report(number, EVEN_FLIGHT_BEGUN, NULL);
    const even_flight_report said = report(number, EVEN_FLIGHT_FAILED, "train.py:3");
    even_flight_report_keep(flight, &begun, false);
    even_flight_report_keep(flight, &said, false);
  }
  return NULL;
}

static void two_ranks_of_a_host_write_the_same(void **state) {
  even_flight_writer flight = fresh();
  even_flight_writer other = flight;
  pthread_t thread;
  (void)state;
  other.rank = 1;
  assert_int_equal(pthread_create(&thread, NULL, tell, &other), 0);
  for (uint64_t number = 1; number <= 2000; number++) {
    const even_flight_report said = report(number, EVEN_FLIGHT_FAILED, "train.py:3");
    char text[EVEN_FLIGHT_SITE_BYTES];
    even_flight_report_keep(&flight, &said, false);
    even_flight_site_of(&flight, TELLER, number, text, sizeof text); /* whole, or none: the other may be at the next */
    assert_true(text[0] == '\0' || strcmp(text, " at train.py:3") == 0);
  }
  (void)pthread_join(thread, NULL);
  expect(&flight, 2000, EVEN_FLIGHT_FAILED, "train.py:3");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_late_report_takes_nothing_back),
      cmocka_unit_test(reports_of_others_are_refused),
      cmocka_unit_test(a_report_waits_for_another_writer),
      cmocka_unit_test(two_ranks_of_a_host_write_the_same),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
