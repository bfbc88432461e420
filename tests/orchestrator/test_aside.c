/* Which place is set aside, for how long, and when it takes part again. */
#include "orchestrator/aside_hosts.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static const uint64_t second = 1000000000u;

/* Of four ranks. */
static const even_aside_place *failed(even_aside *aside, int rank, uint64_t now) {
  const even_aside_place *one = NULL;
  even_aside_failed(aside, "", rank, "cpu:0", 4, 1, now * second, &one);
  return one;
}

static void two_attempts_in_a_row(void **state) {
  even_aside aside = {.count = 0};
  (void)state;
  assert_null(failed(&aside, 1, 1));
  assert_null(failed(&aside, 0, 2));
  assert_null(failed(&aside, 1, 3));  /* not in a row */
  assert_null(failed(&aside, -1, 4)); /* nobody's fault */
  assert_null(failed(&aside, 1, 5));
  assert_false(aside.changed);
  const even_aside_place *one = failed(&aside, 1, 6);
  assert_non_null(one);
  assert_int_equal(one->place, 1);
  assert_string_equal(one->device, "cpu:0");
  assert_true(aside.changed && even_aside_has(&aside, "", 1) && !even_aside_has(&aside, "", 0) &&
              !even_aside_has(&aside, "", 2));
  assert_int_equal(one->until_ns / second, 66);
}

/* All four are on one device, and numbered anew without one of them. */
static void places_keep_their_numbers(void **state) {
  even_aside aside = {.count = 0};
  (void)state;
  assert_null(failed(&aside, 1, 1));
  assert_non_null(failed(&aside, 1, 1));
  assert_int_equal(even_aside_place_of(&aside, "", 0), 0);
  assert_int_equal(even_aside_place_of(&aside, "", 1), 2);
  assert_int_equal(even_aside_place_of(&aside, "", 2), 3);
  assert_null(failed(&aside, 1, 2)); /* another place now */
  const even_aside_place *one = failed(&aside, 1, 2);
  assert_non_null(one);
  assert_int_equal(one->place, 2);
  assert_int_equal(even_aside_place_of(&aside, "", 1), 3);
  assert_int_equal(even_aside_return(&aside, 61 * second)->place, 1);
  assert_int_equal(even_aside_place_of(&aside, "", 1), 1);
  assert_int_equal(even_aside_place_of(&aside, "", 2), 3);
  assert_null(even_aside_return(&aside, 61 * second));
}

static void the_time_grows_to_an_hour(void **state) {
  even_aside aside = {.count = 0};
  uint64_t now = 0;
  (void)state;
  for (unsigned i = 0; i < 8; i++) {
    static const uint64_t seconds[] = {60, 120, 240, 480, 960, 1920, 3600, 3600};
    assert_null(failed(&aside, 1, now));
    const even_aside_place *one = failed(&aside, 1, now);
    assert_non_null(one);
    assert_int_equal(one->until_ns / second - now, seconds[i]);
    assert_null(even_aside_return(&aside, one->until_ns - 1));
    now += seconds[i];
    aside.changed = false;
    assert_ptr_equal(even_aside_return(&aside, now * second), one);
    assert_true(aside.changed);
    assert_false(even_aside_has(&aside, "", 1));
    assert_null(even_aside_return(&aside, now * second));
  }
}

static void the_last_ranks_stay(void **state) {
  even_aside aside = {.count = 0};
  const even_aside_place *one = NULL;
  (void)state;
  for (int i = 0; i < 4; i++) {
    even_aside_failed(&aside, "", 0, "cpu:0", 1, 1, second, &one);
    assert_null(one);
    even_aside_failed(&aside, "", 1, "cpu:1", 2, 2, second, &one);
    even_aside_failed(&aside, "", 1, "cpu:1", 2, 2, second, &one);
    assert_null(one);
  }
  even_aside_failed(&aside, "", 1, "cpu:1", 3, 2, second, &one);
  assert_non_null(one);
}

/* Each host counts its own. */
static void places_are_of_hosts(void **state) {
  even_aside aside = {.count = 0};
  const even_aside_place *one = NULL;
  (void)state;
  even_aside_failed(&aside, "a", 1, "cpu:1", 4, 1, second, &one);
  even_aside_failed(&aside, "b", 1, "cpu:1", 4, 1, second, &one);
  assert_null(one); /* another one's */
  even_aside_failed(&aside, "b", 1, "cpu:1", 4, 1, second, &one);
  assert_non_null(one);
  assert_string_equal(one->host, "b");
  assert_true(even_aside_has(&aside, "b", 1) && !even_aside_has(&aside, "a", 1));
  assert_int_equal(even_aside_place_of(&aside, "a", 1), 1);
  assert_int_equal(even_aside_place_of(&aside, "b", 1), 2);
}

/* More of them fail than are remembered: those stay in. */
static void many_places(void **state) {
  even_aside aside = {.count = 0};
  const even_aside_place *one = NULL;
  (void)state;
  for (size_t i = 0; i <= EVEN_ASIDE_MOST; i++) {
    for (int times = 0; times < 2; times++) {
      even_aside_failed(&aside, "", 0, "cpu:0", 200 - i, 1, second, &one);
    }
    assert_true((one != NULL) == (i < EVEN_ASIDE_MOST));
  }
  assert_int_equal(even_aside_place_of(&aside, "", 0), EVEN_ASIDE_MOST);
}

/* Whether a's first place, b's first and b's second are set aside under another leader (of ranks 2, 2 and a witness):
 * the times of b's are over at 50 s and 200 s, a's at 100 s. */
static void check_after(int64_t least, uint64_t now, bool a, bool b, bool second_of_b) {
  even_device devices[] = {{.name = "cpu:0"}, {.name = "cpu:1"}};
  const even_device_list own = {devices, 2};
  even_host_agent agents[] = {
      {.name = "a"}, {.name = "b", .devices = own}, {.name = "c"}, {.name = "d", .witness = true}};
  const even_hosts hosts = {.agents = agents, .count = 4};
  even_aside aside = {.items = {{"a", 0, "cpu:0", 1, 100 * second},
                                {"b", 0, "cpu:0", 1, 50 * second},
                                {"b", 1, "cpu:1", 2, 200 * second}},
                      .count = 3};
  even_aside_hosts_return(&hosts, &own, least, now * second, &aside);
  assert_int_equal(even_aside_has(&aside, "a", 0), a);
  assert_int_equal(even_aside_has(&aside, "b", 0), b);
  assert_int_equal(even_aside_has(&aside, "b", 1), second_of_b);
  assert_false(even_aside_has(&aside, "a", 1));
}

/* One whose time is over may be the one that its host needs: the others stay out. */
static void another_leader_has_enough(void **state) {
  (void)state;
  check_after(0, 50, true, false, true);
  check_after(2, 50, true, false, true);
  check_after(3, 100, false, false, true);
  check_after(4, 200, false, false, false);
}

static void where_another_leader_lacks_ranks_all_take_part(void **state) {
  (void)state;
  check_after(0, 50 - 1, false, false, false); /* none of b */
  check_after(3, 50, false, false, false);     /* fewer than --min-ranks */
  check_after(4, 100, false, false, false);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(two_attempts_in_a_row),     cmocka_unit_test(places_keep_their_numbers),
      cmocka_unit_test(the_time_grows_to_an_hour), cmocka_unit_test(the_last_ranks_stay),
      cmocka_unit_test(places_are_of_hosts),       cmocka_unit_test(many_places),
      cmocka_unit_test(another_leader_has_enough), cmocka_unit_test(where_another_leader_lacks_ranks_all_take_part),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
