/* Where the ranks of a host that is drained go. */
#include "orchestrator/places.h"

#include "base/fail.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { HOSTS = 4 };

/* a and b of four places each, with one rank and two; c is drained, with three; d is new. */
static void make(even_places_host *hosts) {
  const even_places_host all[HOSTS] = {{.name = "a", .ranks = 1, .places = 4},
                                       {.name = "b", .ranks = 2, .places = 4},
                                       {.name = "c", .ranks = 3, .places = 8, .leaves = true},
                                       {.name = "d"}};
  memcpy(hosts, all, sizeof all);
}

static void gets(const even_places_host *hosts, size_t a, size_t b, size_t d) {
  assert_int_equal(hosts[0].gets, a);
  assert_int_equal(hosts[1].gets, b);
  assert_int_equal(hosts[2].gets, 0);
  assert_int_equal(hosts[3].gets, d);
}

static void without_a_word_they_go_where_most_places_are_left(void **state) {
  even_places_host hosts[HOSTS];
  size_t moved = 0;
  (void)state;
  make(hosts);
  assert_int_equal(even_places_share(hosts, HOSTS, &moved), EVEN_OK);
  assert_int_equal(moved, 3);
  gets(hosts, 2, 1, 0);
  hosts[0].ranks = 4; /* every place is taken */
  assert_int_equal(even_places_share(hosts, HOSTS, &moved), EVEN_OK);
  assert_int_equal(moved, 2);
  gets(hosts, 0, 2, 0);
  hosts[1].ranks = 6; /* more than it has places, by its user's word */
  assert_int_equal(even_places_share(hosts, HOSTS, &moved), EVEN_OK);
  assert_int_equal(moved, 0);
  gets(hosts, 0, 0, 0);
}

static void a_word_is_taken_as_it_is(void **state) {
  even_places_host hosts[HOSTS];
  size_t moved = 0;
  (void)state;
  make(hosts);
  hosts[1].named = true;
  hosts[1].wish = 3; /* beyond its places */
  assert_int_equal(even_places_share(hosts, HOSTS, &moved), EVEN_OK);
  assert_int_equal(moved, 3);
  gets(hosts, 0, 3, 0);
  hosts[1].wish = 1; /* fewer than leave: no others are started */
  assert_int_equal(even_places_share(hosts, HOSTS, &moved), EVEN_OK);
  assert_int_equal(moved, 1);
  gets(hosts, 0, 1, 0);
}

static void the_rest_goes_evenly_to_those_of_which_nothing_is_said(void **state) {
  even_places_host hosts[HOSTS];
  size_t moved = 0;
  (void)state;
  make(hosts);
  hosts[3].named = true;
  assert_int_equal(even_places_share(hosts, HOSTS, &moved), EVEN_OK);
  assert_int_equal(moved, 3);
  gets(hosts, 0, 0, 3);
  hosts[0].named = true;
  assert_int_equal(even_places_share(hosts, HOSTS, &moved), EVEN_OK);
  assert_int_equal(moved, 3);
  gets(hosts, 2, 0, 1);
  hosts[0].wish = 3; /* nothing is left for the other one */
  assert_int_equal(even_places_share(hosts, HOSTS, &moved), EVEN_OK);
  gets(hosts, 3, 0, 0);
}

static void what_makes_no_sense_is_refused(void **state) {
  even_places_host hosts[HOSTS];
  size_t moved = 0;
  (void)state;
  make(hosts);
  hosts[2].named = true;
  assert_int_equal(even_places_share(hosts, HOSTS, &moved), EVEN_ERR_USAGE);
  assert_string_equal(even_error_last()->what, "host c is to be drained, and to take ranks");
  make(hosts);
  hosts[0].named = hosts[3].named = true;
  hosts[0].wish = hosts[3].wish = 2;
  assert_int_equal(even_places_share(hosts, HOSTS, &moved), EVEN_ERR_USAGE);
  assert_string_equal(even_error_last()->what, "--to has places for 4 ranks, and 3 leave");
  even_error_clear();
}

/* Whatever the numbers: nobody gets more than he has places for, and nobody goes without where a place is left. */
static void no_place_is_left_while_a_rank_has_none(void **state) {
  (void)state;
  for (size_t code = 0; code < 6 * 6 * 6 * 6 * 6; code++) {
    size_t rest = code;
    even_places_host hosts[3] = {{.name = "a"}, {.name = "b"}, {.name = "c", .leaves = true, .places = 5}};
    size_t *const numbers[] = {&hosts[0].ranks, &hosts[0].places, &hosts[1].ranks, &hosts[1].places, &hosts[2].ranks};
    for (size_t i = 0; i < 5; i++) {
      *numbers[i] = rest % 6;
      rest /= 6;
    }
    size_t moved = 0;
    size_t left = 0;
    assert_int_equal(even_places_share(hosts, 3, &moved), EVEN_OK);
    for (size_t i = 0; i < 2; i++) {
      assert_true(hosts[i].gets == 0 || hosts[i].ranks + hosts[i].gets <= hosts[i].places);
      size_t taken = hosts[i].ranks + hosts[i].gets;
      left += hosts[i].places > taken ? hosts[i].places - taken : 0;
    }
    assert_int_equal(hosts[0].gets + hosts[1].gets, moved);
    assert_int_equal(hosts[2].gets, 0);
    assert_true(moved == hosts[2].ranks || (moved < hosts[2].ranks && left == 0));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(without_a_word_they_go_where_most_places_are_left),
      cmocka_unit_test(a_word_is_taken_as_it_is),
      cmocka_unit_test(the_rest_goes_evenly_to_those_of_which_nothing_is_said),
      cmocka_unit_test(what_makes_no_sense_is_refused),
      cmocka_unit_test(no_place_is_left_while_a_rank_has_none),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
